// One vocabulary over the instruction sets. A vector holds VL 32-bit lanes; a "word" is 32 bits of consecutive elements
// along k: one float32, two bfloat16 or four int8. Every product here is acc[n] += dot(word of a, word of b[n]), so one
// microkernel serves all element types.
//
// Everything has internal linkage: the same source is compiled once per instruction set, and the linker must never
// take one set's copy of an inline function for another's.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

typedef uint32_t u32;

#if defined(__AVX512F__)

constexpr int VL = 16;
constexpr int TILE_ROWS = 12;  // x 2 vectors: 24 of the 32 registers accumulate
typedef __m512 vf;
typedef __m512i vi;

inline vi load_words(const void* p) { return _mm512_loadu_si512(p); }
inline vi spread(u32 word) { return _mm512_set1_epi32(int(word)); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf zero() { return _mm512_setzero_ps(); }
inline vi zero_i() { return _mm512_setzero_si512(); }
inline vi set1_i(int x) { return _mm512_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
// The second operand wins when one is NaN, so a running maximum is the first.
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf round_even(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi to_int(vf x) { return _mm512_cvtps_epi32(x); }
inline vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
inline vf as_float(vi x) { return _mm512_castsi512_ps(x); }
inline vi as_words(vf x) { return _mm512_castps_si512(x); }
inline vi add_i(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi sub_i(vi a, vi b) { return _mm512_sub_epi32(a, b); }
template <int N> inline vi shift_left(vi x) { return _mm512_slli_epi32(x, N); }
template <int N> inline vi shift_right(vi x) { return _mm512_srli_epi32(x, N); }
template <int N> inline vi shift_right_signed(vi x) { return _mm512_srai_epi32(x, N); }
inline vi and_i(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi or_i(vi a, vi b) { return _mm512_or_si512(a, b); }
inline vf abs_f(vf x) { return _mm512_abs_ps(x); }
inline float sum(vf x) { return _mm512_reduce_add_ps(x); }
inline float peak(vf x) { return _mm512_reduce_max_ps(x); }
inline vf load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline void store_first(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }
// x where first <= lane < last, else other
inline vf pick(vf x, vf other, int first, int last) {
    return _mm512_mask_blend_ps(__mmask16(((1u << last) - 1) & ~((1u << first) - 1)), other, x);
}
inline bool all_below(vf x, vf limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ) == 0xffff; }
inline vi load_bytes(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vi load_halves(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_halves(uint16_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x)); }
inline void store_bytes(uint8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
inline vi load_ubytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// The lowest four bits of each lane as a number.
inline vf nibbles(vi x) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(x, numbers);
}
// 2 VL float8_e4m3fn -> float32, times 2^-8: their bits are a float16's, but for the exponent's bias.
inline void load_e4m3(const uint8_t* p, vf* two) {
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), 7);
    const __m512i bits = _mm512_and_si512(wide, _mm512_set1_epi16(short(0xbfff)));
    two[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(bits)), two[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}
// VL pairs of int8 -> VL words of two int16
inline vi widen_pairs(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vi dot_pairs(vi acc, vi a, vi b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }

#else

constexpr int VL = 8;
constexpr int TILE_ROWS = 6;  // x 2 vectors: 12 of the 16 registers accumulate
typedef __m256 vf;
typedef __m256i vi;

inline vi load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vi spread(u32 word) { return _mm256_set1_epi32(int(word)); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf zero() { return _mm256_setzero_ps(); }
inline vi zero_i() { return _mm256_setzero_si256(); }
inline vi set1_i(int x) { return _mm256_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf round_even(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
inline vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
inline vf as_float(vi x) { return _mm256_castsi256_ps(x); }
inline vi as_words(vf x) { return _mm256_castps_si256(x); }
inline vi add_i(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi sub_i(vi a, vi b) { return _mm256_sub_epi32(a, b); }
template <int N> inline vi shift_left(vi x) { return _mm256_slli_epi32(x, N); }
template <int N> inline vi shift_right(vi x) { return _mm256_srli_epi32(x, N); }
template <int N> inline vi shift_right_signed(vi x) { return _mm256_srai_epi32(x, N); }
inline vi and_i(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi or_i(vi a, vi b) { return _mm256_or_si256(a, b); }
inline vf abs_f(vf x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
inline float sum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float peak(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline vi lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline vi first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
inline vf load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_first(float* p, vf x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline vf pick(vf x, vf other, int first, int last) {
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first), first_lanes(last))));
}
inline bool all_below(vf x, vf limit) { return _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ)) == 0xff; }
inline vi load_bytes(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vi load_halves(const uint16_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i pack_halves(vi x) {
    vi even = _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4,
                                                      5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(even, 8));
}
inline void store_halves(uint16_t* p, vi x) { _mm_storeu_si128((__m128i*)p, pack_halves(x)); }
inline void store_bytes(uint8_t* p, vi x) {
    __m128i halves = _mm_and_si128(pack_halves(x), _mm_set1_epi16(0xff));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
inline vi load_ubytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf nibbles(vi x) { return to_float(and_i(x, set1_i(15))); }
inline void load_e4m3(const uint8_t* p, vf* two) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i bits = _mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff)));
    two[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits)), two[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
}
inline vi widen_pairs(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline vi dot_pairs(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }

#endif

// x itself, rounded: what follows is not contracted with what gave it.
inline vf rounded(vf x) {
    asm("" : "+v"(x));
    return x;
}
inline float rounded(float x) {
    asm("" : "+x"(x));
    return x;
}

// x itself. Without it gcc 12 keeps sums in two types at once all through the loop before, and runs out of registers.
inline vi settled(vi x) {
    asm("" : "+v"(x));
    return x;
}

// float32 -> bfloat16 in the low half of each lane, to nearest even; NaN stays NaN.
inline vi round_to_bf16(vf x) {
    vi bits = as_words(x);
    vi odd = and_i(shift_right<16>(bits), set1_i(1));
    vi rounded = shift_right<16>(add_i(add_i(bits, set1_i(0x7fff)), odd));
#if defined(__AVX512F__)
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set1_i(0x7fc0));
#else
    return _mm256_blendv_epi8(rounded, set1_i(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
#endif
}

inline void store_bf16(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    store_halves(p, round_to_bf16(x));
#endif
}

inline vf load_bf16(const uint16_t* p) { return as_float(shift_left<16>(load_halves(p))); }

// Pairs: VL columns with two consecutive k each, in two vectors whose lanes hold the two of a column side by side. Which
// columns are in which vector is whatever makes `pair_words` cheapest; `pair_lane` says it.

// Lane (VL and more: of the second vector) of a column's element k % 2.
inline int pair_lane(int column, int parity) {
#if defined(__AVX512BF16__)
    return 2 * column + parity;
#else
    return column % 4 / 2 * VL + column / 4 * 4 + column % 2 * 2 + parity;
#endif
}

// A number for each column -> for each lane of its pairs.
inline void spread_pairs(vf columns, vf* pairs) {
#if defined(__AVX512BF16__)
    pairs[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), columns);
    pairs[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), columns);
#elif defined(__AVX512F__)
    pairs[0] = _mm512_unpacklo_ps(columns, columns), pairs[1] = _mm512_unpackhi_ps(columns, columns);
#else
    pairs[0] = _mm256_unpacklo_ps(columns, columns), pairs[1] = _mm256_unpackhi_ps(columns, columns);
#endif
}

// Pairs -> words of bfloat16, column by column.
inline vi pair_words(vf one, vf two) {
#if defined(__AVX512BF16__)
    return (__m512i)_mm512_cvtne2ps_pbh(two, one);
#elif defined(__AVX512F__)
    return _mm512_packus_epi32(round_to_bf16(one), round_to_bf16(two));
#else
    return _mm256_packus_epi32(round_to_bf16(one), round_to_bf16(two));
#endif
}

// Pairs -> all columns' first and all their second elements.
inline void split_pairs(vf one, vf two, vf* first, vf* second) {
#if defined(__AVX512BF16__)
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *first = _mm512_permutex2var_ps(one, even, two);
    *second = _mm512_permutex2var_ps(one, add_i(even, set1_i(1)), two);
#elif defined(__AVX512F__)
    *first = _mm512_shuffle_ps(one, two, 0x88), *second = _mm512_shuffle_ps(one, two, 0xdd);
#else
    *first = _mm256_shuffle_ps(one, two, 0x88), *second = _mm256_shuffle_ps(one, two, 0xdd);
#endif
}

// 2^x for x <= 126 (no less than 2^-126): a polynomial of the fraction, fitted to a relative error of 1e-7; where the
// result is rounded to 8 bits or so anyway, `ROUGH`, of 1e-4.
template <bool ROUGH = false> inline vf exp2_f(vf x) {
    x = max(set1(-126.0f), x);  // in this order NaN comes through
    const vf n = round_even(x), r = sub(x, n);
    vf p;
    if (ROUGH) {
        p = fma(set1(5.500893091e-02f), r, set1(2.422109694e-01f));
        p = fma(p, r, set1(6.932829283e-01f));
    } else {
        p = fma(set1(1.326472709e-3f), r, set1(9.671512865e-3f));
        p = fma(p, r, set1(5.550733746e-2f));
        p = fma(p, r, set1(2.402224208e-1f));
        p = fma(p, r, set1(6.931469776e-1f));
    }
    p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    return mul(p, as_float(shift_left<23>(add_i(to_int(n), set1_i(127)))));
#endif
}

// Element types of a product. `P`: elements per word. `dot`: acc += a . b, lane by lane; int8 is unsigned a, signed b.
// `WIDENS`: no instruction multiplies them, so that products of rows widen those first.
struct F32 {
    static constexpr bool WIDENS = false;
    typedef u32 B;
    static inline vi load_b(const B* p) { return load_words(p); }
    static constexpr int P = 1;
    typedef vf acc;
    static inline void store_acc(u32* p, acc x) { store((float*)p, x); }
    static inline acc none() { return zero(); }
    static inline acc dot(acc c, vi a, vi b) { return fma(as_float(a), as_float(b), c); }
};

struct BF16 {
    typedef u32 B;
    static inline vi load_b(const B* p) { return load_words(p); }
    static constexpr int P = 2;
    typedef vf acc;
    static inline void store_acc(u32* p, acc x) { store((float*)p, x); }
    static inline acc none() { return zero(); }
    // A word's two elements.
    static inline vf even(vi x) { return as_float(shift_left<16>(x)); }
    static inline vf odd(vi x) { return as_float(and_i(x, set1_i(int(0xffff0000u)))); }
#if defined(__AVX512BF16__)
    static constexpr bool WIDENS = false;
    static inline acc dot(acc c, vi a, vi b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
    static constexpr bool WIDENS = true;
    static inline acc dot(acc c, vi a, vi b) { return fma(odd(a), odd(b), fma(even(a), even(b), c)); }
#endif
};

struct I8 {
    static constexpr bool WIDENS = false;
    static constexpr bool IS_A_SIGNED = false;
    typedef u32 B;
    static inline vi load_b(const B* p) { return load_words(p); }
    static constexpr int P = 4;
    typedef vi acc;
    static inline void store_acc(u32* p, acc x) {
#if defined(__AVX512F__)
        _mm512_storeu_si512(p, x);
#else
        _mm256_storeu_si256((__m256i*)p, x);
#endif
    }
    static inline acc none() { return zero_i(); }
    static inline acc dot(acc c, vi a, vi b) {
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(c, a, b);
#elif defined(__AVX512F__)
        // vpmaddubsw would saturate: widen even and odd bytes instead.
        vi a_even = _mm512_and_si512(a, _mm512_set1_epi16(0xff)), a_odd = _mm512_srli_epi16(a, 8);
        vi b_even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), b_odd = _mm512_srai_epi16(b, 8);
        return dot_pairs(dot_pairs(c, a_even, b_even), a_odd, b_odd);
#else
        vi a_even = _mm256_and_si256(a, _mm256_set1_epi16(0xff)), a_odd = _mm256_srli_epi16(a, 8);
        vi b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b_odd = _mm256_srai_epi16(b, 8);
        return dot_pairs(dot_pairs(c, a_even, b_even), a_odd, b_odd);
#endif
    }
};

// The other way round, a signed and b unsigned: the keys of int8 caches.
struct K8 : I8 {
    static constexpr bool IS_A_SIGNED = true;
    static inline acc dot(acc c, vi a, vi b) { return I8::dot(c, b, a); }
};

// Pairs of int16 by pairs of int8, which are widened as they are read: the values of int8 caches.
struct I16 {
    static constexpr bool WIDENS = false;
    typedef uint16_t B;
    static inline vi load_b(const B* p) { return widen_pairs((const int8_t*)p); }
    static constexpr int P = 2;
    typedef vi acc;
    static inline void store_acc(u32* p, acc x) { I8::store_acc(p, x); }
    static inline acc none() { return zero_i(); }
    static inline acc dot(acc c, vi a, vi b) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(c, a, b);
#else
        return dot_pairs(c, a, b);
#endif
    }
};

}  // namespace
