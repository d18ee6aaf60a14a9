"""Cases B01, B11, B15, B27 and B35 before a real engine: leavers, log-probabilities, priorities."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from torch import Tensor

from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import EngineConfig, SchedulerConfig
from ostinato.runtime.engine_thread import EngineThread
from tests.support.engine_runs import prompt_of, toy_config
from tests.support.serving import Served, serving_engine
from tests.support.toy_model import ToyModel
from tests.support.toy_text import front_end

TEXT = "/v1/completions"
LONG: dict[str, object] = {"temperature": 0, "ignore_eos": True}
TOY = ToyModel()


class HeldModel(ToyModel):
    """Stops in the step of number `hold_at` until it is told to go on."""

    hold_at = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor]) -> Tensor:
        if self.steps + 1 == self.hold_at:
            self.held.set()
            assert self.go.wait(30)
            self.held.clear()
            self.go.clear()
        return super().__call__(inputs, kv)

    def hold(self, steps: int) -> None:
        """In so many steps from now; the engine must be at rest."""
        self.hold_at = self.steps + steps


@asynccontextmanager
async def toy(**scheduler: int) -> AsyncIterator[tuple[Served, HeldModel]]:
    models: list[HeldModel] = []

    def load(path: Path, config: EngineConfig) -> HeldModel:
        models.append(HeldModel(path))
        return models[0]

    config = toy_config(scheduler=SchedulerConfig(**{"max_step_tokens": 16, **scheduler}))
    async with serving_engine(EngineThread("toy", config, load=load), text=front_end()) as served:
        yield served, models[0]


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def send(served: Served, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps({**LONG, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def text_of(served: Served, prompt: list[int], count: int = 8) -> str:
    status, whole = await served.post(TEXT, {**LONG, "prompt": prompt, "max_tokens": count})
    assert status == 200, whole
    return str(whole["choices"][0]["text"])


def expected(served: Served, prompt: list[int], count: int = 8) -> str:
    """What the model says without any engine."""
    return served.state.text.decode(TOY.greedy(prompt, count))


def books(served: Served) -> tuple[int, ...]:
    """Running, waiting, blocks in use, requests that readers or the engine still know of."""
    stats, client = served.engine.stats, served.engine
    known = len(client._queues) + len(client._ending) + len(served.state.live)
    return (stats.running, stats.waiting, stats.blocks_used, known)


STATES = ["first event", "prefill", "whole", "queued", "n=4", "n=4, whole", "n=4, some done"]


async def test_leavers_in_every_state_free_their_blocks_and_their_prompts_are_answered_right_again():
    async with asyncio.TaskGroup() as group:  # each has a server of its own
        for state in STATES:
            group.create_task(leave(state), name=state)


async def leave(state: str) -> None:
    prompt = prompt_of(200)
    many = state.startswith("n=4")
    fields: dict[str, object] = {"prompt": prompt, "max_tokens": 300, "n": 4 if many else 1}
    fields["stream"] = state in ("first event", "prefill", "n=4", "n=4, some done")
    if state == "n=4, some done":  # a seed decides which choice meets its stop token, and when
        fields |= {"temperature": 1.0, "seed": 5, "stop_token_ids": list(range(2, 22))}
    async with toy(max_running=1 if state == "queued" else 8) as (served, model):
        # 13 steps of 16 tokens are the prefill; then one token a step
        model.hold({"prefill": 5, "first event": 20}.get(state, 30))
        others = [await send(served, prompt=[5], max_tokens=400)] if state == "queued" else []
        reader, writer = await send(served, **fields)
        await until(model.held.is_set)
        if state in ("first event", "n=4", "n=4, some done"):
            await reader.readuntil(b"data: {")
        if state == "queued":
            await until(lambda: len(served.engine._queues) == 2)
        if state == "n=4, some done":
            await until(lambda: 0 < len(served.engine._queues) < 4)
        assert served.engine._queues
        writer.close()
        await until(lambda: len(served.engine._queues) == len(others), seconds=1.5)  # half a second, if idle
        model.go.set()
        for other, its_writer in others:
            raw = await asyncio.wait_for(other.read(), 10)
            assert json.loads(raw.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 400
            its_writer.close()
        await until(lambda: books(served) == (0, 0, 0, 0))
        assert await text_of(served, prompt) == expected(served, prompt)
        assert await text_of(served, prompt) == expected(served, prompt)


async def test_who_ends_only_the_sending_side_gets_the_whole_answer():
    prompt = prompt_of(40)
    async with toy() as (served, model):
        model.hold(10)
        reader, writer = await send(served, prompt=prompt, max_tokens=30)
        await until(model.held.is_set)
        writer.write_eof()
        await asyncio.sleep(0.3)  # it is probed meanwhile
        model.go.set()
        raw = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        choice = json.loads(raw.rpartition(b"\r\n\r\n")[2])["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected(served, prompt, 30), "length")


async def test_a_better_priority_takes_a_slot_and_the_stream_that_lost_it_goes_on_where_it_was():
    """Case B35: two slots with work of low priority, then one of high."""
    async with toy(max_running=2) as (served, model):
        usage = {"stream_options": {"include_usage": True}, "max_tokens": 60, "priority": 5, **LONG}
        prompts = [prompt_of(40, seed) for seed in range(2)]
        model.hold(20)
        low = [asyncio.create_task(served.events(TEXT, {"prompt": prompt, **usage})) for prompt in prompts]
        await until(model.held.is_set)
        first = prompt_of(20, 7)
        fields = {"prompt": first, "max_tokens": 8, "priority": -1, **LONG}
        high = asyncio.create_task(served.post(TEXT, fields))
        await until(lambda: len(served.engine._queues) == 3)
        model.go.set()
        status, whole = await high
        assert (status, whole["choices"][0]["text"]) == (200, expected(served, first))
        assert not any(task.done() for task in low)
        for prompt, events in zip(prompts, await asyncio.gather(*low), strict=True):
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            assert "".join(choice["text"] for choice in choices) == expected(served, prompt, 60)
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
            told = events[-2]["usage"]
            assert (told["prompt_tokens"], told["completion_tokens"]) == (40, 60)
            assert told["prompt_tokens_details"]["cached_tokens"] == 0  # its own blocks are no hit
        await until(lambda: books(served) == (0, 0, 0, 0))
        assert served.engine.stats.preemptions == 1


async def test_two_choices_on_one_slot_come_one_after_the_other():
    """Case B01: strictly one at a time, and no deadlock."""
    prompt = prompt_of(40)
    async with toy(max_running=1) as (served, _):
        fields = {"prompt": prompt, "n": 2, "max_tokens": 8, **LONG}
        status, whole = await served.post(TEXT, fields)
        assert (status, [one["text"] for one in whole["choices"]]) == (200, [expected(served, prompt)] * 2)
        events = await served.events(TEXT, fields)
        told = [choice for event in events[:-1] for choice in event["choices"]]
        assert [one["index"] for one in told] == sorted(one["index"] for one in told)
        for index in (0, 1):
            assert "".join(one["text"] for one in told if one["index"] == index) == expected(served, prompt)


@pytest.mark.parametrize("value", ["high", "1", 1.5, True, [], 2**31])
async def test_a_priority_that_is_no_integer_is_refused_by_name(value: object):
    async with toy() as (served, _):
        for path, fields in (
            (TEXT, {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            status, answer = await served.post(path, {**fields, "priority": value})
            assert (status, answer["error"]["param"]) == (400, "priority")


async def test_log_probabilities_of_a_real_engine_are_strict_json_under_every_filter():
    """Case B27: `post` refuses NaN and Infinity."""
    filters: list[dict[str, object]] = [
        {"temperature": 0},
        {"top_k": 1, "temperature": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"logit_bias": {"10": -100}},
        {"allowed_token_ids": [10]},
        {"priority": -3},
        {"priority": 0},
    ]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}
    text = {"prompt": prompt_of(20), "echo": True, "logprobs": 1, "ignore_eos": True}
    async with toy() as (served, _):
        for filtered in filters:
            fields = {**chat, **filtered, "logprobs": True, "top_logprobs": 5}
            status, whole = await served.post("/v1/chat/completions", fields)
            assert status == 200, whole
            listed = whole["choices"][0]["logprobs"]["content"]
            values = [one["logprob"] for entry in listed for one in (entry, *entry["top_logprobs"])]
            assert len(values) == len(listed) * 6 > 0
            assert all(isinstance(value, float) and value <= 0 for value in values)
            for most in (0, 3):
                status, whole = await served.post(TEXT, {**text, **filtered, "max_tokens": most})
                assert (status, whole["usage"]["completion_tokens"]) == (200, most), whole
                logprobs = whole["choices"][0]["logprobs"]
                assert logprobs["token_logprobs"][0] is None
                assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
                if most == 0:
                    assert whole["choices"][0]["text"] == served.state.text.decode(text["prompt"])
                    assert len(logprobs["tokens"]) == len(text["prompt"])
