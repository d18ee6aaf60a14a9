"""`ostinato inspect --graph`: which statements belong to a layer. The rest: tests/e2e/test_inspect.py."""

import pytest

from ostinato.errors import ConfigError
from ostinato.tools.inspect_artifact import layer_code

CODE = """
def forward(self, embed, layers_0_q, layers_0_down, layers_1_q, layers_1_down, layers_10_q, ids):
    x = torch.ops.aten.embedding.default(embed, ids);  embed = ids = None
    a = torch.ops.aten.linear.default(x, layers_0_q);  layers_0_q = None
    b = torch.ops.aten.silu.default(a);  a = None
    c = torch.ops.aten.linear.default(b, layers_0_down);  b = layers_0_down = None
    d = torch.ops.aten.linear.default(c, layers_1_q);  c = layers_1_q = None
    e = torch.ops.aten.linear.default(d, layers_1_down);  d = layers_1_down = None
    f = torch.ops.aten.linear.default(e, layers_10_q);  e = layers_10_q = None
    return (f,)
"""


def names(code: str) -> str:
    return "".join(line.split(" = ")[0] for line in code.splitlines())


def test_a_layer_goes_from_its_first_weight_to_its_last():
    assert names(layer_code(CODE, 0)) == "abc"
    assert names(layer_code(CODE, 1)) == "de"  # not layer 10
    assert names(layer_code(CODE, 10)) == "f"
    assert layer_code(CODE, 10).startswith("f = torch.ops")  # no indentation


def test_a_layer_that_is_not_there_is_an_error_that_says_which_are():
    with pytest.raises(ConfigError, match=r"--layer 2: .*no weights of that layer; layers: 0 to 10"):
        layer_code(CODE, 2)
