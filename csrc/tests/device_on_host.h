// A CPU's operations in place of csrc/fabric/device_primitives.cuh, for
// csrc/tests/device_on_host.cpp.
//
// Owns what CUDA's words mean there.  A block is one thread, its leader, and the workers' shares are
// done by it, one after the other, when it orders them; or, with -DMEGAMUON_HOST_WORKERS=N, a
// leader and N workers that are threads and meet as on a GPU, at a barrier with the meaning of
// mbarrier: then ThreadSanitizer sees what the barriers of a block and the words between places
// order, and what nothing orders.  So operators, fabrics, kernels and arithmetic run as they are;
// what does not run is PTX, fences (words release and acquire by themselves), and caches that are
// not coherent: for those see csrc/verification.
#pragma once
#ifndef MEGAMUON_HOST_WORKERS
#define MEGAMUON_WORKERS_IN_TURN
#endif

#include "../fabric/arithmetic.h"
#include "../fabric/fabric.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define MM_SHARED(type, name) type& name = *static_cast<type*>(memory_of_block)
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct BlockIndex {
  int x;
};
inline thread_local BlockIndex blockIdx, threadIdx;
inline thread_local void* memory_of_block = nullptr;

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __float_as_uint(float value) { return megamuon::arithmetic::bits_of(value); }
inline float __uint_as_float(unsigned bits) { return megamuon::arithmetic::from_bits(bits); }
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double((static_cast<long long>(high) << 32) | unsigned(low));
}
inline int __double2loint(double value) { return int(__double_as_longlong(value)); }
inline int __double2hiint(double value) { return int(__double_as_longlong(value) >> 32); }

using half_bits = unsigned short;
inline half_bits __ushort_as_half(half_bits bits) { return bits; }
inline half_bits __half_as_ushort(half_bits bits) { return bits; }
inline float __half2float(half_bits bits) { return megamuon::arithmetic::F16::load(bits); }
inline half_bits __float2half_rn(float value) { return megamuon::arithmetic::F16::store(value); }

inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long delta) {
  return __atomic_fetch_add(word, delta, __ATOMIC_ACQ_REL);
}
inline unsigned atomicCAS(unsigned* word, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
inline void __nanosleep(unsigned) { sched_yield(); }
inline void __threadfence_system() {}

namespace megamuon {

inline u64 load_acquire(const void* word) {
  return __atomic_load_n(static_cast<const u64*>(word), __ATOMIC_ACQUIRE);
}
// Released themselves: ThreadSanitizer knows no fences.
inline void store_word(void* word, u64 value) {
  __atomic_store_n(static_cast<u64*>(word), value, __ATOMIC_RELEASE);
}
inline void add_word(void* word, u64 delta) {
  __atomic_fetch_add(static_cast<u64*>(word), delta, __ATOMIC_RELEASE);
}
inline void fence_system() {}
inline void fence_alias() {}

inline unsigned poll_flag(const volatile uint32_t* flag) {
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
}

// A barrier in a word, as mbarrier is: how many still have to arrive, of how many, and the number
// of times that all have.
inline void barrier_init(u64* barrier, unsigned threads) {
  __atomic_store_n(barrier, u64(threads) << 16 | threads, __ATOMIC_RELEASE);
}
inline void barrier_meet(u64* barrier) {
  u64 seen = __atomic_load_n(barrier, __ATOMIC_RELAXED), next;
  do {
    const u64 all = seen >> 16 & 0xffff;
    next = (seen & 0xffff) == 1 ? ((seen >> 32) + 1) << 32 | all << 16 | all : seen - 1;
  } while (!__atomic_compare_exchange_n(barrier, &seen, next, true, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED));
  while (__atomic_load_n(barrier, __ATOMIC_ACQUIRE) >> 32 == seen >> 32) sched_yield();
}

inline thread_local u64* barrier_of_block = nullptr;

// Run a kernel as block number `block`: `call()` in each of its threads, which share a Space.
template <class Space, class Kernel>
void run_block(int block, Kernel call) {
  Space space;
  u64 barrier;
  const auto be = [&](int thread) {
    blockIdx.x = block, threadIdx.x = thread;
    memory_of_block = &space, barrier_of_block = &barrier;
    call();
  };
#ifdef MEGAMUON_WORKERS_IN_TURN
  be(0);
#else
  std::vector<std::thread> workers;
  barrier_init(&barrier, MEGAMUON_HOST_WORKERS + 1);
  for (int worker = 0; worker < MEGAMUON_HOST_WORKERS; ++worker) {
    workers.emplace_back(be, 32 + worker);
  }
  be(0);
  for (std::thread& worker : workers) worker.join();
#endif
}

inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
}

template <class T>
inline T load_plain(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
inline void store_plain(char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
// The alignment that the GPU's instruction demands is demanded here.
[[noreturn]] inline void misaligned() {
  std::fprintf(stderr, "a 16-byte access at an address that is no multiple of 16\n");
  std::abort();
}
inline uint4 load16(const char* from) {
  if (reinterpret_cast<u64>(from) % 16 != 0) misaligned();
  return load_plain<uint4>(from);
}
inline void store16(char* to, const uint4& value) {
  if (reinterpret_cast<u64>(to) % 16 != 0) misaligned();
  store_plain(to, value);
}
inline unsigned load1(const char* from) { return load_plain<unsigned char>(from); }
inline void store1(char* to, unsigned value) { *to = char(value); }
inline unsigned load2(const char* from) { return load_plain<half_bits>(from); }
inline void store2(char* to, unsigned value) { store_plain(to, half_bits(value)); }
inline unsigned load4(const char* from) { return load_plain<unsigned>(from); }
inline void store4(char* to, unsigned value) { store_plain(to, value); }
inline u64 load8(const char* from) { return load_plain<u64>(from); }
inline void store8(char* to, u64 value) { store_plain(to, value); }

// Multicast addresses: ranges of addresses that nothing lies behind, each with the memories that a
// switch would reach.
struct Switch {
  char* address;
  u64 bytes;
  std::vector<char*> memories;
};
inline std::vector<Switch> switches;

inline const Switch& switch_at(const char* address) {
  if (reinterpret_cast<u64>(address) % 16 != 0) misaligned();
  for (const Switch& one : switches) {
    if (address >= one.address && address + 16 <= one.address + one.bytes) return one;
  }
  std::fprintf(stderr, "a multicast outside all multicast addresses\n");
  std::abort();
}

inline void multicast16(char* to, const uint4& value) {
  const Switch& one = switch_at(to);
  for (char* memory : one.memories) store16(memory + (to - one.address), value);
}

inline uint4 multimem_add16(const char* at, Dtype dtype) {
  const Switch& one = switch_at(at);
  std::vector<const void*> row;
  for (char* memory : one.memories) row.push_back(memory + (at - one.address));
  const arithmetic::Operands operands{row.data(), int(row.size()), nullptr, 0, 16 / size_of(dtype),
                                      dtype, dtype, Dtype::f32, true};
  uint4 sum;
  sum_to_wire(&sum, operands);
  return sum;
}

}  // namespace megamuon

inline void __syncthreads() { megamuon::barrier_meet(megamuon::barrier_of_block); }
