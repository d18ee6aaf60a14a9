"""Incremental text equals the tokenizer's own, and no character is ever broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ostinato.runtime.detokenizer import TokenCodec
from tests.support.toy_text import tokenizer

BYTE_LEVEL = tokenizer()
CODEC = TokenCodec(BYTE_LEVEL)


def sentencepiece(
    decoder: object, pieces: tuple[str, ...] = ("▁Hello", "▁world", "▁", "s", "é")
) -> Tokenizer:
    """Unigram-like vocabulary with byte fallback, as Llama 2 and Gemma have it."""
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    made = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoder
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


def llama() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
    )


def gemma() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def pieces(codec: TokenCodec, ids: list[int], *, skip: bool = True, at_start: bool = False) -> list[str]:
    detokenizer = codec.detokenizer(skip_special=skip, at_start=at_start)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_split_emoji_comes_out_whole():
    ids = BYTE_LEVEL.encode("a😀b", add_special_tokens=False).ids
    assert len(ids) == 6  # the toy vocabulary has one token for each byte of an emoji
    assert pieces(CODEC, ids) == ["a", "", "", "", "😀", "b", ""]


def test_bytes_of_a_split_emoji_join_to_it_and_are_named_as_bytes():
    ids = BYTE_LEVEL.encode("😀", add_special_tokens=False).ids
    assert b"".join(CODEC.token_bytes(i) for i in ids) == b"\xf0\x9f\x98\x80"
    assert [CODEC.token_text(i) for i in ids] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]


def test_text_that_ends_inside_a_character_ends_in_one_replacement_character():
    ids = BYTE_LEVEL.encode("a😀", add_special_tokens=False).ids[:-1]
    assert pieces(CODEC, ids)[-1] == "�"
    assert "".join(pieces(CODEC, ids)) == BYTE_LEVEL.decode(ids) == "a�"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_when_asked_for(skip: bool):
    assert "".join(pieces(CODEC, [0, *BYTE_LEVEL.encode("dog").ids, 1], skip=skip)) == (
        "dog" if skip else "<|im_start|>dog<|im_end|>"
    )


def test_added_token_with_spaces_keeps_them():
    token = BYTE_LEVEL.token_to_id("  added word")
    assert CODEC.token_bytes(token) == b"  added word"


def test_unknown_id_is_no_text():
    assert pieces(CODEC, [100_000]) == ["", ""]


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_byte_level_text_equals_the_tokenizers_own(text: str):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(CODEC, ids)) == BYTE_LEVEL.decode(ids) == text
    assert b"".join(map(CODEC.token_bytes, ids)) == text.encode()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 398), max_size=20))
def test_byte_level_text_of_any_tokens_equals_the_tokenizers_own(ids: list[int]):
    for skip in (True, False):
        assert "".join(pieces(CODEC, ids, skip=skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_space_is_kept_behind_a_prompt_and_dropped_at_the_start():
    made = llama()
    ids = [made.token_to_id(name) for name in ("▁Hello", "▁world", "s")]
    assert pieces(TokenCodec(made), ids) == [" Hello", " world", "s", ""]
    assert "".join(pieces(TokenCodec(made), ids, at_start=True)) == made.decode(ids) == "Hello worlds"


def test_byte_fallback_tokens_make_characters():
    made = gemma()
    ids = [made.token_to_id(name) for name in ("s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁world")]
    assert pieces(TokenCodec(made), ids) == ["s", "", "", "", "😀", " world", ""]
    assert made.decode(ids) == "s😀 world"
    assert TokenCodec(made).token_bytes(ids[1]) == b"\xf0"


@pytest.mark.parametrize("make", [llama, gemma])
@given(text=st.text(st.sampled_from("s é▁😀\n"), max_size=12))
def test_sentencepiece_text_equals_the_tokenizers_own(make, text: str):
    made = make()
    ids = made.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(TokenCodec(made), ids, at_start=True)) == made.decode(ids)


def test_metaspace_decoder_is_read():
    made = Tokenizer(models.Unigram([("▁Hello", 0.0), ("▁world", 0.0), ("s", 0.0)], unk_id=None))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    assert pieces(TokenCodec(made), [0, 1, 2], at_start=True) == ["Hello", " world", "s", ""]
    assert made.decode([0, 1, 2]) == "Hello worlds"
    assert pieces(TokenCodec(made), [0, 1]) == [" Hello", " world", ""]


def test_unknown_decoder_is_asked_about_a_short_window():
    names = ["hello", "##s", "world", ",", "[UNK]"]
    made = Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    ids = [0, 1, 2, 3] * 10
    codec = TokenCodec(made)
    assert pieces(codec, [0, 1, 2, 3]) == ["hello", "s", " world", ",", ""]
    assert "".join(pieces(codec, ids)) == made.decode(ids)
    assert codec.token_text(2) == "world"


@pytest.mark.parametrize("made", [tokenizer, llama, gemma])
@given(ids=st.lists(st.integers(0, 260), max_size=12), cut=st.integers(0, 12), at_start=st.booleans())
@settings(max_examples=60, deadline=None)
def test_tokens_pushed_together_give_the_text_of_one_after_the_other(made, ids, cut, at_start):
    codec = TokenCodec(made())
    one_by_one = codec.detokenizer(skip_special=True, at_start=at_start)
    together = codec.detokenizer(skip_special=True, at_start=at_start)
    expected = ["".join([one_by_one.push(token) for token in part]) for part in (ids[:cut], ids[cut:])]
    assert [together.push_all(part) for part in (ids[:cut], ids[cut:])] == expected
    assert together.finish() == one_by_one.finish()
