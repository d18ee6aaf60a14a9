"""Log-probabilities of tokens under the model's own distribution: before bias, penalties and temperature.

This is vLLM's `raw_logprobs`. All values are finite, as JSON needs it: an alternative of probability zero is
left out, a token of probability zero that was chosen (`logit_bias` forced it) or asked for gets FLOOR.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.runtime.messages import TokenLogprob

FLOOR = -9999.0  # nats; what OpenAI's API reports for "as good as impossible"
CHUNK_ROWS = 64  # bounds the float32 copy to 64 * vocabulary * 4 bytes


def token_logprobs(
    logits_RV: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    asked: Sequence[tuple[int, ...]] | None = None,
) -> list[TokenLogprob]:
    """One record per row: its token, the rank (1 + tokens that are strictly likelier), the best `num_top`.

    `asked`: of each row, tokens that take the place of the best (if there are any), in their order.

    Equally likely alternatives come in the order of their ids. Raises EngineError when a row has NaN or no
    finite value. For prompt log-probabilities, `token_ids` are the prompt tokens that follow the rows.
    """
    records: list[TokenLogprob] = []
    for at in range(0, len(token_ids), CHUNK_ROWS):
        chunk = slice(at, at + CHUNK_ROWS)
        wanted = asked[chunk] if asked is not None else [()] * len(token_ids[chunk])
        records += _chunk_logprobs(logits_RV[chunk], token_ids[chunk], num_top[chunk], wanted)
    return records


def _chunk_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int], asked: Sequence[tuple[int, ...]]
) -> list[TokenLogprob]:
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    if bool(logprobs_RV.isnan().any()):
        raise EngineError("the model gave NaN or infinite logits, so there are no log-probabilities")
    chosen_R1 = torch.tensor(token_ids, device=logits_RV.device).unsqueeze(1)
    values_R1 = logprobs_RV.gather(1, chosen_R1)
    ranks = (1 + (logprobs_RV > values_R1).sum(1)).tolist()
    values = values_R1.squeeze(1).clamp(min=FLOOR).tolist()
    return [
        TokenLogprob(
            token_id=token,
            logprob=value,
            rank=rank,
            top=_of(logprobs_V, tokens) if tokens else _best(logprobs_V, most),
        )
        for token, value, rank, logprobs_V, most, tokens in zip(
            token_ids, values, ranks, logprobs_RV, num_top, asked, strict=True
        )
    ]


def _of(logprobs_V: Tensor, tokens: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    values = logprobs_V[torch.tensor(tokens, device=logprobs_V.device)].clamp(min=FLOOR)
    return tuple(zip(tokens, values.tolist(), strict=True))


def _best(logprobs_V: Tensor, most: int) -> tuple[tuple[int, float], ...]:
    if most == 0:
        return ()
    least = logprobs_V.topk(min(most, len(logprobs_V))).values[-1].clamp(min=FLOOR)
    ids = (logprobs_V >= least).nonzero().squeeze(1)
    values, order = logprobs_V[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:most]].tolist(), values[:most].tolist(), strict=True))
