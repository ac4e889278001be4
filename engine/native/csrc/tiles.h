// Products by AMX tiles, of 16 rows or columns and 16 words along k. Any number of rows goes through them, so that a
// row's sums have the same order along k alone and in a batch.
#pragma once

#include "vectors.h"

namespace {

constexpr int TILE = 16;

#if defined(__AMX_TILE__)

constexpr bool HAS_TILES = true;

// Rows that the tiles of a and c have; 0: this thread's tiles are not set up. Those of b always have 16.
thread_local int tile_rows = 0;

inline void set_up_tiles(int rows) {
    if (tile_rows == rows) return;
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {1};
    for (int t = 0; t < 8; t++) shape.row_bytes[t] = 64, shape.rows[t] = uint8_t(t < 6 ? rows : TILE);
    _tile_loadconfig(&shape);
    tile_rows = rows;
}

// A thread that leaves the kernels leaves no tiles to whoever uses them next, and no kilobytes to switch.
inline void release_tiles() {
    if (tile_rows) _tile_release();
    tile_rows = 0;
}

// Tiles 0 to 3: c, two of rows by two of columns. 4, 5: a. 6, 7: b. Numbers of tiles are literals in instructions.
#define TILE_DOT(c, a, b)                       \
    if constexpr (D::P == 2)                    \
        _tile_dpbf16ps(c, a, b);                \
    else if constexpr (D::IS_A_SIGNED)          \
        _tile_dpbsud(c, a, b);                  \
    else                                        \
        _tile_dpbusd(c, a, b);

// What sums start from: zero, a number for each column, or what c holds.
enum class Start { ZERO, COLUMNS, SUMS };

// c0 and, with BOTH, c1 [16][ldc] = a0, a1 [16][lda] times blocks of kb words, a multiple of 16; PANEL columns from
// `column` on. from: with Start::COLUMNS [PANEL]. ahead: for each block another that is fetched meanwhile, or null.
// Compilers don't see what tiles read: see `settle_memory`.
template <class D, bool BOTH>
void tile_pair(const u32* a0, const u32* a1, long lda, const u32* const* blocks, int num_blocks, int kb, long ldb,
               long column, Start start, const int32_t* from, u32* c0, u32* c1, long ldc, const u32* const* ahead) {
    if (start == Start::ZERO) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) _tile_zero(2);
        if constexpr (BOTH) _tile_zero(3);
    } else {
        const bool sums = start == Start::SUMS;
        const void *first = sums ? (const void*)c0 : from, *second = sums ? (const void*)c1 : from;
        const long stride = sums ? ldc * 4 : 0;
        _tile_loadd(0, first, stride);
        _tile_loadd(1, (const u32*)first + VL, stride);
        if constexpr (BOTH) _tile_loadd(2, second, stride);
        if constexpr (BOTH) _tile_loadd(3, (const u32*)second + VL, stride);
    }
    for (int j = 0; j < num_blocks; j++) {
        const u32* b = blocks[j] + column;
        const u32* fetched = ahead && ahead[j] ? ahead[j] + column * kb : nullptr;
        for (int k = 0; k < kb; k += TILE, a0 += TILE, a1 += TILE, b += TILE * ldb) {
            if (fetched)
                for (int line = 0; line < TILE * PANEL; line += 64 / sizeof(u32))
                    _mm_prefetch((const char*)(fetched + k * PANEL + line), _MM_HINT_T1);
            _tile_loadd(4, a0, lda * 4);
            _tile_loadd(6, b, ldb * 4);
            TILE_DOT(0, 4, 6)
            _tile_loadd(7, b + VL, ldb * 4);
            TILE_DOT(1, 4, 7)
            if constexpr (BOTH) {
                _tile_loadd(5, a1, lda * 4);
                TILE_DOT(2, 5, 6)
                TILE_DOT(3, 5, 7)
            }
        }
    }
    _tile_stored(0, c0, ldc * 4);
    _tile_stored(1, c0 + VL, ldc * 4);
    if constexpr (BOTH) _tile_stored(2, c1, ldc * 4);
    if constexpr (BOTH) _tile_stored(3, c1 + VL, ldc * 4);
}

#undef TILE_DOT

#else

constexpr bool HAS_TILES = false;
inline void set_up_tiles(int) {}
inline void release_tiles() {}
enum class Start { ZERO, COLUMNS, SUMS };
template <class D, bool BOTH>
void tile_pair(const u32*, const u32*, long, const u32* const*, int, int, long, long, Start, const int32_t*, u32*, u32*,
               long, const u32* const*);

#endif

// All that was written before is in memory for the tiles.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// The rows of a product, cut into tiles. The last tile ends with the last row, and repeats some of the tile before it;
// fewer than 16 rows make one smaller tile.
struct TileRows {
    int rows, tiles;
    explicit TileRows(int rows) : rows(rows), tiles((rows + TILE - 1) / TILE) { set_up_tiles(rows < TILE ? rows : TILE); }
    int first(int tile) const { return tile + 1 < tiles || rows < TILE ? tile * TILE : rows - TILE; }

    // Calls f(tile, both) for every other tile; both: it and the next one.
    template <class F> void for_pairs(F f) const {
        for (int t = 0; t < tiles; t += 2) f(t, t + 1 < tiles);
    }

    // One tile, or it and the next; c and ldc as given to `tile_pair`, c that of `tile` and `next` that of the next.
    template <class D>
    void multiply(int tile, bool both, const u32* a, long lda, const u32* const* blocks, int num_blocks, int kb, long ldb,
                  long column, Start start, const int32_t* from, u32* c, u32* next, long ldc, const u32* const* ahead) const {
        const u32* a0 = a + first(tile) * lda;
        if (both)
            tile_pair<D, true>(a0, a + first(tile + 1) * lda, lda, blocks, num_blocks, kb, ldb, column, start, from, c, next,
                               ldc, ahead);
        else
            tile_pair<D, false>(a0, nullptr, lda, blocks, num_blocks, kb, ldb, column, start, from, c, nullptr, ldc, ahead);
    }
};

// As `product` of product.h, with blocks of whole tiles; columns: a multiple of PANEL.
template <class D>
void tile_product(const u32* a, long lda, int rows, const u32* const* blocks, int num_blocks, int kb, long ldb, int columns,
                  u32* c, long ldc, const u32* const* ahead) {
    settle_memory();
    const TileRows of(rows);
    for (int column = 0; column < columns; column += PANEL)
        of.for_pairs([&](int tile, bool both) {
            u32* to = c + column;
            of.multiply<D>(tile, both, a, lda, blocks, num_blocks, kb, ldb, column, Start::ZERO, nullptr,
                           to + of.first(tile) * ldc, both ? to + of.first(tile + 1) * ldc : nullptr, ldc,
                           tile == 0 ? ahead : nullptr);
        });
}

// c has each tile by itself: what the last one repeats is dropped.
inline void put_last_tile(const TileRows& of, void* c) {
    const int begin = (of.tiles - 1) * TILE, repeated = begin - of.first(of.tiles - 1);
    u32* to = (u32*)c + begin * PANEL;
    if (repeated) __builtin_memmove(to, to + repeated * PANEL, (of.rows - begin) * PANEL * 4);
}

constexpr int TILE_DEPTH = 8 * TILE;  // words of a panel that stay in the first cache while all rows meet them

// c [rows, rounded up to 16][PANEL] = a [rows][lda] times a panel. The whole of it may be written, but rows are in place.
template <class D>
void tile_panel(const u32* a, long lda, int rows, const u32* b, int kw, u32* c, const u32* ahead) {
    settle_memory();
    const TileRows of(rows);
    for (int k = 0; k < kw; k += TILE_DEPTH, b += TILE_DEPTH * PANEL) {
        const int depth = kw - k < TILE_DEPTH ? kw - k : TILE_DEPTH;
        const u32* fetched = ahead ? ahead + int64_t(k) * PANEL : nullptr;
        of.for_pairs([&](int tile, bool both) {
            u32* to = c + tile * TILE * PANEL;
            of.multiply<D>(tile, both, a + k, lda, &b, 1, depth, PANEL, 0, k ? Start::SUMS : Start::ZERO, nullptr, to,
                           to + TILE * PANEL, PANEL, tile == 0 && fetched ? &fetched : nullptr);
        });
    }
    put_last_tile(of, c);
}

}  // namespace
