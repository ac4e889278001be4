// What adapters add to a panel of a product, B (A x), while the panel's results are in the cache.
#pragma once

#include "linear.h"

namespace {

// Lays out B [n][rank] float32: rows [padded] says which row is each column of the panels, -1: none. b has room for all
// columns of all panels; the number that is stored is returned.
int32_t pack_low_rank(int32_t kind, int32_t padded, int32_t rank, const float* from, const int32_t* rows,
                      PanelRanks* ranks, void* b) {
    int32_t stored = 0;
    for (int p = 0; p < padded / PANEL; p++, rows += PANEL) {
        int32_t first[2], last[2];
        for (int half = 0; half < 2; half++) {
            first[half] = rank, last[half] = 0;
            for (int c = half * VL; c < (half + 1) * VL; c++)
                for (int j = 0; rows[c] >= 0 && j < rank; j++)
                    if (from[int64_t(rows[c]) * rank + j] != 0) {
                        if (j < first[half]) first[half] = j;
                        if (j >= last[half]) last[half] = j + 1;
                    }
        }
        for (int half = 0; half < 2; half++)  // where one needs nothing, both read the same columns
            if (last[half] == 0) first[half] = last[half] = last[!half] ? first[!half] : 0;
        const int32_t count = last[0] - first[0] > last[1] - first[1] ? last[0] - first[0] : last[1] - first[1];
        for (int half = 0; half < 2; half++)
            if (first[half] > rank - count) first[half] = rank - count;
        ranks[p] = {first[0], first[1], count, stored};
        for (int c = 0; c < PANEL; c++)
            for (int j = 0; j < count; j++) {
                const float x = rows[c] < 0 ? 0.0f : from[int64_t(rows[c]) * rank + first[c >= VL] + j];
                const int64_t at = int64_t(stored + j) * PANEL + c;
                if (kind == KIND_F32)
                    ((float*)b)[at] = x;
                else
                    ((uint16_t*)b)[at] = to_bf16(x);
            }
        stored += count;
    }
    return stored;
}

inline vf load_factor(const float* b) { return load(b); }
inline vf load_factor(const uint16_t* b) { return load_bf16(b); }

// c [R][ldc] = B x, or c += B x. x: R rows of A x, `stride` apart, from the first half's first column of B on; the second
// half's begins `other` elements behind it. Sums start from zero and run over the columns of B in order, for any R and
// wherever they go, so a row's result does not depend on the rows beside it.
template <class E, int R, bool SAME>
void multiply_b(const float* x, int64_t stride, int64_t other, const E* b, int count, float* c, int64_t ldc, bool adds) {
    vf sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
    // Rows are reached from every third one, as in product.h.
    const float *x3 = x + 3 * stride, *x6 = x + 6 * stride, *x9 = x + 9 * stride;
    for (int j = 0; j < count; j++, b += PANEL) {
        const vf one = load_factor(b), two = load_factor(b + VL);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float* at = (r < 3 ? x : r < 6 ? x3 : r < 9 ? x6 : x9) + (r % 3) * stride + j;
            const vf of_one = set1(at[0]), of_two = SAME ? of_one : set1(at[other]);
            sums[r][0] = fma(of_one, one, sums[r][0]);
            sums[r][1] = fma(of_two, two, sums[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++, c += ldc)
        for (int v = 0; v < 2; v++) store(c + v * VL, adds ? add(load(c + v * VL), sums[r][v]) : sums[r][v]);
}

template <class E> using MultiplyB = void (*)(const float*, int64_t, int64_t, const E*, int, float*, int64_t, bool);

template <class E, bool SAME> inline MultiplyB<E> multiply_b_of(int rows) {
    static const MultiplyB<E> table[] = {multiply_b<E, 1, SAME>, multiply_b<E, 2, SAME>, multiply_b<E, 3, SAME>,
                                         multiply_b<E, 4, SAME>, multiply_b<E, 5, SAME>, multiply_b<E, 6, SAME>,
#if defined(__AVX512F__)
                                         multiply_b<E, 7, SAME>, multiply_b<E, 8, SAME>, multiply_b<E, 9, SAME>,
                                         multiply_b<E, 10, SAME>, multiply_b<E, 11, SAME>, multiply_b<E, 12, SAME>
#endif
    };
    return table[rows - 1];
}

// B (A x) of one panel, into c [rows][ldc] or added to it, for rows with one adapter. x: A x of each, `stride` apart.
template <class E>
void expand_panel(const LowRank& low, int panel, int rows, const float* x, int64_t stride, float* c, int64_t ldc, bool adds) {
    const PanelRanks& ranks = low.ranks[panel];
    const E* b = (const E*)low.b + int64_t(ranks.before) * PANEL;
    // The next panel's columns lie behind these, but where results are added, the weight and other adapters are read first.
    const char* next = (const char*)(b + ranks.count * PANEL);
    for (int line = 0; line < int(ranks.count * PANEL * sizeof(E)); line += 64) __builtin_prefetch(next + line);
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, other = ranks.second - ranks.first;
    for (int t = 0; t < tiles; t++) {
        const int begin = int(long(rows) * t / tiles), count = int(long(rows) * (t + 1) / tiles) - begin;
        (other ? multiply_b_of<E, false> : multiply_b_of<E, true>)(count)(
            x + begin * stride + ranks.first, stride, other, b, ranks.count, c + begin * ldc, ldc, adds);
    }
}

}  // namespace
