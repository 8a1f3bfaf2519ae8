// Scalar functions of generated loop nests: written so that the compiler can vectorise the loops around them.
#pragma once
#include <math.h>
#include <stdint.h>

#include "dtypes.h"

namespace aotc {

// exp by 2^n times a polynomial on [-ln2/2, ln2/2]; 1 ulp or so, saturates to 0 and infinity, NaN stays NaN.
static inline float fast_exp(float x) {
  const float clamped = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;  // a NaN fails both and passes through
  const float n = nearbyintf(clamped * 1.44269504088896341f);
  float r = clamped - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n in two factors, so that results near both ends of the range are exact (denormals included).
  const int32_t whole = (int32_t)(n == n ? n : 0.0f);
  const int32_t half = whole / 2;
  return p * bits_to_f32((uint32_t)(half + 127) << 23) * bits_to_f32((uint32_t)(whole - half + 127) << 23);
}
static inline double fast_exp(double x) { return exp(x); }

// erf as a quotient of polynomials of x^2, times x; within 4e-7 of it, never above 1, NaN stays NaN.
static inline float fast_erf(float x) {
  const float c = x > 4.0f ? 4.0f : x < -4.0f ? -4.0f : x, s = c * c;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630326855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  const float y = c * p / q;
  return y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y;
}
static inline double fast_erf(double x) { return erf(x); }

// NaN wins, as in numpy, torch and ONNX.
template <class T> static inline T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <class T> static inline T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <class T> static inline T absolute(T a) { return a < 0 ? (T)-a : a; }
template <> inline float absolute(float a) { return fabsf(a); }
template <> inline double absolute(double a) { return fabs(a); }

// Integers: truncating division; a division by zero gives 0 instead of a trap, and so does the overflow of min / -1.
template <class T> static inline T divide(T a, T b) { return b == 0 ? 0 : b == (T)-1 ? (T)(0 - a) : (T)(a / b); }
template <class T> static inline T remainder(T a, T b) { return b == 0 || b == (T)-1 ? 0 : (T)(a % b); }
template <> inline uint8_t divide(uint8_t a, uint8_t b) { return b ? a / b : 0; }
template <> inline uint16_t divide(uint16_t a, uint16_t b) { return b ? a / b : 0; }
template <> inline uint32_t divide(uint32_t a, uint32_t b) { return b ? a / b : 0; }
template <> inline uint64_t divide(uint64_t a, uint64_t b) { return b ? a / b : 0; }
template <> inline uint8_t remainder(uint8_t a, uint8_t b) { return b ? a % b : 0; }
template <> inline uint16_t remainder(uint16_t a, uint16_t b) { return b ? a % b : 0; }
template <> inline uint32_t remainder(uint32_t a, uint32_t b) { return b ? a % b : 0; }
template <> inline uint64_t remainder(uint64_t a, uint64_t b) { return b ? a % b : 0; }

template <class T> struct limits;
#define AOTC_LIMITS(T, LO, HI) template <> struct limits<T> { static constexpr T lo = LO, hi = HI; };
AOTC_LIMITS(float, -INFINITY, INFINITY)
AOTC_LIMITS(double, -INFINITY, INFINITY)
AOTC_LIMITS(int64_t, INT64_MIN, INT64_MAX)
AOTC_LIMITS(int32_t, INT32_MIN, INT32_MAX)
AOTC_LIMITS(int16_t, INT16_MIN, INT16_MAX)
AOTC_LIMITS(int8_t, INT8_MIN, INT8_MAX)
AOTC_LIMITS(uint64_t, 0, UINT64_MAX)
AOTC_LIMITS(uint32_t, 0, UINT32_MAX)
AOTC_LIMITS(uint16_t, 0, UINT16_MAX)
AOTC_LIMITS(uint8_t, 0, UINT8_MAX)
AOTC_LIMITS(bool, false, true)
#undef AOTC_LIMITS
template <class T> static constexpr T lowest() { return limits<T>::lo; }
template <class T> static constexpr T highest() { return limits<T>::hi; }

// Float to integer: truncates, saturates, NaN gives 0 (C leaves all three undefined).
template <class T, class F> static inline T saturate(F x) {
  if (!(x == x)) return 0;
  if (x <= (F)limits<T>::lo) return limits<T>::lo;
  if (x >= (F)limits<T>::hi) return limits<T>::hi;
  return (T)x;
}

}  // namespace aotc
