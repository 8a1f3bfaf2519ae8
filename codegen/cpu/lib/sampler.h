// Samples the next token of one sequence from its logits. Header only; no allocation, no libm, no libstdc++.
//
// Order (docs/sampling.md has the formulas; aotc/ir/ops/sample_reference.py is the readable oracle):
//   1. log probabilities: log-softmax of the raw logits, before anything below
//   2. logit bias, grammar mask, banned ids (until `ban_until`)
//   3. penalties: repetition over prompt + output, then frequency and presence over output
//   4. greedy (temperature < 1e-5): the largest logit, the first id of equal ones
//   5. temperature, min_p, top_k, top_p: each keeps every token that equals its border
//   6. one draw from what is left, ids ascending, by Philox4x32-10(key = seed, counter = position): a token
//      depends on its own sequence only, never on the batch around it
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "sampler.h tells NaN and infinity apart: compile it without -ffast-math"
#endif

// Settings of one row; runtime/sampling.py writes it as SAMPLER_DTYPE. Addresses have 64 bits, 0 = none.
struct SamplerRow {
    float temperature, top_p, min_p;  // < 1e-5 = greedy; 1 = off; 0 = off
    float repetition_penalty, presence_penalty, frequency_penalty;  // 1, 0, 0 = off
    int32_t top_k;                   // <= 0 = off
    int32_t n_logprobs;              // -1 = none, 0 = of the sampled token, n = and of the n best
    uint64_t seed;
    uint64_t counter_base;           // upper half of Philox's counter: which of the request's n choices
    uint64_t bias_ids, bias_values;  // int32_t[bias_count], float[bias_count]
    uint64_t ban_ids;                // int32_t[ban_count]
    uint64_t mask;                   // uint32_t[mask_words], bit i % 32 of word i / 32: id i is allowed
    int32_t bias_count, ban_count;
    int32_t ban_until;               // bans hold while history_len < ban_until
    int32_t mask_words;              // ids past the mask are not allowed
    int32_t prompt_len, history_len; // history = prompt, then output; the token gets position history_len
    uint64_t reserved[3];
};
static_assert(sizeof(SamplerRow) == 128, "SamplerRow is a binary format");

enum { SAMPLER_MAX_LOGPROBS = 20, SAMPLER_NAN = -1, SAMPLER_EMPTY = -2 };

namespace sampler {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

constexpr int kBlock = 256;     // logits that share one maximum or one sum
constexpr int kBuckets = 2048;  // of the radix selection
constexpr float kInf = __builtin_inff();

constexpr int blocks(int n) { return (n + kBlock - 1) / kBlock; }

struct Scratch {
    double* sums;       // [blocks]
    double* histogram;  // [2, kBuckets]
    float* maxima;      // [blocks]
    float* values;      // [vocab] adjusted logits, then candidates and their weights
    int32_t* ids;       // [vocab] penalty counts, then ids of candidates
};

static inline Scratch carve(void* memory, int vocab) {
    double* sums = (double*)memory;
    double* histogram = sums + blocks(vocab);
    float* maxima = (float*)(histogram + 2 * kBuckets);
    float* values = maxima + blocks(vocab);
    return {sums, histogram, maxima, values, (int32_t*)(values + vocab)};
}

// Maximum of each block. False if a logit is NaN.
static inline bool block_maxima(const float* x, int vocab, float* maxima) {
    Ints nan[4] = {};
    bool tail_nan = false;
    for (int start = 0; start < vocab; start += kBlock) {
        const int end = start + kBlock < vocab ? start + kBlock : vocab;
        Floats best[4] = {};
        for (int j = 0; j < 4; ++j) best[j] = best[j] - kInf;
        int i = start;
        for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const Floats v = *(const Floats*)(x + i + j * kLanes);
                best[j] = v > best[j] ? v : best[j];
                nan[j] |= v != v;
            }
        }
        float top = -kInf;
        for (; i < end; ++i) {
            top = x[i] > top ? x[i] : top;
            tail_nan |= x[i] != x[i];
        }
        for (int j = 1; j < 4; ++j) best[0] = best[j] > best[0] ? best[j] : best[0];
        for (int k = 0; k < kLanes; ++k) top = best[0][k] > top ? best[0][k] : top;
        maxima[start / kBlock] = top;
    }
    nan[0] |= nan[1] | nan[2] | nan[3];
    for (int k = 0; k < kLanes; ++k) tail_nan |= nan[0][k] != 0;
    return !tail_nan;
}

static inline float largest(const float* maxima, int count) {
    float top = -kInf;
    for (int b = 0; b < count; ++b) top = maxima[b] > top ? maxima[b] : top;
    return top;
}

// The first id whose logit is `top`, the largest one.
static inline int first_index(const float* x, const float* maxima, float top) {
    int i = 0;
    while (maxima[i / kBlock] != top) i += kBlock;
    while (x[i] != top) ++i;
    return i;
}

// e^y for y <= 0, within 2 ulp; 0 below -87 (probabilities under 1e-37). e^0 is exactly 1.
static inline Floats exp_nonpositive(Floats y) {
    const Floats low = Floats{} - 87.0f;
    const Ints alive = y >= low;
    y = y >= low ? y : low;
    const Floats shifted = y * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds y / ln 2 to an integer
    const Floats n = shifted - 12582912.0f;
    const Floats r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // Cephes' expf
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Ints power = ((Ints)shifted + 127) << 23;  // the low bits of `shifted` hold n
    return (Floats)((Ints)(p * (Floats)power) & alive);
}

// w[i] = e^((x[i] - top) / temperature); w may be x.
static inline void exp_weights(const float* x, int n, float top, float temperature, float* w) {
    const float scale = 1.0f / temperature;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        *(Floats*)(w + i) = exp_nonpositive((*(const Floats*)(x + i) - top) * scale);
    for (; i < n; ++i) w[i] = exp_nonpositive(Floats{} + (x[i] - top) * scale)[0];
}

// Sum of the weights >= least, and of each block.
static inline double block_sums(const float* w, int n, float least, double* sums) {
    double total = 0;
    for (int start = 0; start < n; start += kBlock) {
        const int end = start + kBlock < n ? start + kBlock : n;
        Floats lanes[2] = {};
        int i = start;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                const Floats v = *(const Floats*)(w + i + j * kLanes);
                lanes[j] += v >= least ? v : Floats{};
            }
        }
        double sum = 0;
        for (; i < end; ++i) sum += w[i] >= least ? w[i] : 0.0f;
        for (int k = 0; k < kLanes; ++k) sum += (double)lanes[0][k] + (double)lanes[1][k];
        sums[start / kBlock] = sum;
        total += sum;
    }
    return total;
}

// ln v for finite v >= 1: ln(m * 2^e) = e ln 2 + 2 artanh((m - 1) / (m + 1)), with m in [0.707, 1.414].
static inline double natural_log(double v) {
    uint64_t bits;
    __builtin_memcpy(&bits, &v, 8);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    __builtin_memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) m *= 0.5, ++exponent;
    const double s = (m - 1) / (m + 1), s2 = s * s;
    double series = 0;
    for (int k = 19; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
    return exponent * 0.6931471805599453 + 2 * s * series;
}

// Unsigned integers that order as the floats do (no NaN).
static inline uint32_t ordered(float v) {
    uint32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

// The largest t so that `target` of x are >= t, or (kMass) so that those sum to `target`; -inf if none is.
// Radix selection, highest bits first: three passes, whatever the input.
template <bool kMass>
static inline float select_threshold(const float* x, int n, double target, double* histogram) {
    uint32_t prefix = 0;
    double above = 0;
    const int widths[3] = {11, 11, 10};
    for (int level = 0, shift = 32; level < 3; ++level) {
        const int width = widths[level];
        shift -= width;
        for (int b = 0; b < 2 * kBuckets; ++b) histogram[b] = 0;
        for (int i = 0; i < n; ++i) {
            const uint32_t key = ordered(x[i]);
            const uint32_t bucket = key >> shift & ((1u << width) - 1);
            if ((uint64_t)key >> shift >> width == prefix)  // two histograms in turn: neighbours rarely wait
                histogram[(i & 1) * kBuckets + bucket] += kMass ? x[i] : 1.0;
        }
        int b = kBuckets - 1;
        for (; b > 0; --b) {
            const double here = histogram[b] + histogram[kBuckets + b];
            if (here > 0 && above + here >= target) break;
            above += here;
        }
        prefix = prefix << width | (uint32_t)b;
    }
    const uint32_t bits = prefix ^ (prefix >> 31 ? 1u << 31 : ~0u);
    float t;
    __builtin_memcpy(&t, &bits, 4);
    return t == t ? t : -kInf;
}

// Copies the logits >= least and their ids to the front of m, skipping blocks without any. x may be m.values.
static inline int gather(const float* x, int vocab, float least, const Scratch& m) {
    int kept = 0;
    for (int start = 0; start < vocab; start += kBlock) {
        const int end = start + kBlock < vocab ? start + kBlock : vocab;
        for (int i = start; i < end && m.maxima[start / kBlock] >= least; ++i) {
            const float v = x[i];
            m.values[kept] = v;
            m.ids[kept] = i;
            kept += v >= least;
        }
    }
    return kept;
}

// Keeps the weights >= least with their ids (which are the indices if `first`); returns how many. `sums` of
// the blocks, if given, tell which blocks hold none.
static inline int compact(float* w, int32_t* ids, int n, float least, const double* sums, bool first) {
    int kept = 0;
    for (int start = 0; start < n; start += kBlock) {
        const int end = start + kBlock < n ? start + kBlock : n;
        for (int i = start; i < end && (!sums || sums[start / kBlock] >= least); ++i) {
            const float v = w[i];
            w[kept] = v;
            ids[kept] = first ? i : ids[i];
            kept += v >= least;
        }
    }
    return kept;
}

// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
static inline void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// Uniform in [0, 1) with 53 bits for the token at `position`.
static inline double uniform(uint64_t seed, uint64_t base, int32_t position) {
    const uint32_t counter[4] = {(uint32_t)position, 0, (uint32_t)base, (uint32_t)(base >> 32)};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];
    philox4x32(counter, key, r);
    return ((double)(r[0] >> 5) * 67108864.0 + (double)(r[1] >> 6)) * 0x1p-53;
}

// Index of the first weight >= least at which the running sum exceeds u times the whole sum.
static inline int draw(const float* w, int n, float least, double u, double* sums) {
    const double target = u * block_sums(w, n, least, sums);
    double before = 0, running = 0;
    int block = 0;
    for (int b = 0; b < blocks(n) && running <= target; ++b) {
        if (sums[b] > 0) block = b, before = running;
        running += sums[b];
    }
    const int end = (block + 1) * kBlock < n ? (block + 1) * kBlock : n;
    int chosen = 0;
    for (int i = block * kBlock; i < end && before <= target; ++i)
        if (w[i] >= least && w[i] > 0) chosen = i, before += w[i];
    return chosen;
}

// A logit below which top_k or min_p keeps nothing: the k-th best maximum of a block is no better than the
// k-th best logit, and min_p is the weight of top + temperature * ln(min_p); some slack is for rounding.
static inline float candidate_floor(float top, int vocab, const SamplerRow* s, const Scratch& m) {
    float least = -kInf;
    if (s->top_k > 0 && s->top_k <= blocks(vocab))
        least = select_threshold<false>(m.maxima, blocks(vocab), s->top_k, m.histogram);
    if (s->min_p > 0) {
        const double reach = s->temperature * (natural_log(1.0 / s->min_p) + 1e-3);
        const float by_min_p = (float)(top - reach - 1e-6 * (top < 0 ? -top : top));
        least = by_min_p > least ? by_min_p : least;
    }
    return least;
}

// Steps 5 and 6. Exponentials are taken of candidates only.
static inline int sample_token(const float* x, int vocab, float top, const SamplerRow* s, const Scratch& m) {
    float* w = m.values;
    int n = vocab;
    bool all = true;  // candidates are the whole vocabulary: index = id
    const bool has_top_k = s->top_k > 0 && s->top_k < vocab;
    if (has_top_k || s->min_p > 0) {
        n = gather(x, vocab, candidate_floor(top, vocab, s, m), m);
        if (has_top_k && s->top_k < n)
            n = compact(w, m.ids, n, select_threshold<false>(w, n, s->top_k, m.histogram), nullptr, false);
        x = w;
        all = false;
    }
    exp_weights(x, n, top, s->temperature, w);
    if (s->min_p > 0) n = compact(w, m.ids, n, s->min_p, nullptr, false);
    float border = 0;
    if (s->top_p < 1) {
        const double target = s->top_p * block_sums(w, n, 0, m.sums);
        float floor = 1.0f / 4;  // if the weights above it suffice, the border is among them
        while (block_sums(w, n, floor, m.sums) < target) floor = floor < 1e-6f ? 0 : floor / 4;
        n = compact(w, m.ids, n, floor, m.sums, all);
        all = false;
        border = select_threshold<true>(w, n, target, m.histogram);
    }
    const int i = draw(w, n, border, uniform(s->seed, s->counter_base, s->history_len), m.sums);
    return all ? i : m.ids[i];
}

static inline bool is_adjusted(const SamplerRow* s) {
    return s->bias_count > 0 || s->mask || (s->ban_count > 0 && s->history_len < s->ban_until) ||
           s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

static inline bool in_vocab(int32_t id, int vocab) { return (uint32_t)id < (uint32_t)vocab; }

static inline void apply_mask(float* x, int vocab, const uint32_t* mask, int words) {
    int32_t bit[32];
    for (int k = 0; k < 32; ++k) bit[k] = (int32_t)(1u << k);
    for (int i = 0; i < vocab; i += 32) {
        const uint32_t word = i / 32 < words ? mask[i / 32] : 0;
        int k = 0;
        for (; i + 32 <= vocab && k < 32; k += kLanes) {
            Floats* v = (Floats*)(x + i + k);
            const Ints allowed = (*(const Ints*)(bit + k) & (int32_t)word) != 0;
            *v = allowed ? *v : Floats{} - kInf;
        }
        for (; k < 32 && i + k < vocab; ++k) x[i + k] = word >> k & 1 ? x[i + k] : -kInf;
    }
}

// Step 2.
static inline void apply_bias_mask_ban(float* x, int vocab, const SamplerRow* s) {
    const int32_t* ids = (const int32_t*)(uintptr_t)s->bias_ids;
    const float* values = (const float*)(uintptr_t)s->bias_values;
    for (int i = 0; i < s->bias_count; ++i)
        if (in_vocab(ids[i], vocab)) x[ids[i]] += values[i];
    if (s->mask) apply_mask(x, vocab, (const uint32_t*)(uintptr_t)s->mask, s->mask_words);
    const int32_t* banned = (const int32_t*)(uintptr_t)s->ban_ids;
    for (int i = 0; i < s->ban_count && s->history_len < s->ban_until; ++i)
        if (in_vocab(banned[i], vocab)) x[banned[i]] = -kInf;
}

// Step 3. Counts only what the history names, so `count` needs no clearing of the whole vocabulary.
static inline void apply_penalties(float* x, int vocab, const SamplerRow* s, const int32_t* history,
                                   int32_t* count) {
    if (s->repetition_penalty == 1 && s->presence_penalty == 0 && s->frequency_penalty == 0) return;
    for (int i = 0; i < s->history_len; ++i)
        if (in_vocab(history[i], vocab)) count[history[i]] = 0;
    for (int i = s->prompt_len < 0 ? 0 : s->prompt_len; i < s->history_len; ++i)
        if (in_vocab(history[i], vocab)) ++count[history[i]];
    for (int i = 0; i < s->history_len; ++i) {
        const int32_t id = history[i];
        if (!in_vocab(id, vocab) || count[id] < 0) continue;
        float v = x[id] > 0 ? x[id] / s->repetition_penalty : x[id] * s->repetition_penalty;
        v -= s->frequency_penalty * (float)count[id];
        x[id] = v - (count[id] > 0 ? s->presence_penalty : 0.0f);
        count[id] = -1;
    }
}

// The n largest values seen, the first of equal ones first, if ids come in ascending order.
struct Top {
    int n, size;
    float values[SAMPLER_MAX_LOGPROBS];
    int32_t ids[SAMPLER_MAX_LOGPROBS];

    void offer(float value, int32_t id) {
        if (size == n && !(n > 0 && value > values[n - 1])) return;
        int j = size < n ? size++ : n - 1;
        for (; j > 0 && value > values[j - 1]; --j) values[j] = values[j - 1], ids[j] = ids[j - 1];
        values[j] = value, ids[j] = id;
    }
};

// The n best lie in the n blocks of the best maxima: no more than n blocks are read.
static inline Top top_logits(const float* x, int vocab, const float* maxima, int n) {
    Top best_blocks = {n, 0, {}, {}}, best = {n, 0, {}, {}};
    for (int b = 0; b < blocks(vocab); ++b) best_blocks.offer(maxima[b], b);
    int32_t* order = best_blocks.ids;
    for (int i = 1; i < best_blocks.size; ++i)
        for (int j = i; j > 0 && order[j] < order[j - 1]; --j) {
            const int32_t swap = order[j];
            order[j] = order[j - 1], order[j - 1] = swap;
        }
    for (int i = 0; i < best_blocks.size; ++i)
        for (int k = order[i] * kBlock; k < vocab && k < (order[i] + 1) * kBlock; ++k) best.offer(x[k], k);
    return best;
}

}  // namespace sampler

// Bytes of `scratch`, which is aligned to 8 bytes.
constexpr size_t sample_scratch_bytes(int vocab) {
    return 8 * (size_t)(sampler::blocks(vocab) + 2 * sampler::kBuckets) + 4 * (size_t)sampler::blocks(vocab) +
           8 * (size_t)vocab;
}

// logits [vocab], history [history_len]. Writes *token, or SAMPLER_NAN if a logit is NaN or +inf, or
// SAMPLER_EMPTY if no token is left (all are -inf); and logprobs [21], logprob_ids [21]: of the token, then
// of the n_logprobs best. What is not asked for, or has no token, is 0 and id -1.
static inline void sample_row(const float* logits, int vocab, const SamplerRow* s, const int32_t* history,
                              void* scratch, int32_t* token, float* logprobs, int32_t* logprob_ids) {
    using namespace sampler;
    for (int i = 0; i <= SAMPLER_MAX_LOGPROBS; ++i) logprobs[i] = 0, logprob_ids[i] = -1;
    *token = SAMPLER_NAN;
    const Scratch m = carve(scratch, vocab);
    if (!block_maxima(logits, vocab, m.maxima)) return;
    const float raw_top = largest(m.maxima, blocks(vocab));
    if (raw_top == kInf) return;
    *token = SAMPLER_EMPTY;
    if (raw_top == -kInf) return;

    int n_logprobs = s->n_logprobs < SAMPLER_MAX_LOGPROBS ? s->n_logprobs : SAMPLER_MAX_LOGPROBS;
    n_logprobs = n_logprobs < vocab ? n_logprobs : vocab;
    Top best = {0, 0, {}, {}};
    double log_sum = 0;
    if (n_logprobs >= 0) {
        best = top_logits(logits, vocab, m.maxima, n_logprobs);
        exp_weights(logits, vocab, raw_top, 1.0f, m.values);
        log_sum = raw_top + natural_log(block_sums(m.values, vocab, 0, m.sums));
    }

    const float* x = logits;
    float top = raw_top;
    if (is_adjusted(s)) {
        __builtin_memcpy(m.values, logits, (size_t)vocab * sizeof(float));
        apply_bias_mask_ban(m.values, vocab, s);
        apply_penalties(m.values, vocab, s, history, m.ids);
        x = m.values;
        const bool valid = block_maxima(x, vocab, m.maxima);
        top = largest(m.maxima, blocks(vocab));
        if (!valid || top == kInf) *token = SAMPLER_NAN;
        if (!valid || top == kInf || top == -kInf) return;
    }
    *token = s->temperature < 1e-5f ? first_index(x, m.maxima, top) : sample_token(x, vocab, top, s, m);
    if (n_logprobs < 0) return;
    logprobs[0] = (float)(logits[*token] - log_sum);
    logprob_ids[0] = *token;
    for (int i = 0; i < n_logprobs; ++i) {
        logprobs[i + 1] = (float)(best.values[i] - log_sum);
        logprob_ids[i + 1] = best.ids[i];
    }
}
