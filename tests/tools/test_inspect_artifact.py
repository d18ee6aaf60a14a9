"""`ostinato inspect`: statements of a layer, rows of the pass table. The rest: tests/e2e/test_inspect.py."""

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.artifact import Manifest, PassRecord
from ostinato.tools.inspect_artifact import layer_code, pass_table

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


def table(*records: PassRecord) -> list[str]:
    return pass_table(Manifest.model_construct(passes=records)).splitlines()


def test_runs_of_one_pass_are_one_row_with_their_sums():
    tidy = PassRecord(name="tidy", matched=3, expected=None, milliseconds=1.5)
    norm = PassRecord(name="norm", matched=2, expected=3, milliseconds=9, refused={"two users": 1})
    again = PassRecord(
        name="tidy", matched=4, expected=None, milliseconds=2.5, proofs=("p",), refused={"odd": 2}
    )
    assert table(tidy, norm, again) == [
        "pass  matched  expected  ms  proofs  refused",
        "tidy        7         -   4       1  2x odd",
        "norm        2         3   9       0  1x two users",
        "expected -: the model does not say how often, so any number is right",
    ]
    assert table(norm)[-1].startswith("norm")  # no legend where there is no dash
