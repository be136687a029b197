// Which seat, group and resources a block of a launch has on a cluster; see
// csrc/operators/kernels.cuh.
//
// Owns the passage from a block's number to its fabric.  Invariants: block = pipeline * G + group
// on every rank, so a queue has the same group, context and words at both ends.  Compiled by `make
// device-compile`.
#pragma once
#include "../fabric/nccl.cuh"
#include "../operators/kernels.cuh"

namespace megamuon {

// An argument of a kernel: NCCL's device communicator must stay where it is while verbs refer to
// it.
struct NcclSite {
  const Seat* seats;    // by pipeline
  int groups;           // of a seat
  ncclDevComm comm;
  NcclMemory memory;    // of pipeline 0
  u64 control_stride;   // from pipeline to pipeline
  bool multimem;
  Watch watch;
  RailSite rail;        // of block 0
  int counter_stride;   // from pipeline to pipeline

  __device__ const Seat& seat(int block) const { return seats[block / groups]; }
  __device__ int group(int block) const { return block % groups; }
  __device__ NcclMemory memory_of(int block) const {
    NcclMemory own = memory;
    own.control_offset += u64(block / groups) * control_stride;
    if (multimem) {
      own.multicast = static_cast<char*>(ncclGetLsaMultimemPointer(memory.pools, 0, comm));
    }
    return own;
  }
};

struct LsaSite : NcclSite {
  __device__ LsaFabric fabric(int block, const Geometry& place, int, Group& group) const {
    return {memory_of(block), place, group};
  }
};

#if MM_NCCL_HAS_GIN
struct GinSite : NcclSite {
  __device__ GinFabric fabric(int block, const Geometry& place, int, Group& group) const {
    RailSite own = rail;
    own.context += block;
    own.counter += (block / groups) * counter_stride;
    own.state += block / groups;
    return {memory_of(block), place, group, comm, own};
  }
};
#endif

}  // namespace megamuon
