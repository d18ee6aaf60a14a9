"""A toy tokenizer and template of a model that thinks, with its marks as tokens of their own or in pieces."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer

from ostinato.runtime.text import TextFrontEnd
from tests.support import toy_text

SENTENCE = "Considering the limited time by the user, I have to give the solution now.</think>"
MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<tool_call>")
TEMPLATE = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> <function= #}"
    + toy_text.CHATML.removesuffix("{% endif %}")
    + "{%- if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@lru_cache(maxsize=2)
def tokenizer_json(*, whole: bool = True) -> str:
    """tokenizer.json; `whole`: each mark is one special token."""
    made = Tokenizer.from_str(toy_text.tokenizer_json())
    if whole:
        made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made.to_str()


def front_end(*, whole: bool = True) -> TextFrontEnd:
    """Its chat template begins to think, unless `enable_thinking` is false."""
    return TextFrontEnd(
        Tokenizer.from_str(tokenizer_json(whole=whole)),
        chat_template=TEMPLATE,
        special_tokens={"bos_token": toy_text.BOS, "eos_token": toy_text.EOS},
    )
