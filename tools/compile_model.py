"""`compile-model SRC [-o DIR]`: model folder or GGUF file to artifact; without -o, in the cache."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato import log
from ostinato.tools.flags import add_flags, config_from, user_path
from ostinato.tools.main import run_command
from ostinato.tools.unknown_flags import parse

if TYPE_CHECKING:
    from ostinato.runtime.artifact import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=user_path, metavar="SRC", help="Hugging Face model folder or GGUF file"
    )
    parser.add_argument(
        "-o", "--out", type=user_path, metavar="DIR",
        help="artifact folder to write (default: one in the cache)",
    )  # fmt: skip
    parser.add_argument("--dtype", metavar="TYPE", help="short for --graph.dtype")
    parser.add_argument(
        "--target",
        metavar="DEVICE",
        help="short for --graph.target",
    )
    add_flags(
        parser, leave_out=("server", "scheduler", "cpu", "gpu", "kv", "max_model_len", "profile")
    )  # no effect here


def run(arguments: argparse.Namespace) -> int:
    from ostinato.runtime.artifact import read_manifest
    from ostinato.runtime.compile import compile_model
    from ostinato.runtime.compile_cache import resolve_artifact
    from ostinato.runtime.progress import compile_progress
    from ostinato.tools.inspect_artifact import pass_table

    if arguments.dtype:
        setattr(arguments, "graph.dtype", arguments.dtype)
    if arguments.target:
        setattr(arguments, "graph.target", arguments.target)
    config = config_from(arguments)
    log.setup(config.log_level if "log_level" in config.model_fields_set else "WARNING")
    start = time.perf_counter()
    stages: set[str] = set()
    with compile_progress(arguments.source.stem) as progress:

        def note(stage: str, share: float) -> None:
            stages.add(stage)
            progress(stage, share)

        if arguments.out:
            folder = arguments.out
            compile_model(arguments.source, folder, config, progress=note)
        else:
            folder = resolve_artifact(arguments.source, config, progress=note)
    manifest = read_manifest(folder)
    if not stages:
        print(f"{folder} is up to date (key {manifest.key[:16]})", file=sys.stderr)
        print(folder)
        return 0
    for line in (
        pass_table(manifest),
        *measured_layers(folder),
        proof_line(manifest),
        f"{manifest.weights_bytes / 2**20:.0f} MiB of weights, {time.perf_counter() - start:.1f} s",
    ):
        print(line, file=sys.stderr)
    print(folder)
    return 0


def proof_line(manifest: Manifest) -> str:
    """How far the compiled model is from float64, and from the unfused one in the same type."""
    proof, dtype = manifest.proof, manifest.facts.dtype
    line = f"proof against float64: largest error {proof.max_error:.2e} ({proof.budget:.2e} allowed)"
    if proof.typical is None:
        return f"{line}, that of the unfused model in {dtype} {proof.unfused_error:.2e}"
    return (
        f"{line}, typical error {proof.typical:.2f} times that of the unfused model in {dtype} "
        f"({proof.typical_budget:g} allowed)"
    )


def measured_layers(folder: Path) -> list[str]:
    """What the compile for a GPU has measured: a line, or none."""
    from ostinato.ops import tuning

    said = tuning.measured(folder)
    if not said:
        return []
    return [
        f"linear layers: {said['shapes']} shapes measured in {said['seconds']} s, "
        f"{said['not_default']} go another way than the default"
    ]


def main() -> int:
    """Entry point of the `compile-model` script."""
    parser = argparse.ArgumentParser(prog="compile-model", description=__doc__)
    add_arguments(parser)
    arguments = parse(parser, sys.argv[1:])
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
