// Causal attention of new tokens over the paged cache, tile by tile with an online softmax; see paged_attention.py.
//
// A tile is up to MAX_ROWS query rows (some tokens of one sequence times the heads of one KV head) against TILE_KEYS
// keys at a time. Scores of few rows are dot products over the head; of many rows, products with K turned once.
// Long contexts of few rows are split into chunks of keys, merged at the end; a split depends on its sequence only.
#include "dot.h"
#include "native_math.h"
#include "paged_cache.h"

namespace {

constexpr long TILE_KEYS = 64, MAX_ROWS = 96, CHUNK_KEYS = 256;
constexpr long FEW_ROWS = 8;      // from here on turning K pays
constexpr long ENOUGH_TILES = 16; // a sequence with fewer is split into chunks of keys
constexpr long BAD_QUERY_START = 1, BAD_BLOCK = 2, BAD_LENGTH = 3;

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
};

struct Tile {
    int32_t seq, kv_head, first, count;  // tokens of q
    int32_t position;                    // of the first token
    int32_t key_first, key_last;
    int32_t part;                        // place among the partial results, or -1: the tile has all its keys
};

INLINE long padded(long size) { return (size + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// C [rows, V vectors] += A [rows, K] x B, whose rows are given by address. ROWS * V accumulators stay in registers.
template <int ROWS, int V>
INLINE void multiply_block(const float *a, long a_stride, const float *const *b, long column, float *c, long c_stride, long K) {
    f32v acc[ROWS][V];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(c + r * c_stride + v * LANES);
    for (long k = 0; k < K; k++) {
        f32v row[V];
        for (int v = 0; v < V; v++) row[v] = load(b[k] + column + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) acc[r][v] += a[r * a_stride + k] * row[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) store(c + r * c_stride + v * LANES, acc[r][v]);
}
template <int V>
INLINE void multiply_columns(const float *a, long a_stride, const float *const *b, long column, float *c, long c_stride, long rows, long K) {
    constexpr int MOST = NUM_REGISTERS * 3 / 4 / 4;
    long r = 0;
    for (; r + MOST <= rows; r += MOST)
        multiply_block<MOST, V>(a + r * a_stride, a_stride, b, column, c + r * c_stride, c_stride, K);
    for (; r + 2 <= rows; r += 2)
        multiply_block<2, V>(a + r * a_stride, a_stride, b, column, c + r * c_stride, c_stride, K);
    if (r < rows) multiply_block<1, V>(a + r * a_stride, a_stride, b, column, c + r * c_stride, c_stride, K);
}
void multiply_add(const float *a, long a_stride, const float *const *b, float *c, long c_stride, long rows, long columns, long K) {
    long at = 0;
    for (; at + 4 * LANES <= columns; at += 4 * LANES) multiply_columns<4>(a, a_stride, b, at, c + at, c_stride, rows, K);
    for (; at < columns; at += LANES) multiply_columns<1>(a, a_stride, b, at, c + at, c_stride, rows, K);
}

// Everything one thread needs for a tile of `rows` rows; in its scratch memory.
template <class T> struct Workspace {
    T *q_narrow;    // [rows, padded D], for dot products
    float *q;       // [rows, D], for products with K turned
    float *turned;  // [D, TILE_KEYS]
    T *k_padded;    // [TILE_KEYS, padded D]
    float *v;       // [TILE_KEYS, padded E]
    float *scores;  // [rows, TILE_KEYS]
    float *mixed;   // [rows, padded E]
    float *top, *weight;  // [rows]
    const float **turned_rows;

    Workspace(long rows, long D, long E) {
        const size_t D_pad = padded(D), E_pad = padded(E), R = rows;
        size_t used = 0;
        auto place = [&used](size_t bytes) {
            size_t at = used;
            used += (bytes + 63) & ~size_t(63);
            return at;
        };
        size_t at[] = {place(sizeof(T) * R * D_pad), place(4 * R * D_pad), place(4 * D * TILE_KEYS), place(sizeof(T) * TILE_KEYS * D_pad),
                       place(4 * TILE_KEYS * E_pad), place(4 * R * TILE_KEYS), place(4 * R * E_pad), place(4 * R), place(4 * R),
                       place(8 * D)};
        void **fields[] = {(void **)&q_narrow, (void **)&q, (void **)&turned, (void **)&k_padded, (void **)&v,
                           (void **)&scores, (void **)&mixed, (void **)&top, (void **)&weight, (void **)&turned_rows};
        char *base = (char *)scratch<0>(used);
        for (int i = 0; i < 10; i++) *fields[i] = base + at[i];
        for (long d = 0; d < D; d++) turned_rows[d] = turned + d * TILE_KEYS;
    }
};

template <class T> struct TileRun {
    const Args &a;
    const Tile &tile;
    long group, rows, D, E, D_pad, E_pad;
    Workspace<T> w;
    const T *k_rows[TILE_KEYS], *v_rows[TILE_KEYS];
    const float *v_wide[TILE_KEYS];

    TileRun(const Args &a, const Tile &tile)
        : a(a), tile(tile), group(a.heads / a.kv_heads), rows(tile.count * group), D(a.k_size), E(a.v_size),
          D_pad(padded(D)), E_pad(padded(E)), w(rows, D, E) {}

    const T *query(long row) const { return a.q.at<T>(tile.first + row / group, tile.kv_head * group + row % group); }

    // Addresses of `count` keys and values from position `key` on; false if a table names a block that is none.
    bool find_keys(long key, long count) {
        const int32_t *table = a.tables + tile.seq * a.table_stride;
        for (long j = 0, in_table = key / a.block_tokens, offset = key % a.block_tokens; j < count; in_table++, offset = 0) {
            long block = table[in_table];
            if (block < 0 || block >= a.blocks) return false;
            for (; offset < a.block_tokens && j < count; offset++, j++) {
                k_rows[j] = a.k_cache.at<T>(block, offset, tile.kv_head);
                v_rows[j] = a.v_cache.at<T>(block, offset, tile.kv_head);
            }
        }
        return true;
    }

    // scores = q k^T for the tile's keys; columns past `count` hold anything.
    void dot_scores(long count) {
        typedef Dot<T> P;
        if (D % P::WIDTH) {
            for (long j = 0; j < count; j++) {
                memcpy((void *)(w.k_padded + j * D_pad), k_rows[j], D * sizeof(T));
                memset((void *)(w.k_padded + j * D_pad + D), 0, (D_pad - D) * sizeof(T));
                k_rows[j] = w.k_padded + j * D_pad;
            }
        }
        for (long j = 0; j < count; j += LANES) {
            const T *keys[LANES];
            for (long i = 0; i < LANES; i++) keys[i] = k_rows[j + i < count ? j + i : count - 1];
            for (long r = 0; r < rows; r++) {
                f32v acc[LANES] = {};
                for (long d = 0; d < D; d += P::WIDTH) {
                    typename P::Operand q = P::get(w.q_narrow + r * D_pad + d);
                    for (int i = 0; i < LANES; i++) acc[i] = P::mad(acc[i], P::get(keys[i] + d), q);
                }
                store(w.scores + r * TILE_KEYS + j, transposed_sum(acc));
            }
        }
    }
    void turned_scores(long count) {
        for (long j = 0; j < count; j++)
            for (long d = 0; d < D; d++) w.turned[d * TILE_KEYS + j] = to_float(k_rows[j][d]);
        memset(w.scores, 0, rows * TILE_KEYS * 4);
        multiply_add(w.q, D_pad, w.turned_rows, w.scores, TILE_KEYS, rows, TILE_KEYS, D);
    }

    // Scores of one row become shares exp(score - top); keys outside [low, high) of the tile get 0.
    void soften(long r, long low, long high) {
        float *scores = w.scores + r * TILE_KEYS, *mixed = w.mixed + r * E_pad;
        f32v best = splat(-__builtin_inff());
        i32v lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        float scale = a.scale, cap = a.softcap;
        for (long j = 0; j < TILE_KEYS; j += LANES) {
            f32v s = load(scores + j) * scale;
            if (cap > 0) s = cap * tanh(s / cap);
            i32v at = lane + int32_t(j);
            s = select((at >= int32_t(low)) & (at < int32_t(high)), s, splat(-__builtin_inff()));
            best = larger(best, s);
            store(scores + j, s);
        }
        float top = w.top[r];
        for (int i = 0; i < LANES; i++) top = best[i] > top ? best[i] : top;
        float fade = top == w.top[r] ? 1.0f : exp(splat(w.top[r] - top))[0];
        f32v total = {};
        for (long j = 0; j < TILE_KEYS; j += LANES) {
            f32v share = exp(load(scores + j) - top);
            total += share;
            store(scores + j, share);
        }
        w.weight[r] = w.weight[r] * fade + sum(total);
        w.top[r] = top;
        if (fade != 1.0f)
            for (long e = 0; e < E_pad; e += LANES) store(mixed + e, load(mixed + e) * fade);
    }

    void run(float *parts, int *error) {
        bool few = rows < FEW_ROWS;
        for (long r = 0; r < rows; r++) {
            if (few) {
                memcpy((void *)(w.q_narrow + r * D_pad), query(r), D * sizeof(T));
                memset((void *)(w.q_narrow + r * D_pad + D), 0, (D_pad - D) * sizeof(T));
            } else {
                widen(query(r), w.q + r * D_pad, D);
            }
            w.top[r] = -__builtin_inff();
            w.weight[r] = 0;
        }
        memset(w.mixed, 0, rows * E_pad * 4);
        for (long key = tile.key_first; key < tile.key_last; key += TILE_KEYS) {
            long count = tile.key_last - key < TILE_KEYS ? tile.key_last - key : TILE_KEYS;
            if (!find_keys(key, count)) {
                __atomic_store_n(error, BAD_BLOCK, __ATOMIC_RELAXED);
                return;
            }
            few ? dot_scores(count) : turned_scores(count);
            for (long r = 0; r < rows; r++) {
                long position = tile.position + r / group;
                long high = position + 1 - key < count ? position + 1 - key : count;
                long low = a.window > 0 ? position - a.window + 1 - key : 0;
                if (high > 0 && low < high) soften(r, low, high);
                else memset(w.scores + r * TILE_KEYS, 0, TILE_KEYS * 4);
            }
            mix(count);
        }
        finish(parts);
    }

    // mixed += shares x values
    void mix(long count) {
        for (long j = 0; j < count; j++) {
            float *wide = w.v + j * E_pad;
            if (sizeof(T) == 4 && E % LANES == 0) {
                v_wide[j] = (const float *)v_rows[j];
            } else {
                widen(v_rows[j], wide, E);
                v_wide[j] = wide;
            }
        }
        multiply_add(w.scores, TILE_KEYS, v_wide, w.mixed, E_pad, rows, (E + LANES - 1) / LANES * LANES, count);
    }

    void finish(float *parts) {
        for (long r = 0; r < rows; r++) {
            if (tile.part >= 0) {
                float *part = parts + (tile.part + r) * (E_pad + 2);
                part[0] = w.top[r];
                part[1] = w.weight[r];
                memcpy(part + 2, w.mixed + r * E_pad, E_pad * 4);
            } else {
                write_row(a, tile, r, w.mixed + r * E_pad, w.weight[r]);
            }
        }
    }
    static void write_row(const Args &a, const Tile &tile, long r, float *mixed, float weight) {
        long group = a.heads / a.kv_heads, E_pad = padded(a.v_size);
        float share = weight > 0 ? 1.0f / weight : 0.0f;
        for (long e = 0; e < E_pad; e += LANES) store(mixed + e, load(mixed + e) * share);
        long row = (tile.first + r / group) * a.heads + tile.kv_head * group + r % group;
        narrow(mixed, (T *)a.out + row * a.v_size, a.v_size);
    }
};

bool same_rows(const Tile &a, const Tile &b) { return a.seq == b.seq && a.kv_head == b.kv_head && a.first == b.first; }

struct Plan {
    Tile *tiles;
    long num_tiles, num_parts;
    double work;  // multiplications
};

// Tiles of all sequences; only counts them where `tiles` is null. Returns an error number.
long plan(const Args &a, Plan &plan) {
    long group = a.heads / a.kv_heads, most = group < MAX_ROWS ? MAX_ROWS / group : 1;
    plan.num_tiles = plan.num_parts = plan.work = 0;
    for (long s = 0; s < a.seqs; s++) {
        long first = a.query_start[s], stop = a.query_start[s + 1], length = a.seq_lens[s];
        if (first < 0 || stop < first || stop > a.tokens) return BAD_QUERY_START;
        if (length > a.table_width * a.block_tokens) return BAD_LENGTH;
        long num_new = stop - first < length ? stop - first : length;
        bool is_split = (num_new + most - 1) / most * a.kv_heads < ENOUGH_TILES;
        for (long t = stop - num_new; t < stop; t += most) {
            long count = stop - t < most ? stop - t : most, position = length - (stop - t);
            long low = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0, high = position + count;
            long chunk = is_split ? CHUNK_KEYS : high;
            bool is_part = high - low > chunk;
            plan.work += double(high - low) * a.heads * count * (a.k_size + a.v_size);
            for (long g = 0; g < a.kv_heads; g++)
                for (long key = low; key < high; key += chunk) {
                    long last = key + chunk < high ? key + chunk : high;
                    if (plan.tiles)
                        plan.tiles[plan.num_tiles] = {int(s), int(g), int(t), int(count), int(position), int(key), int(last),
                                                      is_part ? int(plan.num_parts) : -1};
                    plan.num_tiles++;
                    if (is_part) plan.num_parts += count * group;
                }
        }
    }
    return 0;
}

// One tile whose keys were split: its `chunks` partial results become its rows of the output.
template <class T> void merge(const Args &a, const Tile *chunks, long num_chunks, float *parts) {
    long width = padded(a.v_size) + 2, rows = chunks->count * (a.heads / a.kv_heads);
    for (long r = 0; r < rows; r++) {
        float top = -__builtin_inff(), weight = 0;
        for (long c = 0; c < num_chunks; c++) {
            float other = parts[(chunks[c].part + r) * width];
            top = other > top ? other : top;
        }
        float *sum = parts + (chunks->part + r) * width + 2;
        for (long c = 0; c < num_chunks; c++) {
            float *part = parts + (chunks[c].part + r) * width;
            float share = part[0] == top ? 1.0f : exp(splat(part[0] - top))[0];
            weight += part[1] * share;
            for (long e = 0; e < width - 2; e += LANES)
                store(sum + e, load(part + 2 + e) * share + (c ? load(sum + e) : splat(0.0f)));
        }
        TileRun<T>::write_row(a, *chunks, r, sum, weight);
    }
}

template <class T> void clear(const Args &a, long first, long stop) {
    if (first < stop) memset((void *)((T *)a.out + first * a.heads * a.v_size), 0, (stop - first) * a.heads * a.v_size * sizeof(T));
}

template <class T> long attend(const Args &a) {
    Plan todo = {};
    long bad = plan(a, todo);
    if (bad) return bad;
    todo.tiles = (Tile *)scratch<1>(todo.num_tiles * sizeof(Tile) + 64);
    float *parts = (float *)scratch<2>(todo.num_parts * (padded(a.v_size) + 2) * 4 + 64);
    plan(a, todo);
    int error = 0;
    parallel_for(todo.num_tiles, todo.work > 4 * MIN_TEAM_VALUES, [&](long i) {
        TileRun<T>(a, todo.tiles[i]).run(parts, &error);
    });
    if (error) return error;
    for (long i = 0; i < todo.num_tiles;) {
        long next = i + 1;
        if (todo.tiles[i].part >= 0) {
            while (next < todo.num_tiles && same_rows(todo.tiles[next], todo.tiles[i])) next++;
            merge<T>(a, todo.tiles + i, next - i, parts);
        }
        i = next;
    }
    clear<T>(a, 0, a.seqs ? a.query_start[0] : a.tokens);
    for (long s = 0; s < a.seqs; s++) {
        long first = a.query_start[s], stop = a.query_start[s + 1], length = a.seq_lens[s] < 0 ? 0 : a.seq_lens[s];
        clear<T>(a, first, stop - (stop - first < length ? stop - first : length));
    }
    if (a.seqs) clear<T>(a, a.query_start[a.seqs], a.tokens);
    return 0;
}

}  // namespace

OSTINATO_KERNEL(paged_attention, Args, attend)
