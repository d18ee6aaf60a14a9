"""Compile one variant of each Triton kernel for sm_90, without a GPU: python -m tests.support.compile_kernels

Prints a line per kernel.  It wants a process of its own: TRITON_INTERPRET, set by other tests, replaces the
compiler.
"""

from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.ops import (
    add_rms_norm,
    fa3_attention,
    gelu_tanh_mul,
    kv_write,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope_kv_write,
    rope_table,
    silu_mul,
    skinny_gated,
    skinny_linear,
)
from ostinato.ops.launch import triton_function
from tests.support.dependent_launch import broken_waits

INDEX = {"slots": "*i64", "block_tables": "*i32", "seq_lens": "*i32", "query_start": "*i32"}
INDEX |= {"parts": "*fp32", "sums": "*fp32", "arrivals": "*i32", "positions": "*i64", "inv_freq": "*fp32"}
SCALARS = dict.fromkeys(("eps", "offset", "scale", "scaling", "softcap"), "fp32")
TENSORS = {"gate", "up", "x", "residual", "weight", "normed", "total", "q", "k", "v", "cos", "sin"}
TENSORS |= {"q_weight", "k_weight", "k_cache", "v_cache", "sinks", "bias", "norm_weight", "out"}
TENSORS |= {"k_new", "v_new"}
HEADS = {"D": 96, "E": 64, "B": 16}
ATTENTION = HEADS | {"H": 6, "GROUP": 3, "WINDOW": True, "SOFTCAP": True, "SINKS": True, "BLOCK_N": 64}
ATTENTION |= {"BLOCK_D": 128, "BLOCK_E": 64, "FLOAT32_DOT": False, "IS_GPU": True}
SKINNY = {"K": 576, "BLOCK_R": 16, "BLOCK_K": 256, "WARPS": 4, "PREFETCH": 512, "NORM": 1, "PDL": True}
SKINNY |= {"FLOAT32_DOT": False}
ROPE = {"R": 64, "NORM_Q": True, "NORM_K": False, "ROUND_FIRST": True, "INTERLEAVED": False}
ROPE |= {"HALF": 32, "REST": 32}
CONSTANTS: dict[ModuleType, dict[str, Any]] = {
    silu_mul: {"BLOCK": 1024, "PDL": True},
    gelu_tanh_mul: {"BLOCK": 1024, "PDL": True},
    rms_norm: {"ROUND_FIRST": True, "BLOCK": 1024, "PDL": True},
    add_rms_norm: {"ROUND_FIRST": True, "BLOCK": 1024, "PDL": True},
    kv_write: HEADS | {"G": 2, "ROWS": 16, "BLOCK_D": 128, "BLOCK_E": 64, "PDL": True},
    rope_table: {"HALF": 48, "BLOCK": 128, "PDL": True},
    rope_kv_write: HEADS | ROPE | {"H": 4, "G": 2, "TOKENS": 2, "HEADS": 4, "BLOCK_E": 64, "PDL": True},
    paged_decode: ATTENTION | ROPE | {"ROPE": True, "BLOCK_M": 16, "BLOCK_H": 4, "PDL": True},
    paged_prefill: ATTENTION | {"QUERIES": 42, "BLOCK_M": 128, "SEQS": 256},
    fa3_attention: {"WIDTH": 576, "ROWS": 16, "BLOCK": 1024},
    skinny_linear: SKINNY | {"BLOCK_T": 8, "DOT": True, "SPLIT": 2, "BIAS": True, "RESIDUAL": True},
    skinny_gated: SKINNY | {"BLOCK_T": 2, "DOT": False, "SILU": False},
}


def compile_for_hopper(module: ModuleType) -> int:
    """Size of the cubin in bytes. Raises SystemExit for a dependent kernel that does not wait as it must."""
    kernel, constants = triton_function(module._kernel), CONSTANTS[module]
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(TENSORS & set(names), "*bf16")
    types |= {name: kind for name, kind in (INDEX | SCALARS).items() if name in names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel, signature=types, constexprs={(names.index(name),): v for name, v in constants.items()}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    if constants.get("PDL") and (found := broken_waits(made["ptx"])):
        raise SystemExit(f"{module.__name__}: before the kernel ahead has ended: {'; '.join(found)}")
    return len(made["cubin"])


if __name__ == "__main__":
    for op in CONSTANTS:
        print(op.__name__, compile_for_hopper(op), flush=True)
