// What both attention kernels read: where a layer's K and V lie, and how scores are scaled and masked.
#pragma once
#include "simd.h"

namespace aotc {

// K and V of one layer, in blocks of `block_tokens` positions: pages, or one block for all that a sequence may have.
// Position p of a row lies in block table[row * blocks + p / block_tokens]; element (block, kv head, p, d) is at block *
// block_stride + head * head_stride + p % block_tokens * row_stride + d, in elements of T. K and V share the strides.
template <class T> struct KvCache {
  const T* k;
  const T* v;
  const int* table;
  int blocks, block_tokens;
  long block_stride, head_stride, row_stride;
  int kv_heads;
  // Where a position of a row begins, and how many positions lie one after the other from there on.
  long place(int row, int head, int position) const {
    return table[row * blocks + position / block_tokens] * block_stride + head * head_stride + position % block_tokens * row_stride;
  }
  int run(int position) const { return block_tokens - position % block_tokens; }
};

struct AttentionOptions {
  int heads;    // query heads, a multiple of kv_heads
  float scale;  // of the scores, > 0
  int window;   // 0, or the number of positions a token sees, itself included
  bool causal = true;  // else every token sees all positions of its sequence
};

// First position that the token at `position` sees.
static inline int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Running maximum of a row of scores before any is seen: finite, so that differences of two are never NaN.
static constexpr float no_score = -1e30f;
static constexpr float log2_e = 1.4426950408889634f;

}  // namespace aotc
