// The part of NCCL's device interface that csrc/fabric/nccl.cuh uses, so that it compiles; see
// recorded_gpu/nccl.h.
#pragma once
#include <nccl.h>

struct ncclTeam {
  int nRanks, rank, stride;
};
using ncclTeam_t = ncclTeam;
struct ncclDevComm {
  int ginContextCount = 64;
};
struct ncclDevCommRequirements {
  bool lsaMultimem;
  int ginConnectionType, ginContextCount, ginCounterCount, ginSignalCount;
};
#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER {}
enum { NCCL_GIN_TYPE_NONE = 0, NCCL_GIN_CONNECTION_RAIL = 1 };
struct ncclCommProperties_t {
  bool deviceApiSupport, multimemSupport;
  int railedGinType;
};
#define NCCL_COMM_PROPERTIES_INITIALIZER {true, true, 1}

// How many of the two nodes' four GPUs address each other's memory.
namespace recorded {
inline int lsa_ranks = 4;
}
inline ncclTeam_t ncclTeamLsa(ncclComm_t) { return {recorded::lsa_ranks, 0, 1}; }
inline ncclTeam_t ncclTeamRail(const ncclDevComm&) { return {2, 0, 2}; }
inline ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements*, ncclDevComm*) {
  return ncclSuccess;
}
inline ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm*) {
  recorded::note("ncclDevCommDestroy");
  return ncclSuccess;
}
inline ncclResult_t ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t*) {
  return ncclSuccess;
}
inline void* ncclGetLsaPointer(ncclWindow_t window, std::size_t offset, int) {
  return window->memory + offset;
}
inline void* ncclGetLsaMultimemPointer(ncclWindow_t window, std::size_t offset,
                                       const ncclDevComm&) {
  return window->memory + offset;
}

using ncclGinCounter_t = int;
struct ncclGin_StrongVASignalAdd {
  ncclWindow_t window;
  std::size_t offset;
  std::uint64_t value;
};
struct ncclGin_WeakCounterInc {
  ncclGinCounter_t counter;
};
struct ncclGin {
  ncclGin(const ncclDevComm&, int) {}
  template <class Signal>
  void signal(ncclTeam, int, Signal) const {}
  template <class... Arguments>
  void put(ncclTeam, int, Arguments...) const {}
  std::uint64_t readCounter(ncclGinCounter_t) const { return 0; }
};
