// Addresses in a step's heads and in the paged cache. Strides count values; the values of a head lie side by side.
#pragma once
#include "native.h"

// x [tokens, heads, size] with any stride of tokens and heads.
struct Heads {
    const void *base;
    int64_t token_stride, head_stride;
    template <class T> INLINE const T *at(long token, long head) const {
        return (const T *)base + token * token_stride + head * head_stride;
    }
};

// One plane [blocks, block_tokens, kv_heads, size]. Blocks that no table names may be unmapped.
struct Plane {
    void *base;
    int64_t block_stride, token_stride, head_stride;
    template <class T> INLINE T *at(long block, long offset, long head) const {
        return (T *)base + block * block_stride + offset * token_stride + head * head_stride;
    }
};

// 0, or 1 + the first token whose slot is past the last block.
INLINE long first_bad_slot(const int64_t *slots, long tokens, long num_slots) {
    for (long t = 0; t < tokens; t++)
        if (slots[t] >= num_slots) return t + 1;
    return 0;
}
