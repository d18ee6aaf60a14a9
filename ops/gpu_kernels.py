"""Compiled Triton kernels: found by key, kept as cubins, launched through the driver.

A variant is a kernel with the types of its arguments, its constants and its options. `compile-model` runs
every plan while the store records what is launched, has what is missing compiled, and writes the cubins
into the artifact. A server reads them into a sealed store: it never imports triton, and a variant that is
not there is an error that names it.  The key of a variant holds the GPU's architecture and a hash of the
kernel's source files, so cubins of another version of an op are not found, rather than launched with the
wrong arguments.

Several engines, also of several GPUs, and a compile may share a process: modules are loaded for each GPU, a
launch is packed and handed over under a lock, and a recording is of one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from ostinato.errors import ArtifactError, EngineError
from ostinato.section import Section

INDEX, CUBINS = "kernels.json", "kernels.cubins"
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
_PACKED = {"i32": "i4x", "i64": "q", "fp32": "f4x", "ptr": "Q", "map": "128s"}  # of 8 bytes but the last
_CONSTANT, _PLAIN, _SPECIAL = range(3)  # a parameter whose value, size, or size and multiple of 16 decides
_INTEGERS = (("i32", "i32/16"), ("i64", "i64/16"))
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CARVEOUT = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_SHARED_WITHOUT_ASKING = 48 << 10  # bytes of shared memory that a kernel may use without an attribute


class Binary(Section):
    """One compiled variant: what a launch must know, and where its cubin lies in the file of all."""

    key: str
    symbol: str
    threads: int
    shared: int
    params: tuple[str, ...]  # "ptr", "i32", "i64", "fp32" or "map", in the order of the launch
    launch_pdl: bool
    offset: int
    size: int


class _Index(Section):
    version: int = 1
    capability: int
    binaries: tuple[Binary, ...]


class _Compiled(NamedTuple):
    binary: Binary
    cubin: bytes


class Variant(NamedTuple):
    """What decides a compiled kernel, for whoever compiles it."""

    key: str
    module: str  # where the kernel is written, and its name there
    function: str
    names: tuple[str, ...]  # of its parameters
    kinds: tuple[tuple[str, Any], ...]  # of each parameter: see `compile_kernel`
    options: tuple[Any, ...]  # as `OPTIONS`


class Recording:
    """The variants that one thread launches meanwhile; `is_dry`: it launches nothing."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.variants: dict[str, Variant] = {}  # by key
        self._thread = threading.get_ident()

    def is_mine(self) -> bool:
        """Whether the calling thread is recorded."""
        return threading.get_ident() == self._thread


class KernelStore:
    """Variants of this process. It is filled before a server starts."""

    def __init__(self) -> None:
        self.is_sealed = False  # nothing is compiled, except in a recording
        # Percent of L1 that launches want as shared memory. All kernels of a step ask for the same: to
        # change it a multiprocessor must run empty, so the next kernel could not begin before the last ends.
        self.carveout = 100
        self.launches = 0  # since start, for tests and logs
        self.recording_now: Recording | None = None
        self._compiled: dict[str, _Compiled] = {}
        self._one_recording = threading.Lock()

    @contextmanager
    def recording(self, *, is_dry: bool = False) -> Iterator[Recording]:
        """Note what the calling thread launches. A second compile in this process waits for the first."""
        with self._one_recording:
            self.recording_now = made = Recording(is_dry=is_dry)
            try:
                yield made
            finally:
                self.recording_now = None

    def get(self, key: str, build: Callable[[], tuple[Binary, bytes]]) -> _Compiled:
        """The variant `key`, built if it is missing. Raises EngineError in a sealed store."""
        found = self._compiled.get(key)
        if found is None:
            recording = self.recording_now
            if self.is_sealed and not (recording is not None and recording.is_mine()):
                raise EngineError(
                    f"kernel variant {key} is not in the artifact; compile the model again with this version"
                )
            found = self._compiled[key] = _Compiled(*build())
        return found

    def missing(self, variants: Iterable[Variant]) -> list[Variant]:
        """Those that are not compiled yet."""
        return [variant for variant in variants if variant.key not in self._compiled]

    def add(self, binary: Binary, cubin: bytes) -> None:
        """Take what was compiled elsewhere."""
        self._compiled[binary.key] = _Compiled(binary, cubin)

    def write(self, folder: Path, keys: Iterable[str]) -> int:
        """Put variants into a folder; return their number."""
        binaries, at = [], 0
        with (folder / CUBINS).open("wb") as file:
            for key in sorted(keys):
                binary, cubin = self._compiled[key]
                binaries.append(binary.model_copy(update={"offset": at, "size": len(cubin)}))
                file.write(cubin)
                at += len(cubin)
        index = _Index(capability=capability_here(), binaries=tuple(binaries))
        (folder / INDEX).write_text(index.model_dump_json(indent=1))
        return len(binaries)

    def read(self, folder: Path) -> int:
        """Add the variants of a folder; return their number. ArtifactError: unreadable, or of another GPU."""
        try:
            index = _Index.model_validate(json.loads((folder / INDEX).read_bytes()))
            cubins = (folder / CUBINS).read_bytes()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = f"{where}: {first['msg']}"
            raise ArtifactError(f"{folder / INDEX}: {said}; compile the model again") from None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{folder / INDEX}: {error}; compile the model again") from None
        if index.capability != (here := capability_here()):
            raise ArtifactError(
                f"{folder}: kernels for compute capability {index.capability}, this GPU has {here}; "
                "compile the model on this machine"
            )
        for binary in index.binaries:
            cubin = cubins[binary.offset : binary.offset + binary.size]
            self._compiled[binary.key] = _Compiled(binary, cubin)
        return len(index.binaries)


STORE = KernelStore()


@cache
def capability(device: int) -> int:
    """Compute capability of a GPU, e.g. 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def capability_here() -> int:
    """That of the current GPU."""
    return capability(torch.cuda.current_device())


class _Form(NamedTuple):
    """How the arguments of a call are given."""

    names: tuple[str, ...]  # parameters that the call's key looks at one by one: by position, then `late`
    rules: tuple[int, ...]  # of each: _CONSTANT, _PLAIN or _SPECIAL
    late: tuple[str, ...]  # parameters of the launch that are given by name
    fixed: tuple[str, ...]  # constants and options that are given by name


class GpuKernel:
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
        recording = STORE.recording_now
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
            binary, cubin = STORE.get(
                variant.key, lambda: compile_variant(self._made(), variant, capability_here())
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
        key = f"{self._name}@{self._source}.sm_{capability_here()}({signature}){said}"
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


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, a union of 64 bytes that begins with an int."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


@cache
def _launch_kernel_ex() -> Any:
    """cuLaunchKernelEx of the driver. The interpreter stays locked: another thread would take it for long."""
    function = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


class Launcher:
    """A function loaded on a GPU, with its parameter buffer: packs arguments and calls the driver."""

    def __init__(self, binary: Binary, cubin: bytes, device: int) -> None:
        """`device` is the current one."""
        from cuda.bindings import driver

        self._device, self._lock = device, threading.Lock()
        self._driver, self._enter = driver, _launch_kernel_ex()
        self._name, self._carveout = binary.symbol, STORE.carveout
        module = _done(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._module, self._cubin = module, cubin
        self._function = _done(driver.cuModuleGetFunction(module, binary.symbol.encode()), "getFunction")
        if binary.shared > _SHARED_WITHOUT_ASKING:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _done(driver.cuFuncSetAttribute(self._function, most, binary.shared), "cuFuncSetAttribute")
        codes = [_PACKED[kind] for kind in binary.params]
        sizes = [struct.calcsize(f"<{code}") for code in codes]
        self._values = ctypes.create_string_buffer(sum(sizes))
        at = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(codes))(
            *(at + end - size for end, size in zip(accumulate(sizes), sizes, strict=True))
        )
        self._pack = struct.Struct("<" + "".join(codes)).pack_into
        self._attributes = (_Attribute * 2)(
            _Attribute(_CARVEOUT, 0, self._carveout), _Attribute(_PROGRAMMATIC, 0, 1)
        )
        self._config = _Config(
            blockDimX=binary.threads, blockDimY=1, blockDimZ=1, sharedMemBytes=binary.shared
        )
        self._config.attrs = ctypes.addressof(self._attributes)
        self._config.numAttrs = 2 if binary.launch_pdl else 1
        self._call = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(int(self._function)),
            ctypes.c_void_p(ctypes.addressof(self._pointers)),
            None,
        )
        self._grid: Sequence[int] = ()
        self._stream = -1  # none

    def __call__(self, grid: Sequence[int], ready: Sequence[Any]) -> None:
        """`ready`: integers, floats, addresses and maps (bytes), in the order of the parameters."""
        with self._lock:  # another engine of this process may launch the same variant
            self._pack(self._values, 0, *ready)
            config = self._config
            if grid != self._grid:
                config.gridDimX = grid[0]
                config.gridDimY = grid[1] if len(grid) > 1 else 1
                config.gridDimZ = grid[2] if len(grid) > 2 else 1
                self._grid = tuple(grid)
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            if stream != self._stream:
                config.hStream = self._stream = stream
            if STORE.carveout != self._carveout:
                self._attributes[0].value = self._carveout = STORE.carveout
            code = self._enter(*self._call)
        if code:
            name = self._driver.CUresult(code).name
            raise EngineError(f"launch of {self._name} with grid {tuple(grid)} failed: {name}")
        STORE.launches += 1


def _done(answer: tuple[Any, ...], call: str) -> Any:
    code, *rest = answer
    if code.value:
        raise EngineError(f"{call} failed: {code.name}")
    return rest[0] if rest else None
