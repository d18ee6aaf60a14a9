"""Inputs are what transformers' tokenizers make of them, cut or whole."""

import pytest
from transformers import PreTrainedTokenizerFast

from ostinato.errors import InvalidRequest
from ostinato.runtime.pooling.pool_text import encode_input
from tests.support.tiny_encoders import tokenizer, words


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="[PAD]", model_input_names=["input_ids", "token_type_ids"]
    )


@pytest.mark.parametrize("kept", [None, 3, 5, 8, 9, 12, 40])
@pytest.mark.parametrize("second", [None, 1, 4, 9])
@pytest.mark.parametrize("first", [1, 6, 7])
def test_one_text_or_a_pair_is_cut_as_transformers_cuts(
    theirs: PreTrainedTokenizerFast, first: int, second: int | None, kept: int | None
):
    one = words(*range(10, 10 + first))
    other = None if second is None else words(*range(50, 50 + second))
    if kept == 3 and other is not None:
        with pytest.raises(InvalidRequest, match="leave no room for text"):
            encode_input(tokenizer(), one, other, kept=kept)
        return
    found = encode_input(tokenizer(), one, other, kept=kept)
    truth = theirs(one, other, truncation=kept is not None, max_length=kept)
    assert list(found.token_ids) == truth["input_ids"]
    assert list(found.token_types) == truth["token_type_ids"]


def test_without_special_tokens_the_text_is_all(theirs: PreTrainedTokenizerFast):
    assert encode_input(tokenizer(), words(5, 6), None, kept=None, add_special_tokens=False) == (
        (5, 6),
        (0, 0),
    )
