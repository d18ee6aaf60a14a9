"""The passes in order, and one run of them all; then the passes of the decode plan, on a copy of the result.

The decode plan is the program for steps of up to 16 tokens on a GPU, 256 on Hopper, where reading the weights
decides.

What a name counts (`expected` of `run` uses the same words):
  remove_noops       nodes dropped or respelled; runs again where a pass leaves views behind
  merge_linears      groups of parallel linear layers that became one (QKV of a layer: 1, its gate and up: 1)
  rms_norm           RMSNorms with a weight, wherever they stand (also those that a later pass takes up)
  add_rms_norm       RMSNorms of a sum of two tensors of one shape, joined with that sum
  silu_mul           products of a SiLU with another tensor of its shape
  gelu_tanh_mul      the same for the tanh approximation of GELU
  rope_kv_write      KV writes whose keys, and the queries of the attention that reads them, are rotated
  rope_table         pairs of cos and sin tables made from positions and frequencies
  fold_qk_norm       of the rotated KV writes, the ones that norm each head of q and k before the rotation
  remove_duplicates  nodes that another one computes already
and in the decode plan:
  skinny_linear      linear layers (QKV, output, gate and up, down of a layer: 4; the logits: 1)
  skinny_gated       of those, the ones whose halves are gate and up, joined with their product
  skinny_residual    of those, the ones that end in a sum with the residual
  skinny_norm        RMSNorms that only the ops above read, done by these
  rope_attention     of the rotated KV writes, the ones whose queries go to one attention over the same planes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from ostinato.errors import CompileError, ConfigError
from ostinato.passes.base import Fuel, Pass, PassReport
from ostinato.passes.config import PassesConfig
from ostinato.passes.decode_expectations import expected_matches
from ostinato.passes.dump import Dump
from ostinato.passes.fold_qk_norm import FoldQKNorm
from ostinato.passes.fuse_add_rms_norm import FuseAddRMSNorm
from ostinato.passes.fuse_gelu_tanh_mul import FuseGeluTanhMul
from ostinato.passes.fuse_rms_norm import FuseRMSNorm
from ostinato.passes.fuse_rope_attention import FuseRopeAttention
from ostinato.passes.fuse_rope_kv_write import FuseRopeKVWrite
from ostinato.passes.fuse_rope_table import FuseRopeTable
from ostinato.passes.fuse_silu_mul import FuseSiluMul
from ostinato.passes.fuse_skinny_gated import FuseSkinnyGated
from ostinato.passes.fuse_skinny_norm import FuseSkinnyNorm
from ostinato.passes.fuse_skinny_residual import FuseSkinnyResidual
from ostinato.passes.lower_skinny_linear import LowerSkinnyLinear
from ostinato.passes.merge_linears import MergeLinears
from ostinato.passes.remove_duplicates import RemoveDuplicates
from ostinato.passes.remove_noops import RemoveNoops


def pipeline() -> list[Pass]:
    """Fresh passes, in the order in which they run."""
    return [
        RemoveNoops(),  # first: every pattern is cleaned the same way
        MergeLinears(),  # early: what follows sees the strided halves that it will get
        FuseRMSNorm(),
        FuseAddRMSNorm(),  # after rms_norm: one spelling of the norm
        FuseSiluMul(),
        FuseGeluTanhMul(),
        FuseRopeKVWrite(),
        FuseRopeTable(),  # after rope_kv_write, which looks at how the tables were made
        RemoveNoops(),  # the transposes around the rotation meet their opposites
        FoldQKNorm(),  # after rope_kv_write and rms_norm: joins the two ops
        RemoveNoops(),  # transposes again, where the norm stood behind one
        RemoveDuplicates(),  # last: a fusion wants its intermediate results for itself
    ]


def decode_plan() -> list[Pass]:
    """Fresh passes that make the decode plan from a graph that `pipeline()` went through, in order."""
    return [
        LowerSkinnyLinear(),  # first: the others fold their neighbours into this op
        FuseSkinnyGated(),  # before skinny_norm: the norm goes into whichever op is there
        FuseSkinnyResidual(),  # before skinny_norm: it leaves a rms_norm of an add_rms_norm
        FuseSkinnyNorm(),
        FuseRopeAttention(),  # anywhere: it shares no node with the others
        RemoveNoops(),  # views that met, norms that nobody reads
    ]


def known_passes() -> tuple[str, ...]:
    """Names that `passes.off` understands, in order."""
    return tuple(dict.fromkeys(rewrite.name for rewrite in (*pipeline(), *decode_plan())))


def run(
    graph_module: fx.GraphModule,
    config: PassesConfig,
    expected: dict[str, int],
    *,
    on_pass: Callable[[PassReport], None] | None = None,
) -> list[PassReport]:
    """Rewrite `graph_module` in place; `on_pass` hears each report as it is made.

    `expected` is the least number of matches by pass name. ConfigError for a name in `config.off` that is no
    pass's. CompileError when a pass matched less often than expected (unless it, or a pass it needs, is off,
    or the fuel is limited) and when a rewrite does not prove to be right.
    """
    _check_names(config, expected)
    return _run(graph_module, pipeline(), config, expected, Fuel(config.fuel), on_pass, first_place=0)


def run_decode_plan(
    graph_module: fx.GraphModule,
    config: PassesConfig,
    before: Sequence[PassReport],
    *,
    on_pass: Callable[[PassReport], None] | None = None,
) -> list[PassReport]:
    """Make the decode plan of `graph_module`, a copy of what `run` left, in place.

    `before` are the reports of that run: `passes.fuel` counts their matches too. What must match is counted
    from the graph. Errors and `on_pass` are those of `run`.
    """
    expected = expected_matches(graph_module.graph)
    _check_names(config, expected)
    fuel = Fuel(config.fuel if config.fuel < 0 else max(0, config.fuel - sum(r.matched for r in before)))
    first_place = len(pipeline())
    return _run(graph_module, decode_plan(), config, expected, fuel, on_pass, first_place=first_place)


def _run(
    graph_module: fx.GraphModule,
    passes: list[Pass],
    config: PassesConfig,
    expected: dict[str, int],
    fuel: Fuel,
    on_pass: Callable[[PassReport], None] | None,
    *,
    first_place: int,
) -> list[PassReport]:
    dump = Dump(config.dump_dir) if config.dump_dir else None
    off = _without_dependents(config.off)
    reports = []
    for place, rewrite in enumerate(passes, first_place):
        if rewrite.name in config.off:
            continue
        if dump is not None:
            dump.before(place, rewrite.name, graph_module)
        report = rewrite.run(graph_module.graph, fuel=fuel)
        if rewrite.name not in off:
            report = report._replace(expected=expected.get(rewrite.name))
        if dump is not None:
            dump.after(place, rewrite.name, graph_module)
        reports.append(report)
        if on_pass is not None:
            on_pass(report)
    graph_module.recompile()
    if config.fuel < 0:
        _require_expected(reports)
    return reports


def format_table(reports: list[PassReport]) -> str:
    """One line per pass, ms being its time; refusals are spelled out below."""
    rows = [("pass", "matched", "expected", "refused", "proofs", "ms")]
    for r in reports:
        wanted = "" if r.expected is None else str(r.expected)
        refused = str(sum(r.refused.values()) or "")
        rows.append(
            (r.name, str(r.matched), wanted, refused, str(len(r.proofs) or ""), f"{r.seconds * 1e3:.0f}")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
    lines += [f"{r.name} refused {_reasons(r.refused)}" for r in reports if r.refused]
    return "\n".join(lines)


def _check_names(config: PassesConfig, expected: dict[str, int]) -> None:
    known = known_passes()
    for name in config.off:
        if name not in known:
            raise ConfigError(f"passes.off={name}: no such pass; known: {', '.join(known)}")
    for name in expected:
        if name not in known:
            raise CompileError(f"matches are expected of {name}, which is no pass; known: {', '.join(known)}")


def _without_dependents(off: tuple[str, ...]) -> set[str]:
    """Passes of which nothing can be expected: those that are off, and those that need one of them."""
    closed = set(off)
    if RemoveNoops.name in closed:
        closed.update(known_passes())
    for rewrite in (*pipeline(), *decode_plan()):  # what a pass needs runs before it
        if closed.intersection(rewrite.needs):
            closed.add(rewrite.name)
    return closed


def _require_expected(reports: list[PassReport]) -> None:
    matched: Counter[str] = Counter()
    refused: dict[str, Counter[str]] = {}
    for report in reports:
        matched[report.name] += report.matched
        refused.setdefault(report.name, Counter()).update(report.refused)
    short = {r.name: r.expected for r in reports if r.expected is not None and matched[r.name] < r.expected}
    if short:
        parts = [
            f"{name} matched {matched[name]} of {count} expected places "
            f"({_reasons(refused[name]) or 'nothing looked like it'})"
            for name, count in short.items()
        ]
        raise CompileError(
            f"{'; '.join(parts)}. The model would run unfused there: report it, or compile with "
            f"passes.off={','.join(short)}"
        )


def _reasons(refused: dict[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in refused.items())
