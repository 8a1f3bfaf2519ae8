// What kernels, the plan walker and the loader agree on. A change here changes AOTC_ABI.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define AOTC_ABI 1

// One resolved argument of a call: an address, or the value of a dim.
typedef union {
  void* p;
  int64_t i;
} aotc_arg;

// A kernel does the share of thread `tid` of `nthreads`. `scratch` is this thread's own, aligned to 64 bytes.
typedef void (*aotc_kernel)(const aotc_arg* args, int tid, int nthreads, char* scratch);
