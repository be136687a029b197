// The GPU's instructions that C++ has no words for: memory operations with their scopes, multicast,
// barriers.
//
// Owns every line of PTX.  Invariants: words that another place reads are acquired at system scope,
// and written relaxed after a fence at that scope, which makes a release of both (one fence serves
// several words); data is loaded and stored relaxed at that scope, hence never taken from a stale
// first-level cache.  Compiled by `make device-compile`; csrc/tests/device_on_host.cpp puts a CPU's
// operations in their place, so that all that is built on them runs without a GPU.
#pragma once
#include "fabric.h"

#include <cuda_fp16.h>

// An object that the threads of a block share.
#define MM_SHARED(type, name) __shared__ type name

namespace megamuon {

// --- words ---------------------------------------------------------------------------------------

__device__ __forceinline__ u64 load_acquire(const void* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// A word that others read, after fence_system().
__device__ __forceinline__ void store_word(void* word, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void add_word(void* word, u64 delta) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(delta) : "memory");
}

// Between accesses to one memory through a multicast address and through its ordinary one: it has
// to lie somewhere on the way from the first to the second, in whichever thread.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// A flag that somebody may set at any time, and that orders nothing.
__device__ __forceinline__ unsigned poll_flag(const volatile uint32_t* flag) { return *flag; }

__device__ __forceinline__ u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// --- data: relaxed at system scope ---------------------------------------------------------------

__device__ __forceinline__ uint4 load16(const char* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store16(char* to, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ unsigned load1(const char* from) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store1(char* to, unsigned v) {
  asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ unsigned load4(const char* from) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store4(char* to, unsigned v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ u64 load8(const char* from) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store8(char* to, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

__device__ __forceinline__ unsigned load2(const char* from) {
  unsigned short v;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store2(char* to, unsigned v) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to),
               "h"(static_cast<unsigned short>(v))
               : "memory");
}

// --- multicast -----------------------------------------------------------------------------------

// To all GPUs behind a multicast address.
__device__ __forceinline__ void multicast16(char* to, const uint4& v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
               "f"(__uint_as_float(v.w))
               : "memory");
}

// The sum of what all GPUs behind a multicast address hold, computed by the switch; of 16 bits,
// added in f32.
__device__ __forceinline__ uint4 multimem_add16(const char* at, Dtype dtype) {
  uint4 v;
  if (dtype == Dtype::f32) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
  } else if (dtype == Dtype::bf16) {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
  } else {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
  }
  return v;
}

// --- barriers of shared memory -------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u64* barrier, unsigned threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(
                   unsigned(__cvta_generic_to_shared(barrier))),
               "r"(threads)
               : "memory");
}

// Arrive and wait for all: what each did before, all see after.
__device__ __forceinline__ void barrier_meet(u64* memory) {
  const unsigned barrier = unsigned(__cvta_generic_to_shared(memory));
  u64 phase;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(phase) : "r"(barrier) : "memory");
  unsigned over = 0;
  while (over == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(over)
        : "r"(barrier), "l"(phase)
        : "memory");
  }
}

}  // namespace megamuon
