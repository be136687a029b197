// What the GPU libraries share on the host: errors, owned device memory, the mailbox.
//
// Owns freeing: memory is given back by its object.  Tested with the libraries that use it.
#pragma once
#include "../fabric/device_group.cuh"
#include "entry.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megamuon {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// `count` objects in the GPU's memory, zero at first.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(u64 count) : count_(count) {
    if (count == 0) return;
    check_cuda(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, count * sizeof(T)), "cudaMemset");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    upload(values);
  }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  u64 size() const { return count_; }
  void upload(const std::vector<T>& values) {
    if (values.empty()) return;
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy to the GPU");
  }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ == 0) return values;
    check_cuda(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
               "cudaMemcpy from the GPU");
    return values;
  }

 private:
  void swap(DeviceArray& other) {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }
  T* data_ = nullptr;
  u64 count_ = 0;
};

// The abort word and the failure record of one GPU.
class Alarm {
 public:
  explicit Alarm(double deadline_seconds) : aborted_(1), deadline_seconds_(deadline_seconds) {
    check_cuda(cudaHostAlloc(&mailbox_, sizeof(Mailbox), cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(static_cast<void*>(mailbox_), 0, sizeof(Mailbox));
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm() { cudaFreeHost(mailbox_); }

  Watch watch() const {
    void* seen = nullptr;
    check_cuda(cudaHostGetDevicePointer(&seen, mailbox_, 0), "cudaHostGetDevicePointer");
    return {aborted_.data(), static_cast<Mailbox*>(seen), u64(deadline_seconds_ * 1e9)};
  }
  void request_abort() { mailbox_->abort_request = 1; }
  bool abort_requested() const { return mailbox_->abort_request != 0; }
  // The first failure of this GPU; null while there is none.
  const Failure* failure() const {
    const volatile uint32_t& ready = mailbox_->failure.ready;
    return ready != 0 ? &mailbox_->failure : nullptr;
  }

 private:
  DeviceArray<uint32_t> aborted_;
  Mailbox* mailbox_ = nullptr;
  double deadline_seconds_;
};

}  // namespace megamuon
