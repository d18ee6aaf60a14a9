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
from ostinato.ops.launch import KERNEL_FLOATS, ceil_to_power_of_2, jit, on_device, tl, with_dense_heads


def kv_write_reference(
    k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor
) -> None:
    live_T = slots_T >= 0
    slots = slots_T[live_T].long()
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache.index_put_((block, offset), k_TGD[live_T])
    v_cache.index_put_((block, offset), v_TGE[live_T])


@jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    k,
    v,
    k_cache,
    v_cache,
    slots,
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
    D,
    E,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // B, slot % B
    at = tl.arange(0, BLOCK)
    k_live, v_live = at < tl.where(slot >= 0, D, 0), at < tl.where(slot >= 0, E, 0)
    k_head = tl.load(k + token * k_stride_t + head * k_stride_g + at, mask=k_live)
    v_head = tl.load(v + token * v_stride_t + head * v_stride_g + at, mask=v_live)
    k_place = k_cache + block * k_cache_stride_n + offset * k_cache_stride_b + head * k_cache_stride_g
    v_place = v_cache + block * v_cache_stride_n + offset * v_cache_stride_b + head * v_cache_stride_g
    tl.store(k_place + at, k_head, mask=k_live)
    tl.store(v_place + at, v_head, mask=v_live)


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
    with on_device(k):
        _kernel[num_tokens, kv_heads](
            k,
            v,
            k_cache,
            v_cache,
            slots_T.contiguous(),
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            k_size,
            v_size,
            B=k_cache.shape[1],
            BLOCK=ceil_to_power_of_2(max(k_size, v_size)),
            num_warps=1,
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
