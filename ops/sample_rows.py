"""What the host tells the device about the rows of logits that it samples: one buffer per step.

R rows of logits, V vocabulary.  The buffer is int64 [WORDS * R], a struct of arrays: first the 8-byte fields,
each R long, then the 4-byte fields, each R long, in the order of `LAYOUT`.  A buffer of zeros is R rows that
sample nothing.

    random_bits  int64    of this draw; token_noise.py makes a number for each token of them
    top_p        int64    top_p * 2**64, unsigned; 0: off
    bias         int64    address of float32 [V], added to the logits (-inf forbids); 0: none
    counts       int64    address of int32 [V], 2 * (times in the answer) + (in the prompt); 0: no penalties.
                          The token that is drawn is counted there
    mask         int64    address of int32 [ceil(V / 32)]: bit t % 32 of word t // 32 allows token t; 0: all
                          are allowed. These addresses are multiples of 16
    kind         int32    IDLE, GREEDY or RANDOM
    slot         int32    where the token goes in `last_tokens`
    top_k        int32    0: off
    scale        float32  -log2(e) / temperature, below 0
    limit        float32  tokens whose logit is further than this below the best are not drawn (`limit_of`)
    repetition   float32  with `counts`: see runtime/sampling/penalties.py
    frequency    float32
    presence     float32
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops.launch import jit, tl

IDLE, GREEDY, RANDOM = 0, 1, 2
WORDS = 9  # int64 words of one row
FRACTION_BITS = 44  # a token's weight is floor(2**44 * its probability / that of the best token)
LAYOUT: dict[str, type[np.generic]] = {
    "random_bits": np.int64,
    "top_p": np.int64,
    "bias": np.int64,
    "counts": np.int64,
    "mask": np.int64,
    "kind": np.int32,
    "slot": np.int32,
    "top_k": np.int32,
    "scale": np.float32,
    "limit": np.float32,
    "repetition": np.float32,
    "frequency": np.float32,
    "presence": np.float32,
}


def row_fields(words: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The fields of a buffer, each [R], as views. Raises ValueError: not a whole number of rows."""
    if words.dtype != np.int64 or words.ndim != 1 or len(words) % WORDS:
        raise ValueError(
            f"rows are {words.dtype} {list(words.shape)}; they must be int64 [{WORDS} * R] for R rows"
        )
    num_rows, raw, at = len(words) // WORDS, words.view(np.uint8), 0
    fields: dict[str, NDArray[Any]] = {}
    for name, dtype in LAYOUT.items():
        end = at + num_rows * np.dtype(dtype).itemsize
        fields[name], at = raw[at:end].view(dtype), end
    return fields


def scale_of(temperature: float) -> float:
    """The field `scale`; a token's weight is 2**(scale * distance of its logit from the best)."""
    return -math.log2(math.e) / temperature


def limit_of(temperature: float, min_p: float) -> float:
    """The field `limit`: where min_p cuts, at most where weights end (2**-44 of the best token's)."""
    share = max(min_p, 2.0**-FRACTION_BITS)
    return abs(math.log(share) * temperature)


def top_p_of(top_p: float) -> int:
    """The field `top_p`, as the signed integer of the same bits."""
    share = 0 if top_p >= 1 else max(1, int(top_p * 2**64))
    return share - (share >> 63 << 64)


def adjusted_reference(logits_V: Tensor, fields: dict[str, NDArray[Any]], row: int) -> Tensor:
    """Logits of a row after bias, penalties and mask, in their own type. Memory of the row is on the CPU."""
    vocab_size = len(logits_V)
    if fields["bias"][row]:
        logits_V = logits_V + _memory(fields["bias"][row], ctypes.c_float, vocab_size)
    if fields["counts"][row]:
        state = _memory(fields["counts"][row], ctypes.c_int32, vocab_size)
        penalty, uses = float(fields["repetition"][row]), state >> 1
        repeated = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        repeated = repeated - float(fields["frequency"][row]) * uses.to(logits_V.dtype)
        repeated = repeated - float(fields["presence"][row]) * (uses > 0)
        logits_V = torch.where(state != 0, repeated, logits_V)
    if fields["mask"][row]:
        words = _memory(fields["mask"][row], ctypes.c_int32, -(-vocab_size // 32))
        token = torch.arange(vocab_size)
        logits_V = torch.where((words[token >> 5] >> (token & 31)) & 1 != 0, logits_V, -torch.inf)
    return logits_V


def count_reference(fields: dict[str, NDArray[Any]], row: int, token: int) -> None:
    """Count a token of the answer, if the row has penalties."""
    if fields["counts"][row]:
        _memory(fields["counts"][row], ctypes.c_int32, token + 1)[token] += 2


def _memory(address: Any, kind: Any, length: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((kind * length).from_address(int(address))))


@jit
def adjusted(logits_V, rows, R, row, at, live):  # type: ignore[no-untyped-def]  # Triton
    """float32 logits (already loaded) at ids `at` of a row, after bias, penalties and mask."""
    bias = tl.load(rows + 2 * R + row)
    counts = tl.load(rows + 3 * R + row)
    mask = tl.load(rows + 4 * R + row)
    if bias != 0:
        biases = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), 16)
        logits_V += tl.load(biases + at, mask=live, other=0.0)
    if counts != 0:
        numbers = (rows + 5 * R).to(tl.pointer_type(tl.float32), bitcast=True) + row
        repetition = tl.load(numbers + 5 * R)
        frequency = tl.load(numbers + 6 * R)
        presence = tl.load(numbers + 7 * R)
        states = tl.multiple_of(counts.to(tl.pointer_type(tl.int32)), 16)
        state = tl.load(states + at, mask=live, other=0)
        uses = state >> 1
        repeated = tl.where(logits_V > 0, tl.div_rn(logits_V, repetition), logits_V * repetition)
        repeated = repeated - frequency * uses.to(tl.float32)
        repeated = repeated - tl.where(uses > 0, presence, 0.0)
        logits_V = tl.where(state != 0, repeated, logits_V)
    if mask != 0:
        words = tl.multiple_of(mask.to(tl.pointer_type(tl.int32)), 16)
        word = tl.load(words + (at >> 5), mask=live, other=0)
        logits_V = tl.where(((word >> (at & 31)) & 1) != 0, logits_V, float("-inf"))
    return logits_V
