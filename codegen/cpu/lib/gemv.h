// Few rows (1 to 8) times packed weights: as fast as the weights stream from memory.
#pragma once
#include "dot.h"

namespace aotc {

// Rows and k unrolling of the register tile: enough independent sums to hide latency, few enough to stay in registers.
template <int M, bool Pair> struct GemvShape {
#if defined(__AVX512F__)
  static constexpr int rows = M;
  static constexpr int unroll = M * (Pair ? 2 : 1) >= 8 ? 1 : 8 / (M * (Pair ? 2 : 1));
#else
  static constexpr int rows = M < 3 ? M : 3;
  static constexpr int unroll = M * (Pair ? 2 : 1) >= 4 ? 1 : 4 / (M * (Pair ? 2 : 1));
#endif
};

// Ahead of a thread's own line: its blocks are one contiguous run, so a constant distance crosses pages and blocks.
static constexpr int gemv_prefetch = 2048;

template <int MR, class Shape, int NB, class X, class W>
AOTC_INLINE void gemv_rows(const X* x, long ldx, const W* const (&b)[NB], int K, float (*out)[16 * NB]) {
  f32x16 acc[MR][NB];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) acc[m][j] = splat(0.0f);
  dot_tile<MR, NB, Shape::unroll, gemv_prefetch>(x, ldx, b, K, acc);
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++) store(&out[m][16 * j], acc[m][j]);
}

// All M rows of one set of NB blocks, a register tile of rows at a time.
template <int M, bool Pair, int NB, class X, class W>
AOTC_INLINE void gemv_block(const X* x, long ldx, const W* const (&b)[NB], int K, float (*out)[16 * NB]) {
  using Shape = GemvShape<M, Pair>;
  constexpr int R = Shape::rows;
  int m = 0;
  for (; m + R <= M; m += R) gemv_rows<R, Shape>(x + m * ldx, ldx, b, K, out + m);
  if constexpr (M % R != 0) gemv_rows<M % R, Shape>(x + m * ldx, ldx, b, K, out + m);
}

// y = x W^T for x [M, K] (row stride ldx elements) and packed W of N columns. Each thread does a contiguous run of
// blocks and calls epi(m, n, acc, count): columns [n, n + count) of row m, count = 16 but for the last block.
template <int M, class X, class W, class Epi>
static inline void gemv(const X* x, long ldx, const W* w, int N, int K, int tid, int nthreads, Epi&& epi) {
  Range r = split_range(ceil_div(N, 16), tid, nthreads);
  long size = block_elements<W>(K);
  for (long j = r.begin; j < r.end; j++) {
    const W* b[1] = {w + j * size};
    float out[M][16];
    gemv_block<M, false>(x, ldx, b, K, out);
    int n = (int)j * 16;
    for (int m = 0; m < M; m++) {
      if (N - n >= 16) epi(m, n, out[m], 16);  // a constant count lets the epilogue vectorise
      else epi(m, n, out[m], N - n);
    }
  }
}

// Two projections of the same x in one pass, for gated activations: W holds 2 N columns, "gate" [0, N) then "up"
// [N, 2 N), N a multiple of 16. Calls epi(m, n, gate, up, 16) with both values of columns [n, n + 16).
template <int M, class X, class W, class Epi>
static inline void gemv_pair(const X* x, long ldx, const W* w, int N, int K, int tid, int nthreads, Epi&& epi) {
  Range r = split_range(N / 16, tid, nthreads);
  long size = block_elements<W>(K);
  for (long j = r.begin; j < r.end; j++) {
    const W* b[2] = {w + j * size, w + (j + N / 16) * size};
    float out[M][32];
    gemv_block<M, true>(x, ldx, b, K, out);
    for (int m = 0; m < M; m++) epi(m, (int)j * 16, out[m], out[m] + 16, 16);
  }
}

}  // namespace aotc
