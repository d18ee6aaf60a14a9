"""Tokenizer files of an artifact encode, decode and render chats as the source's own tokenizer does."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ostinato.errors import ModelError
from ostinato.graph.source import open_source
from ostinato.graph.tokenizer_files import byte_alphabet
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, EOS_ID, edit_json, make_tiny, tiny_tokenizer

TEXTS = [
    "",
    " ",
    "hello there, hello world",
    "  two  spaces\tand\ttabs\r\n\r\nand lines\n",
    "def f(x):\n    return x**2  # 1234567890 + 0x1F",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|im_endx|>",
    "naïve café — “quotes” … ½ × ²",
    "漢字かな交じり文と한국어 и кириллица עברית العربية ไทย",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇩🇪",
    "e\u0301 combining \u200b zero width \ufeff bom \x00 nul",
    "[unused300] " + "a" * 300,
]


def assert_same_tokenizer(folder: Path, theirs: object) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]  # type: ignore[operator]
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)  # type: ignore[attr-defined]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", num_hidden_layers=1)


def test_a_folder_with_a_fast_tokenizer_is_copied(folder: Path, tmp_path: Path):
    open_source(folder).write_tokenizer(tmp_path / "out")
    assert_same_tokenizer(tmp_path / "out", AutoTokenizer.from_pretrained(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize(
    "stated",
    [
        "{{ messages }}",
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}],
    ],
)
def test_a_template_inside_the_config_becomes_a_file(folder: Path, tmp_path: Path, stated: object):
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=stated)
    open_source(folder).write_tokenizer(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_without_a_template_none_is_written(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").unlink()
    open_source(folder).write_tokenizer(tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_slow_tokenizer_is_converted(folder: Path, tmp_path: Path):
    expected = AutoTokenizer.from_pretrained(folder)
    parsed = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(parsed["vocab"]))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in parsed["merges"])
    )
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    open_source(folder).write_tokenizer(tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert_same_tokenizer(tmp_path / "out", expected)


def test_an_absent_tokenizer_is_an_error_that_lists_what_would_do(folder: Path, tmp_path: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError, match=r"no tokenizer; needed: tokenizer\.json, or one of tokenizer\.model"
    ):
        open_source(folder).write_tokenizer(tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}'])
def test_a_broken_tokenizer_is_named(folder: Path, tmp_path: Path, text: str):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: broken tokenizer"):
        open_source(folder).write_tokenizer(tmp_path / "out")


def test_a_missing_tokenizer_config_is_made_from_the_model_config(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (folder / "tokenizer_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        open_source(folder).write_tokenizer(tmp_path / "out")
    assert "no tokenizer_config.json" in caplog.text
    made = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (made.eos_token_id, made.bos_token, made.pad_token_id) == (EOS_ID, "<|bos|>", 0)


def test_a_gguf_tokenizer_equals_the_one_that_was_written_and_transformers_own(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    open_source(path).write_tokenizer(tmp_path / "out")
    assert_same_tokenizer(tmp_path / "out", tiny_tokenizer())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    converted = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert loaded(text)["input_ids"] == converted(text)["input_ids"], text
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (EOS_ID, 1, 0)
    chat = [{"role": "user", "content": "hello 🎉"}]
    rendered = "<|im_start|>user\nhello 🎉<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [EOS_ID]


def test_a_gguf_tokenizer_that_adds_bos_adds_it_once(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    open_source(path).write_tokenizer(tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        expected = tiny_tokenizer()(text)["input_ids"]
        assert ours.encode(text).ids == loaded(text)["input_ids"] == [1, *expected]
        assert ours.encode(text, add_special_tokens=False).ids == expected


def test_a_gguf_tokenizer_with_another_split_is_left_to_transformers(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", "qwen2", metadata={"tokenizer.ggml.pre": "qwen2"})
    open_source(path).write_tokenizer(tmp_path / "out")
    assert_same_tokenizer(tmp_path / "out", AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"))


def test_a_gguf_file_without_a_tokenizer_is_named(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": None})
    with pytest.raises(ModelError, match=r"m\.gguf: the file has no tokenizer"):
        open_source(path).write_tokenizer(tmp_path / "out")


def test_the_byte_alphabet_has_256_distinct_printable_letters():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert alphabet[ord("a")] == "a"
    assert alphabet[ord(" ")] == "Ġ"
    assert alphabet[ord("\n")] == "Ċ"
