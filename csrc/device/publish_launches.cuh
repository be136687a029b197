// Launches of the publish's small kernels: a task of an owner, and what holds a stream.
//
// Owns how they are put on a stream, for the device library and the loopback.  Invariant: a launch
// carries its arguments, so nothing has to be allocated or copied for it.  Tested with the
// libraries that use it.
#pragma once
#include "../operators/kernels.cuh"
#include "cuda_support.h"

namespace megamuon {

inline void launch_publish_task(char* control, ControlLayout layout, u64 index, int parameter,
                                cudaStream_t stream) {
  void* arguments[] = {&control, &layout, &index, &parameter};
  check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(&publish_task_kernel), dim3(1),
                              dim3(1), arguments, 0, stream),
             "publish_task_kernel");
}

inline void launch_publish_wait(const char* control, ControlLayout layout, int operation, int place,
                                int count, const int* which, const u64* version, Watch watch,
                                cudaStream_t stream) {
  for (int start = 0; start < count; start += WaitList::kMost) {
    WaitList list{};
    list.operation = operation, list.place = place;
    list.count = count - start < WaitList::kMost ? count - start : WaitList::kMost;
    for (int i = 0; i < list.count; ++i) {
      list.which[i] = which[start + i], list.version[i] = version[start + i];
    }
    void* arguments[] = {&control, &layout, &list, &watch};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(&publish_wait_kernel), dim3(1),
                                dim3(1), arguments, 0, stream),
               "publish_wait_kernel");
  }
}

}  // namespace megamuon
