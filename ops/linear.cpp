// y = x W^T + bias for few rows of x: every weight is read once, at memory speed.
//
// M rows of x, N outputs, K inputs. W is [N, K], row-major, contiguous; a task is a range of its rows.
// Few rows of x: vector lanes run along K and are summed at the end of a tile (dot_tile).
// More: x is turned so that lanes are rows of x, and each weight is broadcast (column_tile).
// Weights are prefetched by hand: rows are too short for the hardware to find its stride.
#include "dot.h"

namespace {

constexpr int TILE = NUM_REGISTERS * 3 / 4;  // accumulators of a tile; operands take the other registers
constexpr int MAX_TILE_ROWS = 12;             // rows of W in a tile; more are too many streams
constexpr int MAX_DOT_TILE_ROWS = 8;
constexpr int DOT_ROWS = 4;                   // most rows of x for dot tiles; measured: 5 rows are faster turned
constexpr long CHAIN = 256;                  // values of K added up in one accumulator; bounds the rounding error
constexpr long TASK_BYTES = 128 << 10;      // weights of a task
constexpr long LINE_BYTES = 64;

// Ask for weights that are this far ahead, into the second-level cache. Measured on Zen 4, M = 1: 12 to 23 GB/s a core.
template <long KIB, class T> INLINE void prefetch(const T *weights) {
    __builtin_prefetch((const char *)weights + (KIB << 10), 0, 2);
}

// MR rows of x, padded with zeros to whole WIDTHs, times NR rows of W, which are not.
template <class T, int MR, int NR>
INLINE void dot_tile(const T *x, long x_stride, const T *w, const T *bias, T *y, long y_stride, long K) {
    typedef Dot<T> D;
    f32v acc[MR][NR] = {};
    long k = 0;
    for (; k + D::WIDTH <= K; k += D::WIDTH) {
        typename D::Operand xs[MR];
        for (int m = 0; m < MR; m++) xs[m] = D::get(x + m * x_stride + k);
        for (int n = 0; n < NR; n++) {
            const T *at = w + n * K + k;
            prefetch<24>(at);
            prefetch<40>(at);  // the first request is dropped when too many are under way
            typename D::Operand ws = D::get(at);
            for (int m = 0; m < MR; m++) acc[m][n] = D::mad(acc[m][n], ws, xs[m]);
        }
    }
    if (k < K) {
        for (int n = 0; n < NR; n++) {
            T tail[D::WIDTH] = {};
            memcpy((void *)tail, w + n * K + k, (K - k) * sizeof(T));
            typename D::Operand ws = D::get(tail);
            for (int m = 0; m < MR; m++) acc[m][n] = D::mad(acc[m][n], ws, D::get(x + m * x_stride + k));
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++)
            y[m * y_stride + n] = from_float<T>(sum(acc[m][n]) + (bias ? to_float(bias[n]) : 0.0f));
}

template <class T, int MR>
void dot_rows(const T *x, long x_stride, const T *w, const T *bias, T *y, long first, long last, long N, long K) {
    constexpr int NR = TILE / MR < MAX_DOT_TILE_ROWS ? TILE / MR : MAX_DOT_TILE_ROWS;
    long n = first;
    for (; n + NR <= last; n += NR)
        dot_tile<T, MR, NR>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
    for (; n < last; n++) dot_tile<T, MR, 1>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
}

// x turned for vectors V: a step is one value of K for float, a pair for bfloat16; of each step there are MV
// vectors of rows. Pairs stay together for the dot-product instruction, else they are two float vectors.
template <class T, class V, int MV> struct Turned;

template <class V, int MV> struct Turned<float, V, MV> {
    static constexpr int ROWS = MV * sizeof(V) / 4, STEP = 1, BYTES = ROWS * 4;
    INLINE static void put(char *at, int row, const float *x, long) { ((float *)at)[row] = *x; }
    INLINE static void mad(V (&acc)[MV], const float *w, const char *at, long) {
        for (int v = 0; v < MV; v++) acc[v] += *w * load_as<V>((const float *)at + v * (ROWS / MV));
    }
};

INLINE uint32_t pair_bits(const bf16 *p, long left) {
    uint32_t pair = p[0].bits;
    if (left > 1) memcpy(&pair, p, 4);
    return pair;
}

template <class V, int MV> struct Turned<bf16, V, MV> {
    static constexpr int ROWS = MV * sizeof(V) / 4, STEP = 2;
#if defined(__AVX512BF16__)
    static constexpr int BYTES = ROWS * 4;
    INLINE static void put(char *at, int row, const bf16 *x, long left) { ((uint32_t *)at)[row] = pair_bits(x, left); }
    INLINE static f32x8 dot(f32x8 acc, uint32_t w, const char *x) {
        return (f32x8)_mm256_dpbf16_ps((__m256)acc, (__m256bh)_mm256_set1_epi32(w), (__m256bh)_mm256_loadu_si256((const __m256i *)x));
    }
    INLINE static f32v dot(f32v acc, uint32_t w, const char *x) {
        return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(w), (__m512bh)_mm512_loadu_si512(x));
    }
    INLINE static void mad(V (&acc)[MV], const bf16 *w, const char *at, long left) {
        uint32_t pair = pair_bits(w, left);
        for (int v = 0; v < MV; v++) acc[v] = dot(acc[v], pair, at + v * sizeof(V));
    }
#else
    static constexpr int BYTES = 2 * ROWS * 4;
    INLINE static void put(char *at, int row, const bf16 *x, long left) {
        ((float *)at)[row] = to_float(x[0]);
        ((float *)at)[row + ROWS] = left > 1 ? to_float(x[1]) : 0.0f;
    }
    INLINE static void mad(V (&acc)[MV], const bf16 *w, const char *at, long left) {
        typedef decltype(V{} < V{}) Bits;
        Bits pair = int32_t(pair_bits(w, left)) - Bits{};
        V low = (V)(pair << 16), high = (V)(pair & int32_t(0xffff0000));
        for (int v = 0; v < MV; v++) acc[v] += low * load_as<V>((const float *)at + v * (ROWS / MV));
        for (int v = 0; v < MV; v++) acc[v] += high * load_as<V>((const float *)at + ROWS + v * (ROWS / MV));
    }
#endif
};

template <class X, class T> const char *turn(const T *x, long x_stride, long M, long K) {
    constexpr long CHUNK = 128;  // steps of a task
    long steps = (K + X::STEP - 1) / X::STEP;
    char *out = (char *)scratch<1>(steps * X::BYTES);
    parallel_for((steps + CHUNK - 1) / CHUNK, M * K > MIN_TEAM_VALUES, [=](long task) {
        long first = task * CHUNK, last = first + CHUNK < steps ? first + CHUNK : steps;
        if (M < X::ROWS) memset(out + first * X::BYTES, 0, (last - first) * X::BYTES);
        for (long s = first; s < last; s++)
            for (long m = 0; m < M; m++)
                X::put(out + s * X::BYTES, m, x + m * x_stride + s * X::STEP, K - s * X::STEP);
    });
    return out;
}

template <class T, class V, int MV, int NR>
INLINE void column_tile(const char *xt, const T *w, const T *bias, T *y, long y_stride, long M, long K) {
    typedef Turned<T, V, MV> X;
    constexpr long LINE = LINE_BYTES / sizeof(T);
    V sums[NR][MV];
    for (int n = 0; n < NR; n++)
        for (int v = 0; v < MV; v++) sums[n][v] = (bias ? to_float(bias[n]) : 0.0f) - V{};
    long k = 0;
    while (k < K) {
        V acc[NR][MV] = {};
        long stop = k + CHAIN < K ? k + CHAIN : K;
        for (; k + LINE <= stop; k += LINE) {
            for (int n = 0; n < NR; n++) prefetch<24>(w + n * K + k);
#pragma GCC unroll 4
            for (long i = 0; i < LINE; i += X::STEP, xt += X::BYTES)
                for (int n = 0; n < NR; n++) X::mad(acc[n], w + n * K + k + i, xt, X::STEP);
        }
        for (; k < stop; k += X::STEP, xt += X::BYTES)
            for (int n = 0; n < NR; n++) X::mad(acc[n], w + n * K + k, xt, stop - k);
        for (int n = 0; n < NR; n++)
            for (int v = 0; v < MV; v++) sums[n][v] += acc[n][v];
    }
    for (long m = 0; m < M; m++)
        for (int n = 0; n < NR; n++) y[m * y_stride + n] = from_float<T>(((const float *)sums[n])[m]);
}

template <class T, class V, int MV>
void columns(const char *xt, const T *w, const T *bias, T *y, long M, long first, long last, long N, long K) {
    constexpr int NR = TILE / MV < MAX_TILE_ROWS ? TILE / MV : MAX_TILE_ROWS;
    long n = first;
    for (; n + NR <= last; n += NR)
        column_tile<T, V, MV, NR>(xt, w + n * K, bias ? bias + n : nullptr, y + n, N, M, K);
    for (; n < last; n++) column_tile<T, V, MV, 1>(xt, w + n * K, bias ? bias + n : nullptr, y + n, N, M, K);
}

template <class T> struct Linear {
    const T *x, *w, *bias;
    T *y;
    long x_stride, M, N, K;

    // run(first, last) over ranges of W's rows
    template <class Run> INLINE void spread(const Run &run) const {
        long rows = TASK_BYTES / (K * (long)sizeof(T) + 1) / TILE * TILE;
        if (rows < TILE) rows = TILE;
        long all = N;
        parallel_for((N + rows - 1) / rows, true, [=, &run](long task) {
            long first = task * rows;
            run(first, first + rows < all ? first + rows : all);
        });
    }
    template <class V, int MV> void by_columns() {
        typedef Turned<T, V, MV> X;
        long some = M < X::ROWS ? M : X::ROWS;
        const char *xt = turn<X>(x, x_stride, some, K);
        spread([=, *this](long first, long last) { columns<T, V, MV>(xt, w, bias, y, some, first, last, N, K); });
        skip(some);
    }
    template <int MR> void by_dots() {
        spread([=, *this](long first, long last) { dot_rows<T, MR>(x, x_stride, w, bias, y, first, last, N, K); });
        skip(MR);
    }
    void skip(long rows) {
        M -= rows;
        x += rows * x_stride;
        y += rows * N;
    }
    void pad() {
        long padded = (K + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        if (padded == K || M == 0) return;
        T *copy = (T *)scratch<0>(M * padded * sizeof(T));
        for (long m = 0; m < M; m++) {
            memcpy((void *)(copy + m * padded), x + m * x_stride, K * sizeof(T));
            memset((void *)(copy + m * padded + K), 0, (padded - K) * sizeof(T));
        }
        x = copy;
        x_stride = padded;
    }
    void run() {
        // Measured at 16 + r rows, r <= 8: one vector of rows and then the rest beat two vectors.
        while (M > LANES + 8) by_columns<f32v, 2>();
        if (M > 8) by_columns<f32v, 1>();
        if (M > DOT_ROWS) by_columns<f32x8, 1>();
        pad();
        if (M >= 4) by_dots<4>();
        if (M >= 2) by_dots<2>();
        if (M >= 1) by_dots<1>();
    }
};

struct Args {
    const void *x;
    int64_t x_stride;
    const void *w, *bias;
    void *y;
    int64_t M, N, K;
};

template <class T> long run(const Args &a) {
    Linear<T>{(const T *)a.x, (const T *)a.w, (const T *)a.bias, (T *)a.y, a.x_stride, a.M, a.N, a.K}.run();
    return 0;
}

}  // namespace

OSTINATO_KERNEL(linear, Args, run)
