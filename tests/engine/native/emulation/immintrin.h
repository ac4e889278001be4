// Emulates on AVX2 the instructions of larger instruction sets that the native kernels use, so that their paths can be
// tested on processors without them. EMULATED_SET says up to which: 1: avx512, 2: avx512_bf16, 3: amx.
//
// The kernels find this file in front of the compiler's own. What stands in their unnamed namespace hides the
// compiler's functions of the same names. Semantics are those of Intel's manuals, but that denormal numbers stay what
// they are, which instructions of bfloat16 take for zero; where an instruction would fault, the process aborts.
// Compilers must not contract products and sums (-ffp-contract=off), because `asm` that prevents it is left out: it
// names registers that AVX2 lacks.
#pragma once

#include_next <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define asm(...)
#define EMULATED inline __attribute__((always_inline))
#define __AVX512F__ 1
#undef _mm512_setr_ps
#undef _mm512_setr_epi32

namespace {

typedef float floats __attribute__((vector_size(64), may_alias));
typedef int32_t ints __attribute__((vector_size(64), may_alias));
typedef uint32_t uints __attribute__((vector_size(64), may_alias));
typedef int16_t shorts __attribute__((vector_size(64), may_alias));
typedef uint16_t ushorts __attribute__((vector_size(64), may_alias));

template <class R, class H> EMULATED H half_of(const R& x, int half) {
    H part;
    memcpy(&part, (const char*)&x + half * sizeof part, sizeof part);
    return part;
}
template <class R, class L> EMULATED R joined(const L& low, const L& high) {
    R all;
    memcpy(&all, &low, sizeof low), memcpy((char*)&all + sizeof low, &high, sizeof high);
    return all;
}
EMULATED __m256 half(__m512 x, int i) { return half_of<__m512, __m256>(x, i); }
EMULATED __m256i half(__m512i x, int i) { return half_of<__m512i, __m256i>(x, i); }
EMULATED __m128i half(__m256i x, int i) { return half_of<__m256i, __m128i>(x, i); }

#define BY_HALVES(RESULT, NAME, CALL, ...)                      \
    EMULATED RESULT NAME(__VA_ARGS__) {                           \
        const auto of = [&](int i) __attribute__((always_inline)) { return CALL; };            \
        return joined<RESULT>(of(0), of(1));                    \
    }
BY_HALVES(__m512, _mm512_fmadd_ps, _mm256_fmadd_ps(half(a, i), half(b, i), half(c, i)), __m512 a, __m512 b, __m512 c)
BY_HALVES(__m512, _mm512_add_ps, _mm256_add_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_sub_ps, _mm256_sub_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_mul_ps, _mm256_mul_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_div_ps, _mm256_div_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_max_ps, _mm256_max_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_min_ps, _mm256_min_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512i, _mm512_cvtps_epi32, _mm256_cvtps_epi32(half(a, i)), __m512 a)
BY_HALVES(__m512, _mm512_cvtepi32_ps, _mm256_cvtepi32_ps(half(a, i)), __m512i a)
BY_HALVES(__m512, _mm512_cvtph_ps, _mm256_cvtph_ps(half(a, i)), __m256i a)
BY_HALVES(__m512i, _mm512_cvtepi8_epi16, _mm256_cvtepi8_epi16(half(a, i)), __m256i a)
BY_HALVES(__m512i, _mm512_cvtepu16_epi32, _mm256_cvtepu16_epi32(half(a, i)), __m256i a)
BY_HALVES(__m512i, _mm512_cvtepi8_epi32, _mm256_cvtepi8_epi32(i ? _mm_srli_si128(a, 8) : a), __m128i a)
BY_HALVES(__m512i, _mm512_cvtepu8_epi32, _mm256_cvtepu8_epi32(i ? _mm_srli_si128(a, 8) : a), __m128i a)
BY_HALVES(__m512i, _mm512_madd_epi16, _mm256_madd_epi16(half(a, i), half(b, i)), __m512i a, __m512i b)
// These take pieces of 128 bits by themselves.
BY_HALVES(__m512i, _mm512_packus_epi32, _mm256_packus_epi32(half(a, i), half(b, i)), __m512i a, __m512i b)
BY_HALVES(__m512, _mm512_unpacklo_ps, _mm256_unpacklo_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
BY_HALVES(__m512, _mm512_unpackhi_ps, _mm256_unpackhi_ps(half(a, i), half(b, i)), __m512 a, __m512 b)
#undef BY_HALVES

template <class V> EMULATED V loaded(const void* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
EMULATED __m512 _mm512_loadu_ps(const void* p) { return loaded<__m512>(p); }
EMULATED __m512i _mm512_loadu_si512(const void* p) { return loaded<__m512i>(p); }
EMULATED void _mm512_storeu_ps(void* p, __m512 x) { memcpy(p, &x, sizeof x); }
EMULATED void _mm512_storeu_si512(void* p, __m512i x) { memcpy(p, &x, sizeof x); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
    floats x = {};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) x[i] = p[i];
    return x;
}
inline void _mm512_mask_storeu_ps(float* p, __mmask16 mask, __m512 x) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) p[i] = x[i];
}

EMULATED __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
EMULATED __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
EMULATED __m256i _mm512_castsi512_si256(__m512i x) { return half(x, 0); }
EMULATED __m256i _mm512_extracti64x4_epi64(__m512i x, int i) { return half(x, i); }
EMULATED __m512 _mm512_setzero_ps() { return floats{}; }
EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512 _mm512_set1_ps(float x) { return x - floats{}; }
EMULATED __m512i _mm512_set1_epi32(int x) { return __m512i(x + ints{}); }
EMULATED __m512i _mm512_set1_epi16(short x) { return __m512i(x + shorts{}); }
template <class... N> EMULATED __m512 _mm512_setr_ps(N... x) { return floats{float(x)...}; }
template <class... N> EMULATED __m512i _mm512_setr_epi32(N... x) { return __m512i(ints{x...}); }

EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) { return __m512i(uints(a) + uints(b)); }
EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return __m512i(uints(a) - uints(b)); }
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i _mm512_slli_epi32(__m512i x, unsigned n) { return __m512i(uints(x) << n); }
EMULATED __m512i _mm512_srli_epi32(__m512i x, unsigned n) { return __m512i(uints(x) >> n); }
EMULATED __m512i _mm512_srai_epi32(__m512i x, unsigned n) { return __m512i(ints(x) >> n); }
EMULATED __m512i _mm512_slli_epi16(__m512i x, unsigned n) { return __m512i(ushorts(x) << n); }
EMULATED __m512i _mm512_srli_epi16(__m512i x, unsigned n) { return __m512i(ushorts(x) >> n); }
EMULATED __m512i _mm512_srai_epi16(__m512i x, unsigned n) { return __m512i(shorts(x) >> n); }
EMULATED __m512 _mm512_abs_ps(__m512 x) { return __m512(ints(x) & 0x7fffffff); }
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i x) {
    typedef uint16_t halves __attribute__((vector_size(32)));
    return __m256i(__builtin_convertvector(uints(x), halves));
}
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i x) {
    typedef uint8_t bytes __attribute__((vector_size(16)));
    return __m128i(__builtin_convertvector(uints(x), bytes));
}

inline __mmask16 mask_of(ints truth) {
    unsigned mask = 0;
    for (int i = 0; i < 16; i++) mask |= unsigned(truth[i] & 1) << i;
    return __mmask16(mask);
}
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int comparison) {
    if (comparison == _CMP_LT_OQ) return mask_of(a < b);
    if (comparison == _CMP_UNORD_Q) return mask_of((a != a) | (b != b));
    abort();
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) a[i] = b[i];
    return a;
}
EMULATED __m512i _mm512_mask_mov_epi32(__m512i a, __mmask16 mask, __m512i b) {
    return __m512i(_mm512_mask_blend_ps(mask, __m512(a), __m512(b)));
}

EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) { return __builtin_shuffle(a, ints(index)); }
EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    return __builtin_shuffle(a, b, ints(index));
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int which) {
    floats x;
    for (int i = 0; i < 16; i++) x[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + (which >> i % 4 * 2 & 3)];
    return x;
}

EMULATED __m512 _mm512_roundscale_ps(__m512 x, int how) {
    if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) abort();
    return joined<__m512>(_mm256_round_ps(half(x, 0), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                          _mm256_round_ps(half(x, 1), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// a times 2^floor(b)
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    floats x;
    for (int i = 0; i < 16; i++) {
        const float n = b[i] < -1000 ? -1000 : b[i] > 1000 ? 1000 : b[i];
        x[i] = n != n ? n : __builtin_ldexpf(a[i], int(__builtin_floorf(n)));
    }
    return x;
}
template <class F> inline float reduced(__m512 x, F f) {  // as compilers do: the upper half with the lower one
    for (int left = 8; left > 0; left /= 2)
        for (int i = 0; i < left; i++) x[i] = f(x[i + left], x[i]);
    return x[0];
}
EMULATED float _mm512_reduce_add_ps(__m512 x) {
    return reduced(x, [](float a, float b) { return a + b; });
}
EMULATED float _mm512_reduce_max_ps(__m512 x) {
    return reduced(x, [](float a, float b) { return a > b ? a : b; });
}

#if EMULATED_SET >= 2

#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1

EMULATED uints to_bf16_bits(__m512 x) {
    const uints bits = uints(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const ints is_nan = x != x;
    return (nearest & uints(~is_nan)) | ((bits >> 16 | 0x40) & uints(is_nan));
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 x) { return (__m256bh)_mm512_cvtepi32_epi16(__m512i(to_bf16_bits(x))); }
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return (__m512bh)joined<__m512i>(_mm512_cvtepi32_epi16(__m512i(to_bf16_bits(low))),
                                     _mm512_cvtepi32_epi16(__m512i(to_bf16_bits(high))));
}
EMULATED floats even_bf16(uints x) { return floats(x << 16); }
EMULATED floats odd_bf16(uints x) { return floats(x & 0xffff0000u); }
EMULATED __m512 _mm512_dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
    const uints x = uints(a), y = uints(b);
    return _mm512_fmadd_ps(even_bf16(x), even_bf16(y), _mm512_fmadd_ps(odd_bf16(x), odd_bf16(y), c));
}
EMULATED __m512i _mm512_dpwssd_epi32(__m512i c, __m512i a, __m512i b) {
    return _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
}
// a unsigned, b signed
inline __m512i _mm512_dpbusd_epi32(__m512i c, __m512i a, __m512i b) {
    ints sum = ints(c);
    for (int byte = 0; byte < 4; byte++)
        sum += ints(uints(a) << (24 - 8 * byte) >> 24) * (ints(uints(b) << (24 - 8 * byte)) >> 24);
    return __m512i(sum);
}

#endif

#if EMULATED_SET >= 3

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbusd

struct EmulatedTile {
    int rows, bytes;
    alignas(64) ints row[16];  // as many lanes as bytes / 4; others are zero
};
thread_local EmulatedTile emulated_tiles[8];

inline void need(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "this instruction faults on a processor with AMX: %s\n", what);
    abort();
}

inline EmulatedTile& tile_at(int number) {
    need(number >= 0 && number < 8 && emulated_tiles[number].rows, "its tile is not configured");
    return emulated_tiles[number];
}

inline void _tile_release() { memset(emulated_tiles, 0, sizeof emulated_tiles); }

inline void _tile_loadconfig(const void* from) {
    const uint8_t* config = (const uint8_t*)from;
    need(config[0] == 1, "the palette is not 1");
    for (int i = 1; i < 64; i++)
        need((i >= 16 && i < 32) || (i >= 48 && i < 56) || !config[i], "a reserved byte is not zero");
    _tile_release();
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * t, 2);
        need(bytes <= 64 && config[48 + t] <= 16 && !bytes == !config[48 + t], "a tile's shape");
        emulated_tiles[t].rows = config[48 + t], emulated_tiles[t].bytes = bytes;
    }
}

inline void _tile_zero(int tile) { memset(tile_at(tile).row, 0, sizeof emulated_tiles[tile].row); }

inline void _tile_loadd(int tile, const void* base, long stride) {
    _tile_zero(tile);
    for (int r = 0; r < tile_at(tile).rows; r++)
        memcpy(&emulated_tiles[tile].row[r], (const char*)base + r * stride, emulated_tiles[tile].bytes);
}

inline void _tile_stored(int tile, void* base, long stride) {
    for (int r = 0; r < tile_at(tile).rows; r++)
        memcpy((char*)base + r * stride, &emulated_tiles[tile].row[r], emulated_tiles[tile].bytes);
}

// Calls f(row of c, word of a for all lanes, row of b) for each row of c and word along k, in order.
template <class F> inline void each_tile_word(int c, int a, int b, F f) {
    EmulatedTile &to = tile_at(c), &left = tile_at(a), &right = tile_at(b);
    need(c != a && c != b && a != b, "two of its tiles are one");
    const bool fit = to.rows == left.rows && to.bytes == right.bytes && left.bytes / 4 == right.rows;
    need(fit, "its tiles don't fit each other");
    for (int m = 0; m < to.rows; m++)
        for (int k = 0; k < right.rows; k++) f(m, __m512i(left.row[m][k] + ints{}), __m512i(right.row[k]));
}

inline void _tile_dpbf16ps(int c, int a, int b) {
    floats even[16] = {}, odd[16] = {};
    each_tile_word(c, a, b, [&](int m, __m512i x, __m512i y) {
        even[m] = _mm512_fmadd_ps(even_bf16(uints(x)), even_bf16(uints(y)), even[m]);
        odd[m] = _mm512_fmadd_ps(odd_bf16(uints(x)), odd_bf16(uints(y)), odd[m]);
    });
    for (int m = 0; m < tile_at(c).rows; m++)
        emulated_tiles[c].row[m] = ints(floats(emulated_tiles[c].row[m]) + (even[m] + odd[m]));
}
inline void _tile_dpbusd(int c, int a, int b) {
    each_tile_word(c, a, b, [&](int m, __m512i x, __m512i y) {
        emulated_tiles[c].row[m] = ints(_mm512_dpbusd_epi32(__m512i(emulated_tiles[c].row[m]), x, y));
    });
}
inline void _tile_dpbsud(int c, int a, int b) {
    each_tile_word(c, a, b, [&](int m, __m512i x, __m512i y) {
        emulated_tiles[c].row[m] = ints(_mm512_dpbusd_epi32(__m512i(emulated_tiles[c].row[m]), y, x));
    });
}

#endif

}  // namespace
