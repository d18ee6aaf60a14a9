// Attention of query tokens over the paged keys of their sequence, on Hopper's tensor cores; wgmma_prefill.py
// says which.
//
// A block has QUERIES tokens of one sequence with the GROUP query heads of one KV head: 128 rows, 64 for each of
// two warpgroups.  One warp asks for tiles of 128 keys and values, block by block of the cache, from the last to
// the first.  A warpgroup multiplies with the next keys and the last values at once, and takes the exponentials
// of the one while the tensor cores do the other.
//
// Constants: GROUP, QUERIES (GROUP * QUERIES is 128), B (tokens of a block of the cache: 8 to 128, a power of
// 2), STAGES, HALF.

#include "hopper.cuh"

constexpr int KEYS = 128, SIZE = 128;  // keys of a tile, values of a head
constexpr int ROW_BYTES = 128, PART_BYTES = 128 * ROW_BYTES;  // half of the columns of 128 rows
constexpr int TILE_BYTES = 2 * PART_BYTES;
constexpr int BLOCKS = KEYS / B;
constexpr int PRODUCERS = 128, CONSUMERS = 256;
#define LEAST __int_as_float(0xff800000)

__device__ __forceinline__ void load_rows(
    u32 to, const TensorMap* map, int column, int head, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(token), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_block(
    u32 to, const TensorMap* map, int column, int head, int block, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(0),
        "r"(block), "r"(barrier), "l"(READ_AGAIN)
        : "memory");
}

// 128 values by keys: the outputs lie side by side in a row, so the operand is turned while it is read. The two
// halves of the columns are PART_BYTES apart, groups of 8 keys 1024 bytes.
__device__ __forceinline__ u64 described_turned(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)(PART_BYTES >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int COUNT>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
    float made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

struct Place {
    int seq, stop, length, first;  // the sequence, the token past its last, its keys, the first token of the tile
};

// Which tile: those of a sequence's last tokens, which have the most keys, come first. By one warp; the sequence
// is -1 where there is no such tile. Sequences of fewer than min_new tokens have none; the rows past the last one
// are handled as one more, of length 0.
__device__ __forceinline__ Place find_tile(
    int tile, const int* query_start, const int* seq_lens, int num_seqs, int num_tokens, int min_new) {
    const int lane = threadIdx.x % 32, each = (num_seqs + 32) / 32;
    const auto stop_of = [&](int s) { return s < num_seqs ? query_start[s + 1] : num_tokens; };
    const auto tiles_of = [&](int s) {
        const int count = stop_of(s) - query_start[s];
        return count < min_new && s < num_seqs ? 0 : (count + QUERIES - 1) / QUERIES;
    };
    int mine = 0;
    for (int s = lane * each; s < min((lane + 1) * each, num_seqs + 1); ++s) mine += tiles_of(s);
    int past = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, past, distance);
        if (lane >= distance) past += other;
    }
    Place place{-1, 0, 0, 0};
    const bool is_mine = tile < past && tile >= past - mine;
    if (is_mine) {
        int before = past - mine;
        for (int s = lane * each; s <= num_seqs; ++s) {
            const int tiles = tiles_of(s);
            if (tile < before + tiles) {
                const int behind = before + tiles - 1 - tile;
                place = {s, stop_of(s), s < num_seqs ? seq_lens[s] : 0, query_start[s] + behind * QUERIES};
                break;
            }
            before += tiles;
        }
    }
    const u32 who = __ballot_sync(~0u, is_mine);
    if (who == 0) return place;
    const int source = __ffs(who) - 1;
    place.seq = __shfl_sync(~0u, place.seq, source);
    place.stop = __shfl_sync(~0u, place.stop, source);
    place.length = __shfl_sync(~0u, place.length, source);
    place.first = __shfl_sync(~0u, place.first, source);
    return place;
}

// Of 64 rows with the keys of a tile.
__device__ __forceinline__ void multiply_keys(float (&scores)[64], u32 queries, u32 keys) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const u32 at = k / 4 * PART_BYTES + k % 4 * 32;
        multiply(scores, described(queries + at), described(keys + at), k > 0);
    }
}

// Shares of a tile's keys, packed in pairs as the first operand of a product.
__device__ __forceinline__ void multiply_values(float (&mixed)[64], const u32 (&shares)[32], u32 values) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
        multiply_shares(mixed, shares[4 * k], shares[4 * k + 1], shares[4 * k + 2], shares[4 * k + 3],
                        described_turned(values + k * 16 * ROW_BYTES));
}

extern "C" __global__ void __launch_bounds__(PRODUCERS + CONSUMERS, 1) wgmma_prefill(
    const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap key_plane,
    const __grid_constant__ TensorMap value_plane, u16* out, const int* block_tables, const int* seq_lens,
    const int* query_start, int num_seqs, int num_tokens, int table_stride, int num_heads, int min_new,
    float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const u32 keys_at = base + TILE_BYTES, values_at = keys_at + STAGES * TILE_BYTES;
    const u32 barriers = values_at + STAGES * TILE_BYTES;
    const u32 query_full = barriers, key_full = barriers + 8, value_full = key_full + 8 * STAGES;
    const u32 key_empty = value_full + 8 * STAGES, value_empty = key_empty + 8 * STAGES;
    __shared__ Place found;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.x;
    if (threadIdx.x == 0) {
        make_barrier(query_full, 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(key_full + 8 * stage, 1);
            make_barrier(value_full + 8 * stage, 1);
            make_barrier(key_empty + 8 * stage, 2);
            make_barrier(value_empty + 8 * stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    let_next_begin();
    wait_for_last();
    if (warp == 0) {
        const Place place = find_tile(blockIdx.y, query_start, seq_lens, num_seqs, num_tokens, min_new);
        if (lane == 0) found = place;
    }
    __syncthreads();
    const Place place = found;
    if (place.seq < 0) return;
    // The query at the first token sees keys up to `oldest`, the last one those before `stop`.
    const int oldest = place.length - place.stop + place.first;
    const int stop = min(place.length, oldest + QUERIES);
    const int num_tiles = max(0, (stop + KEYS - 1) / KEYS);

    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0) {
            if (lane == 0 && num_tiles > 0) {  // else nobody waits for them: they would come after the block's end
                expect(query_full, TILE_BYTES);
                load_rows(base, &queries, 0, kv_head * GROUP, place.first, query_full);
                load_rows(base + PART_BYTES, &queries, 64, kv_head * GROUP, place.first, query_full);
            }
            const int* const table = block_tables + (long long)place.seq * table_stride;
            u32 stage = 0, turn = 0;
            for (int tile = num_tiles - 1; tile >= 0; --tile) {
                const int there = min(BLOCKS, (stop - tile * KEYS + B - 1) / B);  // blocks with visible keys
                const int block = lane / 2 < there ? table[tile * BLOCKS + lane / 2] : 0;
#pragma unroll
                for (int what = 0; what < 2; ++what) {
                    const u32 full = (what == 0 ? key_full : value_full) + 8 * stage;
                    const u32 to = (what == 0 ? keys_at : values_at) + stage * TILE_BYTES;
                    const TensorMap* const plane = what == 0 ? &key_plane : &value_plane;
                    wait((what == 0 ? key_empty : value_empty) + 8 * stage, turn ^ 1);
                    if (lane == 0) expect(full, there * B * 2 * ROW_BYTES);
                    __syncwarp();
                    if (lane < 2 * there)  // a lane has a half of the columns of a block
                        load_block(to + lane % 2 * PART_BYTES + lane / 2 * B * ROW_BYTES, plane, lane % 2 * 64,
                                   kv_head, block, full);
                }
                if (++stage == STAGES) stage = 0, turn ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = warp / 4 - 1, row = group * 64 + warp % 4 * 16 + lane / 4;
    const u32 my_queries = base + group * 64 * ROW_BYTES;
    const int my_token[2] = {place.first + row / GROUP, place.first + (row + 8) / GROUP};
    const int position[2] = {place.length - place.stop + my_token[0], place.length - place.stop + my_token[1]};
    float mixed[64], top[2] = {LEAST, LEAST}, weight[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 64; ++i) mixed[i] = 0;
    u32 shares[32];
    u32 stage = 0, turn = 0, last_stage = 0, last_turn = 0;
    if (num_tiles > 0) wait(query_full, 0);
    for (int tile = num_tiles - 1; tile >= 0; --tile) {
        const bool is_first = tile == num_tiles - 1;
        float scores[64];
        wait(key_full + 8 * stage, turn);
        fence_products();
        multiply_keys(scores, my_queries, keys_at + stage * TILE_BYTES);
        commit_products();
        if (!is_first) {
            wait(value_full + 8 * last_stage, last_turn);
            multiply_values(mixed, shares, values_at + last_stage * TILE_BYTES);
            commit_products();
            await_products<1>();
        } else {
            await_products<0>();
        }
        if (threadIdx.x % 128 == 0) arrive(key_empty + 8 * stage);
        if (tile * KEYS + KEYS - 1 > oldest) {  // some of the rows do not see all keys
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const int key = tile * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (key > position[i % 4 / 2]) scores[i] = LEAST;
            }
        }
        float fade[2];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            float most = top[upper];
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (i % 4 / 2 == upper) most = fmaxf(most, scores[i]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float shift = most == LEAST ? 0.0f : most * scale;  // a row without keys has none
            fade[upper] = power_of_2(top[upper] * scale - shift);
            top[upper] = most;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (i % 4 / 2 == upper) {
                    scores[i] = power_of_2(fmaf(scores[i], scale, -shift));
                    sum += scores[i];
                }
            weight[upper] = weight[upper] * fade[upper] + sum;  // of this thread's keys; added up at the end
        }
        await_products<0>();
        if (!is_first && threadIdx.x % 128 == 0) arrive(value_empty + 8 * last_stage);
#pragma unroll
        for (int i = 0; i < 64; ++i) mixed[i] *= fade[i % 4 / 2];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            shares[4 * k] = packed(scores[8 * k], scores[8 * k + 1]);
            shares[4 * k + 1] = packed(scores[8 * k + 2], scores[8 * k + 3]);
            shares[4 * k + 2] = packed(scores[8 * k + 4], scores[8 * k + 5]);
            shares[4 * k + 3] = packed(scores[8 * k + 6], scores[8 * k + 7]);
        }
        last_stage = stage, last_turn = turn;
        if (++stage == STAGES) stage = 0, turn ^= 1;
        const int valid = stop - tile * KEYS;
        if (is_first && valid < KEYS) {
            // What lies behind the last key is not written or not even loaded: its share is 0, but 0 times NaN is
            // not. Both warpgroups write the same zeros.
            wait(value_full + 8 * last_stage, last_turn);
            for (int i = threadIdx.x % 128; i < (KEYS - valid) * 16; i += 128) {
                const u32 at = values_at + last_stage * TILE_BYTES + i % 2 * PART_BYTES +
                               (valid + i / 16) * ROW_BYTES + i % 16 / 2 * 16;
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
        }
    }
    if (num_tiles > 0) {
        wait(value_full + 8 * last_stage, last_turn);
        fence_products();
        multiply_values(mixed, shares, values_at + last_stage * TILE_BYTES);
        commit_products();
        await_products<0>();
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        float sum = weight[upper];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int token = my_token[upper], head = kv_head * GROUP + (row + 8 * upper) % GROUP;
        if (token < place.stop) {
            u32* const at = (u32*)(out + ((long long)token * num_heads + head) * SIZE) + lane % 4;
#pragma unroll
            for (int g = 0; g < 16; ++g)
                at[4 * g] = packed(mixed[4 * g + 2 * upper] * factor, mixed[4 * g + 2 * upper + 1] * factor);
        }
    }
}
