// Many rows (prefill, batches) times packed weights.
//
// The columns are cut into panels of two blocks (32 columns), the rows into tiles of `rows`. A task is one tile of one
// panel; tasks are numbered panel by panel and every thread does a contiguous run of them, so a panel is read from
// memory by one thread (two at a seam) and then reused from cache for all its rows, and shares differ by one tile.
#pragma once
#include "amx.h"
#include "dot.h"

namespace aotc {

#if defined(AOTC_AMX)
template <class X, class W> struct UsesAmx { static constexpr bool value = same_type<X, bf16>::value && same_type<W, bf16>::value; };
#else
template <class X, class W> struct UsesAmx { static constexpr bool value = false; };
#endif

// Rows of a task's tile, and of the vector kernels' register tile (x 32 columns: 24 of 32, or 12 of 16 registers).
template <class X, class W> struct GemmShape {
#if defined(__AVX512F__)
  static constexpr int vector_rows = 12;
#else
  static constexpr int vector_rows = 3;
#endif
  static constexpr int rows = UsesAmx<X, W>::value ? 32 : 24;
};

// c[MR][32] = or += a[MR][K] * (b0 | b1).
template <int MR, class X, class W>
static inline void vector_tile_rows(const X* a, long lda, const W* b0, const W* b1, int K, bool add, float* c, long ldc) {
  const W* b[2] = {b0, b1};
  f32x16 acc[MR][2];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    acc[m][0] = add ? load(c + m * ldc) : splat(0.0f);
    acc[m][1] = add ? load(c + m * ldc + 16) : splat(0.0f);
  }
  dot_tile<MR, 2, 1, 0>(a, lda, b, K, acc);
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    store(c + m * ldc, acc[m][0]);
    store(c + m * ldc + 16, acc[m][1]);
  }
}

// c[rows][32] = a[rows][K] * (b0 | b1) with vector instructions, any number of rows.
template <class X, class W>
static inline void vector_tile(const X* a, long lda, int rows, const W* b0, const W* b1, int K, float* c, long ldc) {
  constexpr int MR = GemmShape<X, W>::vector_rows;
  constexpr int piece = 256;  // of K: this much of both blocks stays in the first cache from one register tile to the next
  for (int k = 0; k < K || k == 0; k += piece) {
    int n = min_i(piece, K - k), m = 0;
    const W *p0 = b0 + k * 16L, *p1 = b1 + k * 16L;
    for (; m + MR <= rows; m += MR) vector_tile_rows<MR>(a + m * lda + k, lda, p0, p1, n, k > 0, c + m * ldc, ldc);
    if constexpr (MR > 4)
      for (; m + 4 <= rows; m += 4) vector_tile_rows<4>(a + m * lda + k, lda, p0, p1, n, k > 0, c + m * ldc, ldc);
    for (; m < rows; m++) vector_tile_rows<1>(a + m * lda + k, lda, p0, p1, n, k > 0, c + m * ldc, ldc);
  }
}

// One panel's weights are asked for while the one before is multiplied, a slice per tile.
template <class W> static inline void prefetch_slice(const W* block, long elements, long part, long parts) {
  const char* p = (const char*)block;
  long lines = elements * (long)sizeof(W) / 64, end = lines * (part + 1) / parts;
  for (long i = lines * part / parts; i < end; i++) _mm_prefetch(p + i * 64, _MM_HINT_T1);
}

// Tasks [begin, end) of x[M, K] * panels; emit(panel, m0, rows, tile) gets each finished [rows][32] fp32 tile.
template <class X, class W, class Emit>
AOTC_INLINE void gemm_tasks(const X* x, long ldx, const W* w, long second, long panel_stride, long last_block, int M, int K,
                            Range tasks, Emit&& emit) {
  constexpr int R = GemmShape<X, W>::rows;
  long row_tiles = ceil_div(M, R), size = block_elements<W>(K);
  alignas(64) float tile[R * 32];
  int configured = 0;
  for (long t = tasks.begin; t < tasks.end; t++) {
    long panel = t / row_tiles, part = t % row_tiles, block = panel * panel_stride;
    int m0 = (int)part * R, rows = min_i(R, M - m0);
    const W* b0 = w + block * size;
    const W* b1 = w + (block + second <= last_block ? block + second : block) * size;
    if constexpr (UsesAmx<X, W>::value) {
#if defined(AOTC_AMX)
      if (configured != rows) amx_configure(min_i(rows, 16), max_i(rows - 16, 1));
      configured = rows;
      amx_tile(x + m0 * ldx, ldx, rows, b0, b1, K, tile, 32, row_tiles == 1 ? 2048 : 0);
#endif
    } else {
      vector_tile(x + m0 * ldx, ldx, rows, b0, b1, K, tile, 32L);
    }
    if (row_tiles > 1) {
      long next = block + panel_stride;
      if (next <= last_block) prefetch_slice(w + next * size, size, part, row_tiles);
      if (next + second <= last_block) prefetch_slice(w + (next + second) * size, size, part, row_tiles);
    }
    emit(panel, m0, rows, tile);
  }
#if defined(AOTC_AMX)
  if (configured) amx_release();  // idle tiles would be saved at every context switch
#endif
}

// y = x W^T for x [M, K] (row stride ldx elements) and packed W of N columns. Calls epi(m, n, acc, count) once for
// every 16 columns [n, n + count) of every row m; count = 16 but for the last block.
template <class X, class W, class Epi>
static inline void gemm(const X* x, long ldx, const W* w, int M, int N, int K, int tid, int nthreads, Epi&& epi) {
  long blocks = ceil_div(N, 16);
  Range tasks = split_range(ceil_div(blocks, 2) * ceil_div(M, GemmShape<X, W>::rows), tid, nthreads);
  gemm_tasks(x, ldx, w, 1, 2, blocks - 1, M, K, tasks, [&](long panel, int m0, int rows, float* tile) {
    int n = (int)panel * 32;
    if (N - n >= 32) {
      for (int m = 0; m < rows; m++) {
        epi(m0 + m, n, tile + 32 * m, 16);
        epi(m0 + m, n + 16, tile + 32 * m + 16, 16);
      }
    } else {
      for (int m = 0; m < rows; m++) {
        epi(m0 + m, n, tile + 32 * m, min_i(16, N - n));
        if (N - n > 16) epi(m0 + m, n + 16, tile + 32 * m + 16, N - n - 16);
      }
    }
  });
}

// Two projections of the same x in one pass, as gemv_pair: W holds 2 N columns, "gate" [0, N) then "up" [N, 2 N), N a
// multiple of 16. Calls epi(m, n, gate, up, 16).
template <class X, class W, class Epi>
static inline void gemm_pair(const X* x, long ldx, const W* w, int M, int N, int K, int tid, int nthreads, Epi&& epi) {
  long half = N / 16;
  Range tasks = split_range(half * ceil_div(M, GemmShape<X, W>::rows), tid, nthreads);
  gemm_tasks(x, ldx, w, half, 1, 2 * half - 1, M, K, tasks, [&](long panel, int m0, int rows, float* tile) {
    for (int m = 0; m < rows; m++) epi(m0 + m, (int)panel * 16, tile + 32 * m, tile + 32 * m + 16, 16);
  });
}

}  // namespace aotc
