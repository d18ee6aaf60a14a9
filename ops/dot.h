// Dot products on vectors, with the instruction for bfloat16 where the target has it.
#pragma once
#include "native.h"

// Stops GCC from loading the operand again for each product: loads, not products, would be the limit.
template <class V> INLINE void keep_in_register(V &v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
}

// Two values that lie side by side, or one and a zero.
INLINE uint32_t pair_bits(const bf16 *p, long left) {
    uint32_t pair = p[0].bits;
    if (left > 1) memcpy(&pair, p, 4);
    return pair;
}

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
    typedef i32v Operand;  // pairs
    INLINE static Operand get(const bf16 *p) { return load_as<i32v>(p); }
    INLINE static f32v mad(f32v acc, Operand w, Operand x) {
        return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
    }
};
#endif

#if defined(__clang__)
#define PICK(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define PICK(A, B, ...) __builtin_shuffle(A, B, i32v{__VA_ARGS__})
#endif
// Sums of neighbouring lanes, those of `a` first.
INLINE f32v pair_sums(f32v a, f32v b) {
#if defined(__AVX512F__)
    return PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}
#undef PICK

// COUNT vectors, a power of two, become one: its lanes hold LANES / COUNT partial sums of the first, of the second, ...
template <int COUNT> INLINE f32v pair_tree(f32v (&v)[COUNT]) {
    for (int count = COUNT / 2; count; count /= 2)
        for (int i = 0; i < count; i++) v[i] = pair_sums(v[2 * i], v[2 * i + 1]);
    return v[0];
}
