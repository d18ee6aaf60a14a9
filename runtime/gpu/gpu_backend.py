"""Steps on an NVIDIA GPU: one copy in, one graph, one copy out; the host reads tokens one step late.

    plan -> pinned inputs -> [ copy | pending tokens, model, sampling as one graph | copy ] -> event -> tokens

Everything goes to one stream, in order, so a step may read what the step before it wrote without any wait of
the host. The only wait is `result`: for the event behind the copy of the step's tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops import take_pending
from ostinato.ops.gpu_kernels import STORE
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu.step_buffers import Columns, StepBuffers
from ostinato.runtime.gpu.step_graphs import Fit, StepGraphs, bucket_shapes
from ostinato.runtime.grammar.grammar_state import Mask
from ostinato.runtime.grammar.request_grammars import NO_MASKS
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenLogprob
from ostinato.runtime.runner import KVPlane, Model, StepShape
from ostinato.runtime.sampling.device_sampler import (
    ChosenRows,
    DeviceSampler,
    ScoredRow,
    Scores,
    sampling_error,
)
from ostinato.runtime.sampling.sampler import SampledBatch
from ostinato.runtime.scheduling.plan import Plan, PlanEntry
from ostinato.runtime.step_backend import LaunchedStep

log = logging.getLogger(__name__)

_NUM_OUT = 3  # pinned results: of the two steps in flight, and one being read
_OUT_BYTES = 12  # of one row: its token, int64, and its status, int32
_CHECK_CONTEXT = 37  # tokens of KV before those of the step, in the check of a captured graph
NO_LOGPROBS = "the model gave NaN or infinite logits, so there are no log-probabilities"


@dataclass(slots=True)
class _Open:
    """What the host keeps of a live request."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]  # prompt and answer, the scheduler's live list
    prompt_tokens: int
    slot: int = -1  # none before its first step
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # the first has none


class _Rows(NamedTuple):
    """What a step does for its requests. Decode steps of the same requests share one."""

    names: tuple[str, ...]
    requests: list[_Open]
    slots: NDArray[np.int64]
    places: list[int]  # row of logits of each request's last token
    chosen: ChosenRows  # those that are sampled
    has_scores: bool  # log-probabilities are asked for
    shape: StepShape
    openings: int  # `GpuBackend._openings` when this was made


class _Output(NamedTuple):
    """Where a step of R rows of logits leaves its results."""

    tokens: Tensor  # int64 [R]
    status: Tensor  # int32 [R]
    on_device: Tensor  # both, as bytes
    on_host: list[Tensor]  # the same, pinned
    host_tokens: list[NDArray[np.int64]]
    host_status: list[NDArray[np.int32]]


class GpuBackend:
    """See `StepBackend`. Its stream is the current one of the engine's thread from `__init__` on."""

    max_in_flight = 2

    def __init__(
        self,
        model: Model,
        planes: Sequence[Tensor],
        config: EngineConfig,
        *,
        window: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """`window`: tokens of a longest sequence. Nothing is captured before `warm_up`."""
        facts, kv = model.facts, config.kv
        self._device = planes[0].device
        self._model = model
        self._planes = tuple(plane.as_subclass(KVPlane) for plane in planes)
        self.stream = stream
        torch.cuda.set_stream(stream)
        most, tokens = config.scheduler.max_running, config.scheduler.max_step_tokens
        requests = most + config.scheduler.max_waiting  # preempted ones keep their place while they wait
        self._sampler = DeviceSampler(
            facts.vocab_size, frozenset(facts.eos_token_ids), requests, self._device, max_rows=most
        )
        self._buffers = StepBuffers(
            max_tokens=max(most, tokens),
            max_sequences=most,
            table_width=-(-window // kv.block_tokens),
            block_tokens=kv.block_tokens,
            sample_bytes=8 * self._sampler.staged_words(1),
            device=self._device,
        )
        self._open: dict[str, _Open] = {}
        self._last_tokens = torch.zeros(requests, dtype=torch.int64, device=self._device)
        out_bytes = _OUT_BYTES * max(most, tokens)
        self._out = torch.zeros(out_bytes, dtype=torch.uint8, device=self._device)
        self._results = [torch.zeros(out_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_OUT)]
        self._events = [torch.cuda.Event() for _ in range(_NUM_OUT)]
        self._turn = 0
        self._outputs: dict[int, _Output] = {}
        self._openings = 0  # grows whenever a request comes or goes
        self._decode_rows: _Rows | None = None  # of the newest decode step
        shapes = bucket_shapes(most, min(tokens, config.gpu.graph_tokens))
        self._graphs = StepGraphs(self._body, self._prepare, shapes, self.stream)

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def warm_up(self) -> None:
        """Capture the shapes that are needed first. The first KV block is used as scratch and left zero."""
        free, _ = torch.cuda.mem_get_info(self._device)
        for plane in self._planes:
            plane[0].normal_()
        self._graphs.capture_hot()
        for plane in self._planes:
            plane[0].zero_()
        self.stream.synchronize()
        used = free - torch.cuda.mem_get_info(self._device)[0]
        log.info(
            "captured %d graphs in %.2f s, %d MiB",
            self._graphs.num_captured,
            self._graphs.seconds,
            used >> 20,
        )

    def open(self, request: GenerateRequest, tokens: Sequence[int]) -> None:
        """A request was admitted; `tokens` is its live list of prompt and generated tokens.

        It takes memory of the device only when it runs for the first time.
        """
        self._openings += 1
        sampling = request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._open[request.request_id] = _Open(sampling, seed, tokens, len(request.prompt_token_ids))

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        if self._open.pop(request_id, None) is not None:
            self._openings += 1
            self._sampler.close(request_id)

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprob | None, ...] | None:
        """One record per prompt token, complete with the first sampled token; None if not asked for."""
        request = self._open[request_id]
        return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)

    def launch(self, plan: Plan, masks: Mapping[str, Mask] = NO_MASKS) -> LaunchedStep:
        """Give the step to the stream and return at once."""
        columns = tuple(zip(*plan.entries, strict=True))
        with torch.inference_mode():
            fit = self._graphs.fit(plan)
            shape = fit.shape
            rows = self._rows(plan, columns, fit)
            host = self._buffers.host(shape)
            self._buffers.fill(plan, shape, rows.slots, host, every_wanted=fit.every_wanted, columns=columns)
            self._sampler.stage_again(host.samples, rows.chosen, _sampled(columns[6], columns[4]))
            if masks:
                masked = [
                    (at, masks[name])
                    for at, name in zip(rows.places, rows.names, strict=True)
                    if name in masks
                ]
                self._sampler.allow(host.samples, *zip(*masked, strict=True))
            self._buffers.send(shape)
            if rows.chosen.worded:
                self._sampler.bar_words(rows.chosen, _sampled(columns[6], columns[4]), self._last_tokens)
            if fit.replay is None:
                logits = self._body(shape)
            else:
                fit.replay.graph.replay()
                logits = fit.replay.logits
            out = self._output(shape.logit_rows)
            scores = None
            if rows.has_scores:
                scores = self._sampler.after(logits, out.tokens, _scored(plan.entries, rows))
            turn = self._turn = (self._turn + 1) % _NUM_OUT
            out.on_host[turn].copy_(out.on_device, non_blocking=True)
            event = self._events[turn]
            event.record(self.stream)
        return _Launched(plan, rows, out.host_tokens[turn], out.host_status[turn], event, scores)

    def idle(self) -> bool:
        """Capture one more shape. Nothing may be in flight."""
        with torch.inference_mode():
            return self._graphs.capture_next()

    def eager_steps(self) -> Mapping[str, int]:
        """Steps that ran without a captured graph, by reason."""
        return self._graphs.eager

    @property
    def graph_replays(self) -> int:
        """Steps that were replayed."""
        return self._graphs.replays

    def shut(self) -> None:
        """Wait for the device and let go of graphs and KV planes."""
        self.stream.synchronize()
        self._graphs.clear()
        self._planes = ()
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))

    def rehearse(self, shape: StepShape) -> None:
        """Run a shape once, uncaptured, with inputs of its own: whatever it launches is loaded then."""
        with torch.inference_mode():
            self._prepare(shape)
            logits = self._body(shape)
            tokens = self._output(shape.logit_rows).tokens
            self._sampler.after(logits, tokens, [ScoredRow(0, None, 5)])
            self.stream.synchronize()  # before the next shape writes over the inputs of this one

    def _output(self, count: int) -> _Output:
        found = self._outputs.get(count)
        if found is None:
            end = _OUT_BYTES * count
            on_host = [result[:end] for result in self._results]
            arrays = [pinned.numpy() for pinned in on_host]
            found = self._outputs[count] = _Output(
                self._out[: 8 * count].view(torch.int64),
                self._out[8 * count : end].view(torch.int32),
                self._out[:end],
                on_host,
                [array[: 8 * count].view(np.int64) for array in arrays],
                [array[8 * count :].view(np.int32) for array in arrays],
            )
        return found

    def _body(self, shape: StepShape) -> Tensor:
        """All kernels of a step, in order; this is what a graph captures."""
        STORE.carveout = 50 if shape.tokens == 1 else 100  # 6 % of a step of one token (docs/log.md)
        inputs, samples = self._buffers.inputs(shape)
        take_pending._launch(inputs.token_ids, self._last_tokens)
        logits = self._model(inputs, self._planes)
        out = self._output(shape.logit_rows)
        self._sampler.launch(logits, samples, out.tokens, out.status, self._last_tokens)
        return logits

    def rehearse_inputs(self, shape: StepShape, context: int) -> None:
        """Put inputs of a shape on the device, with so many tokens of KV before those of the step."""
        with torch.inference_mode():
            self._prepare(shape, context)

    def _prepare(self, shape: StepShape, context: int = _CHECK_CONTEXT) -> None:
        """Inputs of this shape that write no KV and read block 0: one long row, the others one token each."""
        host = self._buffers.host(shape)
        lengths = np.ones(shape.sequences, np.int64)
        lengths[-1] = shape.tokens - shape.sequences + 1
        stops = np.cumsum(lengths)
        context = min(context, self._buffers.tables.shape[1] * self._buffers.block_tokens - int(lengths[-1]))
        host.query_start[0], host.query_start[1:] = 0, stops
        host.seq_lens[:] = lengths + max(0, context)
        begins = np.concatenate([[0], stops[:-1]])
        row_of_token = np.repeat(np.arange(shape.sequences), lengths)
        host.positions[:] = np.arange(shape.tokens) - begins[row_of_token] + max(0, context)
        host.token_ids[:] = np.arange(shape.tokens) % self._sampler.vocab_size
        host.slot_mapping[:] = -1
        host.logit_rows[:] = np.resize(stops - 1, shape.logit_rows)
        host.samples[:] = 0
        self._buffers.clear_tables(shape.sequences)
        self._buffers.send(shape)

    def _rows(self, plan: Plan, columns: Columns, fit: Fit) -> _Rows:
        """The rows of a plan; those of the last decode step where they are the same."""
        names, samples, before = columns[0], columns[4], self._decode_rows
        is_decode = len(names) == plan.num_tokens and False not in samples and not fit.every_wanted
        wanted = (names, fit.shape, self._openings)
        if is_decode and before is not None and (before.names, before.shape, before.openings) == wanted:
            return before
        requests = [self._opened(name) for name in names]
        slots = np.array([request.slot for request in requests], np.int64)
        places = list(range(len(names)))
        if fit.every_wanted:
            ends = accumulate(entry.num_logit_rows for entry in plan.entries)
            places = [end - 1 for end in ends]
        rows = _Rows(
            names,
            requests,
            slots,
            places,
            self._sampler.choose(
                fit.shape.logit_rows, _sampled(places, samples), _sampled(slots.tolist(), samples)
            ),
            fit.every_wanted or any(request.params.logprobs is not None for request in requests),
            fit.shape,
            self._openings,
        )
        if is_decode:
            self._decode_rows = rows
        return rows

    def _opened(self, name: str) -> _Open:
        """A request with a slot."""
        request = self._open[name]
        if request.slot < 0:
            prompt = request.tokens[: request.prompt_tokens]
            request.slot = self._sampler.open(name, request.params, request.seed, prompt)
        return request


def _sampled(values: Sequence[int], samples: Sequence[bool]) -> Sequence[int]:
    """The values of the entries that sample."""
    return values if False not in samples else list(compress(values, samples))


def _scored(entries: Sequence[PlanEntry], rows: _Rows) -> list[ScoredRow]:
    """Rows with log-probabilities: of the prompt, entry by entry, then the sampled one."""
    scored = []
    for request, entry, place in zip(rows.requests, entries, rows.places, strict=True):
        prompt = entry.prompt_logit_rows
        if prompt:
            first = place + 1 - entry.num_logit_rows
            for at, row in enumerate(prompt):
                following = request.tokens[entry.start + row + 1]
                scored.append(ScoredRow(first + at, following, request.params.prompt_logprobs or 0))
        if entry.samples and request.params.logprobs is not None:
            asked = request.params.logprob_token_ids
            scored.append(ScoredRow(place, None, request.params.logprobs, asked))
    return scored


class _Launched:
    """A step on the device."""

    def __init__(
        self,
        plan: Plan,
        rows: _Rows,
        tokens: NDArray[np.int64],
        status: NDArray[np.int32],
        event: torch.cuda.Event,
        scores: Scores | None,
    ) -> None:
        self.plan = plan
        self._rows, self._tokens, self._status, self._event, self._scores = (
            rows,
            tokens,
            status,
            event,
            scores,
        )

    def result(self) -> SampledBatch:
        """Wait for the tokens; raises what went wrong on the device."""
        self._event.synchronize()
        tokens, rows = self._tokens.tolist(), self._rows
        if self._scores is None and not self._status.any():  # the rows of those that do not sample are OK
            places = rows.places
            if len(tokens) != len(places):
                tokens = [tokens[place] for place in places]
            return SampledBatch(dict(zip(rows.names, tokens, strict=True)))
        status = self._status.tolist()
        batch = SampledBatch()
        records = iter(self._scores.result() if self._scores is not None else ())
        for request, entry, place in zip(rows.requests, self.plan.entries, rows.places, strict=True):
            name = entry.request_id
            for _ in entry.prompt_logit_rows:
                record = next(records)
                request.prompt_logprobs.append(record)
                if record is None:
                    batch.errors[name] = NO_LOGPROBS
            if not entry.samples:
                continue
            record = next(records) if request.params.logprobs is not None else None
            error = sampling_error(status[place], entry.output_index)
            if error is not None or name in batch.errors:
                batch.errors.setdefault(name, error or NO_LOGPROBS)
                continue
            batch.tokens[name] = tokens[place]
            if record is not None:
                batch.logprobs[name] = record
        return batch
