// Matrix products with weights: packing, the loop over panels, and what happens to a result while it is in the cache.
#pragma once

#include <math.h>

#include "api.h"
#include "product.h"
#include "small.h"
#include "team.h"

namespace {

inline int words_of(int kind, int k) { return kind == KIND_F32 ? k : kind == KIND_I8 ? (k + 3) / 4 : (k + 1) / 2; }

inline float from_bf16(uint16_t x) {
    u32 bits = u32(x) << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t to_bf16(float x) {
    u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline int groups_of(int k) { return (k + QUANT_GROUP - 1) / QUANT_GROUP; }

// rows [n][k] float32 -> panels. int8 kinds: one scale a row, symmetric, to nearest. `offset` [groups][stride].
void pack(int32_t kind, int32_t n, int32_t k, const float* rows, u32* packed, float* scale, int32_t* offset,
          int64_t offset_stride) {
    const int per = kind == KIND_F32 ? 1 : kind == KIND_I8 ? 4 : 2;
    const int kw = words_of(kind, k), panels = (n + PANEL - 1) / PANEL;
    for (int p = 0; p < panels; p++) {
        for (int c = 0; c < PANEL; c++) {
            const int row = p * PANEL + c;
            const float* w = row < n ? rows + int64_t(row) * k : nullptr;
            float inverse = 0;
            if (scale) {
                float most = 0;
                for (int i = 0; w && i < k; i++) most = fmaxf(most, fabsf(w[i]));
                scale[row] = most / 127.0f;
                inverse = most > 0 ? 127.0f / most : 0;
            }
            for (int g = 0; offset && g < groups_of(k); g++) offset[g * offset_stride + row] = 0;
            for (int word = 0; word < kw; word++) {
                const int64_t at = (int64_t(p) * kw + word) * PANEL + c;
                for (int e = 0; e < per; e++) {
                    const int i = word * per + e;
                    const float x = w && i < k ? w[i] : 0.0f;
                    if (kind == KIND_F32) {
                        ((float*)packed)[at] = x;
                    } else if (kind == KIND_BF16) {
                        ((uint16_t*)packed)[at * 2 + e] = to_bf16(x);
                    } else {
                        const int q = int(rintf(x * inverse));
                        if (kind == KIND_W8)
                            ((int8_t*)packed)[p * panel_bytes(kind, kw) + code_at(kind, c, i)] = int8_t(q);
                        else
                            ((int8_t*)packed)[at * per + e] = int8_t(q);
                        if (offset) offset[i / QUANT_GROUP * offset_stride + row] -= 128 * q;
                    }
                }
            }
        }
    }
}

inline const u32* panel_at(const Linear& w, int panel) {
    const int64_t bytes = is_small(w.kind) ? panel_bytes(w.kind, w.kw) : int64_t(w.kw) * PANEL * 4;
    return (const u32*)((const uint8_t*)w.packed + panel * bytes);
}

// Whether products over so many words are taken through tiles.
inline bool fits_tiles(int kw) { return HAS_TILES && kw % TILE == 0; }

// One panel's columns for `rows` rows; a [rows][lda words] -> c [rows][PANEL], with room for rows rounded up to 16.
template <class D> void panel_product(const u32* a, int64_t lda, int rows, const u32* b, int kw, float* c, const u32* ahead) {
    if constexpr (HAS_TILES && D::P > 1)
        if (fits_tiles(kw)) return tile_panel<D>(a, lda, rows, b, kw, (u32*)c, ahead);
    product<D>(a, lda, rows, &b, 1, kw, PANEL, PANEL, (u32*)c, PANEL, ahead ? &ahead : nullptr);
}

// As micro_grouped, of rows whose integers, with their offset, are in `sums`; c [rows][PANEL].
inline void scale_group(const u32* sums, int rows, const GroupedPanel& group, float* c) {
    const vf scale0 = load(group.scale), scale1 = load(group.scale + VL);
    const vf bias0 = group.bias ? load(group.bias) : zero(), bias1 = group.bias ? load(group.bias + VL) : zero();
    for (int r = 0; r < rows; r++, sums += PANEL, c += PANEL) {
        const vf of_row = set1(group.row_scale[r * group.scale_stride]);
        vf x = to_float(load_words(sums)), y = to_float(load_words(sums + VL));
        x = group.first ? mul(x, of_row) : fma(x, of_row, load(c));
        y = group.first ? mul(y, of_row) : fma(y, of_row, load(c + VL));
        store(c, group.last ? fma(x, scale0, bias0) : x);
        store(c + VL, group.last ? fma(y, scale1, bias1) : y);
    }
}

// One panel of a W8A8 product, scaled and biased: c as in `panel_product`.
inline void grouped_product(const Linear& w, const u32* a, int64_t lda, int rows, int panel, const u32* b,
                            const float* row_scale, int64_t scale_stride, float* c, const u32* ahead) {
    const int padded = (w.n + PANEL - 1) / PANEL * PANEL;
    // Calls f(word, words, group) for each group of k.
    const auto for_groups = [&](auto f) {
        for (int word = 0; word < w.kw; word += QUANT_GROUP / 4) {
            const int words = w.kw - word < QUANT_GROUP / 4 ? w.kw - word : QUANT_GROUP / 4;
            f(word, words,
              GroupedPanel{w.offset + word / (QUANT_GROUP / 4) * int64_t(padded) + panel * PANEL,
                           row_scale + word / (QUANT_GROUP / 4), w.scale + panel * PANEL,
                           w.bias ? w.bias + panel * PANEL : nullptr, scale_stride, word == 0, word + words == w.kw});
        }
    };
    if constexpr (HAS_TILES)
        if (fits_tiles(w.kw)) {
            const TileRows of(rows);
            alignas(64) u32 sums[2 * TILE * PANEL];
            settle_memory();
            for_groups([&](int word, int words, const GroupedPanel& group) {
                const u32 *weights = b + int64_t(word) * PANEL, *fetched = ahead + int64_t(word) * PANEL;
                of.for_pairs([&](int tile, bool both) {
                    of.multiply<I8>(tile, both, a + word, lda, &weights, 1, words, PANEL, 0, Start::COLUMNS, group.offset,
                                    sums, sums + TILE * PANEL, PANEL, tile == 0 && ahead ? &fetched : nullptr);
                    for (int t = tile; t <= tile + both; t++) {
                        GroupedPanel of_tile = group;
                        of_tile.row_scale += of.first(t) * scale_stride;
                        scale_group(sums + (t - tile) * TILE * PANEL, rows < TILE ? rows : TILE, of_tile, c + t * TILE * PANEL);
                    }
                });
            });
            put_last_tile(of, c);
            return;
        }
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for_groups([&](int word, int words, const GroupedPanel& group) {
        const u32* following = ahead ? ahead + int64_t(word) * PANEL : nullptr;
        for (int t = 0; t < tiles; t++) {
            const int begin = int(long(rows) * t / tiles), count = int(long(rows) * (t + 1) / tiles) - begin;
            GroupedPanel of_tile = group;
            of_tile.row_scale += begin * scale_stride;
            micro_grouped_of(count)(a + begin * lda + word, lda, b + int64_t(word) * PANEL, words, of_tile, c + begin * PANEL,
                                    {&following, t, tiles});
        }
    });
}

// c [count][PANEL] = c * the columns' scales + bias, where there are such that the product has not seen.
inline void finish_columns(const Linear& w, int panel, int count, float* c) {
    const float* scale = w.kind == KIND_W8 ? w.scale + panel * PANEL : nullptr;
    const float* bias = w.bias && w.kind != KIND_I8 ? w.bias + panel * PANEL : nullptr;
    for (int v = 0; (scale || bias) && v < PANEL; v += VL) {
        const vf factor = scale ? load(scale + v) : set1(1.0f), more = bias ? load(bias + v) : zero();
        for (int r = 0; r < count; r++) store(c + r * PANEL + v, fma(load(c + r * PANEL + v), factor, more));
    }
}

// Rows of `target` are fetched while their product is computed, because they lie far apart.
template <class T> inline void fetch_targets(int first, int count, int panel, T target) {
    for (int r = 0; r < count; r++)
        if (const void* to = target(first + r, panel)) {
            __builtin_prefetch(to, 1);
            if (PANEL * 4 > 64) __builtin_prefetch((const char*)to + 64, 1);
        }
}

// Whether so many rows are multiplied by codes as they are unpacked. Tiles sum in another order, so they take all rows.
inline bool takes_few(int32_t activations, const Linear& w, int rows) {
    return is_small(w.kind) && rows <= FEW_ROWS && activations == KIND_BF16 && !fits_tiles(w.kw);
}

// Whether so many rows take two panels at once.
inline bool takes_pairs(int32_t activations, const Linear& w, int rows) {
    if (takes_few(activations, w, rows)) return rows <= TWO_PANEL_ROWS;
    const bool plain = w.kind == KIND_F32 || w.kind == KIND_BF16;
    return plain && rows <= PAIR_ROWS && !(activations == KIND_BF16 && fits_tiles(w.kw));
}

// One task of a product: `rows` rows with `count` panels from `panel` on; x and row_scale are those of the first
// row. finish, target: as for `for_panels`, rows counted from 0. ahead: the panel that this thread reads next, or null.
template <class T, class F>
void panel_task(const Team&, int32_t activations, const Linear& w, int panel, int count, const u32* x, int64_t lda,
                const float* row_scale, int64_t scale_stride, int rows, uint8_t* space, const u32* ahead, T target,
                F finish) {
    float* c = (float*)space;
    u32* unpacked = (u32*)(space + ROW_BLOCK * PANEL * 4);
    const auto finish_together = [&](int first, int at_once) {
        for (int i = 0; i < at_once; i++) {
            finish_columns(w, first + i, rows, c + i * rows * PANEL);
            finish(0, rows, first + i, c + i * rows * PANEL);
        }
    };
    const bool pairs = takes_pairs(activations, w, rows);
    const int end = panel + count;
    if (takes_few(activations, w, rows)) {
        const SmallKernels& kernels = *small_kernels_of(w);
        for (int p = panel, at_once; p < end; p += at_once) {
            at_once = pairs && p + 2 <= end ? 2 : 1;
            for (int i = p; i < p + at_once; i++) fetch_targets(0, rows, i, target);
            (at_once == 2 ? kernels.two_panels : kernels.few)[rows - 1](w, p, x, lda, c);
            finish_together(p, at_once);
        }
        return;
    }
    for (; pairs && panel + 2 <= end; panel += 2, count -= 2) {
        const u32 *both[] = {panel_at(w, panel), panel_at(w, panel + 1)}, *first = panel + 2 < end ? panel_at(w, panel + 2) : ahead;
        const u32* following[] = {first, first ? first + int64_t(w.kw) * PANEL : nullptr};  // fetching what isn't there does nothing
        for (int i = 0; i < 2; i++) fetch_targets(0, rows, panel + i, target);
        activations == KIND_F32 ? pair_product<F32>(x, lda, rows, both, w.kw, c, following)
                                : pair_product<BF16>(x, lda, rows, both, w.kw, c, following);
        finish_together(panel, 2);
    }
    const int parts = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for (int p = panel; p < panel + count; p++) {
        const u32 *b = panel_at(w, p), *following = p + 1 < panel + count ? panel_at(w, p + 1) : ahead;
        if (is_small(w.kind)) {
            (activations == KIND_BF16 ? small_kernels_of(w)->bf16 : small_kernels_of(w)->f32)(w, p, unpacked);
            b = unpacked;
        }
        for (int part = 0; part < parts; part++, following = nullptr) {
            const int from = rows * part / parts, block = rows * (part + 1) / parts - from;
            const u32* a = x + from * lda;
            fetch_targets(from, block, p, target);
            if (w.kind == KIND_I8)
                grouped_product(w, a, lda, block, p, b, row_scale + from * scale_stride, scale_stride, c, following);
            else if (activations == KIND_F32)
                panel_product<F32>(a, lda, block, b, is_small(w.kind) ? w.k : w.kw, c, following);
            else
                panel_product<BF16>(a, lda, block, b, w.kw, c, following);
            finish_columns(w, p, block, c);
            finish(from, block, p, c);
        }
    }
}

// Calls finish(first_row, rows, panel, c) for blocks of rows and panels, c: [rows][PANEL] float32, scaled and biased, which
// it may change.
// x: [rows][lda words]. row_scale: of quantized rows, [rows][scale_stride].
// target(row, panel): where `finish` will write that row, or null.
template <class T, class F>
void for_panels(Member& me, int32_t activations, const Linear& w, const u32* x, int64_t lda, const float* row_scale,
                int64_t scale_stride, int rows, uint8_t* space, T target, F finish) {
    const int panels = (w.n + PANEL - 1) / PANEL, size = me.team->size;
    int blocks = 1, at_once = 1;
    if (takes_pairs(activations, w, rows)) {
        at_once = 2;
    } else if (takes_few(activations, w, rows)) {
        at_once = 1;
    } else if (is_small(w.kind)) {  // what is unpacked serves as many rows as possible
        blocks = (rows + UNPACKED_ROWS - 1) / UNPACKED_ROWS;
        if (panels * blocks < 2 * size) blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    } else {
        blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        // As many for each thread, so that it meets its own rows again in the next product.
        const int even = (blocks + size - 1) / size * size;
        if (rows / even >= 4 * TILE_ROWS) blocks = even;
    }
    const int tasks = (panels + at_once - 1) / at_once;
    me.share(tasks * blocks, [&](int task) {
        const int block = task / tasks, p = task % tasks * at_once, count = panels - p < at_once ? panels - p : at_once;
        const int first = int(int64_t(rows) * block / blocks), end = int(int64_t(rows) * (block + 1) / blocks);
        const u32* ahead = p + count < panels ? panel_at(w, p + count) : nullptr;
        panel_task(*me.team, activations, w, p, count, x + first * lda, lda, row_scale + first * scale_stride,
                   scale_stride, end - first, space, ahead, [&](int row, int panel) { return target(first + row, panel); },
                   [&](int from, int block_rows, int panel, float* c) { finish(first + from, block_rows, panel, c); });
    });
}

// A gated MLP's inner value of gate x and up y.
inline vf gated_by(int32_t gate, vf x, vf y) {
    // gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)); silu(x) = x * sigmoid(x); in base 2
    constexpr float log2e = 1.44269504088896341f;
    constexpr float alpha = 1.702f, limit = 7.0f;  // of the clamped SwiGLU: x * sigmoid(alpha x) * (y + 1)
    if (gate == GATE_CLAMPED_SWIGLU) {
        x = min(set1(limit), x);
        y = add(max(set1(-limit), min(set1(limit), y)), set1(1.0f));
    }
    vf exponent = mul(x, set1(gate == GATE_CLAMPED_SWIGLU ? -alpha * log2e : -log2e));
    if (gate == GATE_GELU_TANH)
        exponent = mul(set1(-1.5957691216057308f * log2e), fma(mul(set1(0.044715f), mul(x, x)), x, x));
    return mul(div(x, add(set1(1.0f), exp2_f(min(set1(126.0f), exponent)))), y);
}

inline bool is_plain(int32_t gate) { return gate >= PLAIN_SILU; }

// An ungated MLP's inner value of up x.
inline vf activated_by(int32_t gate, vf x) {
    if (gate != PLAIN_RELU2) return gated_by(gate == PLAIN_GELU_TANH ? GATE_GELU_TANH : GATE_SILU, x, set1(1.0f));
    const vf y = max(zero(), x);  // NaN stays NaN
    return mul(y, y);
}

// Inner values that a panel gives: half of its columns are gates, or none.
inline int inner_width(int32_t gate) { return is_plain(gate) ? PANEL : VL; }

// One row's inner values of a panel's results c [PANEL], to `at` elements behind `row`.
inline void write_inner(int32_t activations, int32_t gate, const float* c, void* row, int64_t at) {
    for (int v = 0; v < inner_width(gate); v += VL) {
        const vf y = is_plain(gate) ? activated_by(gate, load(c + v)) : gated_by(gate, load(c), load(c + VL));
        if (activations == KIND_F32)
            store((float*)row + at + v, y);
        else
            store_bf16((uint16_t*)row + at + v, y);
    }
}

// x [n] -> integers of at most 127, and `middle` added to each, as bytes; returns the scale. What is not finite makes the
// scale NaN, because integers could not carry it on. Whole vectors are written: up to VL - 1 bytes beyond the last.
// total: the integers' sum, if wanted.
inline float quantize(const float* x, int n, int middle, uint8_t* to, int* total = nullptr) {
    vf most = zero(), nothing = zero();
    for (int i = 0; i < n; i += VL) {
        const vf y = n - i >= VL ? load(x + i) : load_first(x + i, n - i);
        most = max(most, abs_f(y));
        nothing = fma(y, zero(), nothing);
    }
    const float top = peak(most);
    const vf inverse = set1(top > 0 && top < 3e38f ? 127.0f / top : 0);
    vi sums = zero_i();
    for (int i = 0; i < n; i += VL) {
        const vf y = n - i >= VL ? load(x + i) : load_first(x + i, n - i);
        const vi q = to_int(mul(y, inverse));
        sums = add_i(sums, q);
        store_bytes(to + i, add_i(q, set1_i(middle)));
    }
    if (total) *total = int(sum(to_float(sums)));
    return top / 127.0f + sum(nothing);
}

// Writes one row of an operand: x [n] float32 -> words of the kind, padded to whole words; KIND_I8 (a multiple of VL
// words long) also its scales.
inline void write_operand(int32_t kind, const float* x, int n, u32* out, float* scale) {
    if (kind == KIND_F32) {
        for (int i = 0; i < n; i += VL)
            n - i >= VL ? store((float*)out + i, load(x + i)) : store_first((float*)out + i, load_first(x + i, n - i), n - i);
        return;
    }
    if (kind == KIND_BF16) {
        uint16_t* to = (uint16_t*)out;
        int i = 0;
        for (; n - i >= VL; i += VL) store_bf16(to + i, load(x + i));
        for (; i < n; i++) to[i] = to_bf16(x[i]);
        if (n & 1) to[n] = 0;
        return;
    }
    for (int begin = 0; begin < n; begin += QUANT_GROUP)
        *scale++ = quantize(x + begin, n - begin < QUANT_GROUP ? n - begin : QUANT_GROUP, 128, (uint8_t*)out + begin);
}

// Rows of words in the activations' kind -> float32 [n].
inline void read_operand(int32_t activations, const void* row, int n, float* out) {
    if (activations == KIND_F32) {
        __builtin_memcpy(out, row, n * 4);
        return;
    }
    const uint16_t* from = (const uint16_t*)row;
    int i = 0;
    for (; n - i >= VL; i += VL) store(out + i, load_bf16(from + i));
    for (; i < n; i++) out[i] = from_bf16(from[i]);
}

inline int32_t operand_kind(int32_t activations, const Linear& w) { return w.kind == KIND_I8 ? KIND_I8 : activations; }

// x [k] in the order of w's columns, into `to`, where that is another one; returns where it is.
inline const float* in_order(const Linear& w, const float* x, float* to) {
    if (!w.order) return x;
    for (int i = 0; i < w.k; i++) to[i] = x[w.order[i]];
    return to;
}

// x in the activations' kind as the operand of w: itself, or quantized or in w's order into `input` (a phase of its own).
inline const u32* as_operand(Member& me, int32_t activations, const Linear& w, const u32* x, int64_t x_words, int rows,
                             const Workspace& space, int64_t* lda) {
    if (w.kind != KIND_I8 && !w.order) {
        *lda = x_words;
        return x;
    }
    float* line = (float*)(space.thread_space + me.index * space.thread_bytes);
    *lda = space.input_words;
    me.share_rows(rows, 4, [&](int first, int last) {
        for (int r = first; r < last; r++) {
            read_operand(activations, x + r * x_words, w.k, line);
            write_operand(operand_kind(activations, w), in_order(w, line, line + w.k + VL), w.k,
                          space.input + r * space.input_words, space.row_scale + r * space.scale_stride);
        }
    });
    me.book(PART_QUANTIZE);
    return space.input;
}

// A panel's columns of some rows, c [count][PANEL], to rows of y.
inline void store_panel(const Linear& w, int panel, int count, const float* c, float* y, int64_t stride) {
    for (int v = 0; v < 2; v++) {
        const int column = panel * PANEL + v * VL, left = w.n - column;
        if (left <= 0) continue;
        for (int r = 0; r < count; r++) {
            float* to = y + r * stride + column;
            const vf value = load(c + r * PANEL + v * VL);
            left >= VL ? store(to, value) : store_first(to, value, left);
        }
    }
}

void linear(Team* team, int32_t member, int32_t activations, const Linear* w, const void* x, int64_t rows, float* y,
            const Workspace* space) {
    Member me(team, member, space->spent);
    int64_t lda;
    const u32* a = as_operand(me, activations, *w, (const u32*)x, words_of(activations, w->k), int(rows), *space, &lda);
    uint8_t* scratch = space->thread_space + member * space->thread_bytes;
    for_panels(me, activations, *w, a, lda, space->row_scale, space->scale_stride, int(rows), scratch,
               [&](int row, int panel) { return y + row * int64_t(w->n) + panel * PANEL; },
               [&](int first, int count, int panel, const float* c) {
                   store_panel(*w, panel, count, c, y + first * int64_t(w->n), w->n);
               });
    me.book(PART_HEAD);
}

// Products of each head with a weight of its own, all of one shape: a row of x has the heads' elements `head_words` words
// apart, and is followed by the next one after lda words. y float32 [rows][heads][n].
void heads(Team* team, int32_t member, int32_t activations, int32_t count, const Linear* w, const void* x, int64_t lda,
           int64_t head_words, int64_t rows, float* y, const Workspace* space) {
    Member me(team, member, space->spent);
    uint8_t* scratch = space->thread_space + member * space->thread_bytes;
    const int panels = (w->n + PANEL - 1) / PANEL, tasks = count * panels;
    const int64_t stride = int64_t(count) * w->n;
    me.share(tasks, [&](int task) {
        const int head = task / panels, following = task + 1;
        const u32* ahead = following < tasks ? panel_at(w[following / panels], following % panels) : nullptr;
        panel_task(*team, activations, w[head], task % panels, 1, (const u32*)x + head * head_words, lda, nullptr, 0,
                   int(rows), scratch, ahead, [](int, int) { return nullptr; },
                   [&](int first, int some, int panel, const float* c) {
                       store_panel(w[head], panel, some, c, y + first * stride + int64_t(head) * w->n, stride);
                   });
    });
    me.book(PART_PRODUCT);
}

// The column of each row's largest product, the first of equals; finite[row] = 0 where a product is NaN or +inf, or
// nothing is finite.
// Nothing of size rows x n is ever written.
void argmax(Team* team, int32_t member, int32_t activations, const Linear* w, const void* x, int64_t rows,
            int64_t* best, uint8_t* finite, const Workspace* space) {
    Member me(team, member, space->spent);
    int64_t lda;
    const u32* a = as_operand(me, activations, *w, (const u32*)x, words_of(activations, w->k), int(rows), *space, &lda);
    uint8_t* scratch = space->thread_space + member * space->thread_bytes;
    // Per thread and row: the best value, its column, and whether all was finite.
    struct Found { float value; int32_t column; int32_t broken; };
    Found* mine = (Found*)space->partial + member * rows;
    for (int64_t r = 0; r < rows; r++) mine[r] = Found{-INFINITY, 0x7fffffff, 0};
    for_panels(me, activations, *w, a, lda, space->row_scale, space->scale_stride, int(rows), scratch,
               [](int, int) { return nullptr; },
               [&](int first, int count, int panel, const float* c) {
                   const int column = panel * PANEL, left = w->n - column;
                   for (int r = 0; r < count; r++) {
                       const float* at = c + r * PANEL;
                       vf one = left >= VL ? load(at) : pick(load(at), set1(-INFINITY), 0, left);
                       vf two = left >= PANEL ? load(at + VL)
                                              : pick(load(at + VL), set1(-INFINITY), 0, left > VL ? left - VL : 0);
                       Found& found = mine[first + r];
                       // Lanes beyond the last column hold zeros of the padding.
                       if (!all_below(load(at), set1(INFINITY)) || !all_below(load(at + VL), set1(INFINITY)))
                           found.broken = 1;
                       const float top = peak(max(one, two));
                       if (top < found.value || (top == found.value && column > found.column)) continue;
                       for (int i = 0; i < PANEL && i < left; i++)
                           if (at[i] == top) {
                               found.value = top, found.column = column + i;
                               break;
                           }
                   }
               });
    me.book(PART_HEAD);
    if (member == 0) {
        const Found* all = (const Found*)space->partial;
        for (int64_t r = 0; r < rows; r++) {
            Found winner = all[r];
            for (int t = 1; t < team->size; t++) {
                const Found& other = all[t * rows + r];
                winner.broken |= other.broken;
                if (other.value > winner.value || (other.value == winner.value && other.column < winner.column))
                    winner.value = other.value, winner.column = other.column;
            }
            const bool found = !winner.broken && winner.value > -INFINITY;
            best[r] = found ? winner.column : 0;
            finite[r] = found;
        }
    }
}

}  // namespace
