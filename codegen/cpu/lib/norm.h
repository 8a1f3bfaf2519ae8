// Row helpers: RMS norm and rotary position embedding. x, weights, tables and y may each be float, bf16 or f16.
#pragma once
#include "simd.h"

namespace aotc {

// 1 / sqrt(mean(x^2) + eps) of a row of n values, the sum in float.
template <class X> static inline float rms_scale(const X* x, int n, float eps) {
  f32x16 s0 = splat(0.0f), s1 = s0;
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    f32x16 a, b;
    load32(x + i, a, b);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
  }
  for (; i < n; i += 16) {
    f32x16 a = load(x + i, min_i(16, n - i));
    s0 = fma(a, a, s0);
  }
  return 1.0f / __builtin_sqrtf(reduce_add(s0 + s1) / (float)n + eps);
}

// y = x * rms_scale(x) * (weight + offset), for a row of n values; offset is 0, or 1 for weights stored around zero.
// y may be x.
template <class X, class W, class Y>
static inline void rms_norm(const X* x, const W* weight, int n, float eps, Y* y, float offset = 0.0f) {
  f32x16 scale = splat(rms_scale(x, n, eps)), shift = splat(offset);
  int i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, load(x + i) * scale * (load(weight + i) + shift));
  if (i < n) store(y + i, load(x + i, n - i) * scale * (load(weight + i, n - i) + shift), n - i);
}

// x += r, the sum rounded to X as it is stored, then y = rms_norm(x): the residual add that comes before a norm.
template <class X, class R, class W, class Y>
static inline void add_rms_norm(X* x, const R* r, const W* weight, int n, float eps, Y* y, float offset = 0.0f) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, load(x + i) + load(r + i));
  if (i < n) store(x + i, load(x + i, n - i) + load(r + i, n - i), n - i);
  rms_norm(x, weight, n, eps, y, offset);
}

// Rotary embedding of one head ("rotate half"): with h = rotary_dim / 2 and for i < h
//   y[i] = x[i] cos[i] - x[i + h] sin[i],   y[i + h] = x[i + h] cos[i] + x[i] sin[i].
// Only the first h entries of cos and sin are read: tables of h, or of rotary_dim with equal halves, both serve. Values
// from rotary_dim on are the caller's. y may be x.
template <class X, class C, class Y>
static inline void rope_half(const X* x, const C* cos, const C* sin, int rotary_dim, Y* y) {
  int h = rotary_dim / 2;
  for (int i = 0; i < h; i += 16) {
    int n = min_i(16, h - i);
    if (n == 16) {
      f32x16 a = load(x + i), b = load(x + i + h), c = load(cos + i), s = load(sin + i);
      store(y + i, a * c - b * s);
      store(y + i + h, fma(b, c, a * s));
    } else {
      f32x16 a = load(x + i, n), b = load(x + i + h, n), c = load(cos + i, n), s = load(sin + i, n);
      store(y + i, a * c - b * s, n);
      store(y + i + h, fma(b, c, a * s), n);
    }
  }
}

}  // namespace aotc
