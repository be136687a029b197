// The NCCL fabric: memory of other GPUs through windows, the network through GIN.
//
// Owns where a place's memory lies in NCCL's windows, and puts and raises between nodes.
// Invariants: a window is one allocation; all puts and raises of a thread group are posted by its
// one leader on a context of its own, so a queue keeps to one context at both ends (O1 by strong
// signals); no more puts of a queue are under way than it has counters, so put_done is exact though
// counters come in any order (O2).  Compiled by `make device-compile` against three versions of
// NCCL.  It has never run on more than one GPU, and puts over GIN have not run at all: they need
// several nodes.
#pragma once
#include "direct.cuh"
#include "nccl_compat.h"

namespace megamuon {

// The windows of an operator's pipeline, as the GPUs of one LSA team see them.
struct NcclMemory {
  static constexpr bool kMulticast = true;
  ncclWindow_t pools, controls;
  u64 control_offset;  // in the control window
  int columns;
  bool team_is_all;    // the LSA team holds all nodes, else this node
  char* multicast;     // null: store to each
  bool switch_sums;

  __device__ int rank_of(int node, int column) const {
    return team_is_all ? node * columns + column : column;
  }
  __device__ char* pool(int node, int column) const {
    return static_cast<char*>(ncclGetLsaPointer(pools, 0, rank_of(node, column)));
  }
  __device__ char* control(int node, int column) const {
    return static_cast<char*>(ncclGetLsaPointer(controls, control_offset, rank_of(node, column)));
  }
  __device__ char* multicast_pool() const { return multicast; }
  __device__ bool multicast_sums() const { return switch_sums; }
};

// All places in one LSA team: any number of nodes of the grid within one NVLink domain.
using LsaFabric = DirectFabric<NcclMemory>;

// Puts posted and finished by queue, kept from call to call.
struct RailState {
  u64 posted[2 * kMaxNodes];
  u64 done[2 * kMaxNodes];
};

// Where a thread group's network resources lie.
struct RailSite {
  int context;
  int counter;  // the first of the pipeline's: queue * lanes + lane
  int lanes;    // puts of a queue under way
  RailState* state;
};

#if MM_NCCL_HAS_GIN

// The LSA team is the node; other nodes are reached over GIN.
class GinFabric : public DirectFabric<NcclMemory> {
  using Base = DirectFabric<NcclMemory>;

 public:
  __device__ GinFabric(const NcclMemory& memory, const Geometry& place, Group& group,
                       const ncclDevComm& comm, const RailSite& rail)
      : Base(memory, place, group), comm_(comm), gin_(comm, rail.context), rail_(rail) {}

  __device__ void raise(int node, u64 word, u64 delta) {
    fence_system();
    gin_.signal(ncclTeamRail(comm_), node, signal_of(word, delta));
  }

  __device__ void put(int queue, int node, Address to, Address from, u64 bytes, u64 word,
                      u64 delta) {
    const u64 number = rail_.state->posted[queue]++;
    fence_system();
    gin_.put(ncclTeamRail(comm_), node, window(to), offset(to), window(from), offset(from), bytes,
             signal_of(word, delta), GinRead{counter(queue, number)});
  }

  __device__ bool may_put(int queue) const {
    const u64 posted = rail_.state->posted[queue], lanes = u64(rail_.lanes);
    return posted < lanes || put_done(queue, posted + 1 - lanes);
  }

  // Put n uses counter n % lanes, alone: n + lanes is posted only after n was seen to be done.
  __device__ bool put_done(int queue, u64 count) const {
    u64 done = rail_.state->done[queue];
    if (done >= count) return true;
    while (done < count && gin_.readCounter(counter(queue, done)) > done / u64(rail_.lanes)) ++done;
    rail_.state->done[queue] = done;
    return done >= count;
  }

 private:
  __device__ GinRaise signal_of(u64 word, u64 delta) const {
    return GinRaise{memory_.controls, memory_.control_offset + word, delta};
  }
  __device__ ncclGinCounter_t counter(int queue, u64 number) const {
    return ncclGinCounter_t(rail_.counter + queue * rail_.lanes + int(number % u64(rail_.lanes)));
  }
  __device__ ncclWindow_t window(const Address& address) const {
    return address.space == Space::pool ? memory_.pools : memory_.controls;
  }
  __device__ u64 offset(const Address& address) const {
    return address.space == Space::pool ? address.offset : memory_.control_offset + address.offset;
  }

  const ncclDevComm& comm_;
  const ncclGin gin_;
  const RailSite rail_;
};

#endif  // MM_NCCL_HAS_GIN

}  // namespace megamuon
