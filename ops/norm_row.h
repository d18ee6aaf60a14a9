// The two halves of a root-mean-square norm of D values; rms_norm and the heads of rope_kv_write use them.
#pragma once
#include "native.h"

template <class T> INLINE f32v sum_of_squares(const T *x, long D) {
    f32v squares = {};
    long d = 0;
    for (; d + LANES <= D; d += LANES) {
        f32v v = load(x + d);
        squares += v * v;
    }
    if (d < D) {
        f32v v = load_some(x + d, D - d);
        squares += v * v;
    }
    return squares;
}

// to = x * rstd * (weight + offset), kept in T; with round_first, x * rstd is rounded to T before the product.
template <class T, class W, class Out>
INLINE void scale_row(const T *x, float rstd, const W *weight, float offset, bool round_first, Out *to, long D) {
    auto scaled = [=](f32v v, f32v w) {
        v *= rstd;
        if (round_first) v = rounded<T>(v);
        return rounded<T>(v * (w + offset));
    };
    long d = 0;
    for (; d + LANES <= D; d += LANES) store(to + d, scaled(load(x + d), load(weight + d)));
    if (d < D) store_some(to + d, scaled(load_some(x + d, D - d), load_some(weight + d, D - d)), D - d);
}
