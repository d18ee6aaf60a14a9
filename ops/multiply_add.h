// C += A B for small matrices in the cache, C of float32; the accumulators of a block stay in registers.
#pragma once
#include "dot.h"

// What A and B are made of for operands of type T: scalars of A, and vectors of such scalars in B. STEP values of the
// sum are one scalar.
template <class T> struct Factors {
    static constexpr int STEP = 1;
    typedef float Scalar;

    INLINE static void put(float *at, const T *x, long) { *at = to_float(*x); }
    // Row [size] as scalars along it; `room` [size, padded] is for scalars that are not there already.
    INLINE static const float *along(const T *row, float *room, long size) {
        if constexpr (sizeof(T) == sizeof(float)) return row;
        widen(row, room, size);
        return room;
    }
    // STEP rows [size], of which `count` exist, as scalars across them.
    INLINE static const float *across(const T *const *rows, float *room, long size, long) {
        return along(rows[0], room, size);
    }
    // STEP vectors as a vector of scalars.
    INLINE static f32v join(const f32v *values) { return values[0]; }
};
INLINE f32v mad(f32v acc, float a, f32v b) { return acc + a * b; }

#if defined(__AVX512BF16__)
struct __attribute__((packed, may_alias)) Pair {
    uint32_t bits;
};
template <> struct Factors<bf16> {
    static constexpr int STEP = 2;
    typedef Pair Scalar;

    INLINE static void put(float *at, const bf16 *x, long left) {
        uint32_t bits = pair_bits(x, left);
        memcpy(at, &bits, 4);
    }
    INLINE static const Pair *along(const bf16 *row, Pair *room, long size) {
        if (size % 2 == 0) return (const Pair *)row;
        for (long i = 0; i < size; i += 2) room[i / 2].bits = pair_bits(row + i, size - i);
        return room;
    }
    INLINE static const Pair *across(const bf16 *const *rows, Pair *room, long size, long count) {
        long i = 0;
        for (; i + LANES <= size; i += LANES) {
            u16v second = count > 1 ? load_as<u16v>(rows[1] + i) : u16v{};
            u32v both = widened(load_as<u16v>(rows[0] + i)) | widened(second) << 16;
            memcpy((void *)(room + i), &both, sizeof both);
        }
        for (; i < size; i++) room[i].bits = rows[0][i].bits | (count > 1 ? uint32_t(rows[1][i].bits) << 16 : 0);
        return room;
    }
    INLINE static f32v join(const f32v *values) {
        const __m512i order = _mm512_add_epi32(
            _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                               _mm512_set1_epi32(0x10001)),
            _mm512_set1_epi32(16 << 16));
        __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
        return (f32v)_mm512_permutexvar_epi16(order, (__m512i)narrow);
    }
};
INLINE f32v mad(f32v acc, Pair a, f32v b) {
    return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32(a.bits));
}
#endif

// C [ROWS, V vectors] += A B, where a(r, k) is a scalar and b(k) the address of a row.
template <int ROWS, int V, class A, class B>
INLINE void multiply_block(const A &a, const B &b, float *c, long c_stride, long K) {
    f32v acc[ROWS][V];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(c + r * c_stride + v * LANES);
    for (long k = 0; k < K; k++) {
        f32v row[V];
        for (int v = 0; v < V; v++) row[v] = load(b(k) + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) acc[r][v] = mad(acc[r][v], a(r, k), row[v]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) store(c + r * c_stride + v * LANES, acc[r][v]);
}
template <int V, class A, class B>
void multiply_columns(const A &a, const B &b, float *c, long c_stride, long rows, long K) {
    constexpr int MOST = NUM_REGISTERS * 3 / 4 / 4;
    long r = 0;
    auto from_r = [&](int i, long k) INLINE_LAMBDA { return a(r + i, k); };
    for (; r + MOST <= rows; r += MOST) multiply_block<MOST, V>(from_r, b, c + r * c_stride, c_stride, K);
    switch (rows - r) {
#define REST(ROWS)                                                                                             \
    case ROWS:                                                                                                 \
        if constexpr (ROWS < MOST) multiply_block<ROWS, V>(from_r, b, c + r * c_stride, c_stride, K);          \
        break;
        REST(1)
        REST(2)
        REST(3)
        REST(4)
        REST(5)
#undef REST
    }
}
template <class A, class B>
void multiply_add(const A &a, const B &b, float *c, long c_stride, long rows, long columns, long K) {
    long at = 0;
    auto from_at = [&](long k) INLINE_LAMBDA { return b(k) + at; };
    for (; at + 4 * LANES <= columns; at += 4 * LANES) multiply_columns<4>(a, from_at, c + at, c_stride, rows, K);
    for (; at < columns; at += LANES) multiply_columns<1>(a, from_at, c + at, c_stride, rows, K);
}
