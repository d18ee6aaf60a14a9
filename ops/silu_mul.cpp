// act(gate) * up for rows of F values, act rounded to the type first. Serves silu_mul and gelu_tanh_mul.
#include "native_math.h"

namespace {

struct Args {
    const void *gate;
    int64_t gate_stride;
    const void *up;
    int64_t up_stride;
    void *out;
    int64_t rows, F;
};

struct Silu {
    INLINE static f32v act(f32v g) { return g * sigmoid(g); }
};
struct GeluTanh {
    // 0.5 * (1 + tanh(z)) = sigmoid(2 z); 1.59577 = 2 sqrt(2 / pi)
    INLINE static f32v act(f32v g) { return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)); }
};

template <class Act, class T> long act_mul(const Args &a) {
    constexpr long CHUNK = 4096;
    const long F = a.F, chunks = (F + CHUNK - 1) / CHUNK;
    parallel_for(a.rows * chunks, a.rows * F > MIN_TEAM_VALUES, [&a, F, chunks](long task) {
        long row = task / chunks, f = task % chunks * CHUNK, last = f + CHUNK < F ? f + CHUNK : F;
        const T *gate = (const T *)a.gate + row * a.gate_stride, *up = (const T *)a.up + row * a.up_stride;
        T *out = (T *)a.out + row * F;
        for (; f + LANES <= last; f += LANES) store(out + f, rounded<T>(Act::act(load(gate + f))) * load(up + f));
        if (f < last)
            store_some(out + f, rounded<T>(Act::act(load_some(gate + f, last - f))) * load_some(up + f, last - f),
                       last - f);
    });
    return 0;
}

template <class T> long silu(const Args &a) { return act_mul<Silu, T>(a); }
template <class T> long gelu_tanh(const Args &a) { return act_mul<GeluTanh, T>(a); }

}  // namespace

OSTINATO_KERNEL(silu_mul, Args, silu)
OSTINATO_KERNEL(gelu_tanh_mul, Args, gelu_tanh)
