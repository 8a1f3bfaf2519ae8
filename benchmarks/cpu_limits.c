// Prints what argv[1] threads reach together, each the best of nine passes: GB/s of reading 1 GiB with 64-byte loads,
// GFLOP/s of bf16 dot products (AVX512_BF16) and GOP/s of 8-bit ones (VNNI), 0 where the CPU has none.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef long long lanes __attribute__((vector_size(64)));
static char* data;
static const size_t size = 1ull << 30;
static int threads;

static void* read_share(void* number) {
  const size_t share = size / threads / 256 * 256;
  const char* p = data + (size_t)(intptr_t)number * share;
  lanes a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i < share; i += 256) {
    a ^= *(const lanes*)(p + i);
    b ^= *(const lanes*)(p + i + 64);
    c ^= *(const lanes*)(p + i + 128);
    d ^= *(const lanes*)(p + i + 192);
  }
  a ^= b ^ c ^ d;
  volatile long long kept = a[0] ^ a[3];
  (void)kept;
  return NULL;
}

enum { ROUNDS = 1 << 20, CHAINS = 12 };

static void* multiply_bf16(void* number) {
  (void)number;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  __m512 sums[CHAINS];
  __m512i a = _mm512_set1_epi32(0x3f803f80), b = _mm512_set1_epi32(0x3c003c00);
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps(i);
  for (int round = 0; round < ROUNDS; round++) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
  }
  for (int i = 1; i < CHAINS; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  volatile float kept = _mm512_reduce_add_ps(sums[0]);
  (void)kept;
#endif
  return NULL;
}

static void* multiply_i8(void* number) {
  (void)number;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  __m512i sums[CHAINS], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_epi32(i);
  for (int round = 0; round < ROUNDS; round++) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
  for (int i = 1; i < CHAINS; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  volatile int kept = _mm512_reduce_add_epi32(sums[0]);
  (void)kept;
#endif
  return NULL;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double seconds(void* (*work)(void*)) {
  double best = 1e9;
  for (int pass = 0; pass < 9; pass++) {
    pthread_t others[256];
    const double begin = now();
    for (intptr_t t = 1; t < threads; t++) pthread_create(&others[t], NULL, work, (void*)t);
    work(0);
    for (int t = 1; t < threads; t++) pthread_join(others[t], NULL);
    if (now() - begin < best) best = now() - begin;
  }
  return best;
}

int main(int argc, char** argv) {
  threads = argc > 1 ? atoi(argv[1]) : 1;
  data = aligned_alloc(1 << 21, size);
  for (size_t i = 0; i < size; i += 64) data[i] = (char)i;
  const double products = (double)ROUNDS * CHAINS * threads / 1e9;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  const double bf16 = products * 64 / seconds(multiply_bf16), i8 = products * 128 / seconds(multiply_i8);
#else
  const double bf16 = 0 * products, i8 = 0;
#endif
  printf("{\"read_gb_s\": %.1f, \"bf16_gflop_s\": %.0f, \"vnni_gop_s\": %.0f}\n", size / seconds(read_share) / 1e9, bf16, i8);
  return 0;
}
