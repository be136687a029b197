// What the device library asks of NCCL on the host, written down: one rank alone.
//
// Owns the names of the versions that csrc/fabric/nccl_compat.h tells apart; RECORDED_NCCL chooses
// one.  For csrc/tests/device_life.cpp.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#define NCCL_VERSION_CODE RECORDED_NCCL
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#if NCCL_VERSION_CODE >= 22900 && !defined(RECORDED_WITHOUT_ORDER)
#define NCCL_WIN_STRICT_ORDERING 0x02
#endif
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

enum ncclResult_t { ncclSuccess = 0 };
enum ncclDataType_t { ncclInt32 };
enum ncclRedOp_t { ncclMin };
struct RecordedComm {};
using ncclComm_t = RecordedComm*;
struct RecordedWindow {
  char* memory;
};
using ncclWindow_t = RecordedWindow*;
struct ncclUniqueId {
  char internal[128];
};

inline const char* ncclGetErrorString(ncclResult_t) { return "a recorded error"; }
inline const char* ncclGetLastError(ncclComm_t) { return ""; }
inline ncclResult_t ncclGetVersion(int* code) {
  *code = NCCL_VERSION_CODE;
  return ncclSuccess;
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return ncclSuccess; }
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int, ncclUniqueId, int) {
  *comm = new RecordedComm;
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  recorded::note("ncclCommDestroy");
  delete comm;
  return ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  recorded::note("ncclCommAbort");
  if (recorded::abort_ends_kernels) recorded::kernels_end = true;
  delete comm;
  return ncclSuccess;
}
inline ncclResult_t ncclAllReduce(const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t,
                                  ncclComm_t, cudaStream_t) {
  return ncclSuccess;
}
inline ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  return ncclSuccess;
}
inline ncclResult_t ncclMemFree(void* memory) {
  recorded::note("ncclMemFree");
  std::free(memory);
  return ncclSuccess;
}
inline ncclResult_t ncclCommWindowRegister(ncclComm_t, void* memory, std::size_t bytes,
                                           ncclWindow_t* window, int flags) {
  recorded::note("window of " + std::to_string(bytes) + " bytes, flags " + std::to_string(flags));
  *window = new RecordedWindow{static_cast<char*>(memory)};
  return ncclSuccess;
}
inline ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) {
  recorded::note("ncclCommWindowDeregister");
  delete window;
  return ncclSuccess;
}
