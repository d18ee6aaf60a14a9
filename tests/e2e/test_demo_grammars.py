"""Structured output of the demo model: what it says parses, greedy and hot, eight at once."""

import json
import re
from pathlib import Path

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams

pytestmark = pytest.mark.demo

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "population", "coastal"],
    "additionalProperties": False,
}


def test_answers_of_the_demo_model_keep_to_their_grammars(demo_artifact: Path):
    asked = [
        SamplingParams(json_schema=CITY, max_tokens=80, temperature=heat, seed=at)
        for at, heat in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    asked += [
        SamplingParams(regex="[0-9]{1,3} (apples|pears)", max_tokens=20),
        SamplingParams(choice=("left", "right"), max_tokens=9),
        SamplingParams(response_format={"type": "json_object"}, max_tokens=60),
        SamplingParams(max_tokens=20),
    ]
    with LLM(demo_artifact) as llm:
        chats = [[{"role": "user", "content": "Tell me about Oslo as JSON."}]] * len(asked)
        outputs = [output.outputs[0] for output in llm.chat(chats, asked, progress=False)]
        with pytest.raises(InvalidRequest, match=r"regex: .*unclosed group"):
            llm.generate("x", SamplingParams(regex="("))
    for output in outputs[:4]:
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            city = json.loads(output.text)
            assert list(city) == ["city", "population", "coastal"]
            assert city["population"] >= 0
    assert outputs[0].finish_reason == "stop"
    assert re.fullmatch("[0-9]{1,3} (apples|pears)", outputs[4].text)
    assert outputs[5].text in ("left", "right")
    assert outputs[6].text.startswith("{")
