// What functions of the C interfaces do at their edges: catch, copy a text, take in arguments.
//
// Owns that passage for host_api.cpp, device_api.cu, loopback_api.cu and the stand-in of the tests.
// Invariant: nothing throws across C.  Tested with the libraries that use it.
#pragma once
#include "../operators/config.h"
#include "host_api.h"

#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace megamuon {

// Run `body`; what it throws becomes -1 and a text.
template <class Body>
int guarded(char* error, int error_size, Body body) {
  try {
    return body();
  } catch (const std::exception& thrown) {
    if (error != nullptr && error_size > 0) {
      std::snprintf(error, std::size_t(error_size), "%s", thrown.what());
    }
    return -1;
  }
}

// As much of a text as there is room for; its whole length.
inline int copy_text(const std::string& from, char* text, int size) {
  if (text != nullptr && size > 0) std::snprintf(text, std::size_t(size), "%s", from.c_str());
  return int(from.size());
}

static_assert(int(MM_ALL_GATHER) == kAllGather && int(MM_PUBLISH) == kPublish &&
              int(MM_REDUCE_SCATTER) == kReduceScatter);

inline OperatorConfig config_of(const mm_operator_config& c) {
  return {c.kind,   c.nodes,      c.columns,    c.control_offset, c.slots,     c.chunk_bytes,
          c.groups, c.star_bytes, c.parameters, c.tiles,          c.tile_bytes};
}

inline bool is_dtype(int value) { return value >= MM_F32 && value <= MM_F16; }

}  // namespace megamuon
