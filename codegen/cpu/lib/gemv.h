// Few rows (1 to 8) times packed weights: as fast as the weights stream from memory.
#pragma once
#include "gemm.h"

namespace aotc {

// Register tile of gemv<M>: enough independent sums to hide the latency of a multiply-add, few enough for the registers.
// One block of columns at a time streams best; from a few rows on two share the loads of x.
template <int M, bool Pair> struct GemvShape {
#if defined(__AVX512F__)
  static constexpr int rows = M, blocks = Pair || M >= 4 ? 2 : 1, sums = 8;
#else
  static constexpr int rows = M < 3 ? M : 3, blocks = Pair || M >= 3 ? 2 : 1, sums = 4;
#endif
  static constexpr int unroll = rows * blocks >= sums ? 1 : sums / (rows * blocks);
};

// Ahead of a thread's own line: its blocks are one contiguous run, so a constant distance crosses pages and blocks.
static constexpr int gemv_prefetch = 2048;

template <int MR, int U, int NB, class X, class W>
AOTC_INLINE void gemv_rows(const X* x, long ldx, const W* const (&b)[NB], int K, float (*out)[16 * NB]) {
  f32x16 acc[MR][NB];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) acc[m][j] = splat(0.0f);
  dot_tile<MR, NB, U, gemv_prefetch>(x, ldx, b, K, acc);
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) store(&out[m][16 * j], acc[m][j]);
}

// All M rows of NB blocks, a register tile of rows at a time: out[m][16 j + c].
template <int M, bool Pair, int NB, class X, class W>
AOTC_INLINE void gemv_tile(const X* x, long ldx, const W* const (&b)[NB], int K, float (*out)[16 * NB]) {
  using Shape = GemvShape<M, Pair>;
  constexpr int R = Shape::rows;
  int m = 0;
  for (; m + R <= M; m += R) gemv_rows<R, Shape::unroll>(x + m * ldx, ldx, b, K, out + m);
  if constexpr (M % R != 0) gemv_rows<M % R, Shape::unroll>(x + m * ldx, ldx, b, K, out + m);
}

// With AMX two rows already keep the vector units too busy; the tiles do up to sixteen in the time of one.
template <int M, class X, class W> struct GemvUsesAmx { static constexpr bool value = UsesAmx<X, W>::value && M > 1; };

// y = x W^T for x [M, K] (row stride ldx elements) and packed W of N columns. Each thread does a contiguous run of
// blocks and calls epi(m, n, acc, count) once for every row m and columns [n, n + count); count = 16 but at the end of N.
template <int M, class X, class W, class Epi>
static inline void gemv(const X* x, long ldx, const W* w, int N, int K, int tid, int nthreads, Epi&& epi) {
  if constexpr (GemvUsesAmx<M, X, W>::value) return gemm(x, ldx, w, M, N, K, tid, nthreads, epi);
  constexpr int NB = GemvShape<M, false>::blocks;
  Range r = split_range(ceil_div(N, 16), tid, nthreads);
  long size = block_elements<W>(K);
  for (long j = r.begin; j < r.end; j += NB) {
    const W* b[NB];
    for (int i = 0; i < NB; i++) b[i] = w + (j + i < r.end ? j + i : j) * size;
    float out[M][16 * NB];
    gemv_tile<M, false>(x, ldx, b, K, out);
    for (int i = 0; i < NB && j + i < r.end; i++) {
      int n = (int)(j + i) * 16;
      for (int m = 0; m < M; m++) {
        if (N - n >= 16) epi(m, n, &out[m][16 * i], 16);  // a constant count lets the epilogue vectorise
        else epi(m, n, &out[m][16 * i], N - n);
      }
    }
  }
}

// Two projections of the same x in one pass, for gated activations: W holds 2 N columns, "gate" [0, N) then "up"
// [N, 2 N), N a multiple of 16. Calls epi(m, n, gate, up, 16) with both values of columns [n, n + 16).
template <int M, class X, class W, class Epi>
static inline void gemv_pair(const X* x, long ldx, const W* w, int N, int K, int tid, int nthreads, Epi&& epi) {
  if constexpr (GemvUsesAmx<M, X, W>::value) return gemm_pair(x, ldx, w, M, N, K, tid, nthreads, epi);
  Range r = split_range(N / 16, tid, nthreads);
  long size = block_elements<W>(K);
  for (long j = r.begin; j < r.end; j++) {
    const W* b[2] = {w + j * size, w + (j + N / 16) * size};
    float out[M][32];
    gemv_tile<M, true>(x, ldx, b, K, out);
    for (int m = 0; m < M; m++) epi(m, (int)j * 16, out[m], out[m] + 16, 16);
  }
}

}  // namespace aotc
