// The one matrix product: c[rows, columns] = a[rows, k] b[k, columns], in words (see vectors.h).
//
// b is given as blocks of `kb` words along k, each [kb, ldb]: a weight panel is one block, the keys or values of a
// sequence are one block per page. Sums run over k in order in every variant of the kernel, so a row's result does not
// depend on the rows beside it.
#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 2 * VL;  // columns of a weight panel, and of one pass of the kernel

// Memory that is fetched while a product is computed: for each block another of its size, or null. Tiles of rows take
// turns with the same columns, and each fetches its part: all of it at once would be more than is under way at a time.
template <class B> struct Ahead {
    const B* const* blocks;
    int part, parts;

    // Where a tile begins in what belongs to its columns, `width` elements for each of kb steps, and how far it goes a step.
    const B* first(int block, long column, int kb, int width) const {
        return blocks && blocks[block] ? blocks[block] + column * kb + long(width) * kb * part / parts : nullptr;
    }
    long step(int width) const { return width / parts; }
};

template <class D, int MR, int NV>
void micro(const u32* a, long lda, const typename D::B* const* blocks, int num_blocks, int kb, long ldb, long column,
           u32* c, long ldc, const Ahead<typename D::B>& ahead) {
    typename D::acc acc[MR][NV];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = D::none();
    for (int j = 0; j < num_blocks; j++) {
        const typename D::B* b = blocks[j] + column;
        const u32* a0 = a + long(j) * kb;
        // Rows are reached from every third one: four pointers and one stride fit the address registers.
        const u32 *a3 = a0 + 3 * lda, *a6 = a0 + 6 * lda, *a9 = a0 + 9 * lda;
        // Fetching what is here already costs next to nothing.
        const typename D::B *next = ahead.first(j, column, kb, NV * VL), *fetched = next ? next : b;
        const long step = next ? ahead.step(NV * VL) : 0;
        for (int k = 0; k < kb; k++) {
            for (int line = 0; line < NV * VL; line += 64 / sizeof(typename D::B)) _mm_prefetch((const char*)(fetched + line), _MM_HINT_T1);
            fetched += step;
            vi bv[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) bv[v] = D::load_b(b + v * VL);
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) {
                const u32* base = r < 3 ? a0 : r < 6 ? a3 : r < 9 ? a6 : a9;
                vi av = spread(base[(r % 3) * lda]);
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) acc[r][v] = D::dot(acc[r][v], av, bv[v]);
            }
            a0++, a3++, a6++, a9++, b += ldb;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) D::store_acc(c + r * ldc + v * VL, acc[r][v]);
}

// `micro` of bfloat16 where no instruction multiplies it, and shifts take the multipliers' ports: the rows are widened
// piece by piece, once for all columns of the panel, and the loop only reads them. The same sums in the same order.
template <int MR, int NV>
void micro_widened(const u32* a, long lda, const u32* const* blocks, int num_blocks, int kb, long ldb, long column,
                   u32* c, long ldc, const Ahead<u32>& ahead) {
    constexpr int PIECE = 64;  // words of a row, whose elements stay in the first cache
    alignas(64) float rows[2][MR][PIECE];
    vf acc[MR][NV];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = zero();
    for (int j = 0; j < num_blocks; j++) {
        const u32* b = blocks[j] + column;
        const u32 *next = ahead.first(j, column, kb, NV * VL), *fetched = next ? next : b;
        const long step = next ? ahead.step(NV * VL) : 0;
        for (int first = 0; first < kb; first += PIECE) {
            const int count = kb - first < PIECE ? kb - first : PIECE;
            for (int r = 0; r < MR; r++) {
                const float* row = (const float*)(a + r * lda + long(j) * kb + first);
                for (int i = 0; i < count; i += VL) {
                    const vi words = as_words(count - i < VL ? load_first(row + i, count - i) : load(row + i));
                    store(&rows[0][r][i], BF16::even(words)), store(&rows[1][r][i], BF16::odd(words));
                }
            }
            for (int k = 0; k < count; k++) {
                for (int line = 0; line < NV * VL; line += 64 / sizeof(u32)) _mm_prefetch((const char*)(fetched + line), _MM_HINT_T1);
                fetched += step;
#pragma GCC unroll 2
                for (int parity = 0; parity < 2; parity++) {
                    vf bv[NV];
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) {
                        const vi words = load_words(b + v * VL);
                        bv[v] = parity ? BF16::odd(words) : BF16::even(words);
                    }
#pragma GCC unroll 12
                    for (int r = 0; r < MR; r++) {
                        const vf av = set1(rows[parity][r][k]);
#pragma GCC unroll 4
                        for (int v = 0; v < NV; v++) acc[r][v] = fma(av, bv[v], acc[r][v]);
                    }
                }
                b += ldb;
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store((float*)(c + r * ldc + v * VL), acc[r][v]);
}

template <class D>
using Micro = void (*)(const u32*, long, const typename D::B* const*, int, int, long, long, u32*, long,
                       const Ahead<typename D::B>&);

template <class D, int MR, int NV> constexpr Micro<D> best_micro() {
    if constexpr (D::WIDENS)
        return micro_widened<MR, NV>;
    else
        return micro<D, MR, NV>;
}

template <class D, int NV> inline Micro<D> micro_of(int rows) {
    if constexpr (NV == 4) {
        static const Micro<D> few[] = {best_micro<D, 1, 4>(), best_micro<D, 2, 4>(), best_micro<D, 3, 4>(),
#if defined(__AVX512F__)
                                       best_micro<D, 4, 4>(), best_micro<D, 5, 4>(), best_micro<D, 6, 4>()
#endif
        };
        return few[rows - 1];
    }
    static const Micro<D> table[] = {best_micro<D, 1, NV>(), best_micro<D, 2, NV>(), best_micro<D, 3, NV>(),
                                     best_micro<D, 4, NV>(), best_micro<D, 5, NV>(), best_micro<D, 6, NV>(),
#if defined(__AVX512F__)
                                     best_micro<D, 7, NV>(), best_micro<D, 8, NV>(), best_micro<D, 9, NV>(),
                                     best_micro<D, 10, NV>(), best_micro<D, 11, NV>(), best_micro<D, 12, NV>()
#endif
    };
    return table[rows - 1];
}

// One group of a product of quantized rows with a panel of int8 weights: its integers are summed exactly, scaled by the
// row's scale of that group and added in float32; with the last group come the columns' scales and bias (or null).
struct GroupedPanel {
    const int32_t* offset;  // what the group's sums start from, for rows are held as unsigned
    const float *row_scale, *scale, *bias;
    long scale_stride;
    bool first, last;
};

// c [MR][PANEL]
template <int MR>
void micro_grouped(const u32* a0, long lda, const u32* b, int kw, const GroupedPanel& group, float* c,
                   const Ahead<u32>& ahead) {
    const vi one = load_words(group.offset), two = load_words(group.offset + VL);
    vi acc[MR][2];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) acc[r][0] = one, acc[r][1] = two;
    const u32 *a3 = a0 + 3 * lda, *a6 = a0 + 6 * lda, *a9 = a0 + 9 * lda;
    const u32 *next = ahead.first(0, 0, kw, PANEL), *fetched = next ? next : b;
    const long step = next ? ahead.step(PANEL) : 0;
    for (int k = 0; k < kw; k++) {
        for (int line = 0; line < PANEL; line += 16) _mm_prefetch((const char*)(fetched + line), _MM_HINT_T1);
        fetched += step;
        const vi b0 = load_words(b), b1 = load_words(b + VL);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            const u32* base = r < 3 ? a0 : r < 6 ? a3 : r < 9 ? a6 : a9;
            const vi av = spread(base[(r % 3) * lda]);
            acc[r][0] = I8::dot(acc[r][0], av, b0);
            acc[r][1] = I8::dot(acc[r][1], av, b1);
        }
        a0++, a3++, a6++, a9++, b += PANEL;
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
        const vf of_row = set1(group.row_scale[r * group.scale_stride]);
        const vf x = to_float(settled(acc[r][0])), y = to_float(settled(acc[r][1]));
        float* to = c + r * PANEL;
        store(to, group.first ? mul(x, of_row) : fma(x, of_row, load(to)));
        store(to + VL, group.first ? mul(y, of_row) : fma(y, of_row, load(to + VL)));
    }
    if (!group.last) return;
    const vf scale0 = load(group.scale), scale1 = load(group.scale + VL);
    const vf bias0 = group.bias ? load(group.bias) : zero(), bias1 = group.bias ? load(group.bias + VL) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
        store(c + r * PANEL, fma(load(c + r * PANEL), scale0, bias0));
        store(c + r * PANEL + VL, fma(load(c + r * PANEL + VL), scale1, bias1));
    }
}

using MicroGrouped = void (*)(const u32*, long, const u32*, int, const GroupedPanel&, float*, const Ahead<u32>&);

inline MicroGrouped micro_grouped_of(int rows) {
    static const MicroGrouped table[] = {
        micro_grouped<1>, micro_grouped<2>, micro_grouped<3>, micro_grouped<4>, micro_grouped<5>, micro_grouped<6>,
#if defined(__AVX512F__)
        micro_grouped<7>, micro_grouped<8>, micro_grouped<9>, micro_grouped<10>, micro_grouped<11>, micro_grouped<12>,
#endif
    };
    return table[rows - 1];
}

// The same for few rows over several blocks that are columns of one result, `apart` from each other: more sums at once, in
// the same order along k. `ahead`: for each block another that is fetched meanwhile, or null.
template <class D, int MR, int BLOCKS>
void micro_wide(const u32* a, long lda, const typename D::B* const* blocks, int kw, long ldb, u32* c, long ldc, long apart,
                const typename D::B* const* ahead) {
    typename D::acc acc[MR][BLOCKS][2];
    const typename D::B *b[BLOCKS], *fetched[BLOCKS];
    long step[BLOCKS];
#pragma GCC unroll 4
    for (int i = 0; i < BLOCKS; i++) {
        b[i] = blocks[i];
        const bool fetches = ahead && ahead[i];
        fetched[i] = fetches ? ahead[i] : blocks[i];
        step[i] = fetches ? PANEL : 0;
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) acc[r][i][0] = acc[r][i][1] = D::none();
    }
    for (int k = 0; k < kw; k++) {
#pragma GCC unroll 4
        for (int i = 0; i < BLOCKS; i++) {
            for (int line = 0; line < PANEL; line += 64 / sizeof(typename D::B))
                _mm_prefetch((const char*)(fetched[i] + line), _MM_HINT_T1);
            fetched[i] += step[i];
            const vi one = D::load_b(b[i]), two = D::load_b(b[i] + VL);
            b[i] += ldb;
#pragma GCC unroll 6
            for (int r = 0; r < MR; r++) {
                const vi av = spread(a[r * lda + k]);
                acc[r][i][0] = D::dot(acc[r][i][0], av, one);
                acc[r][i][1] = D::dot(acc[r][i][1], av, two);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int i = 0; i < BLOCKS; i++) {
            D::store_acc(c + r * ldc + i * apart, acc[r][i][0]);
            D::store_acc(c + r * ldc + i * apart + VL, acc[r][i][1]);
        }
}

// How many blocks of keys `wide_product` takes at once for so many rows; 0: none.
inline int wide_blocks(int rows) { return rows <= TILE_ROWS / 4 ? 4 : rows <= TILE_ROWS / 2 ? 2 : 0; }

template <class D>
void wide_product(const u32* a, long lda, int rows, const typename D::B* const* blocks, int kw, u32* c, long ldc,
                  const typename D::B* const* ahead) {
    switch (rows) {
        case 1: return micro_wide<D, 1, TILE_ROWS / 4 >= 1 ? 4 : 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
#if defined(__AVX512F__)
        case 2: return micro_wide<D, 2, 4>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
        case 3: return micro_wide<D, 3, 4>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
        case 4: return micro_wide<D, 4, 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
        case 5: return micro_wide<D, 5, 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
        case 6: return micro_wide<D, 6, 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
#else
        case 2: return micro_wide<D, 2, 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
        case 3: return micro_wide<D, 3, 2>(a, lda, blocks, kw, PANEL, c, ldc, PANEL, ahead);
#endif
    }
}

// So few rows wait for their own sums, and for memory, unless they take two panels at once.
constexpr int PAIR_ROWS = TILE_ROWS / 2;

// c [2][rows][PANEL] of two panels; ahead: those that are fetched meanwhile, or null.
template <class D>
void pair_product(const u32* a, long lda, int rows, const u32* const* panels, int kw, float* c, const u32* const* ahead) {
    static constexpr decltype(&micro_wide<D, 1, 2>) table[] = {
        micro_wide<D, 1, 2>, micro_wide<D, 2, 2>, micro_wide<D, 3, 2>,
#if defined(__AVX512F__)
        micro_wide<D, 4, 2>, micro_wide<D, 5, 2>, micro_wide<D, 6, 2>,
#endif
    };
    table[rows - 1](a, lda, panels, kw, PANEL, (u32*)c, PANEL, rows * PANEL, ahead);
}

// As D, but its rows are widened word by word.
template <class D> struct WordByWord : D {
    static constexpr bool WIDENS = false;
};

// columns: a multiple of VL. ahead: for each block another of its size, which is fetched meanwhile; or null.
template <class D>
void product(const u32* a, long lda, int rows, const typename D::B* const* blocks, int num_blocks, int kb, long ldb,
             int columns, u32* c, long ldc, const typename D::B* const* ahead = nullptr) {
    // Vectors of 8 give few rows too little work to pay for widening them beforehand; more rows need a register for it.
    if constexpr (D::WIDENS && VL == 8)
        if (rows <= 4) return product<WordByWord<D>>(a, lda, rows, blocks, num_blocks, kb, ldb, columns, c, ldc, ahead);
    constexpr int most = D::WIDENS && VL == 8 ? TILE_ROWS - 1 : TILE_ROWS;
    const int tiles = (rows + most - 1) / most;
    int column = 0;
    // Few rows leave the multipliers waiting for their own results: more columns at once keep them busy.
    if (rows <= TILE_ROWS / 2)
        for (; columns - column >= 2 * PANEL; column += 2 * PANEL)
            micro_of<D, 4>(rows)(a, lda, blocks, num_blocks, kb, ldb, column, c + column, ldc, {ahead, 0, 1});
    for (; column < columns; column += PANEL) {
        const bool wide = columns - column >= PANEL;
        for (int t = 0; t < tiles; t++) {
            const int begin = int(long(rows) * t / tiles), count = int(long(rows) * (t + 1) / tiles) - begin;
            Micro<D> kernel = wide ? micro_of<D, 2>(count) : micro_of<D, 1>(count);
            kernel(a + begin * lda, lda, blocks, num_blocks, kb, ldb, column, c + begin * ldc + column, ldc,
                   {ahead, t, tiles});
        }
    }
}

}  // namespace
