// The GPU's kernels on a CPU: every block a thread, or several, random cases, against the oracles of
// loopback_case.h.
//
// Owns what of the device code can be run without a GPU: kernels.cuh (pipelines, seats, cursors
// from call to call, the end of a call, the publish), direct.cuh and the additions of
// device_arithmetic.cuh.  Not PTX.
//
//   g++ -std=c++17 -O2 -pthread -Icsrc csrc/tests/device_on_host.cpp -o device_on_host
//   ./device_on_host [cases [seed]]
//
// With -DMEGAMUON_HOST_WORKERS=3 -fsanitize=thread the workers of a block are threads too, and a
// data race ends the program; see device_on_host.h.
#define MEGAMUON_DEVICE_ON_HOST
#include <cstdio>
#include <cstdlib>

#include "../bindings/loopback_case.h"
#include "../fabric/loopback.cuh"
#include "../operators/kernels.cuh"

#include <memory>
#include <numeric>
#include <thread>

using namespace megamuon;

namespace {

constexpr char kGarbage = char(0xee);

// The memory of the loopback, in some cases behind a multicast address for each node.
struct HostMemory : LoopbackMemory {
  static constexpr bool kMulticast = true;
  char* multicast;
  char* multicast_pool() const { return multicast; }
  bool multicast_sums() const { return true; }
};
using HostFabric = DirectFabric<HostMemory>;

struct HostSeat {
  Seat seat;
  HostMemory memory;
};

struct Site {
  const HostSeat* seats;
  const int* blocks;  // by block: seat * kMaxBlocks + group
  Watch watch;

  const Seat& seat(int block) const { return seats[blocks[block] / kMaxBlocks].seat; }
  int group(int block) const { return blocks[block] % kMaxBlocks; }
  HostFabric fabric(int block, const Geometry& place, int, Group& group) const {
    return {seats[blocks[block] / kMaxBlocks].memory, place, group};
  }
};

// Memory whose start is a multiple of 256.
struct Memory {
  std::unique_ptr<char[]> owned;
  char* data = nullptr;
  void resize(u64 bytes, char fill) {
    owned.reset(new char[bytes + 256]);
    data = owned.get() + (256 - reinterpret_cast<u64>(owned.get()) % 256);
    std::memset(data, fill, bytes);
  }
};

class Bench {
 public:
  Bench(const mm_loopback_case& c, bool multicast)
      : case_(c), places_(c.nodes * c.columns), multicast_(multicast), random_(c.seed) {}

  // Calls on two tables and two bases in all combinations; how many elements differ.
  u64 run_calls() {
    const bool reduces = case_.kind == MM_REDUCE_SCATTER;
    for (int t = 0; t < 2; ++t) segments_.push_back(loopback::make_segments(case_, random_));
    span_ = std::max(segments_[0].span, segments_[1].span) + 256;
    u64 window = 0;
    for (const auto& made : segments_) {
      for (const u64 elements : made.windows) window = std::max(window, elements);
    }
    const u64 size = size_of(Dtype(case_.window_dtype));
    window_bytes_ = reduces ? loopback::round_up(window * size, 256) : 0;
    allocate(2 * span_ + window_bytes_, 0, 0);
    windows_.assign(places_, std::vector<char>(window_bytes_, kGarbage));
    u64 different = 0;
    for (int t = 0; t < 2; ++t) prepare(t);
    for (int call = 0; call < case_.calls; ++call) {
      const int t = call % 2;
      const u64 base = call / 2 % 2 * span_;
      different += reduces ? check_reduction(t, base, call == 0) : check_gather(t, base);
    }
    return different;
  }

  // Gathers with no barrier between the places: each fills its range, calls, and compares at once,
  // as a stream would. A place that is written to before it enters, or that is let go before all is
  // there, differs.
  u64 run_streams() {
    segments_.push_back(loopback::make_segments(case_, random_));
    span_ = segments_[0].span + 256;
    allocate(2 * span_, 0, 0);
    prepare(0);
    std::vector<std::vector<char>> expected(case_.calls, std::vector<char>(span_, kGarbage));
    for (std::vector<char>& one : expected) {
      for (const Segment& s : segments_[0].list) {
        for (u64 i = 0; i < s.length; ++i) one[s.offset + i] = char(random_() >> 17);
      }
    }
    std::vector<u64> different(places_, 0);
    std::vector<std::thread> streams;
    for (int place = 0; place < places_; ++place) {
      streams.emplace_back([&, place] {
        for (int call = 0; call < case_.calls; ++call) {
          different[place] += stream_call(place, call, expected[call]);
        }
      });
    }
    for (std::thread& stream : streams) stream.join();
    if (mailbox_.failure.ready) failure_ = describe(mailbox_.failure, "operator", "table");
    return std::accumulate(different.begin(), different.end(), u64(0));
  }

  u64 run_publish() {
    std::vector<PublishParameter> parameters;
    u64 tiles = 0, span = 0;
    for (int p = 0; p < case_.segments * places_; ++p) {
      const u64 bytes = 1 + random_() % (2 * case_.bytes / (u64(case_.segments) * places_) + 1);
      parameters.push_back({int(random_() % u64(places_)), span, bytes, tiles});
      tiles += (bytes + case_.chunk_bytes - 1) / case_.chunk_bytes;
      span = loopback::round_up(span + bytes, 256);
    }
    allocate(span, parameters.size(), tiles);
    std::vector<HostSeat> seats;
    for (int place = 0; place < places_; ++place) seats.push_back(seat_of(place, 0, TableView{}));
    std::vector<PublishState> states(parameters.size() * places_);
    std::vector<u64> tails(places_, 0);
    u64 different = 0;
    for (int version = 1; version <= case_.calls; ++version) {
      different += publish_round(parameters, seats, states, tails, u64(version), span);
    }
    return different;
  }

  // A call that one place does not make: the others must end, and one says what it waited for.
  std::string run_stuck(int absent) {
    segments_.push_back(loopback::make_segments(case_, random_));
    span_ = segments_[0].span + 256;
    allocate(2 * span_, 0, 0);
    prepare(0);
    absent_ = absent;
    launch_call(0, 0, true);
    return failure_;
  }

  const std::string& failure() const { return failure_; }

 private:
  void allocate(u64 pool_bytes, u64 parameters, u64 tiles) {
    layout_ = ControlLayout{case_.nodes, case_.columns, case_.slots, case_.chunk_bytes,
                            case_.kind == MM_REDUCE_SCATTER, case_.star_bytes > 0, tiles,
                            int(parameters)};
    control_stride_ = loopback::round_up(layout_.bytes(), 256);
    pool_stride_ = loopback::round_up(pool_bytes, 256);
    pools_.resize(places_ * pool_stride_, kGarbage);
    controls_.resize(u64(case_.pipelines) * places_ * control_stride_, 0);
    switches.clear();
    for (int node = 0; multicast_ && node < case_.nodes; ++node) {
      // No memory has addresses this high.
      Switch one{reinterpret_cast<char*>((1ull << 60) + (u64(node) << 40)), pool_stride_, {}};
      for (int k = 0; k < case_.columns; ++k) {
        one.memories.push_back(pools_.data + u64(node * case_.columns + k) * pool_stride_);
      }
      switches.push_back(one);
    }
    states_.resize(u64(places_) * case_.pipelines);
    std::memset(static_cast<void*>(states_.data()), 0, states_.size() * sizeof(SeatState));
  }

  HostSeat seat_of(int place, int pipeline, const TableView& view) {
    const Geometry geometry{case_.nodes, case_.columns, place / case_.columns,
                            place % case_.columns};
    const LoopbackMemory direct{pools_.data,
                                controls_.data + u64(pipeline) * places_ * control_stride_,
                                pool_stride_, control_stride_, case_.columns};
    const HostMemory memory{direct, multicast_ ? switches[geometry.node].address : nullptr};
    SeatState* state = &states_[place * case_.pipelines + pipeline];
    return {{geometry, layout_, view, state, place, pipeline}, memory};
  }

  void prepare(int t) {
    std::vector<HostSeat> seats;
    for (int place = 0; place < places_; ++place) {
      const GroupTable whole = loopback::table_of(case_, segments_[t], place % case_.columns);
      star_[t] = whole.star;
      for (int pipeline = 0; pipeline < case_.pipelines; ++pipeline) {
        parts_.push_back(
            std::make_unique<GroupTable>(split_table(whole, case_.pipelines, pipeline)));
        seats.push_back(seat_of(place, pipeline, parts_.back()->view()));
      }
    }
    seats_[t] = std::move(seats);
  }

  u64 stream_call(int place, int call, const std::vector<char>& expected) {
    const int groups = star_[0] ? 1 : case_.groups, pipelines = star_[0] ? 1 : case_.pipelines;
    char* range = pools_.data + place * pool_stride_ + call % 2 * span_;
    std::memset(range, kGarbage, span_);
    for (const Segment& s : segments_[0].list) {
      if (s.node * case_.columns + s.column != place) continue;
      std::memcpy(range + s.offset, &expected[s.offset], s.length);
    }
    Call arguments{};
    arguments.groups = groups, arguments.epoch = u64(call) + 1;
    arguments.base = u64(call % 2) * span_;
    arguments.arrivals_before = arguments.later_arrivals_before = u64(call) * u64(groups);
    std::vector<int> blocks;
    for (int i = 0; i < pipelines * groups; ++i) {
      blocks.push_back((place * case_.pipelines + i / groups) * kMaxBlocks + i % groups);
    }
    const Site site{seats_[0].data(), blocks.data(),
                    {&aborted_, &mailbox_, u64(case_.deadline_seconds * 1e9)}};
    std::vector<std::thread> threads;
    for (int b = 0; b < int(blocks.size()); ++b) {
      threads.emplace_back([&, b] {
        run_block<Workspace>(b, [&] { all_gather_kernel<Site>(site, arguments); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    u64 different = 0;
    for (u64 i = 0; i < span_; ++i) different += range[i] != expected[i];
    return different;
  }

  template <class Kernel>
  void launch(const std::vector<HostSeat>& seats, int pipelines, int groups, Kernel kernel) {
    std::vector<int> blocks;
    for (int place = 0; place < places_; ++place) {
      for (int pipeline = 0; pipeline < pipelines && place != absent_; ++pipeline) {
        for (int group = 0; group < groups; ++group) {
          const int stride = case_.kind == MM_PUBLISH ? 1 : case_.pipelines;
          blocks.push_back((place * stride + pipeline) * kMaxBlocks + group);
        }
      }
    }
    std::shuffle(blocks.begin(), blocks.end(), random_);
    const Site site{seats.data(), blocks.data(),
                    {&aborted_, &mailbox_, u64(case_.deadline_seconds * 1e9)}};
    std::vector<std::thread> threads;
    for (int b = 0; b < int(blocks.size()); ++b) {
      threads.emplace_back([&, b] {
        run_block<Workspace>(b, [&] { kernel(site); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (mailbox_.failure.ready) failure_ = describe(mailbox_.failure, "operator", "table");
  }

  void launch_call(int t, u64 base, bool first) {
    Call call{};
    call.groups = star_[t] ? 1 : case_.groups;
    const int pipelines = star_[t] ? 1 : case_.pipelines;
    call.epoch = ++epoch_;
    call.arrivals_before = arrivals_[0], call.later_arrivals_before = arrivals_[1];
    arrivals_[0] += u64(call.groups);
    if (!star_[t]) arrivals_[1] += u64(call.groups);
    call.base = base, call.window_base = 2 * span_, call.divisor = double(places_);
    call.first = first;
    launch(seats_[t], pipelines, call.groups, [&](const Site& site) {
      if (case_.kind == MM_ALL_GATHER) {
        all_gather_kernel<Site>(site, call);
      } else {
        reduce_scatter_kernel<Site>(site, call);
      }
    });
  }

  u64 check_gather(int t, u64 base) {
    std::vector<char> expected(span_, kGarbage);
    for (int place = 0; place < places_; ++place) {
      std::memset(pools_.data + place * pool_stride_ + base, kGarbage, span_);
    }
    for (const Segment& s : segments_[t].list) {
      for (u64 i = 0; i < s.length; ++i) expected[s.offset + i] = char(random_() >> 17);
      const int place = s.node * case_.columns + s.column;
      std::memcpy(pools_.data + place * pool_stride_ + base + s.offset, &expected[s.offset],
                  s.length);
    }
    launch_call(t, base, true);
    u64 different = 0;
    for (int place = 0; place < places_; ++place) {
      const char* found = pools_.data + place * pool_stride_ + base;
      for (u64 i = 0; i < span_; ++i) different += found[i] != expected[i];
    }
    return different;
  }

  u64 check_reduction(int t, u64 base, bool first) {
    std::vector<std::vector<char>> slots(places_, std::vector<char>(segments_[t].span));
    for (int place = 0; place < places_; ++place) {
      loopback::fill_slots(slots[place], Dtype(case_.slot_dtype), random_);
      std::memcpy(pools_.data + place * pool_stride_ + base, slots[place].data(),
                  slots[place].size());
    }
    launch_call(t, base, first);
    loopback::reduce_on_host(case_, segments_[t], slots, double(places_), first, windows_);
    u64 different = 0;
    for (int place = 0; place < places_; ++place) {
      const char* found = pools_.data + place * pool_stride_ + 2 * span_;
      different += loopback::count_differences(std::vector<char>(found, found + window_bytes_),
                                               windows_[place], size_of(Dtype(case_.window_dtype)));
    }
    return different;
  }

  u64 publish_round(const std::vector<PublishParameter>& parameters,
                    const std::vector<HostSeat>& seats, std::vector<PublishState>& states,
                    std::vector<u64>& tails, u64 version, u64 span) {
    std::vector<char> expected(span, kGarbage);
    std::vector<int> order(parameters.size());
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      order[p] = int(p);
      const PublishParameter& one = parameters[p];
      for (u64 i = 0; i < one.bytes; ++i) expected[one.offset + i] = char(random_() >> 17);
      std::memcpy(pools_.data + one.node * pool_stride_ + one.offset, &expected[one.offset],
                  one.bytes);
    }
    const Round round{0, parameters.data(), states.data(), parameters.size(), order.data(),
                      int(order.size()), version, case_.chunk_bytes};
    std::vector<int> handed = order;
    std::shuffle(handed.begin(), handed.end(), random_);
    std::thread owner([&] {
      for (const int p : handed) {
        const int node = parameters[p].node;
        publish_task_kernel(controls_.data + node * control_stride_, layout_, tails[node]++, p);
        sched_yield();
      }
    });
    launch(seats, 1, 1, [&](const Site& site) { publish_kernel<Site>(site, round); });
    owner.join();
    u64 different = 0;
    for (int place = 0; place < places_; ++place) {
      const char* found = pools_.data + place * pool_stride_;
      for (u64 i = 0; i < span; ++i) different += found[i] != expected[i];
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const char* control = controls_.data + place * control_stride_;
        different += load_acquire(control + layout_.parameter_flag(int(p))) != version;
      }
    }
    return different;
  }

  const mm_loopback_case case_;
  const int places_;
  const bool multicast_;
  int absent_ = -1;  // a place that makes no calls
  std::mt19937_64 random_;
  ControlLayout layout_{};
  u64 pool_stride_ = 0, control_stride_ = 0, span_ = 0, window_bytes_ = 0;
  u64 epoch_ = 0, arrivals_[2] = {0, 0};
  Memory pools_, controls_;
  std::vector<SeatState> states_;
  std::vector<loopback::Segments> segments_;
  std::vector<std::unique_ptr<GroupTable>> parts_;
  std::vector<HostSeat> seats_[2];
  bool star_[2] = {false, false};
  std::vector<std::vector<char>> windows_;
  uint32_t aborted_ = 0;
  Mailbox mailbox_{};
  std::string failure_;
};

mm_loopback_case random_case(std::mt19937_64& random) {
  mm_loopback_case c{};
  const auto pick = [&](int least, int most) {
    return least + int(random() % u64(most - least + 1));
  };
  c.kind = pick(0, 2);
  c.nodes = pick(1, 5);
  c.columns = c.kind == MM_PUBLISH ? 1 : pick(1, 3);
  c.groups = pick(1, c.nodes);
  c.pipelines = c.kind == MM_PUBLISH ? 1 : pick(1, std::min(3, kMaxBlocks / c.groups));
  c.slots = pick(1, 4);
  c.segments = pick(1, 3);
  c.granule = pick(0, 2) ? 16 : 1;
  c.calls = pick(2, 5);
  c.chunk_bytes = u64(256) << pick(0, 3);
  c.bytes = u64(1) << pick(8, 15);
  // Half of the time, tables about the threshold: calls with and without star path mix.
  const u64 thresholds[] = {0, 0, c.bytes / u64(c.nodes * c.columns), u64(1) << 20};
  c.star_bytes = thresholds[pick(0, 3)];
  const bool wide = pick(0, 5) == 0;
  const int narrow[] = {MM_F32, MM_BF16, MM_F16};
  c.slot_dtype = wide ? MM_F64 : narrow[pick(0, 2)];
  c.wire_dtype = wide ? MM_F64 : narrow[pick(0, 2)];
  c.window_dtype = wide ? MM_F64 : MM_F32;
  c.seed = random();
  c.deadline_seconds = 20;
  return c;
}

// Whether a switch would give the oracle's bits: one node's sum is not rounded to the wire there.
bool can_multicast(const mm_loopback_case& c) {
  if (c.kind == MM_PUBLISH || c.granule % 16 != 0) return false;
  return c.kind == MM_ALL_GATHER || c.nodes > 1 || c.slot_dtype == MM_F32;
}

}  // namespace

// Two nodes of two columns; place 3 is absent.  Whether the text of the failure says so.
static bool says_what_it_waits_for(int kind, const char* expected) {
  mm_loopback_case c{};
  c.kind = kind, c.nodes = 2, c.columns = 2, c.pipelines = 1, c.groups = 1, c.slots = 1;
  c.segments = 1, c.granule = 16, c.chunk_bytes = 256, c.bytes = 1 << 14, c.seed = 5;
  c.deadline_seconds = 0.3;
  const std::string text = Bench(c, false).run_stuck(3);
  if (text.find(expected) != std::string::npos) return true;
  std::printf("kind %d without place 3: \"%s\" does not say \"%s\"\n", kind, text.c_str(),
              expected);
  return false;
}

int main(int count, char** arguments) {
  if (!says_what_it_waits_for(MM_ALL_GATHER, "no progress, waiting for")) return 1;
  if (!says_what_it_waits_for(MM_REDUCE_SCATTER, "no progress, waiting for")) return 1;
  const int cases = count > 1 ? std::atoi(arguments[1]) : 100;
  std::mt19937_64 random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  for (int i = 0; i < cases; ++i) {
    const mm_loopback_case c = random_case(random);
    const bool multicast = can_multicast(c) && c.seed / 2 % 2 == 0;
    Bench bench(c, multicast);
    const bool streams = c.kind == MM_ALL_GATHER && c.seed % 2 == 0;
    const u64 different = c.kind == MM_PUBLISH ? bench.run_publish()
                          : streams            ? bench.run_streams()
                                               : bench.run_calls();
    if (different == 0 && bench.failure().empty()) continue;
    std::printf(
        "case %d: kind %d, %d x %d, pipelines %d, groups %d, slots %d, chunk %llu, "
        "star %llu, granule %d, dtypes %d %d %d, multicast %d, seed %llu: "
        "%llu elements differ; %s\n",
        i, c.kind, c.nodes, c.columns, c.pipelines, c.groups, c.slots,
        (unsigned long long)c.chunk_bytes, (unsigned long long)c.star_bytes, c.granule,
        c.slot_dtype, c.wire_dtype, c.window_dtype, multicast, (unsigned long long)c.seed,
        (unsigned long long)different, bench.failure().c_str());
    return 1;
  }
  std::printf("%d cases: all as the oracles say\n", cases);
  return 0;
}
