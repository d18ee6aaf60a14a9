// exp, sigmoid and tanh on vectors, accurate to about 2 units in the last place of float32.
#pragma once
#include "native.h"

INLINE f32v splat(float x) { return x - f32v{}; }
INLINE f32v select(i32v mask, f32v yes, f32v no) { return mask ? yes : no; }
// b if one is NaN.
INLINE f32v larger(f32v a, f32v b) {
#if defined(__AVX512F__)
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}
INLINE f32v smaller(f32v a, f32v b) {
#if defined(__AVX512F__)
    return (f32v)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select(a < b, a, b);
#endif
}

// x 2^n for an integral n in [-252, 254].
INLINE f32v scale_by_power(f32v x, f32v n) {
#if defined(__AVX512F__)
    return (f32v)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
    auto power_of_2 = [](i32v n) { return (f32v)((n + 127) << 23); };
    i32v whole = __builtin_convertvector(n, i32v), half = whole >> 1;  // in two steps: 2^n alone may be no float
    return x * power_of_2(half) * power_of_2(whole - half);
#endif
}

// Infinity above 88.7, 0 below -104, NaN for NaN.
INLINE f32v exp(f32v x) {
    x = smaller(splat(89.0f), x);
    x = larger(splat(-104.0f), x);
    const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding and taking it off rounds to an integer
    f32v n = x * 1.44269504f + magic - magic;
    f32v r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f32v p = splat(1.9875691500e-4f);  // Cephes expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return scale_by_power(p, n);
}

// To a relative error of 3e-6, for results that are rounded to bfloat16; x at most 88.
INLINE f32v rough_exp(f32v x) {
    const f32v magic = splat(12582912.0f);
    f32v y = larger(splat(-152.0f), x * 1.44269504f), n = y + magic - magic, r = y - n;
    f32v p = splat(0.009570086f);  // 2^r, r from -0.5 to 0.5
    p = p * r + 0.05591786f;
    p = p * r + 0.24024746f;
    p = p * r + 0.69312179f;
    p = p * r + 0.99999928f;
    return scale_by_power(p, n);
}

INLINE f32v sigmoid(f32v x) { return 1.0f / (1.0f + exp(-x)); }

INLINE f32v tanh(f32v x) {
    f32v z = x * x;
    // Taylor to x^9; (1 - e) / (1 + e) would lose the leading digits of a small x.
    f32v small = x * (1.0f + z * (-1.0f / 3 + z * (2.0f / 15 + z * (-17.0f / 315 + z * (62.0f / 2835)))));
    f32v size = select(x < 0.0f, -x, x);
    f32v e = exp(size * -2.0f);
    f32v large = (1.0f - e) / (1.0f + e);
    return select(size < 0.25f, small, select(x < 0.0f, -large, large));
}
