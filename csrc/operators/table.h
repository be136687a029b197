// Frozen group tables: which chunks travel on which queue of a rail.
//
// Owns the cut of a layer group's segments into rail slices and chunks.  Invariants: every rank
// derives the same list for a queue; a chunk never crosses a segment; the slices of a segment over
// all rails cover it exactly once.  Tested by tests/collectives/test_host_tables.py through the
// host library.
#pragma once
#include "../fabric/fabric.h"

#include <algorithm>
#include <string>
#include <vector>

namespace megamuon {

struct Segment {
  int node, column;    // owner
  u64 offset, length;  // from the call's base; bytes (gather) or elements (reduction)
  u64 window;          // reduction: from the call's window base, in elements
};

struct Chunk {
  u64 offset, length, window;
  int column;  // of the owner
};

// What a scheduler reads: chunks of queue q are chunks[first[q]] .. chunks[first[q + 1] - 1].
struct TableView {
  const Chunk* chunks;
  const u64* first;
  bool star;
  Dtype slot, wire, window;
  MM_HD u64 count(int queue) const { return first[queue + 1] - first[queue]; }
  MM_HD const Chunk& chunk(int queue, u64 index) const { return chunks[first[queue] + index]; }
};

struct GroupTable {
  std::string name;
  std::vector<Chunk> chunks;
  std::vector<u64> first;
  bool star = false;
  Dtype slot = Dtype::f32, wire = Dtype::f32, window = Dtype::f32;
  TableView view() const { return {chunks.data(), first.data(), star, slot, wire, window}; }
};

// The share of rail `column` in `length` units: K contiguous slices, boundaries at multiples of
// `grain`.
inline void rail_slice(u64 length, int columns, int column, u64 grain, u64* start, u64* stop) {
  const u64 grains = (length + grain - 1) / grain;
  const u64 share = (grains + columns - 1) / columns;
  *start = std::min(length, share * column * grain);
  *stop = std::min(length, share * (column + 1) * grain);
}

// Chunks of rail `geometry.column`, in the order of `segments`.  `chunk` and `grain` count the
// units of Segment::length; `star_units`: a table takes the star path if no node has more than that
// on a rail.
inline GroupTable build_table(const Geometry& geometry, const std::vector<Segment>& segments,
                              u64 chunk, u64 grain, u64 star_units, std::string name) {
  GroupTable table;
  table.name = std::move(name);
  table.first.assign(geometry.nodes + 1, 0);
  u64 most = 0;
  for (int node = 0; node < geometry.nodes; ++node) {
    u64 total = 0;
    for (const Segment& segment : segments) {
      if (segment.node != node) continue;
      // The star decision must not depend on the rail, so it counts the widest slice.
      total += (segment.length + geometry.columns - 1) / geometry.columns;
      u64 start, stop;
      rail_slice(segment.length, geometry.columns, geometry.column, grain, &start, &stop);
      for (u64 at = start; at < stop; at += chunk) {
        table.chunks.push_back({segment.offset + at, std::min(chunk, stop - at),
                                segment.window + at, segment.column});
      }
    }
    table.first[node + 1] = table.chunks.size();
    most = std::max(most, total);
  }
  table.star = geometry.nodes > 1 && geometry.nodes <= 16 && most <= star_units;
  return table;
}

}  // namespace megamuon
