"""What CUDA sources for Hopper share besides `hopper.cuh`: its place, the wgmma instruction, who has it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ostinato.ops.kernel_store import capability

HEADER = Path(__file__).with_suffix(".cuh")


def is_hopper(x: Tensor) -> bool:
    """Whether a tensor lies on a GPU with these instructions, which later GPUs lack."""
    return x.is_cuda and capability(x.get_device()) == 90


def multiply(rows: int, is_half: bool) -> str:
    """The instruction as a function of the source: 64 tokens, 16 columns, so many rows of the other operand.

    Its registers are spelled out, and it cannot be a template of the header: `rows` is part of its name.
    """
    kind, count = "f16" if is_half else "bf16", rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void multiply(float (&sums)[{count}], u64 tokens, u64 weights, int keep)"
        f'{{ asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} "
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}" '
        f': {outputs} : "l"(tokens), "l"(weights), "r"(keep)); }}\n'
    )
