// What the CUDA sources share: barriers, the copy engine, operands of wgmma, numbers. HALF: fp16, else bf16.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    char opaque[128];
};

constexpr int COLUMNS = 64;  // of a stage: 128 bytes, the width of the swizzle
constexpr u64 READ_ONCE = 0x12F0000000000000ull, READ_AGAIN = 0x14F0000000000000ull;  // L2 policies

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void make_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the barrier wait for so many bytes of the copy engine.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void announce(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A matrix of rows of 128 bytes, swizzled in blocks of 8 rows, as wgmma wants it described.
__device__ __forceinline__ u64 described(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float wide(u16 value) {
    float made;
    if constexpr (HALF)
        asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"(value));
    else
        made = __uint_as_float((u32)value << 16);
    return made;
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 made;
    if constexpr (HALF)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
    return made;
}

// The activation of a gate: 1 silu, 2 gelu_tanh.
template <int KIND>
__device__ __forceinline__ float activated(float x) {
    if constexpr (KIND == 1) return __fdividef(x, 1.0f + __expf(-x));
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (2.0f - __fdividef(2.0f, __expf(2.0f * inner) + 1.0f));
}
