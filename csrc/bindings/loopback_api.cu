// The loopback library: runs, checks and times the operators on virtual places of one GPU.
//
// Owns a case from its data to its verdict.  Invariant: every byte of a call's range is compared,
// those between segments too.  Compiled by `make device-compile`; run by tools/gpu_checks.sh on a
// GPU.
#include "entry.h"
#include "loopback_bench.cuh"

namespace megamuon {
namespace loopback {

// Gathers and reductions.
class CallBench : Bench {
 public:
  explicit CallBench(const mm_loopback_case& c) : Bench(c) {}

  void run(mm_loopback_result& result) {
    const bool reduces = case_.kind == MM_REDUCE_SCATTER;
    std::vector<Segments> made = {make_segments(case_, random_), make_segments(case_, random_)};
    const u64 span = std::max(made[0].span, made[1].span);
    u64 window = 0;
    for (const Segments& segments : made) {
      for (const u64 elements : segments.windows) window = std::max(window, elements);
    }
    window_base_ = 2 * span;
    window_bytes_ = reduces ? round_up(window * size_of(Dtype(case_.window_dtype)), 256) : 0;
    allocate(2 * span + window_bytes_, 0, 0);
    std::vector<Prepared> tables;
    for (Segments& segments : made) tables.push_back(prepare(std::move(segments)));
    if (tables[0].star != tables[1].star) {
      throw std::runtime_error("one of the case's tables takes the star path and one does not: "
                               "choose star_bytes further from bytes");
    }
    windows_.assign(places_, std::vector<char>(window_bytes_, char(kGarbage)));
    for (int call = 0; call < case_.calls; ++call) {
      // Two tables and two bases, in all combinations.
      const Prepared& table = tables[call % 2];
      const u64 base = (call / 2 % 2) * span;
      if (reduces) {
        check_reduction(table, base, call == 0, result);
      } else {
        check_gather(table, base, result);
      }
    }
    result.star = tables[0].star, result.blocks = int(tables[0].blocks.size());
    result.bytes = tables[0].segments.bytes;
    if (case_.timed > 0) time_calls(tables[0], result);
  }

 private:
  void launch_call(const Prepared& prepared, u64 base, bool first) {
    Call call{};
    call.operation = case_.kind, call.table = 0;
    call.groups = prepared.star ? 1 : case_.groups;
    call.epoch = ++epoch_;
    // Tables with and without star path never mix in a case.
    call.arrivals_before = call.later_arrivals_before = arrivals_;
    arrivals_ += u64(call.groups);
    call.base = base, call.window_base = window_base_;
    call.divisor = double(places_), call.first = first;
    const void* kernel = case_.kind == MM_ALL_GATHER
                             ? reinterpret_cast<const void*>(&all_gather_kernel<Site>)
                             : reinterpret_cast<const void*>(&reduce_scatter_kernel<Site>);
    launch(kernel, prepared.seats, prepared.blocks, &call);
  }

  void check_gather(const Prepared& table, u64 base, mm_loopback_result& result) {
    const u64 span = table.segments.span;
    if (span == 0) return;
    std::vector<char> expected(span, char(kGarbage));
    std::vector<unsigned char> owner(span, 255);
    for (const Segment& segment : table.segments.list) {
      for (u64 i = segment.offset; i < segment.offset + segment.length; ++i) {
        expected[i] = char(random_() >> 17);
        owner[i] = static_cast<unsigned char>(segment.node * case_.columns + segment.column);
      }
    }
    const DeviceArray<char> truth(expected);
    const DeviceArray<unsigned char> owners(owner);
    const DeviceArray<unsigned long long> different(1);
    prepare_kernel<<<1024, 256, 0, streams_[0]>>>(pools_.data() + base, pool_stride_, places_,
                                                  truth.data(), owners.data(), span);
    launch_call(table, base, true);
    compare_kernel<<<1024, 256, 0, streams_[0]>>>(pools_.data() + base, pool_stride_, places_,
                                                  truth.data(), span, different.data());
    check_cuda(cudaGetLastError(), "launch");
    finish("all_gather");
    result.checked += span * places_;
    result.mismatches += different.download()[0];
  }

  void check_reduction(const Prepared& table, u64 base, bool first, mm_loopback_result& result) {
    const u64 span = table.segments.span;
    if (first) upload_windows();
    std::vector<std::vector<char>> slots(places_, std::vector<char>(span));
    for (int place = 0; place < places_; ++place) {
      fill_slots(slots[place], Dtype(case_.slot_dtype), random_);
      check_cuda(cudaMemcpy(pools_.data() + place * pool_stride_ + base, slots[place].data(), span,
                            cudaMemcpyHostToDevice),
                 "cudaMemcpy to the GPU");
    }
    // The first call stores, later ones add; what a table's first store does not reach stays
    // garbage in both.
    launch_call(table, base, first);
    finish("reduce_scatter");
    reduce_on_host(case_, table.segments, slots, double(places_), first, windows_);
    const u64 size = size_of(Dtype(case_.window_dtype));
    std::vector<char> window(window_bytes_);
    for (int place = 0; place < places_ && window_bytes_ > 0; ++place) {
      check_cuda(cudaMemcpy(window.data(), pools_.data() + place * pool_stride_ + window_base_,
                            window_bytes_, cudaMemcpyDeviceToHost),
                 "cudaMemcpy from the GPU");
      result.checked += window_bytes_ / size;
      result.mismatches += count_differences(window, windows_[place], size);
    }
  }

  void upload_windows() {
    for (int place = 0; place < places_ && window_bytes_ > 0; ++place) {
      check_cuda(cudaMemcpy(pools_.data() + place * pool_stride_ + window_base_,
                            windows_[place].data(), window_bytes_, cudaMemcpyHostToDevice),
                 "cudaMemcpy to the GPU");
    }
  }

  void time_calls(const Prepared& table, mm_loopback_result& result) {
    result.call_seconds = seconds(case_.timed, [&] { launch_call(table, 0, true); });
    const u64 bytes = result.bytes * places_;
    const DeviceArray<char> from(bytes), to(bytes);
    result.copy_seconds = seconds(5, [&] {
      check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice,
                                 streams_[0]),
                 "cudaMemcpyAsync");
    });
  }

  u64 window_base_ = 0, window_bytes_ = 0;
  u64 epoch_ = 0, arrivals_ = 0;
  std::vector<std::vector<char>> windows_;  // what they must hold
};

class PublishBench : Bench {
 public:
  explicit PublishBench(const mm_loopback_case& c) : Bench(c) {}

  void run(mm_loopback_result& result) {
    const Parameters made = make_parameters();
    const int count = int(made.list.size());
    allocate(made.span, u64(count), made.tiles);
    check_cuda(cudaMemset(pools_.data(), kGarbage, pools_.size()), "cudaMemset");
    std::vector<LoopbackSeat> seats;
    for (int place = 0; place < places_; ++place) seats.push_back(seat_of(place, 0, TableView{}));
    std::vector<int> order(count), blocks;
    for (int place = 0; place < places_; ++place) blocks.push_back(place * kMaxBlocks);
    for (int p = 0; p < count; ++p) order[p] = p;
    const DeviceArray<LoopbackSeat> device_seats(seats);
    const DeviceArray<PublishParameter> parameters(made.list);
    const DeviceArray<int> device_order(order);
    const PublishState fresh{};
    DeviceArray<PublishState> states(std::vector<PublishState>(u64(count) * places_, fresh));
    Round round{MM_PUBLISH, parameters.data(), states.data(), u64(count), device_order.data(),
                count,      0,                 case_.chunk_bytes};
    std::vector<u64> tails(places_, 0);
    result.blocks = places_;
    const int rounds = case_.calls + (case_.timed > 0 ? case_.timed + 1 : 0);
    for (int version = 1; version <= rounds; ++version) {
      if (case_.shuffle) std::shuffle(blocks.begin(), blocks.end(), random_);
      const DeviceArray<int> device_blocks(blocks);
      round.version = u64(version);
      if (version <= case_.calls) {
        check_round(made, order, tails, round, device_seats, device_blocks, result);
      } else {
        time_round(made, order, tails, round, device_seats, device_blocks, result);
      }
    }
  }

 private:
  struct Parameters {
    std::vector<PublishParameter> list;
    u64 tiles = 0, span = 0;
  };

  Parameters make_parameters() {
    Parameters made;
    const u64 mean = std::max<u64>(1, case_.bytes / (u64(case_.segments) * places_));
    for (int i = 0; i < case_.segments * places_; ++i) {
      const u64 bytes = 1 + mean / 2 + random_() % mean;
      made.list.push_back({int(random_() % u64(case_.nodes)), made.span, bytes, made.tiles});
      made.tiles += (bytes + case_.chunk_bytes - 1) / case_.chunk_bytes;
      made.span = round_up(made.span + bytes, 256);
    }
    return made;
  }

  char* control_of(int place) const { return controls_.data() + u64(place) * control_stride_; }

  void hand_over(const Parameters& made, std::vector<int> order, std::vector<u64>& tails) {
    std::shuffle(order.begin(), order.end(), random_);
    for (const int p : order) {
      const int node = made.list[p].node;
      launch_publish_task(control_of(node), layout_, tails[node]++, p, streams_[1]);
    }
  }

  // The round runs while another stream hands the parameters over and a third waits for them.
  void check_round(const Parameters& made, const std::vector<int>& order, std::vector<u64>& tails,
                   Round& round, const DeviceArray<LoopbackSeat>& seats,
                   const DeviceArray<int>& blocks, mm_loopback_result& result) {
    std::vector<char> expected(made.span, char(kGarbage));
    for (const PublishParameter& p : made.list) {
      for (u64 i = 0; i < p.bytes; ++i) expected[p.offset + i] = char(random_() >> 17);
      check_cuda(cudaMemcpy(pools_.data() + p.node * pool_stride_ + p.offset,
                            expected.data() + p.offset, p.bytes, cudaMemcpyHostToDevice),
                 "cudaMemcpy to the GPU");
    }
    const DeviceArray<char> truth(expected);
    const std::vector<u64> versions(order.size(), round.version);
    const DeviceArray<unsigned long long> different(1);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    launch(reinterpret_cast<const void*>(&publish_kernel<Site>), seats, blocks, &round);
    hand_over(made, order, tails);
    for (int place = 0; place < places_; ++place) {
      launch_publish_wait(control_of(place), layout_, MM_PUBLISH, place, int(order.size()),
                          order.data(), versions.data(), alarm_.watch(), streams_[2]);
    }
    compare_kernel<<<256, 256, 0, streams_[2]>>>(pools_.data(), pool_stride_, places_, truth.data(),
                                                 made.span, different.data());
    check_cuda(cudaGetLastError(), "launch");
    finish("publish");
    result.checked += made.span * places_;
    result.mismatches += different.download()[0];
  }

  // The first timed round is left out of the mean.
  void time_round(const Parameters& made, const std::vector<int>& order, std::vector<u64>& tails,
                  Round& round, const DeviceArray<LoopbackSeat>& seats,
                  const DeviceArray<int>& blocks, mm_loopback_result& result) {
    hand_over(made, order, tails);
    finish("publish");
    cudaEvent_t start, stop;
    check_cuda(cudaEventCreate(&start), "cudaEventCreate");
    check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
    check_cuda(cudaEventRecord(start, streams_[0]), "cudaEventRecord");
    launch(reinterpret_cast<const void*>(&publish_kernel<Site>), seats, blocks, &round);
    check_cuda(cudaEventRecord(stop, streams_[0]), "cudaEventRecord");
    finish("publish");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    if (int(round.version) == case_.calls + 1) return;
    result.call_seconds += double(milliseconds) / 1e3 / case_.timed;
    result.bytes = 0;
    for (const PublishParameter& p : made.list) result.bytes += p.bytes;
  }
};

// With lazy loading, a kernel's first launch may have to wait for those that spin.
void load_kernels() {
  cudaFuncAttributes attributes;
  const void* const kernels[] = {reinterpret_cast<const void*>(&all_gather_kernel<Site>),
                                 reinterpret_cast<const void*>(&reduce_scatter_kernel<Site>),
                                 reinterpret_cast<const void*>(&publish_kernel<Site>),
                                 reinterpret_cast<const void*>(&publish_task_kernel),
                                 reinterpret_cast<const void*>(&publish_wait_kernel),
                                 reinterpret_cast<const void*>(&prepare_kernel),
                                 reinterpret_cast<const void*>(&compare_kernel)};
  for (const void* kernel : kernels) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }
}

}  // namespace loopback
}  // namespace megamuon

int mm_loopback_run(const mm_loopback_case* wanted, mm_loopback_result* result, char* error,
                    int error_size) {
  return megamuon::guarded(error, error_size, [&] {
    *result = mm_loopback_result{};
    megamuon::loopback::load_kernels();
    if (wanted->kind == MM_PUBLISH) {
      megamuon::loopback::PublishBench(*wanted).run(*result);
    } else {
      megamuon::loopback::CallBench(*wanted).run(*result);
    }
    return 0;
  });
}
