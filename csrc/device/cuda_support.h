// What the GPU libraries share on the host: errors, owned device memory, the mailbox, what is under
// way.
//
// Owns freeing: memory is given back by its object.  Invariant: nothing here is put on the legacy
// stream, which streams that are not blocking (torch's side streams, the operators') neither wait
// for nor hold up: zeros written there could land after a kernel's first words.  Tested with the
// libraries that use it, and by csrc/tests/device_life.cpp.
#pragma once
#include "../fabric/device_group.cuh"

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace megamuon {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// A stream for what has to be over before its caller goes on.
class SetupStream {
 public:
  SetupStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  SetupStream(const SetupStream&) = delete;
  SetupStream& operator=(const SetupStream&) = delete;
  ~SetupStream() { cudaStreamDestroy(stream_); }

  void zero(void* data, u64 bytes) {
    check_cuda(cudaMemsetAsync(data, 0, bytes, stream_), "cudaMemset");
    wait("cudaMemset");
  }
  void copy(void* to, const void* from, u64 bytes, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpy");
    wait("cudaMemcpy");
  }

 private:
  void wait(const char* what) { check_cuda(cudaStreamSynchronize(stream_), what); }
  cudaStream_t stream_ = nullptr;
};

// `count` objects in the GPU's memory, zero at first.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(u64 count) : count_(count) {
    if (count == 0) return;
    check_cuda(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    SetupStream().zero(data_, count * sizeof(T));
  }
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    if (count_ == 0) return;
    check_cuda(cudaMalloc(&data_, count_ * sizeof(T)), "cudaMalloc");
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
    SetupStream().copy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ == 0) return values;
    SetupStream().copy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost);
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

// Bytes of the GPU's memory, of no value yet.
class DeviceBytes {
 public:
  explicit DeviceBytes(u64 bytes) { check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  DeviceBytes(DeviceBytes&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  DeviceBytes& operator=(DeviceBytes&&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
};

// Arrays of several types that go to the GPU in one allocation and one copy.
class Arena {
 public:
  // Where in the arena the values will lie.
  template <class T>
  u64 add(const T* values, u64 count) {
    const u64 at = (host_.size() + kAlignment - 1) / kAlignment * kAlignment;
    host_.resize(at + count * sizeof(T));
    if (count > 0) std::memcpy(host_.data() + at, values, count * sizeof(T));
    return at;
  }
  // To be filled in when the arena's place on the GPU is known.
  template <class T>
  T* find(u64 at) {
    return reinterpret_cast<T*>(host_.data() + at);
  }
  u64 bytes() const { return host_.size(); }
  const char* data() const { return host_.data(); }

 private:
  static constexpr u64 kAlignment = 256;
  std::vector<char> host_;
};

// What has been put on streams and may still run: the last point of each of them.
class UnderWay {
 public:
  UnderWay() = default;
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
  ~UnderWay() {
    for (const auto& [stream, event] : last_) cudaEventDestroy(event);
  }

  void launched(cudaStream_t stream) {
    auto found = last_.find(stream);
    if (found == last_.end()) {
      cudaEvent_t event;
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
      found = last_.emplace(stream, event).first;
    }
    check_cuda(cudaEventRecord(found->second, stream), "cudaEventRecord");
  }

  // Whether all is over within `seconds`; a GPU that fails has nothing under way.
  bool over_within(double seconds) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (const auto& [stream, event] : last_) {
      while (cudaEventQuery(event) == cudaErrorNotReady) {
        if (std::chrono::steady_clock::now() > limit) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return true;
  }

 private:
  std::map<cudaStream_t, cudaEvent_t> last_;
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
