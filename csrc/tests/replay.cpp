// Replays a rail's publish: on a virtual clock, or with real bytes between threads.
//
// Owns two drivers of the production scheduler (Publish).  Invariant: the schedule is the
// scheduler's own; the driver hands over tasks and takes times.  Every run is checked: on the clock
// each node must have received each byte of the others' once per round and hold every version, with
// real bytes every copy must equal its owner's bit for bit.  Used by tools/bench/publish_replay.py,
// tested by tests/tools/test_publish_replay.py.
//
//   replay clock < scenarios   each: nodes tile_bytes bytes_per_ns latency_ns put_ns parameter_ns
//                              outstanding rounds parameters, then owner node and bytes of each
//   replay bytes < scenarios   each: nodes tile_bytes bytes_per_second latency_ns repeats
//                              parameters, then the same
//
// One line of JSON per scenario; a breach is a line on stderr and status 1.
#include "../fabric/clocked.h"
#include "../fabric/host.h"
#include "../operators/publish.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace megamuon {
namespace {

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "replay: %s\n", text.c_str());
  std::_Exit(1);  // other threads may be running
}

template <class T>
T field(const char* name) {
  double value;
  if (std::scanf("%lf", &value) != 1) fail(std::string("no number where ") + name + " is due");
  return T(value);
}

// The frozen list of a rail and what follows from it.
struct Rail {
  std::vector<PublishParameter> parameters;
  std::vector<int> order;
  ControlLayout layout{};
  u64 tile_bytes = 0, pool_bytes = 0, total = 0;
  std::vector<u64> owned;  // bytes by node

  Rail(int nodes, u64 tile, int count) : tile_bytes(tile), owned(nodes, 0) {
    if (nodes < 1 || tile == 0 || count < 1) {
      fail("nodes, tile_bytes and parameters must be positive");
    }
    u64 tiles = 0;
    for (int p = 0; p < count; ++p) {
      const int node = field<int>("a node");
      const u64 bytes = field<u64>("bytes");
      if (node < 0 || node >= nodes) fail("parameter " + std::to_string(p) + " has no such node");
      parameters.push_back({node, pool_bytes, bytes, tiles});
      order.push_back(p);
      pool_bytes += (bytes + 255) / 256 * 256;
      tiles += (bytes + tile - 1) / tile;
      total += bytes, owned[node] += bytes;
    }
    layout = {nodes, 1, 1, 0, false, false, tiles, count};
  }

  u64 tiles(int p) const { return (parameters[p].bytes + tile_bytes - 1) / tile_bytes; }
};

// --- on a clock ----------------------------------------------------------------------------------

struct ClockedNode {
  ClockedFabric fabric;
  Geometry place;
  std::vector<PublishState> states;
  std::vector<PublishSource> sources;
  Publish<ClockedFabric> publish;
  u64 tail = 0;

  ClockedNode(ClockedRail& world, const Rail& rail, int node)
      : fabric(world, node),
        place{rail.layout.nodes, 1, node, 0},
        states(rail.parameters.size()),
        sources(rail.layout.nodes),
        publish(fabric, rail.layout, place, rail.parameters.data(), states.data(), sources.data(),
                rail.tile_bytes) {}

  void settle() {
    while (publish.step()) {
    }
  }
};

void check_round(ClockedRail& world, const Rail& rail, u64 version) {
  for (int node = 0; node < rail.layout.nodes; ++node) {
    if (world.received(node) != version * (rail.total - rail.owned[node])) {
      fail("node " + std::to_string(node) + " received " + std::to_string(world.received(node)) +
           " bytes after round " + std::to_string(version));
    }
    for (int p : rail.order) {
      if (world.word(node, rail.layout.parameter_flag(p)) != version) {
        fail("node " + std::to_string(node) + " lacks parameter " + std::to_string(p));
      }
    }
  }
}

// All tasks of a round are handed over at its first instant, each owner's in the order of the list.
u64 clocked_round(ClockedRail& world, const Rail& rail,
                  std::vector<std::unique_ptr<ClockedNode>>& nodes, u64 version) {
  const u64 start = world.now();
  for (auto& node : nodes) {
    for (int p : rail.order) {
      if (rail.parameters[p].node != node->place.node) continue;
      const u64 slot = rail.layout.task(node->tail++ % u64(rail.layout.parameters));
      world.word(node->place.node, slot) = u64(p);
    }
    world.word(node->place.node, rail.layout.task_tail()) = node->tail;
    node->publish.begin(rail.order.data(), int(rail.order.size()), version);
    node->settle();
  }
  for (;;) {
    const std::vector<int>& touched = world.advance();
    if (touched.empty()) break;
    for (int node : touched) nodes[node]->settle();
  }
  for (auto& node : nodes) {
    if (!node->publish.finished()) {
      fail("node " + std::to_string(node->place.node) + " waits for parameter " +
           std::to_string(node->publish.open_parameter()) + " with nothing under way");
    }
  }
  check_round(world, rail, version);
  return world.now() - start;
}

void run_clocked(int nodes) {
  const u64 tile = field<u64>("tile_bytes");
  ClockedLink link;
  link.bytes_per_ns = field<double>("bytes_per_ns");
  link.latency_ns = field<u64>("latency_ns");
  link.put_ns = field<u64>("put_ns");
  const u64 parameter_ns = field<u64>("parameter_ns");
  link.outstanding = field<u64>("outstanding");
  const int rounds = field<int>("rounds");
  const Rail rail(nodes, tile, field<int>("parameters"));
  if (link.bytes_per_ns <= 0 || link.outstanding == 0) {
    fail("bytes_per_ns and outstanding must be positive");
  }
  std::vector<u64> word_ns(rail.layout.bytes() / 8, 0);
  for (int p : rail.order) {
    if (rail.tiles(p) == 0) continue;
    word_ns[rail.layout.tile_flag(rail.parameters[p].first_tile) / 8] = parameter_ns;
  }
  ClockedRail world(nodes, rail.layout.bytes(), link, std::move(word_ns));
  std::vector<std::unique_ptr<ClockedNode>> places;
  for (int node = 0; node < nodes; ++node) {
    places.push_back(std::make_unique<ClockedNode>(world, rail, node));
  }
  std::string times;
  for (int round = 1; round <= rounds; ++round) {
    const u64 time = clocked_round(world, rail, places, u64(round));
    times += (round > 1 ? "," : "") + std::to_string(time);
  }
  u64 busiest = 0;
  for (int node = 0; node < nodes; ++node) busiest = std::max(busiest, world.busy(node));
  std::printf("{\"rounds_ns\":[%s],\"busiest_link_ns\":%llu}\n", times.c_str(),
              static_cast<unsigned long long>(busiest / u64(rounds > 0 ? rounds : 1)));
}

// --- with real bytes -----------------------------------------------------------------------------

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const u64 mine = round_;
    if (++arrived_ == count_) {
      arrived_ = 0, ++round_;
      all_.notify_all();
      return;
    }
    all_.wait(lock, [&] { return round_ != mine; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int count_, arrived_ = 0;
  u64 round_ = 0;
};

struct Freed {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Freed>;

Memory zeros(u64 bytes) {
  const u64 size = (bytes + 255) / 256 * 256;
  char* memory = static_cast<char*>(std::aligned_alloc(256, size ? size : 256));
  if (memory == nullptr) fail("no memory for " + std::to_string(bytes) + " bytes");
  std::memset(memory, 0, size);  // its pages exist before anything is timed
  return Memory(memory);
}

// Eight bytes that no other parameter, place or version shares except by chance.
u64 word_of(u64 parameter, u64 version, u64 index) {
  u64 x = (parameter * 0x9e3779b97f4a7c15ull) ^ (version * 0xbf58476d1ce4e5b9ull) ^ index;
  x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
  return x;
}

struct Machine {
  const Rail& rail;
  std::vector<Memory> control, pools;
  std::vector<ControlHeader> headers;
  Barrier barrier;
  std::vector<u64> start, stop;  // of the timed section, by node

  Machine(const Rail& the_rail, int nodes)
      : rail(the_rail), headers(nodes), barrier(nodes), start(nodes, 0), stop(nodes, 0) {
    for (int node = 0; node < nodes; ++node) {
      control.push_back(zeros(rail.layout.bytes()));
      pools.push_back(zeros(rail.pool_bytes));
    }
  }

  std::vector<char*> bases(const std::vector<Memory>& of) const {
    std::vector<char*> found;
    for (const Memory& memory : of) found.push_back(memory.get());
    return found;
  }

  std::vector<ControlHeader*> header_pointers() {
    std::vector<ControlHeader*> found;
    for (ControlHeader& header : headers) found.push_back(&header);
    return found;
  }

  u64 elapsed_ns() const {
    return *std::max_element(stop.begin(), stop.end()) -
           *std::min_element(start.begin(), start.end());
  }
};

// A node of the rail: one thread.
class HostNode {
 public:
  HostNode(Machine& machine, int node, const Link& link)
      : machine_(machine),
        rail_(machine.rail),
        node_(node),
        place_{rail_.layout.nodes, 1, node, 0},
        fabric_(place_, machine.bases(machine.control), machine.header_pointers()),
        states_(rail_.parameters.size()),
        sources_(machine.rail.layout.nodes),
        publish_(fabric_, rail_.layout, place_, rail_.parameters.data(), states_.data(),
                 sources_.data(), rail_.tile_bytes) {
    fabric_.set_pool(machine.bases(machine.pools));
    fabric_.set_link(link);
  }

  // One version of everything, in rounds of `each` parameters; then every copy is compared.
  void version(u64 number, int each) {
    for (int p : rail_.order) write(p, number);
    machine_.barrier.wait();
    machine_.start[node_] = now_ns();
    const int count = int(rail_.order.size());
    for (int first = 0; first < count; first += each) {
      round(first, std::min(each, count - first), number);
    }
    machine_.stop[node_] = now_ns();
    machine_.barrier.wait();
    for (int p : rail_.order) compare(p, number);
    machine_.barrier.wait();
  }

 private:
  void round(int first, int count, u64 number) {
    publish_.begin(&rail_.order[first], count, number);
    for (int i = first; i < first + count; ++i) {
      const int p = rail_.order[i];
      if (rail_.parameters[p].node != node_) continue;
      fabric_.store_own(rail_.layout.task(tail_ % u64(rail_.layout.parameters)), u64(p));
      fabric_.store_own(rail_.layout.task_tail(), ++tail_);
    }
    ControlHeader& header = machine_.headers[node_];
    int idle = 0;
    for (;;) {
      const uint32_t seen = header.bell.load(std::memory_order_seq_cst);
      const bool moved = publish_.step() | fabric_.poll();
      fabric_.flush();
      if (publish_.finished() && !fabric_.holds_back()) return;
      if (moved) {
        idle = 0;
      } else if (fabric_.holds_back() || ++idle < 20) {
        sched_yield();
      } else {
        sleep_until_rung(&header, seen, 1000000);
      }
    }
  }

  void write(int p, u64 number) {
    const PublishParameter& parameter = rail_.parameters[p];
    if (parameter.node != node_) return;
    char* at = machine_.pools[node_].get() + parameter.offset;
    for (u64 start = 0; start < parameter.bytes; start += 8) {
      const u64 word = word_of(u64(p), number, start);
      std::memcpy(at + start, &word, std::min<u64>(8, parameter.bytes - start));
    }
  }

  void compare(int p, u64 number) {
    const PublishParameter& parameter = rail_.parameters[p];
    const char* own = machine_.pools[node_].get() + parameter.offset;
    bool same = true;
    if (parameter.node != node_) {
      const char* source = machine_.pools[parameter.node].get() + parameter.offset;
      same = std::memcmp(own, source, parameter.bytes) == 0;
    } else {  // what the others compare with has stayed what it was
      for (u64 start = 0; start < parameter.bytes; start += 8) {
        const u64 word = word_of(u64(p), number, start);
        same &= std::memcmp(own + start, &word, std::min<u64>(8, parameter.bytes - start)) == 0;
      }
    }
    if (!same) {
      fail("parameter " + std::to_string(p) + " of version " + std::to_string(number) +
           " differs on node " + std::to_string(node_));
    }
  }

  Machine& machine_;
  const Rail& rail_;
  const int node_;
  const Geometry place_;
  HostFabric fabric_;
  std::vector<PublishState> states_;
  std::vector<PublishSource> sources_;
  Publish<HostFabric> publish_;
  u64 tail_ = 0;
};

void run_bytes(int nodes) {
  const u64 tile = field<u64>("tile_bytes");
  Link link;
  link.bytes_per_second = field<double>("bytes_per_second");
  link.latency_ns = field<u64>("latency_ns");
  const int repeats = field<int>("repeats");
  const Rail rail(nodes, tile, field<int>("parameters"));
  Machine machine(rail, nodes);
  std::vector<u64> published, one_by_one;
  std::vector<std::thread> threads;
  for (int node = 0; node < nodes; ++node) {
    threads.emplace_back([&, node] {
      HostNode self(machine, node, link);
      machine.barrier.wait();
      u64 number = 0;
      for (int i = 0; i < repeats; ++i) {
        self.version(++number, int(rail.order.size()));
        if (node == 0) published.push_back(machine.elapsed_ns());
        machine.barrier.wait();
        self.version(++number, 1);
        if (node == 0) one_by_one.push_back(machine.elapsed_ns());
        machine.barrier.wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto list = [](const std::vector<u64>& values) {
    std::string text;
    for (u64 value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
    return "[" + text + "]";
  };
  u64 copied = 0;
  for (u64 owned : rail.owned) copied += rail.total - owned;
  std::printf("{\"publish_ns\":%s,\"per_parameter_ns\":%s,\"compared_bytes\":%llu}\n",
              list(published).c_str(), list(one_by_one).c_str(),
              static_cast<unsigned long long>(copied * 2 * u64(repeats)));
}

}  // namespace
}  // namespace megamuon

int main(int argc, char** argv) {
  const std::string mode = argc == 2 ? argv[1] : "";
  if (mode != "clock" && mode != "bytes") megamuon::fail("usage: replay clock|bytes < scenarios");
  double nodes;
  while (std::scanf("%lf", &nodes) == 1) {
    if (mode == "clock") {
      megamuon::run_clocked(int(nodes));
    } else {
      megamuon::run_bytes(int(nodes));
    }
    std::fflush(stdout);
  }
  return 0;
}
