// What every loopback case has: memory, seats, launches, timing.
//
// Owns the virtual places of a case.  Invariant: all blocks of a launch are resident together (a
// cooperative launch), so a group may wait for another.  Used by loopback_api.cu alone.
#pragma once
#include "../device/publish_launches.cuh"
#include "loopback_case.h"

#include "../fabric/loopback.cuh"
#include "../operators/kernels.cuh"

namespace megamuon {
namespace loopback {

constexpr int kGarbage = 0xee;

struct LoopbackSeat {
  Seat seat;
  LoopbackMemory memory;
};

// Which seat and group a block is; see kernels.cuh.
struct Site {
  const LoopbackSeat* seats;
  const int* blocks;  // by block: seat * kMaxBlocks + group
  Watch watch;

  __device__ const Seat& seat(int block) const { return seats[blocks[block] / kMaxBlocks].seat; }
  __device__ int group(int block) const { return blocks[block] % kMaxBlocks; }
  __device__ LoopbackFabric fabric(int block, const Geometry& place, int, Group& group) const {
    return {seats[blocks[block] / kMaxBlocks].memory, place, group};
  }
};

// Every place's range of a call: garbage, but for its own segments.
__global__ void prepare_kernel(char* pools, u64 stride, int places, const char* expected,
                               const unsigned char* owner, u64 span) {
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < span * places;
       i += u64(gridDim.x) * blockDim.x) {
    const int place = int(i / span);
    const u64 at = i % span;
    pools[place * stride + at] = owner[at] == place ? expected[at] : char(kGarbage);
  }
}

__global__ void compare_kernel(const char* pools, u64 stride, int places, const char* expected,
                               u64 span, unsigned long long* different) {
  unsigned long long mine = 0;
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < span * places;
       i += u64(gridDim.x) * blockDim.x) {
    mine += pools[(i / span) * stride + i % span] != expected[i % span];
  }
  if (mine != 0) atomicAdd(different, mine);
}

class Bench {
 protected:
  explicit Bench(const mm_loopback_case& c)
      : case_(c), places_(c.nodes * c.columns), random_(c.seed), alarm_(c.deadline_seconds) {
    check_case();
    for (cudaStream_t& stream : streams_) check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  }
  ~Bench() {
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  // A table's seats on the GPU, with what they point to.
  struct Prepared {
    Segments segments;
    bool star = false;
    DeviceArray<LoopbackSeat> seats;
    DeviceArray<int> blocks;
    std::vector<DeviceArray<Chunk>> chunks;
    std::vector<DeviceArray<u64>> first;
  };

  void check_case() const {
    const mm_loopback_case& c = case_;
    const auto refuse = [](const std::string& text) { throw std::runtime_error(text); };
    if (c.nodes < 1 || c.nodes > kMaxNodes || c.columns < 1 || places_ > 255) {
      refuse("nodes x columns: 1 .. " + std::to_string(kMaxNodes) + " nodes, at most 255 places");
    }
    if (c.pipelines < 1 || c.groups < 1 || c.groups > c.nodes ||
        c.pipelines * c.groups > kMaxBlocks) {
      refuse("pipelines x groups: at most " + std::to_string(kMaxBlocks) +
             " blocks, no more groups than nodes");
    }
    if (c.chunk_bytes == 0 || c.chunk_bytes % 256 != 0) refuse("chunk_bytes: a multiple of 256");
    if (c.slots < 1 || c.segments < 1 || c.granule < 1) {
      refuse("slots, segments, granule: at least 1");
    }
    if (c.kind == MM_PUBLISH && c.columns != 1) refuse("a publish has one column");
    if (c.kind == MM_REDUCE_SCATTER &&
        !sum_supported(Dtype(c.slot_dtype), Dtype(c.wire_dtype), Dtype(c.window_dtype))) {
      refuse("sums of these dtypes are not supported");
    }
  }

  void allocate(u64 pool_bytes, u64 parameters, u64 tiles) {
    layout_ = ControlLayout{case_.nodes, case_.columns, case_.slots, case_.chunk_bytes,
                            case_.kind == MM_REDUCE_SCATTER, case_.star_bytes > 0, tiles,
                            int(parameters)};
    control_stride_ = round_up(layout_.bytes(), 256);
    pool_stride_ = round_up(pool_bytes, 256);
    pools_ = DeviceArray<char>(places_ * pool_stride_);
    controls_ = DeviceArray<char>(u64(case_.pipelines) * places_ * control_stride_);
    states_ = DeviceArray<SeatState>(u64(places_) * case_.pipelines);
  }

  // --- seats -------------------------------------------------------------------------------------

  LoopbackSeat seat_of(int place, int pipeline, const TableView& view) const {
    const Geometry geometry{case_.nodes, case_.columns, place / case_.columns,
                            place % case_.columns};
    const LoopbackMemory memory{pools_.data(),
                                controls_.data() + u64(pipeline) * places_ * control_stride_,
                                pool_stride_, control_stride_, case_.columns};
    SeatState* state = states_.data() + place * case_.pipelines + pipeline;
    return {{geometry, layout_, view, state, place, pipeline}, memory};
  }

  Prepared prepare(Segments segments) {
    Prepared made;
    made.segments = std::move(segments);
    std::vector<LoopbackSeat> seats;
    for (int place = 0; place < places_; ++place) {
      const GroupTable whole = table_of(case_, made.segments, place % case_.columns);
      made.star = whole.star;
      for (int pipeline = 0; pipeline < case_.pipelines; ++pipeline) {
        const GroupTable part = split_table(whole, case_.pipelines, pipeline);
        made.chunks.emplace_back(part.chunks);
        made.first.emplace_back(part.first);
        TableView view = part.view();
        view.chunks = made.chunks.back().data(), view.first = made.first.back().data();
        seats.push_back(seat_of(place, pipeline, view));
      }
    }
    made.seats = DeviceArray<LoopbackSeat>(seats);
    made.blocks = DeviceArray<int>(block_order(made.star));
    return made;
  }

  std::vector<int> block_order(bool star) {
    std::vector<int> blocks;
    for (int place = 0; place < places_; ++place) {
      for (int pipeline = 0; pipeline < (star ? 1 : case_.pipelines); ++pipeline) {
        for (int group = 0; group < (star ? 1 : case_.groups); ++group) {
          blocks.push_back((place * case_.pipelines + pipeline) * kMaxBlocks + group);
        }
      }
    }
    if (case_.shuffle) std::shuffle(blocks.begin(), blocks.end(), random_);
    return blocks;
  }

  // --- launches ----------------------------------------------------------------------------------

  void launch(const void* kernel, const DeviceArray<LoopbackSeat>& seats,
              const DeviceArray<int>& blocks, void* arguments) {
    Site site{seats.data(), blocks.data(), alarm_.watch()};
    void* parameters[] = {&site, arguments};
    const cudaError_t status = cudaLaunchCooperativeKernel(
        kernel, dim3(unsigned(blocks.size())), dim3(kThreads), parameters, 0, streams_[0]);
    if (status == cudaErrorCooperativeLaunchTooLarge) {
      cudaGetLastError();
      throw std::runtime_error(std::to_string(blocks.size()) +
                               " blocks are not resident together on this GPU: take fewer places, "
                               "pipelines or groups");
    }
    check_cuda(status, "cudaLaunchCooperativeKernel");
  }

  void finish(const char* what) {
    for (cudaStream_t stream : streams_) check_cuda(cudaStreamSynchronize(stream), what);
    if (const Failure* failure = alarm_.failure()) {
      throw std::runtime_error(describe(*failure, what, "table 0"));
    }
  }

  template <class Body>
  double seconds(int times, Body body) {
    cudaEvent_t start, stop;
    check_cuda(cudaEventCreate(&start), "cudaEventCreate");
    check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
    body();  // once before, untimed
    check_cuda(cudaEventRecord(start, streams_[0]), "cudaEventRecord");
    for (int i = 0; i < times; ++i) body();
    check_cuda(cudaEventRecord(stop, streams_[0]), "cudaEventRecord");
    finish("timed calls");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    return double(milliseconds) / 1e3 / times;
  }

  const mm_loopback_case case_;
  const int places_;
  std::mt19937_64 random_;
  Alarm alarm_;
  cudaStream_t streams_[3] = {};
  ControlLayout layout_{};
  u64 pool_stride_ = 0, control_stride_ = 0;
  DeviceArray<char> pools_, controls_;
  DeviceArray<SeatState> states_;
};

}  // namespace loopback
}  // namespace megamuon
