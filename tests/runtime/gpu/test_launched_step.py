"""What comes of a step on a GPU: rows whose log-probabilities are asked, tokens, and errors of requests."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from ostinato.ops import sample
from ostinato.runtime.gpu.launched_step import NO_LOGPROBS, Launched, OpenRequest, StepRows, scored_rows
from ostinato.runtime.messages import SamplingParams, TokenLogprob
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sampling.device_sampler import ScoredRow
from ostinato.runtime.scheduling.plan import Plan, PlanEntry

CONTEXT = list(range(100, 114))
# rows 1 and 2 of the step score tokens 12 and 13 of the prompt, row 3 is sampled
PROMPT = PlanEntry("prompt", (110, 111, 112, 113), 10, (0,), True, 1, 0, 14)
UNSCORED = PROMPT._replace(request_id="unscored", logits_from=3)
DECODE = PlanEntry("decode", (7,), 5, (1,), True, 0, 4, 3)


def rows_of(*entries: PlanEntry, errors: dict[str, str] | None = None, **sampling: Any) -> StepRows:
    """Every row that the entries want, one after another."""
    requests = [OpenRequest(SamplingParams(**sampling), 1, CONTEXT, e.prompt_tokens) for e in entries]
    ends = np.cumsum([entry.num_logit_rows for entry in entries])
    return StepRows(
        names=tuple(entry.request_id for entry in entries),
        requests=requests,
        slots=np.arange(len(entries)),
        places=[int(end) - 1 for end in ends],
        chosen=None,  # type: ignore[arg-type]  # for the device
        has_scores=True,
        shape=StepShape(8, 2, 8),
        openings=0,
        samples=[True] * len(entries),
        errors=errors or {},
    )


def record(token: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, logprob=-1.0, rank=1, top=())


def settled(rows: StepRows, tokens: list[int], status: list[int], scores: list[TokenLogprob | None]) -> Any:
    """The result of a step that the device has done."""
    entries = {entry.request_id: entry for entry in (PROMPT, UNSCORED, DECODE)}
    plan = Plan(1, tuple(entries[name] for name in rows.names), 5)
    event = SimpleNamespace(synchronize=lambda: None)
    asked = SimpleNamespace(result=lambda: scores) if scores else None
    given = np.array(tokens, np.int64), np.array(status, np.int32)
    return Launched(plan, rows, *given, event, asked).result()  # type: ignore[arg-type]  # no device


def test_prompt_rows_ask_for_the_token_that_follows_and_the_last_row_for_the_sampled_one() -> None:
    entries = DECODE, PROMPT
    rows = rows_of(*entries, prompt_logprobs=2, logprobs=3, logprob_token_ids=(9,))
    prompt = [ScoredRow(1, CONTEXT[12], 2), ScoredRow(2, CONTEXT[13], 2)]
    assert scored_rows(entries, rows) == [ScoredRow(0, None, 3, (9,)), *prompt, ScoredRow(3, None, 3, (9,))]
    failed = rows._replace(errors={"decode": "no memory"})
    assert scored_rows(entries, failed) == [*prompt, ScoredRow(3, None, 3, (9,))]


def test_records_go_to_the_prompt_and_to_the_sampled_token() -> None:
    rows = rows_of(PROMPT, DECODE, prompt_logprobs=0, logprobs=0)
    prompt = [record(CONTEXT[12]), record(CONTEXT[13])]
    batch = settled(rows, [0, 0, 33, 44], [0, 0, 0, 0], [*prompt, record(33), record(44)])
    assert batch.tokens == {"prompt": 33, "decode": 44}
    assert batch.logprobs == {"prompt": record(33), "decode": record(44)}
    assert rows.requests[0].prompt_logprobs == [None, *prompt], "the first token has no record"
    assert batch.errors == {}


def test_a_row_that_fails_ends_its_own_request_with_the_reason() -> None:
    rows = rows_of(UNSCORED, DECODE)
    assert settled(rows, [33, 44], [sample.OK] * 2, []).tokens == {"unscored": 33, "decode": 44}
    batch = settled(rows, [33, 44], [sample.OK, sample.BAD_LOGITS], [])
    assert batch.tokens == {"unscored": 33}
    assert batch.errors == {"decode": "the model gave NaN or infinite logits for generated token 4"}
    failed = rows._replace(errors={"unscored": "no memory"})
    batch = settled(failed, [33, 44], [sample.OK] * 2, [])
    assert (batch.tokens, batch.errors) == ({"decode": 44}, {"unscored": "no memory"})


def test_a_prompt_whose_scores_are_nan_is_an_error_and_no_answer() -> None:
    rows = rows_of(PROMPT, DECODE, prompt_logprobs=0)
    batch = settled(rows, [0, 0, 33, 44], [0, 0, 0, 0], [None, record(CONTEXT[13])])
    assert (batch.tokens, batch.errors) == ({"decode": 44}, {"prompt": NO_LOGPROBS})
