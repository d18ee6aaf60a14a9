// K and V of new tokens into the paged cache, bit for bit; see kv_write.py.
#include "paged_cache.h"

namespace {

struct Args {
    Heads k, v;
    Plane k_cache, v_cache;
    const int64_t *slots;
    int64_t tokens, kv_heads, k_size, v_size, blocks, block_tokens;
};

// 0, or 1 + the first token whose slot is past the planes; then nothing has been written.
template <class T> long write(const Args &a) {
    long bad = first_bad_slot(a.slots, a.tokens, a.blocks * a.block_tokens);
    if (bad) return bad;
    parallel_for(a.tokens, a.tokens * a.kv_heads * (a.k_size + a.v_size) > MIN_TEAM_VALUES, [&a](long t) {
        if (a.slots[t] < 0) return;
        long block = a.slots[t] / a.block_tokens, offset = a.slots[t] % a.block_tokens;
        for (long g = 0; g < a.kv_heads; g++) {
            memcpy(a.k_cache.at<T>(block, offset, g), a.k.at<T>(t, g), a.k_size * sizeof(T));
            memcpy(a.v_cache.at<T>(block, offset, g), a.v.at<T>(t, g), a.v_size * sizeof(T));
        }
    });
    return 0;
}

}  // namespace

OSTINATO_KERNEL(kv_write, Args, write)
