// The functions of `hopper.cuh` on a CPU: the threads of a block, or of all blocks that wait for one another, are fibers
// that take turns, shared memory is poisoned, copies are done when somebody waits for them, products at once. For tests.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>
#include <vector>

#define KERNEL extern "C" void
#define IN_CLUSTERS(BLOCKS)
#define GRID_CONSTANT const
#define DEVICE static inline

struct TensorMap;

namespace host {
struct Index { int x, y, z; };
struct Fiber {
  ucontext_t context;
  char* stack;
  bool ended;
  int arrived;  // at so many barriers of the cluster
};
struct Barrier { int16_t pending, arrivals; int32_t bytes : 31; uint32_t phase : 1; };
static_assert(sizeof(Barrier) == 8, "a barrier is a word of 64 bits");
constexpr int SHARED_BYTES = 227 << 10, STACK_BYTES = 64 << 10;
struct Copy { char* to; const TensorMap* map; int k, row; Barrier* barrier; int end; };
inline std::vector<Copy> under_way;
inline int round_;  // how often all threads had a turn
inline uint32_t random = 1;
inline uint32_t draw() { return (random = random * 1664525 + 1013904223) >> 24; }

inline ucontext_t scheduler;
struct Words { uint64_t at[4]; };
struct Meeting { int met, count; };
constexpr int NUMBERED = 16;
struct Block {
  Index number;
  std::vector<Fiber> fibers;
  bool begun;
  int left;  // that have not ended
  char* shared;
  std::vector<Words> exchanged;    // by the threads
  std::vector<Meeting> meetings;  // of all threads, of numbered warpgroups, of warps
  std::vector<int> awake;          // the round from which a warp goes on: some are slow
};
inline Block* here;
inline std::vector<Block>* running;  // a cluster, or all that wait for one another
inline int cluster_barriers;        // that are over
inline Index thread, grid;
inline int threads, idle_turns;
inline void (*body)();

inline void fail(const char* why) {
  fprintf(stderr, "%s in block (%d, %d, %d), thread %d\n", why, here->number.x, here->number.y, here->number.z, thread.x);
  abort();
}
inline void yield() {
  Block* const block = here;
  const Index own = thread;
  swapcontext(&block->fibers[own.x].context, &scheduler);
}
inline void enter() {
  body();
  here->fibers[thread.x].ended = true;
  if (--here->left == 0) memset(here->shared, 0xA5, SHARED_BYTES);  // another block has it now
  yield();
}
inline void meet(int place, int count) {
  Meeting* const at = &here->meetings[place];
  const int generation = at->count;
  if (++at->met == count) at->met = 0, ++at->count;
  while (at->count == generation) yield();
  idle_turns = 0;
}
inline void meet_warp() { meet(NUMBERED + thread.x / 32, 32); }
// What `other` says, where all lanes of a warp say something.
template <class F> inline void exchange(Words own, F look) {
  here->exchanged[thread.x] = own;
  meet_warp();
  look(&here->exchanged[thread.x / 32 * 32]);
  meet_warp();
}
inline void settle(Barrier* b) {
  if (b->pending || b->bytes) return;
  b->phase ^= 1;
  b->pending = b->arrivals;
}
inline void begin(Block& block, Index number) {
  here = &block;
  block.number = number;
  block.shared = (char*)aligned_alloc(1024, SHARED_BYTES + 1024);
  memset(block.shared, 0xA5, SHARED_BYTES);
  block.exchanged.assign(threads, Words{});
  block.meetings.assign(NUMBERED + threads / 32, Meeting{});
  block.awake.assign(threads / 32, round_ + number.x % 2 * 40);  // every second block begins late
  block.fibers.resize(threads);
  block.left = threads, block.begun = false;
  for (Fiber& f : block.fibers) {
    f.stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    f.ended = false;
    f.arrived = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f.context, enter, 0);
  }
}
// Runs blocks until all have ended, a turn of each thread after the other.
inline void run_blocks(std::vector<Index> numbers) {
  std::vector<Block> blocks(numbers.size());
  for (size_t n = 0; n < blocks.size(); ++n) begin(blocks[n], numbers[n]);
  running = &blocks;
  idle_turns = cluster_barriers = 0;
  for (bool active = true; active;) {
    active = false;
    ++round_;
    if (++idle_turns > 5000) fail("nothing moves any more");
    for (Block& block : blocks)
      for (int i = 0; i < threads; ++i) {
        if (i % 32 == 0 && block.awake[i / 32] <= round_ && draw() % 32 == 0) block.awake[i / 32] = round_ + draw() % 64;
        if (block.fibers[i].ended) continue;
        active = true;
        if (block.awake[i / 32] > round_) continue;
        here = &block, block.begun = true;
        thread = {i, 0, 0};
        swapcontext(&scheduler, &block.fibers[i].context);
      }
  }
  if (!under_way.empty()) fail("a copy that nobody waited for");
  for (Block& block : blocks) {
    free(block.shared);
    for (Fiber& f : block.fibers) munmap(f.stack, STACK_BYTES);
  }
}
}  // namespace host

#define threadIdx host::thread
#define blockIdx host::here->number
#define gridDim host::grid

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
DEVICE float to_f32(f16 x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
template <class A> DEVICE A from_f32(float x);
template <> inline float from_f32<float>(float x) { return x; }
template <> inline bf16 from_f32<bf16>(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return bf16{(uint16_t)(x != x ? 0x7fff : (u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
template <> inline f16 from_f32<f16>(float x) {
  const _Float16 y = (_Float16)x;
  f16 z;
  memcpy(&z, &y, 2);
  return z;
}
template <class A> struct alignas(2 * sizeof(A)) Pair { A first, second; };

DEVICE float fast_exp(float x) { return expf(x); }
DEVICE float fast_exp2(float x) { return exp2f(x); }
DEVICE float fast_erf(float x) { return erff(x); }
template <class A> DEVICE A maximum(A a, A b) { return a > b || a != a ? a : b; }
template <class A> DEVICE A minimum(A a, A b) { return a < b || a != a ? a : b; }
template <class A> DEVICE A absolute(A x) { return x < 0 ? -x : x; }

// What the tensor map of a matrix of 16-bit elements says: boxes are blocks of 64 columns, one behind the other.
struct alignas(64) TensorMap { const char* base; int64_t rows, columns, box_rows, box_blocks; char rest[88]; };

// All lanes of a warp call it.
DEVICE float from_lane(float x, int lane) {
  host::Words own{};
  memcpy(own.at, &x, 4);
  host::exchange(own, [&](const host::Words* all) { memcpy(&x, all[lane].at, 4); });
  return x;
}
DEVICE float rsqrtf(float x) { return 1 / sqrtf(x); }

typedef uint64_t SharedAddress;
DEVICE SharedAddress shared_address(const void* p) { return (SharedAddress)p; }
DEVICE char* shared_memory() { return host::here->shared; }
DEVICE int opaque(int x) { return x; }
DEVICE void block_barrier() { host::meet(0, host::threads); }
DEVICE void warp_barrier() { host::meet_warp(); }
template <int NUMBER, int COUNT> DEVICE void warpgroups_barrier() { host::meet(NUMBER, COUNT); }
DEVICE void barrier_init(uint64_t* b, int arrivals) {
  *(host::Barrier*)b = host::Barrier{(int16_t)arrivals, (int16_t)arrivals, 0, 0};
}
DEVICE void barriers_are_ready() {}
DEVICE void barrier_expect(uint64_t* b, int bytes) {
  host::Barrier* const at = (host::Barrier*)b;
  if (--at->pending < 0) host::fail("more arrivals than a barrier has");
  at->bytes += bytes;
  host::settle(at);
}
DEVICE void barrier_arrive(uint64_t* b) {
  host::Barrier* const at = (host::Barrier*)b;
  if (--at->pending < 0) host::fail("more arrivals than a barrier has");
  host::settle(at);
}

// 128-byte rows in groups of 8: bits 4 to 6 of an address are xored with bits 7 to 9.
DEVICE char* swizzled(char* p) { return (char*)((uintptr_t)p ^ ((uintptr_t)p >> 7 & 7) << 4); }
namespace host {
// A copy ends at once, or as late as it can, when somebody waits for it, and some wait long for theirs.
inline void finish(const Copy& copy) {
  const TensorMap* const map = copy.map;
  for (int64_t r = 0; r < map->box_rows * map->box_blocks; ++r)
    for (int c = 0; c < 64; ++c) {
      const int64_t from = copy.row + r % map->box_rows, column = (copy.k + r / map->box_rows) * 64 + c;
      uint16_t value = 0;
      if (from < map->rows && column < map->columns) memcpy(&value, map->base + 2 * (from * map->columns + column), 2);
      memcpy(swizzled(copy.to + 128 * r + 2 * c), &value, 2);
    }
  copy.barrier->bytes -= (int)(map->box_rows * map->box_blocks * 128);
  settle(copy.barrier);
}
}  // namespace host
DEVICE void copy_tile(void* to, const TensorMap* map, int k, int row, uint64_t* b) {
  if ((uintptr_t)to % 1024) host::fail("a tile that is not aligned");
  const int drawn = host::draw(), later = drawn >> 6 ? drawn & 3 : drawn;  // one of four takes long
  const host::Copy copy{(char*)to, map, k, row, (host::Barrier*)b, host::round_ + later};
  if (drawn >> 6 == 1) host::finish(copy);
  else host::under_way.push_back(copy);
}
DEVICE void barrier_wait(uint64_t* b, int parity) {
  while (((host::Barrier*)b)->phase == (uint32_t)parity) {
    std::vector<host::Copy> others;
    for (const host::Copy& copy : std::exchange(host::under_way, {}))
      if (copy.barrier == (host::Barrier*)b && copy.end <= host::round_) host::finish(copy);
      else others.push_back(copy);
    host::under_way.insert(host::under_way.end(), others.begin(), others.end());
    host::yield();
  }
  host::idle_turns = 0;
}
DEVICE void prefetch_map(const TensorMap*) {}

DEVICE uint64_t matrix(const void* p) { return (uint64_t)(uintptr_t)p >> 4; }
DEVICE void products_begin() {}
DEVICE void products_end() {}
template <int OPEN> DEVICE void products_wait() { host::meet_warp(); }  // the lanes of a warp go together
template <int REGISTERS> DEVICE void take_registers() {}
template <int REGISTERS> DEVICE void leave_registers() {}
template <class Element, int COLUMNS> DEVICE void multiply(float* d, uint64_t x, uint64_t w, int add) {
  const auto element = [](uint64_t matrix, int row, int k) {
    Element e;
    memcpy(&e, swizzled((char*)(uintptr_t)(matrix << 4) + 128 * row + 2 * k), 2);
    return to_f32(e);
  };
  const int lane = host::thread.x % 32, warp = host::thread.x / 32 % 4;
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0;
    for (int k = 0; k < 16; ++k) sum += element(x, row, k) * element(w, column, k);
    d[i] = sum;
  }
}

template <class T> DEVICE uint32_t packed(T low, T high) { return low.bits | (uint32_t)high.bits << 16; }
DEVICE void load_matrices(uint32_t* to, SharedAddress row) {
  host::exchange({row}, [&](const host::Words* all) {
    const int lane = host::thread.x % 32;
    for (int m = 0; m < 4; ++m) memcpy(to + m, (char*)all[8 * m + lane / 4].at[0] + lane % 4 * 4, 4);
  });
}
DEVICE void load_matrices_turned(uint32_t* to, SharedAddress row) {
  host::exchange({row}, [&](const host::Words* all) {
    const int lane = host::thread.x % 32;
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 2; ++i)
        memcpy((char*)(to + m) + 2 * i, (char*)all[8 * m + lane % 4 * 2 + i].at[0] + lane / 4 * 2, 2);
  });
}
template <class T> DEVICE void multiply_8(float* d, const uint32_t* a, const uint32_t* b) {
  host::exchange({a[0] | (uint64_t)a[1] << 32, b[0] | (uint64_t)b[1] << 32}, [&](const host::Words* all) {
    const auto element = [&](int row, int k, int which) {
      T e;
      memcpy(&e, (char*)&all[4 * row + k % 8 / 2].at[which] + k / 8 * 4 + k % 2 * 2, 2);
      return to_f32(e);
    };
    const int lane = host::thread.x % 32;
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 16; ++k) d[i] += element(lane / 4, k, 0) * element(lane % 4 * 2 + i, k, 1);
  });
}
DEVICE int count_in(int* counter) { return (*counter)++; }
DEVICE float published(const float* p) { return *p; }
DEVICE void tell_blocks(int* counter) { ++*counter, host::idle_turns = 0; }
DEVICE void wait_for_blocks(const int* counter, int count) {
  while (*(const volatile int*)counter < count) host::yield();
}
template <class T> DEVICE const T* fresh(const T* place) { return place; }

DEVICE float* of_block(float* p, int rank) {
  if (!(*host::running)[rank].begun) host::fail("memory of a block that has not begun");
  return (float*)((*host::running)[rank].shared + ((char*)p - host::here->shared));
}
DEVICE void cluster_arrive() { ++host::here->fibers[host::thread.x].arrived; }
DEVICE void cluster_wait() {
  const int own = host::here->fibers[host::thread.x].arrived;
  const auto is_over = [&] {
    for (const host::Block& block : *host::running)
      for (const host::Fiber& f : block.fibers)
        if (!f.ended && f.arrived < own) return false;
    return true;
  };
  while (host::cluster_barriers < own && !is_over()) host::yield();
  host::cluster_barriers = own;  // who has seen it goes on, and the others may have ended by then
  host::idle_turns = 0;
}

DEVICE void launch_dependents() {}
DEVICE void wait_for_kernel_before() {}
