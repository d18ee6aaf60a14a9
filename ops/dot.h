// Dot products on vectors, with the instruction for bfloat16 where the target has it.
#pragma once
#include "native.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// Lanes along a sum of products: WIDTH values of two operands meet in one accumulator.
template <class T> struct Dot {
    static constexpr int WIDTH = LANES;
    typedef f32v Operand;
    INLINE static Operand get(const T *p) { return load(p); }
    INLINE static f32v mad(f32v acc, Operand w, Operand x) { return acc + w * x; }
};
#if defined(__AVX512BF16__)
template <> struct Dot<bf16> {
    static constexpr int WIDTH = 2 * LANES;
    typedef __m512bh Operand;
    INLINE static Operand get(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    INLINE static f32v mad(f32v acc, Operand w, Operand x) { return (f32v)_mm512_dpbf16_ps((__m512)acc, w, x); }
};
#endif

// Lane i of the result is the sum of vector i.
INLINE f32v transposed_sum(f32v (&v)[LANES]) {
#if defined(__clang__)
#define PICK(...) __builtin_shufflevector(v[2 * i], v[2 * i + 1], __VA_ARGS__)
#else
#define PICK(...) __builtin_shuffle(v[2 * i], v[2 * i + 1], i32v{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
#define PAIR_SUMS                                                                   \
    PICK(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +        \
        PICK(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define PAIR_SUMS PICK(0, 2, 4, 6, 8, 10, 12, 14) + PICK(1, 3, 5, 7, 9, 11, 13, 15)
#endif
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++) v[i] = PAIR_SUMS;
#undef PAIR_SUMS
#undef PICK
    return v[0];
}
