// Causal attention of new tokens over the paged cache, tile by tile with an online softmax; see paged_attention.py.
//
// A tile is some tokens of one sequence times the query heads of one KV head, its rows, and TILE_KEYS keys at a time.
// - FewRows (decode): scores are dot products over the head. A tile has all KV heads, whose keys lie side by side.
// - ManyRows (prefill): vector lanes are rows, so neither K nor V is turned and the softmax needs no sums over lanes.
// Long contexts are split into chunks of keys and merged; how a sequence is split depends on that sequence only.
#include "dot.h"
#include "multiply_add.h"
#include "native_math.h"
#include "paged_cache.h"

namespace {

constexpr long TILE_KEYS = 64, CHUNK_KEYS = 128;
constexpr long MAX_ROWS = 4 * LANES;  // of one KV head
constexpr long FEW_ROWS = 8;          // most rows of one KV head for FewRows
constexpr long ENOUGH_TILES = 16;     // prefill of a sequence is split into chunks of keys if it has fewer tiles
constexpr long BAD_QUERY_START = 1, BAD_BLOCK = 2, BAD_LENGTH = 3;  // native_calls.py has the words

struct Args {
    Heads q;
    Plane k_cache, v_cache;
    const int32_t *tables;
    int64_t table_stride, table_width;
    const int32_t *seq_lens, *query_start;
    void *out;
    int64_t tokens, heads, kv_heads, k_size, v_size, seqs, blocks, block_tokens;
    double scale;
    int64_t window;
    double softcap;

    long group() const { return heads / kv_heads; }
};

struct Tile {
    int32_t seq, first, count;      // tokens of q
    int32_t position;               // of the first token
    int32_t kv_head, num_kv_heads;  // rows are ordered by KV head, token, head of the group
    int32_t key_first, key_last;
    int32_t part;  // row among the partial results, or -1: the tile has all its keys

    INLINE long head_rows(const Args &a) const { return count * a.group(); }
    INLINE long row_token(const Args &a, long row) const { return row % head_rows(a) / a.group(); }
    INLINE long row_head(const Args &a, long row) const {
        return (kv_head + row / head_rows(a)) * a.group() + row % a.group();
    }
    bool same_rows(const Tile &other) const {
        return seq == other.seq && kv_head == other.kv_head && first == other.first;
    }
};

INLINE long padded(long size) { return (size + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
INLINE f32v minus_infinity() { return splat(-__builtin_inff()); }

// Hands out parts of the thread's scratch memory. The first round (base null) only counts.
struct Arena {
    char *base = nullptr;
    size_t used = 0;
    template <class T> void take(T *&to, long count) {
        to = (T *)(base + used);
        used += (count * sizeof(T) + 63) & ~size_t(63);
    }
};

// Calls visit(block, offset) for the places of `count` keys from position `key` on; false if the table names a block
// that is none.
template <class Visit>
INLINE bool each_place(const Args &a, const Tile &tile, long key, long count, const Visit &visit) {
    const int32_t *table = a.tables + tile.seq * a.table_stride;
    for (long at = key / a.block_tokens, offset = key % a.block_tokens; count > 0; at++, offset = 0) {
        long block = table[at];
        if (block < 0 || block >= a.blocks) return false;
        for (; offset < a.block_tokens && count > 0; offset++, count--) visit(block, offset);
    }
    return true;
}

// What both kinds of tiles share: addresses of keys and values, results.
template <class T> struct TileBase {
    const Args &a;
    const Tile &tile;
    float *parts;
    const long head_rows, rows, D, E, D_pad, E_pad;
    const T *k_rows[TILE_KEYS], *v_rows[TILE_KEYS];

    TileBase(const Args &a, const Tile &tile, float *parts)
        : a(a),
          tile(tile),
          parts(parts),
          head_rows(tile.head_rows(a)),
          rows(head_rows * tile.num_kv_heads),
          D(a.k_size),
          E(a.v_size),
          D_pad(padded(D)),
          E_pad(padded(E)) {}

    const T *query(long row) const { return a.q.at<T>(tile.first + tile.row_token(a, row), tile.row_head(a, row)); }
    bool find_keys(long kv_head, long key, long count) {
        long j = 0;
        return each_place(a, tile, key, count, [&](long block, long offset) {
            k_rows[j] = a.k_cache.at<T>(block, offset, kv_head);
            v_rows[j++] = a.v_cache.at<T>(block, offset, kv_head);
        });
    }
    // mixed: the row of the output, E_pad values that may be overwritten, not yet divided by their weight
    void finish_row(long row, float *mixed, float top, float weight) const {
        if (tile.part < 0) return write_row(a, tile, row, mixed, weight);
        float *part = parts + (tile.part + row) * (E_pad + 2);
        memcpy(part, mixed, E_pad * 4);
        part[E_pad] = top;
        part[E_pad + 1] = weight;
    }
    static void write_row(const Args &a, const Tile &tile, long row, float *mixed, float weight) {
        float share = weight > 0 ? 1.0f / weight : 0.0f;
        for (long e = 0; e < a.v_size; e += LANES) store(mixed + e, load(mixed + e) * share);
        narrow(mixed, (T *)a.out + ((tile.first + tile.row_token(a, row)) * a.heads + tile.row_head(a, row)) * a.v_size,
               a.v_size);
    }
};

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

template <class T> struct ManyRows : TileBase<T> {
    typedef TileBase<T> Base;
    using Base::a, Base::tile, Base::rows, Base::D, Base::E, Base::D_pad, Base::E_pad, Base::k_rows, Base::v_rows;
    const long width;                          // rows, padded to vectors
    float *q, *scores, *mixed, *top, *weight;  // [D, width], [TILE_KEYS, width], [E, width], [width], [width]
    int32_t *position;                         // [width]
    float *k, *v;                              // [TILE_KEYS, D_pad], [TILE_KEYS, E_pad], widened from bfloat16
    const float *k_wide[TILE_KEYS], *v_wide[TILE_KEYS];

    ManyRows(const Args &a, const Tile &tile, float *parts)
        : Base(a, tile, parts), width((rows + LANES - 1) / LANES * LANES) {
        Arena arena;
        allocate(arena);
        arena = {(char *)scratch<0>(arena.used)};
        allocate(arena);
        memset(q, 0, D * width * 4);
        memset(mixed, 0, E * width * 4);
        for (long r = 0; r < width; r++) {
            long row = r < rows ? r : rows - 1;
            const T *from = this->query(row);
            for (long d = 0; d < D; d++) q[d * width + r] = to_float(from[d]) * float(a.scale);
            position[r] = tile.position + tile.row_token(a, row);
            top[r] = -__builtin_inff();
            weight[r] = 0;
        }
    }
    void allocate(Arena &arena) {
        arena.take(q, D * width);
        arena.take(scores, TILE_KEYS * width);
        arena.take(mixed, E * width);
        arena.take(top, width);
        arena.take(weight, width);
        arena.take(position, width);
        arena.take(k, TILE_KEYS * D_pad);
        arena.take(v, TILE_KEYS * E_pad);
    }
    void widen_keys(long count) {
        for (long j = 0; j < count; j++) {
            k_wide[j] = sizeof(T) == 4 ? (const float *)k_rows[j] : k + j * D_pad;
            v_wide[j] = sizeof(T) == 4 ? (const float *)v_rows[j] : v + j * E_pad;
            if (sizeof(T) != 4) widen(k_rows[j], k + j * D_pad, D), widen(v_rows[j], v + j * E_pad, E);
        }
    }
    // One vector of rows: scores of `count` keys from `key` on become shares.
    void soften(long r, long key, long count, bool all_visible) {
        const i32v last = load_as<i32v>(position + r), first = a.window > 0 ? last - int32_t(a.window) : last * 0 - 1;
        const f32v old_top = load(top + r);
        f32v new_top = old_top;
        for (long j = 0; j < count; j++) {
            f32v s = load(scores + j * width + r);
            if (a.softcap > 0) s = float(a.softcap) * tanh(s / float(a.softcap));
            if (!all_visible) {
                i32v at = i32v{} + int32_t(key + j);
                s = select((at <= last) & (at > first), s, minus_infinity());
            }
            new_top = larger(new_top, s);
            store(scores + j * width + r, s);
        }
        const f32v base =
            select(new_top == minus_infinity(), f32v{}, new_top);  // no visible key yet: exp(-inf - 0) = 0
        const f32v fade = exp(old_top - base);
        f32v total = load(weight + r) * fade;
        for (long j = 0; j < count; j++) {
            f32v share = exp(load(scores + j * width + r) - base);
            total += share;
            store(scores + j * width + r, share);
        }
        store(weight + r, total);
        store(top + r, new_top);
        for (long e = 0; e < E; e++) store(mixed + e * width + r, load(mixed + e * width + r) * fade);
    }
    bool run(const Tile *) {
        for (long key = tile.key_first; key < tile.key_last; key += TILE_KEYS) {
            long count = tile.key_last - key < TILE_KEYS ? tile.key_last - key : TILE_KEYS;
            if (!this->find_keys(tile.kv_head, key, count)) return false;
            widen_keys(count);
            memset(scores, 0, count * width * 4);
            multiply_add([this](long j, long d) INLINE_LAMBDA { return k_wide[j][d]; },
                         [this](long d) INLINE_LAMBDA { return q + d * width; }, scores, width, count, width, D);
            bool all_visible =
                key + count - 1 <= tile.position && !(a.window > 0 && key <= tile.position + tile.count - 1 - a.window);
            for (long r = 0; r < width; r += LANES) soften(r, key, count, all_visible);
            multiply_add([this](long e, long j) INLINE_LAMBDA { return v_wide[j][e]; },
                         [this](long j) INLINE_LAMBDA { return scores + j * width; }, mixed, width, E, width, count);
        }
        float *row = k;  // no longer needed
        if (E_pad > TILE_KEYS * D_pad) row = v;
        for (long r = 0; r < rows; r++) {
            for (long e = 0; e < E; e++) row[e] = mixed[e * width + r];
            this->finish_row(r, row, top[r], weight[r]);
        }
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
