"""Data sets: lengths, what is shared, files, and what is refused."""

import json
import math
import sys

import numpy as np
import pytest

from ostinato.bench.arrivals import arrival_times
from ostinato.bench.data_settings import DataSettings
from ostinato.bench.datasets import make_items
from ostinato.bench.load_item import load_item
from ostinato.bench.prompt_text import PromptText
from ostinato.bench.sonnets import LINES
from ostinato.errors import ConfigError
from tests.support.toy_text import tokenizer_json


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return path


def items(count=None, draw=0, **settings):
    return make_items(
        DataSettings(**{"num_prompts": 20, "input_len": 40, "output_len": 8, **settings}), count, draw=draw
    )


def words(item):
    return item.turns[0].split()


def test_random_prompts_have_the_length_and_differ():
    made = items()
    assert {len(words(item)) for item in made} == {40}
    assert len({item.turns[0] for item in made}) == 20
    assert {item.output_tokens for item in made} == {8}
    assert items() == made
    assert items(draw=1) != made
    assert load_item(json.loads(json.dumps(made[0].dump()))) == made[0]


def test_lengths_are_exact_with_a_tokenizer(toy):
    count = PromptText(toy).count
    for length in (1, 7, 40):
        for item in items(input_len=length, prefix_len=5, hit_fraction=0.5, tokenizer=str(toy)):
            assert count(item.turns[0]) == length + 5
    assert items(count=1, tokenizer=str(toy.parent)) == items(count=1, tokenizer=str(toy))


def test_the_range_ratio_bounds_lengths_on_both_sides():
    made = items(count=300, range_ratio=0.5)
    lengths = [len(words(item)) for item in made]
    assert (min(lengths), max(lengths)) == (20, 60)
    outputs = {item.output_tokens for item in made}
    assert outputs == set(range(4, 13))


def test_prefix_and_hit_fraction_are_shared_by_all_draws_and_the_rest_by_none():
    made = [words(item) for draw in (0, 1) for item in items(prefix_len=6, hit_fraction=0.25, draw=draw)]
    assert {tuple(one[:16]) for one in made} == {tuple(made[0][:16])}  # 6 + 40 / 4
    assert len({tuple(one[16:20]) for one in made}) == len(made)
    assert {len(one) for one in made} == {46}
    assert len({item.turns[0] for item in items(hit_fraction=1.0)}) == 1


def test_prefixes_repeat_equally_often():
    made = [words(item) for item in items(dataset="prefix_repetition", num_prefixes=4, prefix_len=10)]
    starts = [tuple(one[:10]) for one in made]
    assert sorted(starts.count(start) for start in set(starts)) == [5, 5, 5, 5]
    assert len({tuple(one[10:]) for one in made}) == 20


def test_sonnet_prompts_are_lines_behind_the_same_lines():
    made = items(dataset="sonnet", input_len=200, prefix_len=50)
    for item in made:
        task, *lines = item.turns[0].splitlines()
        assert task.startswith("Pick as many lines")
        assert lines[:4] == LINES[:4]
        assert set(lines) <= set(LINES)
        assert 185 <= len(words(item)) <= 200
    assert len({item.turns[0] for item in made}) == 20


def test_conversations_share_what_the_ratios_say():
    ratios = {"global_prefix_ratio": 0.5, "conversation_prefix_ratio": 0.25}
    made = items(dataset="multi_turn", turns=3, turn_delay_s=1.5, **ratios)
    systems = [item.system.split() for item in made]
    assert {len(system) for system in systems} == {30}
    assert len({tuple(system[:20]) for system in systems}) == 1
    assert len({tuple(system[20:]) for system in systems}) == 20
    assert {len(turn.split()) for item in made for turn in item.turns} == {10}
    assert {tuple(item.pauses_s) for item in made} == {(0.0, 1.5, 1.5)}
    drawn = [
        p
        for i in items(200, dataset="multi_turn", turns=3, turn_delay_s=1.5, turn_delay="exponential")
        for p in i.pauses_s[1:]
    ]
    assert np.mean(drawn) == pytest.approx(1.5, rel=0.2)
    with pytest.raises(ConfigError, match="together at most 1"):
        items(dataset="multi_turn", global_prefix_ratio=0.6, conversation_prefix_ratio=0.5)


def test_rerank_and_batches_of_inputs():
    (one,) = items(1, dataset="rerank", documents=3, input_len=12)
    assert [len(text.split()) for text in one.documents] == [12, 12, 12]
    assert len(words(one)) == 12
    assert [len(item.inputs) for item in items(batch_size=4)] == [4] * 20


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_sharegpt_takes_first_exchanges_that_a_human_begins(tmp_path):
    def entry(*turns):
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    whole = [
        entry(("human", "How are you?"), ("gpt", "I am fine, thanks.")),
        entry(("gpt", "Continued"), ("human", "no")),
        entry(("human", "alone")),
        entry(("human", "Why?"), ("gpt", "Because.")),
    ]
    path = write(tmp_path, "sharegpt.json", json.dumps(whole))
    made = items(4, dataset="sharegpt", dataset_path=path, output_len=0)
    assert (
        sorted((item.turns[0], item.output_tokens) for item in made)
        == [("How are you?", 4)] * 2 + [("Why?", 1)] * 2
    )
    assert {i.output_tokens for i in items(4, dataset="sharegpt", dataset_path=path, output_len=9)} == {9}


def test_custom_lines_in_their_order(tmp_path):
    rows = [
        {"prompt": "one", "output_tokens": 3},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}]},
        {"turns": ["a", "b"], "system": "s"},
        {"query": "q", "documents": ["d", "e"]},
    ]
    path = write(tmp_path, "mine.jsonl", "\n".join(json.dumps(row) for row in rows) + "\n\n")
    made = items(5, dataset="custom", dataset_path=path)
    assert [item.turns for item in made] == [["one"], ["two"], ["a", "b"], ["q"], ["one"]]
    assert [item.output_tokens for item in made] == [3, 8, 8, None, 3]
    assert made[1].messages == [{"role": "system", "content": "be brief"}]
    assert (made[2].system, made[3].documents) == ("s", ["d", "e"])


def test_files_of_hf_data_sets(tmp_path):
    path = write(tmp_path, "set.csv", "question,answer\nWhy so?,Because of that\n,empty\nWho?,Me\n")
    columns = {"prompt_column": "question", "output_column": "answer"}
    made = items(2, dataset="hf", dataset_path=path, output_len=0, **columns)
    assert [(item.turns[0], item.output_tokens) for item in made] == [("Why so?", 3), ("Who?", 1)]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, "set.jsonl", json.dumps({"prompt": chat}))
    (one,) = items(1, dataset="hf", dataset_path=path)
    assert (one.turns, one.messages) == (["u"], chat[:1])


@pytest.mark.parametrize(
    ("name", "text", "settings", "said"),
    [
        ("a.jsonl", "{broken", {"dataset": "custom"}, "a.jsonl: not JSON, nor JSON lines"),
        ("a.jsonl", "[1]", {"dataset": "custom"}, "an entry is int; each must be an object"),
        ("a.jsonl", "", {"dataset": "custom"}, "a.jsonl: holds no prompts"),
        ("a.jsonl", '{"text": 1}', {"dataset": "custom"}, r"entry 1 has no `prompt`.*it has text"),
        ("a.json", "[{}]", {"dataset": "sharegpt"}, "is this a ShareGPT file"),
        ("a.csv", "x\n1\n", {"dataset": "hf"}, "no column 'prompt'; it has x: see --prompt-column"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_the_reason(tmp_path, name, text, settings, said):
    with pytest.raises(ConfigError, match=said):
        items(dataset_path=write(tmp_path, name, text), **settings)


def test_missing_files_and_libraries_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--dataset-path \(not given\): no such file"):
        items(dataset="custom")
    with pytest.raises(ConfigError, match="give one or its folder"):
        items(tokenizer=str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="reading parquet needs pyarrow"):
        items(dataset="hf", dataset_path=write(tmp_path, "a.parquet", ""))


def gaps(**more):
    return np.diff(arrival_times(2001, rng=np.random.default_rng(0), **{"rate": 10.0, **more}))


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    for burstiness, spread in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (math.inf, 0.0)):
        found = gaps(burstiness=burstiness)
        assert found.mean() == pytest.approx(0.1)
        assert found.std() * 10 == pytest.approx(spread, abs=0.1 * spread + 1e-9)  # 1 / sqrt(shape)
    assert arrival_times(3, math.inf, np.random.default_rng(0)) == [0.0, 0.0, 0.0]
    assert arrival_times(1, 5.0, np.random.default_rng(0)) == [0.0]


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 11.0), ("exponential", math.sqrt(40))])
def test_a_ramp_goes_from_rate_to_rate(ramp, middle):
    found = 1 / gaps(rate=20.0, ramp=ramp, ramp_from=2.0, burstiness=math.inf)
    assert (found[0], found[-1]) == pytest.approx((2.0, 20.0))
    assert found[1000] == pytest.approx(middle, rel=0.01)
