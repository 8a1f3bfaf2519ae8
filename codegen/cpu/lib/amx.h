// AMX bf16 tiles: C (fp32) += A (rows of x as they lie) * B (n16k2 blocks as they lie). Empty below the amx level.
#pragma once
#include "dot.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define AOTC_AMX 1

namespace aotc {

// Asks Linux for the tile registers, once per process and before any tile instruction (arch_prctl
// ARCH_REQ_XCOMP_PERM, feature 18 XTILEDATA). Returns 0, or -1 with errno: then use a level without AMX.
static inline int amx_request_permission() { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

// The 64-byte palette 1 configuration: rows and bytes a row of each tile.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0 1 / 2 3 are C, 4 / 5 are A, 6 7 are B. `upper` rows for tiles 0 1 4, `lower` rows for 2 3 5 (1..16 each).
static inline void amx_configure(int upper, int lower) {
  static const uint8_t is_lower[8] = {0, 0, 1, 1, 0, 1, 0, 0};
  TileConfig c = {};
  c.palette = 1;
  for (int t = 0; t < 8; t++) {
    c.row_bytes[t] = 64;
    c.rows[t] = (uint8_t)(t >= 6 ? 16 : is_lower[t] ? lower : upper);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(c));  // the compilers' intrinsic reads less of `c` than it should
}
static inline void amx_release() { _tile_release(); }

// The last K % 32 values of k: whole tiles, zero padded. A: [rows][32], B: [2][16][2 * 16].
struct AmxTail { alignas(64) bf16 a[32][32]; alignas(64) bf16 b[2][512]; };

static inline void amx_fill_tail(AmxTail& t, const bf16* a, long lda, int rows, const bf16* b0, const bf16* b1, int k) {
  memset(&t, 0, sizeof t);
  for (int m = 0; m < rows; m++) memcpy(t.a[m], a + m * lda, k * sizeof(bf16));
  long n = block_elements<bf16>(k);
  memcpy(t.b[0], b0, n * sizeof(bf16));
  memcpy(t.b[1], b1, n * sizeof(bf16));
}

// c[rows][32] = a[rows][K] * (b0 | b1) for up to 32 rows (row stride lda of a, ldc of c, in elements). The tiles must be
// configured for min(rows, 16) upper and max(rows - 16, 1) lower rows. `ahead` > 0 prefetches that many bytes ahead in b.
template <bool Lower>
AOTC_INLINE void amx_k_loop(const bf16* a, long lda, const bf16* b0, const bf16* b1, int steps, long ahead) {
  long row = lda * (long)sizeof(bf16);
  for (int s = 0; s < steps; s++) {
    _tile_loadd(6, b0 + s * 512, 64);
    _tile_loadd(4, a + s * 32, row);
    _tile_loadd(7, b1 + s * 512, 64);
    if (Lower) _tile_loadd(5, a + 16 * lda + s * 32, row);
    if (ahead) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        _mm_prefetch((const char*)(b0 + s * 512) + ahead + 64 * i, _MM_HINT_T0);
        _mm_prefetch((const char*)(b1 + s * 512) + ahead + 64 * i, _MM_HINT_T0);
      }
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (Lower) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <bool Lower>
AOTC_INLINE void amx_tile_rows(const bf16* a, long lda, int rows, const bf16* b0, const bf16* b1, int K, float* c,
                               long ldc, long ahead) {
  _tile_zero(0);
  _tile_zero(1);
  if (Lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  int steps = K / 32, tail = K % 32;
  __asm__ volatile("" ::: "memory");  // tile loads read what was stored before; gcc's intrinsics do not say so
  amx_k_loop<Lower>(a, lda, b0, b1, steps, ahead);
  if (tail) {
    AmxTail t;
    amx_fill_tail(t, a + steps * 32, lda, rows, b0 + steps * 512, b1 + steps * 512, tail);
    __asm__ volatile("" ::: "memory");
    amx_k_loop<Lower>(t.a[0], 32, t.b[0], t.b[1], 1, 0);
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  if (Lower) {
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
  }
}

static inline void amx_tile(const bf16* a, long lda, int rows, const bf16* b0, const bf16* b1, int K, float* c, long ldc,
                            long ahead) {
  if (rows > 16) amx_tile_rows<true>(a, lda, rows, b0, b1, K, c, ldc, ahead);
  else amx_tile_rows<false>(a, lda, rows, b0, b1, K, c, ldc, ahead);
}

}  // namespace aotc
#endif
