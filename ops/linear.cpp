// y = x W^T + bias for few rows of x: every weight is read once, at memory speed.
//
// M rows of x, N outputs, K inputs. W is [N, K], row-major, contiguous; a task is a range of its rows.
// Few rows of x: vector lanes run along K and are summed at the end of a tile (dot_tile).
// More: x is turned so that lanes are rows of x, and each weight is broadcast (column_tile).
// Weights are prefetched by hand: rows are too short for the hardware to find its stride.
#include "dot.h"

namespace {

constexpr int TILE = NUM_REGISTERS * 3 / 4;  // accumulators of a tile; operands take the other registers
constexpr int MAX_TILE_ROWS = 8;             // of W: where K is a power of two they share the 8 ways of one cache set
constexpr int DOT_ROWS = 8;                  // most rows of x for dot tiles (measured)
constexpr long CHAIN = 256;                  // values of K added up in one accumulator; bounds the rounding error
constexpr long TASK_BYTES = 128 << 10;       // weights of a task
constexpr long LINE_BYTES = 64;

// Ask for weights that are this far ahead, into the second-level cache. Measured on Zen 4, M = 1: 12 to 23 GB/s a core.
template <long KIB, class T> INLINE void prefetch(const T *weights) {
    __builtin_prefetch((const char *)weights + (KIB << 10), 0, 2);
}

template <class T> INLINE typename Dot<T>::Operand get_weights(const T *at) {
    prefetch<24>(at);
    prefetch<40>(at);  // the first request is dropped when too many are under way
    return Dot<T>::get(at);
}

// MR rows of x, padded with zeros to whole WIDTHs, times NR rows of W, which are not.
template <class T, int MR, int NR>
INLINE void dot_tile(const T *x, long x_stride, const T *w, const T *bias, T *y, long y_stride, long K) {
    typedef Dot<T> D;
    f32v acc[MR][NR] = {};
    long k = 0;
    for (; k + D::WIDTH <= K; k += D::WIDTH) {
        if constexpr (MR <= NR) {  // the fewer operands stay, the others pass by
            typename D::Operand xs[MR];
            for (int m = 0; m < MR; m++) xs[m] = D::get(x + m * x_stride + k);
            for (int n = 0; n < NR; n++) {
                typename D::Operand wn = get_weights(w + n * K + k);
                for (int m = 0; m < MR; m++) acc[m][n] = D::mad(acc[m][n], wn, xs[m]);
            }
        } else {
            typename D::Operand ws[NR];
            for (int n = 0; n < NR; n++) ws[n] = get_weights(w + n * K + k);
            for (int m = 0; m < MR; m++) {
                typename D::Operand xm = D::get(x + m * x_stride + k);
                keep_in_register(xm);
                for (int n = 0; n < NR; n++) acc[m][n] = D::mad(acc[m][n], ws[n], xm);
            }
        }
    }
    if (k < K) {
        T tails[NR][D::WIDTH] = {};
        for (int n = 0; n < NR; n++) memcpy((void *)tails[n], w + n * K + k, (K - k) * sizeof(T));
        for (int n = 0; n < NR; n++)
            for (int m = 0; m < MR; m++)
                acc[m][n] = D::mad(acc[m][n], D::get(tails[n]), D::get(x + m * x_stride + k));
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++)
            y[m * y_stride + n] = from_float<T>(sum(acc[m][n]) + (bias ? to_float(bias[n]) : 0.0f));
}

template <class T, int MR>
void dot_rows(const T *x, long x_stride, const T *w, const T *bias, T *y, long first, long last, long N, long K) {
    constexpr int NR = TILE / MR < MAX_TILE_ROWS ? TILE / MR : MAX_TILE_ROWS;
    long n = first;
    for (; n + NR <= last; n += NR) dot_tile<T, MR, NR>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
    for (; n < last; n++) dot_tile<T, MR, 1>(x, x_stride, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
}

// x turned: a step is one value of K for float, a pair for bfloat16; of each step there are MV vectors of rows. Pairs
// stay together for the dot-product instruction, else they are two float vectors.
template <class T, int MV> struct Turned;

template <int MV> struct Turned<float, MV> {
    static constexpr int ROWS = MV * LANES, STEP = 1, BYTES = ROWS * 4;
    INLINE static void put(char *at, int row, const float *x, long) { ((float *)at)[row] = *x; }
    INLINE static void mad(f32v (&acc)[MV], const float *w, const char *at, long) {
        for (int v = 0; v < MV; v++) acc[v] += *w * load((const float *)at + v * LANES);
    }
};

template <int MV> struct Turned<bf16, MV> {
    static constexpr int ROWS = MV * LANES, STEP = 2;
#if defined(__AVX512BF16__)
    static constexpr int BYTES = ROWS * 4;
    INLINE static void put(char *at, int row, const bf16 *x, long left) { ((uint32_t *)at)[row] = pair_bits(x, left); }
    INLINE static void mad(f32v (&acc)[MV], const bf16 *w, const char *at, long left) {
        __m512i pair = _mm512_set1_epi32(pair_bits(w, left));
        for (int v = 0; v < MV; v++) {
            __m512i x = _mm512_loadu_si512(at + v * sizeof(f32v));
            acc[v] = (f32v)_mm512_dpbf16_ps((__m512)acc[v], (__m512bh)pair, (__m512bh)x);
        }
    }
#else
    static constexpr int BYTES = 2 * ROWS * 4;
    INLINE static void put(char *at, int row, const bf16 *x, long left) {
        ((float *)at)[row] = to_float(x[0]);
        ((float *)at)[row + ROWS] = left > 1 ? to_float(x[1]) : 0.0f;
    }
    INLINE static void mad(f32v (&acc)[MV], const bf16 *w, const char *at, long left) {
        u32v pair = pair_bits(w, left) - u32v{};
        f32v low = (f32v)(pair << 16), high = (f32v)(pair & 0xffff0000u);
        for (int v = 0; v < MV; v++) acc[v] += low * load((const float *)at + v * LANES);
        for (int v = 0; v < MV; v++) acc[v] += high * load((const float *)at + ROWS + v * LANES);
    }
#endif
};

template <class X, class T> void turn(const T *x, long x_stride, long M, long K, char *out) {
    constexpr long CHUNK = 128;  // steps of a task
    long steps = (K + X::STEP - 1) / X::STEP;
    parallel_for((steps + CHUNK - 1) / CHUNK, M * K > MIN_TEAM_VALUES, [=](long task) {
        long first = task * CHUNK, last = first + CHUNK < steps ? first + CHUNK : steps;
        if (M < X::ROWS) memset(out + first * X::BYTES, 0, (last - first) * X::BYTES);
        for (long s = first; s < last; s++)
            for (long m = 0; m < M; m++) X::put(out + s * X::BYTES, m, x + m * x_stride + s * X::STEP, K - s * X::STEP);
    });
}

template <class T, int MV, int NR>
INLINE void column_tile(const char *xt, const T *w, const T *bias, T *y, long y_stride, long M, long K) {
    typedef Turned<T, MV> X;
    constexpr long LINE = LINE_BYTES / sizeof(T);
    f32v sums[NR][MV];
    for (int n = 0; n < NR; n++)
        for (int v = 0; v < MV; v++) sums[n][v] = (bias ? to_float(bias[n]) : 0.0f) - f32v{};
    long k = 0;
    while (k < K) {
        f32v acc[NR][MV] = {};
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

template <class T, int MV>
void columns(const char *xt, const T *w, const T *bias, T *y, long M, long first, long last, long N, long K) {
    constexpr int NR = TILE / MV < MAX_TILE_ROWS ? TILE / MV : MAX_TILE_ROWS;
    long n = first;
    for (; n + NR <= last; n += NR) column_tile<T, MV, NR>(xt, w + n * K, bias ? bias + n : nullptr, y + n, N, M, K);
    for (; n < last; n++) column_tile<T, MV, 1>(xt, w + n * K, bias ? bias + n : nullptr, y + n, N, M, K);
}

// Some rows of x, made ready for one of the two methods, and their rows of y.
template <class T> struct Block {
    const void *x;
    long x_stride, rows;
    T *y;
    void (*run)(const Block &, const T *w, const T *bias, long first, long last, long N, long K);
};

template <class T, int MV>
void run_columns(const Block<T> &b, const T *w, const T *bias, long first, long last, long N, long K) {
    columns<T, MV>((const char *)b.x, w, bias, b.y, b.rows, first, last, N, K);
}
template <class T, int MR>
void run_dots(const Block<T> &b, const T *w, const T *bias, long first, long last, long N, long K) {
    dot_rows<T, MR>((const T *)b.x, b.x_stride, w, bias, b.y, first, last, N, K);
}

template <class T> struct Linear {
    const T *x, *w, *bias;
    T *y;
    long x_stride, M, N, K;
    Block<T> *blocks = nullptr;
    long num_blocks = 0;
    char *room = nullptr;  // for rows made ready

    template <int MV> void add_columns() {
        typedef Turned<T, MV> X;
        long rows = M < X::ROWS ? M : X::ROWS;
        turn<X>(x, x_stride, rows, K, room);
        add({room, 0, rows, y, run_columns<T, MV>});
        room += (K + X::STEP - 1) / X::STEP * X::BYTES;
    }
    template <int MR> void add_dots() {
        long padded = (K + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        if (padded == K) return add({x, x_stride, MR, y, run_dots<T, MR>});
        T *copy = (T *)room;
        for (long m = 0; m < MR; m++) {
            memcpy((void *)(copy + m * padded), x + m * x_stride, K * sizeof(T));
            memset((void *)(copy + m * padded + K), 0, (padded - K) * sizeof(T));
        }
        add({copy, padded, MR, y, run_dots<T, MR>});
        room += MR * padded * sizeof(T);
    }
    void add(const Block<T> &block) {
        blocks[num_blocks++] = block;
        M -= block.rows;
        x += block.rows * x_stride;
        y += block.rows * N;
    }
    // All blocks go over a task's weights while these are in the cache.
    void run() {
        blocks = (Block<T> *)scratch<0>((M / (2 * LANES) + 8) * sizeof(Block<T>));
        room = (char *)scratch<1>((M + 4 * LANES) * (K + 2 * LANES) * 4);
        // Measured: up to 8 rows more than one vector of them, a second block is faster than two vectors.
        while (M > LANES + DOT_ROWS) add_columns<2>();
        if (M > DOT_ROWS) add_columns<1>();
        switch (M) {
#define DOTS(MR) \
    case MR: add_dots<MR>(); break;
            DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6) DOTS(7) DOTS(8)
#undef DOTS
        }
        long task_rows = TASK_BYTES / (K * (long)sizeof(T) + 1) / TILE * TILE;
        if (task_rows < TILE) task_rows = TILE;
        parallel_for((N + task_rows - 1) / task_rows, true, [this, task_rows](long task) {
            long first = task * task_rows, last = first + task_rows < N ? first + task_rows : N;
            for (long i = 0; i < num_blocks; i++) blocks[i].run(blocks[i], w, bias, first, last, N, K);
        });
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
    Linear<T> linear{(const T *)a.x, (const T *)a.w, (const T *)a.bias, (T *)a.y, a.x_stride, a.M, a.N, a.K};
    linear.run();
    return 0;
}

}  // namespace

OSTINATO_KERNEL(linear, Args, run)
