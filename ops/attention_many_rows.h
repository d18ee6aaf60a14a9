// Prefill: vector lanes are rows of a tile, so neither K nor V is turned and the softmax needs no sums over lanes.
#pragma once
#include "attention_tile.h"
#include "multiply_add.h"

namespace {

template <class T> struct ManyRows : TileBase<T> {
    typedef TileBase<T> Base;
    using Base::a, Base::tile, Base::rows, Base::D, Base::E, Base::D_pad, Base::E_pad, Base::k_rows, Base::v_rows;
    typedef Factors<T> F;
    static constexpr int STEP = F::STEP;       // keys, or values of a head, that meet in one product
    const long width;                          // rows, padded to vectors
    float *q, *scores, *mixed, *top, *weight;  // [D / STEP, width], [TILE_KEYS, width], [E, width], [width], [width]
    int32_t *position;                         // [width]
    typename F::Scalar *k, *v;                 // [TILE_KEYS, D_pad], [TILE_KEYS, E_pad], where rows must be made
    const typename F::Scalar *k_at[TILE_KEYS], *v_at[TILE_KEYS];
    float *row;  // [E_pad]

    ManyRows(const Args &a, const Tile &tile, float *parts)
        : Base(a, tile, parts), width((rows + LANES - 1) / LANES * LANES) {
        Arena arena;
        allocate(arena);
        arena = {(char *)scratch<0>(arena.used)};
        allocate(arena);
        memset(mixed, 0, E * width * 4);
        for (long r = 0; r < width; r++) {
            long row = r < rows ? r : rows - 1;
            const T *from = this->query(row);
            for (long d = 0; d < D; d += STEP) F::put(q + d / STEP * width + r, from + d, D - d);
            position[r] = tile.position + tile.row_token(a, row);
            top[r] = -__builtin_inff();
            weight[r] = 0;
        }
    }
    void allocate(Arena &arena) {
        arena.take(q, D_pad / STEP * width);
        arena.take(scores, TILE_KEYS * width);
        arena.take(mixed, E * width);
        arena.take(top, width);
        arena.take(weight, width);
        arena.take(position, width);
        arena.take(k, TILE_KEYS * D_pad);
        arena.take(v, TILE_KEYS * E_pad);
        arena.take(row, E_pad);
    }
    void get_keys(long count) {
        for (long j = 0; j < count; j++) k_at[j] = F::along(k_rows[j], k + j * D_pad, D);
        for (long j = 0; j < count; j += STEP) v_at[j / STEP] = F::across(v_rows + j, v + j * E_pad, E, count - j);
    }
    // One vector of rows: scores of `count` keys from `key` on become shares, STEP of them in a row of `scores`.
    void soften(long r, long key, long count, bool all_visible) {
        const i32v last = load_as<i32v>(position + r), first = a.window > 0 ? last - int32_t(a.window) : last * 0 - 1;
        const f32v old_top = load(top + r);
        f32v new_top = minus_infinity(), scale = splat(float(a.scale));
        if (all_visible && a.softcap <= 0 && a.scale > 0) {
            for (long j = 0; j < count; j++) new_top = larger(new_top, load(scores + j * width + r));
            new_top *= scale;
        } else {
            for (long j = 0; j < count; j++) {
                f32v s = load(scores + j * width + r) * scale;
                if (a.softcap > 0) s = float(a.softcap) * tanh(s / float(a.softcap));
                if (!all_visible) {
                    i32v at = i32v{} + int32_t(key + j);
                    s = select((at <= last) & (at > first), s, minus_infinity());
                }
                new_top = larger(new_top, s);
                store(scores + j * width + r, s);
            }
            scale = splat(1.0f);
        }
        new_top = larger(old_top, new_top);
        const f32v base =
            select(new_top == minus_infinity(), f32v{}, new_top);  // no visible key yet: exp(-inf - 0) = 0
        const f32v fade = exp(old_top - base);
        f32v total = load(weight + r) * fade;
        for (long j = 0; j < count; j += STEP) {
            f32v shares[STEP] = {};
            for (int i = 0; i < STEP && j + i < count; i++) {
                f32v x = load(scores + (j + i) * width + r) * scale - base;
                shares[i] = STEP > 1 ? rough_exp(x) : exp(x);  // pairs are of bfloat16
                total += shares[i];
            }
            store(scores + j / STEP * width + r, F::join(shares));
        }
        store(weight + r, total);
        store(top + r, new_top);
        for (long e = 0; e < E; e++) store(mixed + e * width + r, load(mixed + e * width + r) * fade);
    }
    // False if the table names a block that is none.
    bool run(const Tile *) {
        for (long key = tile.key_first; key < tile.key_last; key += TILE_KEYS) {
            long count = tile.key_last - key < TILE_KEYS ? tile.key_last - key : TILE_KEYS;
            if (!this->find_keys(tile.kv_head, key, count)) return false;
            get_keys(count);
            memset(scores, 0, count * width * 4);
            multiply_add([this](long j, long d) INLINE_LAMBDA { return k_at[j][d]; },
                         [this](long d) INLINE_LAMBDA { return q + d * width; }, scores, width, count, width,
                         (D + STEP - 1) / STEP);
            bool all_visible =
                key + count - 1 <= tile.position && !(a.window > 0 && key <= tile.position + tile.count - 1 - a.window);
            for (long r = 0; r < width; r += LANES) soften(r, key, count, all_visible);
            multiply_add([this](long e, long j) INLINE_LAMBDA { return v_at[j][e]; },
                         [this](long j) INLINE_LAMBDA { return scores + j * width; }, mixed, width, E, width,
                         (count + STEP - 1) / STEP);
        }
        for (long r = 0; r < rows; r++) {
            for (long e = 0; e < E; e++) row[e] = mixed[e * width + r];
            this->finish_row(r, row, top[r], weight[r]);
        }
        return true;
    }
};

}  // namespace
