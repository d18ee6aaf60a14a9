"""A small real byte-level BPE tokenizer and a ChatML front end, trained in the test (milliseconds)."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ostinato.runtime.text import SamplingDefaults, TextFrontEnd

BOS, EOS = "<|im_start|>", "<|im_end|>"
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "Hello world, how are you today?",
    "an ostinato is a phrase that is played again and again",
    "grüße aus köln, naïve café",
)
CHATML = """\
{%- for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """tokenizer.json of the toy tokenizer; ids 0 and 1 are BOS and EOS, every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("  added word", special=False)])
    return tokenizer.to_str()


def tokenizer(*, add_bos: bool = False) -> Tokenizer:
    """A fresh tokenizer; `add_bos` puts BOS in front of every text, as Llama's does."""
    made = Tokenizer.from_str(tokenizer_json())
    if add_bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
        )
    return made


def halved_emoji() -> Tokenizer:
    """The same with tokens for both halves of 😀, which is two tokens then."""
    made = json.loads(tokenizer_json())
    vocab = made["model"]["vocab"]
    for first, second in ("ðŁ", "ĺĢ"):
        vocab[first + second] = len(vocab) + len(made["added_tokens"])
        made["model"]["merges"].append([first, second])
    return Tokenizer.from_str(json.dumps(made))


def front_end(
    *,
    template: str | None = CHATML,
    add_bos: bool = False,
    tokens: Tokenizer | None = None,
    **defaults: float,
) -> TextFrontEnd:
    """A front end like that of an artifact; `defaults` as in generation_config.json."""
    return TextFrontEnd(
        tokens or tokenizer(add_bos=add_bos),
        chat_template=template,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        defaults=SamplingDefaults.model_validate(defaults),
    )
