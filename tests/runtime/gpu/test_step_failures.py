"""What fails on a GPU ends what it concerns: a request, a step's requests, or the engine, with the reason."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ostinato.errors import EngineDead, EngineError
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import GpuConfig
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.runner import StepShape
from ostinato.runtime.step_room import SMALL_S
from tests.support.engine_runs import events_of, finish, tokens_of
from tests.support.no_gpu import TOKEN, HostEngine, NoGpuBackend, NoModel, config, request


def backend_of(engine: HostEngine) -> NoGpuBackend:
    assert isinstance(engine._backend, NoGpuBackend)
    return engine._backend


def fails(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def fails_once(call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    errors = [error]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"prompt_logprobs": 1, "logprobs": 1}])
def test_a_request_whose_penalties_find_no_memory_ends_alone(
    params: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostEngine(NoModel(), config()) as engine:
        sampler = backend_of(engine)._sampler
        taken, opened = [], sampler.open

        def open_(name: str, *args: Any) -> int:
            if name == "unlucky":
                taken.append(name)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return opened(name, *args)

        monkeypatch.setattr(sampler, "open", open_)
        engine.inbox.put(
            request("before", 6, **params),
            request("unlucky", 6, repetition_penalty=1.5, **params),
            request("after", 6),
        )
        news = finish(engine)
        assert tokens_of(news, "before") == tokens_of(news, "after") == [TOKEN] * 6
        (last,) = events_of(news, "unlucky")
        assert (last.finish_reason, last.token_ids) == ("error", ())
        assert last.error is not None
        assert "no memory on cpu for the penalties" in last.error
        assert "kv.headroom_gib" in last.error
        assert taken == ["unlucky"], "it was asked for again for the step in flight"
        engine.check()


def test_a_step_that_cannot_be_filled_leaves_the_block_tables_of_later_steps_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostEngine(NoModel(), config()) as engine:
        buffers = backend_of(engine)._buffers
        engine.inbox.put(*(request(f"r{at}", 40, prompt=20 + at) for at in range(3)))
        for _ in range(4):
            engine.step()
        engine.inbox.put(request("next", 40))
        monkeypatch.setattr(buffers, "_send_tables", fails_once(buffers._send_tables, RuntimeError("torn")))
        news = [message for _ in range(40) for message in engine.step()]
        assert {e.error for e in events_of(news, "next")} == {"the step failed: RuntimeError: torn"}
        engine.inbox.put(*(request(f"s{at}", 9, prompt=50) for at in range(4)))
        launched = backend_of(engine).launch

        def launch(plan: Any, *args: Any) -> Any:
            step = launched(plan, *args)
            for row, entry in enumerate(plan.entries):
                assert buffers.tables[row, : len(entry.block_ids)].tolist() == list(entry.block_ids)
            return step

        monkeypatch.setattr(backend_of(engine), "launch", launch)
        news = finish(engine)
        assert tokens_of(news, "s3") == [TOKEN] * 9


def test_a_device_that_computes_no_more_ends_the_engine_and_not_only_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `T`")
    with HostEngine(NoModel(), config()) as engine:
        backend = backend_of(engine)
        engine.inbox.put(request("r", 40))
        engine.step()
        monkeypatch.setattr(backend, "stream", SimpleNamespace(synchronize=fails(error)))
        monkeypatch.setattr(backend, "check", lambda: GpuBackend.check(backend))
        monkeypatch.setattr(backend, "launch", fails(error))
        with pytest.raises(
            EngineDead, match=r"cpu computes no more \(CUDA .*memory access .*\); start the engine"
        ):
            finish(engine)
        monkeypatch.setattr(backend, "shut", lambda: GpuBackend.shut(backend))
        monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda _: None)
    assert engine._memory.is_closed


def test_a_step_that_fails_on_a_device_that_goes_on_ends_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostEngine(NoModel(), config()) as engine:
        backend = backend_of(engine)
        monkeypatch.setattr(backend, "launch", fails_once(backend.launch, torch.OutOfMemoryError("full")))
        engine.inbox.put(request("r", 4))
        (last,) = events_of(finish(engine), "r")
        assert (last.finish_reason, last.error) == ("error", "the step failed: OutOfMemoryError: full")
        engine.inbox.put(request("s", 4))
        assert tokens_of(finish(engine), "s") == [TOKEN] * 4


def test_kv_memory_stands_still_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostEngine(NoModel(), config()) as engine:
        backend, sizer = backend_of(engine), engine._sizer
        inside: list[bool] = []
        is_quiet = False
        paused = sizer._memory.paused

        @contextmanager
        def watched() -> Any:
            nonlocal is_quiet
            with paused() as pool:
                is_quiet = True
                yield pool
                is_quiet = False

        monkeypatch.setattr(sizer._memory, "paused", watched)
        monkeypatch.setattr(backend, "idle", lambda: inside.append(is_quiet) or len(inside) < 3)
        engine.inbox.close()
        engine._rest(Silence())
        assert inside == [True]  # mail is waiting: no second one
        while engine._idle():
            pass
        assert inside == [True] * 3


def test_a_capture_that_fails_on_a_device_that_computes_no_more_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostEngine(NoModel(), config()) as engine:
        backend = backend_of(engine)
        monkeypatch.setattr(backend, "check", lambda: GpuBackend.check(backend))
        monkeypatch.setattr(backend._graphs, "capture_next", fails(RuntimeError("a capture failed")))
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(backend, "stream", stream)
        with pytest.raises(RuntimeError, match="a capture failed"):
            backend.idle()
        stream.synchronize = fails(RuntimeError("CUDA error: misaligned address\nmore"))
        with pytest.raises(EngineDead, match=r"cpu computes no more \(CUDA error: misaligned address\)"):
            backend.idle()


def test_a_shape_whose_kernel_is_missing_is_left_out_of_the_captures_and_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with HostEngine(NoModel(), config()) as engine:
        left = [fails(EngineError("kernel variant k is not in the artifact")), lambda: True, lambda: False]
        monkeypatch.setattr(backend_of(engine)._graphs, "capture_next", lambda: left.pop(0)())
        while engine._idle():
            pass
        assert left == []
        assert "a shape is not captured: kernel variant k is not in the artifact" in caplog.text


def test_captures_see_random_keys_and_requests_see_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block holds what captures are compared with; it is a request's block afterwards."""
    with HostEngine(NoModel(), config()) as engine:
        backend = backend_of(engine)
        seen: list[int] = []

        def capture_hot() -> None:
            seen.extend(len(plane[0].unique()) for plane in backend._planes)

        monkeypatch.setattr(backend._graphs, "capture_hot", capture_hot)
        monkeypatch.setattr(backend, "stream", SimpleNamespace(synchronize=lambda: None))
        backend.warm_up()
        assert len(seen) == 2
        assert min(seen) > 8, "equal keys would hide a wrong one"
        assert not any(plane[0].any() for plane in backend._planes)


class Silence:
    def send(self, messages: object) -> None:
        """Nobody listens."""

    def idle(self) -> None:
        """Nobody waits."""


def test_an_engine_that_cannot_be_made_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostEngine] = []

    class Failing(HostEngine):
        def _make_backend(self, *_: Any) -> Any:
            made.append(self)
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        Failing(NoModel(), config())
    assert made[0]._memory.is_closed


@pytest.mark.parametrize("shape", [StepShape(1024, 256, 256), StepShape(1024, 1, 1), StepShape(1, 1, 1)])
def test_inputs_of_a_captured_shape_stay_inside_the_block_tables(shape: StepShape) -> None:
    """With a window of 64 tokens the long row of the shape has more tokens than its table can name."""
    with HostEngine(NoModel(), config().model_copy(update={"max_model_len": 64})) as engine:
        backend = backend_of(engine)
        backend._prepare(shape)
        inputs, _ = backend._buffers.inputs(shape)
        room = inputs.block_tables.shape[1] * backend._buffers.block_tokens
        assert int(inputs.seq_lens.max()) <= room
        assert int(inputs.positions.max()) < room
        assert inputs.query_start.tolist()[-1] == shape.tokens
        assert set(inputs.slot_mapping.tolist()) == {-1}


class NarrowModel(NoModel):
    """A device without memory for steps of more tokens than that."""

    def __init__(self, room: int) -> None:
        self.room, self.sizes = room, list[int]()

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor], /) -> Tensor:
        self.sizes.append(inputs.token_ids.shape[0])
        if self.sizes[-1] > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return super().__call__(inputs, kv)


def test_a_step_that_finds_no_memory_is_made_again_smaller_and_nobody_loses_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    model = NarrowModel(1500)
    with HostEngine(model, config(), clock=lambda: now) as engine:
        engine.inbox.put(*(request(f"short{at}", 40) for at in range(3)))
        news = [message for _ in range(4) for message in engine.step()]
        engine.inbox.put(
            request("long", 5, prompt=1900), request("scored", 3, prompt=1900, prompt_logprobs=0)
        )
        news += finish(engine)
        for at in range(3):
            assert tokens_of(news, f"short{at}") == [TOKEN] * 40
        assert tokens_of(news, "long") == [TOKEN] * 5
        assert tokens_of(news, "scored") == [TOKEN] * 3
        (scores,) = [event.prompt_logprobs for event in events_of(news, "scored") if event.prompt_logprobs]
        assert len(scores) == 1900
        assert engine.stats().preemptions == 0
        engine.check()

        too_large = [size for size in model.sizes if size > model.room]
        assert len(set(too_large)) * 2 == len(too_large) > 0, "each was tried again with an empty cache"
        said = [record.getMessage() for record in caplog.records if "found no memory" in record.getMessage()]
        assert len(said) == len(set(too_large))
        assert "CUDA out of memory. Tried to allocate 2 GiB); steps have at most" in said[0]

        model.sizes.clear()
        engine.inbox.put(request("next", 1, prompt=1901))
        assert tokens_of(finish(engine), "next") == [TOKEN]
        assert max(model.sizes, default=0) <= model.room, "steps stay small for a while"
        now, model.room = SMALL_S + 0.1, 4096
        engine.inbox.put(request("later", 1, prompt=1902))
        assert tokens_of(finish(engine), "later") == [TOKEN]
        assert 1902 in model.sizes


def test_a_device_without_memory_for_one_token_ends_the_request_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    settings = config().model_copy(update={"gpu": GpuConfig(graph_tokens=0)})
    with HostEngine(NarrowModel(0), settings) as engine:
        cast("Any", backend_of(engine)._graphs)._captured.clear()
        engine.inbox.put(request("r", 4, prompt=100))
        (last,) = events_of(finish(engine), "r")
        assert last.finish_reason == "error"
        assert last.error == ("the step failed: NoRoomError: CUDA out of memory. Tried to allocate 2 GiB")
        assert len(emptied) == 2 * 7, "100 tokens to 1; what a try has left is of no use to smaller ones"
        engine.check()


@pytest.mark.parametrize("healthy", [0, 1])
def test_a_step_without_memory_is_not_tried_again_on_a_device_that_computes_no_more(
    healthy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checks = NarrowModel(0), list[None]()

    def check() -> None:
        if len(checks) == healthy:
            raise EngineDead("cpu computes no more")
        checks.append(None)

    with HostEngine(model, config()) as engine:
        monkeypatch.setattr(backend_of(engine), "check", check)
        engine.inbox.put(request("r", 2, prompt=1900))
        with pytest.raises(EngineDead, match="computes no more"):
            finish(engine)
        assert model.sizes == [1900] * (healthy + 1)


def test_a_request_that_no_step_has_memory_for_ends_soon_and_delays_nobody_after_that() -> None:
    model = NarrowModel(0)
    with HostEngine(model, config(), clock=lambda: 0.0) as engine:
        engine.inbox.put(*(request(f"r{at}", 40, prompt=20) for at in range(64)))
        news = [message for _ in range(4) for message in engine.step()]
        engine.inbox.put(request("scored", 3, prompt=300, prompt_logprobs=0))
        begun = engine.stats().steps
        while not (ends := events_of(news, "scored")):
            news += engine.step()
        assert (ends[0].finish_reason, len(ends)) == ("error", 1)
        assert engine.stats().steps - begun < 20, "halved to one token, and an eighth of those steps"
        begun = engine.stats().steps
        news += finish(engine)
        assert engine.stats().steps - begun < 40, "all at once, as before"
        for at in range(64):
            assert tokens_of(news, f"r{at}") == [TOKEN] * 40
        engine.check()


def test_memory_that_comes_free_when_the_cache_is_emptied_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NarrowModel(100)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(model, "room", 4096))
    with HostEngine(model, config()) as engine:
        engine.inbox.put(request("r", 2, prompt=1900))
        assert tokens_of(finish(engine), "r") == [TOKEN] * 2
        assert model.sizes == [1900, 1900]
