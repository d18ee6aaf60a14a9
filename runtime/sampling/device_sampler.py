"""Sampling that never waits for the device: the host writes rows of parameters, kernels do the rest.

    open        a request gets a slot, and memory on the device if it has penalties, bias or min_tokens
    choose      the rows of logits that are sampled, for all steps in which these requests have these rows
    stage       in each step: the part of its host buffer that says how they are sampled
    allow       behind that, for rows with a grammar or a budget: which tokens may come, or must
    bar_words   ahead of the graph, only for a step in which rows have bad words of several tokens
    launch      after the model, inside the captured graph: tokens, status, and the newest token by slot
    after       behind the graph, only for a step in which rows ask for log-probabilities
    result      of what `after` gave, when the step is settled

Meaning: `sampler.py`, for which `ops/sample.py` says how near a draw comes to it.  R rows, V vocabulary.
Everything runs on the current stream. What a request owned on the device may be given to others by work that
is queued after `close`, so a request is not closed between the staging and the launch of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops import sample, token_scores
from ostinato.ops.sample_rows import GREEDY, LAYOUT, RANDOM, WORDS, limit_of, row_fields, scale_of, top_p_of
from ostinato.runtime.messages import SamplingParams, TokenLogprob
from ostinato.runtime.sampling.device_bad_words import DeviceBadWords
from ostinato.runtime.sampling.device_masks import DeviceMasks
from ostinato.runtime.sampling.logprobs import FLOOR
from ostinato.runtime.sampling.penalties import BadWords
from ostinato.runtime.sampling.sampler import GREEDY_BELOW, NONE_ALLOWED, bad_logits
from ostinato.runtime.sampling.sampling_rng import bits_at, seed_bits, vector_bits
from ostinato.runtime.token_limits import Limit

Ints = NDArray[np.int64]
_FEW = 8  # rows up to which Python's integers are faster than numpy's calls


class ChosenRows(NamedTuple):
    """Rows of logits that are sampled, with all that does not change from step to step. See `choose`."""

    words: Ints  # [WORDS * R], without random bits and early bias
    place: Ints
    slot: Ints
    seeds: NDArray[np.uint64]
    min_tokens: Ints
    last_early: int  # from this position on no row has an early bias
    worded: tuple[int, ...]  # rows, as indices of `slot`, whose bad words have several tokens
    is_front: bool  # place is 0, 1, 2, ...


class ScoredRow(NamedTuple):
    """A row of logits whose log-probabilities are asked: of `token` (None: the sampled one), of the best.

    `asked`: tokens that take the place of the best, if there are any.
    """

    place: int
    token: int | None
    num_top: int
    asked: tuple[int, ...] = ()


class Scores:
    """Log-probabilities that are being computed."""

    def __init__(self, rows: Sequence[ScoredRow], places: Tensor, answer: Tensor) -> None:
        self._rows = rows
        self._event: torch.cuda.Event | None = None
        both = torch.cat([places.view(torch.int32).view(len(places), 2), answer], 1)
        if answer.is_cuda:
            self._answer = torch.empty(both.shape, dtype=torch.int32, pin_memory=True)
            self._answer.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._answer = both

    def result(self) -> list[TokenLogprob | None]:
        """One record per row, in their order; None: NaN or infinite logits. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        words: NDArray[np.int32] = self._answer.numpy()
        values = words.view(np.float32)
        most = (words.shape[1] - 4) // 2
        records: list[TokenLogprob | None] = []
        index = -1
        for row in self._rows:
            index += 1
            token, rank = int(words[index, :2].view(np.int64)[0]), int(words[index, 2])
            if rank == 0:
                records.append(None)
                index += len(row.asked)
                continue
            ids = words[index, 4 : 4 + row.num_top].tolist()
            likely = values[index, 4 + most : 4 + most + row.num_top].tolist()
            top = tuple((i, value) for i, value in zip(ids, likely, strict=True) if value >= FLOOR)
            logprob = max(float(values[index, 3]), FLOOR)
            if row.asked:
                own = values[index + 1 : index + 1 + len(row.asked), 3].tolist()
                top = tuple((i, max(value, FLOOR)) for i, value in zip(row.asked, own, strict=True))
                index += len(row.asked)
            records.append(TokenLogprob(token_id=token, logprob=logprob, rank=rank, top=top))
        return records


class DeviceSampler:
    """Slots and device memory of the live requests. One thread uses it."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_requests: int,
        device: torch.device,
        *,
        max_rows: int = 0,
    ) -> None:
        """Columns of the logits past `vocab_size` are padding. `eos_token_ids`: barred for `min_tokens`.

        `max_rows`: most rows that sample in one step; 0: `max_requests`.
        """
        self.vocab_size, self.max_requests, self.device = vocab_size, max_requests, device
        self._eos_token_ids = eos_token_ids
        self._slots: dict[str, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._masks = DeviceMasks(vocab_size, max_rows or max_requests, device)
        self._memory: dict[int, list[Tensor]] = {}  # by slot: what `bias` and `counts` point to
        self._words: dict[int, DeviceBadWords] = {}  # by slot: bad words of several tokens
        self._fields = {name: np.zeros(max_requests, dtype) for name, dtype in LAYOUT.items()}
        self._early_bias: Ints = np.zeros(max_requests, np.int64)  # for the first `min_tokens`
        self._min_tokens: Ints = np.zeros(max_requests, np.int64)
        self._seeds: NDArray[np.uint64] = np.zeros(max_requests, np.uint64)  # mixed

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._slots)

    @property
    def state_bytes(self) -> int:
        """Device memory of the open requests' penalties and biases."""
        return sum(t.numel() * t.element_size() for memory in self._memory.values() for t in memory)

    def open(self, request_id: str, params: SamplingParams, seed: int, prompt_tokens: Sequence[int]) -> int:
        """Give a request a slot, below `max_requests`; it has generated nothing so far.

        Raises EngineError: already open, or no slot is free. torch.OutOfMemoryError leaves nothing behind.
        """
        if request_id in self._slots:
            raise EngineError(f"request {request_id!r} is open already; close it first")
        if not self._free:
            raise EngineError(f"all {self.max_requests} slots are taken; close a request first")
        early, late, counts = self._made(params, prompt_tokens)
        longer = BadWords(params.bad_word_ids).longer
        words = DeviceBadWords(longer, early, late, self._upload) if longer else None
        slot = self._slots[request_id] = self._free.pop()
        self._memory[slot] = [memory for memory in (early, late, counts) if memory is not None]
        if words is not None:
            self._words[slot] = words
            self._memory[slot] += words.memory
        is_random = params.temperature >= GREEDY_BELOW
        temperature = params.temperature if is_random else 1.0
        values = {
            "top_p": top_p_of(params.top_p),
            "bias": late.data_ptr() if late is not None else 0,
            "counts": counts.data_ptr() if counts is not None else 0,
            "kind": RANDOM if is_random else GREEDY,
            "slot": slot,
            "top_k": params.top_k if 0 < params.top_k < self.vocab_size else 0,
            "scale": scale_of(temperature),
            "limit": limit_of(temperature, params.min_p),
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
        }
        for name, value in values.items():
            self._fields[name][slot] = value
        self._early_bias[slot] = early.data_ptr() if early is not None else 0
        self._min_tokens[slot] = params.min_tokens if early is not None else 0
        self._seeds[slot] = seed_bits(seed)
        return slot

    def close(self, request_id: str) -> None:
        """Take the slot back; unknown ids are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            del self._memory[slot]
            self._words.pop(slot, None)
            self._free.append(slot)

    @staticmethod
    def staged_words(num_rows: int) -> int:
        """Length of the int64 buffer that `stage` fills for R rows of logits."""
        return WORDS * num_rows

    def choose(self, num_rows: int, places: Sequence[int], slots: Sequence[int]) -> ChosenRows:
        """The rows, out of R, that are sampled; good for all steps in which these requests have these rows.

        Valid while none of the requests is closed. Cost: about 30 numpy calls, whatever the rows.
        """
        words: Ints = np.zeros(self.staged_words(num_rows), np.int64)
        place: Ints = np.array(places, np.int64)
        slot: Ints = np.array(slots, np.int64)
        fields = row_fields(words)
        for name, values in self._fields.items():
            fields[name][place] = values[slot]
        min_tokens = self._min_tokens[slot]
        return ChosenRows(
            words,
            place,
            slot,
            self._seeds[slot],
            min_tokens,
            int(min_tokens.max(initial=0)),
            tuple(at for at, one in enumerate(slots) if one in self._words) if self._words else (),
            is_front=list(places) == list(range(len(places))),
        )

    def stage(self, words: Ints, rows: ChosenRows, positions: Sequence[int]) -> None:
        """Write the parameters of a step into its host buffer, int64 [staged_words(R)].

        `positions`: of each row, the token's index in its answer. Rows that were not chosen sample nothing.
        """
        words[:] = rows.words
        count = len(positions)
        if count <= _FEW:  # python is faster than ten numpy calls
            for place, seed, position in zip(
                rows.place.tolist(), rows.seeds.tolist(), positions, strict=True
            ):
                words[place] = bits_at(seed, position)
            if min(positions, default=0) >= rows.last_early:
                return
        else:
            position_R: Ints = np.array(positions, np.int64)
            random = vector_bits(rows.seeds, position_R).view(np.int64)
            if rows.is_front:
                words[:count] = random
            else:
                words[rows.place] = random
            if int(position_R.min()) >= rows.last_early:
                return
        is_early = np.array(positions, np.int64) < rows.min_tokens
        row_fields(words)["bias"][rows.place[is_early]] = self._early_bias[rows.slot[is_early]]

    def bar_words(self, rows: ChosenRows, positions: Sequence[int], last_tokens: Tensor) -> None:
        """Queue, ahead of `launch`, what bars the completion of bad words of several tokens.

        The token before may still be on its way: it is read from `last_tokens`, on the device. A row that has
        such words costs about ten small kernels in each step, the others nothing.
        """
        for at in rows.worded:
            slot = int(rows.slot[at])
            self._words[slot].bar(positions[at], last_tokens[slot : slot + 1])

    def allow(self, words: Ints, places: Sequence[int], limits: Sequence[Limit]) -> None:
        """Let rows sample what their masks allow, or their settled token; queues the copy of the masks."""
        fields, at = row_fields(words), np.array(places, np.int64)
        fields["mask"][at] = self._masks.send(limits)
        fields["bias"][at[[isinstance(one, int) for one in limits]]] = 0

    def launch(
        self, logits_RV: Tensor, rows: Tensor, tokens_R: Tensor, status_R: Tensor, last_tokens: Tensor
    ) -> None:
        """Sample every row. `rows`: the staged buffer, on the device. Nothing is allocated for the caller.

        Writes tokens int64 [R], status int32 [R] (see `sampling_error`), last_tokens int64 [max_requests].
        """
        sample.OP(logits_RV, rows, self.vocab_size, last_tokens, tokens_R, status_R)

    def after(self, logits_RV: Tensor, tokens_R: Tensor, rows: Sequence[ScoredRow]) -> Scores | None:
        """Queue the log-probabilities of a step, behind its `launch` and ahead of the next one."""
        if not rows:
            return None
        questions: list[tuple[int, int, int]] = []
        for row in rows:
            questions.append((row.place, -1 if row.token is None else row.token, row.num_top))
            questions += [(row.place, token, 0) for token in row.asked]
        asked = np.array(questions, np.int64).T.copy()
        most = int(asked[2].max())
        asked_on_device = self._upload(asked)
        place, token = asked_on_device[0], asked_on_device[1]
        answer = token_scores.OP(logits_RV, tokens_R, asked_on_device, self.vocab_size, most)
        return Scores(rows, torch.where(token < 0, tokens_R[place], token), answer)

    def _made(
        self, params: SamplingParams, prompt_tokens: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Early bias, bias, counts; None where the request does not need them."""
        barred = self._eos_token_ids.union(params.stop_token_ids) if params.min_tokens > 0 else frozenset()
        barred = frozenset(token for token in barred if token < self.vocab_size)
        is_biased = bool(params.logit_bias or params.bad_word_ids) or params.allowed_token_ids is not None
        early = self._bias(params, barred) if barred else None
        late = self._bias(params, frozenset()) if is_biased else None
        if early is None and params.min_tokens > 0:
            early = late
        has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        if not has_penalties:
            return early, late, None
        counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        seen = np.unique(np.asarray(prompt_tokens, np.int64))
        seen = seen[seen < self.vocab_size]  # the others have an embedding but no logit
        if len(seen):
            counts.index_fill_(0, self._upload(seen), 1)
        return early, late, counts

    def _bias(self, params: SamplingParams, barred: frozenset[int]) -> Tensor:
        """What is added to the logits, as `penalties.py` says it: -inf forbids."""
        logit_bias = params.logit_bias
        forced = {token: b for token, b in logit_bias.items() if b >= 100 and token not in barred}
        changed = forced or {token: b if b > -100 else -np.inf for token, b in logit_bias.items()}
        changed = changed | dict.fromkeys(barred, -np.inf)
        bias = torch.full((self.vocab_size,), -torch.inf if forced else 0.0, device=self.device)
        ids = self._upload(np.fromiter(changed.keys(), np.int64, len(changed)))
        values = self._upload(np.fromiter(changed.values(), np.float32, len(changed)))
        bias.index_copy_(0, ids, values)
        if params.allowed_token_ids is not None:
            allowed = np.unique(np.asarray(params.allowed_token_ids, np.int64))
            allowed_ids = self._upload(allowed[allowed < self.vocab_size])
            kept = bias[allowed_ids]
            bias.fill_(-torch.inf).index_copy_(0, allowed_ids, kept)
        always = BadWords(params.bad_word_ids).always
        if always:
            bias.index_fill_(0, self._upload(np.array(always, np.int64)), -torch.inf)
        return bias

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def sampling_error(status: int, position: int) -> str | None:
    """What a row's status means for its request: None, or why it ends. `position`: as for `stage`."""
    if status == sample.OK:
        return None
    return bad_logits(position) if status == sample.BAD_LOGITS else NONE_ALLOWED
