// Scalar element types and conversions. bf16 and f16 are storage only: all arithmetic is in float.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace aotc {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline float bits_to_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t f32_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float bf16_to_f32(bf16 x) { return bits_to_f32((uint32_t)x.bits << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN with its sign, where plain rounding could carry it into infinity.
static inline bf16 f32_to_bf16(float x) {
  uint32_t u = f32_to_bits(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (u >> 16) | 0x40u;
  return bf16{(uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

static inline float f16_to_f32(f16 x) { return _cvtsh_ss(x.bits); }
static inline f16 f32_to_f16(float x) { return f16{_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

// One name for templates: to_f32(x) of any element type, from_f32<T>(x) back.
static inline float to_f32(float x) { return x; }
static inline float to_f32(bf16 x) { return bf16_to_f32(x); }
static inline float to_f32(f16 x) { return f16_to_f32(x); }
template <class T> static inline T from_f32(float x);
template <> inline float from_f32<float>(float x) { return x; }
template <> inline bf16 from_f32<bf16>(float x) { return f32_to_bf16(x); }
template <> inline f16 from_f32<f16>(float x) { return f32_to_f16(x); }

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };

static inline int min_i(int a, int b) { return a < b ? a : b; }
static inline int max_i(int a, int b) { return a > b ? a : b; }
static constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }
static constexpr long round_up(long a, long b) { return ceil_div(a, b) * b; }

// Contiguous share [begin, end) of `count` work items for thread `tid` of `nthreads`; shares differ by one at most.
struct Range { long begin, end; };
static inline Range split_range(long count, int tid, int nthreads) {
  return {count * tid / nthreads, count * (tid + 1) / nthreads};
}

}  // namespace aotc
