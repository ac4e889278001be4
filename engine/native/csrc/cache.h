// How tokens' keys and values lie in the paged cache (api.h, CacheShape), and how they get there.
#pragma once

#include "linear.h"

namespace {

constexpr int MOST_DIM = 1024;  // of a head whose cache is int8

inline int per_word(int kind) { return kind == KIND_F32 ? 1 : 2; }
inline int key_words(const CacheShape& s) {
    const int per = s.kind == KIND_I8 ? 4 : per_word(s.kind);
    return (s.head_dim + per - 1) / per;
}

// Fetches the lines that `store_token` will write: a decoding token's are scattered over its block, and cold.
inline void fetch_slot(const CacheShape& s, const Layer& layer, int64_t slot) {
    const int64_t block = slot / s.block_size;
    const int at = int(slot % s.block_size), per = per_word(s.kind), unit = s.kind == KIND_I8 ? 2 : 4;
    const int words = key_words(s);
    for (int h = 0; h < s.kv_heads; h++) {
        const int64_t head = block * s.kv_heads + h;
        const u32* keys = layer.keys + head * words * s.columns + at;
        for (int w = 0; w < words; w++) _mm_prefetch((const char*)(keys + int64_t(w) * s.columns), _MM_HINT_T1);
        const char* values = (const char*)layer.values + (head * s.columns / per + at / per) * s.value_stride * unit;
        for (int i = 0; i < s.value_stride * unit; i += 64) _mm_prefetch(values + i, _MM_HINT_T1);
    }
}

// One token's keys and values of all KV heads into its slot; k: [kv_heads][head_dim], v: [kv_heads][value_dim] float32.
inline void store_token(const CacheShape& s, const Layer& layer, int64_t slot, const float* k, const float* v) {
    const int64_t block = slot / s.block_size;
    const int at = int(slot % s.block_size), columns = s.columns, dim = s.head_dim, value_dim = s.value_dim;
    const int words = key_words(s);
    for (int h = 0; h < s.kv_heads; h++, k += dim, v += value_dim) {
        const int64_t head = block * s.kv_heads + h;
        if (s.kind == KIND_F32) {
            float* keys = (float*)layer.keys + head * words * columns + at;
            for (int i = 0; i < dim; i++) keys[int64_t(i) * columns] = k[i];
            float* values = (float*)layer.values + (head * columns + at) * s.value_stride;
            for (int i = 0; i < value_dim; i++) values[i] = v[i];
        } else if (s.kind == KIND_BF16) {
            u32* keys = layer.keys + head * words * columns + at;
            for (int w = 0; w < words; w++)
                keys[int64_t(w) * columns] = to_bf16(k[2 * w]) | u32(2 * w + 1 < dim ? to_bf16(k[2 * w + 1]) : 0) << 16;
            uint16_t* values = (uint16_t*)(layer.values + (head * columns / 2 + at / 2) * s.value_stride) + at % 2;
            for (int i = 0; i < value_dim; i++) values[2 * i] = to_bf16(v[i]);
        } else {
            uint8_t small[2][MOST_DIM + VL];
            layer.key_scales[head * columns + at] = quantize(k, dim, 128, small[0]);
            layer.value_scales[head * columns + at] = quantize(v, value_dim, 0, small[1]);
            u32* keys = layer.keys + head * words * columns + at;
            for (int w = 0; w < words; w++) __builtin_memcpy(keys + int64_t(w) * columns, small[0] + 4 * w, 4);
            int8_t* values = (int8_t*)layer.values + (head * columns / 2 + at / 2) * s.value_stride * 2 + at % 2;
            for (int i = 0; i < value_dim; i++) values[2 * i] = int8_t(small[1][i]);
        }
    }
}

}  // namespace
