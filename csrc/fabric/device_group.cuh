// A thread group on a GPU: a block whose first thread schedules and whose other warps move data.
//
// Owns the hand-over between the two, the memory operations with their scopes, and what ends a wait
// (abort word, deadline, failure record).  Invariants: one thread runs the operator, so its state
// exists once, in shared memory, and control flow cannot diverge; data is moved between two
// barriers of the block; every word that another place reads is released and acquired at system
// scope.  Compiled by `make device-compile`; it needs a GPU to run, see tools/gpu_checks.sh.
//
// [Note: why a leader]
//
// The operators poll many words between two chunks.  If all threads of a block polled together,
// each poll would cost a barrier, and each thread would carry a copy of all cursors in local
// memory.  Thread 0 polls alone; a data verb writes an Order, lets the workers go, and returns when
// they are done.  Lanes 1 .. 31 of its warp leave at once: a spinning lane and working lanes in one
// warp would take turns. The barrier is one of shared memory (mbarrier), which counts threads; a
// bar.sync counts warps.
#pragma once
#ifdef MEGAMUON_DEVICE_ON_HOST
#include "../tests/device_on_host.h"
#else
#include "device_primitives.cuh"
#endif

namespace megamuon {

#ifdef MEGAMUON_HOST_WORKERS
constexpr int kThreads = 32 + MEGAMUON_HOST_WORKERS;
#else
constexpr int kThreads = 256;
#endif
constexpr int kWorkers = kThreads - 32;

// --- the group -----------------------------------------------------------------------------------

enum class Task : int { dismiss, copy, copy_to_all, sum_to_wire, sum_to_window };

struct Order {
  Task task;
  const char* from;  // copies
  char* to;          // copy, sum_to_wire: the destination; sum_to_window: the window
  u64 offset;        // copy_to_all: in the pool of every place of the node
  u64 bytes;
  Sum sum;
  const char* upstream[kStarNodes];
};

struct Group {
  // Raw: objects in shared memory may have no initialisers.
  alignas(8) u64 barrier_memory;
  alignas(16) unsigned char order_memory[sizeof(Order)];
  alignas(16) unsigned char queue_memory[kMaxNodes * sizeof(QueueState)];

  __device__ Order& order() { return *reinterpret_cast<Order*>(order_memory); }
  __device__ QueueState* queues() { return reinterpret_cast<QueueState*>(queue_memory); }

  // The leader, after it wrote order(): the workers do it.
  __device__ void carry_out();
  // `lead()` runs in thread 0, `work(order, worker)` in each worker for every order.
  template <class Lead, class Work>
  __device__ void run(Lead lead, Work work);
#ifdef MEGAMUON_WORKERS_IN_TURN
  std::function<void()> workers;
#endif
};

#ifndef MEGAMUON_WORKERS_IN_TURN

__device__ __forceinline__ void Group::carry_out() {
  barrier_meet(&barrier_memory);
  barrier_meet(&barrier_memory);
}

template <class Lead, class Work>
__device__ __forceinline__ void Group::run(Lead lead, Work work) {
  if (threadIdx.x == 0) barrier_init(&barrier_memory, kWorkers + 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    lead();
    order().task = Task::dismiss;
    barrier_meet(&barrier_memory);
  } else if (threadIdx.x >= 32) {
    for (;;) {
      barrier_meet(&barrier_memory);
      if (order().task == Task::dismiss) return;
      work(order(), int(threadIdx.x) - 32);
      barrier_meet(&barrier_memory);
    }
  }
}

#else

inline void Group::carry_out() { workers(); }

template <class Lead, class Work>
void Group::run(Lead lead, Work work) {
  workers = [&] {
    for (int worker = 0; worker < kWorkers; ++worker) work(order(), worker);
  };
  lead();
}

#endif

// --- waiting and failing -------------------------------------------------------------------------

enum class Wait : int { none, entry, arrival, credit, put, leave, task };

// Lies in host memory that the GPU sees.  `ready` is written last.
struct Failure {
  uint32_t ready;
  uint32_t aborted;  // the host asked for it; else a deadline
  int operation, table, place, group, queue, column;
  Wait waits_for;
  u64 epoch, count, delivered, forwarded, acknowledged, arrived, credit_used;
};

struct Mailbox {
  volatile uint32_t abort_request;  // by the host
  Failure failure;
};

struct Watch {
  uint32_t* aborted;  // in the GPU's memory: every group gives up when it is not 0
  Mailbox* mailbox;
  u64 deadline_ns;    // how long a group may stand still
};

// Counts standing still: the time starts again whenever something moved.
class Patience {
 public:
  __device__ explicit Patience(const Watch& watch) : watch_(watch), since_(0) {}

  __device__ void moved() { idle_ = 0; }

  // After a turn in which nothing moved; false: give up.
  __device__ bool wait() {
    if (idle_ == 0) since_ = now_ns();
    ++idle_;
    if (poll_flag(watch_.aborted) != 0) return false;
    if (idle_ > 64) __nanosleep(idle_ > 4096 ? 500 : 50);
    // The mailbox lies behind the bus, so it is read rarely.
    if (idle_ % kRare != 0) return true;
    if (poll_flag(&watch_.mailbox->abort_request) != 0) {
      host_asked_ = true;
      return false;
    }
    return now_ns() - since_ < watch_.deadline_ns;
  }

  // Whether this group is the first to give up, and so the one that says why.
  __device__ bool first_to_fail() { return atomicCAS(watch_.aborted, 0u, 1u) == 0u; }

  __device__ void report(Failure failure) {
    failure.ready = 0;
    failure.aborted = host_asked_ ? 1u : 0u;
    uint32_t words[sizeof(Failure) / 4];
    memcpy(words, &failure, sizeof words);
    volatile uint32_t* to = &watch_.mailbox->failure.ready;
    for (unsigned i = 1; i < sizeof(Failure) / 4; ++i) to[i] = words[i];
    __threadfence_system();
    to[0] = 1u;
  }

 private:
  static constexpr unsigned kRare = 256;
  const Watch& watch_;
  u64 since_;
  unsigned idle_ = 0;
  bool host_asked_ = false;
};

}  // namespace megamuon
