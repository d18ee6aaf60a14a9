// A tile of paged_attention.cpp: its rows, its keys, where its results go.
#pragma once
#include "native_math.h"
#include "paged_cache.h"

namespace {

constexpr long TILE_KEYS = 64;

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

}  // namespace
