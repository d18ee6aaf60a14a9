"""From formats and settings to marks in the model's own tokens; settings that a server refuses to use."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.output.registry import choose_formats, reasoning_names
from ostinato.runtime.request_check import check_request
from ostinato.runtime.sampling.sampling_check import validate_sampling
from ostinato.runtime.text import TextFrontEnd
from ostinato.runtime.thinking.thought_marks import ThoughtMarks, thought_marks, with_thoughts
from tests.support.fake_engine import info, say
from tests.support.serving import serving
from tests.support.thinking_text import SENTENCE, front_end

TEXT = front_end()


def marks(reasoning: str, start: str = "", end: str = "", tools: str = "none") -> ThoughtMarks | None:
    return thought_marks(choose_formats(reasoning, tools, None), TEXT, start=start, end=end)


def said(found: ThoughtMarks | None) -> list[tuple[str, str, str]]:
    """Start, words, end mark of each block."""
    assert found is not None
    decode = TEXT.codec.decode
    return [
        (
            block.start,
            decode(block.closing[: block.mark], skip_special=False),
            decode(block.closing[block.mark :], skip_special=False),
        )
        for block in found.blocks
    ]


def test_every_format_has_its_marks():
    found = {name: said(marks(name)) for name in reasoning_names()}
    think = [("<think>", "", "</think>")]
    assert found == {
        "qwen3": think,
        "deepseek_r1": think,
        "minimax": think,
        "mistral": [("[THINK]", "", "[/THINK]")],
        "gemma4": [("<|channel>", "", "<channel|>")],
        "granite": [
            ("Here is my thought process:", "", "Here is my response:"),
            ("Here's my thought process:", "", "Here's my response:"),
            ("<think>", "", "</think>"),
        ],
        "gpt_oss": [("<|channel|>analysis<|message|>", "", "<|end|><|start|>assistant")],
    }


def test_settings_take_the_place_of_the_formats_own():
    assert said(marks("qwen3", end=SENTENCE)) == [("<think>", SENTENCE.removesuffix("</think>"), "</think>")]
    assert said(marks("gemma4", start="<|channel>thought\n")) == [("<|channel>thought\n", "", "<channel|>")]
    granite = said(marks("granite", end="So. Here is my response:"))
    assert [words for _, words, _ in granite] == ["So. "] * 3
    assert {mark for _, _, mark in granite} == {"Here is my response:"}


def test_calls_end_thoughts_where_the_formats_say_so():
    found = marks("gemma4", tools="gemma4")
    params = SamplingParams(thinking_token_budget=3)
    for calls, ends in ((True, ("<channel|>", "<|tool_call>")), (False, ("<channel|>",))):
        made = with_thoughts(params, found, begun=None, calls=calls)
        assert made.thoughts is not None
        assert made.thoughts.ends == ends
    assert with_thoughts(SamplingParams(), found, begun=None) == SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("a<think>b", 0),
        ("a<think>b</think>c", None),
        ("a</think>b<think>", 0),
        ("a", None),
        ("</think>", None),
    ],
)
def test_a_prompt_has_begun_to_think_where_a_block_is_open(prompt: str, begun: int | None):
    found = marks("qwen3")
    assert found is not None
    assert found.begun_in(prompt) == begun


def test_the_channel_that_a_prompt_opens_is_the_one_that_is_open():
    found = marks("gpt_oss")
    assert found is not None
    assert found.begun_in("<|start|>assistant<|channel|>analysis<|message|>hm") == 0
    assert found.begun_in("<|channel|>analysis<|message|>hm<|end|><|start|>assistant") is None
    assert found.begun_in("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>") is None


WRONG = [
    ("none", {"end": "</think>"}, "server.reasoning_end_str='</think>': the reasoning format"),
    ("none", {"start": "<think>"}, "server.reasoning_start_str='<think>': the reasoning format"),
    ("qwen3", {"start": "<thought>"}, "must hold '<think>'"),
    ("qwen3", {"start": " "}, "must hold '<think>'"),
    ("qwen3", {"end": "I must answer now."}, "must close with '</think>', where thoughts end"),
    ("qwen3", {"end": "</think>\n\n"}, "must close with '</think>'"),
    ("qwen3", {"end": "so</think> and so</think>"}, "thoughts end in the middle of it"),
    ("qwen3", {"end": "\ud800</think>"}, "has no tokens that say this"),
    ("gpt_oss", {"end": "<|end|>"}, r"must close with '<\|end\|><\|start\|>assistant'"),
]


@pytest.mark.parametrize(("reasoning", "settings", "words"), WRONG)
def test_texts_that_cannot_be_used_are_an_error(reasoning: str, settings: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        marks(reasoning, **settings)


def test_a_tokenizer_that_cannot_say_a_text_is_an_error_if_it_was_set_and_no_budget_if_not():
    words = {"<think>": 0, "</think>": 1, "a": 2, "?": 3}
    poor = Tokenizer(models.WordLevel(words, unk_token="?"))
    poor.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = TextFrontEnd(poor)
    qwen, granite = choose_formats("qwen3", "none", None), choose_formats("granite", "none", None)
    found = thought_marks(qwen, text)
    assert found is not None
    assert found.blocks[0].closing == (1,)
    assert thought_marks(granite, text) is None
    with pytest.raises(ConfigError, match="reasoning_end_str='so</think>': this model's tokenizer has no"):
        thought_marks(qwen, text, end="so</think>")
    with pytest.raises(ConfigError, match="reasoning_start_str='<think>so': this model's tokenizer has no"):
        thought_marks(qwen, text, start="<think>so")


async def test_a_server_with_such_a_setting_does_not_start():
    with pytest.raises(ConfigError, match=r"server.reasoning_end_str='stop': must close with '</think>'"):
        async with serving(say([5]), text=TEXT, reasoning_parser="qwen3", reasoning_end_str="stop"):
            pass
    assert EngineConfig().server.reasoning_end_str == ""


def test_budgets_without_marks_are_refused_by_name():
    params = SamplingParams(thinking_token_budget=3)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=params)
    for refuse in (
        lambda: with_thoughts(params, marks("none"), begun=None),
        lambda: check_request(request, info(vocab_size=9)),
    ):
        with pytest.raises(InvalidRequest, match=r"^thinking_token_budget: ") as caught:
            refuse()
        assert caught.value.param == "thinking_token_budget"


def test_thoughts_of_another_model_are_refused():
    made = with_thoughts(SamplingParams(thinking_token_budget=3), marks("qwen3"), begun=0)
    validate_sampling(made, 512)
    with pytest.raises(InvalidRequest, match=r"thoughts: .* is not in the vocabulary"):
        validate_sampling(made, 20)
    thoughts = made.thoughts
    assert thoughts is not None
    wrong = made.model_copy(update={"thoughts": thoughts.model_copy(update={"begun": 1})})
    with pytest.raises(InvalidRequest, match=r"thoughts\.begun: 1, there are 1 blocks"):
        validate_sampling(wrong, 512)
