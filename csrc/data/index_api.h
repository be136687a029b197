// The index helpers of the data room, as C functions: what NumPy has no single pass for.
//
// Owns the interface between megamuon/data/native.py and csrc/data/index.cpp.  Invariants: every
// function gives the bits of its NumPy twin in megamuon/data; nothing is allocated beyond a few
// numbers per part, nothing is thrown, no state is kept between calls.  A result below 0 means that
// an argument was refused and nothing is to be read.  Tested by tests/data_room/test_native.py.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Number of this interface; a library with another one is not used.
int mm_index_version(void);

// Draw i goes to the first part with the largest weights[part] * max(i, 1) - drawn[part], of those
// that have drawn fewer than limits[part] (limits may be null: no limit).  datasets[i] is the part
// and samples[i] how often it had been drawn.  The sum of the limits must be at least `size`.
int mm_blend_indices(const double* weights, const int64_t* limits, int64_t parts, int64_t size,
                     int16_t* datasets, int64_t* samples);

// Rows (document position, offset) at which samples of `length` items begin: `samples` + 1 rows of
// two numbers.  `documents` are `count` positions in `lengths`; `wide_documents` and `wide_rows` say
// that they, and the rows, are int64 and not int32.  A sample draws `extra` items more than it
// advances; `clamp`: the last one may be cut short by the end of the documents.
int mm_sample_index(const int32_t* lengths, const void* documents, int wide_documents,
                    int64_t count, int64_t length, int64_t extra, int64_t samples, int clamp,
                    void* rows, int wide_rows);

// Shuffle `count` elements of 4 or 8 bytes as numpy.random.RandomState.shuffle does, with a Mersenne
// twister of 624 words at `position`.  Returns the new position.
int mm_shuffle(void* elements, int64_t count, int element_bytes, uint32_t* state, int position);

// The first sequence whose length is negative or whose pointer is not the running sum of the lengths
// before it (in items of `item_bytes`); `sequences` if there is none, and then *end is the sum in
// bytes, and where a sequence is named, the sum before it.
int64_t mm_check_pointers(const int32_t* lengths, const void* pointers, int64_t sequences,
                          int64_t item_bytes, int64_t* end);

#ifdef __cplusplus
}
#endif
