"""A linear program: the traced and fused graph as a flat list of calls, stored as JSON, run without torch.fx.

`lower` turns an FX graph into a `Program`; `bind` turns a `Program` into one straight-line Python function
whose names are native kernels where there are some, and torch operators where there are none. Loading one
parses JSON and compiles one function: milliseconds, no tracing, no code generator, no pickle.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from ostinato.errors import ArtifactError, CompileError
from ostinato.ops.step_inputs import PoolInputs, StepInputs
from ostinato.section import Section

SCHEMA = 1
_NAMESPACES = ("aten", "ostinato")
_PYTHON: dict[str, Callable[..., Any]] = {
    f"py.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt", "ge")
}
_PYTHON |= {"py.sym_max": torch.sym_max, "py.sym_min": torch.sym_min, "py.sym_int": int}
_PYTHON_NAMES = {function: name for name, function in _PYTHON.items()} | {int: "py.sym_int"}
# A JSON value; {"ref": name}, {"dtype": name}, {"float": "inf"} and the like stand for what JSON lacks.
Json = Any


class Step(Section):
    """One call. `out` names its result; arguments refer to earlier names."""

    op: str
    args: list[Json]
    kwargs: dict[str, Json] = Field(default_factory=dict)
    out: str


class Program(Section):
    """All calls of one step of a model, in order."""

    version: Literal[1] = 1
    step_inputs: tuple[str, ...]
    kv: tuple[str, ...]
    weights: dict[str, str]  # name in the program -> key in the weights file
    steps: tuple[Step, ...]
    result: str


def lower(graph_module: fx.GraphModule, weight_keys: Mapping[str, str]) -> Program:
    """Flatten a graph whose placeholders carry `meta["role"]`; `weight_keys`: weight placeholder -> file key.

    Raises CompileError for a node that is neither a torch operator nor integer arithmetic on sizes.
    """
    inputs: dict[str, list[str]] = {"step": [], "kv": []}
    weights: dict[str, str] = {}
    steps: list[Step] = []
    result: str | None = None
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.meta["role"] == "weight":
                if node.users:
                    weights[node.name] = weight_keys[node.name]
            else:
                inputs[node.meta["role"]].append(node.name)
        elif node.op == "call_function":
            args = [_encode(value) for value in node.args]
            kwargs = {key: _encode(value) for key, value in node.kwargs.items()}
            steps.append(Step(op=_op_name(node), args=args, kwargs=kwargs, out=node.name))
        elif node.op == "output":
            (value,) = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            result = value.name
        else:
            raise CompileError(f"graph node {node.name}: {node.op} cannot be put into a program")
    wanted = PoolInputs._fields if "rows" in inputs["step"] else StepInputs._fields
    if result is None or tuple(inputs["step"]) != wanted:
        raise CompileError(f"graph has step inputs {inputs['step']}, wanted {list(wanted)}")
    return Program(
        step_inputs=tuple(inputs["step"]),
        kv=tuple(inputs["kv"]),
        weights=weights,
        steps=tuple(steps),
        result=result,
    )


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in _NAMESPACES:
            raise CompileError(
                f"graph node {node.name}: operator {target} is outside {', '.join(_NAMESPACES)}"
            )
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    try:
        return _PYTHON_NAMES[target]  # type: ignore[index]  # a target that is no function has no name either
    except (KeyError, TypeError):
        raise CompileError(
            f"graph node {node.name}: call of {target!r} cannot be put into a program"
        ) from None


def _encode(value: Any) -> Json:
    if isinstance(value, fx.Node):
        return {"ref": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"word": "device"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    raise CompileError(f"a program cannot hold {value!r:.100} of type {type(value).__name__}")


def resolve_op(name: str) -> Callable[..., Any]:
    """The torch operator or integer function of a step. ArtifactError for names that no compile writes."""
    if name in _PYTHON:
        return _PYTHON[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace in _NAMESPACES and packet.isidentifier() and overload.isidentifier():
        found = getattr(getattr(torch.ops, namespace), packet, None)
        function = getattr(found, overload, None)
        if isinstance(function, torch._ops.OpOverload):
            return function
    raise ArtifactError(f"program step calls {name!r}, which this version of ostinato or torch does not have")


Bound = Callable[[StepInputs | PoolInputs, Sequence[Tensor]], Tensor]


class BoundProgram:
    """A program that can be called: see `bind`."""

    def __init__(self, run: Bound, native: Mapping[str, tuple[str, Callable[..., Any]]]) -> None:
        """`native`: global names of `run` that are no torch operators, with the operator they stand for."""
        self._run, self._native = run, native

    def __call__(self, inputs: StepInputs | PoolInputs, kv: Sequence[Tensor]) -> Tensor:
        return self._run(inputs, kv)

    def name_calls(self, named: bool) -> None:
        """Whether native kernels have names in a profile, as torch's own operators always do."""
        names = self._run.__globals__  # a function made by `_Writer`
        for name, (op, function) in self._native.items():
            names[name] = _named(op, function) if named else function


def _named(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(op):
            return function(*args, **kwargs)

    return call


def bind(
    program: Program,
    weights: Mapping[str, Tensor],
    *,
    native: Mapping[str, Callable[..., Any]],
    device: torch.device,
) -> BoundProgram:
    """Make the program callable: `bound(step_inputs, kv_planes) -> logits [R, V]`.

    `native` maps operator names such as "ostinato::rms_norm" to replacements with the same signature.
    """
    writer = _Writer(program, weights, native, device)
    return BoundProgram(writer.function(), writer.native_calls)


class _Writer:
    """Writes the straight-line function. Every name in it is made here; nothing from the file is executed."""

    def __init__(
        self, program: Program, weights: Mapping[str, Tensor], native: Mapping[str, Callable[..., Any]],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._program, self._native, self._device = program, native, device
        self._names: dict[str, str] = {}
        self._globals: dict[str, Any] = {}
        self._ops: dict[str, str] = {}
        self.native_calls: dict[str, tuple[str, Callable[..., Any]]] = {}
        for index, (name, key) in enumerate(program.weights.items()):
            if key not in weights:
                raise ArtifactError(f"weights file lacks {key!r}, which the program needs")
            self._names[name] = f"w{index}"
            self._globals[f"w{index}"] = weights[key]

    def function(self) -> Bound:
        program = self._program
        lines = ["def run(inputs, kv):"]
        for names, source in ((program.step_inputs, "inputs"), (program.kv, "kv")):
            if names:
                lines.append(f"    {', '.join(self._fresh(name) for name in names)}, = {source}")
        last_use = self._last_uses()
        for index, step in enumerate(program.steps):
            call = self._call(step)
            name = self._fresh(step.out)
            dead = [self._names[n] for n in last_use.get(index, ()) if n != program.result]
            unused = step.out not in self._used and step.out != program.result
            lines.append(f"    {call}" if unused else f"    {name} = {call}")
            if dead:
                lines.append(f"    {' = '.join(dead)} = None")
        lines.append(f"    return {self._names[program.result]}")
        self.source = "\n".join(lines) + "\n"
        exec(compile(self.source, "<ostinato program>", "exec"), self._globals)
        return self._globals["run"]

    def _last_uses(self) -> dict[int, list[str]]:
        made = {step.out for step in self._program.steps}
        last: dict[str, int] = {}
        for index, step in enumerate(self._program.steps):
            for name in _refs([step.args, step.kwargs]):
                if name in made:
                    last[name] = index
        self._used = set(last)
        out: dict[int, list[str]] = {}
        for name, index in last.items():
            out.setdefault(index, []).append(name)
        return out

    def _fresh(self, name: str) -> str:
        if name in self._names:
            raise ArtifactError(f"program defines {name!r} twice")
        self._names[name] = f"v{len(self._names)}"
        return self._names[name]

    def _call(self, step: Step) -> str:
        if step.op == "py.getitem" and isinstance(step.args[1], int):
            return f"{self._value(step.args[0])}[{step.args[1]}]"
        if step.op == "aten.sym_size.int":
            return f"{self._value(step.args[0])}.shape[{int(step.args[1])}]"
        if step.op not in self._ops:
            native_key = "::".join(step.op.split(".")[:2])
            function = self._native.get(native_key) or resolve_op(step.op)
            self._ops[step.op] = f"op{len(self._ops)}"
            self._globals[self._ops[step.op]] = function
            if native_key in self._native:
                self.native_calls[self._ops[step.op]] = native_key, function
        args = [self._value(arg) for arg in step.args]
        for key, value in step.kwargs.items():
            if not key.isidentifier():
                raise ArtifactError(f"program step {step.op}: keyword {key!r} is not a name")
            args.append(f"{key}={self._value(value)}")
        return f"{self._ops[step.op]}({', '.join(args)})"

    def _value(self, value: Json) -> str:
        match value:
            case None | bool() | int():
                return repr(value)
            case float() | str():
                return repr(value)
            case list():
                return "[" + ", ".join(self._value(item) for item in value) + "]"
            case {"ref": str(name)}:
                if name not in self._names:
                    raise ArtifactError(f"program refers to {name!r} before it is made")
                return self._names[name]
            case {"float": str(text)} if text in ("inf", "-inf", "nan"):
                return self._constant(float(text))
            case {"dtype": str(name)} | {"layout": str(name)} | {"memory_format": str(name)}:
                word = getattr(torch, name, None)
                if not isinstance(word, torch.dtype | torch.layout | torch.memory_format):
                    raise ArtifactError(
                        f"program names torch.{name}, which torch {torch.__version__} does not have"
                    )
                return self._constant(word)
            case {"word": "device"}:
                return self._constant(self._device)
        raise ArtifactError(f"program holds {value!r:.100}, which no compile writes")

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._globals)}"
        self._globals[name] = value
        return name


def _refs(value: Json) -> set[str]:
    if isinstance(value, dict):
        if set(value) == {"ref"} and isinstance(value["ref"], str):
            return {value["ref"]}
        return set().union(*(_refs(item) for item in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(_refs(item) for item in value)) if value else set()
    return set()
