// Decode attention: one new token a row against its cached keys and values, K and V read once for all query heads of a
// group, in blocks of positions with an online softmax. Arithmetic in float for every element type: this kernel waits
// for memory, not for multipliers.
#pragma once
#include "dot.h"
#include "kv.h"

namespace aotc {

static constexpr int decode_block = 128;  // positions a block: its K and V stay in the first cache between the passes
static constexpr int decode_heads = 4;    // query heads at a time: their sums and queries fit the registers

// Sums over the lanes of sixteen vectors: result lane i = sum of rows[16 i .. 16 i + 16).
static inline f32x16 reduce_rows(const float* rows) {
#if defined(__AVX512F__)
  // Each level adds two vectors after interleaving, so lanes of different rows come side by side.
  __m512 q[4], t[4];
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 4; j++) {  // rows i, i + 4, i + 8, i + 12 come into the four 128-bit parts at the end
      __m512 a = _mm512_loadu_ps(rows + 16 * (4 * j + i));
      t[j] = a;
    }
    // 128-bit parts: first halves, so that part j holds partial sums of row 4 j + i
    __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x44), _mm512_shuffle_f32x4(t[0], t[1], 0xee));
    __m512 r = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x44), _mm512_shuffle_f32x4(t[2], t[3], 0xee));
    q[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, r, 0x88), _mm512_shuffle_f32x4(p, r, 0xdd));
  }
  // within each part, lane i of the result = sum of the part's four lanes of q[i]
  __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
  __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
  return {_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee))};
#else
  float sums[16];
  for (int i = 0; i < 16; i++) sums[i] = reduce_add(load(rows + 16 * i));
  return load(sums);
#endif
}

// A head vector in load32's lane order, HD a multiple of 32.
template <int HD, class T> AOTC_INLINE void load_head(const T* p, f32x16 (&v)[HD / 16]) {
#pragma GCC unroll 16
  for (int i = 0; i < HD / 32; i++) load32(p + 32 * i, v[2 * i], v[2 * i + 1]);
}

// scores[g][0..count) = q[g] . k[position], unscaled; count is rounded up to 16 with whatever the last key gives.
template <int HD, int G, class T>
AOTC_INLINE void decode_scores(const float* q, const T* k, long row_stride, int count, float (*scores)[decode_block]) {
  f32x16 query[G][HD / 16];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int i = 0; i < HD / 16; i++) query[g][i] = load(q + g * HD + 16 * i);
  float rows[G][256];
  for (int p0 = 0; p0 < count; p0 += 16) {
    for (int i = 0; i < 16; i++) {
      f32x16 key[HD / 16];
      load_head<HD>(k + min_i(p0 + i, count - 1) * row_stride, key);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        f32x16 sum = query[g][0] * key[0];
#pragma GCC unroll 16
        for (int j = 1; j < HD / 16; j++) sum = fma(query[g][j], key[j], sum);
        store(&rows[g][16 * i], sum);
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) store(&scores[g][p0], reduce_rows(rows[g]));
  }
}

// Scores to weights exp(scale (s - max)) in place; returns their sum, updates the running maximum, and gives the factor
// by which earlier sums shrink.
static inline float decode_softmax(float* scores, int count, float scale_log2, float& running_max, float& shrink) {
  f32x16 top = splat(running_max), sum = splat(0.0f);
  for (int p = count; p < round_up(count, 16); p++) scores[p] = -__builtin_inff();
  for (int p = 0; p < count; p += 16) top = max(load(scores + p), top);
  float new_max = reduce_max(top);
  f32x16 offset = splat(-new_max * scale_log2), factor = splat(scale_log2);
  for (int p = 0; p < count; p += 16) {
    f32x16 weight = exp2(fma(load(scores + p), factor, offset));
    sum = sum + weight;
    store(scores + p, weight);
  }
  float change[16];
  store(change, exp2(splat((running_max - new_max) * scale_log2)));
  shrink = change[0];
  running_max = new_max;
  return reduce_add(sum);
}

// out[g] = out[g] * shrink[g] + sum over positions of weights[g][position] * v[position].
template <int HD, int G, class T>
AOTC_INLINE void decode_values(const T* v, long row_stride, int count, const float (*weights)[decode_block],
                               const float* shrink, float* out) {
  constexpr int part = HD <= 64 || G == 1 ? HD : HD % 64 == 0 ? 64 : 32;  // columns at a time, so that G * part / 16 sums stay in registers
  for (int d = 0; d < HD; d += part) {
    f32x16 sum[G][part / 16];
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int i = 0; i < part / 16; i++) sum[g][i] = load(out + g * HD + d + 16 * i) * splat(shrink[g]);
    for (int p = 0; p < count; p++) {
      f32x16 value[part / 16];
      load_head<part>(v + p * row_stride + d, value);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        f32x16 weight = splat(weights[g][p]);
#pragma GCC unroll 16
        for (int i = 0; i < part / 16; i++) sum[g][i] = fma(weight, value[i], sum[g][i]);
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int i = 0; i < part / 16; i++) store(out + g * HD + d + 16 * i, sum[g][i]);
  }
}

// G query heads that share one kv head, positions [first, last).
template <int HD, int G, class T>
static inline void decode_group(const T* q, const KvCache<T>& cache, int row, int kv_head, int first, int last, float scale, T* y) {
  const long row_stride = cache.row_stride;
  alignas(64) float query[G * HD], out[G * HD] = {};
  alignas(64) float scores[G][decode_block];
  float running_max[G], total[G] = {}, shrink[G];
  for (int g = 0; g < G; g++) {
    running_max[g] = no_score;
    f32x16 head[HD / 16];
    load_head<HD>(q + g * HD, head);
    for (int i = 0; i < HD / 16; i++) store(query + g * HD + 16 * i, head[i]);
  }
  for (int p = first, count; p < last; p += count) {
    count = min_i(min_i(decode_block, last - p), cache.run(p));
    const long place = cache.place(row, kv_head, p);
    decode_scores<HD, G>(query, cache.k + place, row_stride, count, scores);
    for (int g = 0; g < G; g++) {
      float sum = decode_softmax(scores[g], count, scale * log2_e, running_max[g], shrink[g]);
      total[g] = total[g] * shrink[g] + sum;
    }
    decode_values<HD, G>(cache.v + place, row_stride, count, scores, shrink, out);
  }
  for (int g = 0; g < G; g++) {
    f32x16 inverse = splat(1.0f / total[g]);
    for (int i = 0; i < HD / 32; i++) {
      const float* o = out + g * HD + 32 * i;
      store32(y + g * HD + 32 * i, load(o) * inverse, load(o + 16) * inverse);
    }
  }
}

// y[r] = attention of row r's token over positions [first_visible, positions[r]] of it, for q and y
// [rows, heads * HD] (row strides ldq, ldy). The new token's K and V must be in the cache already. Work is split over
// (row, head) by the number of positions, so that a thread may take part of a group.
template <int HD, class T>
static inline void attention_decode(const T* q, long ldq, const KvCache<T>& cache, const int* positions, int rows,
                                    const AttentionOptions& o, T* y, long ldy, int tid, int nthreads) {
  static_assert(HD % 32 == 0, "head_dim must be a multiple of 32");
  int group = o.heads / cache.kv_heads;
  long total = 0, seen = 0;
  for (int r = 0; r < rows; r++) total += (long)(positions[r] + 1 - first_visible(positions[r], o.window)) * o.heads;
  Range mine = split_range(total, tid, nthreads);
  for (int r = 0; r < rows; r++) {
    int last = positions[r] + 1, first = first_visible(positions[r], o.window), cost = last - first;
    // heads whose cost interval begins in this thread's share of the total
    int h = (int)min_i(o.heads, (int)(mine.begin > seen ? ceil_div(mine.begin - seen, cost) : 0));
    int end = (int)(mine.end > seen ? (ceil_div(mine.end - seen, cost) < o.heads ? ceil_div(mine.end - seen, cost) : o.heads) : 0);
    seen += (long)cost * o.heads;
    while (h < end) {
      int kv = h / group, n = min_i(min_i(end, (kv + 1) * group) - h, decode_heads);
      const T* qh = q + r * ldq + h * HD;
      T* yh = y + r * ldy + h * HD;
      if (n == 4) decode_group<HD, 4>(qh, cache, r, kv, first, last, o.scale, yh);
      else if (n == 3) decode_group<HD, 3>(qh, cache, r, kv, first, last, o.scale, yh);
      else if (n == 2) decode_group<HD, 2>(qh, cache, r, kv, first, last, o.scale, yh);
      else decode_group<HD, 1>(qh, cache, r, kv, first, last, o.scale, yh);
      h += n;
    }
  }
}

}  // namespace aotc
