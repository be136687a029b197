// The loopback fabric: virtual places in the memory of one GPU.
//
// Owns where a virtual place's memory lies.  One co-resident launch holds the thread groups of all
// places, in any order of blocks; multicast is K stores; words have system scope although one GPU
// would need less, so the operators and the verbs are those of a cluster.  What it cannot show: the
// order in which a network delivers, the arithmetic of a switch, more than one GPU's caches.
// Checked by tools/gpu_checks.sh.
#pragma once
#include "direct.cuh"

namespace megamuon {

struct LoopbackMemory {
  static constexpr bool kMulticast = false;
  char* pools;
  char* controls;  // of one pipeline
  u64 pool_stride, control_stride;
  int columns;

  __device__ char* pool(int node, int column) const {
    return pools + u64(node * columns + column) * pool_stride;
  }
  __device__ char* control(int node, int column) const {
    return controls + u64(node * columns + column) * control_stride;
  }
  __device__ char* multicast_pool() const { return nullptr; }
  __device__ bool multicast_sums() const { return false; }
};

using LoopbackFabric = DirectFabric<LoopbackMemory>;

}  // namespace megamuon
