// Root-mean-square norm of rows, with or without an addition before it; roundings as in rms_norm.py.
#include "norm_row.h"

namespace {

// x [rows, D], residual like x or null: then total gets the rounded sum, which is normed. weight [D].
struct Args {
    const void *x;
    int64_t x_stride;
    const void *residual;
    int64_t residual_stride;
    const void *weight;
    int64_t weight_is_f32;
    void *normed, *total;
    int64_t rows, D;
    double eps, offset;
    int64_t round_first;
};

// The sum of x and residual goes to `to`; returns the sum of its squares.
template <class T> f32v add(const T *x, const T *residual, T *to, long D) {
    f32v squares = {};
    long d = 0;
    for (; d + LANES <= D; d += LANES) {
        f32v v = rounded<T>(load(x + d) + load(residual + d));
        store(to + d, v);
        squares += v * v;
    }
    if (d < D) {
        f32v v = rounded<T>(load_some(x + d, D - d) + load_some(residual + d, D - d));
        store_some(to + d, v, D - d);
        squares += v * v;
    }
    return squares;
}

template <class T, class W> void norm_row(const Args &a, long row) {
    const T *x = (const T *)a.x + row * a.x_stride;
    const W *weight = (const W *)a.weight;
    T *to = (T *)a.normed + row * a.D;
    f32v squares;
    if (a.residual) {
        T *total = (T *)a.total + row * a.D;
        squares = add(x, (const T *)a.residual + row * a.residual_stride, total, a.D);
        x = total;
    } else {
        squares = sum_of_squares(x, a.D);
    }
    scale_row(x, 1.0f / __builtin_sqrtf(sum(squares) / a.D + float(a.eps)), weight, float(a.offset), a.round_first, to,
              a.D);
}

template <class T> long run(const Args &a) {
    parallel_for(a.rows, a.rows * a.D > MIN_TEAM_VALUES,
                 [&a](long row) { a.weight_is_f32 ? norm_row<T, float>(a, row) : norm_row<T, T>(a, row); });
    return 0;
}

}  // namespace

OSTINATO_KERNEL(rms_norm, Args, run)
