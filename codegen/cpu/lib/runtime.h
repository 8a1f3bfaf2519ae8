// The thread pool and the plan walker: every thread walks the same plan and does its share of each kernel.
//
// The pool is made once a process (by the first library loaded) and handed to all others; AOTC_ABI guards its layout.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

enum aotc_op { AOTC_CALL = 0, AOTC_BARRIER = 1, AOTC_JUMP_IF_FALSE = 2, AOTC_JUMP = 3 };
enum aotc_arg_kind { AOTC_ADDRESS = 0, AOTC_DIM = 1, AOTC_CONSTANT = 2 };

// An argument before its bases and dims are known: bases[index] + value, dims[index], or value.
typedef struct {
  int32_t kind, index;
  int64_t value;
} aotc_arg_spec;

// CALL: kernel `target` with `count` arguments from `first`. Jumps: to step `target`; the condition is argument `first`.
typedef struct {
  int32_t op, target, first, count;
} aotc_step;

typedef struct {
  const aotc_step* steps;
  const aotc_arg* args;
  const aotc_kernel* kernels;
  int64_t step_count;
  char* scratch;
  int64_t scratch_bytes;  // a thread
  int64_t* nanoseconds;   // a step, or null
} aotc_job;

typedef struct {
  int32_t abi, threads;
  alignas(64) uint32_t generation;  // of the job: workers wait for it to change
  alignas(64) uint32_t arrived;     // at the barrier
  alignas(64) uint32_t phase;       // of the barrier
  alignas(64) uint32_t sleepers;
  int32_t stop;
  const aotc_job* job;
  pthread_mutex_t lock;
  pthread_t* workers;
} aotc_pool;

#define AOTC_SPINS 20000  // about 0.2 to 1 ms: between the tokens of a stream workers stay awake, then they park

static inline void aotc_pause(int spins) {
  if (spins & 1023) __builtin_ia32_pause();
  else sched_yield();  // more threads than cores: let the one that we wait for run
}

static inline void aotc_barrier_wait(aotc_pool* pool) {
  const uint32_t phase = __atomic_load_n(&pool->phase, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)pool->threads) {
    __atomic_store_n(&pool->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->phase, phase + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 1; __atomic_load_n(&pool->phase, __ATOMIC_ACQUIRE) == phase; ++spins) aotc_pause(spins);
}

static int64_t aotc_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void aotc_walk(aotc_pool* pool, const aotc_job* job, int tid) {
  char* scratch = job->scratch + tid * job->scratch_bytes;
  int64_t* times = tid == 0 ? job->nanoseconds : NULL;
  for (int64_t at = 0; at < job->step_count;) {
    const aotc_step* step = job->steps + at;
    const int64_t begin = times ? aotc_now() : 0;
    const int64_t here = at++;
    switch (step->op) {
      case AOTC_CALL: job->kernels[step->target](job->args + step->first, tid, pool->threads, scratch); break;
      case AOTC_BARRIER: aotc_barrier_wait(pool); break;
      case AOTC_JUMP_IF_FALSE: if (!*(const uint8_t*)job->args[step->first].p) at = step->target; break;
      default: at = step->target;
    }
    if (times) times[here] += aotc_now() - begin;
  }
  aotc_barrier_wait(pool);
}

typedef struct {
  aotc_pool* pool;
  int tid;
} aotc_seat;

static void* aotc_worker(void* argument) {
  aotc_seat seat = *(aotc_seat*)argument;
  free(argument);
  aotc_pool* pool = seat.pool;
  uint32_t seen = 0;
  for (;;) {
    int spins = 1;
    while (__atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE) == seen) {
      if (spins < AOTC_SPINS) { aotc_pause(spins++); continue; }
      __atomic_add_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
      syscall(SYS_futex, &pool->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
      __atomic_sub_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    }
    seen = __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE);
    if (pool->stop) return NULL;
    aotc_walk(pool, pool->job, seat.tid);
  }
}

static void aotc_wake(aotc_pool* pool) {
  __atomic_add_fetch(&pool->generation, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &pool->generation, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

extern "C" {

int aotc_abi(void) { return AOTC_ABI; }

// Once a library, before its kernels run. Not 0 when the system refuses what the kernels need (AMX tiles).
int aotc_prepare(void) {
#if defined(__AMX_BF16__)
  return aotc::amx_request_permission();
#else
  return 0;
#endif
}

// A pool of `threads`, the caller's included. Null when memory or threads run out.
aotc_pool* aotc_pool_create(int threads) {
  aotc_pool* pool = (aotc_pool*)aligned_alloc(64, (sizeof(aotc_pool) + 63) / 64 * 64);
  if (!pool) return NULL;
  memset(pool, 0, sizeof *pool);
  pool->abi = AOTC_ABI;
  pool->threads = threads;
  pthread_mutex_init(&pool->lock, NULL);
  pool->workers = (pthread_t*)calloc((size_t)threads, sizeof(pthread_t));
  for (int tid = 1; tid < threads; ++tid) {
    aotc_seat* seat = (aotc_seat*)malloc(sizeof(aotc_seat));
    if (!seat || !pool->workers) return NULL;
    *seat = {pool, tid};
    if (pthread_create(&pool->workers[tid], NULL, aotc_worker, seat)) return NULL;
  }
  return pool;
}

void aotc_pool_destroy(aotc_pool* pool) {
  pool->stop = 1;
  aotc_wake(pool);
  for (int tid = 1; tid < pool->threads; ++tid) pthread_join(pool->workers[tid], NULL);
  free(pool->workers);
  free(pool);
}

// Runs a plan once. `resolved` holds one aotc_arg for each spec. Nothing is allocated here.
void aotc_run(aotc_pool* pool, const aotc_step* steps, int64_t step_count, const aotc_arg_spec* specs, int64_t spec_count,
              aotc_arg* resolved, const aotc_kernel* kernels, char* const* bases, const int64_t* dims, char* scratch,
              int64_t scratch_bytes, int64_t* nanoseconds) {
  for (int64_t i = 0; i < spec_count; ++i) {
    const aotc_arg_spec s = specs[i];
    if (s.kind == AOTC_ADDRESS) resolved[i].p = bases[s.index] + s.value;
    else resolved[i].i = s.kind == AOTC_DIM ? dims[s.index] : s.value;
  }
  const aotc_job job = {steps, resolved, kernels, step_count, scratch, scratch_bytes, nanoseconds};
  pthread_mutex_lock(&pool->lock);
  pool->job = &job;
  if (pool->threads > 1) aotc_wake(pool);
  aotc_walk(pool, &job, 0);
  pthread_mutex_unlock(&pool->lock);
}

}  // extern "C"
