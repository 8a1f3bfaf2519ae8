// Extend (prefill) attention: the new tokens of sequences over all positions they see, in blocks of positions with an
// online softmax. Everything is kept transposed, [position][query] and [d][query]: K is then multiplied as it lies in the
// cache, maxima, sums and masks run down registers without shuffles, and only V is transposed, once for all queries.
#pragma once
#include "gemm.h"
#include "kv.h"
#include "transpose.h"

namespace aotc {

// A run of new tokens of one sequence: rows [row, row + count) of q and y, at positions [position, position + count) of
// row `sequence` of the cache, whose K and V must be in there already.
struct ExtendSpan { int sequence, row, count, position; };

static constexpr int extend_block = 64;     // positions a block
static constexpr int extend_columns = 128;  // most (token, head of the group) queries a work item

// What the products are computed in: bf16 where there are instructions for it, else float.
template <class T> struct Compute { using type = float; };
#if defined(__AVX512BF16__)
template <> struct Compute<bf16> { using type = bf16; };
#endif

// One thread's scratch.
template <int HD, class T> struct ExtendScratch {
  using C = typename Compute<T>::type;
  alignas(64) C queries[extend_columns * HD];               // [tile of 16][HD / k_step][16][k_step]
  alignas(64) C keys[extend_block * HD];                    // [position][HD], when the cache's own cannot serve
  alignas(64) C values[HD * extend_block];                  // [d][position]
  alignas(64) C weights[2 * extend_block * 16];             // [tile][position / k_step][16][k_step]
  alignas(64) float scores[extend_block * 32];              // [position][32]
  alignas(64) float product[(HD > 64 ? HD : 64) * 32];      // [d][32]; also rows on their way to a transposition
  alignas(64) float output[extend_columns / 32 * HD * 32];  // [pair of tiles][d][32]
  alignas(64) float running_max[extend_columns], total[extend_columns];
  alignas(64) float first[extend_columns], last[extend_columns];  // positions each query sees, inclusive
};
template <int HD, class T> static constexpr long attention_extend_scratch_bytes() {
  return sizeof(ExtendScratch<HD, T>) + 64;
}

// out[rows][32] = a[rows][K] * (b0 | b1); rows and K are multiples of 32.
template <class C>
AOTC_INLINE void multiply32(const C* a, long lda, int rows, const C* b0, const C* b1, int K, float* out) {
  if constexpr (UsesAmx<C, C>::value) {
#if defined(AOTC_AMX)
    for (int m = 0; m < rows; m += 32) amx_tile_rows<true>(a + m * lda, lda, 32, b0, b1, K, out + m * 32, 32, 0);
#endif
  } else {
    vector_tile(a, lda, rows, b0, b1, K, out, 32L);
  }
}

// Rows of any type to rows of the compute type.
template <int HD> static inline void convert_row(const bf16* s, bf16* d) { memcpy(d, s, HD * sizeof(bf16)); }
template <int HD, class T> static inline void convert_row(const T* s, float* d) {
  for (int i = 0; i < HD; i += 16) store(d + i, load(s + i));
}

// [rows][cols] of C, row stride lds, to packed or plain transposes: dst[cols][rows] with row stride ldd for float. For
// bf16 the unit is a pair, so `cols` and `lds`, `ldd` count dwords.
static inline void transpose_dwords(const void* src, long lds, int rows, int cols, void* dst, long ldd) {
  for (int i = 0; i < rows; i += 16)
    for (int j = 0; j < cols; j += 16)
      transpose16((const uint32_t*)src + i * lds + j, lds, (uint32_t*)dst + j * ldd + i, ldd);
}

// V block [count][HD] to [HD][extend_block], positions past count zero.
template <int HD, class T>
static inline void transpose_values(const T* v, long row_stride, int count, float* tmp, float* dst) {
  for (int p0 = 0; p0 < extend_block; p0 += 16) {
    for (int p = p0; p < p0 + 16; p++) {
      float* row = tmp + (p - p0) * HD;
      if (p < count) convert_row<HD>(v + p * row_stride, row);
      else memset(row, 0, HD * sizeof(float));
    }
    transpose_dwords(tmp, HD, 16, HD, dst + p0, extend_block);
  }
}
#if defined(__AVX512BF16__)
template <int HD>
static inline void transpose_values(const bf16* v, long row_stride, int count, float* tmp, bf16* dst) {
  for (int p0 = 0; p0 < extend_block; p0 += 32) {  // sixteen pairs of positions
    for (int p = p0; p < p0 + 32; p += 2) {
      for (int d = 0; d < HD; d += 16) {  // dword d = (v[p][d], v[p + 1][d])
        __m256i zero = _mm256_setzero_si256();
        __m256i even = p < count ? _mm256_loadu_si256((const __m256i*)(v + p * row_stride + d)) : zero;
        __m256i odd = p + 1 < count ? _mm256_loadu_si256((const __m256i*)(v + (p + 1) * row_stride + d)) : zero;
        __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
        _mm512_storeu_si512(tmp + (p - p0) / 2 * HD + d, pair);
      }
    }
    transpose_dwords(tmp, HD, 16, HD, dst + p0, extend_block / 2);
  }
}
static inline void store_weights(bf16* w, f32x16 even, f32x16 odd) { store_even_odd(w, even, odd); }
#endif
static inline void store_weights(float* w, f32x16 even, f32x16 odd) {
  store(w, even);
  store(w + 16, odd);
}

// Scores of one tile pair to weights; see decode_softmax. Writes the factors by which earlier sums shrink. Masked: only
// the first `count` of the rows are keys, and not every query sees them.
template <bool Masked, class C>
AOTC_INLINE void extend_softmax(float* scores, int rows, int count, int position, const float* first, const float* last, float scale_log2,
                                float* running_max, float* total, float (&shrink)[32], C* weights) {
  for (int t = 0; t < 2; t++) {
    float* s = scores + 16 * t;
    f32x16 lo = load(first + 16 * t), hi = load(last + 16 * t), old = load(running_max + 16 * t), top = old;
    const f32x16 newest = splat((float)(position + count - 1));
    hi = where_le(hi, newest, hi, newest);
    for (int p = 0; p < rows; p++) {
      f32x16 v = load(s + 32 * p);
      if (Masked) {
        f32x16 at = splat((float)(position + p)), none = splat(-__builtin_inff());
        v = where_le(at, hi, where_le(lo, at, v, none), none);
        store(s + 32 * p, v);
      }
      top = max(v, top);
    }
    f32x16 factor = splat(scale_log2), offset = splat(0.0f) - top * factor, sum = splat(0.0f);
    C* w = weights + t * extend_block * 16;
    for (int p = 0; p < rows; p += 2) {
      f32x16 even = exp2(fma(load(s + 32 * p), factor, offset));
      f32x16 odd = exp2(fma(load(s + 32 * p + 32), factor, offset));
      sum = sum + (even + odd);
      store_weights(w + 16 * p, even, odd);
    }
    f32x16 change = exp2((old - top) * factor);
    store(&shrink[16 * t], change);
    store(running_max + 16 * t, top);
    store(total + 16 * t, fma(load(total + 16 * t), change, sum));
  }
}

// One work item: queries [begin, end) of a span's count * group, numbered token by token, of one kv head.
template <int HD, class T> struct ExtendItem {
  using C = typename Compute<T>::type;
  const T* q;
  const KvCache<T>& cache;
  int sequence, kv_head;
  T* y;
  long ldq, ldy;  // q and y at the span's first row and the group's first head
  int group, position, begin, end;
  AttentionOptions options;
  int newest;  // the span's last position

  int token(int query) const { return (begin + query) / group; }
  long head(int query) const { return (begin + query) % group * HD; }

  void pack_queries(ExtendScratch<HD, T>& s, int tiles) const {
    constexpr int dwords = HD * (int)sizeof(C) / 4;
    C* rows = (C*)s.output;  // free until the first block
    for (int t = 0; t < tiles; t++) {
      for (int i = 0; i < 16; i++) {
        int n = min_i(16 * t + i, end - begin - 1);  // surplus columns repeat the last query
        convert_row<HD>(q + token(n) * ldq + head(n), rows + i * HD);
        int at = position + token(n);
        s.first[16 * t + i] = (float)first_visible(at, options.window);
        s.last[16 * t + i] = (float)(options.causal ? at : newest);
        s.running_max[16 * t + i] = no_score;
        s.total[16 * t + i] = 0;
      }
      transpose_dwords(rows, dwords, 16, dwords, s.queries + t * 16 * HD, 16);
    }
    memset(s.output, 0, sizeof(float) * tiles * 16 * HD);
  }

  void block(ExtendScratch<HD, T>& s, int tiles, int p0, int count) const {
    int rows = (int)round_up(count, 32);
    const long place = cache.place(sequence, kv_head, p0), row_stride = cache.row_stride;
    const T *k = cache.k + place, *v = cache.v + place;
    const C* keys = s.keys;
    long key_stride = HD;
    if constexpr (same_type<C, T>::value) {
      if (rows == count) { keys = k; key_stride = row_stride; }
    }
    if (keys == s.keys) {
      for (int p = 0; p < count; p++) convert_row<HD>(k + p * row_stride, s.keys + p * HD);
      memset(s.keys + count * HD, 0, (rows - count) * HD * sizeof(C));
    }
    transpose_values<HD>(v, row_stride, count, s.product, s.values);
    for (int t = 0; t < tiles; t += 2) {
      const C* b = s.queries + t * 16 * HD;
      multiply32(keys, key_stride, rows, b, b + 16 * HD, HD, s.scores);
      float shrink[32];
      float *first = s.first + 16 * t, *last = s.last + 16 * t;
      bool masked = p0 + rows - 1 > last[0] || p0 < first[31] || rows != count;  // queries are in order of their positions
      if (masked) extend_softmax<true>(s.scores, rows, count, p0, first, last, options.scale * log2_e, s.running_max + 16 * t, s.total + 16 * t, shrink, s.weights);
      else extend_softmax<false>(s.scores, rows, count, p0, first, last, options.scale * log2_e, s.running_max + 16 * t, s.total + 16 * t, shrink, s.weights);
      multiply32(s.values, (long)extend_block, HD, s.weights, s.weights + extend_block * 16, rows, s.product);
      f32x16 a = load(shrink), c = load(shrink + 16);
      float* out = s.output + t * 16 * HD;
      for (int d = 0; d < HD; d++, out += 32) {
        store(out, fma(load(out), a, load(s.product + 32 * d)));
        store(out + 16, fma(load(out + 16), c, load(s.product + 32 * d + 16)));
      }
    }
  }

  void write(ExtendScratch<HD, T>& s, int tiles) const {
    for (int t = 0; t < tiles; t++) {
      float* out = s.output + t / 2 * 32 * HD + t % 2 * 16;
      f32x16 inverse = splat(1.0f) / load(s.total + 16 * t);
      for (int d = 0; d < HD; d++) store(out + 32 * d, load(out + 32 * d) * inverse);
      transpose_dwords(out, 32, HD, 16, s.product, HD);
      for (int n = 16 * t; n < min_i(16 * t + 16, end - begin); n++)
        for (int d = 0; d < HD; d += 16) store(y + token(n) * ldy + head(n) + d, load(s.product + (n - 16 * t) * HD + d));
    }
  }

  int first_position() const { return first_visible(position + begin / group, options.window); }
  int end_position() const { return (options.causal ? position + (end - 1) / group : newest) + 1; }

  void run(ExtendScratch<HD, T>& s) const {
    int tiles = (int)round_up(end - begin, 32) / 16, stop = end_position();
    pack_queries(s, tiles);
    for (int p = first_position(), count; p < stop; p += count) {
      count = min_i(min_i(extend_block, stop - p), cache.run(p));
      block(s, tiles, p, count);
    }
    write(s, tiles);
  }
};

// y[row] = attention of every token of every span over the positions up to its own, or over all, for q and y [rows, heads * HD].
// Work items (span, kv head, up to extend_columns queries) are split over the threads by the positions they visit.
// `scratch`: attention_extend_scratch_bytes<HD, T>() bytes of this thread's own.
template <int HD, class T>
static inline void attention_extend(const T* q, long ldq, const KvCache<T>& cache, const ExtendSpan* spans, int span_count,
                                    const AttentionOptions& o, T* y, long ldy, void* scratch, int tid, int nthreads) {
  static_assert(HD % 32 == 0, "head_dim must be a multiple of 32");
  auto& s = *(ExtendScratch<HD, T>*)round_up((long)scratch, 64);
  int group = o.heads / cache.kv_heads;
  // smaller items where there are few, so that every thread gets some
  long queries = 0, total = 0, seen = 0;
  for (int i = 0; i < span_count; i++) queries += (long)spans[i].count * o.heads;
  int columns = extend_columns;
  while (columns > 32 && queries < 4L * nthreads * columns) columns /= 2;
#if defined(AOTC_AMX)
  if constexpr (UsesAmx<typename Compute<T>::type, T>::value) amx_configure(16, 16);
#endif
  for (int pass = 0; pass < 2; pass++) {  // first the total cost, then the items whose cost begins in this thread's share
    Range mine = split_range(total, tid, nthreads);
    for (int i = 0; i < span_count; i++) {
      ExtendSpan span = spans[i];
      for (int kv = 0; kv < cache.kv_heads; kv++) {
        for (int begin = 0; begin < span.count * group; begin += columns) {
          long head = (long)kv * group * HD;
          ExtendItem<HD, T> item = {q + span.row * ldq + head, cache, span.sequence, kv,
                                    y + span.row * ldy + head, ldq, ldy, group, span.position, begin,
                                    min_i(begin + columns, span.count * group), o, span.position + span.count - 1};
          long cost = item.end_position() - item.first_position() + extend_block;
          if (pass == 0) total += cost;
          else {
            if (seen >= mine.begin && seen < mine.end) item.run(s);
            seen += cost;
          }
        }
      }
    }
  }
#if defined(AOTC_AMX)
  if constexpr (UsesAmx<typename Compute<T>::type, T>::value) amx_release();
#endif
}

}  // namespace aotc
