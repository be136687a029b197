// What functions of the C interfaces do at their edges: catch, copy a text, check a dtype.
//
// Owns that passage for host_api.cpp, device_api.cu, loopback_api.cu and the stand-in of the tests.
// Invariant: nothing throws across C.  Tested with the libraries that use it.
#pragma once
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

inline bool is_dtype(int value) { return value >= MM_F32 && value <= MM_F16; }

}  // namespace megamuon
