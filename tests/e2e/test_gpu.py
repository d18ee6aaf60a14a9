"""The engine on a GPU: transformers' tokens in float32, graphs that are exact, memory that comes and goes.

OSTINATO_RACES says how many races are drawn, OSTINATO_RACE_S how many seconds each takes: `scripts/gpu_check
race` runs several at once, which are 10 minutes together.
"""

import os
import random
import time
from dataclasses import replace

import pytest
import torch

from ostinato.errors import ArtifactError
from ostinato.runtime.artifact import load_artifact
from ostinato.runtime.config import GpuConfig, KVConfig, SchedulerConfig
from ostinato.runtime.frames import Events
from ostinato.runtime.gpu.step_graphs import bucket_shapes
from ostinato.runtime.messages import Abort, CallDone, Sleep, Wake
from tests.e2e.gpu_engines import RUNNING, answers, asked, backend_of, gpu_engine, wanted
from tests.support.engine_runs import events_of, finish, greedy, tokens_of
from tests.support.gpu_models import MIN_MARGIN, prompt_ids
from tests.support.tiny_models import edit_json

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
RACE_S = float(os.environ.get("OSTINATO_RACE_S", "20"))
RACES = int(os.environ.get("OSTINATO_RACES", "1"))
NO_CACHE = KVConfig(max_gib=2, initial_mib=512, prefix_cache=False)


def test_greedy_tokens_equal_transformers_alone_and_together_with_prefix_hits(float32, cases):
    with gpu_engine(float32) as engine:
        assert engine.info.dtype == "float32"
        alone = {}
        for request in asked(cases):
            alone |= answers(engine, [request])
        assert alone == wanted(cases)
        hits = engine.stats().prefix_hits
        assert answers(engine, asked(cases)) == wanted(cases)
        stats = engine.stats()
        assert stats.prefix_hits - hits == sum((len(case.prompt) - 1) // 16 * 16 for case in cases)
        assert stats.graph_replays > 0
        engine.check()


@pytest.mark.parametrize("step_tokens", [0, 48], ids=["whole prompts", "chunks of 48"])
@pytest.mark.parametrize("graph_tokens", [1024, 0], ids=["graphs", "no graphs"])
def test_greedy_tokens_equal_transformers_all_at_once(float32, cases, step_tokens, graph_tokens):
    scheduler = SchedulerConfig(max_running=RUNNING, max_step_tokens=step_tokens)
    gpu = GpuConfig(graph_tokens=graph_tokens)
    with gpu_engine(float32, kv=NO_CACHE, scheduler=scheduler, gpu=gpu) as engine:
        assert answers(engine, asked(cases)) == wanted(cases)
        stats = engine.stats()
        assert (stats.graph_replays > 0) == (graph_tokens > 0)
        assert set(stats.eager_steps) <= {"too_large", "not_captured"}


def test_log_probabilities_are_those_of_transformers(float32, cases):
    scored = [case for case in cases if case.logprobs is not None and case.tokens]
    if not scored:
        pytest.skip("the golden file of the demo model has no log-probabilities")
    with gpu_engine(float32) as engine:
        for case in scored:
            request = greedy("s", case.prompt, len(case.tokens), logprobs=2, prompt_logprobs=0)
            engine.inbox.put(request)
            events = events_of(finish(engine), "s")
            records = [*events[0].prompt_logprobs[1:], *(event.logprobs[0] for event in events)]
            assert [r.token_id for r in records] == [*case.prompt[1:], *case.tokens]
            # 30 layers of float32: logits of size 3 err by about 1e-5
            assert [r.logprob for r in records] == pytest.approx(case.logprobs, abs=2e-4)
            assert all(event.logprobs[0].rank == 1 for event in events)


def test_random_requests_with_seeds_give_the_same_tokens_alone_and_together(float32):
    requests = [
        greedy(f"r{n}", prompt_ids(n), 24, temperature=0.9, seed=n, top_p=0.95) for n in (5, 30, 100, 300)
    ]
    with gpu_engine(float32, kv=NO_CACHE) as engine:
        together = answers(engine, requests)
        alone = {}
        for request in requests:
            alone |= answers(engine, [request])
    assert alone == together


def test_in_bfloat16_a_row_gives_the_same_tokens_in_any_company_of_its_size_and_at_any_place(bfloat16):
    def crowd(names, seed):
        return [
            greedy(name, prompt_ids(33, at if name == "same" else seed + at), 24, temperature=0.9, seed=7)
            for at, name in enumerate(names)
        ]

    others = [f"o{at}" for at in range(11)]
    first = crowd(["same", *others], 100)
    last = crowd([*others, "same"], 200)
    last[-1] = first[0]
    with gpu_engine(bfloat16, kv=NO_CACHE) as engine:
        assert answers(engine, first)["same"] == answers(engine, last)["same"]


def test_every_bucket_is_captured_and_its_replay_equals_eager(bfloat16):
    with gpu_engine(bfloat16) as engine, torch.inference_mode():
        backend = backend_of(engine)
        with engine._sizer.quiet():  # as in the engine's loop: a driver call of the other thread spoils it
            while backend.idle():
                pass
        captured = backend._graphs._captured
        assert set(captured) == set(bucket_shapes(RUNNING, 1024))
        for plane in engine._memory.narrowed():
            plane[0].normal_()  # what the check of a shape reads
        for shape, replay in captured.items():
            backend._prepare(shape)
            eager = backend._body(shape).clone()
            backend._prepare(shape)
            replay.graph.replay()
            assert eager.isfinite().all()
            assert torch.equal(replay.logits, eager), shape
        assert "self_check" not in engine.stats().eager_steps


def test_nan_in_padding_rows_and_in_unused_kv_reaches_no_answer(bfloat16):
    requests = [greedy(f"r{n}", prompt_ids(n), 20, logprobs=1) for n in (5, 17, 40, 90, 200)]
    seen = []
    for poisoned in (False, True):
        with gpu_engine(bfloat16, kv=NO_CACHE) as engine:
            if poisoned:
                (embedding,) = (
                    t for name, t in engine._sleeper._weights.tensors().items() if "embed_tokens" in name
                )
                embedding[0] = float("nan")  # token 0 fills the rows past those of a plan
                for plane in engine._memory.narrowed():
                    plane.fill_(float("nan"))
                torch.cuda.synchronize()
            engine.inbox.put(*requests)
            news = finish(engine)
            stats = engine.stats()
            assert stats.graph_replays > 0
            told = [events_of(news, request.request_id) for request in requests]
            seen.append([[replace(event, queued_s=0.0) for event in events] for events in told])
    assert seen[0] == seen[1]  # tokens, log-probabilities, ends
    assert all(events[-1].finish_reason == "length" for events in seen[1])


@pytest.mark.parametrize("level", [1, 2])
def test_five_sleeps_give_the_memory_back_and_change_no_answer(float32, cases, level):
    def call(message):
        engine.inbox.put(message)
        (done,) = [news for news in engine.step() if isinstance(news, CallDone)]
        assert not done.error
        return done.state

    with gpu_engine(float32) as engine:
        weights = engine._sleeper._weights.bytes
        for turn in range(5):
            assert answers(engine, asked(cases)) == wanted(cases), turn
            free, _ = torch.cuda.mem_get_info()
            asleep = call(Sleep(call_id=turn, level=level))
            assert (asleep.asleep, asleep.weights_bytes, asleep.kv_bytes) == (level, 0, 0)
            freed = torch.cuda.mem_get_info()[0] - free
            assert freed >= weights + (256 << 20), f"{freed >> 20} MiB came back"
            engine.check()
            assert call(Wake(call_id=turn)).weights_bytes >= weights
        assert answers(engine, asked(cases)) == wanted(cases)
        assert engine.stats().graph_replays > 0
        engine.check()


def test_memory_that_grows_during_decode_changes_no_token(float32):
    prompts = [greedy(f"r{at}", prompt_ids(150, at), 60) for at in range(14)]  # 140 blocks, later 196
    with gpu_engine(float32, kv=NO_CACHE) as engine:
        truth = answers(engine, prompts)
    small = KVConfig(max_gib=4, initial_mib=1, ahead_mib=0, prefix_cache=False)
    with gpu_engine(float32, kv=small) as engine:
        engine.inbox.put(*prompts)
        news = engine.step()
        while not all(events_of(news, request.request_id) for request in prompts):
            news += engine.step()
        start = engine.stats().blocks_committed
        news += finish(engine)
        assert {r.request_id: tuple(tokens_of(news, r.request_id)) for r in prompts} == truth
        assert engine.stats().blocks_committed > start
        engine.check()


def test_an_artifact_of_another_gpu_is_refused(float32):
    folder = float32.with_name("other-gpu")
    folder.mkdir(exist_ok=True)
    for file in float32.iterdir():
        link = folder / file.name
        if link.is_symlink() or link.exists():
            link.unlink()
        if file.name == "manifest.json":
            link.write_bytes(file.read_bytes())
        else:
            link.symlink_to(file)
    target = load_artifact(float32).manifest.target
    edit_json(
        folder / "manifest.json", target=target.model_copy(update={"features": ("sm_80",)}).model_dump()
    )
    with pytest.raises(ArtifactError, match="sm_80"):
        load_artifact(folder)


def test_steps_that_find_no_memory_are_made_again_smaller_with_the_same_tokens(float32, cases, caplog):
    with gpu_engine(float32, kv=NO_CACHE, gpu=GpuConfig(graph_tokens=256)) as engine:
        while engine._idle():  # all that small steps need is captured
            pass
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(backend_of(engine)._device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            assert answers(engine, asked(cases)) == wanted(cases)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "tokens found no memory" in caplog.text
        assert engine.stats().preemptions == 0
        engine.check()


@pytest.mark.parametrize("seed", range(3, 3 + RACES))
def test_random_arrivals_aborts_and_preemptions_give_the_tokens_of_requests_alone(float32, seed):
    truth = {}
    with gpu_engine(float32, kv=NO_CACHE) as engine:
        for at in range(32):
            drawn = {"temperature": 0.9, "seed": at} if at % 4 == 3 else {}
            request = greedy(f"{at}", prompt_ids(10 + 5 * at, at), 48, logprobs=2, **drawn)
            engine.inbox.put(request)
            events = events_of(finish(engine), f"{at}")
            margins = [event.logprobs[0].top[0][1] - event.logprobs[0].top[1][1] for event in events]
            near = next((i for i, m in enumerate(margins) if m < MIN_MARGIN and not drawn), len(margins))
            truth[at] = (request, [event.token_ids[0] for event in events][:near])
        block_bytes = engine._memory.block_bytes
    draw = random.Random(seed)
    few_gib = 400 * block_bytes / 2**30  # 64 requests begin with 6 blocks each on average and end with 9
    kv = KVConfig(max_gib=few_gib, initial_mib=1)
    live, seen, finished, aborted = {}, {}, 0, 0
    with gpu_engine(float32, kv=kv) as engine:
        end = time.monotonic() + RACE_S
        number = 0
        while live or time.monotonic() < end:
            while time.monotonic() < end and len(live) < 100 and draw.random() < 0.9:
                at = draw.choice([at for at, (_, tokens) in truth.items() if tokens])
                request, tokens = truth[at]
                params = request.sampling.model_copy(
                    update={
                        "max_tokens": draw.randint(1 + len(tokens) // 2, len(tokens)),
                        "logprobs": draw.choice((None, None, 2)),
                    }
                )
                name, number = f"q{number}", number + 1
                live[name], seen[name] = (at, params.max_tokens), []
                changes = {
                    "request_id": name,
                    "sampling": params,
                    "priority": draw.choice((0, 0, 0, -1)),  # may take the place of another
                    "cache_salt": draw.choice("abcdefgh"),  # some prefixes are shared
                }
                engine.inbox.put(request.model_copy(update=changes))
            if live and draw.random() < 0.1:
                engine.inbox.put(Abort(request_ids=(draw.choice([*live]),)))
            for event in (e for m in engine.step() if isinstance(m, Events) for e in m.events):
                seen[event.request_id] += event.token_ids
                if event.finish_reason is None:
                    continue
                at, count = live.pop(event.request_id)
                got, right = seen.pop(event.request_id), truth[at][1][:count]
                assert event.finish_reason in ("length", "abort"), event
                aborted += event.finish_reason == "abort"
                finished += event.finish_reason == "length"
                assert got == (right if event.finish_reason == "length" else right[: len(got)]), at
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        engine.check()
    print(f"{finished} finished, {aborted} aborted, {stats.preemptions} preempted")  # seen with -s
    assert min(finished, aborted, stats.preemptions) > 5, (finished, aborted, stats)
