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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops import take_pending
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu.step_buffers import StepBuffers
from ostinato.runtime.gpu.step_graphs import StepGraphs, bucket_shapes
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenLogprob
from ostinato.runtime.runner import KVPlane, Model, StepShape
from ostinato.runtime.sampling.device_sampler import (
    DeviceSampler,
    ScoredRow,
    Scores,
    StagedRow,
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


class _Row(NamedTuple):
    """What a step does for one request: the row of logits that it samples, and the prompt rows it scores."""

    request: _Open
    entry: PlanEntry
    place: int  # of the last row of the entry


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
            facts.vocab_size, frozenset(facts.eos_token_ids), requests, self._device
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
        sampling = request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._open[request.request_id] = _Open(sampling, seed, tokens, len(request.prompt_token_ids))

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        if self._open.pop(request_id, None) is not None:
            self._sampler.close(request_id)

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprob | None, ...] | None:
        """One record per prompt token, complete with the first sampled token; None if not asked for."""
        request = self._open[request_id]
        return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)

    def launch(self, plan: Plan) -> LaunchedStep:
        """Give the step to the stream and return at once."""
        with torch.inference_mode():
            fit = self._graphs.fit(plan)
            rows = self._rows(plan, every_wanted=fit.every_wanted)
            host = self._buffers.host(fit.shape)
            slots = {row.entry.request_id: row.request.slot for row in rows}
            self._buffers.fill(plan, fit.shape, slots, host, every_wanted=fit.every_wanted)
            sampled = [
                StagedRow(row.place, row.request.slot, row.entry.output_index)
                for row in rows
                if row.entry.samples
            ]
            self._sampler.stage(host.samples.view(np.int64), sampled)
            self._buffers.send(fit.shape)
            if fit.replay is None:
                logits = self._body(fit.shape)
            else:
                fit.replay.graph.replay()
                logits = fit.replay.logits
            count = fit.shape.logit_rows
            tokens, _ = self._outputs(count)
            scores = self._sampler.after(logits, tokens, _scored(rows))
            self._turn = (self._turn + 1) % _NUM_OUT
            result, event = self._results[self._turn], self._events[self._turn]
            result[: _OUT_BYTES * count].copy_(self._out[: _OUT_BYTES * count], non_blocking=True)
            event.record(self.stream)
        return _Launched(plan, rows, count, result, event, scores)

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
            tokens, _ = self._outputs(shape.logit_rows)
            self._sampler.after(logits, tokens, [ScoredRow(0, None, 5)])

    def _outputs(self, count: int) -> tuple[Tensor, Tensor]:
        tokens = self._out[: 8 * count].view(torch.int64)
        return tokens, self._out[8 * count : _OUT_BYTES * count].view(torch.int32)

    def _body(self, shape: StepShape) -> Tensor:
        """All kernels of a step, in order; this is what a graph captures."""
        inputs, samples = self._buffers.inputs(shape)
        take_pending._launch(inputs.token_ids, self._last_tokens)
        logits = self._model(inputs, self._planes)
        tokens, status = self._outputs(shape.logit_rows)
        self._sampler.launch(logits, samples.view(torch.int64), tokens, status, self._last_tokens)
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

    def _rows(self, plan: Plan, *, every_wanted: bool) -> list[_Row]:
        rows, end = [], 0
        for index, entry in enumerate(plan.entries):
            end += entry.num_logit_rows
            request = self._open[entry.request_id]
            if request.slot < 0:
                prompt = request.tokens[: request.prompt_tokens]
                request.slot = self._sampler.open(entry.request_id, request.params, request.seed, prompt)
            rows.append(_Row(request, entry, end - 1 if every_wanted else index))
        return rows


def _scored(rows: Sequence[_Row]) -> list[ScoredRow]:
    """Rows with log-probabilities: of the prompt, entry by entry, then the sampled one."""
    scored = []
    for request, entry, place in rows:
        prompt = entry.prompt_logit_rows
        if prompt:
            first = place + 1 - entry.num_logit_rows
            for at, row in enumerate(prompt):
                following = request.tokens[entry.start + row + 1]
                scored.append(ScoredRow(first + at, following, request.params.prompt_logprobs or 0))
        if entry.samples and request.params.logprobs is not None:
            scored.append(ScoredRow(place, None, request.params.logprobs))
    return scored


class _Launched:
    """A step on the device."""

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[_Row],
        count: int,
        out: Tensor,
        event: torch.cuda.Event,
        scores: Scores | None,
    ) -> None:
        self.plan = plan
        self._rows, self._count, self._out, self._event, self._scores = rows, count, out, event, scores

    def result(self) -> SampledBatch:
        """Wait for the tokens; raises what went wrong on the device."""
        self._event.synchronize()
        out: NDArray[np.uint8] = self._out.numpy()
        tokens = out[: 8 * self._count].view(np.int64).tolist()
        status = out[8 * self._count : _OUT_BYTES * self._count].view(np.int32).tolist()
        batch = SampledBatch()
        records = iter(self._scores.result() if self._scores is not None else ())
        for request, entry, place in self._rows:
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
