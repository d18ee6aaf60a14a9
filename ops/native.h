// Shared by the native CPU kernels: vectors, bfloat16, scratch memory and the thread team.
//
// Plain C ABI and no torch header, so that a build takes a second. Vectors are GCC/Clang vector
// extensions: one source for AVX-512, AVX2 and others; the compiler splits what a target has not got.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define OSTINATO_API extern "C" __attribute__((visibility("default")))
// NAME_f32 and NAME_bf16 for Python: one packed struct of 8-byte fields (native.py), 0 or an error number back.
#define OSTINATO_KERNEL(NAME, ARGS, RUN)                                         \
    OSTINATO_API long NAME##_f32(const ARGS *args) { return RUN<float>(*args); } \
    OSTINATO_API long NAME##_bf16(const ARGS *args) { return RUN<bf16>(*args); }
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

// float32 values in one vector, and vectors that fit into registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, NUM_REGISTERS = 32;
#else
constexpr int LANES = 8, NUM_REGISTERS = 16;
#endif
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

template <class T> INLINE T from_float(float x);
template <> INLINE float from_float<float>(float x) { return x; }
template <> INLINE bf16 from_float<bf16>(float x) { return to_bf16(x); }

INLINE f32v load(const float *p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE u32v widened(u16v v) {
#if defined(__AVX512F__)
    return (u32v)_mm512_cvtepu16_epi32((__m256i)v);  // GCC makes five instructions of the other
#else
    return __builtin_convertvector(v, u32v);
#endif
}
INLINE f32v load(const bf16 *p) {
    u16v raw;
    memcpy(&raw, p, sizeof raw);
    return (f32v)(widened(raw) << 16);
}
template <class V> INLINE V load_as(const void *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, f32v v) { memcpy(p, &v, sizeof v); }
// The upper halves are the nearest bfloat16, ties to even; NaN stays NaN.
INLINE u32v round_bits(f32v v) {
    u32v bits = (u32v)v;
    return v == v ? bits + (((bits >> 16) & 1) + 0x7fffu) : bits | 0x400000u;
}
// The instruction for it makes zeros of numbers below 1.2e-38, as it does of such factors.
INLINE u16v nearest_bf16(f32v v) {
#if defined(__AVX512BF16__)
    return (u16v)_mm512_cvtneps_pbh((__m512)v);
#else
    return __builtin_convertvector(round_bits(v) >> 16, u16v);
#endif
}
INLINE void store(bf16 *p, f32v v) {
    u16v raw = nearest_bf16(v);
    memcpy(p, &raw, sizeof raw);
}
// The first `count` (< LANES) values; the other lanes are zero. Nothing past them is touched.
template <class T> INLINE f32v load_some(const T *p, long count) {
    T tail[LANES] = {};
    memcpy(tail, p, count * sizeof(T));
    return load(tail);
}
template <class T> INLINE void store_some(T *p, f32v v, long count) {
    T tail[LANES];
    store(tail, v);
    memcpy(p, tail, count * sizeof(T));
}
template <class From> INLINE void widen(const From *from, float *to, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    if (i < count) store_some(to + i, load_some(from + i, count - i), count - i);
}
template <class To> INLINE void narrow(const float *from, To *to, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    if (i < count) store_some(to + i, load_some(from + i, count - i), count - i);
}
// What a value becomes when it is kept in T for a moment.
template <class T> INLINE f32v rounded(f32v v);
template <> INLINE f32v rounded<float>(f32v v) { return v; }
template <> INLINE f32v rounded<bf16>(f32v v) { return (f32v)(widened(nearest_bf16(v)) << 16); }

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
INLINE float sum(f32v v) {
    f32x8 eight[LANES / 8];
    memcpy(eight, &v, sizeof v);
    if (LANES == 16) eight[0] += eight[LANES / 8 - 1];
    f32x4 four[2];
    memcpy(four, eight, sizeof four);
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// Memory of the calling thread that is reused from call to call; 64-byte aligned. Slot: one of few uses in a call.
template <int SLOT> INLINE void *scratch(size_t bytes) {
    static thread_local void *block = nullptr;
    static thread_local size_t size = 0;
    if (bytes > size) {
        free(block);
        size = (bytes + 4095) & ~size_t(4095);
        block = aligned_alloc(64, size);
        if (!block) abort();
    }
    return block;
}

// Fewer values than this are read or made faster by one thread than by a team (1 to 2 us to gather).
constexpr long MIN_TEAM_VALUES = 16 << 10;

// The team (native.cpp) has as many threads as torch is set to use. The caller is thread 0; the others help if they
// come in time and are not waited for otherwise, so any subset of threads that runs `body` must get all work done.
constexpr long MAX_THREADS = 64;
long team_size();
void team_run(long threads, void (*body)(void *data, long thread), void *data);

// body(i) for i in [0, tasks). Each thread has a range and takes its tasks in order, then those left in others' ranges:
// memory is read in long runs, and a late or slow thread does less.
template <class Body> INLINE void parallel_for(long tasks, bool worth_a_team, const Body &body) {
    long threads = worth_a_team ? team_size() : 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > tasks) threads = tasks;
    if (threads <= 1) {
        for (long i = 0; i < tasks; i++) body(i);
        return;
    }
    struct alignas(64) Range {
        long next, last;
    };
    struct Job {
        const Body *body;
        long threads;
        Range ranges[MAX_THREADS];
    } job;
    job.body = &body;
    job.threads = threads;
    for (long i = 0; i < threads; i++) job.ranges[i] = {tasks * i / threads, tasks * (i + 1) / threads};
    team_run(
        threads,
        [](void *data, long thread) {
            Job *job = (Job *)data;
            for (long i = 0; i < job->threads; i++) {
                Range &range = job->ranges[(thread + i) % job->threads];
                for (long task; (task = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED)) < range.last;)
                    (*job->body)(task);
            }
        },
        &job);
}
