// Norm per head if asked, rotation, K and V into the paged cache, q out; see rope_kv_write.py.
#include "norm_row.h"
#include "paged_cache.h"

namespace {

constexpr long MAX_HEAD = 1024;  // values of a head; Python sends larger ones to torch

struct Args {
    Heads q, k, v;
    const void *cos;
    int64_t cos_stride;
    const void *sin;
    int64_t sin_stride;
    Plane k_cache, v_cache;
    const int64_t *slots;
    const void *q_weight, *k_weight;  // null: no norm
    void *out;
    int64_t tokens, heads, kv_heads, k_size, v_size, rotated, blocks, block_tokens;
    int64_t cos_is_f32, sin_is_f32, q_weight_is_f32, k_weight_is_f32;
    double eps, offset;
    int64_t round_first, interleaved;
};

template <class T> INLINE void widen_table(const void *table, bool is_f32, long at, float *to, long count) {
    is_f32 ? widen((const float *)table + at, to, count) : widen((const T *)table + at, to, count);
}

// One head from x to `to`; cos and sin hold the row of the token.
template <class T> INLINE void rotate_head(const Args &a, const T *x, const void *weight, bool weight_is_f32,
                                           const float *cos, const float *sin, T *to) {
    const long D = a.k_size, R = a.rotated, half = R / 2;
    float head[MAX_HEAD], turned[MAX_HEAD];
    if (weight) {
        float rstd = 1.0f / __builtin_sqrtf(sum(sum_of_squares(x, D)) / D + float(a.eps));
        if (weight_is_f32)
            scale_row(x, rstd, (const float *)weight, float(a.offset), a.round_first, head, D);
        else
            scale_row(x, rstd, (const T *)weight, float(a.offset), a.round_first, head, D);
    } else {
        widen(x, head, D);
    }
    if (a.interleaved) {
        for (long i = 0; i < half; i++) {
            turned[2 * i] = head[2 * i] * cos[i] - head[2 * i + 1] * sin[i];
            turned[2 * i + 1] = head[2 * i + 1] * cos[i] + head[2 * i] * sin[i];
        }
    } else {
        for (long i = 0; i < half; i++) turned[i] = head[i] * cos[i] - head[half + i] * sin[i];
        for (long i = half; i < R; i++) turned[i] = head[i] * cos[i] + head[i - half] * sin[i];
    }
    for (long i = R; i < D; i++) turned[i] = head[i];
    narrow(turned, to, D);
}

template <class T> void token(const Args &a, long t) {
    float cos[MAX_HEAD], sin[MAX_HEAD];
    widen_table<T>(a.cos, a.cos_is_f32, t * a.cos_stride, cos, a.rotated);
    widen_table<T>(a.sin, a.sin_is_f32, t * a.sin_stride, sin, a.rotated);
    T *out = (T *)a.out + t * a.heads * a.k_size;
    for (long h = 0; h < a.heads; h++)
        rotate_head(a, a.q.at<T>(t, h), a.q_weight, a.q_weight_is_f32, cos, sin, out + h * a.k_size);
    if (a.slots[t] < 0) return;
    long block = a.slots[t] / a.block_tokens, offset = a.slots[t] % a.block_tokens;
    for (long g = 0; g < a.kv_heads; g++) {
        rotate_head(a, a.k.at<T>(t, g), a.k_weight, a.k_weight_is_f32, cos, sin, a.k_cache.at<T>(block, offset, g));
        memcpy(a.v_cache.at<T>(block, offset, g), a.v.at<T>(t, g), a.v_size * sizeof(T));
    }
}

// 0, or 1 + the first token whose slot is past the planes; then nothing has been written.
template <class T> long rope_kv_write(const Args &a) {
    long bad = first_bad_slot(a.slots, a.tokens, a.blocks * a.block_tokens);
    if (bad) return bad;
    long values = a.tokens * (a.heads * a.k_size + a.kv_heads * (a.k_size + a.v_size));
    parallel_for(a.tokens, values > MIN_TEAM_VALUES, [&a](long t) { token<T>(a, t); });
    return 0;
}

}  // namespace

OSTINATO_KERNEL(rope_kv_write, Args, rope_kv_write)
