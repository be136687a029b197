// What the device library asks of CUDA's runtime, written down instead of done.
//
// Owns the record: one line per call, in order.  Invariants: memory of the "GPU" is memory of this
// process, so that copies arrive; no kernel runs; an event is over unless `kernels_end` is false,
// and from ncclCommAbort on if `abort_ends_kernels` (recorded_gpu/nccl.h).  For
// csrc/tests/device_life.cpp.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace recorded {

inline std::vector<std::string> calls;
inline bool kernels_end = true;         // when they are told to give up
inline bool abort_ends_kernels = true;  // those that do not
inline int allocations = 0;             // of the GPU's memory that are not freed
inline void note(const std::string& text) { calls.push_back(text); }

}  // namespace recorded

enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocMapped = 2 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault = 0 };
struct RecordedStream {};
struct RecordedEvent {};
using cudaStream_t = RecordedStream*;
using cudaEvent_t = RecordedEvent*;
struct cudaFuncAttributes {};
struct dim3 {
  explicit dim3(unsigned count) : x(count) {}
  unsigned x;
};

inline const char* cudaGetErrorString(cudaError_t) { return "a recorded error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

template <class T>
cudaError_t cudaMalloc(T** to, std::size_t bytes) {
  recorded::note("cudaMalloc");
  ++recorded::allocations;
  *to = static_cast<T*>(std::malloc(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  recorded::note("cudaFree");
  --recorded::allocations;
  std::free(memory);
  return cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** to, std::size_t bytes, int) {
  *to = static_cast<T*>(std::malloc(bytes));
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMallocHost(T** to, std::size_t bytes) {
  return cudaHostAlloc(to, bytes, 0);
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** to, void* memory, int) {
  *to = memory;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  recorded::note(stream == nullptr ? "cudaMemset on the legacy stream" : "cudaMemset");
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  recorded::note(stream == nullptr ? "cudaMemcpy on the legacy stream" : "cudaMemcpy");
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  *stream = new RecordedStream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() {
  recorded::note("cudaDeviceSynchronize");
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) {
  *event = new RecordedEvent;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) {
  return recorded::kernels_end ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t) {
  recorded::note("launch");
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
  *found = nullptr;
  return cudaSuccess;
}
