"""Write K and V of a step's tokens into their places in the paged cache, in place.

Shapes: T tokens, G KV heads, D and E sizes of a K and a V head, N blocks, B tokens of a block.  k [T, G, D] and
v [T, G, E] with any strides; planes [N, B, G, D] and [N, B, G, E] with any strides.  slot_mapping [T], int64 or int32,
is block * B + offset; a negative slot writes nothing.  Slots of one call are distinct (otherwise one of the rows wins,
any of them); a slot past the plane is an IndexError on CPU and undefined on a GPU.
Types: fp16, bf16, fp32, fp64, all alike.  Nothing is rounded.
Only the named slots are touched: a plane may be a view over address space that is mapped in part.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_device, check_shapes, check_types


def kv_write_reference(
    k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor
) -> None:
    live_T = slots_T >= 0
    slots = slots_T[live_T].long()
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache.index_put_((block, offset), k_TGD[live_T])
    v_cache.index_put_((block, offset), v_TGE[live_T])


def _check(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    check_shapes(
        "kv_write",
        k=(k_TGD, "TGD"),
        v=(v_TGE, "TGE"),
        k_cache=(k_cache, "NBGD"),
        v_cache=(v_cache, "NBGE"),
        slot_mapping=(slots_T, "T"),
    )
    check_types("kv_write", FLOATS, k=k_TGD, v=v_TGE, k_cache=k_cache, v_cache=v_cache)
    check_types("kv_write", INTEGERS, slot_mapping=slots_T)
    check_device("kv_write", "k", k_TGD, "slot_mapping", slots_T)


def _on_cpu(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    _check(k_TGD, v_TGE, k_cache, v_cache, slots_T)
    kv_write_reference(k_TGD, v_TGE, k_cache, v_cache, slots_T)


torch.library.define(
    "ostinato::kv_write",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
)
torch.library.impl("ostinato::kv_write", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::kv_write")
def _fake(k_TGD: Tensor, v_TGE: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    _check(k_TGD, v_TGE, k_cache, v_cache, slots_T)


OP = torch.ops.ostinato.kv_write.default
