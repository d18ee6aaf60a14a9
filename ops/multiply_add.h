// C += A B for small matrices of float32 in the cache; the accumulators of a block stay in registers.
#pragma once
#include "native.h"

// C [ROWS, V vectors] += A B, where a(r, k) is a number and b(k) the address of a row.
template <int ROWS, int V, class A, class B>
INLINE void multiply_block(const A &a, const B &b, float *c, long c_stride, long K) {
    f32v acc[ROWS][V];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(c + r * c_stride + v * LANES);
    for (long k = 0; k < K; k++) {
        f32v row[V];
        for (int v = 0; v < V; v++) row[v] = load(b(k) + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) acc[r][v] += a(r, k) * row[v];
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
