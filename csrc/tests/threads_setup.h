// Engines, operators and memory of the places of a run among threads.
//
// Owns what all places share and how their operators are made, all alike but for the rail of a
// publish.  Invariant: control memory and pools are zeroed memory of this process, aligned as
// shared segments are.  Used by csrc/tests/threads.cpp.
#pragma once
#include "../bindings/host_api.h"
#include "scenario.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace megamuon {
namespace testing {

// What all places of a run share.
struct Shared {
  const Scenario& scenario;
  u64 seed;
  int aborts_at;  // the place that gives up after a while; -1: none
  u64 link_ns;
  std::vector<std::unique_ptr<char[]>> control_memory, pools;
  std::vector<void*> control, bases;
  std::vector<mm_engine*> engines;
  std::vector<std::vector<int>> operators;  // by place: its collectives', then the publish's
  std::vector<std::atomic<int>> consumed;   // publish rounds
  std::atomic<bool> gave_up{false};
  std::mutex mutex;
  std::string failure;

  Shared(const Scenario& s, u64 seed_, int aborts, u64 link)
      : scenario(s), seed(seed_), aborts_at(aborts), link_ns(link), consumed(s.places()) {}

  void fail(int place, const std::string& text) {
    std::lock_guard<std::mutex> hold(mutex);
    if (failure.empty()) failure = "place " + std::to_string(place) + ": " + text;
  }
  bool failed() {
    std::lock_guard<std::mutex> hold(mutex);
    return !failure.empty();
  }
};

inline mm_operator_config config_of(const Scenario& s, const TestCollective& c,
                                    const std::vector<int>& ranks) {
  mm_operator_config config{};
  config.kind = c.reduce ? MM_REDUCE_SCATTER : MM_ALL_GATHER;
  config.nodes = s.nodes, config.columns = s.columns, config.ranks = ranks.data();
  config.slots = s.slots, config.chunk_bytes = s.chunk_bytes, config.groups = s.groups;
  config.star_bytes = c.layout.star ? u64(1) << 40 : 0;
  return config;
}

inline mm_operator_config config_of(const Scenario& s, const TestPublish& p,
                                    const std::vector<int>& ranks) {
  mm_operator_config config{};
  config.kind = MM_PUBLISH;
  config.nodes = s.nodes, config.columns = 1, config.ranks = ranks.data();
  config.slots = 1, config.chunk_bytes = 256, config.groups = 1;
  config.parameters = int(p.parameters.size()), config.tiles = p.layout.tiles;
  config.tile_bytes = p.tile_bytes;
  return config;
}

inline std::vector<int> rail_of(const Scenario& s, int column) {
  std::vector<int> ranks;
  for (int n = 0; n < s.nodes; ++n) ranks.push_back(n * s.columns + column);
  return ranks;
}

inline std::vector<int> all_of(const Scenario& s) {
  std::vector<int> ranks;
  for (int p = 0; p < s.places(); ++p) ranks.push_back(p);
  return ranks;
}

// Tables keep their numbers, 0 and up, as they are made in the scenario's order.
inline bool make_tables(mm_engine* engine, int op, const TestCollective& c) {
  for (const TestTable& table : c.tables) {
    std::vector<int> node, column;
    std::vector<u64> offset, length, window;
    for (const Segment& g : table.segments) {
      node.push_back(g.node), column.push_back(g.column);
      offset.push_back(g.offset), length.push_back(g.length), window.push_back(g.window);
    }
    const int count = int(table.segments.size());
    const int made =
        c.reduce ? mm_reduce_scatter_table(engine, op, count, node.data(), column.data(),
                                           offset.data(), length.data(), window.data(), int(c.slot),
                                           int(c.wire), int(c.window), "test")
                 : mm_all_gather_table(engine, op, count, node.data(), column.data(), offset.data(),
                                       length.data(), "test");
    if (made < 0) return false;
  }
  return true;
}

inline std::string last_error(mm_engine* engine) {
  char text[512] = "";
  mm_engine_error(engine, text, sizeof text);
  return text;
}

inline bool make_parameters(mm_engine* engine, int op, const TestPublish& p) {
  std::vector<int> node;
  std::vector<u64> offset, bytes;
  std::vector<const char*> names;
  for (const TestParameter& q : p.parameters) {
    node.push_back(q.node), offset.push_back(q.offset), bytes.push_back(q.bytes);
    names.push_back("parameter");
  }
  return mm_publish_parameters(engine, op, int(node.size()), node.data(), offset.data(),
                               bytes.data(), names.data()) == 0;
}

// Zeroed memory for every place.
inline void add_memory(Shared& shared, u64 control_bytes) {
  const auto add = [](std::vector<std::unique_ptr<char[]>>& owned, std::vector<void*>& bases,
                      u64 bytes) {
    owned.emplace_back(new char[bytes + 256]());
    const uintptr_t base = reinterpret_cast<uintptr_t>(owned.back().get());
    bases.push_back(reinterpret_cast<void*>((base + 255) / 256 * 256));
  };
  for (int p = 0; p < shared.scenario.places(); ++p) {
    add(shared.control_memory, shared.control, control_bytes);
    add(shared.pools, shared.bases, shared.scenario.pool_bytes);
  }
}

// Operator `i` of place `p` (the publish comes last); false if it could not be made.
inline bool make_operator(Shared& shared, int p, size_t i, mm_operator_config config, u64 offset) {
  const Scenario& s = shared.scenario;
  mm_engine* engine = shared.engines[p];
  const bool is_publish = i == s.collectives.size();
  const std::vector<int> ranks = is_publish ? rail_of(s, p % s.columns) : all_of(s);
  config.ranks = ranks.data(), config.control_offset = offset;
  const int op = mm_operator_create(engine, &config, is_publish ? "publish" : "collective");
  std::vector<void*> bases;
  for (int rank : ranks) bases.push_back(shared.bases[rank]);
  shared.operators[p].push_back(op);
  if (op < 0 || mm_operator_set_pool(engine, op, bases.data()) != 0) return false;
  return is_publish ? make_parameters(engine, op, s.publish)
                    : make_tables(engine, op, s.collectives[i]);
}

// Engines and operators of all places; false with a failure.
inline bool open(Shared& shared) {
  const Scenario& s = shared.scenario;
  const std::vector<int> all = all_of(s), first_rail = rail_of(s, 0);
  std::vector<mm_operator_config> configs;
  for (const TestCollective& c : s.collectives) configs.push_back(config_of(s, c, all));
  if (!s.publish.parameters.empty()) configs.push_back(config_of(s, s.publish, first_rail));
  u64 bytes = align(mm_engine_control_bytes());
  std::vector<u64> offsets;
  for (const mm_operator_config& config : configs) {
    offsets.push_back(bytes);
    bytes += align(mm_operator_control_bytes(&config));
  }
  add_memory(shared, bytes);
  const std::vector<int64_t> pids(s.places(), int64_t(getpid()));
  shared.operators.resize(s.places());
  for (int p = 0; p < s.places(); ++p) {
    mm_engine* engine = mm_engine_create(p, s.places(), shared.control.data(), pids.data(), 60);
    shared.engines.push_back(engine);
    if (shared.link_ns) mm_engine_set_link(engine, shared.link_ns, 0);
    for (size_t i = 0; i < configs.size(); ++i) {
      if (make_operator(shared, p, i, configs[i], offsets[i])) continue;
      shared.fail(p, "an operator could not be made: " + last_error(engine));
      return false;
    }
  }
  return true;
}

}  // namespace testing
}  // namespace megamuon
