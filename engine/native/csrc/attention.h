// Paged attention over the cache's own layout (api.h, CacheShape): scores and weighted values are products of words, as
// the layers' are, so one page of keys serves all query heads that share it, and all sequences that share the page.
//
// Keys are taken in tiles at fixed positions. A tile's softmax is computed by itself, and tiles are merged from the
// first to the last (Milakov & Gimelshein 2018, section 3). So it makes no difference to a single bit whether a row's
// tiles are computed by one thread or many, alone or together with other sequences, in a prompt's chunk or decoding.
#pragma once

#include "cache.h"

namespace {

// One tile of one sequence: its blocks, and which head of them.
struct TilePart {
    const int32_t* table;
    int blocks, kv_head;
};

struct TileShape {
    int blocks, keys, columns;
    explicit TileShape(const CacheShape& s) {
        blocks = TILE_KEYS / s.block_size > 0 ? TILE_KEYS / s.block_size : 1;
        keys = blocks * s.block_size;
        columns = blocks * s.columns;
    }
};

// Consecutive rows of a task that are taken through a tile together: their scores should stay in the first cache.
struct Strip { int first, rows; };

// Room of one thread for one task, and in it for one strip.
struct AttentionSpace {
    float *scores, *weighted, *sums, *most, *total, *tile_most, *tile_total, *tile_scale, *line, *key_scale, *value_scale;
    u32 *query, *weights;
    float* query_scale;
    int32_t* query_offset;
    static int64_t align(int64_t bytes) { return (bytes + 127) / 64 * 64; }
    AttentionSpace(uint8_t* at, const CacheShape& s, int rows, int columns) {
        auto take = [&](int64_t bytes) { uint8_t* here = at; at += align(bytes); return here; };
        scores = (float*)take(int64_t(rows) * columns * 4);
        weights = (u32*)take(int64_t(rows) * columns * 4);
        weighted = (float*)take(int64_t(rows) * s.value_stride * 4);
        sums = (float*)take(int64_t(rows) * s.value_stride * 4);
        query = (u32*)take(int64_t(rows) * (s.head_dim + 1) * 4);
        query_scale = (float*)take(rows * 4);
        query_offset = (int32_t*)take(rows * 4);
        most = (float*)take(rows * 4);
        total = (float*)take(rows * 4);
        tile_most = (float*)take(rows * 4);
        tile_total = (float*)take(rows * 4);
        tile_scale = (float*)take(rows * 4);
        line = (float*)take((int64_t(s.head_dim) + VL) * 4);
        key_scale = (float*)take(int64_t(columns) * 4);
        value_scale = (float*)take(int64_t(columns) * 4);
    }
};

constexpr int STRIP_ROWS = HAS_TILES ? 2 * TILE : 2 * TILE_ROWS;

// Whether blocks of kb words and so many columns are multiplied by tiles.
template <class D> constexpr bool fits_tiles(int kb, int columns) {
    return HAS_TILES && D::P > 1 && sizeof(typename D::B) == sizeof(u32) && kb % TILE == 0 && columns % PANEL == 0;
}

template <class D>
void block_products(const u32* a, int64_t lda, int rows, const typename D::B* const* b, int num_blocks, int kb, int64_t ldb,
                    int columns, u32* c, int64_t ldc, const typename D::B* const* ahead) {
    if constexpr (fits_tiles<D>(TILE, PANEL))
        if (fits_tiles<D>(kb, columns)) return tile_product<D>(a, lda, rows, b, num_blocks, kb, ldb, columns, c, ldc, ahead);
    product<D>(a, lda, rows, b, num_blocks, kb, ldb, columns, c, ldc, ahead);
}

// The rows of a task over one layer's cache.
struct Attention {
    const CacheShape& s;
    const Layer& layer;
    const AttentionGroup& group;
    const int32_t activations, heads, per_head;
    const float scale;
    const TileShape tile;
    const u32* query;     // [tokens][heads][head_dim] in the activations' kind
    void* out;            // [tokens][out_stride]
    const int64_t out_stride;
    float *state, *partial;

    int64_t state_stride() const { return s.value_stride + 2; }

    void load_query(const AttentionTask& task, int rows, AttentionSpace& room) const {
        const int element = activations == KIND_F32 ? 4 : 2, words = (s.head_dim * element + 3) / 4;
        for (int r = 0; r < rows; r++) {
            const int token = group.row_token[task.first_row + r / per_head];
            const int head = task.kv_head * per_head + r % per_head;
            const uint8_t* from = (const uint8_t*)query + (int64_t(token) * heads + head) * s.head_dim * element;
            if (s.kind != KIND_I8) {
                room.query[r * words + words - 1] = 0;
                __builtin_memcpy(room.query + r * words, from, s.head_dim * element);
                continue;
            }
            read_operand(activations, from, s.head_dim, room.line);
            uint8_t* to = (uint8_t*)(room.query + r * key_words(s));
            uint8_t small[MOST_DIM + VL];
            int total;
            room.query_scale[r] = quantize(room.line, s.head_dim, 0, small, &total);
            room.query_offset[r] = -128 * total;
            for (int i = s.head_dim; i < key_words(s) * 4; i++) small[i] = 0;
            __builtin_memcpy(to, small, key_words(s) * 4);
        }
    }

    const u32* keys_of(const TilePart& part, int b) const {
        return layer.keys + (int64_t(part.table[b]) * s.kv_heads + part.kv_head) * key_words(s) * s.columns;
    }
    // Of int8 caches a "word" is half as large.
    const u32* values_of(const TilePart& part, int b) const {
        const int64_t words = s.columns / per_word(s.kind) * int64_t(s.value_stride);
        const int64_t at = (int64_t(part.table[b]) * s.kv_heads + part.kv_head) * words;
        return s.kind == KIND_I8 ? (const u32*)((const uint16_t*)layer.values + at) : layer.values + at;
    }

    TilePart part_of(const AttentionTask& task, int t) const {
        const int last = group.row_position[task.first_row + task.num_rows - 1];
        const int blocks = (last - t * tile.keys) / s.block_size + 1;
        return {group.tables + int64_t(task.table_row) * group.table_width + t * tile.blocks,
                blocks < tile.blocks ? blocks : tile.blocks, task.kv_head};
    }

    // Scores of one tile, [rows][tile.columns], unscaled, int32 for int8 caches. Meanwhile `next`'s keys are fetched.
    void scores(const Strip& strip, const TilePart& part, const TilePart& next, AttentionSpace& room) const {
        if (s.kind == KIND_F32)
            block_scores<F32>(strip, part, next, room);
        else if (s.kind == KIND_BF16)
            block_scores<BF16>(strip, part, next, room);
        else
            block_scores<K8>(strip, part, next, room);
    }

    template <class D>
    void block_scores(const Strip& strip, const TilePart& part, const TilePart& next, AttentionSpace& room) const {
        typedef typename D::B B;
        const int kw = (s.head_dim + D::P - 1) / D::P, rows = strip.rows;
        const u32* query = room.query + int64_t(strip.first) * kw;
        // Few rows: several blocks at once. A block must be one panel wide for that.
        const int wide = s.columns == PANEL && !fits_tiles<D>(kw, s.columns) ? wide_blocks(rows) : 0;
        for (int b = 0; b < part.blocks;) {
            const B *keys[4], *ahead[4];
            const int count = wide && part.blocks - b >= wide ? wide : 1;
            for (int i = 0; i < count; i++) {
                keys[i] = (const B*)keys_of(part, b + i);
                ahead[i] = b + i < next.blocks ? (const B*)keys_of(next, b + i) : nullptr;
            }
            u32* to = (u32*)room.scores + b * s.columns;
            if (count > 1)
                wide_product<D>(query, kw, rows, keys, kw, to, tile.columns, ahead);
            else
                block_products<D>(query, kw, rows, keys, 1, kw, s.columns, s.columns, to, tile.columns, ahead);
            b += count;
        }
    }

    // Calls f(column, first, last) for each vector of a row's columns with keys from `from` to `position` in it, of which
    // the lanes from `first` to `last` are those. Nearly all are whole: f is compiled for those apart.
    template <class F>
    __attribute__((always_inline)) void seen_columns(int tile_start, int blocks, int from, int position, F f) const {
        const bool joined = s.columns == s.block_size;
        const int pieces = joined ? 1 : blocks, keys = joined ? blocks * s.block_size : s.block_size;
        for (int i = 0; i < pieces; i++) {
            const int start = tile_start + i * keys, column = i * s.columns;
            const int first = from > start ? from - start : 0;
            const int last = position + 1 - start < keys ? position + 1 - start : keys;
            int c = first / VL * VL;
            if (c < first && c < last) {
                f(column + c, first - c, c + VL > last ? last - c : VL);
                c += VL;
            }
            for (; c + VL <= last; c += VL) f(column + c, 0, VL);
            if (c < last) f(column + c, 0, last - c);
        }
    }

    // The scales of a tile's keys and values, column by column.
    void load_scales(const TilePart& part, AttentionSpace& room) const {
        for (int b = 0; b < part.blocks; b++) {
            const int64_t at = (int64_t(part.table[b]) * s.kv_heads + part.kv_head) * s.columns;
            for (int c = 0; c < s.columns; c += VL) {
                store(room.key_scale + b * s.columns + c, load(layer.key_scales + at + c));
                store(room.value_scale + b * s.columns + c, load(layer.value_scales + at + c));
            }
        }
    }

    // Weights of int8 caches are made integers by the largest scale of the values that a token sees: `inverse` for that,
    // and what undoes it.
    struct ValueRange { float inverse, scale; };

    ValueRange value_range(int tile_start, int blocks, int from, int position, const AttentionSpace& room) const {
        // 16,384 x 127 x 512 keys stay below 2^31.
        const float range = 16383.0f * (tile.keys <= 512 ? 1.0f : 512.0f / tile.keys);
        vf most = zero(), nothing = zero();
        seen_columns(tile_start, blocks, from, position, [&](int c, int first, int last) __attribute__((always_inline)) {
            vf x = load(room.value_scale + c);
            if (last - first < VL) x = pick(x, zero(), first, last);
            most = max(most, x);
            nothing = fma(x, zero(), nothing);  // NaN once a scale is
        });
        const float top = peak(most);
        return {top > 0 ? range / top : 0, top / range + sum(nothing)};
    }

    // Softmax of one row of scores over the keys from `from` to `position`: weights as an operand, their sum, the largest
    // score. All in base 2, where e^x is 2^(x log2 e): a row's scores times `factor` are its exponents.
    template <class D>
    void soften(const Strip& strip, int r, int tile_start, int blocks, int from, int position, const ValueRange& range,
                AttentionSpace& room) const {
        constexpr bool integers = sizeof(typename D::B) == 2;
        constexpr float log2e = 1.44269504088896341f;
        float* row = room.scores + int64_t(r) * tile.columns;
        const float factor = (integers ? scale * room.query_scale[strip.first + r] : scale) * log2e;
        const vi offset = set1_i(integers ? room.query_offset[strip.first + r] : 0);
        vf top = set1(-INFINITY);
        seen_columns(tile_start, blocks, from, position, [&](int c, int first, int last) __attribute__((always_inline)) {
            vf x = load(row + c);
            if (integers) {
                x = mul(to_float(add_i(as_words(x), offset)), load(room.key_scale + c));
                store(row + c, x);
            }
            if (last - first < VL) x = pick(x, set1(-INFINITY), first, last);
            top = max(top, x);
        });
        const float most = peak(top) * factor;
        u32* weights = room.weights + int64_t(r) * tile.columns / D::P;
        if (from > tile_start || position + 1 < tile_start + blocks * s.block_size || s.columns > s.block_size)
            __builtin_memset(weights, 0, int64_t(blocks) * s.columns * 4 / D::P);
        const vf factors = set1(factor), lowest = set1(-most), inverse = set1(range.inverse);
        vf sums = zero();
        seen_columns(tile_start, blocks, from, position, [&](int c, int first, int last) __attribute__((always_inline)) {
            vf p = exp2_f<D::P != 1>(fma(load(row + c), factors, lowest));
            if (last - first < VL) p = pick(p, zero(), first, last);
            sums = add(sums, p);
            if (D::P == 1) {
                store((float*)weights + c, p);
            } else if (!integers) {
                store_bf16((uint16_t*)weights + c, p);
            } else {
                vf of_value = mul(load(room.value_scale + c), inverse);
                if (last - first < VL) of_value = pick(of_value, zero(), first, last);  // another's may be anything
                store_halves((uint16_t*)weights + c, to_int(mul(p, of_value)));
            }
        });
        room.tile_most[r] = most, room.tile_total[r] = sum(sums);
    }

    // Softmax of a strip's rows over a tile. Rows that see nothing here: weights of zero, and -inf as the largest score.
    template <class D>
    void soften_rows(const AttentionTask& task, const Strip& strip, int tile_start, const TilePart& part,
                     AttentionSpace& room) const {
        ValueRange range{0, 0};
        int from = 0, position = 0;
        for (int i = 0; i < strip.rows; i++) {
            const int r = strip.first + i;
            const bool new_token = i == 0 || r % per_head == 0;
            if (new_token) {
                position = group.row_position[task.first_row + r / per_head];
                from = group.window > 0 && position - group.window + 1 > 0 ? position - group.window + 1 : 0;
            }
            if (position < tile_start || from >= tile_start + tile.keys) {
                room.tile_most[i] = -INFINITY, room.tile_total[i] = 0, room.tile_scale[i] = 0;
                u32* weights = room.weights + int64_t(i) * tile.columns / D::P;
                __builtin_memset(weights, 0, int64_t(part.blocks) * s.columns * 4 / D::P);
                continue;
            }
            if (sizeof(typename D::B) == 2 && new_token)
                range = value_range(tile_start, part.blocks, from, position, room);
            soften<D>(strip, i, tile_start, part.blocks, from, position, range, room);
            room.tile_scale[i] = range.scale + (room.tile_total[i] - room.tile_total[i]);  // NaN where the sum is not finite
        }
    }

    // Weighted values of one tile, [rows][value_stride]. Meanwhile `next`'s values are fetched.
    void values(int rows, const TilePart& part, const TilePart& next, AttentionSpace& room) const {
        const int per = per_word(s.kind), kb = s.columns / per;
        const int64_t lda = tile.columns / per;
        const u32 *of_block[TILE_KEYS], *ahead[TILE_KEYS];
        for (int b = 0; b < part.blocks; b++) {
            of_block[b] = values_of(part, b);
            ahead[b] = b < next.blocks ? values_of(next, b) : nullptr;
        }
        if (s.kind == KIND_I8) {
            product<I16>(room.weights, lda, rows, (const uint16_t* const*)of_block, part.blocks, kb, s.value_stride,
                         s.value_stride, (u32*)room.weighted, s.value_stride, (const uint16_t* const*)ahead);
            for (int r = 0; r < rows; r++)
                for (int d = 0; d < s.value_stride; d += VL) {
                    float* at = room.weighted + r * s.value_stride + d;
                    store(at, mul(to_float(load_words(at)), set1(room.tile_scale[r])));
                }
            return;
        }
        if (s.kind == KIND_F32)
            product<F32>(room.weights, lda, rows, of_block, part.blocks, kb, s.value_stride, s.value_stride,
                         (u32*)room.weighted, s.value_stride, ahead);
        else
            block_products<BF16>(room.weights, lda, rows, of_block, part.blocks, kb, s.value_stride, s.value_stride,
                                 (u32*)room.weighted, s.value_stride, ahead);
    }

    // state (+)= one tile of the row. Always in this order, with these operations: see the top of the file.
    void merge(float tile_most, float tile_total, const float* tile_sums, float* most, float* total, float* sums) const {
        if (*most == -INFINITY) {
            *most = tile_most, *total = tile_total;
            for (int d = 0; d < s.value_stride; d += VL) store(sums + d, load(tile_sums + d));
            return;
        }
        const float both = tile_most > *most ? tile_most : *most;
        float factors[VL];
        store(factors, exp2_f(pick(set1(*most - both), set1(tile_most - both), 0, 1)));
        const vf old_factor = set1(factors[0]), new_factor = set1(factors[1]);
        *total = *total * factors[0] + tile_total * factors[1];
        for (int d = 0; d < s.value_stride; d += VL)
            store(sums + d, fma(load(sums + d), old_factor, mul(load(tile_sums + d), new_factor)));
        *most = both;
    }

    // most, total: of all tiles; a sink joins them last.
    void write(int token, int head, float most, float total, const float* sums) const {
        float factors[VL] = {1.0f};
        if (layer.sinks) {
            constexpr float log2e = 1.44269504088896341f;
            const float sink = layer.sinks[head] * log2e, both = sink > most ? sink : most;
            store(factors, exp2_f(pick(set1(most - both), set1(sink - both), 0, 1)));
            total = total * factors[0] + factors[1];
        }
        const vf inverse = set1(total), factor = set1(factors[0]);
        const int dim = s.value_dim;
        for (int d = 0; d < dim; d += VL) {
            const vf x = div(mul(load(sums + d), factor), inverse);
            const int left = dim - d;
            if (activations == KIND_F32) {
                float* to = (float*)out + token * out_stride + head * dim + d;
                left >= VL ? store(to, x) : store_first(to, x, left);
            } else {
                uint16_t* to = (uint16_t*)out + token * out_stride + head * dim + d;
                if (left >= VL) {
                    store_bf16(to, x);
                } else {
                    uint16_t tail[VL];
                    store_bf16(tail, x);
                    for (int i = 0; i < left; i++) to[i] = tail[i];
                }
            }
        }
    }

    float* state_of(const AttentionTask& task, int r) const {
        const int64_t token = group.row_token[task.first_row + r / per_head];
        return state + (token * heads + task.kv_head * per_head + r % per_head) * state_stride();
    }

    // next: the task that this thread will run then, or null.
    void run(const AttentionTask& task, const AttentionTask* next, uint8_t* space) const {
        const int rows = task.num_rows * per_head;
        AttentionSpace room(space, s, rows, tile.columns);
        load_query(task, rows, room);
        for (int r = 0; r < rows; r++) {
            if (task.begins) {
                room.most[r] = -INFINITY, room.total[r] = 0;
            } else {
                const float* from = state_of(task, r);
                room.most[r] = from[0], room.total[r] = from[1];
                __builtin_memcpy(room.sums + r * s.value_stride, from + 2, s.value_stride * 4);
            }
        }
        for (int t = task.first_tile; t < task.last_tile; t++) {
            const int start = t * tile.keys;
            const TilePart part = part_of(task, t);
            TilePart following{nullptr, 0, 0};
            if (t + 1 < task.last_tile)
                following = part_of(task, t + 1);
            else if (next)
                following = part_of(*next, next->first_tile);
            if (s.kind == KIND_I8) load_scales(part, room);
            for (int first = 0; first < rows; first += STRIP_ROWS) {
                const Strip strip{first, rows - first < STRIP_ROWS ? rows - first : STRIP_ROWS};
                if (first > 0) following.blocks = 0;
                scores(strip, part, following, room);
                if (s.kind == KIND_F32)
                    soften_rows<F32>(task, strip, start, part, room);
                else if (s.kind == KIND_BF16)
                    soften_rows<BF16>(task, strip, start, part, room);
                else
                    soften_rows<I16>(task, strip, start, part, room);
                values(strip.rows, part, following, room);
                for (int i = 0; i < strip.rows; i++) {
                    const int r = first + i;
                    const float* sums = room.weighted + i * s.value_stride;
                    if (task.partial >= 0) {
                        float* to =
                            partial + (int64_t(task.partial) + int64_t(t - task.first_tile) * rows + r) * state_stride();
                        to[0] = room.tile_most[i], to[1] = room.tile_total[i];
                        __builtin_memcpy(to + 2, sums, s.value_stride * 4);
                    } else if (room.tile_most[i] != -INFINITY) {
                        merge(room.tile_most[i], room.tile_total[i], sums, room.most + r, room.total + r,
                              room.sums + r * s.value_stride);
                    }
                }
            }
        }
        if (task.partial >= 0) return;
        for (int r = 0; r < rows; r++) {
            if (task.ends) {
                write(group.row_token[task.first_row + r / per_head], task.kv_head * per_head + r % per_head,
                      room.most[r], room.total[r], room.sums + r * s.value_stride);
                continue;
            }
            float* to = state_of(task, r);
            to[0] = room.most[r], to[1] = room.total[r];
            __builtin_memcpy(to + 2, room.sums + r * s.value_stride, s.value_stride * 4);
        }
    }

    // Merges the tiles that tasks with partial >= 0 have left, from the first to the last, and writes the output.
    void run_merge(const AttentionTask& task, uint8_t* space) const {
        const int rows = task.num_rows * per_head;
        AttentionSpace room(space, s, rows, tile.columns);
        for (int r = 0; r < rows; r++) {
            float most = -INFINITY, total = 0;
            for (int t = 0; t < task.last_tile - task.first_tile; t++) {
                const float* from = partial + (int64_t(task.partial) + int64_t(t) * rows + r) * state_stride();
                if (from[0] != -INFINITY) merge(from[0], from[1], from + 2, &most, &total, room.sums);
            }
            write(group.row_token[task.first_row + r / per_head], task.kv_head * per_head + r % per_head, most, total,
                  room.sums);
        }
    }
};

// All of a group's tasks for one layer for which `wanted(task)`; every member calls it.
template <class F> void attend_layer(Member& me, const Attention& attention, const Workspace& space, F wanted) {
    const AttentionGroup& group = attention.group;
    uint8_t* room = space.thread_space + me.index * space.thread_bytes;
    auto run = [&](const AttentionTask* tasks, int n) {
        if (n)
            me.share_ahead(n, [&](int i, int next) {
                if (wanted(tasks[i])) attention.run(tasks[i], next < 0 ? nullptr : tasks + next, room);
            });
    };
    run(group.first, group.num_first);
    run(group.second, group.num_second);
    if (group.num_merges) me.share(group.num_merges, [&](int i) {
        if (wanted(group.merges[i])) attention.run_merge(group.merges[i], room);
    });
}

}  // namespace
