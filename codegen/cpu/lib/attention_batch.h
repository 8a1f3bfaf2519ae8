// Attention of a whole step: flat tokens of many sequences over a cache, laid out
// [blocks][... 2][kv_heads][block_tokens][head_dim] with a stride between blocks.
#pragma once
#include <math.h>

#include "attention_decode.h"
#include "attention_extend.h"

namespace aotc {

// The batch: row r owns flat tokens query_start[r] .. query_start[r + 1] and has seq_lens[r] positions in the cache.
struct AttentionRows {
  const int32_t *query_start, *seq_lens;
  int count;
};

// Any head size, element by element, for those that the vector kernels do not take. Threads share (row, token, head).
template <int HD, class T>
static inline void attention_plain(const T* q, const KvCache<T>& cache, const AttentionRows& rows, const AttentionOptions& o,
                                   T* y, int tid, int nthreads) {
  const int group = o.heads / cache.kv_heads;
  for (int r = 0; r < rows.count; r++) {
    for (int t = rows.query_start[r]; t < rows.query_start[r + 1]; t++) {
      const int position = rows.seq_lens[r] - rows.query_start[r + 1] + t;
      for (int h = 0; h < o.heads; h++) {
        if ((t * o.heads + h) % nthreads != tid) continue;
        const T* query = q + ((long)t * o.heads + h) * HD;
        float top = no_score, total = 0, out[HD] = {};
        for (int p = first_visible(position, o.window); p <= position; p++) {
          const long place = cache.place(r, h / group, p);
          const T *k = cache.k + place, *v = cache.v + place;
          float score = 0;
          for (int d = 0; d < HD; d++) score += to_f32(query[d]) * to_f32(k[d]);
          score *= o.scale;
          const float higher = score > top ? score : top, shrink = expf(top - higher), weight = expf(score - higher);
          total = total * shrink + weight;
          for (int d = 0; d < HD; d++) out[d] = out[d] * shrink + weight * to_f32(v[d]);
          top = higher;
        }
        for (int d = 0; d < HD; d++) y[((long)t * o.heads + h) * HD + d] = from_f32<T>(out[d] / total);
      }
    }
  }
}

template <int HD, class T> static constexpr long attention_batch_scratch_bytes(long max_rows) {
  if constexpr (HD % 32 == 0) return attention_extend_scratch_bytes<HD, T>() + 64 + max_rows * (long)sizeof(ExtendSpan);
  else return 0;
}

// q and y [tokens, heads, HD]. `scratch`: attention_batch_scratch_bytes of this thread's own.
template <int HD, class T>
static inline void attention_batch(const T* q, const KvCache<T>& cache, const AttentionRows& rows, const AttentionOptions& o,
                                   T* y, int tid, int nthreads, char* scratch) {
  if constexpr (HD % 32 != 0) {
    attention_plain<HD, T>(q, cache, rows, o, y, tid, nthreads);
  } else {
    const long stride = (long)o.heads * HD;
    const long tables = round_up(attention_extend_scratch_bytes<HD, T>(), 64);
    if (rows.query_start[rows.count] == rows.count) {  // one new token a row
      int* positions = (int*)(scratch + tables);
      for (int r = 0; r < rows.count; r++) positions[r] = rows.seq_lens[r] - 1;
      attention_decode<HD, T>(q, stride, cache, positions, rows.count, o, y, stride, tid, nthreads);
      return;
    }
    ExtendSpan* spans = (ExtendSpan*)(scratch + tables);
    for (int r = 0; r < rows.count; r++) {
      const int first = rows.query_start[r], n = rows.query_start[r + 1] - first;
      spans[r] = {r, first, n, rows.seq_lens[r] - n};
    }
    attention_extend<HD, T>(q, stride, cache, spans, rows.count, o, y, stride, scratch, tid, nthreads);
  }
}

}  // namespace aotc
