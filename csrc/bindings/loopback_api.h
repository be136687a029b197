// C interface of the loopback library: operators on virtual places of one GPU, checked and timed.
//
// Owns what tools/gpu_checks.py passes through ctypes.  Invariants: nothing throws across it; a
// case that cannot run or fails returns -1 and leaves a text.  The library is for checks on one
// GPU; training does not load it.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int kind;                      // MM_ALL_GATHER, MM_REDUCE_SCATTER or MM_PUBLISH of host_api.h
  int nodes, columns;            // R, K; publish: K = 1
  int pipelines, groups;         // P * G blocks per place
  int slots;                     // ring slots of a queue
  int segments;                  // of each owner; publish: parameters of each node
  int slot_dtype, wire_dtype, window_dtype;  // reductions
  int granule;                   // lengths and offsets are multiples of so many bytes
  int calls;                     // checked calls, on changing tables, bases and data
  int timed;                     // further calls back to back, timed
  int shuffle;                   // blocks take their places in random order
  uint64_t chunk_bytes, star_bytes;  // chunk_bytes: of a publish, the tiles
  uint64_t bytes;                // of all segments of a call, about
  uint64_t seed;
  double deadline_seconds;
} mm_loopback_case;

typedef struct {
  uint64_t bytes;       // of the timed call's segments
  uint64_t checked;     // elements (bytes, for copies) that were compared with the oracle
  uint64_t mismatches;
  int blocks, star;     // of the launch; whether the tables took the star path
  double call_seconds;  // mean of the timed calls
  double copy_seconds;  // one cudaMemcpy of bytes * R * K, device to device
} mm_loopback_result;

int mm_loopback_run(const mm_loopback_case*, mm_loopback_result*, char* error, int error_size);

#ifdef __cplusplus
}
#endif
