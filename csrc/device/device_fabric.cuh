// A rank's side of the device library: communicator, windows, alarm.
//
// Owns the order of a life: communicator, agreement, device communicator, then memory and windows,
// and back. Invariants: what a rank may use is the least over all ranks, agreed before anything
// depends on it; the device communicator exists before the first window (a window first would
// settle GIN's connections by itself); a window is one allocation and never null; memory is freed
// by the fabric that allocated it alone, and by nobody while a kernel may still use it; no wait of
// close() is without a limit.  Compiled by `make device-compile`; its calls of CUDA and NCCL, and
// their order, are tested over recorded ones by csrc/tests/device_life.cpp; no run on several GPUs
// yet.
//
// [Note: the end of a fabric]
//
// A kernel that waits gives up when it is told to, unless it stands inside NCCL: where a put finds
// no room in the queue to a network proxy, it waits there for a credit, and only ncclCommAbort ends
// that. cudaDeviceSynchronize would wait for it for ever, and so would all that synchronises by
// itself, like freeing memory. So the fabric waits for its own kernels, and not for long; then it
// aborts the communicator and waits once more; and if even that does not end them, their memory
// stays where it is until the process ends.
#pragma once
#include "cuda_support.h"
#include "device_sites.cuh"

#include <algorithm>
#include <cstdlib>

namespace megamuon {

inline void check_nccl(ncclResult_t status, const char* what) {
  if (status == ncclSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(status) + " (" +
                           ncclGetLastError(nullptr) + ")");
}

inline std::string version_text(int code) {
  return code >= 20000 ? std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) +
                             "." + std::to_string(code % 100)
                       : std::to_string(code);
}

inline int loaded_nccl() {
  int code = 0;
  check_nccl(ncclGetVersion(&code), "ncclGetVersion");
  return code;
}

inline void require_same_nccl() {
  const int loaded = loaded_nccl();
  if (loaded == NCCL_VERSION_CODE) return;
  throw std::runtime_error("the device library was compiled against NCCL " +
                           version_text(NCCL_VERSION_CODE) + ", and NCCL " + version_text(loaded) +
                           " is loaded: build it again next to the torch that it runs with "
                           "(MEGAMUON_BUILD=cuda pip install --no-build-isolation -e .)");
}

// Whether the GPU takes part in multicast, for versions of NCCL that cannot be asked.
inline bool gpu_has_multicast(int device) {
  constexpr int kMulticastSupported = 132;  // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
  const char* nvls = std::getenv("NCCL_NVLS_ENABLE");
  if (nvls != nullptr && std::string(nvls) == "0") return false;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
  if (cudaGetDriverEntryPointByVersion("cuDeviceGetAttribute", &found, 12000, cudaEnableDefault,
                                       &state) != cudaSuccess ||
      found == nullptr) {
    cudaGetLastError();
    return false;
  }
  int value = 0;
  const auto query = reinterpret_cast<int (*)(int*, int, int)>(found);
  return query(&value, kMulticastSupported, device) == 0 && value != 0;
}

// What a communicator offers, the least over its ranks; see mmd_capability of
// bindings/device_api.h.
struct Capability {
  int lsa_ranks, direct, row, multimem, gin;
};

class DeviceFabric {
 public:
  struct Options {
    int rank, nodes, columns, device, operators, blocks;
    bool multimem;
    double deadline_seconds;
  };

  DeviceFabric(const void* id, const Options& options)
      : options_(options), alarm_(use_device(options)) {
    try {
      connect(id);
    } catch (...) {
      close();
      throw;
    }
  }
  DeviceFabric(const DeviceFabric&) = delete;
  DeviceFabric& operator=(const DeviceFabric&) = delete;
  ~DeviceFabric() { close(); }

  const Options& options() const { return options_; }
  const Capability& capability() const { return capability_; }
  bool uses_multimem() const { return multimem_; }
  bool uses_gin() const { return capability_.direct == 0; }
  const ncclDevComm& device_comm() const { return device_comm_; }
  const Alarm& alarm() const { return alarm_; }
  Alarm& alarm() { return alarm_; }
  bool opened() const { return pool_window_ != nullptr; }
  char* pool() const { return static_cast<char*>(pool_); }
  char* control() const { return static_cast<char*>(control_); }
  u64 control_bytes() const { return control_bytes_; }
  u64 pool_bytes() const { return pool_bytes_; }
  Geometry place() const {
    return {options_.nodes, options_.columns, options_.rank / options_.columns,
            options_.rank % options_.columns};
  }

  NcclMemory memory(u64 control_offset) const {
    return {pool_window_, control_window_,        control_offset, options_.columns,
            !uses_gin(),  /*multicast=*/nullptr,  multimem_};
  }

  // Contexts and counters of one operator.
  static constexpr int kCounters = 256;
  int contexts_per_operator() const { return contexts_per_operator_; }

  // `pool_of`: whose pool is this one's too; null: allocate one.
  void open(u64 control_bytes, u64 pool_bytes, const DeviceFabric* pool_of) {
    if (opened()) throw std::runtime_error("open: the windows are open already, and never grow");
    if (pool_of != nullptr) pool_of->check_lends(pool_bytes);
    control_bytes_ = control_bytes, pool_bytes_ = pool_bytes;
    allocate("control", control_bytes, &control_);
    register_window("control", control_bytes, control_, kSignalWindow, &control_window_);
    if (pool_of == nullptr) {
      allocate("pool", pool_bytes, &own_pool_);
      pool_ = own_pool_;
    } else {
      pool_ = pool_of->pool_;
    }
    register_window("pool", pool_bytes, pool_, kDataWindow, &pool_window_);
    int ready = 1;
    agree(&ready, 1);  // also a barrier: every rank's control words are zero now
  }

  void agree(int* values, int count) {
    if (count <= 0 || count > kAgreed) throw std::runtime_error("agree: 1 .. 64 values");
    check_cuda(cudaMemcpyAsync(agreed_.data(), values, count * sizeof(int), cudaMemcpyHostToDevice,
                               stream_),
               "cudaMemcpyAsync");
    check_nccl(ncclAllReduce(agreed_.data(), agreed_.data(), size_t(count), ncclInt32, ncclMin,
                             comm_, stream_),
               "ncclAllReduce");
    check_cuda(cudaMemcpyAsync(values, agreed_.data(), count * sizeof(int), cudaMemcpyDeviceToHost,
                               stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  // What was put on a stream, to be waited for at the end.
  void launched(cudaStream_t stream) { under_way_.launched(stream); }

  // Idempotent.  Kernels that still wait are told to give up first.  False: some do not end, so
  // nothing that they may use was freed, nor may be.  See [Note: the end of a fabric].
  bool close() {
    if (comm_ != nullptr) {
      const bool failed = alarm_.failure() != nullptr;
      alarm_.request_abort();
      if (under_way_.over_within(grace())) {
        if (has_device_comm_) ncclDevCommDestroy(comm_, &device_comm_);
        for (ncclWindow_t window : {pool_window_, control_window_}) {
          if (window != nullptr) ncclCommWindowDeregister(comm_, window);
        }
        // After a failure the other ranks may be gone, and destroying would wait for them.
        if (failed || alarm_.failure() != nullptr) {
          ncclCommAbort(comm_);
        } else {
          ncclCommDestroy(comm_);
        }
      } else {
        ncclCommAbort(comm_);  // and with it all that belongs to the communicator
        ended_ = under_way_.over_within(grace());
      }
      comm_ = nullptr;
    }
    pool_window_ = control_window_ = nullptr;
    has_device_comm_ = false;
    if (!ended_) return false;
    pool_ = nullptr;
    for (void** memory : {&own_pool_, &control_}) {
      if (*memory != nullptr) ncclMemFree(*memory);
      *memory = nullptr;
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    stream_ = nullptr;
    return true;
  }

 private:
  static constexpr int kAgreed = 64;
  static constexpr double kGraceSeconds = 10;  // at most, for kernels that were told to give up

  double grace() const { return std::min(kGraceSeconds, options_.deadline_seconds); }

  static double use_device(const Options& options) {
    require_same_nccl();
    check_cuda(cudaSetDevice(options.device), "cudaSetDevice");
    return options.deadline_seconds;
  }

  void connect(const void* id) {
    ncclUniqueId unique;
    std::memcpy(&unique, id, sizeof unique);
    agreed_ = DeviceArray<int>(kAgreed);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check_nccl(
        ncclCommInitRank(&comm_, options_.nodes * options_.columns, unique, options_.rank),
        "ncclCommInitRank");
    find_capability();
    ncclDevCommRequirements requirements = empty_requirements();
    requirements.lsaMultimem = multimem_;
    if (uses_gin()) {
      require_rails(&requirements, options_.operators * options_.blocks,
                    options_.operators * kCounters);
    }
    check_nccl(ncclDevCommCreate(comm_, &requirements, &device_comm_), "ncclDevCommCreate");
    has_device_comm_ = true;
    int contexts = uses_gin() ? context_count(device_comm_) / options_.operators : options_.blocks;
    agree(&contexts, 1);
    contexts_per_operator_ = contexts;
    if (contexts < 1) {
      throw std::runtime_error("GIN has fewer contexts than operators (" +
                               std::to_string(options_.operators) +
                               "): each thread group needs one of its own");
    }
  }

  void find_capability() {
    NcclProperties properties;
    check_nccl(query_properties(comm_, &properties), "ncclCommQueryProperties");
    const ncclTeam_t team = ncclTeamLsa(comm_);
    const int places = options_.nodes * options_.columns;
    const bool whole_rows = team.stride == 1 && properties.device_api != 0;
    const bool multicast = properties.multimem >= 0 ? properties.multimem == 1
                                                    : gpu_has_multicast(options_.device);
    int found[] = {team.nRanks, -team.nRanks,
                   whole_rows && team.nRanks == places,
                   whole_rows && team.nRanks == options_.columns &&
                       team.rank == options_.rank % options_.columns,
                   multicast, MM_NCCL_HAS_GIN && properties.rail_gin == 1};
    agree(found, 6);
    if (found[0] != -found[1]) {
      throw std::runtime_error("ranks differ in how many GPUs address each other's memory: " +
                               std::to_string(found[0]) + " to " + std::to_string(-found[1]));
    }
    capability_ = {found[0], found[2], found[3], 0, found[5]};
    // The switch's address reaches the whole team, so the team has to be the row.
    capability_.multimem = found[4] && found[3] && options_.columns > 1;
    multimem_ = options_.multimem && capability_.multimem;
    if (capability_.direct || (capability_.row && capability_.gin)) return;
    throw std::runtime_error(unusable());
  }

  std::string unusable() const {
    const std::string grid =
        std::to_string(options_.nodes) + " x " + std::to_string(options_.columns);
    if (!capability_.row) {
      return "the device operators need the GPUs of a node, or all GPUs, to address each other's "
             "memory: of a grid of " +
             grid + " ranks, " + std::to_string(capability_.lsa_ranks) + " do";
    }
    return "the device operators of " + grid + " ranks need GIN between nodes, which NCCL " +
           version_text(NCCL_VERSION_CODE) +
           (MM_NCCL_HAS_GIN ? " does not offer on these machines"
                            : " does not have as they use it: take NCCL 2.31.2 or newer");
  }

  void check_lends(u64 bytes) const {
    if (!opened()) throw std::runtime_error("open: the fabric that has the pool is not open");
    if (bytes == pool_bytes_) return;
    throw std::runtime_error("open: a pool of " + std::to_string(bytes) +
                             " bytes is asked for, and the one that is there has " +
                             std::to_string(pool_bytes_));
  }

  static u64 whole_window(u64 bytes) {
    return (bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT *
           NCCL_WIN_REQUIRED_ALIGNMENT;
  }

  static void allocate(const std::string& name, u64 bytes, void** memory) {
    check_nccl(ncclMemAlloc(memory, whole_window(bytes)),
               (name + " window: ncclMemAlloc").c_str());
    SetupStream().zero(*memory, whole_window(bytes));
  }

  void register_window(const std::string& name, u64 bytes, void* memory, int flags,
                       ncclWindow_t* window) {
    check_nccl(ncclCommWindowRegister(comm_, memory, whole_window(bytes), window, flags),
               (name + " window: ncclCommWindowRegister").c_str());
    // Success with a null window means that there is no symmetric memory here.
    int registered = *window != nullptr;
    agree(&registered, 1);
    if (!registered) {
      throw std::runtime_error(name + " window: registration gave no window on some rank, so NCCL "
                                      "has no symmetric memory here");
    }
  }

  const Options options_;
  Alarm alarm_;
  UnderWay under_way_;
  bool ended_ = true;  // false: kernels did not end, see close()
  DeviceArray<int> agreed_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  ncclDevComm device_comm_{};
  bool has_device_comm_ = false, multimem_ = false;
  int contexts_per_operator_ = 0;
  Capability capability_{};
  void *control_ = nullptr, *own_pool_ = nullptr;
  void* pool_ = nullptr;  // own_pool_, or another fabric's
  ncclWindow_t control_window_ = nullptr, pool_window_ = nullptr;
  u64 control_bytes_ = 0, pool_bytes_ = 0;
};

}  // namespace megamuon
