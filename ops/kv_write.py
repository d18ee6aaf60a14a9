"""Write K and V of a step's tokens into their places in the paged cache, in place.

Shapes: T tokens, G KV heads, D and E sizes of a K and a V head, N blocks, B tokens of a block.  k [T, G, D]
and v [T, G, E] with any strides; planes [N, B, G, D] and [N, B, G, E] with any strides.  slot_mapping [T],
int64 or int32, is block * B + offset; a negative slot writes nothing.  Slots of one call are distinct
(otherwise one of the rows wins, any of them); a slot past the plane is an IndexError on CPU and undefined
on a GPU.
Types: fp16, bf16, fp32, fp64, all alike.  Nothing is rounded.
Only the named slots are touched: a plane may be a view over address space that is mapped in part.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_dense_planes, check_device, check_shapes, check_types
from ostinato.ops.launch import (
    KERNEL_FLOATS,
    ceil_to_power_of_2,
    has_pdl,
    jit,
    on_device,
    tl,
    with_dense_heads,
)


def kv_write_reference(
    k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor
) -> None:
    live_T = slots_T >= 0
    slots = slots_T[live_T].long()
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache.index_put_((block, offset), k_TGD[live_T])
    v_cache.index_put_((block, offset), v_TGE[live_T])


@jit(do_not_specialize=["num_rows"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    k,
    v,
    k_cache,
    v_cache,
    slots,
    num_rows,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    k_cache_stride_n,
    k_cache_stride_b,
    k_cache_stride_g,
    v_cache_stride_n,
    v_cache_stride_b,
    v_cache_stride_g,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS heads, those of a token side by side."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // G, row % G
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    block, place = slot // B, slot % B
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    live = (slot >= 0)[:, None]
    k_live, v_live = live & (d < D)[None, :], live & (e < E)[None, :]
    k_from = k + token * k_stride_t + head * k_stride_g
    v_from = v + token * v_stride_t + head * v_stride_g
    k_to = k_cache + block * k_cache_stride_n + place * k_cache_stride_b + head * k_cache_stride_g
    v_to = v_cache + block * v_cache_stride_n + place * v_cache_stride_b + head * v_cache_stride_g
    keys = tl.load(k_from[:, None] + d[None, :], mask=k_live)
    values = tl.load(v_from[:, None] + e[None, :], mask=v_live)
    tl.store(k_to[:, None] + d[None, :], keys, mask=k_live)
    tl.store(v_to[:, None] + e[None, :], values, mask=v_live)


def _check(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    check_shapes(
        "kv_write",
        k=(k_TGD, "T G D"),
        v=(v_TGE, "T G E"),
        k_cache=(k_cache, "N B G D"),
        v_cache=(v_cache, "N B G E"),
        slot_mapping=(slots_T, "T"),
    )
    check_types("kv_write", FLOATS, k=k_TGD, v=v_TGE, k_cache=k_cache, v_cache=v_cache)
    check_types("kv_write", INTEGERS, slot_mapping=slots_T)
    check_device("kv_write", "k", k_TGD, "slot_mapping", slots_T)


def _on_cpu(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    _check(k_TGD, v_TGE, k_cache, v_cache, slots_T)
    kv_write_reference(k_TGD, v_TGE, k_cache, v_cache, slots_T)


def _launch(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    _check(k_TGD, v_TGE, k_cache, v_cache, slots_T)
    check_types("kv_write", KERNEL_FLOATS, k=k_TGD)
    check_dense_planes("kv_write", k_cache=k_cache, v_cache=v_cache)
    if k_TGD.numel() == 0:
        return
    num_tokens, kv_heads, k_size = k_TGD.shape
    v_size = v_TGE.shape[2]
    k, v = with_dense_heads(k_TGD), with_dense_heads(v_TGE)
    rows, pdl = 16, has_pdl(k)
    with on_device(k):
        _kernel[(-(-num_tokens * kv_heads // rows),)](
            k,
            v,
            k_cache,
            v_cache,
            slots_T.contiguous(),
            num_tokens * kv_heads,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            G=kv_heads,
            D=k_size,
            E=v_size,
            B=k_cache.shape[1],
            ROWS=rows,
            BLOCK_D=ceil_to_power_of_2(k_size),
            BLOCK_E=ceil_to_power_of_2(v_size),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )


torch.library.define(
    "ostinato::kv_write",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
)
torch.library.impl("ostinato::kv_write", "CPU", _on_cpu)
torch.library.impl("ostinato::kv_write", "CUDA", _launch)


@torch.library.register_fake("ostinato::kv_write")
def _fake(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    _check(k_TGD, v_TGE, k_cache, v_cache, slots_T)


OP = torch.ops.ostinato.kv_write.default
