"""`ostinato inspect DIR`: manifest, pass table, weights and proof of an artifact; its graph as code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from ostinato.errors import ArtifactError, ConfigError
from ostinato.graph.facts import PoolingFacts
from ostinato.runtime.artifact import Manifest, check_fit, read_manifest, verify_files
from ostinato.runtime.artifact_names import WEIGHTS
from ostinato.runtime.weight_pack import load_packed
from ostinato.tools.flags import user_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=user_path, metavar="DIR")
    parser.add_argument(
        "--graph", choices=("before", "after"), help="print the code of one layer of the graph"
    )
    parser.add_argument("--layer", metavar="N|all", help="which layer --graph prints (default: 0)")
    parser.add_argument("--weights", action="store_true", help="list every packed weight")
    parser.add_argument(
        "--verify", action="store_true", help="also check every file's hash and that it fits this machine"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.artifact
    manifest = read_manifest(folder)
    if arguments.layer is not None and not arguments.graph:
        raise ConfigError(f"--layer {arguments.layer}: only with --graph before or --graph after")
    if arguments.json and (arguments.graph or arguments.weights or arguments.verify):
        raise ConfigError("--json prints the manifest alone; drop --graph, --weights and --verify")
    if arguments.json:
        print(manifest.model_dump_json(indent=1))
    elif arguments.graph:
        print(_graph(folder / "graph" / f"{arguments.graph}.py", arguments.layer or "0"))
    else:
        print(describe(manifest))
    if arguments.weights:
        print(weight_table(folder))
    if arguments.verify:
        verify_files(folder, manifest)
        check_fit(manifest)
        print(f"verified: {len(manifest.files)} files; fits this machine")
    return 0


def describe(manifest: Manifest) -> str:
    """The whole report but weights and code."""
    facts, proof = manifest.facts, manifest.proof
    generates = facts.pooling is None
    windows = sorted({a.window for a in facts.attention})
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[facts.dtype]
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in manifest.compile_seconds.items())
    lines = [
        f"model      {facts.architecture} from {manifest.source}, {facts.dtype}",
        f"           {len(facts.attention)} attention layers, vocabulary {facts.vocab_size}, window "
        f"{facts.max_model_len} tokens, sliding windows {windows if windows != [0] else 'none'}",
        f"KV         {facts.kv_token_bytes(itemsize)} bytes per token in {len(facts.kv_layers)} layers"
        if facts.pooling is None
        else pooling_line(facts.pooling),
        f"target     {manifest.target.device} {manifest.target.machine}: "
        + " ".join(manifest.target.features),
        f"made       {manifest.created}, ostinato {manifest.ostinato}, torch {manifest.torch}, transformers "
        f"{manifest.transformers}, {manifest.compiler}",
        f"seconds    {seconds} (kernels beside the others)",
        f"options    {json.dumps(manifest.options)}",
        f"key        {manifest.key}",
        "",
        pass_table(manifest),
        "",
        "plans      "
        + ", ".join(f"{plan.first} to {plan.last} tokens: {plan.program}" for plan in manifest.plans),
        f"weights    {manifest.weights_bytes / 2**20:.1f} MiB",
        f"proof      {proof.tokens} tokens against float64: {'logits' if generates else 'results'} off by "
        f"{proof.max_error:.3g} (allowed {proof.budget:.3g}; unfused graph {proof.unfused_error:.3g})"
        + (
            f", KV by {proof.kv_max_error:.3g} (allowed {proof.kv_budget:.3g}); typically "
            f"{proof.typical:.2f} times as far as the unfused graph, in the worst plane of KV "
            f"{proof.kv_typical:.2f} times (allowed {proof.typical_budget:g}); "
            f"same best token on every row: {'yes' if proof.argmax_equal else 'no'}"
            if generates
            else ""
        ),
        "files      " + ", ".join(f"{name} {record.bytes:,} B" for name, record in manifest.files.items()),
    ]
    return "\n".join(lines)


def pooling_line(pooling: PoolingFacts) -> str:
    """What a model that embeds or scores gives."""
    if pooling.task == "score":
        return "scores     of pairs of texts" + (", through a sigmoid" if pooling.sigmoid else "")
    length = ", length 1" if pooling.normalize else ""
    return f"embeds     {pooling.size} numbers, pooling {pooling.pooling}{length}"


def pass_table(manifest: Manifest) -> str:
    """One row per pass: matched, expected, refused with reasons, time; runs of one pass are added up."""
    rows = [("pass", "matched", "expected", "ms", "proofs", "refused")]
    for name in dict.fromkeys(record.name for record in manifest.passes):
        runs = [record for record in manifest.passes if record.name == name]
        expected = [record.expected for record in runs if record.expected is not None]
        reasons: Counter[str] = Counter()
        for record in runs:
            reasons.update(record.refused)
        rows.append(
            (
                name,
                str(sum(record.matched for record in runs)),
                str(sum(expected)) if expected else "-",
                f"{sum(record.milliseconds for record in runs):.0f}",
                str(sum(len(record.proofs) for record in runs)),
                "; ".join(f"{count}x {reason}" for reason, count in reasons.items()),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    ]
    if any(row[2] == "-" for row in rows):
        lines.append("expected -: the model does not say how often, so any number is right")
    return "\n".join(lines)


def weight_table(folder: Path) -> str:
    """Name, type and shape of each packed weight, from the file's header."""
    rows = load_packed(folder / WEIGHTS).items()
    return "\n".join(f"{name}  {str(t.dtype).removeprefix('torch.')}  {list(t.shape)}" for name, t in rows)


def layer_code(code: str, layer: int) -> str:
    """The statements of one decoder layer: from the first to the last use of a weight named `layers_N_`."""
    lines = [line for line in code.splitlines() if " = " in line]
    mine = re.compile(rf"layers_{layer}_")
    used = [index for index, line in enumerate(lines) if mine.search(line) and "torch.ops" in line]
    if not used:
        layers = [int(number) for number in re.findall(r"layers_(\d+)_", code)]
        known = f"0 to {max(layers)}" if layers else "none"
        raise ConfigError(f"--layer {layer}: the graph has no weights of that layer; layers: {known}, or all")
    return "\n".join(line.strip() for line in lines[used[0] : used[-1] + 1])


def _graph(path: Path, layer: str) -> str:
    if layer != "all" and not layer.isdecimal():
        raise ConfigError(f"--layer {layer}: must be a layer number or all")
    try:
        code = path.read_text()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); compile the model again") from None
    return code if layer == "all" else layer_code(code, int(layer))


if __name__ == "__main__":
    sys.exit("use: ostinato inspect DIR")
