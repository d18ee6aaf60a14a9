"""Steps on an NVIDIA GPU: one copy in, one graph, one copy out; the host reads tokens one step late.

    plan -> pinned inputs -> [ copy | pending tokens, model, sampling as one graph | copy ] -> event -> tokens

Everything goes to one stream, in order, so a step may read what the step before it wrote without any wait of
the host. The only wait is `result`: for the event behind the copy of the step's tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops import take_pending
from ostinato.ops.kernel_store import STORE
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.device_health import check_device
from ostinato.runtime.gpu.launched_step import Launched, OpenRequest, StepRows, scored_rows
from ostinato.runtime.gpu.step_buffers import Columns, StepBuffers
from ostinato.runtime.gpu.step_graphs import Fit, StepGraphs, bucket_shapes
from ostinato.runtime.messages import GenerateRequest, TokenLogprob
from ostinato.runtime.runner import KVPlane, Model, StepShape
from ostinato.runtime.sampling.device_sampler import DeviceSampler, ScoredRow
from ostinato.runtime.scheduling.plan import Plan
from ostinato.runtime.step_backend import LaunchedStep
from ostinato.runtime.step_room import NoRoomError
from ostinato.runtime.token_limits import NO_LIMITS, Limit

log = logging.getLogger(__name__)

_NUM_OUT = 3  # pinned results: of the two steps in flight, and one being read
_OUT_BYTES = 12  # of one row: its token, int64, and its status, int32
_ALIGN = 16  # bytes: what kernels are compiled for, whatever the number of rows
_CHECK_CONTEXT = 37  # tokens of KV before those of the step, in the check of a captured graph


def step_carveout(num_tokens: int) -> int:
    """Percent of L1 that kernels of a step want as shared memory; for one token as engines were fastest."""
    return 50 if num_tokens == 1 else 100


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
        self._open: dict[str, OpenRequest] = {}
        self._last_tokens = torch.zeros(requests, dtype=torch.int64, device=self._device)
        out_bytes = _OUT_BYTES * max(most, tokens) + _ALIGN
        self._out = torch.zeros(out_bytes, dtype=torch.uint8, device=self._device)
        self._results = [torch.zeros(out_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_OUT)]
        self._events = [torch.cuda.Event() for _ in range(_NUM_OUT)]
        self._turn = 0
        self._outputs: dict[int, _Output] = {}
        self._openings = 0  # grows whenever a request comes or goes
        self._decode_rows: StepRows | None = None  # of the newest decode step
        shapes = bucket_shapes(most, min(tokens, config.gpu.graph_tokens))
        self._graphs = StepGraphs(self._body, self._prepare, shapes, self.stream)

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def warm_up(self) -> None:
        """Capture the shapes that are needed first, as `idle`. The first KV block is used, and left zero."""
        random = torch.Generator(self._device).manual_seed(0)  # a failed capture spoils torch's own
        for plane in self._planes:
            plane[0].normal_(generator=random)
        self._graphs.capture_hot()
        for plane in self._planes:
            plane[0].zero_()
        self.stream.synchronize()
        graphs = self._graphs
        log.info(
            "captured %d graphs in %.2f s, %d MiB", graphs.num_captured, graphs.seconds, graphs.bytes >> 20
        )

    def open(self, request: GenerateRequest, tokens: Sequence[int]) -> None:
        """A request was admitted; `tokens` is its live list of prompt and generated tokens.

        It takes memory of the device only when it runs for the first time.
        """
        self._openings += 1
        sampling = request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._open[request.request_id] = OpenRequest(sampling, seed, tokens, len(request.prompt_token_ids))

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        if self._open.pop(request_id, None) is not None:
            self._openings += 1
            self._sampler.close(request_id)

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprob | None, ...] | None:
        """One record per prompt token, complete with the first sampled token; None if not asked for."""
        request = self._open[request_id]
        return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)

    def launch(self, plan: Plan, limits: Mapping[str, Limit] = NO_LIMITS) -> LaunchedStep:
        """Give the step to the stream and return at once."""
        columns = Columns.of(plan)
        with torch.inference_mode():
            fit = self._graphs.fit(plan)
            shape = fit.shape
            rows = self._rows(plan, columns, fit)
            host = self._buffers.host(shape)
            self._buffers.fill(plan, shape, rows.slots, host, every_wanted=fit.every_wanted, columns=columns)
            positions = _sampled(columns.output_index, rows.samples)
            self._sampler.stage(host.samples, rows.chosen, positions)
            if limits:
                limited = [
                    (at, limits[name])
                    for at, name in zip(rows.places, rows.names, strict=True)
                    if name in limits
                ]
                self._sampler.allow(host.samples, *zip(*limited, strict=True))
            self._buffers.send(shape)
            if rows.chosen.worded:
                self._sampler.bar_words(rows.chosen, positions, self._last_tokens)
            if fit.replay is None:
                logits = self._compute_with_room(shape)
                self._sample(shape, logits)
            else:
                fit.replay.graph.replay()
                logits = fit.replay.logits
            out = self._output(shape.logit_rows)
            scores = None
            if rows.has_scores:
                scores = self._sampler.after(logits, out.tokens, scored_rows(plan.entries, rows))
            turn = self._turn = (self._turn + 1) % _NUM_OUT
            out.on_host[turn].copy_(out.on_device, non_blocking=True)
            event = self._events[turn]
            event.record(self.stream)
        return Launched(plan, rows, out.host_tokens[turn], out.host_status[turn], event, scores)

    @property
    def wants_pause(self) -> bool:
        """A shape that runs uncaptured again and again waits for its graph."""
        return self._graphs.wants_pause

    def idle(self) -> bool:
        """Capture one more shape. Nothing may be in flight, and KV memory may not change meanwhile.

        Raises EngineDead, or what a device that goes on has raised.
        """
        try:
            with torch.inference_mode():
                return self._graphs.capture_next()
        except RuntimeError:
            self.check()
            raise
        except EngineError as error:  # as of a kernel that the artifact lacks: such steps fail by themselves
            log.error("a shape is not captured: %s", error)
            return True

    def check(self) -> None:
        """Wait for the device. Raises EngineDead: an error of an earlier step has ended its context."""
        check_device(self._device, self.stream.synchronize)

    def eager_steps(self) -> Mapping[str, int]:
        """Steps that ran without a captured graph, by reason."""
        return self._graphs.eager

    @property
    def graph_replays(self) -> int:
        """Steps that were replayed."""
        return self._graphs.replays

    def shut(self) -> None:
        """Wait for the device and let go of graphs and KV planes."""
        self._planes = ()
        with suppress(RuntimeError):  # of a device that computes no more, which was said before
            self.stream.synchronize()
        self._graphs.clear()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()  # the graphs' memory: another engine counts what is free
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
            at = -(-8 * count // _ALIGN) * _ALIGN  # of the status
            end = at + 4 * count
            on_host = [result[:end] for result in self._results]
            arrays = [pinned.numpy() for pinned in on_host]
            found = self._outputs[count] = _Output(
                self._out[: 8 * count].view(torch.int64),
                self._out[at:end].view(torch.int32),
                self._out[:end],
                on_host,
                [array[: 8 * count].view(np.int64) for array in arrays],
                [array[at:].view(np.int32) for array in arrays],
            )
        return found

    def _body(self, shape: StepShape) -> Tensor:
        """All kernels of a step, in order; this is what a graph captures."""
        logits = self._compute(shape)
        self._sample(shape, logits)
        return logits

    def _compute(self, shape: StepShape) -> Tensor:
        STORE.carveout = step_carveout(shape.tokens)
        inputs, _ = self._buffers.inputs(shape)
        take_pending._launch(inputs.token_ids, self._last_tokens)
        return self._model(inputs, self._planes)

    def _compute_with_room(self, shape: StepShape) -> Tensor:
        """Logits. Raises NoRoomError: KV of the step may be written, which the next try does again."""
        try:
            return self._compute(shape)
        except torch.OutOfMemoryError:
            self.check()
            torch.cuda.empty_cache()  # pieces of other sizes, which are of no use to this step
        try:
            return self._compute(shape)
        except torch.OutOfMemoryError as error:
            self.check()
            torch.cuda.empty_cache()
            raise NoRoomError(str(error).partition("\n")[0]) from error

    def _sample(self, shape: StepShape, logits: Tensor) -> None:
        _, samples = self._buffers.inputs(shape)
        out = self._output(shape.logit_rows)
        self._sampler.launch(logits, samples, out.tokens, out.status, self._last_tokens)

    def _prepare(self, shape: StepShape) -> None:
        """Inputs of this shape that write no KV and read block 0: one long row, the others one token each.

        The long row may be longer than any sequence of a server: what is past the window sees no keys.
        """
        host = self._buffers.host(shape)
        lengths = np.ones(shape.sequences, np.int64)
        lengths[-1] = shape.tokens - shape.sequences + 1
        stops = np.cumsum(lengths)
        room = self._buffers.tables.shape[1] * self._buffers.block_tokens  # tokens that a table row can name
        host.query_start[0], host.query_start[1:] = 0, stops
        host.seq_lens[:] = np.minimum(lengths + _CHECK_CONTEXT, room)
        begins = np.concatenate([[0], stops[:-1]])
        row_of_token = np.repeat(np.arange(shape.sequences), lengths)
        host.positions[:] = np.minimum(
            np.arange(shape.tokens) - begins[row_of_token] + _CHECK_CONTEXT, room - 1
        )
        host.token_ids[:] = np.arange(shape.tokens) % self._sampler.vocab_size
        host.slot_mapping[:] = -1
        host.logit_rows[:] = np.resize(stops - 1, shape.logit_rows)
        host.samples[:] = 0
        self._buffers.clear_tables(shape.sequences)
        self._buffers.send(shape)

    def _rows(self, plan: Plan, columns: Columns, fit: Fit) -> StepRows:
        """The rows of a plan; those of the last decode step where they are the same."""
        names, before = columns.request_id, self._decode_rows
        samples: Sequence[bool] = columns.samples
        is_decode = len(names) == plan.num_tokens and False not in samples and not fit.every_wanted
        wanted = (names, fit.shape, self._openings)
        if is_decode and before is not None and (before.names, before.shape, before.openings) == wanted:
            return before
        requests = [self._opened(name) for name in names]
        errors = {
            name: request.error
            for name, request in zip(names, requests, strict=True)
            if request.error is not None
        }
        if errors:
            samples = tuple(wants and name not in errors for name, wants in zip(names, samples, strict=True))
        slots = np.array([request.slot for request in requests], np.int64)
        places = list(range(len(names)))
        if fit.every_wanted:
            ends = accumulate(entry.num_logit_rows for entry in plan.entries)
            places = [end - 1 for end in ends]
        rows = StepRows(
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
            samples,
            errors,
        )
        if is_decode:
            self._decode_rows = rows
        return rows

    def _opened(self, name: str) -> OpenRequest:
        """A request with a slot, or with the reason why it has none."""
        request = self._open[name]
        if request.slot < 0 and request.error is None:
            prompt = request.tokens[: request.prompt_tokens]
            try:
                request.slot = self._sampler.open(name, request.params, request.seed, prompt)
            except torch.OutOfMemoryError:
                request.error = (
                    f"no memory on {self._device} for the penalties and biases of this request; try again "
                    "later, send it without them, or raise kv.headroom_gib"
                )
        return request


def _sampled(values: Sequence[int], samples: Sequence[bool]) -> Sequence[int]:
    """The values of the entries that sample."""
    return values if False not in samples else list(compress(values, samples))
