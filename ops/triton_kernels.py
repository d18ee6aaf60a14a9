"""Triton kernels on a GPU: from the arguments of a call to a variant, its machine code and its launch."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops import kernel_store
from ostinato.ops.kernel_launch import Launcher
from ostinato.ops.kernel_store import Binary, Variant

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_CONSTANT, _PLAIN, _SPECIAL = range(3)  # a parameter whose value, size, or size and multiple of 16 decides
_INTEGERS = (("i32", "i32/16"), ("i64", "i64/16"))


class _Form(NamedTuple):
    """How the arguments of a call are given."""

    names: tuple[str, ...]  # parameters that the call's key looks at one by one: by position, then `late`
    rules: tuple[int, ...]  # of each: _CONSTANT, _PLAIN or _SPECIAL
    late: tuple[str, ...]  # parameters of the launch that are given by name
    fixed: tuple[str, ...]  # constants and options that are given by name


class TritonKernel:
    """The GPU side of one `jit` kernel: from call arguments to a launch."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[str],
        plain: Sequence[str],
        made: Callable[[], Any],
    ) -> None:
        """`modules`: where the kernel and those that it calls are written. `plain`: integer parameters on
        whose values no variant depends. `made`: triton's function."""
        self._made, self._module, self._function = made, function.__module__, function.__name__
        self._name = f"{function.__module__.removeprefix('ostinato.')}.{function.__qualname__}"
        self._source = source_hash(tuple(sorted(set(modules))))
        parameters = inspect.signature(function).parameters.values()
        self._names = tuple([p.name for p in parameters])
        self._constants = [
            p.name for p in parameters if "constexpr" in str(p.annotation)
        ]  # an annotation may be a string
        self._defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        self._plain = frozenset(plain)
        self._launchers: dict[tuple[Any, ...], Launcher] = {}  # of all GPUs of the process
        self._forms: dict[tuple[Any, ...], _Form] = {}  # by number of positions and names of keywords
        self._known: dict[tuple[Any, ...], Launcher] = {}  # `_launchers` by cheaper keys

    def launch(self, grid: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Launch on the current stream; `args` fill the parameters from the left."""
        recording = kernel_store.STORE.recording_now
        if recording is not None and recording.is_mine():
            variant = self._variant(*self._what_decides(args, kwargs))
            recording.variants[variant.key] = variant
            if recording.is_dry:
                return
        form = self._forms.get((len(args), *kwargs))
        if form is None:
            form = self._forms[len(args), *kwargs] = self._form(len(args), kwargs)
        given = args if not form.late else (*args, *[kwargs[name] for name in form.late])
        device = torch._C._cuda_getDevice()
        key: list[Any] = [form, device, *[kwargs[name] for name in form.fixed]]
        ready: list[Any] = []  # what the kernel gets
        for value, name, rule in zip(given, form.names, form.rules, strict=True):
            kind = type(value)
            if rule == _CONSTANT:
                key.append(value)
            elif kind is int:
                ready.append(value)
                wide = not -(1 << 31) <= value < 1 << 31
                key.append(_INTEGERS[wide][rule == _SPECIAL and not value & 15])
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                ready.append(address)
                key.append((value.dtype,) if address & 15 else value.dtype)
            else:
                said = self._kind(name, value)
                key.append(said)
                if said[0] != "const":
                    ready.append(value)
        known = tuple(key)
        launcher = self._known.get(known)
        if launcher is None:
            launcher = self._known[known] = self._launcher(device, args, kwargs)
        ready += (0, 0)  # Triton's two pointers to scratch memory, unused
        launcher(grid, ready)

    def _form(self, count: int, kwargs: Mapping[str, Any]) -> _Form:
        rest = self._names[count:]
        late = tuple(name for name in rest if name in kwargs and name not in self._constants)
        fixed = tuple(name for name in kwargs if name not in late)
        names = (*self._names[:count], *late)
        rules = tuple(
            _CONSTANT if name in self._constants else _PLAIN if name in self._plain else _SPECIAL
            for name in names
        )
        return _Form(names, rules, late, fixed)

    def _launcher(self, device: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launcher:
        """The variant for these arguments, found by what they are and not by how they were given."""
        kinds, options = self._what_decides(args, kwargs)
        launcher = self._launchers.get((device, kinds, options))
        if launcher is None:
            variant = self._variant(kinds, options)
            binary, cubin = kernel_store.STORE.get(
                variant.key, lambda: compile_variant(self._made(), variant, kernel_store.capability_here())
            )
            launcher = self._launchers[device, kinds, options] = Launcher(binary, cubin, device)
        return launcher

    def _what_decides(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[str, Any], ...], tuple[Any, ...]]:
        """Kinds and options of a call's variant."""
        names, values = self._names, args
        if len(args) < len(names):
            values = (*args, *(kwargs[n] if n in kwargs else self._defaults[n] for n in names[len(args) :]))
        kinds = tuple([self._kind(name, value) for name, value in zip(names, values, strict=True)])
        return kinds, tuple([kwargs.get(option) for option in OPTIONS])

    def _kind(self, name: str, value: Any) -> Any:
        """What of an argument decides the variant: (type, divisible by 16), or the value of a constant."""
        if isinstance(value, Tensor):
            return _POINTERS[value.dtype], value.data_ptr() % 16 == 0
        if name in self._constants or value is None or isinstance(value, bool):
            return "const", value
        if isinstance(value, int):
            size = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            return size, value % 16 == 0 and name not in self._plain
        if isinstance(value, float):
            return "fp32", False
        raise EngineError(f"{self._name}: argument {name}={value!r} is nothing a kernel can take")

    def _variant(self, kinds: tuple[tuple[str, Any], ...], options: tuple[Any, ...]) -> Variant:
        signature = ",".join(
            f"{name}={value!r}" if kind == "const" else f"{name}:{kind}{'/16' if value else ''}"
            for name, (kind, value) in zip(self._names, kinds, strict=True)
        )
        said = ",".join(f"{n}={v}" for n, v in zip(OPTIONS, options, strict=True) if v is not None)
        key = f"{self._name}@{self._source}.sm_{kernel_store.capability_here()}({signature}){said}"
        return Variant(key, self._module, self._function, self._names, kinds, options)


def compile_variant(function: Any, variant: Variant, capability: int) -> tuple[Binary, bytes]:
    """Have triton's `function` compiled; needs no GPU. Raises EngineError for what cannot be kept."""
    compiled, params = compile_kernel(function, variant.names, variant.kinds, variant.options, capability)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise EngineError(f"{variant.key}: kernels with scratch memory or clusters cannot be kept")
    binary = Binary(
        key=variant.key,
        symbol=metadata.name,
        threads=metadata.num_warps * 32,
        shared=metadata.shared,
        params=(*params, "ptr", "ptr"),  # two scratch pointers, unused
        launch_pdl=bool(variant.options[OPTIONS.index("launch_pdl")]),
        offset=0,
        size=0,
    )
    return binary, compiled.asm["cubin"]


def compile_kernel(
    function: Any, names: Sequence[str], kinds: Sequence[Any], options: Sequence[Any], capability: int
) -> tuple[Any, list[str]]:
    """Triton's compiled kernel and the types of its parameters. Needs no GPU.

    `kinds` has for each name ("const", value) or (type, whether divisible by 16); `options` as `OPTIONS`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        n: "constexpr" if kind == "const" else kind for n, (kind, _) in zip(names, kinds, strict=True)
    }
    constants = {n: value for n, (kind, value) in zip(names, kinds, strict=True) if kind == "const"}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (kind, value) in enumerate(kinds)
        if kind != "const" and value
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    given = {n: v for n, v in zip(OPTIONS, options, strict=True) if v is not None}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=given)
    params = ["ptr" if kind.startswith("*") else kind for kind, _ in kinds if kind != "const"]
    return compiled, params


@cache
def source_hash(modules: tuple[str, ...]) -> str:
    """Hash of the files of some modules."""
    digest = hashlib.sha256()
    for name in modules:
        digest.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return digest.hexdigest()[:12]
