// The operators of the device library: tables on the GPU, launches, the publish of a rail.
//
// Owns what a call is given: epochs, counts of finished groups, contexts and counters of each
// operator.  Invariants: tables go to the GPU in one copy (upload); a call allocates and copies
// nothing; the kernel of a publish is launched when its own tasks have been, so no kernel waits for
// what its host still has to launch; all ranks derive the same pipelines and groups.  Compiled by
// `make device-compile`; what it asks of CUDA is tested by csrc/tests/device_life.cpp; no run on
// several GPUs yet.
#pragma once
#include "device_fabric.cuh"
#include "publish_launches.cuh"

#include "../fabric/arithmetic.h"
#include "../operators/config.h"

#include <algorithm>
#include <memory>

namespace megamuon {

class DeviceOperator {
 public:
  DeviceOperator(DeviceFabric& fabric, int number, const OperatorConfig& config,
                 std::string name)
      : name_(std::move(name)), fabric_(fabric), number_(number), config_(config) {
    if (!fabric.opened()) throw std::runtime_error("operator " + name_ + ": open the windows first");
    check_device_config(config, fabric.place(), number, fabric.options().operators, name_);
    const Geometry place = fabric.place();
    const bool publishes = config.kind == kPublish;
    const int blocks = std::min(config.groups, fabric.contexts_per_operator());
    shape_ = publishes ? Shape{1, 1} : shape_of(place.nodes, blocks);
    layout_ = layout_of(config);
    const u64 end = config.control_offset + control_stride(layout_) * u64(shape_.pipelines);
    check_control_end(end, fabric.control_bytes(), name_);
    // Of the puts to the next node, at most 96 are under way (proxies drop some beyond 128).
    lanes_ = std::max(1, std::min(config.slots, 96 / (shape_.pipelines * place.nodes)));
    lanes_ = std::min(lanes_, DeviceFabric::kCounters / (2 * place.nodes * shape_.pipelines));
    if (lanes_ < 1) throw std::runtime_error(name_ + ": too many nodes for its counters");
    states_ = DeviceArray<SeatState>(u64(shape_.pipelines));
    rails_ = DeviceArray<RailState>(u64(shape_.pipelines));
  }

  const std::string& name() const { return name_; }
  int kind() const { return config_.kind; }
  const OperatorConfig& config() const { return config_; }
  const std::string& table_name(int table) const {
    static const std::string none = "no table";
    return table >= 0 && table < int(names_.size()) ? names_[table] : none;
  }

  int add_table(const std::vector<Segment>& segments, Dtype slot, Dtype wire, Dtype window,
                std::string name) {
    const bool gathers = config_.kind == kAllGather;
    const u64 unit = gathers ? 1 : size_of(slot);
    check_device_segments(segments, fabric_.place(), unit, gathers ? 0 : size_of(window),
                          fabric_.uses_multimem(), name_ + ", " + name);
    GroupTable whole =
        operator_table(config_, fabric_.place(), segments, slot, wire, window, name);
    tables_.push_back({whole.star, nullptr});
    names_.push_back(std::move(name));
    waiting_.push_back(std::move(whole));
    return int(tables_.size()) - 1;
  }

  // Bring the tables that were added since the last time to the GPU: one allocation, one copy.
  void upload() {
    if (waiting_.empty()) return;
    const std::size_t first = tables_.size() - waiting_.size();
    Arena arena;
    std::vector<u64> seats, chunks, firsts;  // places in the arena, table by table
    for (const GroupTable& whole : waiting_) {
      std::vector<Seat> row;
      for (int pipeline = 0; pipeline < shape_.pipelines; ++pipeline) {
        const GroupTable part = split_table(whole, shape_.pipelines, pipeline);
        chunks.push_back(arena.add(part.chunks.data(), part.chunks.size()));
        firsts.push_back(arena.add(part.first.data(), part.first.size()));
        row.push_back(seat(pipeline, part.view()));
      }
      seats.push_back(arena.add(row.data(), row.size()));
    }
    char* memory = place(arena, seats, [&](Seat& seat, std::size_t index, const char* at) {
      seat.table.chunks = reinterpret_cast<const Chunk*>(at + chunks[index]);
      seat.table.first = reinterpret_cast<const u64*>(at + firsts[index]);
    });
    for (std::size_t t = 0; t < waiting_.size(); ++t) {
      tables_[first + t].seats = reinterpret_cast<const Seat*>(memory + seats[t]);
    }
    waiting_.clear();
  }

  void call(int table, u64 base, u64 window_base, bool first, double divisor, cudaStream_t stream) {
    if (table < 0 || table >= int(tables_.size())) {
      throw std::runtime_error(name_ + ": no such table");
    }
    if (fabric_.uses_multimem() && base % 16 != 0) {
      throw std::runtime_error(name_ + ", " + names_[table] + ": base " + std::to_string(base) +
                               " is no multiple of 16");
    }
    const Table& chosen = tables_[table];
    if (chosen.seats == nullptr) {
      throw std::runtime_error(name_ + ", " + names_[table] +
                               ": the table is not on the GPU yet, upload it first");
    }
    Call call{};
    call.operation = number_, call.table = table;
    call.groups = chosen.star ? 1 : shape_.groups;
    call.epoch = ++epoch_;
    const int pipelines = chosen.star ? 1 : shape_.pipelines;
    call.base = base, call.window_base = window_base, call.first = first, call.divisor = divisor;
    // A table with star path uses pipeline 0 alone, so the others have seen fewer groups finish.
    call.arrivals_before = arrivals_[0], call.later_arrivals_before = arrivals_[1];
    arrivals_[0] += u64(call.groups);
    if (!chosen.star) arrivals_[1] += u64(call.groups);
    launch(chosen.seats, call.groups, pipelines * call.groups, &call, stream);
  }

  // --- publish -----------------------------------------------------------------------------------

  void set_parameters(std::vector<PublishParameter> parameters, std::vector<std::string> names) {
    names_ = std::move(names);
    const std::vector<PublishState> states(parameters.size());
    const std::vector<int> order(parameters.size());
    const Seat only = seat(0, TableView{});
    Arena arena;
    const u64 parameters_at = arena.add(parameters.data(), parameters.size());
    const u64 states_at = arena.add(states.data(), states.size());
    const u64 order_at = arena.add(order.data(), order.size());
    const u64 seat_at = arena.add(&only, 1);
    char* memory = place(arena, {}, [](Seat&, std::size_t, const char*) {});
    parameters_on_gpu_ = reinterpret_cast<const PublishParameter*>(memory + parameters_at);
    publish_states_ = reinterpret_cast<PublishState*>(memory + states_at);
    order_ = reinterpret_cast<int*>(memory + order_at);
    seat_ = reinterpret_cast<const Seat*>(memory + seat_at);
    staged_ = std::make_unique<PinnedInts>(parameters.size());
    handed_.assign(parameters.size(), 0);
    parameters_ = std::move(parameters);
  }

  // The round's kernel.  It waits for own parameters on the GPU, so all of them have to be on their
  // streams: whatever synchronises the GPU between would wait for a kernel that waits for tasks
  // that its host has no chance to hand over.
  void begin_round(const int* order, int count, u64 version, cudaStream_t stream) {
    if (!staged_) throw std::runtime_error(name_ + ": its parameters are not set");
    require_parameters(count, order);
    require_handed_over(order, count);
    if (version <= version_) {
      throw std::runtime_error(name_ + ": version " + std::to_string(version) + " after version " +
                               std::to_string(version_));
    }
    version_ = version;
    std::copy(order, order + count, staged_->data());
    check_cuda(cudaMemcpyAsync(order_, staged_->data(), u64(count) * sizeof(int),
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    Round round{number_, parameters_on_gpu_, publish_states_, 0, order_, count,
                version, config_.tile_bytes};
    launch(seat_, 1, 1, &round, stream);
    std::fill(handed_.begin(), handed_.end(), 0);
  }

  // An own parameter of the next round.
  void hand_over(int parameter, cudaStream_t stream) {
    require_parameters(1, &parameter);
    const std::string what = name_ + " of '" + names_[parameter] + "'";
    if (!owns(parameter)) throw std::runtime_error(what + ": this rank does not own it");
    if (handed_[parameter]) throw std::runtime_error(what + ": handed over before");
    handed_[parameter] = 1;
    launch_publish_task(own_control(), layout_, tail_++, parameter, stream);
    fabric_.launched(stream);
  }

  void wait(int count, const int* which, const u64* version, cudaStream_t stream) {
    require_parameters(count, which);
    launch_publish_wait(own_control(), layout_, number_, fabric_.options().rank, count, which,
                        version, fabric_.alarm().watch(), stream);
    fabric_.launched(stream);
  }

 private:
  struct Table {
    bool star;
    const Seat* seats;  // on the GPU, by pipeline; null: not there yet
  };

  // Bring an arena to the GPU, where it stays as long as this; where that is.  `seats`: places of
  // rows of seats, whose pointers `finish` fills in, of seat number `index` among all.
  template <class Finish>
  char* place(Arena& arena, const std::vector<u64>& seats, Finish finish) {
    DeviceBytes memory(arena.bytes());
    std::size_t index = 0;
    for (const u64 at : seats) {
      for (int pipeline = 0; pipeline < shape_.pipelines; ++pipeline) {
        finish(arena.find<Seat>(at)[pipeline], index++, memory.data());
      }
    }
    SetupStream().copy(memory.data(), arena.data(), arena.bytes(), cudaMemcpyHostToDevice);
    arenas_.push_back(std::move(memory));
    return arenas_.back().data();
  }

  // Page-locked, so that a copy to the GPU is in the order of its stream.
  struct PinnedInts {
    explicit PinnedInts(u64 count) {
      check_cuda(cudaMallocHost(&memory, std::max<u64>(count, 1) * sizeof(int)), "cudaMallocHost");
    }
    ~PinnedInts() { cudaFreeHost(memory); }
    int* data() const { return static_cast<int*>(memory); }
    void* memory = nullptr;
  };

  void require_parameters(int count, const int* which) const {
    for (int i = 0; i < count; ++i) {
      if (which[i] < 0 || u64(which[i]) >= parameters_.size()) {
        throw std::runtime_error(name_ + ": no parameter " + std::to_string(which[i]));
      }
    }
  }

  bool owns(int parameter) const { return parameters_[parameter].node == fabric_.place().node; }

  // Exactly the own parameters of the round have been.
  void require_handed_over(const int* order, int count) const {
    std::vector<char> awaited(parameters_.size(), 0);
    for (int i = 0; i < count; ++i) awaited[order[i]] = owns(order[i]);
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (handed_[p] == awaited[p]) continue;
      throw std::runtime_error(name_ + " of '" + names_[p] + "': " +
                               (awaited[p] ? "hand it over before its round begins"
                                           : "handed over, but not in the round"));
    }
  }

  Seat seat(int pipeline, const TableView& view) const {
    return {fabric_.place(), layout_, view, states_.data() + pipeline,
            fabric_.options().rank, pipeline};
  }

  char* own_control() const { return fabric_.control() + config_.control_offset; }

  void launch(const Seat* seats, int groups, int blocks, void* arguments, cudaStream_t stream) {
    NcclSite site{seats,
                  groups,
                  fabric_.device_comm(),
                  fabric_.memory(config_.control_offset),
                  control_stride(layout_),
                  fabric_.uses_multimem(),
                  fabric_.alarm().watch(),
                  {number_ * fabric_.contexts_per_operator(), number_ * DeviceFabric::kCounters,
                   lanes_, rails_.data()},
                  2 * fabric_.place().nodes * lanes_};
#if MM_NCCL_HAS_GIN
    if (fabric_.uses_gin()) {
      launch_on(GinSite{site}, blocks, arguments, stream);
      return;
    }
#endif
    launch_on(LsaSite{site}, blocks, arguments, stream);
  }

  template <class Site>
  void launch_on(Site site, int blocks, void* arguments, cudaStream_t stream) {
    void* parameters[] = {&site, arguments};
    check_cuda(cudaLaunchKernel(kernel<Site>(config_.kind), dim3(unsigned(blocks)), dim3(kThreads),
                                parameters, 0, stream),
               name_.c_str());
    fabric_.launched(stream);
  }

 public:
  template <class Site>
  static const void* kernel(int kind) {
    if (kind == kAllGather) return reinterpret_cast<const void*>(&all_gather_kernel<Site>);
    if (kind == kReduceScatter) {
      return reinterpret_cast<const void*>(&reduce_scatter_kernel<Site>);
    }
    return reinterpret_cast<const void*>(&publish_kernel<Site>);
  }

 private:
  const std::string name_;
  DeviceFabric& fabric_;
  const int number_;
  const OperatorConfig config_;
  Shape shape_{1, 1};
  ControlLayout layout_{};
  int lanes_ = 1;
  DeviceArray<SeatState> states_;
  DeviceArray<RailState> rails_;
  std::vector<DeviceBytes> arenas_;
  std::vector<Table> tables_;
  std::vector<GroupTable> waiting_;  // the last tables, which are not on the GPU yet
  std::vector<std::string> names_;   // of tables; of parameters
  u64 epoch_ = 0, arrivals_[2] = {0, 0};
  // Publish.
  std::vector<PublishParameter> parameters_;
  std::vector<char> handed_;  // own parameters, since the last round began
  const PublishParameter* parameters_on_gpu_ = nullptr;
  PublishState* publish_states_ = nullptr;
  int* order_ = nullptr;
  const Seat* seat_ = nullptr;
  std::unique_ptr<PinnedInts> staged_;
  u64 version_ = 0, tail_ = 0;
};

}  // namespace megamuon
