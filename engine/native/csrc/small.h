// Small weights: codes of 4 or 8 bits that become bfloat16 or float32 while they are multiplied, so that what is read
// from memory is small. A weight is scale * code + low in float32, each operation rounded, and then rounded to the
// activations' kind: just what its dequantized model would have stored, so both give the same bits.
//
// A panel's codes lie as its words are made: for each word 4 vectors of pairs (vectors.h), two for each VL columns.
//   8 bits: [word][4][VL] bytes.
//   4 bits: [word / 8][4][VL] lanes of 32 bits, the word's nibble at 4 * (word % 8): a shift brings the next one.
#pragma once

#include "api.h"
#include "product.h"

namespace {

inline bool is_small(int32_t kind) { return kind >= KIND_W8; }

constexpr int FEW_ROWS = 6;           // so many are multiplied by codes in registers; for more they are unpacked once
constexpr int TWO_PANEL_ROWS = 2;     // so few wait for their own sums, unless they take two panels at once
constexpr int CODES_AHEAD = 3072;     // bytes from what is unpacked to what is fetched

inline int64_t panel_bytes(int32_t kind, int kw) { return kind == KIND_Q4 ? int64_t(kw + 7) / 8 * PANEL * 8 : int64_t(kw) * PANEL * 2; }

// Where the code of element i of a panel's column lies; 4 bits: which byte, the odd words in its upper half.
inline int64_t code_at(int32_t kind, int column, int i) {
    const int vector = column / VL * 2 * VL + pair_lane(column % VL, i % 2), word = i / 2;
    if (kind == KIND_Q4) return (int64_t(word / 8) * 4 * VL + vector) * 4 + word % 8 / 2;
    return int64_t(word) * 4 * VL + vector;
}

// What the rule of a weight is made of. Where code times scale is exact in float32 it may be added to in one operation.
enum Rule { PLAIN, SCALED, FUSED, SEPARATE };

inline Rule rule_of(const Linear& w) {
    if (w.scales.form == FACTOR_NONE) return PLAIN;
    if (w.lows.form == FACTOR_NONE) return SCALED;
    // 11 bits by 8, and 11 by 8 by 4, fit the 24 of a float32.
    const bool half = w.scales.form == FACTOR_F16 || w.scales.form == FACTOR_BF16;
    return w.kind != KIND_E4M3 && w.scales.form != FACTOR_F32 && (half || w.kind == KIND_Q4) ? FUSED : SEPARATE;
}

inline vf load_factors(const Factors& f, int64_t at, int64_t step_at) {
    switch (f.form) {
        case FACTOR_F16: return load_f16((const uint16_t*)f.values + at);
        case FACTOR_BF16: return load_bf16((const uint16_t*)f.values + at);
        case FACTOR_F32: return load((const float*)f.values + at);
        case FACTOR_TWO_I8: return rounded(mul(load_f16(f.steps + step_at), to_float(load_bytes((const int8_t*)f.values + at))));
        default: return rounded(mul(load_f16(f.steps + step_at), to_float(load_ubytes((const uint8_t*)f.values + at))));
    }
}

// The factors of a panel's columns for one group, for each of its pairs.
inline void group_factors(const Factors& f, int panel, int groups, int group, vf* pairs) {
    const int64_t at = (int64_t(panel) * groups + group) * PANEL;
    const int64_t step_at = f.per ? (int64_t(panel) * ((groups + f.per - 1) / f.per) + group / f.per) * PANEL : 0;
    spread_pairs(load_factors(f, at, step_at), pairs);
    spread_pairs(load_factors(f, at + VL, step_at + VL), pairs + 2);
}

template <int RULE> inline vf weighed(vf code, vf scale, vf low) {
    if constexpr (RULE == PLAIN) return code;
    if constexpr (RULE == FUSED) return fma(code, scale, low);
    if constexpr (RULE == SEPARATE) return add(rounded(mul(code, scale)), low);
    return mul(code, scale);
}

// Calls f(word, pairs) for each word of PANELS panels from `panel` on, with four vectors of pairs in float32 for each.
template <int KIND, int RULE, int PANELS, class F>
inline __attribute__((always_inline)) void each_word(const Linear& w, int panel, F f) {
    const int groups = RULE == PLAIN ? 1 : (w.k + w.group - 1) / w.group;
    const int group_words = groups == 1 ? w.kw : w.group / 2;
    const int64_t stride = panel_bytes(w.kind, w.kw);
    const uint8_t* codes = (const uint8_t*)w.packed + panel * stride;
    int word = 0;
    for (int g = 0; g < groups; g++) {
        vf scale[4 * PANELS], low[4 * PANELS], pairs[4 * PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            if (RULE != PLAIN) group_factors(w.scales, panel + p, groups, g, scale + 4 * p);
            if (RULE == FUSED || RULE == SEPARATE) group_factors(w.lows, panel + p, groups, g, low + 4 * p);
        }
        if (KIND == KIND_E4M3)
            for (int q = 0; q < 4 * PANELS; q++) scale[q] = mul(scale[q], set1(256.0f));  // see load_e4m3; exact
        const int end = g + 1 == groups ? w.kw : word + group_words;
        while (word < end) {
            const int64_t offset = KIND == KIND_Q4 ? int64_t(word / 8) * PANEL * 8 : int64_t(word) * PANEL * 2;
            // Behind this panel's end comes the one that is taken at the same time: what is wanted lies behind that.
            const int64_t ahead = offset + CODES_AHEAD + (offset + CODES_AHEAD < stride ? 0 : (PANELS - 1) * stride);
            if constexpr (KIND == KIND_Q4) {
                const uint8_t* at = codes + offset;
                vi c[4 * PANELS];
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    for (int line = 0; line < PANEL * 8; line += 64)
                        _mm_prefetch((const char*)codes + p * stride + ahead + line, _MM_HINT_T0);
#pragma GCC unroll 4
                    for (int q = 0; q < 4; q++) c[4 * p + q] = load_words(at + p * stride + q * VL * 4);
                }
                for (int skipped = word % 8; skipped > 0; skipped--)
#pragma GCC unroll 8
                    for (int q = 0; q < 4 * PANELS; q++) c[q] = shift_right<4>(c[q]);
                const int stop = word / 8 * 8 + 8 < end ? word / 8 * 8 + 8 : end;
                for (; word < stop; word++) {
#pragma GCC unroll 8
                    for (int q = 0; q < 4 * PANELS; q++) {
                        pairs[q] = weighed<RULE>(nibbles(c[q]), scale[q], low[q]);
                        c[q] = shift_right<4>(c[q]);
                    }
                    f(word, pairs);
                }
            } else {
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    const uint8_t* at = codes + p * stride + offset;
                    for (int line = 0; line < PANEL * 2; line += 64)
                        _mm_prefetch((const char*)codes + p * stride + ahead + line, _MM_HINT_T0);
                    vf code[4];
                    if (KIND == KIND_E4M3) {
                        load_e4m3(at, code), load_e4m3(at + 2 * VL, code + 2);
                    } else {
#pragma GCC unroll 4
                        for (int q = 0; q < 4; q++) code[q] = to_float(load_bytes((const int8_t*)at + q * VL));
                    }
#pragma GCC unroll 4
                    for (int q = 0; q < 4; q++) pairs[4 * p + q] = weighed<RULE>(code[q], scale[4 * p + q], low[4 * p + q]);
                }
                f(word++, pairs);
            }
        }
    }
}

// A few rows of bfloat16 by PANELS panels; c [PANELS][MR][PANEL].
template <int KIND, int RULE, int MR, int PANELS>
void few_rows(const Linear& w, int panel, const u32* a, long lda, float* c) {
    vf acc[MR][2 * PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * PANELS; v++) acc[r][v] = zero();
    each_word<KIND, RULE, PANELS>(w, panel, [&](int word, const vf* pairs) __attribute__((always_inline)) {
        vi words[2 * PANELS];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * PANELS; v++) words[v] = pair_words(pairs[2 * v], pairs[2 * v + 1]);
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            const vi av = spread(a[r * lda + word]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * PANELS; v++) acc[r][v] = BF16::dot(acc[r][v], av, words[v]);
        }
    });
#pragma GCC unroll 4
    for (int v = 0; v < 2 * PANELS; v++)
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) store(c + (v / 2 * MR + r) * PANEL + v % 2 * VL, acc[r][v]);
}

// A panel as words of bfloat16 [kw][PANEL], or float32 [2 kw][PANEL].
template <int KIND, int RULE, bool F32> void unpack(const Linear& w, int panel, u32* out) {
    each_word<KIND, RULE, 1>(w, panel, [&](int word, const vf* pairs) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            if constexpr (F32) {
                float* to = (float*)out + int64_t(word) * 2 * PANEL + v * VL;
                vf first, second;
                split_pairs(pairs[2 * v], pairs[2 * v + 1], &first, &second);
                store(to, first), store(to + PANEL, second);
            } else {
                store((float*)out + int64_t(word) * PANEL + v * VL, as_float(pair_words(pairs[2 * v], pairs[2 * v + 1])));
            }
        }
    });
}

typedef void (*FewRows)(const Linear&, int panel, const u32* a, long lda, float* c);
typedef void (*Unpack)(const Linear&, int panel, u32* out);

struct SmallKernels {
    FewRows few[FEW_ROWS];
    FewRows two_panels[TWO_PANEL_ROWS];
    Unpack bf16, f32;
};

template <int KIND, int RULE> inline const SmallKernels* small_kernels() {
    static const SmallKernels kernels = {
        {few_rows<KIND, RULE, 1, 1>, few_rows<KIND, RULE, 2, 1>, few_rows<KIND, RULE, 3, 1>, few_rows<KIND, RULE, 4, 1>,
         few_rows<KIND, RULE, 5, 1>, few_rows<KIND, RULE, 6, 1>},
        {few_rows<KIND, RULE, 1, 2>, few_rows<KIND, RULE, 2, 2>},
        unpack<KIND, RULE, false>,
        unpack<KIND, RULE, true>,
    };
    return &kernels;
}

template <int KIND> inline const SmallKernels* small_kernels_for(Rule rule) {
    return rule == SCALED ? small_kernels<KIND, SCALED>()
         : rule == FUSED  ? small_kernels<KIND, FUSED>() : small_kernels<KIND, SEPARATE>();
}

inline const SmallKernels* small_kernels_of(const Linear& w) {
    const Rule rule = rule_of(w);
    if (w.kind == KIND_W8) return small_kernels<KIND_Q8, PLAIN>();
    if (w.kind == KIND_Q4) return small_kernels_for<KIND_Q4>(rule);
    if (w.kind == KIND_Q8) return small_kernels_for<KIND_Q8>(rule);
    return rule == SCALED ? small_kernels<KIND_E4M3, SCALED>() : small_kernels<KIND_E4M3, SEPARATE>();
}

inline float half_to_float(uint16_t x) {
    uint16_t all[16] = {x};
    float out[VL];
    store(out, load_f16(all));
    return out[0];
}

inline float one_factor(const Factors& f, int64_t at, int64_t step_at) {
    switch (f.form) {
        case FACTOR_F16: return half_to_float(((const uint16_t*)f.values)[at]);
        case FACTOR_BF16: {
            const u32 bits = u32(((const uint16_t*)f.values)[at]) << 16;
            float x;
            __builtin_memcpy(&x, &bits, 4);
            return x;
        }
        case FACTOR_F32: return ((const float*)f.values)[at];
        case FACTOR_TWO_I8: return rounded(half_to_float(f.steps[step_at]) * ((const int8_t*)f.values)[at]);
        default: return rounded(half_to_float(f.steps[step_at]) * ((const uint8_t*)f.values)[at]);
    }
}

// Row `row` of W in float32, x [k]: a token's embedding from the weights that are also the head's.
inline void unpack_row(const Linear& w, int64_t row, float* x) {
    const int panel = int(row / PANEL), column = int(row % PANEL), groups = (w.k + w.group - 1) / w.group;
    const uint8_t* codes = (const uint8_t*)w.packed + panel * panel_bytes(w.kind, w.kw);
    auto factor = [&](const Factors& f, int g) {
        const int64_t steps = f.per ? int64_t(panel) * ((groups + f.per - 1) / f.per) + g / f.per : 0;
        return one_factor(f, (int64_t(panel) * groups + g) * PANEL + column, steps * PANEL + column);
    };
    for (int g = 0; g < groups; g++) {
        const bool lowered = w.lows.form != FACTOR_NONE;
        const float scale = factor(w.scales, g), low = lowered ? factor(w.lows, g) : 0.0f;
        const int end = w.k < (g + 1) * w.group ? w.k : (g + 1) * w.group;
        for (int i = g * w.group; i < end; i++) {
            const uint8_t* byte = codes + code_at(w.kind, column, i);
            float code;
            if (w.kind == KIND_Q4) {
                code = float(i / 2 % 2 ? *byte >> 4 : *byte & 15);
            } else if (w.kind == KIND_E4M3) {
                const u32 bits = u32(*byte & 0x80) << 24 | u32(*byte & 0x7f) << 20;
                __builtin_memcpy(&code, &bits, 4);
                code *= 0x1p120f;
            } else {
                code = float((int8_t)*byte);
            }
            const float y = rounded(code * scale);
            x[w.order ? w.order[i] : i] = lowered ? y + low : y;
        }
    }
}

// Codes of rows [n][stride bytes] -> panels of `padded` columns, of which column c is row rows[c] (-1: zeros).
// 4 bits: two in a byte, the even column of W in its lower half. KIND_I8: words of four, and `offset` [groups][padded].
void pack_codes(int32_t kind, int32_t padded, int32_t k, const uint8_t* codes, int64_t stride, const int32_t* rows,
                u32* packed, int32_t* offset) {
    const int kw = kind == KIND_I8 ? (k + 3) / 4 : (k + 1) / 2;
    const int64_t bytes = kind == KIND_I8 ? int64_t(kw) * PANEL * 4 : panel_bytes(kind, kw);
    __builtin_memset(packed, 0, padded / PANEL * bytes);
    for (int c = 0; c < padded; c++) {
        uint8_t* to = (uint8_t*)packed + c / PANEL * bytes;
        const int column = c % PANEL;
        const int groups = (k + QUANT_GROUP - 1) / QUANT_GROUP;
        for (int g = 0; offset && g < groups; g++) offset[int64_t(g) * padded + c] = 0;
        if (rows[c] < 0) continue;
        const uint8_t* from = codes + rows[c] * stride;
        for (int i = 0; i < k; i++) {
            if (kind == KIND_Q4) {
                const uint8_t code = i % 2 ? from[i / 2] >> 4 : from[i / 2] & 15;
                to[code_at(kind, column, i)] |= i / 2 % 2 ? code << 4 : code;
            } else if (kind == KIND_I8) {
                to[(int64_t(i / 4) * PANEL + column) * 4 + i % 4] = from[i];
                offset[int64_t(i / QUANT_GROUP) * padded + c] -= 128 * (int8_t)from[i];
            } else {
                to[code_at(kind, column, i)] = from[i];
            }
        }
    }
}

}  // namespace
