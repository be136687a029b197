// Random cases for the loopback: segments, tables, data and what must come out.
//
// Owns the oracles: a gather's is the data itself, a reduction's is csrc/fabric/arithmetic.h over
// whole segments, so neither knows of chunks, queues or pipelines.  Used by loopback_api.cu alone.
#pragma once
#include "host_api.h"
#include "loopback_api.h"

#include "../fabric/arithmetic.h"
#include "../operators/table.h"

#include <cstring>
#include <random>

namespace megamuon {
namespace loopback {

inline u64 round_up(u64 value, u64 step) { return (value + step - 1) / step * step; }

// The segments of one call and how far they reach.
struct Segments {
  std::vector<Segment> list;
  u64 span = 0;                // bytes from the call's base
  std::vector<u64> windows;    // elements of each place's window
  u64 bytes = 0;               // of all segments
};

// Every place owns `segments` of them, of random lengths (some are empty), in random order.
inline Segments make_segments(const mm_loopback_case& c, std::mt19937_64& random) {
  const int places = c.nodes * c.columns;
  const bool reduces = c.kind == MM_REDUCE_SCATTER;
  const u64 unit = reduces ? size_of(Dtype(c.slot_dtype)) : 1;
  const u64 granule = std::max<u64>(u64(c.granule), unit);
  const u64 align = granule % 16 == 0 ? 256 : granule;
  std::vector<int> owners;
  for (int p = 0; p < places; ++p) owners.insert(owners.end(), c.segments, p);
  std::shuffle(owners.begin(), owners.end(), random);
  const u64 mean = c.bytes / owners.size();
  Segments made;
  made.windows.assign(places, 0);
  for (const int owner : owners) {
    u64 length = random() % 8 == 0 ? 0 : mean / 2 + random() % (mean + 1);
    length = length / granule * granule;
    const u64 offset = round_up(made.span, align);
    made.list.push_back(
        {owner / c.columns, owner % c.columns, offset / unit, length / unit, made.windows[owner]});
    made.windows[owner] += round_up(length / unit, 8);
    made.span = offset + length;
    made.bytes += length;
  }
  made.span = round_up(made.span, 256);
  return made;
}

inline GroupTable table_of(const mm_loopback_case& c, const Segments& segments, int column) {
  const Geometry place{c.nodes, c.columns, 0, column};
  if (c.kind != MM_REDUCE_SCATTER) {
    return build_table(place, segments.list, c.chunk_bytes, 16, c.star_bytes, "loopback");
  }
  const Dtype slot = Dtype(c.slot_dtype), wire = Dtype(c.wire_dtype);
  GroupTable table =
      build_table(place, segments.list, c.chunk_bytes / std::max(size_of(slot), size_of(wire)), 16,
                  c.star_bytes / size_of(wire), "loopback");
  table.slot = slot, table.wire = wire, table.window = Dtype(c.window_dtype);
  return table;
}

// Random values that all dtypes of a case represent with differing roundings.
inline void fill_slots(std::vector<char>& bytes, Dtype dtype, std::mt19937_64& random) {
  const u64 size = size_of(dtype), count = bytes.size() / size;
  for (u64 i = 0; i < count; ++i) {
    const u64 bits = random();
    const double value = (double(bits >> 12) / double(1ull << 51) - 1) * double(1 << (bits % 7));
    char* to = bytes.data() + i * size;
    if (dtype == Dtype::f64) {
      std::memcpy(to, &value, 8);
    } else if (dtype == Dtype::f32) {
      const float narrow = float(value);
      std::memcpy(to, &narrow, 4);
    } else {
      const uint16_t narrow = dtype == Dtype::bf16 ? arithmetic::BF16::store(float(value))
                                                   : arithmetic::F16::store(float(value));
      std::memcpy(to, &narrow, 2);
    }
  }
}

// Add the reduction of one call to the owners' windows, in the order that fabric.h fixes.
inline void reduce_on_host(const mm_loopback_case& c, const Segments& segments,
                           const std::vector<std::vector<char>>& slots, double divisor, bool first,
                           std::vector<std::vector<char>>& windows) {
  const Dtype slot = Dtype(c.slot_dtype), wire = Dtype(c.wire_dtype);
  const Dtype window = Dtype(c.window_dtype);
  for (const Segment& segment : segments.list) {
    std::vector<char> partial, next;
    for (int hop = 1; hop <= c.nodes; ++hop) {
      const int node = (segment.node + hop) % c.nodes;
      std::vector<const void*> row;
      for (int k = 0; k < c.columns; ++k) {
        row.push_back(slots[node * c.columns + k].data() + segment.offset * size_of(slot));
      }
      const void* upstream[] = {partial.data()};
      const arithmetic::Operands operands{row.data(), c.columns, upstream, hop > 1 ? 1 : 0,
                                          segment.length, slot, wire, window, c.nodes > 1};
      if (hop < c.nodes) {
        next.resize(segment.length * size_of(wire));
        sum_to_wire(next.data(), operands);
        partial.swap(next);
      } else {
        char* out = windows[segment.node * c.columns + segment.column].data();
        sum_to_window(out + segment.window * size_of(window), divisor, first, operands);
      }
    }
  }
}

inline u64 count_differences(const std::vector<char>& a, const std::vector<char>& b, u64 size) {
  u64 different = 0;
  for (u64 i = 0; i + size <= a.size(); i += size) {
    different += std::memcmp(a.data() + i, b.data() + i, size) != 0;
  }
  return different;
}

}  // namespace loopback
}  // namespace megamuon
