// What all ranks say alike of an operator, and what follows from it: control memory and tables.
//
// Owns the passage from a configuration to a layout and to the cut of a table, and what a GPU
// refuses of either, for the engine, the device library and its stand-in.  Tested with them.
#pragma once
#include "table.h"

#include <stdexcept>

namespace megamuon {

enum OperatorKind : int { kAllGather = 0, kReduceScatter = 1, kPublish = 2 };

// See mm_operator_config of bindings/host_api.h.
struct OperatorConfig {
  int kind = kAllGather;
  int nodes = 0, columns = 0;
  u64 control_offset = 0;
  int slots = 0;
  u64 chunk_bytes = 0;
  int groups = 1;
  u64 star_bytes = 0;
  int parameters = 0;
  u64 tiles = 0, tile_bytes = 0;
};

inline ControlLayout layout_of(const OperatorConfig& config) {
  const bool publishes = config.kind == kPublish;
  return {config.nodes,
          config.columns,
          config.slots,
          config.chunk_bytes,
          /*outboxes=*/config.kind == kReduceScatter,
          /*star=*/config.star_bytes > 0,
          publishes ? config.tiles : 0,
          publishes ? config.parameters : 0};
}

// Bytes of a layout, up to where the next may begin.
inline u64 control_stride(const ControlLayout& layout) { return (layout.bytes() + 255) / 256 * 256; }

// Pipelines and groups of an operator on a GPU; see [Note: pipelines] in kernels.cuh.
struct Shape {
  int pipelines, groups;
};

inline Shape shape_of(int nodes, int blocks) {
  const int groups = std::max(1, std::min({nodes, blocks, kMaxBlocks}));
  return {std::max(1, std::min(blocks, kMaxBlocks) / groups), groups};
}

// Control memory of an operator on a GPU, where at most so many blocks work on it.
inline u64 device_control_bytes(const OperatorConfig& config, int blocks) {
  const int pipelines = config.kind == kPublish ? 1 : shape_of(config.nodes, blocks).pipelines;
  return control_stride(layout_of(config)) * u64(pipelines);
}

// A table of an operator: segments count bytes for a gather, elements for a reduction.
inline GroupTable operator_table(const OperatorConfig& config, const Geometry& place,
                                 const std::vector<Segment>& segments, Dtype slot, Dtype wire,
                                 Dtype window, std::string name) {
  const bool gathers = config.kind == kAllGather;
  // 16 elements are at least 16 bytes of any dtype, and a chunk fits a slot in the wire's.
  const u64 widest = gathers ? 1 : std::max(size_of(slot), size_of(wire));
  const u64 star = config.star_bytes / (gathers ? 1 : size_of(wire));
  GroupTable table =
      build_table(place, segments, config.chunk_bytes / widest, 16, star, std::move(name));
  table.slot = slot, table.wire = wire, table.window = window;
  return table;
}

// Throws what is wrong with the next operator of a fabric that was made for `operators` of them.
inline void check_device_config(const OperatorConfig& config, const Geometry& place, int number,
                                int operators, const std::string& name) {
  const auto refuse = [&](const std::string& text) {
    throw std::runtime_error("operator " + name + ": " + text);
  };
  if (config.kind < kAllGather || config.kind > kPublish) refuse("kind is not an operator");
  if (number >= operators) {
    refuse("the fabric was made for " + std::to_string(operators) + " operators");
  }
  if (config.nodes != place.nodes || config.columns != place.columns) {
    refuse("nodes and columns must be the fabric's");
  }
  if (place.nodes > kMaxNodes) refuse("more than " + std::to_string(kMaxNodes) + " nodes");
  if (config.control_offset % 256 != 0) refuse("control_offset must be a multiple of 256");
  if (config.chunk_bytes == 0 || config.chunk_bytes % 256 != 0 ||
      config.chunk_bytes > (1 << 20)) {
    refuse("chunk_bytes must be a multiple of 256, at most 1 MiB");
  }
  if (config.slots < 1 || config.slots > 64) refuse("slots must be 1 .. 64");
  if (config.kind == kPublish && (config.parameters < 1 || config.tile_bytes == 0)) {
    refuse("a publish needs parameters and tile_bytes");
  }
}

// Throws where control words reach beyond the window of a fabric.
inline void check_control_end(u64 end, u64 bytes, const std::string& name) {
  if (end <= bytes) return;
  throw std::runtime_error(name + ": control words end at " + std::to_string(end) +
                           ", and the control window has " + std::to_string(bytes) + " bytes");
}

// Throws what is wrong with segments on a GPU.  `unit` and `window`: bytes of a length and of a
// place in the window.
inline void check_device_segments(const std::vector<Segment>& segments, const Geometry& place,
                                  u64 unit, u64 window, bool multimem, const std::string& table) {
  for (std::size_t j = 0; j < segments.size(); ++j) {
    const Segment& s = segments[j];
    const std::string which = table + ": segment " + std::to_string(j);
    if (s.node < 0 || s.node >= place.nodes || s.column < 0 || s.column >= place.columns) {
      throw std::runtime_error(which + ": owner (" + std::to_string(s.node) + ", " +
                               std::to_string(s.column) + ") is not in the grid");
    }
    if (!multimem) continue;
    if (s.offset * unit % 16 != 0 || s.length * unit % 16 != 0 || s.window * window % 16 != 0) {
      throw std::runtime_error(which + ": offset " + std::to_string(s.offset * unit) + " and " +
                               std::to_string(s.length * unit) +
                               " bytes must be multiples of 16 for multimem");
    }
  }
}

}  // namespace megamuon
