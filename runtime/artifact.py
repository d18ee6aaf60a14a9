"""The artifact: a folder that serves a model without a compiler. Written by `compile.py`, read here.

    manifest.json       what it is, for which machine, and the hash of every other file
    program.json        the linear program (program.py)
    weights.safetensors packed weights, memory-mapped
    kernels.so          native CPU kernels
    tokenizer/          tokenizer.json, chat template, generation defaults
    graph/              readable code of the graph before and after the passes

An artifact holds native code: trust one as you would trust a program.
"""

from __future__ import annotations

import json
import logging
import platform
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from ostinato import __version__
from ostinato.errors import ArtifactError, no_such_path
from ostinato.graph.facts import ModelFacts
from ostinato.ops import all_ops, native  # noqa: F401  # all_ops registers the operators
from ostinato.ops.step_inputs import PoolInputs, StepInputs
from ostinato.runtime.artifact_names import MANIFEST, WEIGHTS
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.file_hash import hash_file
from ostinato.runtime.program import Bound, Program, bind
from ostinato.runtime.sleeping_weights import MappedWeights
from ostinato.runtime.weight_pack import load_packed, map_packed
from ostinato.section import Section

if TYPE_CHECKING:
    from ostinato.runtime.gpu.gpu_model import GpuModel

log = logging.getLogger(__name__)

SCHEMA = 3


class Target(Section):
    """The machine that an artifact was made for."""

    device: Literal["cpu", "cuda"] = "cpu"
    machine: str = Field(description="as platform.machine() says, e.g. x86_64")
    features: tuple[str, ...] = Field(
        description="processor features that the kernels use; of a GPU its compute capability and size, e.g. "
        "sm_90 and 132 multiprocessors"
    )


class PassRecord(Section):
    """What one pass did."""

    name: str
    matched: int
    expected: int | None = Field(
        description="least number of matches; None: nothing in the graph calls for it"
    )
    refused: dict[str, int] = Field(default_factory=dict)
    milliseconds: float
    proofs: tuple[str, ...] = Field(
        (), description="checks of the rewrite on this model's shapes, with their errors"
    )


class Proof(Section):
    """The numeric check of the whole compiled program against the unfused graph in float64."""

    tokens: int
    max_error: float = Field(description="largest |compiled - float64| over all logits")
    budget: float = Field(description="4 * (largest |unfused - float64| + eps * largest |float64|)")
    unfused_error: float
    argmax_equal: bool
    kv_max_error: float = Field(
        description="the same over all KV planes, in units of a plane's largest value"
    )
    kv_budget: float
    typical: float | None = Field(
        description="median over tokens of |compiled - float64| by |unfused - float64|, both RMS over the "
        "token's values; None: a result is too few values to say"
    )
    kv_typical: float | None = Field(description="the same of the worst KV plane; None: there is no KV")
    typical_budget: float


class FileRecord(Section):
    """Size and content hash of one file."""

    bytes: int
    digest: str


class PlanRecord(Section):
    """The program for steps of `first` to `last` tokens."""

    first: int = Field(ge=1)
    last: int
    program: str = Field(description="name of its file")


class Manifest(Section):
    """Everything there is to know about an artifact without opening its other files."""

    version: int = SCHEMA
    key: str = Field(description="hash of graph, weights' identity, passes, op sources, target and versions")
    ostinato: str = __version__
    torch: str
    transformers: str
    created: str
    compile_seconds: dict[str, float]
    source: str = Field(description="name of the model folder or file")
    source_fingerprint: str
    facts: ModelFacts
    target: Target
    compiler: str
    options: dict[str, Any] = Field(description="settings that change the result")
    passes: tuple[PassRecord, ...]
    proof: Proof
    plans: tuple[PlanRecord, ...] = Field(description="by size of step, from 1 token on, without gaps")
    weights_bytes: int
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def _plans_cover_every_step(self) -> Manifest:
        covered = 0
        for plan in self.plans:
            if plan.first != covered + 1 or plan.last < plan.first:
                raise ValueError(f"plans: {plan.first} to {plan.last} tokens follow {covered}")
            if plan.program not in self.files:
                raise ValueError(f"plans: {plan.program} is not among the files")
            covered = plan.last
        if not covered:
            raise ValueError("plans: there is none")
        return self


class LoadedModel:
    """A model ready to run: `model(step_inputs, kv_planes)` gives logits [R, V] in its number type."""

    device = torch.device("cpu")

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        run: Bound,
        start_team: Callable[[], None],
        name_calls: Callable[[bool], None],
        weights: MappedWeights,
    ) -> None:
        self.folder, self.manifest, self._run, self.weights = folder, manifest, run, weights
        self.facts = manifest.facts
        self.start_team, self.name_calls = start_team, name_calls

    def __call__(self, inputs: StepInputs | PoolInputs, kv: Sequence[Tensor]) -> Tensor:
        return self._run(inputs, kv)


def this_target(device: torch.device) -> Target:
    """The machine that this process runs on, as far as code for a device depends on it."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        # how work is dealt out depends on the number of multiprocessors, and so do the kernels that are there
        features = f"sm_{found.major}{found.minor}", f"{found.multi_processor_count} multiprocessors"
        return Target(device="cuda", machine=platform.machine(), features=features)
    return Target(machine=platform.machine(), features=tuple(native.cpu_features()))


def read_manifest(folder: Path) -> Manifest:
    """Parse manifest.json; raise ArtifactError when the folder is no artifact or of another schema."""
    path = folder / MANIFEST
    if not folder.exists():
        raise ArtifactError(no_such_path(folder))
    if not path.is_file():
        raise ArtifactError(
            f"{folder}: not an artifact (no {MANIFEST}); make one with compile-model SRC -o DIR"
        )
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: unreadable ({error}); compile the model again") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != SCHEMA:
        raise ArtifactError(
            f"{path}: schema version {version}, this ostinato ({__version__}) reads {SCHEMA}; "
            "compile the model again"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{path}: {where}: {first['msg']}; compile the model again") from None


def check_fit(manifest: Manifest) -> None:
    """Raise ArtifactError with a readable diff when the artifact was made for another torch or machine."""
    if manifest.target.device == "cuda" and not torch.cuda.is_available():
        raise ArtifactError(
            f"artifact of {manifest.source} is for a GPU ({' '.join(manifest.target.features)}), and torch "
            "finds none here; compile the model with --target cpu"
        )
    here = this_target(torch.device(manifest.target.device))
    rows: list[tuple[str, str, str]] = []
    if manifest.torch != torch.__version__:
        rows.append(("torch", manifest.torch, str(torch.__version__)))
    if manifest.target.device != here.device or manifest.target.machine != here.machine:
        rows.append(
            ("target", f"{manifest.target.device}/{manifest.target.machine}", f"{here.device}/{here.machine}")
        )
    missing = sorted(set(manifest.target.features) - set(here.features))
    if missing and here.device == "cuda":
        rows.append(("GPU", ", ".join(manifest.target.features), ", ".join(here.features)))
    elif missing:
        rows.append(("processor features", ", ".join(missing), "absent"))
    if rows:
        diff = "; ".join(f"{what}: artifact {theirs}, here {ours}" for what, theirs, ours in rows)
        raise ArtifactError(
            f"artifact of {manifest.source} does not fit this machine ({diff}); compile the model here"
        )


def verify_files(
    folder: Path,
    manifest: Manifest,
    *,
    digest: Callable[[Path], str] = hash_file,
    leave_out: Collection[str] = (),
) -> None:
    """Raise ArtifactError naming the first file whose size or content is not what the manifest says.

    `digest` gives a file's hash; a FileHashes has them ready, or nearly so. `leave_out`: files whose content
    somebody else verifies.
    """
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{folder}: file {name} is missing; compile the model again")
        size = path.stat().st_size
        if size != record.bytes:
            raise ArtifactError(
                f"{path}: {size} bytes, the manifest says {record.bytes}; compile the model again"
            )
        if name not in leave_out and digest(path) != record.digest:
            raise ArtifactError(
                f"{path}: content does not match the manifest's hash; compile the model again"
            )


def load_artifact(
    folder: Path, config: EngineConfig | None = None, *, digest: Callable[[Path], str] = hash_file
) -> LoadedModel | GpuModel:
    """Verify and load an artifact onto its device; no compiler, no tracing. `digest`: see `verify_files`.

    Settings of `config` that only a compile can honour, and this artifact's did not, are named in a warning.

    Raises ArtifactError: damaged, incomplete, of another schema, or made for another torch or machine.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_fit(manifest)
    is_gpu = manifest.target.device == "cuda"
    verify_files(folder, manifest, digest=digest, leave_out=(WEIGHTS,) if is_gpu else ())
    if config is not None and (late := settings_too_late(manifest, config)):
        log.warning(
            "%s is compiled already, without %s, which has no effect now; compile %s with it, or drop it",
            folder,
            ", ".join(late),
            manifest.source,
        )
    if is_gpu:
        from ostinato.runtime.gpu.gpu_model import load_gpu  # needs what only a GPU machine has

        made_for = manifest.options.get("kv.block_tokens")
        if config is not None and made_for != config.kv.block_tokens:
            raise ArtifactError(
                f"{folder}: its kernels are for kv.block_tokens={made_for}, not {config.kv.block_tokens}; "
                f"serve it with {made_for}, or compile {manifest.source} with {config.kv.block_tokens}"
            )
        return load_gpu(folder, manifest, torch.device("cuda", torch.cuda.current_device()))
    packed = map_packed(folder / WEIGHTS)
    weights = MappedWeights(packed.memory, str(folder / WEIGHTS), manifest.files[WEIGHTS].digest)
    return LoadedModel(folder, manifest, *bind_files(folder, manifest.plans, packed.tensors), weights)


def compile_options(config: EngineConfig, device: str = "cpu") -> dict[str, Any]:
    """The settings that change what a compile for a device makes, as the manifest keeps them."""
    of_gpu = {"kv.block_tokens": config.kv.block_tokens} if device == "cuda" else {}
    return of_gpu | {
        "graph.dtype": config.graph.dtype,
        "graph.target": config.graph.target,
        "graph.task": config.graph.task,
        "graph.pooling": config.graph.pooling,
        "graph.tune_s": config.graph.tune_s,
        "passes.off": sorted(config.passes.off),
        "passes.fuel": config.passes.fuel,
    }


def settings_too_late(manifest: Manifest, config: EngineConfig) -> list[str]:
    """`name=value` of each setting of a compile that is not at its default and not what the artifact has."""
    defaults, pooling = compile_options(EngineConfig()), manifest.facts.pooling
    made = manifest.options | {
        "graph.dtype": manifest.facts.dtype,
        "graph.target": manifest.target.device,
        "graph.task": "generate" if pooling is None else pooling.task,
        "graph.pooling": None if pooling is None else pooling.pooling,
    }
    return [
        f"{name}={value}"
        for name, value in compile_options(config).items()
        if value not in (defaults[name], made.get(name))
    ]


def bind_files(
    folder: Path, plans: Sequence[PlanRecord], weights: Mapping[str, Tensor] | None = None
) -> tuple[Bound, Callable[[], None], Callable[[bool], None]]:
    """What runs a step by the plan for its size, starts the threads of the kernels, and names their calls.

    All programs share weights (None: those of the folder) and kernels. The manifest of the folder need not be
    written yet.
    """
    library = native.load(folder / "kernels.so")
    kernels = native.bind(library)
    if weights is None:
        weights = load_packed(folder / WEIGHTS)
    runs = [
        bind(read_program(folder / plan.program), weights, native=kernels, device=torch.device("cpu"))
        for plan in plans
    ]
    last_tokens = [plan.last for plan in plans]

    def run(inputs: StepInputs | PoolInputs, kv: Sequence[Tensor]) -> Tensor:
        return runs[bisect_left(last_tokens, inputs.token_ids.shape[0])](inputs, kv)

    def name_calls(named: bool) -> None:
        for one in runs:
            one.name_calls(named)

    return runs[0] if len(runs) == 1 else run, library.start_team, name_calls


def read_program(path: Path) -> Program:
    """Parse a program's file. Raises ArtifactError."""
    try:
        return Program.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ArtifactError(f"{path}: program is not valid: {error.errors()[0]['msg']}") from None
