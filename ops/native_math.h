// exp, sigmoid and tanh on vectors, accurate to about 2 units in the last place of float32.
#pragma once
#include "native.h"

INLINE f32v splat(float x) { return x - f32v{}; }
INLINE f32v select(i32v mask, f32v yes, f32v no) { return mask ? yes : no; }
INLINE f32v larger(f32v a, f32v b) { return select(a > b, a, b); }

// 2^n for an integral n in [-126, 127].
INLINE f32v power_of_2(i32v n) { return (f32v)((n + 127) << 23); }

// Infinity above 88.7, 0 below -104, NaN for NaN.
INLINE f32v exp(f32v x) {
    x = select(x > splat(89.0f), splat(89.0f), x);
    x = select(x < splat(-104.0f), splat(-104.0f), x);
    const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding and taking it off rounds to an integer
    f32v rounded_up = x * 1.44269504f + magic;
    f32v n = rounded_up - magic;
    f32v r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f32v p = splat(1.9875691500e-4f);  // Cephes expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i32v whole = (i32v)rounded_up - (i32v)magic;
    i32v half = whole >> 1;  // in two steps: 2^n alone may be no float
    return p * power_of_2(half) * power_of_2(whole - half);
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
