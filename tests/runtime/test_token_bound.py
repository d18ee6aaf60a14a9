"""A bound on the number of tokens that is never wrong, and finds huge texts without the tokenizer."""

import json
import random
import unicodedata
from collections import defaultdict
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ostinato.errors import ContextTooLong
from ostinato.graph.tokenizer_files import byte_alphabet
from ostinato.runtime.token_bound import TokenBound
from tests.support.toy_text import front_end, tokenizer, tokenizer_json

PIECES = (
    *("the quick brown fox", " jumps", "<|im_start|>", "<|im_end|>", "  added word", "grüße", "😀", "\n\n"),
    *("Å", "ΐ", "1234567890", "\t", "ＡＢ", "İ", "的", "\x00", "�", "K"),
)


def edited(**parts: object) -> Tokenizer:
    """The toy tokenizer with some sections of tokenizer.json replaced."""
    return Tokenizer.from_str(json.dumps({**json.loads(tokenizer_json()), **parts}))


def metaspace(*, byte_fallback: bool = True) -> Tokenizer:
    """A sentencepiece-like tokenizer, as of Llama 2: spaces become "▁", unknown characters bytes."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "▁▁": 4, "▁▁▁▁": 5}
    vocabulary |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Fuse()
    return made


def swallowing() -> Tokenizer:
    made = tokenizer()
    made.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return made


def without_controls() -> Tokenizer:
    """No token for the bytes 4 and 6, as in SmolLM2: they are dropped."""
    spec = json.loads(tokenizer_json())
    free = [f"unused{byte}" for byte in (4, 6)]
    names = dict(zip((byte_alphabet()[byte] for byte in (4, 6)), free, strict=True))
    spec["model"]["vocab"] = {names.get(token, token): at for token, at in spec["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(spec))


KNOWN = {
    "bytes without a token": without_controls,
    "byte level": tokenizer,
    "byte level, NFC": lambda: edited(normalizer={"type": "NFC"}),
    "metaspace": metaspace,
    "added token that swallows spaces": swallowing,
    "a split that keeps": lambda: edited(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    ),
}
TEXTS = (
    *(" " * 5_000 + "<mask>" + " " * 5_000, "a" * 10_000, "<|im_end|>" * 1_000, "  added word" * 900),
    *(
        "ΐ" * 2_000,
        "Å" * 3_000,
        " a" * 4_000,
        "    " * 3_000,
        "\x04" * 9_000,
        "\x04\x06a" * 500,
        "😀" * 2_000,
        "",
    ),
)


@pytest.mark.parametrize("name", KNOWN)
def test_the_bound_is_never_above_the_truth_and_not_idle(name: str):
    made = KNOWN[name]()
    bound, rng = TokenBound(made), random.Random(0)
    texts = [*TEXTS, *("".join(rng.choices(PIECES, k=rng.randrange(200))) for _ in range(200))]
    for text in texts:
        assert bound.at_least(text) <= len(made.encode(text, add_special_tokens=False).ids), text[:40]
    assert bound.at_least("grüße, 😀" * 10_000) > 500


def test_the_bound_is_exact_for_the_longest_token():
    longest = "  added word"
    assert TokenBound(tokenizer()).at_least(longest * 1_000) == 1_000


@pytest.mark.parametrize(
    "made",
    [
        lambda: edited(normalizer={"type": "Lowercase"}),
        lambda: edited(normalizer={"type": "NFKC"}),
        lambda: edited(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        lambda: edited(
            normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}
        ),
        lambda: edited(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": ""}),
        lambda: edited(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        lambda: edited(pre_tokenizer={"type": "WhitespaceSplit"}),
        lambda: edited(
            pre_tokenizer={
                "type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False
            }
        ),
        lambda: Tokenizer.from_str(
            json.dumps({**json.loads(without_controls().to_str()), "normalizer": {"type": "NFC"}})
        ),
        lambda: metaspace(byte_fallback=False),
        lambda: Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_drop_text_gets_no_bound(made):
    assert TokenBound(made()).at_least("ab " * 100_000) == 0


def test_nfc_makes_no_text_more_than_four_times_shorter():
    letters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    longest: defaultdict[str, int] = defaultdict(
        int
    )  # decomposed -> bytes of its longest one-letter spelling
    for letter in letters:
        flat = unicodedata.normalize("NFD", letter)
        longest[flat] = max(longest[flat], len(letter.encode()))

    @cache
    def spelled(flat: str) -> int:
        parts = [spelled(flat[:cut]) + spelled(flat[cut:]) for cut in range(1, len(flat))]
        return max([longest.get(flat, 0), *parts])

    worst = max(
        spelled(unicodedata.normalize("NFD", letter)) / len(unicodedata.normalize("NFC", letter).encode())
        for letter in letters
    )
    assert worst == 3.5


def test_a_huge_text_is_refused_without_the_tokenizer_and_a_near_one_exactly(monkeypatch):
    text = front_end()
    near = "the quick brown fox " * 30
    exact = len(text.encode(near))
    with pytest.raises(ContextTooLong, match=rf"^the prompt is too long: it has {exact} tokens, "):
        text.encode_within(64, near, param="prompt")
    assert text.encode_within(exact + 1, near, param="prompt") == text.encode(near)
    monkeypatch.setattr(text, "encode", lambda *_, **__: pytest.fail("tokenised"))
    huge = "the quick brown fox " * 300_000  # 6 MB
    with pytest.raises(ContextTooLong, match=r"has at least 500000 tokens.* length is 64 tokens") as caught:
        text.encode_within(64, huge, param="prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong, match="at least") as caught:
        text.encode_chat([{"role": "user", "content": huge}], window=64)
    assert caught.value.param == "messages"
    text.close()
