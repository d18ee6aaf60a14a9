"""The linear program: what goes in comes out, and nothing from a file is executed as code."""

import pytest
import torch
from torch import fx

from ostinato.errors import ArtifactError, CompileError
from ostinato.ops import all_ops  # noqa: F401  # registers the operators
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.program import Program, bind, lower, resolve_op

aten = torch.ops.aten


def graph_of(body) -> fx.GraphModule:
    """A graph with all step inputs, a KV plane and a weight `w`; `body(graph, nodes)` gives its result."""
    graph = fx.Graph()
    nodes = {}
    for name, role in [("w", "weight"), *((n, "step") for n in StepInputs._fields), ("kv_0", "kv")]:
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["role"] = role
    graph.output((body(graph, nodes),))
    return fx.GraphModule(torch.nn.Module(), graph)


def inputs(tokens: int = 3) -> StepInputs:
    ints = torch.arange(tokens)
    return StepInputs(ints, ints, ints, ints[None].int(), ints.int(), ints.int(), ints)


def run(program: Program, weight: torch.Tensor, native=None, tokens: int = 3):
    bound = bind(program, {"w.key": weight}, native=native or {}, device=torch.device("cpu"))
    return bound(inputs(tokens), [torch.zeros(2)])


def call(graph, target, *args, **kwargs):
    return graph.call_function(target, args, kwargs)


def test_values_of_every_kind_survive_the_round_trip():
    def body(graph, n):
        rows = call(graph, aten.sym_size.int, n["token_ids"], 0)
        full = call(
            graph, aten.full.default, [rows, 2], float("-inf"), dtype=torch.float32, layout=torch.strided,
            device=torch.device("cpu"),
        )  # fmt: skip
        parts = call(graph, aten.split.Tensor, n["w"], 1)
        import operator

        first = call(graph, operator.getitem, parts, 0)
        return call(graph, aten.cat.default, [full, call(graph, aten.mul.Tensor, first, 0.1)])

    program = lower(graph_of(body), {"w": "w.key"})
    again = Program.model_validate_json(program.model_dump_json())
    assert again == program
    got = run(again, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), tokens=2)
    assert got.tolist() == [[float("-inf")] * 2] * 2 + [[pytest.approx(0.1), pytest.approx(0.2)]]


def test_a_native_kernel_takes_the_place_of_the_operator():
    program = lower(graph_of(lambda g, n: call(g, aten.linear.default, n["w"], n["w"])), {"w": "w.key"})
    got = run(program, torch.ones(2, 2), native={"aten::linear": lambda x, w, bias=None: (x + w) * 10})
    assert got.tolist() == [[20.0, 20.0], [20.0, 20.0]]


def test_a_mutating_step_without_users_is_kept_and_in_order():
    def body(graph, n):
        before = call(graph, aten.add.Tensor, n["kv_0"], 0)
        call(graph, aten.fill_.Scalar, n["kv_0"], 7.0)
        return call(graph, aten.add.Tensor, before, n["kv_0"])

    program = lower(graph_of(body), {"w": "w.key"})
    assert run(program, torch.ones(1)).tolist() == [7.0, 7.0]


def test_an_operator_outside_the_allowed_namespaces_does_not_compile():
    body = lambda g, n: call(g, torch.ops.prims.sin.default, n["w"])  # noqa: E731
    with pytest.raises(CompileError, match="outside aten, ostinato"):
        lower(graph_of(body), {"w": "w.key"})


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "py.exec",
        "aten.__class__.default",
        "aten.nothing.default",
        "prims.sin.default",
        "aten",
        "",
    ],
)
def test_a_file_cannot_name_anything_but_operators(name):
    with pytest.raises(ArtifactError, match="does not have"):
        resolve_op(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": [{"ref": "nobody"}, 1]}, "before it is made"),
        ({"args": [{"dtype": "__name__"}, 1]}, "does not have"),
        ({"kwargs": {"x)+print(": 1}}, "is not a name"),
        ({"args": [{"code": "1"}]}, "which no compile writes"),
        ({"out": "w2", "args": [{"ref": "w"}, 1]}, None),
    ],
)
def test_a_tampered_program_is_refused(change, message):
    program = lower(graph_of(lambda g, n: call(g, aten.add.Tensor, n["w"], 1)), {"w": "w.key"})
    raw = program.model_dump(mode="json")
    raw["steps"][0].update(change)
    if message is None:
        raw["result"] = change["out"]
        assert run(Program.model_validate(raw), torch.ones(1)).tolist() == [2.0]
        return
    with pytest.raises(ArtifactError, match=message):
        run(Program.model_validate(raw), torch.ones(1))


def test_a_missing_weight_is_named():
    program = lower(graph_of(lambda g, n: call(g, aten.add.Tensor, n["w"], 1)), {"w": "w.key"})
    with pytest.raises(ArtifactError, match=r"lacks 'w.key'"):
        bind(program, {}, native={}, device=torch.device("cpu"))


def test_intermediate_results_are_freed_after_their_last_use():
    import weakref

    alive: list[weakref.ref] = []

    def watched(x, w, bias=None):
        assert all(ref() is None for ref in alive[:-1])
        out = x + 1
        alive.append(weakref.ref(out))
        return out

    def body(graph, n):
        x = n["w"]
        for _ in range(4):
            x = call(graph, aten.linear.default, x, n["w"])
        return x

    program = lower(graph_of(body), {"w": "w.key"})
    assert run(program, torch.zeros(1), native={"aten::linear": watched}).tolist() == [4.0]
