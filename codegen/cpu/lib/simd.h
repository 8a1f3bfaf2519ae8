// f32x16: sixteen floats, one AVX-512 register or two AVX2 registers behind the same functions.
// load / store convert from and to float, bf16 (round to nearest even) and f16.
#pragma once
#include "dtypes.h"

namespace aotc {

#if defined(__AVX512F__)
struct f32x16 { __m512 v; };

static inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// When one operand is NaN the second is the result (the hardware's rule).
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
static inline f32x16 round_even(f32x16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a <= b ? x : y, lane by lane.
static inline f32x16 where_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), y.v, x.v)};
}
// p * 2^n for integral n <= 160 where x >= least (or x is NaN), and zero elsewhere.
static inline f32x16 scale_pow2(f32x16 p, f32x16 n, f32x16 x, float least) {
  __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(keep, p.v, n.v)};
}
static inline float reduce_add(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
static inline float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

static inline __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1u); }
static inline f32x16 widen_bf16(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
static inline __m256i narrow_bf16(f32x16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline f32x16 load(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
static inline f32x16 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline void store(bf16* p, f32x16 a) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(a)); }
static inline void store(f16* p, f32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, 0)); }
// First n lanes only (0 <= n <= 16): other lanes load as zero and are not stored; memory past n is not touched.
static inline f32x16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
static inline f32x16 load(const bf16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
static inline f32x16 load(const f16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
static inline void store(float* p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
static inline void store(bf16* p, f32x16 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a)); }
static inline void store(f16* p, f32x16 a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a.v, 0));
}
// Thirty-two bf16 as even and odd elements: two cheap bit operations, where unpacking in order takes shuffles.
static inline void load_even_odd(const bf16* p, f32x16& even, f32x16& odd) {
  __m512i u = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000)));
}
// The same word order back: dword i = (bf16 of even[i], bf16 of odd[i]).
static inline void store_even_odd(bf16* p, f32x16 even, f32x16 odd) {
#if defined(__AVX512BF16__)
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v)));
#else
  __m512i lo = _mm512_cvtepu16_epi32(narrow_bf16(even)), hi = _mm512_cvtepu16_epi32(narrow_bf16(odd));
  _mm512_storeu_si512(p, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
#endif
}
#else
struct f32x16 { __m256 lo, hi; };

static inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
static inline f32x16 round_even(f32x16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
static inline f32x16 where_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ))};
}
static inline __m256 pow2_int(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// Two half steps: 2^128 does not fit a float's exponent, its products with p < 1 do.
static inline __m256 scale_pow2_half(__m256 p, __m256 n, __m256 x, __m256 least) {
  __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
  __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(p, pow2_int(half)), pow2_int(_mm256_sub_epi32(i, half)));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}
static inline f32x16 scale_pow2(f32x16 p, f32x16 n, f32x16 x, float least) {
  __m256 l = _mm256_set1_ps(least);
  return {scale_pow2_half(p.lo, n.lo, x.lo, l), scale_pow2_half(p.hi, n.hi, x.hi, l)};
}
static inline float reduce_add(f32x16 a) {
  __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float reduce_max(f32x16 a) {
  __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
static inline __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
// bf16 bits of each lane in its low 16 bits.
static inline __m256i round_bf16(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm256_srli_epi32(r, 16);
}
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline f32x16 load(const bf16* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline f32x16 load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
static inline void store(bf16* p, f32x16 a) {
  __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));  // 128-bit halves interleaved
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void store(f16* p, f32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(a.hi, 0));
}
template <class T> static inline f32x16 load(const T* p, int n) {
  T full[16] = {};
  memcpy(full, p, n * sizeof(T));
  return load(full);
}
template <class T> static inline void store(T* p, f32x16 a, int n) {
  T full[16];
  store(full, a);
  memcpy(p, full, n * sizeof(T));
}
static inline void load_even_odd(const bf16* p, f32x16& even, f32x16& odd) {
  __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)p + 1);
  __m256i high = _mm256_set1_epi32((int)0xffff0000);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
static inline void store_even_odd(bf16* p, f32x16 even, f32x16 odd) {
  __m256i a = _mm256_or_si256(round_bf16(even.lo), _mm256_slli_epi32(round_bf16(odd.lo), 16));
  __m256i b = _mm256_or_si256(round_bf16(even.hi), _mm256_slli_epi32(round_bf16(odd.hi), 16));
  _mm256_storeu_si256((__m256i*)p, a);
  _mm256_storeu_si256((__m256i*)p + 1, b);
}
#endif

// Thirty-two elements in an order of the type's own (bf16: even, odd; others: first, second half). For sums over
// all elements, or for values that go back through store32, the order does not matter.
static inline void load32(const bf16* p, f32x16& a, f32x16& b) { load_even_odd(p, a, b); }
template <class T> static inline void load32(const T* p, f32x16& a, f32x16& b) { a = load(p); b = load(p + 16); }
static inline void store32(bf16* p, f32x16 a, f32x16 b) { store_even_odd(p, a, b); }
template <class T> static inline void store32(T* p, f32x16 a, f32x16 b) { store(p, a); store(p + 16, b); }

// e^t for |t| <= ln(2)/2: polynomial of degree 7 (Cephes expf), relative error below 2e-7.
static inline f32x16 exp_polynomial(f32x16 t) {
  f32x16 p = fma(splat(1.9875691500e-4f), t, splat(1.3981999507e-3f));
  p = fma(p, t, splat(8.3334519073e-3f));
  p = fma(p, t, splat(4.1665795894e-2f));
  p = fma(p, t, splat(1.6666665459e-1f));
  p = fma(p, t, splat(5.0000001201e-1f));
  return fma(p, t * t, t + splat(1.0f));
}
// Results below the least normal float are zero: a denormal costs a hundred cycles, and masked scores make many.
// The upper clamp keeps infinity out of the range reduction; NaN stays NaN.
static inline f32x16 exp2(f32x16 x) {
  x = min(splat(160.0f), x);
  f32x16 n = round_even(x);
  return scale_pow2(exp_polynomial((x - n) * splat(0.6931471806f)), n, x, -126.0f);
}
static inline f32x16 exp(f32x16 x) {
  x = min(splat(110.0f), x);
  f32x16 n = round_even(x * splat(1.4426950409f));
  f32x16 t = fma(n, splat(-0.693359375f), x);  // ln(2) in two parts: the first product is exact
  return scale_pow2(exp_polynomial(fma(n, splat(2.12194440e-4f), t)), n, x, -87.33654f);
}
static inline f32x16 sigmoid(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }
static inline f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }
// tanh(x) = 1 - 2 / (e^2x + 1); near zero that cancels, so the odd series serves there.
static inline f32x16 tanh(f32x16 x) {
  f32x16 far = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
  f32x16 s = x * x;
  f32x16 near = fma(fma(fma(splat(-17.0f / 315), s, splat(2.0f / 15)), s, splat(-1.0f / 3)), s * x, x);
  return where_le(s, splat(0.01f), near, far);
}

}  // namespace aotc
