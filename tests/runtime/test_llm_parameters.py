"""Parameters of `LLM`'s calls and of `SamplingParams`, through the engine with the toy model."""

from itertools import pairwise

import pytest

from ostinato.errors import InvalidRequest, WrongTask
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support.engine_runs import prompt_of, toy_config
from tests.support.toy_model import ToyModel, load_toy
from tests.support.toy_text import front_end

TOY = ToyModel()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}]


@pytest.fixture(scope="module")
def llm():
    config = toy_config()
    with LLM.over(EngineThread("toy", config, load=load_toy), front_end(temperature=0.0), config) as shared:
        yield shared


def greedy(**more):
    return GREEDY.model_copy(update=more)


def test_no_token_but_the_allowed_ones_comes(llm):
    allowed = (7, 30, 31)
    for temperature in (0, 2.0):
        (output,) = llm.generate(prompt_of(9), greedy(allowed_token_ids=allowed, temperature=temperature))
        assert set(output.outputs[0].token_ids) <= set(allowed)
        assert len(output.outputs[0].token_ids) == 12


def test_a_bad_word_does_not_come_and_its_beginning_may(llm):
    prompt = prompt_of(9)
    plain = TOY.greedy(prompt, 12)
    word = tuple(plain[3:5])
    (output,) = llm.generate(prompt, greedy(bad_word_ids=(word,)))
    tokens = list(output.outputs[0].token_ids)
    assert tokens[:4] == plain[:4]
    assert word not in list(pairwise(tokens))
    (output,) = llm.generate(prompt, greedy(bad_word_ids=((plain[0],),)))
    assert plain[0] not in output.outputs[0].token_ids


def test_bad_words_as_text_are_barred_as_the_tokens_that_spell_them(llm):
    only = tuple(llm.text.encode(" fox")) + tuple(llm.text.encode("b"))
    (output,) = llm.generate(prompt_of(5), greedy(allowed_token_ids=only))
    assert "fox" in output.outputs[0].text or " b" not in output.outputs[0].text
    (output,) = llm.generate(prompt_of(5), greedy(allowed_token_ids=only, bad_words=("fox",)))
    assert "fox" not in output.outputs[0].text


def test_named_tokens_are_scored_in_place_of_the_likeliest(llm):
    named = (5, 9, 5)
    (output,) = llm.generate(prompt_of(9), greedy(logprobs=0, logprob_token_ids=named))
    (best,) = llm.generate(prompt_of(9), greedy(logprobs=llm.info.vocab_size))
    for record, full in zip(output.outputs[0].logprobs, best.outputs[0].logprobs, strict=True):
        assert [token for token, _ in record.top] == list(named)
        values = dict(full.top)
        assert [value for _, value in record.top] == [
            values.get(token, pytest.approx(-9999.0)) for token in named
        ]


def test_prompt_logprobs_of_one_token_are_none_alone(llm):
    (output,) = llm.generate([prompt_of(1)], greedy(prompt_logprobs=2))
    assert output.prompt_logprobs == (None,)
    (output,) = llm.generate([prompt_of(40)], greedy(prompt_logprobs=0))
    assert len(output.prompt_logprobs) == 40
    assert output.prompt_logprobs[0] is None
    assert all(record.logprob <= 0 for record in output.prompt_logprobs[1:])


def test_a_prompt_keeps_its_end(llm):
    long, window = prompt_of(30), llm.info.max_model_len
    outputs = llm.generate([long, "the quick brown fox"], GREEDY, truncate_prompt_tokens=4)
    assert outputs[0].prompt_token_ids == tuple(long[-4:])
    assert outputs[1].prompt_token_ids == tuple(llm.text.encode("the quick brown fox")[-4:])
    assert list(outputs[0].outputs[0].token_ids) == TOY.greedy(long[-4:], 12)
    outputs = llm.generate("fox " * window, [GREEDY], truncate_prompt_tokens=-1)
    assert len(outputs[0].prompt_token_ids) == window - 12
    outputs = llm.chat([{"role": "user", "content": "fox " * window}], truncate_prompt_tokens=-1)
    assert len(outputs[0].prompt_token_ids) == window - 1


def test_prefixes_are_shared_only_among_equal_salts(llm):
    prompt = prompt_of(50)
    cached = [
        llm.generate([prompt], GREEDY, cache_salt=salt, priority=-3)[0].num_cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_a_conversation_can_be_continued_and_rendered_by_another_template(llm):
    (output,) = llm.chat(HELLO, GREEDY, continue_final_message=True)
    assert output.prompt.endswith("assistant\nIt is")
    (output,) = llm.chat(HELLO, GREEDY, add_generation_prompt=False)
    assert output.prompt.endswith("It is<|im_end|>\n")
    template = "{% for d in documents %}[{{ d.title }}]{% endfor %}{{ messages | length }}"
    (output,) = llm.chat(HELLO, GREEDY, chat_template=template, documents=[{"title": "one"}])
    assert output.prompt == "[one]2"


def test_parts_of_text_are_given_as_the_template_reads_them(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert "user\na\nb<|im_end|>" in output.prompt


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": None}, "cache_salt"),
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents"),
        ({"chat_template": 5}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"sampling": SamplingParams(allowed_token_ids=(10**6,))}, "allowed_token_ids"),
        ({"sampling": SamplingParams(logprob_token_ids=(5,))}, "logprob_token_ids"),
    ],
)
def test_wrong_arguments_are_refused_by_name(llm, arguments, param):
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(HELLO, **arguments)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("call", "task"), [(lambda llm: llm.embed("a"), "embed"), (lambda llm: llm.score("a", "b"), "score")]
)
def test_what_this_model_cannot_do_is_refused_with_the_methods_that_it_is_for(llm, call, task):
    says = rf"cannot {task}: it is a model to generate with, for LLM\.generate, LLM\.chat and LLM\.stream$"
    with pytest.raises(WrongTask, match=says):
        call(llm)
