// Segments of POSIX shared memory.
//
// Owns creation, mapping and removal of the memory that the ranks of one machine share.  Invariant:
// a segment that was created has all its pages (a page that cannot be had is an error here and
// never a SIGBUS later), and a creation that failed leaves no name behind.  Tested by
// tests/collectives/test_host_library.py and tests/distributed/test_symmetric.py.
#pragma once
#include <cstdint>
#include <string>

namespace megamuon {

// Makes the segment `name` ("/...") of `bytes` zeros and maps it.  Null, with `error` filled, if it
// cannot be had.
void* segment_create(const char* name, std::uint64_t bytes, std::string& error);

// Maps the segment `name`, which must have at least `bytes`.  Null, with `error` filled, if it
// cannot be had.
void* segment_map(const char* name, std::uint64_t bytes, std::string& error);

// Removes the name; mappings stay.  0, or the error number (ENOENT where there is no such name).
int segment_unlink(const char* name);

// 0, or the error number.  `bytes` as it was mapped.
int segment_unmap(void* address, std::uint64_t bytes);

}  // namespace megamuon
