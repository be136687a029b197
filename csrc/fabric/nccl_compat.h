// What differs between the versions of NCCL's device interface, under one set of names.
//
// Owns every `#if` on NCCL's version.  Invariants: a version is only relied on for what it
// documents; kernels are compiled against the headers of the library that loads at run time, which
// device_api.cu checks.  Compiled against 2.28.9, 2.29.7 and 2.32.3 by `make device-compile`.
//
//   2.28.9   LSA pointers and multimem; requirements are zeroed memory; no query of properties
//   2.29.0   requirements start from an initialiser; ncclCommQueryProperties; windows whose order
//            of writes is strict
//   2.31.2   GIN as the operators need it: strong signals that add to a word of a window, rail
//            connections, and without the errors of earlier versions (lost signals, wrong number of
//            contexts)
#pragma once
#include <nccl.h>
#include <nccl_device.h>

#include <cstring>

#define MM_NCCL_HAS_PROPERTIES (NCCL_VERSION_CODE >= 22900)
#define MM_NCCL_HAS_GIN (NCCL_VERSION_CODE >= 23102)

namespace megamuon {

// How a window is registered that others read and write, and how one whose words they raise over
// the network: there a raise may not overtake the bytes before it, which a network card may let it
// unless the window forbids that. Without GIN, words are raised by GPUs alone, with their fences.
constexpr int kDataWindow = NCCL_WIN_COLL_SYMMETRIC;
#ifdef NCCL_WIN_STRICT_ORDERING
constexpr int kSignalWindow = NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING;
#elif MM_NCCL_HAS_GIN
#error "this NCCL has GIN and no NCCL_WIN_STRICT_ORDERING: raises could overtake their data"
#else
constexpr int kSignalWindow = NCCL_WIN_COLL_SYMMETRIC;
#endif

inline ncclDevCommRequirements empty_requirements() {
#if NCCL_VERSION_CODE >= 22900
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
  ncclDevCommRequirements requirements;
  std::memset(&requirements, 0, sizeof requirements);
#endif
  return requirements;
}

// What NCCL says about a communicator; -1 where the version cannot be asked.
struct NcclProperties {
  int device_api = -1, multimem = -1, rail_gin = -1;
};

inline ncclResult_t query_properties(ncclComm_t comm, NcclProperties* out) {
#if MM_NCCL_HAS_PROPERTIES
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  const ncclResult_t status = ncclCommQueryProperties(comm, &properties);
  if (status != ncclSuccess) return status;
  out->device_api = properties.deviceApiSupport ? 1 : 0;
  out->multimem = properties.multimemSupport ? 1 : 0;
  out->rail_gin = properties.railedGinType != NCCL_GIN_TYPE_NONE ? 1 : 0;
#else
  (void)comm, (void)out;
#endif
  return ncclSuccess;
}

// Ask for contexts and counters to the same column of the other nodes.  Signals are words of a
// window: none of NCCL's.
inline void require_rails(ncclDevCommRequirements* requirements, int contexts, int counters) {
#if MM_NCCL_HAS_GIN
  requirements->ginConnectionType = NCCL_GIN_CONNECTION_RAIL;
  requirements->ginContextCount = contexts;
  requirements->ginCounterCount = counters;
  requirements->ginSignalCount = 0;
#else
  (void)requirements, (void)contexts, (void)counters;
#endif
}

inline int context_count(const ncclDevComm& comm) {
#if MM_NCCL_HAS_GIN
  return int(comm.ginContextCount);
#else
  (void)comm;
  return 0;
#endif
}

#if MM_NCCL_HAS_GIN
// Strong: whoever sees the sum sees all earlier puts of the context to this peer.
using GinRaise = ncclGin_StrongVASignalAdd;
// Counts one put whose source has been read; counts of several puts may come in any order.
using GinRead = ncclGin_WeakCounterInc;
#endif

}  // namespace megamuon
