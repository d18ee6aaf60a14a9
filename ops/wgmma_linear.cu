// Products of the rows of a step with a weight matrix on Hopper's tensor cores; wgmma_linear.py says what.
//
// One warp asks for tiles of 64 columns, which arrive in a ring of STAGES in shared memory; each of WGS
// warpgroups multiplies 64 tokens with all outputs of the tile. Weights of the first stages are asked for
// before the kernel that makes the tokens has ended: no kernel of a step writes weights.
//
// Constants, given by the launcher: WGS, ROWS (tokens of a tile that are loaded), BN (weight rows of a tile),
// STAGES, SPLIT (blocks of a cluster that share the columns and add their sums), SHARE (blocks of a cluster
// with other tokens and the same weights, each loading a part for all), ACT (0 none, 1 silu, 2 gelu_tanh: then
// half of the rows of a tile are gates), BIAS, RESIDUAL, HALF (fp16, else bf16).
// wgmma.h, made by the launcher: void multiply(float (&sums)[BN / 2], u64 tokens, u64 weights, int keep).

#include "hopper.cuh"
#include "wgmma.h"

constexpr int CLUSTER = SPLIT * SHARE;
constexpr int TOKEN_BYTES = ROWS * 128, WEIGHT_BYTES = BN * 128, STAGE_BYTES = TOKEN_BYTES + WEIGHT_BYTES;
constexpr int CONSUMERS = WGS * 128;
constexpr int OUT = ACT ? BN / 2 : BN;  // outputs of a tile
constexpr int GROUPS = OUT / 8;
constexpr int PART_ROWS = ACT ? BN / 2 : BN;  // weight rows of one request, before they are shared

__device__ __forceinline__ void release(u32 barrier, u32 block) {
    if constexpr (SHARE == 1)
        arrive(barrier);
    else
        asm volatile(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
            " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(block)
            : "memory");
}

__device__ __forceinline__ void load_for_all(
    u32 to, const TensorMap* map, int column, int row, u32 barrier, u16 blocks, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(column), "r"(row),
        "r"(barrier), "h"(blocks), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

struct Outputs {
    u16* out;
    const u16* bias;
    const u16* residual;
    int num_tokens, num_out, residual_stride;

    // Outputs column and column + 1 of a token, rounded.
    __device__ __forceinline__ u32 finish(float low, float high, int token, int column) const {
        if (token >= num_tokens || column >= num_out) return 0;
        if constexpr (BIAS) {
            const u32 both = *(const u32*)(bias + column);
            low += wide((u16)both), high += wide((u16)(both >> 16));
        }
        if constexpr (RESIDUAL) {
            const u32 both = *(const u32*)(residual + (long long)token * residual_stride + column);
            low += wide((u16)both), high += wide((u16)(both >> 16));
        }
        return packed(low, high);
    }

    // `values`: finished pairs of one token in groups of 8 columns; the four threads of a token swap them, so
    // that each stores one group of four.
    __device__ __forceinline__ void store_four(u32 (&values)[4], int token, int column, int lane) const {
        const bool odd = lane & 1, upper = lane & 2;
        u32 other;
        other = __shfl_xor_sync(~0u, odd ? values[0] : values[1], 1);
        if (odd) values[0] = other; else values[1] = other;
        other = __shfl_xor_sync(~0u, odd ? values[2] : values[3], 1);
        if (odd) values[2] = other; else values[3] = other;
        other = __shfl_xor_sync(~0u, upper ? values[0] : values[2], 2);
        if (upper) values[0] = other; else values[2] = other;
        other = __shfl_xor_sync(~0u, upper ? values[1] : values[3], 2);
        if (upper) values[1] = other; else values[3] = other;
        const int mine = column + (lane & 3) * 8;
        if (token < num_tokens && mine < num_out)
            *(uint4*)(out + (long long)token * num_out + mine) =
                make_uint4(values[0], values[1], values[2], values[3]);
    }
};

// Groups first to first + COUNT of this thread's sums, of two tokens 8 apart.
template <int COUNT, typename Sums>
__device__ __forceinline__ void store_groups(
    const Outputs& outputs, const Sums& sums, int first, int token, int column, int lane) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const int at = token + 8 * upper;
#pragma unroll
        for (int start = 0; start < COUNT; start += 4) {
            u32 values[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (start + j < COUNT) {
                    float low = sums(start + j, 2 * upper), high = sums(start + j, 2 * upper + 1);
                    if constexpr (ACT != 0) {
                        low = activated<ACT>(low) * sums(start + j + GROUPS, 2 * upper);
                        high = activated<ACT>(high) * sums(start + j + GROUPS, 2 * upper + 1);
                    }
                    values[j] =
                        outputs.finish(low, high, at, column + (first + start + j) * 8 + (lane & 3) * 2);
                }
            }
            if (start + 4 <= COUNT) {
                outputs.store_four(values, at, column + (first + start) * 8, lane);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int mine = column + (first + start + j) * 8 + (lane & 3) * 2;
                    if (start + j < COUNT && at < outputs.num_tokens && mine < outputs.num_out)
                        *(u32*)(outputs.out + (long long)at * outputs.num_out + mine) = values[j];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) __cluster_dims__(CLUSTER, 1, 1)
    wgmma_linear(
        const __grid_constant__ TensorMap tokens, const __grid_constant__ TensorMap weights, u16* out,
        const u16* bias, const u16* residual, int num_tokens, int num_out, int residual_stride, int num_steps,
        int token_tiles, int tiles) {
    const Outputs outputs{out, bias, residual, num_tokens, num_out, residual_stride};
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const u32 full = base + STAGES * STAGE_BYTES + SPARE, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;  // clusters are dense in x
    const u32 part = rank % SPLIT, shared_by = rank / SPLIT;
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(full + 8 * stage, 1);
            make_barrier(empty + 8 * stage, WGS * SHARE);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    if constexpr (SHARE > 1)
        meet_cluster();
    else
        __syncthreads();

    // Tiles of a cluster: SHARE tiles of tokens side by side, by one tile of outputs.
    const int rows_of_tiles = (token_tiles + SHARE - 1) / SHARE, items = rows_of_tiles * tiles;
    const int first_item = blockIdx.x / CLUSTER, item_step = gridDim.x / CLUSTER;
    const int per_part = (num_steps + SPLIT - 1) / SPLIT;
    const int first_step = part * per_part;
    const int steps = max(0, min(per_part, num_steps - first_step));
    u32 stage = 0, turn = 0;

    if (warp == WGS * 4) {
        if (lane == 0) {
            announce(&weights);
            announce(&tokens);
            bool has_waited = false;
            for (int item = first_item; item < items; item += item_step) {
                const int token = (item % rows_of_tiles * SHARE + shared_by) * (WGS * 64);
                const int output = item / rows_of_tiles * OUT;
                const int ahead = has_waited ? 0 : min(STAGES, steps);  // steps whose weights come first
                const u32 first_stage = stage;
                for (int step = 0; step < steps; ++step) {
                    const u32 at = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    const int column = (first_step + step) * COLUMNS;
                    wait(empty + 8 * stage, turn ^ 1);
                    expect(barrier, STAGE_BYTES);
                    if constexpr (SHARE == 1) {
#pragma unroll
                        for (int half = 0; half < (ACT ? 2 : 1); ++half)
                            load(at + TOKEN_BYTES + half * PART_ROWS * 128, &weights, column,
                                 output + half * num_out, barrier, READ_ONCE);
                    } else {
                        constexpr int MINE = BN / SHARE;
                        const int row = shared_by * MINE;
                        const u16 blocks = (u16)((SHARE == 2 ? 1 | 1 << SPLIT : 1) << part);
                        load_for_all(at + TOKEN_BYTES + row * 128, &weights, column,
                                     ACT ? output + shared_by * num_out : output + row, barrier, blocks,
                                     READ_ONCE);
                    }
                    if (step + 1 == ahead) {
                        wait_for_last();
                        has_waited = true;
                        for (int before = 0; before < ahead; ++before)
                            load(base + (first_stage + before) % STAGES * STAGE_BYTES, &tokens,
                                 (first_step + before) * COLUMNS, token,
                                 full + 8 * ((first_stage + before) % STAGES), READ_AGAIN);
                    } else if (has_waited) {
                        load(at, &tokens, column, token, barrier, READ_AGAIN);
                    }
                    if (++stage == STAGES) stage = 0, turn ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        const int group = warp / 4;
        const u32 my_tokens = group * 64 * 128;
        wait_for_last();
        for (int item = first_item; item < items; item += item_step) {
            const int token = (item % rows_of_tiles * SHARE + shared_by) * (WGS * 64) + group * 64 +
                              warp % 4 * 16 + lane / 4;
            const int output = item / rows_of_tiles * OUT;
            float sums[BN / 2];
            if (steps == 0)
                for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
            u32 last = 0;
            for (int step = 0; step < steps; ++step) {
                wait(full + 8 * stage, turn);
                const u64 a = described(base + stage * STAGE_BYTES + my_tokens);
                const u64 b = described(base + stage * STAGE_BYTES + TOKEN_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 4; ++k) multiply(sums, a + 2 * k, b + 2 * k, step + k > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > 0 && threadIdx.x % 128 < SHARE)
                    release(empty + 8 * last, part + threadIdx.x % 128 * SPLIT);
                last = stage;
                if (++stage == STAGES) stage = 0, turn ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (steps > 0 && threadIdx.x % 128 < SHARE)
                release(empty + 8 * last, part + threadIdx.x % 128 * SPLIT);
            if constexpr (SPLIT == 1) {
                store_groups<GROUPS>(
                    outputs, [&](int g, int i) { return sums[4 * g + i]; }, 0, token, output, lane);
            } else {
                // One tile for each cluster. The ring is free once every warpgroup has its last sums.
                asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
                float* const mine = (float*)shared + threadIdx.x;
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) mine[i * CONSUMERS] = sums[i];
            }
        }
    }
    if constexpr (SPLIT > 1) {
        meet_cluster();
        if (warp < WGS * 4 && first_item < items) {
            constexpr int COUNT = GROUPS / SPLIT;
            const int token = (first_item % rows_of_tiles * SHARE + shared_by) * (WGS * 64) + warp / 4 * 64 +
                              warp % 4 * 16 + lane / 4;
            const int first = part * COUNT;
            float totals[ACT ? 2 : 1][4 * COUNT];
#pragma unroll
            for (int half = 0; half < (ACT ? 2 : 1); ++half)
#pragma unroll
                for (int i = 0; i < 4 * COUNT; ++i) totals[half][i] = 0;
#pragma unroll
            for (u32 other = 0; other < SPLIT; ++other) {
                u32 there;
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
                    : "r"(base + 4 * threadIdx.x), "r"(other + SPLIT * shared_by));
#pragma unroll
                for (int half = 0; half < (ACT ? 2 : 1); ++half)
#pragma unroll
                    for (int i = 0; i < 4 * COUNT; ++i) {
                        float value;
                        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value)
                            : "r"(there + 4 * CONSUMERS * (4 * (half * GROUPS + first) + i)));
                        totals[half][i] += value;
                    }
            }
            store_groups<COUNT>(
                outputs,
                [&](int g, int i) { return g < GROUPS ? totals[0][4 * g + i] : totals[ACT ? 1 : 0][4 * (g - GROUPS) + i]; },
                first, token, first_item / rows_of_tiles * OUT, lane);
        }
    }
    if constexpr (CLUSTER > 1) meet_cluster();  // nobody leaves while others read or write its memory
}
