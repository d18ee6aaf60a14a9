"""`compile_model`: model folder -> traced graph -> passes -> program, kernels, packed weights -> artifact
folder.

The one place where graph and passes meet. Everything slow happens here; serving the result compiles nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, fx

from ostinato.errors import ArtifactError, CompileError, ModelError
from ostinato.graph.build import BuiltModel, build_model
from ostinato.graph.capture import CapturedGraph, capture
from ostinato.graph.expectations import expected_matches
from ostinato.graph.hooks import CaptureHooks
from ostinato.graph.pool_capture import capture_pooling
from ostinato.graph.pool_hooks import PoolHooks
from ostinato.graph.pooling import pooling_plan
from ostinato.graph.source import ModelSource, load_config, open_source, resolve_dtype
from ostinato.graph.weights import weight_exprs
from ostinato.ops import fa3_attention
from ostinato.ops.weight_expr import CONSTANT, Expr, evaluate
from ostinato.passes import pipeline
from ostinato.passes.aliases import Aliases, written
from ostinato.passes.base import PassReport
from ostinato.runtime.artifact import (
    SCHEMA,
    FileRecord,
    Manifest,
    PassRecord,
    PlanRecord,
    Proof,
    compile_options,
    this_target,
)
from ostinato.runtime.artifact_folder import make_parent, only_compiler_of, replace_folder, same_artifact
from ostinato.runtime.artifact_names import MANIFEST, WEIGHTS
from ostinato.runtime.compile_stages import Progress
from ostinato.runtime.compile_target import CompileTarget, Plan, chosen_device, open_target
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.file_hash import hash_file
from ostinato.runtime.pooling.pool_proof import prove_pooling
from ostinato.runtime.program import Bound, lower
from ostinato.runtime.proof import prove
from ostinato.runtime.sigterm import exits_on_sigterm
from ostinato.runtime.text import TextFrontEnd
from ostinato.runtime.weight_pack import PackedFile, pack

log = logging.getLogger(__name__)


def compile_model(
    source: str | Path | ModelSource,
    out: str | Path,
    config: EngineConfig | None = None,
    *,
    progress: Progress | None = None,
) -> Manifest:
    """Compile a model folder, a GGUF file or an opened source into the folder `out`; return its manifest.

    An artifact with the same key that is already there is kept, unless `passes.dump_dir` asks to see the
    passes at work. `out` is replaced as a whole at the end, so that a reader, a second compile (which waits)
    or a kill never meets half an artifact. Errors, Ctrl-C and SIGTERM (in the main thread) leave nothing
    behind; what a compile killed in another way leaves is removed by the next one.
    Raises ModelError, ConfigError, CompileError; ArtifactError when `out` exists and is no artifact.
    """
    config, out = config or EngineConfig(), Path(out).expanduser().absolute()
    report = progress or (lambda stage, share: None)
    if out.exists() and not (out / MANIFEST).is_file() and any(out.iterdir() if out.is_dir() else [out]):
        raise ArtifactError(f"{out} exists and is not an artifact; choose another folder for -o")
    opened = open_source(source) if isinstance(source, str | Path) else source
    key = compile_key(opened, config)
    make_parent(out)
    with exits_on_sigterm(), only_compiler_of(out):
        there = None if config.passes.dump_dir else same_artifact(out, key)
        if there is not None:
            log.info("%s is up to date", out)
            return there
        for stale in out.parent.glob(f".{out.name}.*.partial"):
            shutil.rmtree(stale)
        folder = out.parent / f".{out.name}.{os.getpid()}.partial"
        try:
            folder.mkdir()
            manifest = _Compile(opened, folder, config, key, report).run()
            replace_folder(folder, out)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CompileError(
                    f"{out.parent}: no space left while writing the artifact; free some and retry"
                ) from None
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return manifest


def compile_key(source: ModelSource, config: EngineConfig) -> str:
    """Hash of all that decides what a compile makes: model, settings, our own code, versions, machine."""
    import transformers

    device = chosen_device(config.graph.target)
    parts = {
        "schema": SCHEMA,
        "source": source.fingerprint,
        "options": compile_options(config, device.type),
        "code": _code_hash(),
        "versions": [torch.__version__, transformers.__version__],
        "gpu": _gpu_parts(device) if device.type == "cuda" else [],
        "target": this_target(device).model_dump(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _gpu_parts(device: torch.device) -> list[str]:
    """What decides kernels and measurements: the GPU's name, which also names its table; versions."""
    versions = metadata.version("triton"), fa3_attention.installed_version()
    return [torch.cuda.get_device_name(device), *versions]


def _code_hash() -> str:
    """Hash of the sources that shape an artifact."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def code_files() -> list[Path]:
    """The sources that shape an artifact, in whatever language."""
    package = Path(__file__).parent.parent
    names = (
        "artifact.py",
        "compile.py",
        "file_hash.py",
        "program.py",
        "proof.py",
        "weight_pack.py",
        "compile_target.py",
    )
    runtime = [package / "runtime" / name for name in names]
    # what is sampled with on a GPU decides which kernels are compiled
    parts = ("graph", "passes", "ops", "ops/tuned", "runtime/gpu", "runtime/pooling", "runtime/sampling")
    inside = [path for name in parts for path in (package / name).iterdir() if path.is_file()]
    return sorted([*runtime, *inside])


def refuse_other_state(captured: CapturedGraph) -> None:
    """Raise ModelError if a step writes anything but KV planes: weights are shared, and may be read-only."""
    graph = captured.graph_module.graph
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] != "kv" and aliases.is_written(node):
            name = node.meta["weight"][1].removeprefix(CONSTANT) if "weight" in node.meta else node.name
            writers = (w for w in aliases.writers if any(node in aliases.owners(to) for to in written(w)))
            raise ModelError(
                f"{captured.facts.architecture}: its definition changes {name} in every step (by "
                f"{next(writers).target}); only keys and values are carried from step to step, so it cannot "
                "be served"
            )


class _Compile:
    """One compile into `folder`: each method is a stage."""

    def __init__(
        self, source: ModelSource, folder: Path, config: EngineConfig, key: str, progress: Progress
    ) -> None:
        self._source, self._folder, self._config, self._key = source, folder, config, key
        self._progress = progress
        self._seconds: dict[str, float] = {}

    def run(self) -> Manifest:
        self._write_text()
        self._pooling = pooling_plan(self._source, self._config.graph)
        target = open_target(self._folder, self._config, pools=self._pooling is not None)
        try:
            return self._run(target)
        finally:
            target.close()

    def _run(self, target: CompileTarget) -> Manifest:
        with self._stage("read"):
            built = self._build()
        with self._stage("trace"):
            captured = self._capture(built)
        unfused = deepcopy(captured.graph_module)
        with self._stage("passes"):
            reports = self._rewrite(captured)
            plans = target.plans(captured.graph_module, self._config, reports)
        records = [plan.record for plan in plans]
        with self._stage("weights"):
            packed = self._pack(captured, plans)
        with self._stage("kernels"):
            compiler_s = target.make_kernels(records, self._config, captured.facts)
        self._seconds["kernels"] = round(compiler_s, 3)  # of the compiler, not of waiting for it
        with self._stage("proof"):
            proof = self._prove(captured, unfused, target.load(records), records, target.device)
        with self._stage("write"):
            self._write_graphs(unfused, plans)
            reports += [report for plan in plans for report in plan.reports]
            return self._manifest(captured, reports, records, target, packed, proof)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._progress(name, 0.0)
        start = time.perf_counter()
        yield
        self._seconds[name] = round(time.perf_counter() - start, 3)
        self._progress(name, 1.0)

    def _build(self) -> BuiltModel:
        hf_config = load_config(self._source)
        self._dtype = resolve_dtype(self._config.graph.dtype, self._source)
        self._hooks = CaptureHooks() if self._pooling is None else PoolHooks()
        task = "generate" if self._pooling is None else self._pooling.task
        built = build_model(hf_config, self._dtype, self._hooks, task=task)
        # before anything slow: it finds config and weights that do not belong together
        self._by_parameter = weight_exprs(
            built.params, built.tied, self._source, built.config, model=built.model
        )
        return built

    def _write_text(self) -> None:
        """Tokenizer, chat template and sampling defaults; they must load, or nothing slow is worth it."""
        folder = self._folder / "tokenizer"
        self._source.write_tokenizer(folder)
        try:
            TextFrontEnd.load(folder).close()
        except ArtifactError as error:
            said = str(error).removeprefix(f"{folder}/")
            raise ModelError(f"{self._source.path}: {said}; correct the model's file") from None

    def _capture(self, built: BuiltModel) -> CapturedGraph:
        text = built.config.get_text_config()
        facts = {
            "architecture": type(built.model).__name__,
            "model_type": built.config.model_type,
            "dtype": str(self._dtype).removeprefix("torch."),
            "hidden_size": text.hidden_size,
            "max_model_len": text.max_position_embeddings,
            "eos_token_ids": self._source.eos_token_ids,
            "bos_token_id": self._source.bos_token_id,
        }
        if isinstance(self._hooks, PoolHooks) and self._pooling is not None:
            captured = capture_pooling(built, self._hooks, facts, self._pooling)
        else:
            captured = capture(built, self._hooks, facts, block_tokens=self._config.kv.block_tokens)
        refuse_other_state(captured)
        expected = expected_matches(built.model, captured.graph_module.graph)
        return captured._replace(facts=captured.facts.model_copy(update={"expected_matches": expected}))

    def _rewrite(self, captured: CapturedGraph) -> list[PassReport]:
        reports = pipeline.run(
            captured.graph_module, self._config.passes, captured.facts.expected_matches,
            on_pass=lambda report: self._progress("passes", 0.5),
        )  # fmt: skip
        log.info("passes:\n%s", pipeline.format_table(reports))
        return reports

    def _pack(self, captured: CapturedGraph, plans: Sequence[Plan]) -> PackedFile:
        """All programs, and one file with the weights of them all."""
        exprs: dict[str, Expr] = {}
        for plan in plans:
            keys: dict[str, str] = {}
            for node in plan.graph_module.graph.nodes:
                if node.op == "placeholder" and node.meta["role"] == "weight" and node.users:
                    expr = node.meta["weight"]
                    key = str(expr[1]) if expr[0] == "load" else node.name
                    keys[node.name] = key
                    exprs[key] = _substitute(expr, self._by_parameter)
            program = lower(plan.graph_module, keys).model_dump_json()
            (self._folder / plan.record.program).write_text(program)
        self._read = _Reader(self._source, captured.constants)
        return pack(
            exprs, self._read, self._folder / WEIGHTS,
            progress=lambda share: self._progress("weights", min(share, 0.999)),
        )  # fmt: skip

    def _prove(
        self, captured: CapturedGraph, unfused: fx.GraphModule, program: Bound,
        plans: Sequence[PlanRecord], device: torch.device,
    ) -> Proof:  # fmt: skip
        def weight(node: fx.Node) -> Tensor:
            return evaluate(_substitute(node.meta["weight"], self._by_parameter), self._read)

        if (pooling := captured.facts.pooling) is not None:
            return prove_pooling(
                unfused, weight, program, pooling, alone=captured.alone, dtype=self._dtype,
                vocab_size=captured.facts.vocab_size, longest=captured.facts.max_model_len, device=device,
            )  # fmt: skip
        return prove(
            unfused, weight, program, captured.facts.kv_layers,
            dtype=self._dtype, vocab_size=captured.facts.vocab_size,
            block_tokens=self._config.kv.block_tokens, above=plans[-1].first - 1,
            longest=captured.facts.max_model_len, device=device,
        )  # fmt: skip

    def _write_graphs(self, before: fx.GraphModule, plans: Sequence[Plan]) -> None:
        (self._folder / "graph").mkdir()
        (self._folder / "graph" / "before.py").write_text(before.code)
        for plan in plans:
            name = "after.py" if plan is plans[-1] else f"after.{Path(plan.record.program).stem}.py"
            (self._folder / "graph" / name).write_text(plan.graph_module.code)

    def _manifest(
        self, captured: CapturedGraph, reports: list[PassReport], plans: Sequence[PlanRecord],
        target: CompileTarget, packed: PackedFile, proof: Proof,
    ) -> Manifest:  # fmt: skip
        import transformers

        files = {
            str(path.relative_to(self._folder)): FileRecord(bytes=path.stat().st_size, digest=hash_file(path))
            for path in sorted(self._folder.rglob("*"))
            if path.is_file() and path.name != WEIGHTS
        }
        machine, compiler = target.described()
        files[WEIGHTS] = FileRecord(bytes=packed.bytes, digest=packed.digest)
        manifest = Manifest(
            key=self._key,
            torch=torch.__version__,
            transformers=transformers.__version__,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            compile_seconds=self._seconds,
            source=self._source.path.name,
            source_fingerprint=self._source.fingerprint,
            facts=captured.facts,
            target=machine,
            compiler=compiler,
            options=compile_options(self._config, target.device.type),
            passes=tuple(_record(report) for report in reports),
            proof=proof,
            plans=tuple(plans),
            weights_bytes=packed.bytes,
            files=files,
        )
        path = self._folder / MANIFEST
        with open(path, "w") as file:
            file.write(manifest.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        return manifest


class _Reader:
    """Checkpoint tensors and traced constants under one roof."""

    def __init__(self, source: ModelSource, constants: dict[str, Tensor]) -> None:
        self._source, self._constants = source, constants

    def __call__(self, name: str) -> Tensor:
        return self._constants[name] if name in self._constants else self._source.read(name)


def _substitute(expr: Expr, by_parameter: dict[str, Expr]) -> Expr:
    """Put checkpoint expressions in the place of parameter names; constants stay."""
    if expr[0] == "load":
        return by_parameter.get(expr[1], expr)
    if expr[0] in ("concat", "stack"):
        return [expr[0], expr[1], [_substitute(part, by_parameter) for part in expr[2]]]
    return [*expr[:-1], _substitute(expr[-1], by_parameter)]


def _record(report: PassReport) -> PassRecord:
    return PassRecord(
        name=report.name, matched=report.matched, expected=report.expected, refused=report.refused,
        milliseconds=round(report.seconds * 1000, 1), proofs=tuple(str(proof) for proof in report.proofs),
    )  # fmt: skip
