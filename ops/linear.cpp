// y = x W^T + bias for few rows of x: every weight is read once, at memory speed.
//
// M rows of x, N outputs, K inputs. W is [N, K], row-major, contiguous.
// Up to DOT_ROWS rows: lanes run along K and are summed at the end of a tile.
// More rows: x is turned so that lanes are rows of x, and each weight is broadcast; no sums at the end.
#include "native.h"

namespace {

constexpr int TILE = 24;  // accumulators of a tile; with operands they fill 32 registers
constexpr int DOT_ROWS = 8;
constexpr long TASK_BYTES = 64 << 10;  // weights per task

// acc += w * x over one group of K; a group is one vector of weights.
template <class T> struct Group;
template <> struct Group<float> {
    static constexpr int K = LANES;
    typedef f32v V;
    INLINE static V get(const float *p) { return load(p); }
    INLINE static f32v mad(f32v acc, V w, V x) { return acc + w * x; }
};
#if defined(__AVX512BF16__)
template <> struct Group<bf16> {
    static constexpr int K = 2 * LANES;
    typedef __m512bh V;
    INLINE static V get(const bf16 *p) {
        V v;
        memcpy((void *)&v, p, sizeof v);
        return v;
    }
    INLINE static f32v mad(f32v acc, V w, V x) { return (f32v)_mm512_dpbf16_ps((__m512)acc, w, x); }
};
#else
template <> struct Group<bf16> {
    static constexpr int K = LANES;
    typedef f32v V;
    INLINE static V get(const bf16 *p) { return load(p); }
    INLINE static f32v mad(f32v acc, V w, V x) { return acc + w * x; }
};
#endif

// MR rows of x times NR rows of W. x rows are padded with zeros to whole groups; W is not.
template <class T, int MR, int NR>
INLINE void dot_tile(const T *x, long x_stride, const T *w, const T *bias, T *y, long y_stride, long K) {
    typedef Group<T> G;
    f32v acc[MR][NR] = {};
    long k = 0;
    for (; k + G::K <= K; k += G::K) {
        typename G::V xs[MR];
        for (int m = 0; m < MR; m++) xs[m] = G::get(x + m * x_stride + k);
        for (int n = 0; n < NR; n++) {
            typename G::V ws = G::get(w + n * K + k);
            for (int m = 0; m < MR; m++) acc[m][n] = G::mad(acc[m][n], ws, xs[m]);
        }
    }
    if (k < K) {
        for (int n = 0; n < NR; n++) {
            T tail[G::K] = {};
            memcpy(tail, w + n * K + k, (K - k) * sizeof(T));
            typename G::V ws = G::get(tail);
            for (int m = 0; m < MR; m++) acc[m][n] = G::mad(acc[m][n], ws, G::get(x + m * x_stride + k));
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++)
            y[m * y_stride + n] = from_float<T>(sum(acc[m][n]) + (bias ? to_float(bias[n]) : 0.0f));
}

template <class T, int MR>
void dot_rows(const T *x, long x_stride, const T *w, const T *bias, T *y, long y_stride, long first, long last, long K) {
    constexpr int NR = MR == 1 ? 4 : TILE / MR < 8 ? TILE / MR : 8;
    long n = first;
    for (; n + NR <= last; n += NR)
        dot_tile<T, MR, NR>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, y_stride, K);
    for (; n < last; n++)
        dot_tile<T, MR, 1>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, y_stride, K);
}

template <class T>
void linear(const T *x, long x_stride, const T *w, const T *bias, T *y, long M, long N, long K) {
    constexpr long PAD = 2 * LANES;
    if (K % PAD) {
        long padded = (K + PAD - 1) / PAD * PAD;
        T *copy = (T *)scratch<0>(M * padded * sizeof(T));
        for (long m = 0; m < M; m++) {
            memcpy(copy + m * padded, x + m * x_stride, K * sizeof(T));
            memset((void *)(copy + m * padded + K), 0, (padded - K) * sizeof(T));
        }
        x = copy;
        x_stride = padded;
    }
    long rows = TASK_BYTES / (K * (long)sizeof(T) + 1) / TILE * TILE;
    if (rows < TILE) rows = TILE;
    parallel_for((N + rows - 1) / rows, true, [=](long task) {
        long first = task * rows, last = first + rows < N ? first + rows : N;
        for (long m = 0; m < M;) {
            long left = M - m;
            const T *xm = x + m * x_stride;
            T *ym = y + m * N;
#define ROWS(MR) dot_rows<T, MR>(xm, x_stride, w, bias, ym, N, first, last, K), m += MR
            if (left >= 8) ROWS(8);
            else if (left >= 4) ROWS(4);
            else if (left >= 2) ROWS(2);
            else ROWS(1);
#undef ROWS
        }
    });
}

}  // namespace

OSTINATO_API void linear_f32(const float *x, long x_stride, const float *w, const float *bias, float *y, long M, long N, long K) {
    linear(x, x_stride, w, bias, y, M, N, K);
}
OSTINATO_API void linear_bf16(const bf16 *x, long x_stride, const bf16 *w, const bf16 *bias, bf16 *y, long M, long N, long K) {
    linear(x, x_stride, w, bias, y, M, N, K);
}
