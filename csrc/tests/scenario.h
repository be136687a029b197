// What a test of the operators runs and what must come out: shapes, tables, contents, exact sums.
//
// Owns the random scenario and the oracle, shared by the simulation (chaos.cpp) and the threads
// (threads.cpp). Invariants: a scenario and every content is a function of its seed; the oracle
// adds one element at a time in double, rounded to each dtype by a function of its own, and knows
// nothing of chunks, queues or timing.
#pragma once
#include "../operators/group.h"
#include "../operators/table.h"

#include "../fabric/simulated.h"

#include <math.h>

#include <string>
#include <vector>

namespace megamuon {
namespace testing {

inline u64 mix(u64 a, u64 b) { return Random(a * 0x9e3779b97f4a7c15ull + b).next(); }

// --- contents ------------------------------------------------------------------------------------

inline void fill_bytes(uint8_t* to, u64 bytes, u64 key) {
  Random random(key);
  u64 i = 0;
  for (; i + 8 <= bytes; i += 8) {
    const u64 word = random.next();
    memcpy(to + i, &word, 8);
  }
  const u64 word = random.next();
  memcpy(to + i, &word, bytes - i);
}

inline bool same_bytes(const uint8_t* at, u64 bytes, u64 key) {
  Random random(key);
  u64 different = 0, found;
  u64 i = 0;
  for (; i + 8 <= bytes; i += 8) {
    memcpy(&found, at + i, 8);
    different |= found ^ random.next();
  }
  const u64 word = random.next();
  return different == 0 && memcmp(at + i, &word, bytes - i) == 0;
}

// Nearest value of a dtype, ties to even.
inline double rounded_to(Dtype dtype, double value) {
  if (dtype == Dtype::f64 || value == 0) return value;
  if (dtype == Dtype::f32) return double(float(value));
  const int precision = dtype == Dtype::bf16 ? 8 : 11;
  const int smallest = dtype == Dtype::bf16 ? -133 : -24;
  int exponent;
  frexp(value, &exponent);
  const int quantum = exponent - precision > smallest ? exponent - precision : smallest;
  return ldexp(nearbyint(ldexp(value, -quantum)), quantum);
}

// One gradient.  Integers in -4 .. 3 (exact in every dtype, as are their sums), or values in (-1,
// 1).
inline double gradient(u64 key, int place, u64 element, Dtype slot, bool integers) {
  const u64 hash = mix(key + u64(place) * 0x100000001b3ull, integers ? element / 16 : element);
  if (integers) return double(int(hash >> (element % 16 * 4) & 7) - 4);
  return rounded_to(slot, double(int64_t(hash) >> 11) * 0x1p-52);
}

inline void store_value(uint8_t* to, Dtype dtype, double value) {
  if (dtype == Dtype::f64) {
    memcpy(to, &value, 8);
    return;
  }
  const float narrow = float(value);
  if (dtype == Dtype::f32) {
    memcpy(to, &narrow, 4);
    return;
  }
  const uint16_t half = dtype == Dtype::bf16 ? arithmetic::BF16::store(narrow)
                                             : arithmetic::F16::store(narrow);
  memcpy(to, &half, 2);
}

inline double load_value(const uint8_t* from, Dtype dtype) {
  if (dtype == Dtype::f64) {
    double value;
    memcpy(&value, from, 8);
    return value;
  }
  float value;
  memcpy(&value, from, 4);
  return value;
}

// --- scenario ------------------------------------------------------------------------------------

struct TestTable {
  std::vector<Segment> segments;
  std::vector<GroupTable> rails;  // by column
  u64 extent = 0;                 // bytes from the call's base
  u64 bytes = 0;                  // in segments
  u64 window_extent = 0;          // reduction: elements
};

struct TestCall {
  int table;
  u64 base;
  bool first;
  double divisor;
};

struct TestCollective {
  bool reduce = false, integers = true;
  Dtype slot = Dtype::f32, wire = Dtype::f32, window = Dtype::f32;
  ControlLayout layout{};
  std::vector<TestTable> tables;
  std::vector<TestCall> calls;
  u64 window_base = 0;
  u64 window_elements = 0;
  u64 key = 0;

  u64 call_key(int call) const { return mix(key, u64(call)); }
};

struct TestParameter {
  int node;
  u64 offset, bytes, first_tile;
};

struct TestRound {
  std::vector<int> order;
  u64 version;
};

struct TestPublish {
  ControlLayout layout{};
  u64 tile_bytes = 0, key = 0;
  std::vector<TestParameter> parameters;
  std::vector<TestRound> rounds;

  u64 content_key(int column, int parameter, u64 version) const {
    return mix(mix(key, u64(column) * 1000 + u64(parameter)), version);
  }
};

struct Scenario {
  int nodes, columns, slots, groups;
  u64 chunk_bytes, pool_bytes = 0;
  std::vector<TestCollective> collectives;
  TestPublish publish;  // runs on every rail if it has parameters

  int places() const { return nodes * columns; }
  std::string text() const {
    std::string out = "R=" + std::to_string(nodes) + " K=" + std::to_string(columns) +
                      " S=" + std::to_string(slots) + " G=" + std::to_string(groups) +
                      " chunk=" + std::to_string(chunk_bytes);
    for (const TestCollective& c : collectives) {
      out += c.reduce ? " reduce(" : " gather(";
      for (const TestCall& call : c.calls) {
        const TestTable& table = c.tables[call.table];
        out += (table.rails[0].star ? "star " : "ring ") + std::to_string(table.bytes) + "B;";
      }
      out += c.integers ? ")" : "fractions)";
    }
    if (!publish.parameters.empty()) {
      out += " publish(" + std::to_string(publish.parameters.size()) + "x" +
             std::to_string(publish.rounds.size()) + ")";
    }
    return out;
  }
};

inline u64 align(u64 bytes) { return (bytes + 255) / 256 * 256; }

// Limits of a scenario; the simulation takes small ones to be fast.
struct Limits {
  int nodes = 8, columns = 4, slots = 8;
  u64 bytes = 10 << 10;  // of a call, over all places of the pool
  u64 smallest_chunk = 16;
  bool large_chunks = true;
  int slots_fixed = 0;
};

inline TestTable random_table(Random& random, const Scenario& s, const TestCollective& c,
                              u64 bytes) {
  TestTable table;
  const u64 unit = c.reduce ? size_of(c.slot) : 1;
  const u64 most = bytes / unit / u64(s.places()) + 1;
  const int empty = random.between(0, 60), per_owner = random.between(1, 3);
  std::vector<u64> windows(s.places(), 0);
  u64 offset = 0;  // units
  for (int i = 0; i < s.places() * per_owner; ++i) {
    if (random.chance(empty)) continue;
    const int owner = random.between(0, s.places() - 1);
    u64 length = random.chance(10) ? 0 : 1 + random.below(2 * most / per_owner + 1);
    if (random.chance(50)) length = (length + 7) / 8 * 8;
    Segment segment{owner / s.columns, owner % s.columns, offset, length, windows[owner]};
    table.segments.push_back(segment);
    table.bytes += length * unit;
    windows[owner] += length;
    if (windows[owner] > table.window_extent) table.window_extent = windows[owner];
    offset = align((offset + length) * unit) / unit;
  }
  table.extent = offset * unit;
  const u64 chunk = c.reduce ? s.chunk_bytes / size_of(c.wire) : s.chunk_bytes;
  const u64 grain = 16 / (c.reduce ? size_of(c.wire) : 1);
  const u64 star = c.layout.star && random.chance(50) ? ~u64(0) >> 1 : 0;
  for (int k = 0; k < s.columns; ++k) {
    const Geometry geometry{s.nodes, s.columns, 0, k};
    table.rails.push_back(build_table(geometry, table.segments, chunk, grain, star, "table"));
    GroupTable& rail = table.rails.back();
    rail.slot = c.slot, rail.wire = c.wire, rail.window = c.window;
  }
  return table;
}

inline void random_dtypes(Random& random, TestCollective& c) {
  const Dtype narrow[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  if (random.chance(15)) {
    c.slot = c.wire = c.window = Dtype::f64;
    return;
  }
  c.slot = narrow[random.below(3)];
  c.wire = narrow[random.below(3)];
}

inline void add_collective(Random& random, Scenario& s, bool reduce, const Limits& limits) {
  s.collectives.emplace_back();
  TestCollective& c = s.collectives.back();
  c.reduce = reduce, c.key = random.next();
  if (reduce) {
    random_dtypes(random, c);
    c.integers = random.chance(s.places() > 8 ? 95 : 70);
  }
  c.layout.nodes = s.nodes, c.layout.columns = s.columns, c.layout.slots = s.slots;
  c.layout.chunk_bytes = s.chunk_bytes, c.layout.outboxes = reduce;
  c.layout.star = s.nodes > 1 && random.chance(40);
  const int tables = random.between(1, 2);
  u64 extent = 0;
  for (int t = 0; t < tables; ++t) {
    c.tables.push_back(random_table(random, s, c, limits.bytes / u64(s.places())));
    if (c.tables.back().extent > extent) extent = c.tables.back().extent;
    if (c.tables.back().window_extent > c.window_elements) {
      c.window_elements = c.tables.back().window_extent;
    }
  }
  const u64 first = s.pool_bytes, second = first + (random.chance(50) ? align(extent) : 0);
  s.pool_bytes = second + align(extent);
  if (reduce) {
    c.window_base = s.pool_bytes;
    s.pool_bytes += align(c.window_elements * size_of(c.window));
  }
  const int calls = random.between(1, s.places() > 8 ? 3 : 4);
  for (int i = 0; i < calls; ++i) {
    const int table = random.between(0, tables - 1);
    // Sums add up within one table's window.
    const bool same = i > 0 && table == c.calls.back().table;
    c.calls.push_back({table, random.chance(50) ? first : second, !same || random.chance(40),
                       double(random.between(1, 7))});
  }
}

inline void add_publish(Random& random, Scenario& s, const Limits& limits) {
  TestPublish& p = s.publish;
  p.key = random.next();
  p.tile_bytes = u64(16) << random.between(0, 6);
  const int parameters = random.between(1, random.chance(10) ? 40 : 8);
  const u64 most = limits.bytes / u64(s.places()) / u64(parameters) + 1;
  u64 tiles = 0;
  for (int i = 0; i < parameters; ++i) {
    const u64 bytes = 1 + random.below(2 * most);
    p.parameters.push_back({random.between(0, s.nodes - 1), s.pool_bytes, bytes, tiles});
    s.pool_bytes += align(bytes);
    tiles += (bytes + p.tile_bytes - 1) / p.tile_bytes;
  }
  p.layout.nodes = s.nodes, p.layout.columns = 1, p.layout.slots = s.slots;
  p.layout.chunk_bytes = s.chunk_bytes, p.layout.tiles = tiles;
  p.layout.parameters = parameters;
  u64 version = 0;
  const int rounds = random.between(1, 4);
  for (int i = 0; i < rounds; ++i) {
    TestRound round;
    version += u64(random.between(1, 3));
    round.version = version;
    const int keep = random.chance(70) ? 100 : 60;
    for (int q = 0; q < parameters; ++q) {
      if (random.chance(keep)) round.order.push_back(q);
    }
    p.rounds.push_back(round);
  }
}

inline Scenario random_scenario(Random& random, const Limits& limits) {
  Scenario s{};
  // Small shapes more often: they are faster and show most breaches.
  const int a = random.between(1, limits.nodes), b = random.between(1, limits.nodes);
  const int c = random.between(1, limits.columns), d = random.between(1, limits.columns);
  s.nodes = a < b ? a : b;
  s.columns = c < d ? c : d;
  if (s.nodes == 1 && random.chance(70)) s.nodes = random.between(2, 3);
  s.slots = limits.slots_fixed ? limits.slots_fixed : random.between(1, limits.slots);
  s.groups = random.between(1, s.nodes);
  const u64 sizes[] = {16, 32, 64, 64, 256, 256, 1024};
  s.chunk_bytes = sizes[random.below(7)];
  Limits scaled = limits;
  if (s.chunk_bytes < limits.smallest_chunk) s.chunk_bytes = limits.smallest_chunk;
  if (s.chunk_bytes < 64) scaled.bytes /= 2;  // chunks cost time, bytes hardly do
  if (limits.large_chunks && random.chance(1)) {
    s.nodes = random.between(1, 3), s.columns = random.between(1, 2);
    s.groups = random.between(1, s.nodes), s.slots = random.between(1, 2);
    if (limits.slots_fixed) s.slots = limits.slots_fixed;
    s.chunk_bytes = random.chance(50) ? 4 << 10 : 64 << 10;
    scaled.bytes *= 16;
  }
  const int what = random.between(1, 7);
  if (what & 1) add_collective(random, s, false, scaled);
  if (what & 2) add_collective(random, s, true, scaled);
  if (what & 4) add_publish(random, s, scaled);
  if (what == 1 && random.chance(30)) add_collective(random, s, false, scaled);
  if (s.pool_bytes == 0) s.pool_bytes = 256;
  return s;
}

// --- oracle --------------------------------------------------------------------------------------

// What `call` adds to the window for element `element` of the call's gradients, owned on node
// `owner`.
inline double expected_mean(const Scenario& s, const TestCollective& c, int call, u64 element,
                            int owner) {
  const u64 key = c.call_key(call);
  const auto add = [&](double a, double b) { return rounded_to(c.window, a + b); };
  double chain = 0;
  for (int hop = 1; hop <= s.nodes; ++hop) {
    const int node = (owner + hop) % s.nodes;
    double row = 0;
    for (int k = 0; k < s.columns; ++k) {
      const double slot = gradient(key, node * s.columns + k, element, c.slot, c.integers);
      const double term = c.integers ? slot : rounded_to(c.wire, slot);
      row = k == 0 ? term : c.integers ? row + term : add(row, term);
    }
    if (c.integers) {
      chain += row;
      continue;
    }
    if (s.nodes > 1) row = rounded_to(c.wire, row);
    chain = hop == 1 ? row : add(chain, row);
    if (hop < s.nodes) chain = rounded_to(c.wire, chain);
  }
  return rounded_to(c.window, chain / rounded_to(c.window, c.calls[call].divisor));
}

}  // namespace testing
}  // namespace megamuon
