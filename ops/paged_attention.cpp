// Causal attention of new tokens over the paged cache, tile by tile with an online softmax; see paged_attention.py.
//
// A tile is some tokens of one sequence times the query heads of one KV head, its rows, and TILE_KEYS keys at a time.
// - FewRows (decode): scores are dot products over the head. A tile has all KV heads, whose keys lie side by side.
// - ManyRows (prefill): vector lanes are rows.
// Long contexts are split into chunks of keys and merged; how a sequence is split depends on that sequence only.
#include "attention_many_rows.h"
#include "dot.h"

namespace {

constexpr long CHUNK_KEYS = 128;
constexpr long MAX_ROWS = 4 * LANES;  // of one KV head
constexpr long FEW_ROWS = 8;          // most rows of one KV head for FewRows
constexpr long ENOUGH_TILES = 16;     // prefill of a sequence is split into chunks of keys if it has fewer tiles
constexpr long BAD_QUERY_START = 1, BAD_BLOCK = 2, BAD_LENGTH = 3;  // native_calls.py has the words

template <class T> struct FewRows : TileBase<T> {
    typedef TileBase<T> Base;
    using Base::a, Base::tile, Base::head_rows, Base::rows, Base::D, Base::E, Base::D_pad, Base::E_pad, Base::k_rows,
        Base::v_rows;
    T *q;                                  // [rows, D_pad]
    T *k_padded;                           // [TILE_KEYS, D_pad], where D is no multiple of a vector
    float *v;                              // [TILE_KEYS, E_pad], where V must be widened or padded
    float *scores, *mixed, *top, *weight;  // [rows, TILE_KEYS], [rows, E_pad], [rows], [rows]
    const float *v_wide[TILE_KEYS];
    const char *ahead[2 * TILE_KEYS];
    long num_ahead = 0, next_ahead = 0, ahead_per_call = 0;

    FewRows(const Args &a, const Tile &tile, float *parts) : Base(a, tile, parts) {
        Arena arena;
        allocate(arena);
        arena = {(char *)scratch<0>(arena.used)};
        allocate(arena);
        for (long r = 0; r < rows; r++) {
            memcpy((void *)(q + r * D_pad), this->query(r), D * sizeof(T));
            memset((void *)(q + r * D_pad + D), 0, (D_pad - D) * sizeof(T));
            top[r] = -__builtin_inff();
            weight[r] = 0;
        }
        memset(mixed, 0, rows * E_pad * 4);
    }
    void allocate(Arena &arena) {
        arena.take(q, rows * D_pad);
        arena.take(k_padded, TILE_KEYS * D_pad);
        arena.take(v, TILE_KEYS * E_pad);
        arena.take(scores, rows * TILE_KEYS);
        arena.take(mixed, rows * E_pad);
        arena.take(top, rows);
        arena.take(weight, rows);
    }

    // Where the next keys and values lie, to be asked for little by little: the hardware does not find them, and drops
    // requests that come all at once. Half of the time of a decode step out of memory, measured on Zen 4.
    void plan_prefetch(const Tile &next, long key) {
        long count = next.key_last - key < TILE_KEYS ? next.key_last - key : TILE_KEYS;
        num_ahead = next_ahead = 0;
        each_place(a, next, key, count, [&](long block, long offset) {
            ahead[num_ahead++] = (const char *)a.k_cache.template at<T>(block, offset, next.kv_head);
            ahead[num_ahead++] = (const char *)a.v_cache.template at<T>(block, offset, next.kv_head);
        });
        long calls = rows * (TILE_KEYS / LANES);
        ahead_per_call = (num_ahead + calls - 1) / calls;
    }
    INLINE void prefetch_some(long calls) {
        long stop = next_ahead + ahead_per_call * calls < num_ahead ? next_ahead + ahead_per_call * calls : num_ahead;
        for (; next_ahead < stop; next_ahead++) {
            long bytes = (next_ahead & 1 ? a.v_cache : a.k_cache).head_stride * tile.num_kv_heads * (long)sizeof(T);
            for (long at = 0; at < bytes; at += 64) __builtin_prefetch(ahead[next_ahead] + at, 0, 2);
        }
    }

    // R rows times LANES keys; R * KEYS accumulators stay in registers.
    template <int R> INLINE void dot_block(long row, long j, const T *const *keys) {
        typedef Dot<T> P;
        constexpr int KEYS = R == 1 ? LANES : LANES / 2;
        f32v halves[LANES / KEYS][R];
        for (int half = 0; half < LANES / KEYS; half++) {
            f32v acc[R][KEYS] = {};
            for (long d = 0; d < D; d += P::WIDTH) {
                typename P::Operand qs[R];
                for (int r = 0; r < R; r++) qs[r] = P::get(q + (row + r) * D_pad + d);
                for (int i = 0; i < KEYS; i++) {
                    typename P::Operand k = P::get(keys[half * KEYS + i] + d);
                    for (int r = 0; r < R; r++) acc[r][i] = P::mad(acc[r][i], k, qs[r]);
                }
            }
            for (int r = 0; r < R; r++) halves[half][r] = pair_tree(acc[r]);
        }
        for (int r = 0; r < R; r++)
            store(scores + (row + r) * TILE_KEYS + j,
                  R == 1 ? halves[0][r] : pair_sums(halves[0][r], halves[LANES / KEYS - 1][r]));
        prefetch_some(R);
    }
    // Columns past `count` get anything.
    void score(long first_row, long count) {
        if (D % Dot<T>::WIDTH) {
            for (long j = 0; j < count; j++) {
                memcpy((void *)(k_padded + j * D_pad), k_rows[j], D * sizeof(T));
                memset((void *)(k_padded + j * D_pad + D), 0, (D_pad - D) * sizeof(T));
                k_rows[j] = k_padded + j * D_pad;
            }
        }
        for (long j = 0; j < count; j += LANES) {
            const T *keys[LANES];
            for (long i = 0; i < LANES; i++) keys[i] = k_rows[j + i < count ? j + i : count - 1];
            long row = first_row, last = first_row + head_rows;
            for (; row + 3 <= last; row += 3) dot_block<3>(row, j, keys);
            if (row + 2 == last)
                dot_block<2>(row, j, keys);
            else if (row + 1 == last)
                dot_block<1>(row, j, keys);
        }
    }
    // Scores of one row become shares exp(score - top); keys outside [low, high) of the tile get 0.
    void soften(long r, long low, long high) {
        float *row = scores + r * TILE_KEYS;
        i32v lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        f32v best = minus_infinity();
        for (long j = 0; j < TILE_KEYS; j += LANES) {
            f32v s = load(row + j) * float(a.scale);
            if (a.softcap > 0) s = float(a.softcap) * tanh(s / float(a.softcap));
            i32v at = lane + int32_t(j);
            s = select((at >= int32_t(low)) & (at < int32_t(high)), s, minus_infinity());
            best = larger(best, s);
            store(row + j, s);
        }
        float new_top = top[r];
        for (int i = 0; i < LANES; i++) new_top = best[i] > new_top ? best[i] : new_top;
        f32v total = {};
        for (long j = 0; j < TILE_KEYS; j += LANES) {
            f32v share = exp(load(row + j) - new_top);
            total += share;
            store(row + j, share);
        }
        if (new_top != top[r]) {
            float fade = exp(splat(top[r] - new_top))[0];
            for (long e = 0; e < E; e += LANES) store(mixed + r * E_pad + e, load(mixed + r * E_pad + e) * fade);
            weight[r] *= fade;
            top[r] = new_top;
        }
        weight[r] += sum(total);
    }
    // mixed += shares x values
    void mix(long first_row, long count) {
        for (long j = 0; j < count; j++) {
            v_wide[j] = v + j * E_pad;
            if (sizeof(T) == 4 && E % LANES == 0)
                v_wide[j] = (const float *)v_rows[j];
            else
                widen(v_rows[j], v + j * E_pad, E);
        }
        const float *shares = scores + first_row * TILE_KEYS;
        multiply_add([=](long r, long k) INLINE_LAMBDA { return shares[r * TILE_KEYS + k]; },
                     [this](long k) INLINE_LAMBDA { return v_wide[k]; }, mixed + first_row * E_pad, E_pad, head_rows,
                     (E + LANES - 1) / LANES * LANES, count);
    }
    // False if the table names a block that is none. `next`: the tile that probably comes next, or null.
    bool run(const Tile *next) {
        for (long key = tile.key_first; key < tile.key_last; key += TILE_KEYS) {
            long count = tile.key_last - key < TILE_KEYS ? tile.key_last - key : TILE_KEYS;
            if (key + TILE_KEYS < tile.key_last)
                plan_prefetch(tile, key + TILE_KEYS);
            else if (next)
                plan_prefetch(*next, next->key_first);
            for (long g = 0; g < tile.num_kv_heads; g++) {
                if (!this->find_keys(tile.kv_head + g, key, count)) return false;
                score(g * head_rows, count);
                for (long r = g * head_rows; r < (g + 1) * head_rows; r++) {
                    long position = tile.position + tile.row_token(a, r);
                    long high = position + 1 - key < count ? position + 1 - key : count;
                    long low = a.window > 0 ? position - a.window + 1 - key : 0;
                    if (low < high)
                        soften(r, low, high);
                    else
                        memset(scores + r * TILE_KEYS, 0, TILE_KEYS * 4);
                }
                mix(g * head_rows, count);
            }
        }
        for (long r = 0; r < rows; r++) this->finish_row(r, mixed + r * E_pad, top[r], weight[r]);
        return true;
    }
};

struct Plan {
    Tile *tiles;
    long num_tiles, num_parts;
    double work;  // multiplications
};

// Tiles of all sequences; only counts them where `plan.tiles` is null. Returns an error number.
long make_plan(const Args &a, Plan &plan) {
    const long group = a.group(), most = group < MAX_ROWS ? MAX_ROWS / group : 1;
    plan.num_tiles = plan.num_parts = plan.work = 0;
    for (long s = 0; s < a.seqs; s++) {
        long first = a.query_start[s], stop = a.query_start[s + 1], length = a.seq_lens[s];
        if (first < 0 || stop < first || stop > a.tokens) return BAD_QUERY_START;
        if (length > a.table_width * a.block_tokens) return BAD_LENGTH;
        long num_new = stop - first < length ? stop - first : length;
        bool is_split = (num_new + most - 1) / most * a.kv_heads < ENOUGH_TILES;
        for (long t = stop - num_new; t < stop; t += most) {
            long count = stop - t < most ? stop - t : most, position = length - (stop - t);
            long low = a.window > 0 && position >= a.window ? position - a.window + 1 : 0, high = position + count;
            bool is_few = count * group <= FEW_ROWS;
            long kv_heads = is_few ? (a.kv_heads < FEW_ROWS ? a.kv_heads : FEW_ROWS) : 1;
            long chunk = is_split || is_few ? CHUNK_KEYS : high;
            bool is_part = high - low > chunk;
            plan.work += double(high - low) * a.heads * count * (a.k_size + a.v_size);
            for (long g = 0; g < a.kv_heads; g += kv_heads) {
                long some = a.kv_heads - g < kv_heads ? a.kv_heads - g : kv_heads;
                for (long key = low; key < high; key += chunk) {
                    long last = key + chunk < high ? key + chunk : high, part = is_part ? plan.num_parts : -1;
                    if (plan.tiles)
                        plan.tiles[plan.num_tiles] = {int(s),    int(t),   int(count), int(position), int(g),
                                                      int(some), int(key), int(last),  int(part)};
                    plan.num_tiles++;
                    if (is_part) plan.num_parts += count * group * some;
                }
            }
        }
    }
    return 0;
}

// Tiles of the same rows with different keys: their partial results become rows of the output.
template <class T> void merge(const Args &a, const Tile *tiles, long num_tiles, float *parts) {
    const long E_pad = padded(a.v_size), stride = E_pad + 2, rows = tiles->head_rows(a) * tiles->num_kv_heads;
    for (long r = 0; r < rows; r++) {
        float top = -__builtin_inff(), weight = 0;
        for (long i = 0; i < num_tiles; i++) {
            float other = parts[(tiles[i].part + r) * stride + E_pad];
            top = other > top ? other : top;
        }
        float *total = parts + (tiles->part + r) * stride;
        for (long i = 0; i < num_tiles; i++) {
            const float *part = parts + (tiles[i].part + r) * stride;
            float share = part[E_pad] == top ? 1.0f : exp(splat(part[E_pad] - top))[0];
            weight += part[E_pad + 1] * share;
            for (long e = 0; e < a.v_size; e += LANES)
                store(total + e, i ? load(total + e) + load(part + e) * share : load(part + e) * share);
        }
        TileBase<T>::write_row(a, *tiles, r, total, weight);
    }
}

// Rows of q that belong to no sequence, or that its length does not cover.
template <class T> void clear_rows(const Args &a) {
    auto clear = [&a](long first, long stop) {
        long row = a.heads * a.v_size;
        if (first < stop) memset((void *)((T *)a.out + first * row), 0, (stop - first) * row * sizeof(T));
    };
    clear(0, a.seqs ? a.query_start[0] : a.tokens);
    for (long s = 0; s < a.seqs; s++) {
        long length = a.seq_lens[s] < 0 ? 0 : a.seq_lens[s];
        clear(a.query_start[s], a.query_start[s + 1] - length);
    }
    if (a.seqs) clear(a.query_start[a.seqs], a.tokens);
}

template <class T> long attend(const Args &a) {
    Plan plan = {};
    long bad = make_plan(a, plan);
    if (bad) return bad;
    plan.tiles = (Tile *)scratch<1>(plan.num_tiles * sizeof(Tile) + 1);
    float *parts = (float *)scratch<2>(plan.num_parts * (padded(a.v_size) + 2) * 4 + 1);
    make_plan(a, plan);
    bool is_broken = false;
    parallel_for(plan.num_tiles, plan.work > 4 * MIN_TEAM_VALUES, [&](long i) {
        const Tile &tile = plan.tiles[i], *next = i + 1 < plan.num_tiles ? &tile + 1 : nullptr;
        bool done = tile.head_rows(a) <= FEW_ROWS ? FewRows<T>(a, tile, parts).run(next)
                                                  : ManyRows<T>(a, tile, parts).run(next);
        if (!done) __atomic_store_n(&is_broken, true, __ATOMIC_RELAXED);
    });
    if (is_broken) return BAD_BLOCK;
    for (long i = 0, next; i < plan.num_tiles; i = next) {
        for (next = i + 1; next < plan.num_tiles && plan.tiles[next].same_rows(plan.tiles[i]);) next++;
        if (plan.tiles[i].part >= 0) merge<T>(a, plan.tiles + i, next - i, parts);
    }
    clear_rows<T>(a);
    return 0;
}

}  // namespace

OSTINATO_KERNEL(paged_attention, Args, attend)
