// What kernels in CUDA C++ for sm90a are written with: element types, barriers, copies of tiles (TMA), products of a
// warpgroup (wgmma), dependent launches. PTX ISA 8.0. No headers of CUDA are needed.
#pragma once
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#define IN_CLUSTERS(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#define GRID_CONSTANT const __grid_constant__
#define DEVICE __device__ __forceinline__

#define INFINITY __int_as_float(0x7F800000)
#define NAN __int_as_float(0x7FC00000)

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
DEVICE float to_f32(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <class T> DEVICE T from_f32(float x);
template <> DEVICE float from_f32<float>(float x) { return x; }
template <> DEVICE bf16 from_f32<bf16>(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bf16{bits};
}
template <> DEVICE f16 from_f32<f16>(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return f16{bits};
}

// Two neighbours at once.
template <class T> struct alignas(2 * sizeof(T)) Pair { T first, second; };

// A tensor map, as cuTensorMapEncodeTiled makes it.
struct alignas(64) TensorMap { char opaque[128]; };

DEVICE float fast_exp(float x) { return __expf(x); }
DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_erf(float x) { return erff(x); }
// As in numpy: a NaN wins.
template <class A> DEVICE A maximum(A a, A b) { return a > b || a != a ? a : b; }
template <class A> DEVICE A minimum(A a, A b) { return a < b || a != a ? a : b; }
template <class A> DEVICE A absolute(A x) { return x < 0 ? -x : x; }

typedef uint32_t SharedAddress;
DEVICE SharedAddress shared_address(const void* p) { return (SharedAddress)__cvta_generic_to_shared(p); }
DEVICE float from_lane(float x, int lane) { return __shfl_sync(0xFFFFFFFF, x, lane); }

// From a multiple of 1024 on, as swizzled tiles need it.
DEVICE char* shared_memory() {
  extern __shared__ char memory[];
  return memory + (-shared_address(memory) & 1023);
}
// The same number, unknown to the compiler, which then keeps nothing in registers that is made of it before a loop.
DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
// Of `COUNT` threads of a block.
template <int NUMBER, int COUNT> DEVICE void warpgroups_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}

DEVICE void barrier_init(uint64_t* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
DEVICE void barriers_are_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra ready;\n"
      "bra wait;\nready:\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}
DEVICE void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Copies the box of a tensor map that begins at row `row` and at block `k` of 64 columns; its bytes count at `b`.
DEVICE void copy_tile(void* to, const TensorMap* map, int k, int row, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%5, %4, %3}], [%2];" ::"r"(
          shared_address(to)), "l"(map), "r"(shared_address(b)), "r"(k), "r"(row), "r"(0) : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Rows of 64 16-bit elements, swizzled by 128 bytes, in groups of 8 rows: what a product reads from `p` on.
DEVICE uint64_t matrix(const void* p) {
  return (uint64_t)(shared_address(p) >> 4 & 0x3FFF) | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// d [64, n] += x [64, 16] * w [n, 16]^T, or =, in the registers of a warpgroup: `d` has those of a thread.
template <class Element, int COLUMNS> DEVICE void multiply(float* d, uint64_t x, uint64_t w, int add);
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory"); }

// Two neighbours as products take them.
template <class T> DEVICE uint32_t packed(T low, T high) { return low.bits | (uint32_t)high.bits << 16; }
// Four matrices of 8 x 8 16-bit elements from shared memory, a register of two neighbours each: lane i has the row i / 4.
// `row` is that of row i % 8 of matrix i / 8.
DEVICE void load_matrices(uint32_t* to, SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
// The same of columns: lane i has the column i / 4.
DEVICE void load_matrices_turned(uint32_t* to, SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
// d [8, 8] += a [8, 16] * b [8, 16]^T in the registers of a warp: lane i has row i / 4 of d and a, row i / 4 of b, of their
// columns i % 4 * 2 + (0, 1), and those 8 further on.
template <class T> DEVICE void multiply_8(float* d, const uint32_t* a, const uint32_t* b);
#define MULTIPLY_8(T)                                                                                                    \
  template <> DEVICE void multiply_8<T>(float* d, const uint32_t* a, const uint32_t* b) {                               \
    float unused[2];                                                                                                    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." #T "." #T ".f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, "       \
        "{%0, %1, %9, %9};"                                                                                             \
        : "+f"(d[0]), "+f"(d[1]), "=f"(unused[0]), "=f"(unused[1])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(0), "r"(b[0]), "r"(b[1]), "f"(0.0f));                                                \
  }
MULTIPLY_8(bf16)
MULTIPLY_8(f16)

// For blocks that add up what others stored: one thread of each, after a barrier of the block, counts in; it sees what all
// stored that counted in before, and so does its block after another barrier.
DEVICE int count_in(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
DEVICE float published(const float* p) { return __ldcg(p); }

// For blocks that wait for one another, once a thread of each has told that all of its threads have stored: what those
// stored is seen by loads past L1 (`fresh`) and by copies of tiles.
DEVICE void tell_blocks(int* counter) {
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  atomicAdd(counter, 1);
}
DEVICE void wait_for_blocks(const int* counter, int count) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  while (seen < count);
  asm volatile("fence.proxy.async;" ::: "memory");
}
template <class T> struct Fresh {
  const T* place;
  DEVICE T operator[](int64_t i) const {
    if constexpr (sizeof(T) == 2) {
      T x;
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x.bits) : "l"(place + i) : "memory");
      return x;
    } else {
      return __ldcg(place + i);
    }
  }
};
template <class T> DEVICE Fresh<T> fresh(const T* place) { return Fresh<T>{place}; }

// For blocks of a cluster, which run at the same time: where another one has what this one has at `p` of its shared memory,
// and a barrier of all their threads that have not ended, in two halves.
DEVICE float* of_block(float* p, int rank) {
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return (float*)there;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

template <int REGISTERS> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// A kernel starts while the one before it still runs, and waits for that one's results.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
