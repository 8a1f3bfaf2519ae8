// The inner product of a few rows of x with 16-wide column blocks of packed weights, in registers.
//
// Packed weights of a logical [N, K] matrix (y[m, n] = sum_k x[m, k] W[n, k]), one block per 16 columns:
//   n16k2 (bf16)      [ceil(N/16)][ceil(K/2)][16][2]   pairs along k as vdpbf16ps and AMX want them; odd K zero padded
//   n16k1 (f32, f16)  [ceil(N/16)][K][16]
#pragma once
#include "simd.h"

#define AOTC_INLINE static inline __attribute__((always_inline))

namespace aotc {

// k values that one step along a block covers: 2 in n16k2, 1 in n16k1. A step is 16 * k_step elements.
template <class W> struct Packing { static constexpr int k_step = 1; };
template <> struct Packing<bf16> { static constexpr int k_step = 2; };

// Elements of one packed block of 16 columns.
template <class W> static inline long block_elements(int K) {
  return ceil_div(K, Packing<W>::k_step) * Packing<W>::k_step * 16;
}

// Dot<X, W>: load one step of a block, and multiply-add it with the x values of one row at that step.
// `native` says that x is used where it lies; otherwise dot_tile converts x to float piece by piece.
template <class X, class W> struct Dot { static constexpr bool native = false; };

template <class W> struct DotFloat {  // n16k1 weights
  static constexpr bool native = true;
  using Step = f32x16;
  AOTC_INLINE Step load_step(const W* w) { return load(w); }
  AOTC_INLINE f32x16 madd(f32x16 acc, const float* x, Step w) { return fma(splat(x[0]), w, acc); }
  AOTC_INLINE f32x16 madd_last(f32x16 acc, const float* x, Step w) { return madd(acc, x, w); }
};
template <> struct Dot<float, float> : DotFloat<float> {};
template <> struct Dot<float, f16> : DotFloat<f16> {};

template <> struct Dot<float, bf16> {
  static constexpr bool native = true;
  struct Step { f32x16 even, odd; };
  AOTC_INLINE Step load_step(const bf16* w) { Step s; load_even_odd(w, s.even, s.odd); return s; }
  AOTC_INLINE f32x16 madd(f32x16 acc, const float* x, Step w) {
    return fma(splat(x[1]), w.odd, fma(splat(x[0]), w.even, acc));
  }
  AOTC_INLINE f32x16 madd_last(f32x16 acc, const float* x, Step w) { return fma(splat(x[0]), w.even, acc); }
};

#if defined(__AVX512BF16__)
template <> struct Dot<bf16, bf16> {
  static constexpr bool native = true;
  using Step = __m512i;
  AOTC_INLINE Step load_step(const bf16* w) { return _mm512_loadu_si512(w); }
  AOTC_INLINE f32x16 madd_pair(f32x16 acc, uint32_t pair, Step w) {
    __m512i x = _mm512_set1_epi32((int)pair);
#if defined(__clang__) && __clang_major__ < 18
    __asm__("" : "+v"(x));  // clang 16 crashes on a vdpbf16ps whose operand it knows to be a broadcast
#endif
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)x, (__m512bh)w)};
  }
  AOTC_INLINE f32x16 madd(f32x16 acc, const bf16* x, Step w) {
    uint32_t pair;
    memcpy(&pair, x, 4);
    return madd_pair(acc, pair, w);
  }
  AOTC_INLINE f32x16 madd_last(f32x16 acc, const bf16* x, Step w) { return madd_pair(acc, x->bits, w); }
};
#endif

// Register tile [U][MR][NB]: U independent copies along k hide the latency of the multiply-add when MR * NB is small.
// acc[m][j] += x[m][0..K) . block j. With Prefetch > 0 each step asks for the line so many bytes ahead.
template <int MR, int NB, int U, int Prefetch, class X, class W>
AOTC_INLINE void dot_steps(const X* x, long ldx, const W* const (&b)[NB], int K, f32x16 (&acc)[MR][NB]) {
  using D = Dot<X, W>;
  constexpr int KS = Packing<W>::k_step;
  constexpr int stride = 16 * KS;
  f32x16 part[U][MR][NB];
#pragma GCC unroll 16
  for (int u = 0; u < U; u++)
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
      for (int j = 0; j < NB; j++) part[u][m][j] = u ? splat(0.0f) : acc[m][j];
  int steps = K / KS, s = 0;
  for (; s + U <= steps; s += U)
#pragma GCC unroll 16
    for (int u = 0; u < U; u++) {
      typename D::Step w[NB];
#pragma GCC unroll 16
      for (int j = 0; j < NB; j++) {
        const W* line = b[j] + (long)(s + u) * stride;
        if (Prefetch) _mm_prefetch((const char*)line + Prefetch, _MM_HINT_T0);
        w[j] = D::load_step(line);
      }
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
        for (int j = 0; j < NB; j++) part[u][m][j] = D::madd(part[u][m][j], x + m * ldx + (s + u) * KS, w[j]);
    }
  for (; s * KS < K; s++) {  // what the unrolled loop left, and the single last k of an odd K
    bool whole = (s + 1) * KS <= K;
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) {
      typename D::Step w = D::load_step(b[j] + (long)s * stride);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const X* xs = x + m * ldx + s * KS;
        part[0][m][j] = whole ? D::madd(part[0][m][j], xs, w) : D::madd_last(part[0][m][j], xs, w);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) {
#pragma GCC unroll 16
      for (int u = 1; u < U; u++) part[0][m][j] = part[0][m][j] + part[u][m][j];
      acc[m][j] = part[0][m][j];
    }
}

// dot_steps for any pair of types: x that the instructions cannot take is converted to float, 256 values of k at a time.
template <int MR, int NB, int U, int Prefetch, class X, class W>
AOTC_INLINE void dot_tile(const X* x, long ldx, const W* const (&b)[NB], int K, f32x16 (&acc)[MR][NB]) {
  if constexpr (Dot<X, W>::native) {
    dot_steps<MR, NB, U, Prefetch>(x, ldx, b, K, acc);
  } else {
    constexpr int piece = 256;
    float xf[MR][piece];
    for (int k0 = 0; k0 < K; k0 += piece) {
      int n = min_i(piece, K - k0);
      for (int m = 0; m < MR; m++) {
        int k = 0;
        for (; k + 16 <= n; k += 16) store(&xf[m][k], load(x + m * ldx + k0 + k));
        for (; k < n; k++) xf[m][k] = to_f32(x[m * ldx + k0 + k]);
      }
      const W* piece_b[NB];
      for (int j = 0; j < NB; j++) piece_b[j] = b[j] + (long)k0 * 16;
      dot_steps<MR, NB, U, Prefetch>(&xf[0][0], (long)piece, piece_b, n, acc);
    }
  }
}

}  // namespace aotc
