"""`LLM` over the toy model with a real small tokenizer: batches, text, streams, errors, leftovers."""

import asyncio
import gc
import os
import signal
import threading
import time
import warnings
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ostinato.errors import ConfigError, ContextTooLong, EngineDead, InvalidRequest
from ostinato.runtime.config import EngineConfig, KVConfig, SchedulerConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM, configured
from ostinato.runtime.messages import SamplingParams
from tests.support.engine_runs import prompt_of, toy_config
from tests.support.tiny_models import make_tiny
from tests.support.toy_model import CRASH, EOS, POISON, ToyModel, load_toy
from tests.support.toy_text import front_end

TOY = ToyModel()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(artifact="toy", **settings):
    config = toy_config(**settings)
    return LLM.over(EngineThread(artifact, config, load=load_toy), front_end(temperature=0.0), config)


@pytest.fixture(scope="module")
def llm():
    with make_llm() as shared:
        yield shared


def text_of(llm, token_ids):
    detokenizer = llm.text.codec.detokenizer(skip_special=True)
    return "".join([detokenizer.push(token) for token in token_ids]) + detokenizer.finish()


def test_text_and_token_prompts_in_one_batch_come_back_in_order(llm):
    prompts = ["the quick brown fox", prompt_of(33), "an ostinato", prompt_of(1)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["the quick brown fox", None, "an ostinato", None]
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tuple(llm.text.encode(prompt) if isinstance(prompt, str) else prompt)
        assert output.prompt_token_ids == ids
        (answer,) = output.outputs
        assert list(answer.token_ids) == TOY.greedy(ids, 12)
        assert answer.text == text_of(llm, answer.token_ids)
        assert (answer.index, answer.finish_reason, answer.logprobs) == (0, "length", None)


def test_one_prompt_may_stand_alone_as_text_or_ids(llm):
    (by_text,) = llm.generate("hello", GREEDY)
    (by_ids,) = llm.generate(llm.text.encode("hello"), GREEDY)
    assert by_text.outputs == by_ids.outputs


def test_chat_goes_through_the_models_template(llm):
    messages = [{"role": "user", "content": "Hello world"}]
    (one,) = llm.chat(messages, GREEDY)
    assert one.prompt == llm.text.render_chat(messages)
    assert one.prompt.startswith("<|im_start|>user\nHello world")
    assert one.prompt_token_ids == tuple(llm.text.encode_chat(messages))
    assert list(one.outputs[0].token_ids) == TOY.greedy(one.prompt_token_ids, 12)
    two = llm.chat([messages, [{"role": "user", "content": "again"}]], GREEDY)
    assert two[0].outputs == one.outputs
    assert "again" in two[1].prompt


def test_n_answers_differ_and_are_the_same_again_with_the_same_seed(llm):
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, temperature=2.0)
    (first,) = llm.generate("hello", params, n=3)
    (again,) = llm.generate("hello", params, n=3)
    (alone,) = llm.generate("hello", params.model_copy(update={"seed": 4}))
    answers = [answer.token_ids for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len(set(answers)) == 3
    assert answers == [answer.token_ids for answer in again.outputs]
    assert answers[1] == alone.outputs[0].token_ids


def test_each_prompt_can_have_its_own_sampling_and_none_means_the_models_defaults(llm):
    short = GREEDY.model_copy(update={"max_tokens": 2})
    outputs = llm.generate(["hello", "hello"], [short, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 12]
    (default,) = llm.generate(prompt_of(500))  # the front end's default temperature is 0; the window ends it
    assert list(default.outputs[0].token_ids) == TOY.greedy(prompt_of(500), 12)
    assert default.outputs[0].finish_reason == "length"


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm):
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    stop = text_of(llm, whole.token_ids[4:6])
    at = whole.text.index(stop)
    (output,) = llm.generate("hello", GREEDY.model_copy(update={"stop": (stop,)}))
    answer = output.outputs[0]
    assert answer.text == whole.text[:at]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) < 12


def test_eos_ends_the_text_and_is_listed_but_not_shown(llm):
    params = SamplingParams(temperature=0, logit_bias={EOS: 100.0}, min_tokens=3, max_tokens=9)
    answer = llm.generate("hello", params)[0].outputs[0]
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == EOS
    assert len(answer.token_ids) == 4
    assert answer.text == text_of(llm, answer.token_ids[:3])


def test_log_probabilities_come_for_answer_and_prompt(llm):
    params = GREEDY.model_copy(update={"logprobs": 1, "prompt_logprobs": 0})
    (output,) = llm.generate("hello world", params)
    answer = output.outputs[0]
    assert [record.token_id for record in answer.logprobs] == list(answer.token_ids)
    assert all(record.top == ((record.token_id, record.logprob),) for record in answer.logprobs)
    assert output.prompt_logprobs[0] is None
    assert [record.token_id for record in output.prompt_logprobs[1:]] == list(output.prompt_token_ids[1:])


def test_cached_tokens_are_told(llm):
    prompt = prompt_of(40, 99)
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32


@pytest.mark.parametrize(
    ("prompts", "sampling", "error", "says"),
    [
        ("", None, InvalidRequest, "empty"),
        ([[5], []], None, InvalidRequest, "empty"),
        ([[5], [512]], None, InvalidRequest, "token id 512"),
        ([["a"]], None, InvalidRequest, r"prompts\[0\]\[0\]: got 'a' \(str\)"),
        (None, None, InvalidRequest, r"prompts: got None \(NoneType\); give text"),
        (5, None, InvalidRequest, r"prompts: got 5 \(int\)"),
        ((id for id in [5]), None, InvalidRequest, r"prompts: got <generator"),
        (b"hi", None, InvalidRequest, r"prompts: got b'hi' \(bytes\)"),
        ({"prompt": "hi"}, None, InvalidRequest, r"prompts: got .*\(dict\)"),
        ([5.0], None, InvalidRequest, r"prompts\[0\]: got 5.0 \(float\)"),
        ([5, 6.0], None, InvalidRequest, r"prompts\[1\]: got 6.0 \(float\)"),
        ([True], None, InvalidRequest, r"prompts\[0\]: got True \(bool\)"),
        ([5, [6]], None, InvalidRequest, r"prompts\[1\]: got \[6\] \(list\)"),
        (np.array([5.0]), None, InvalidRequest, r"prompts\[0\]: got 5.0 \(float\)"),
        (["a", "\ud800"], None, InvalidRequest, r"prompts\[1\]: character 0 is '\\ud800', half of"),
        ("a", {"temperature": 0}, InvalidRequest, r"sampling: got .*\(dict\); give SamplingParams"),
        ("a", [{}], InvalidRequest, r"sampling\[0\]: got {} \(dict\)"),
        (prompt_of(512), None, ContextTooLong, "512 tokens"),
        (["a", "b"], [GREEDY], InvalidRequest, "1 for 2 prompts"),
        ("a", SamplingParams(logit_bias={512: 1.0}), InvalidRequest, "logit_bias"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(llm, prompts, sampling, error, says):
    before = llm.stats.steps
    with pytest.raises(error, match=says):
        llm.generate(prompts, sampling)
    assert llm.stats.steps == before


def test_wrong_messages_and_a_wrong_n_are_refused(llm):
    with pytest.raises(InvalidRequest, match=r"messages: got 'hi'"):
        llm.chat("hi")
    with pytest.raises(InvalidRequest, match=r"messages.*half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\ud800"}])
    with pytest.raises(InvalidRequest, match=r"n: got 1.5"):
        llm.generate("a", n=1.5)


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6]),
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        [np.array([5, 6])],
        list(np.array([5, 6])),
    ],
)
def test_integer_arrays_are_token_ids(llm, prompts):
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == (5, 6)
    assert list(output.outputs[0].token_ids) == TOY.greedy([5, 6], 12)


def test_one_failing_request_does_not_take_the_others_with_it(llm):
    bad, good = llm.generate([[5, POISON], [5, 6]], GREEDY)
    assert bad.outputs[0].finish_reason == "error"
    assert "NaN" in bad.outputs[0].error
    assert list(good.outputs[0].token_ids) == TOY.greedy([5, 6], 12)
    (crashed,) = llm.generate([5, CRASH], GREEDY)
    assert "toy model crashed" in crashed.outputs[0].error
    assert list(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == TOY.greedy([5, 6], 12)


def test_more_prompts_than_the_queue_holds_wait_their_turn():
    with make_llm(scheduler=SchedulerConfig(max_running=2, max_waiting=3)) as small:
        prompts = [[5, i + 2] for i in range(40)]
        outputs = small.generate(prompts, GREEDY.model_copy(update={"max_tokens": 2}))
    assert [list(o.outputs[0].token_ids) for o in outputs] == [TOY.greedy(p, 2) for p in prompts]


async def test_stream_gives_the_same_text_in_pieces(llm):
    whole = llm.generate("hello world", GREEDY)[0].outputs[0]  # also: a loop runs in this thread
    pieces = [piece async for piece in llm.stream("hello world", GREEDY)]
    assert 1 < len(pieces) <= 12  # tokens that come at once share a piece
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    chat = [piece async for piece in llm.stream([{"role": "user", "content": "hi"}], GREEDY)]
    expected = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs[0].text
    assert "".join(piece.text for piece in chat) == expected


async def test_leaving_a_stream_early_frees_its_blocks():
    with make_llm("slow") as slow:
        async with aclosing(slow.stream("hello", GREEDY.model_copy(update={"max_tokens": 400}))) as pieces:
            async for _ in pieces:
                break
        for _ in range(200):
            if slow.stats.steps and not slow.stats.running:
                break
            await asyncio.sleep(0.02)
        assert slow.stats.running == 0
        assert slow.stats.blocks_used == 0
        assert slow.stats.generated_tokens < 200


async def test_a_wrong_streamed_request_raises_at_once(llm):
    with pytest.raises(ContextTooLong):
        await anext(llm.stream(prompt_of(600), GREEDY))
    with pytest.raises(InvalidRequest, match=r"prompt: got None"):
        await anext(llm.stream(None, GREEDY))
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]: got 'two'"):
        await anext(llm.stream(["two", "prompts"], GREEDY))


def test_calls_from_several_threads_at_once_are_one_batch(llm):
    results = {}

    def ask(number):
        results[number] = llm.generate([5, number], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: tuple(TOY.greedy([5, number], 12)) for number in range(2, 8)}


def ostinato_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("ostinato", "tokenize"))]


def test_close_frees_threads_and_memory_and_later_calls_say_so(caplog):
    before = ostinato_threads()
    llm = make_llm()
    llm.generate("hello", GREEDY)
    assert len(ostinato_threads()) > len(before)
    llm.close()
    llm.close()
    assert ostinato_threads() == before
    assert "still hold" not in caplog.text  # the KV pool's warning about planes that keep memory alive
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("hello", GREEDY)
    with pytest.raises(EngineDead, match="closed"), llm:
        pass


def test_in_a_fork_every_call_says_so_and_close_is_quiet(llm):
    def said(call):
        try:
            call()
        except EngineDead as error:
            return "make the LLM in the child" in str(error)
        return False

    with warnings.catch_warnings():  # newer Pythons warn of what is tested here
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        right = False
        try:
            signal.alarm(20)  # a child that hangs is killed, and the test fails
            calls = [
                lambda: llm.generate("hello", GREEDY),
                lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY),
                lambda: llm.stream("hello", GREEDY).asend(None).send(None),
                llm.__enter__,
            ]
            right = all(said(call) for call in calls)
            llm.close()
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == TOY.greedy([5, 6], 12)


def test_a_dropped_llm_frees_itself():
    before = ostinato_threads()
    llm = make_llm()
    del llm
    gc.collect()
    assert ostinato_threads() == before


def test_closing_while_requests_run_ends_them():
    llm = make_llm("slow")
    failures = []

    def ask():
        try:
            llm.generate("hello", GREEDY.model_copy(update={"max_tokens": 400}))
        except EngineDead as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not llm.stats.running:
        time.sleep(0.005)
    llm.close()
    thread.join()
    assert failures == ["the engine was closed"]


@pytest.mark.parametrize(("artifact", "says"), [("damaged", "flipped byte"), ("raises", "ZeroDivisionError")])
def test_a_start_that_fails_leaves_nothing_behind(artifact, says):
    before = ostinato_threads()
    with pytest.raises(Exception, match=says):
        make_llm(artifact)
    assert ostinato_threads() == before


def test_settings_are_merged_into_their_sections():
    base = EngineConfig(kv=KVConfig(block_tokens=32))
    made = configured(base, {"kv": {"max_gib": 2}, "max_model_len": 100})
    assert made.kv == KVConfig(block_tokens=32, max_gib=2)
    assert made.max_model_len == 100
    assert configured(base, {"scheduler": SchedulerConfig(max_running=3)}).scheduler.max_running == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv": {"page_tokens": 8}}, r"kv.page_tokens=8: no such setting; known here: .*block_tokens"),
        ({"kv": {"block_tokens": 0}}, r"kv.block_tokens=0: .*greater than or equal to 1"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization=0.9: no such setting; known here: .*kv"),
    ],
)
def test_a_wrong_setting_is_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        LLM("nowhere", **settings)


@pytest.mark.parametrize("path", [None, 5, b"model"])
def test_a_path_that_is_none_is_a_config_error(path):
    with pytest.raises(ConfigError, match=r"path: got .*; give a str or a Path"):
        LLM(path)


def test_progress_is_shown_only_when_asked_for(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_a_model_folder_is_compiled_once_and_then_loaded_from_the_cache(
    shared_kernels, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny("llama", tmp_path / "tiny")
    settings = {"cpu": {"bind": False}, "kv": {"initial_mib": 1, "max_gib": 0.1, "headroom_gib": 0}}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(tmp_path / "tiny", **settings) as first:
        answer = first.generate([5, 6, 7], params)[0].outputs[0]
        assert first.text.decode(answer.token_ids) == answer.text
    assert "compiling tiny" in capsys.readouterr().err
    with LLM(tmp_path / "tiny", **settings, progress=False) as second:
        assert second.generate([5, 6, 7], params)[0].outputs[0] == answer
    assert capsys.readouterr().err.count("compiling") == 0
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = reference.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert ids[0, 3:].tolist() == list(answer.token_ids)
