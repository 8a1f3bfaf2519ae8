// Attention of an encoder: padded sequences, each of whose tokens sees all of its sequence. Keys, queries and values are
// read where the projection left them.
#pragma once
#include "attention_batch.h"

namespace aotc {

// qkv [batch][length][3][heads][HD]; the first lengths[b] tokens of a sequence are its own, at least one and at most
// `length`.
template <class T> struct EncoderBatch {
  const T* qkv;
  const int32_t* lengths;
  int batch, length, heads;
  int own(int b) const { return min_i(lengths[b] < 1 ? 1 : lengths[b], length); }
};

// Any head size, element by element. Threads share (sequence, token, head).
template <int HD, class T>
static inline void encoder_plain(const EncoderBatch<T>& x, float scale, T* y, int tid, int nthreads) {
  const long row = 3L * x.heads * HD;
  for (int b = 0; b < x.batch; b++) {
    const T* sequence = x.qkv + b * x.length * row;
    for (int item = tid; item < x.own(b) * x.heads; item += nthreads) {
      const int t = item / x.heads, h = item % x.heads;
      const T* query = sequence + t * row + h * HD;
      float top = no_score, total = 0, out[HD] = {};
      for (int p = 0; p < x.own(b); p++) {
        const T *k = sequence + p * row + (x.heads + h) * HD, *v = k + x.heads * HD;
        float score = 0;
        for (int d = 0; d < HD; d++) score += to_f32(query[d]) * to_f32(k[d]);
        score *= scale;
        const float higher = score > top ? score : top, shrink = expf(top - higher), weight = expf(score - higher);
        total = total * shrink + weight;
        for (int d = 0; d < HD; d++) out[d] = out[d] * shrink + weight * to_f32(v[d]);
        top = higher;
      }
      T* target = y + ((long)(b * x.length + t) * x.heads + h) * HD;
      for (int d = 0; d < HD; d++) target[d] = from_f32<T>(out[d] / total);
    }
  }
}

template <int HD, class T> static constexpr long attention_encoder_scratch_bytes(long max_batch) {
  if constexpr (HD % 32 == 0) return attention_extend_scratch_bytes<HD, T>() + 64 + max_batch * (long)(sizeof(ExtendSpan) + sizeof(int));
  else return 0;
}

// y [batch][length][heads][HD]: 0 for the tokens past a sequence's own. `scratch`: attention_encoder_scratch_bytes of this
// thread's own.
template <int HD, class T>
static inline void attention_encoder(const EncoderBatch<T>& x, float scale, T* y, int tid, int nthreads, char* scratch) {
  const long width = (long)x.heads * HD;
  for (int b = tid; b < x.batch; b += nthreads)
    memset((void*)(y + ((long)b * x.length + x.own(b)) * width), 0, (x.length - x.own(b)) * width * sizeof(T));
  if constexpr (HD % 32 != 0) {
    encoder_plain<HD, T>(x, scale, y, tid, nthreads);
  } else {
    ExtendSpan* spans = (ExtendSpan*)(scratch + round_up(attention_extend_scratch_bytes<HD, T>(), 64));
    int* table = (int*)(spans + x.batch);
    for (int b = 0; b < x.batch; b++) {
      spans[b] = {b, b * x.length, x.own(b), 0};
      table[b] = b;
    }
    const KvCache<T> cache = {x.qkv + width, x.qkv + 2 * width, table, 1, x.length, x.length * 3 * width, HD, 3 * width, x.heads};
    attention_extend<HD, T>(x.qkv, 3 * width, cache, spans, x.batch, {x.heads, scale, 0, false}, y, width, scratch, tid, nthreads);
  }
}

}  // namespace aotc
