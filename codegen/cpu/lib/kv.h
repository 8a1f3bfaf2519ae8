// What both attention kernels read: where a layer's K and V lie, and how scores are scaled and masked.
#pragma once
#include "simd.h"

namespace aotc {

// K and V of one layer: element (slot, kv head, position, d) at slot * slot_stride + head * head_stride +
// position * row_stride + d, in elements of T. K and V share the strides.
template <class T> struct KvCache {
  const T* k;
  const T* v;
  long slot_stride, head_stride, row_stride;
  int kv_heads;
  const T* keys(int slot, int head) const { return k + slot * slot_stride + head * head_stride; }
  const T* values(int slot, int head) const { return v + slot * slot_stride + head * head_stride; }
};

struct AttentionOptions {
  int heads;    // query heads, a multiple of kv_heads
  float scale;  // of the scores, > 0
  int window;   // 0, or the number of positions a token sees, itself included
};

// First position that the token at `position` sees.
static inline int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Running maximum of a row of scores before any is seen: finite, so that differences of two are never NaN.
static constexpr float no_score = -1e30f;
static constexpr float log2_e = 1.4426950408889634f;

}  // namespace aotc
