// 16 x 16 transposition of 32-bit elements (floats, or bf16 pairs).
#pragma once
#include "simd.h"

namespace aotc {

// dst[j][i] = src[i][j] for 16 x 16 dwords; row strides in dwords. src and dst must not overlap.
static inline void transpose16(const void* src, long lds, void* dst, long ldd) {
  const uint32_t* s = (const uint32_t*)src;
  uint32_t* d = (uint32_t*)dst;
#if defined(__AVX512F__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(s + i * lds);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {  // 2 x 2 dwords in each 128-bit part
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {  // 4 x 4: a[i + c] holds column c (mod 4) of rows i..i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; c++) {  // 4 x 4 of whole 128-bit parts
    __m512i p = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    __m512i r = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), t = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(d + c * ldd, _mm512_shuffle_i32x4(p, q, 0x88));
    _mm512_storeu_si512(d + (4 + c) * ldd, _mm512_shuffle_i32x4(r, t, 0x88));
    _mm512_storeu_si512(d + (8 + c) * ldd, _mm512_shuffle_i32x4(p, q, 0xdd));
    _mm512_storeu_si512(d + (12 + c) * ldd, _mm512_shuffle_i32x4(r, t, 0xdd));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) d[j * ldd + i] = s[i * lds + j];
#endif
}

}  // namespace aotc
