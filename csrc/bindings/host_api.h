// C interface of the host library, for ctypes.
//
// Owns the names and types that cross from Python.  Invariants: nothing throws across it; a call
// that can fail returns a negative number or a null pointer and leaves a text that names what
// failed in the last argument's buffer or, for an engine, in mm_engine_error.  Offsets and sizes
// are bytes unless they are called elements.  Tested by tests/collectives/test_host_library.py.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bumped with every change of a table's meaning, a control word's place or this interface; part of
// the digest that ranks compare.
#define MM_CODE_VERSION 3

typedef struct mm_engine mm_engine;

enum { MM_F32 = 0, MM_F64 = 1, MM_BF16 = 2, MM_F16 = 3 };

int mm_code_version(void);

// --- shared segments (csrc/pool) -----------------------------------------------------------------
// Create a segment of `bytes` under a POSIX name ("/..."), filled with zeros whose pages exist, and map it.
void* mm_segment_create(const char* name, uint64_t bytes, char* error, int error_size);
// Map a segment that another process created.
void* mm_segment_map(const char* name, uint64_t bytes, char* error, int error_size);
int mm_segment_unlink(const char* name);
int mm_segment_unmap(void* address, uint64_t bytes);

// --- engine --------------------------------------------------------------------------------------
// One per rank.  `control[i]` is where this process sees the control segment of rank i, `pids[i]` is that
// rank's process (the own pid for threads: such peers are not watched).  The first
// mm_engine_control_bytes() of a control segment belong to the engine.  `deadline_seconds`: how long an operator may
// stand still, with nothing moving on this rank, before it aborts everybody.
uint64_t mm_engine_control_bytes(void);
mm_engine* mm_engine_create(int rank, int ranks, void* const* control, const int64_t* pids,
                            double deadline_seconds);
// Stop the progress thread; with calls outstanding they are dropped, and all ranks hear of it.
// Threads that are inside a call leave it first: a wait returns -1.  Every later call with this
// handle fails, whenever it comes, and mm_engine_error says that the engine is closed.
void mm_engine_destroy(mm_engine*);
// Make every wait of every rank fail, naming this rank and `reason`.
void mm_engine_abort(mm_engine*, const char* reason);
// Text of the first failure; "" while there is none.  Returns its length.
int mm_engine_error(mm_engine*, char* text, int text_size);
// For measurements: each put of an operator takes `latency_ns` and the link to the next node
// carries `bytes_per_second` (0: unlimited).  Both 0 (the default): memory speed.
void mm_engine_set_link(mm_engine*, uint64_t latency_ns, double bytes_per_second);

// --- operators -----------------------------------------------------------------------------------
// An operator works over R x K ranks of the engine: ranks[node * columns + column].  Its control words and rings
// lie at `control_offset` of every control segment; mm_operator_control_bytes says how many bytes it needs there.
// All ranks make the same operators with the same arguments but for their own place.
enum { MM_ALL_GATHER = 0, MM_REDUCE_SCATTER = 1, MM_PUBLISH = 2 };
typedef struct {
  int kind;
  int nodes, columns;        // R, K
  const int* ranks;          // R * K ranks of the engine
  uint64_t control_offset;   // multiple of 256
  int slots;                 // S, 1..64 ring slots per queue
  uint64_t chunk_bytes;      // <= 1 MiB, multiple of 256
  int groups;                // G thread groups that share the queues (1 on a CPU)
  uint64_t star_bytes;       // tables with at most so many bytes per node and rail take one hop (0: none do)
  int parameters;            // publish only: how many, and how many tiles in all
  uint64_t tiles;
  uint64_t tile_bytes;       // publish only
} mm_operator_config;
uint64_t mm_operator_control_bytes(const mm_operator_config*);
// Returns the operator's number (>= 0), or -1.
int mm_operator_create(mm_engine*, const mm_operator_config*, const char* name);
// Where this process sees the pool (publish: the copies) of each of the operator's R * K ranks.
// May be called again between calls, on all ranks alike.
int mm_operator_set_pool(mm_engine*, int op, void* const* bases);

// Frozen tables.  Segment j: owner (node[j], column[j]); `offset` from the call's base, `window`
// from the call's window base in the owner's memory.  All-gather counts bytes; reduce-scatter
// counts elements (offset, length, window).  Returns the table's number, or -1.
int mm_all_gather_table(mm_engine*, int op, int segments, const int* node, const int* column,
                        const uint64_t* offset, const uint64_t* bytes, const char* name);
int mm_reduce_scatter_table(mm_engine*, int op, int segments, const int* node, const int* column,
                            const uint64_t* offset, const uint64_t* elements, const uint64_t* window,
                            int slot_dtype, int wire_dtype, int window_dtype, const char* name);

// Calls return a ticket (>= 1, counted per operator) at once, or -1.  All ranks make an operator's
// calls in one order.
int64_t mm_all_gather(mm_engine*, int op, int table, uint64_t base);
int64_t mm_reduce_scatter(mm_engine*, int op, int table, uint64_t base, uint64_t window_base,
                          int first, double divisor);
// 1: this rank's part of the call is over and its result is in place; 0: not yet; -1: failed.
int mm_done(mm_engine*, int op, int64_t ticket);
// Step until mm_done would say 1 (returns 0), the engine has failed (-1), or `seconds` are over
// (1), so that a caller can look at its signals.
int mm_wait(mm_engine*, int op, int64_t ticket, double seconds);

// --- publish -------------------------------------------------------------------------------------
// The frozen list of a rail: parameter p has owner node `node[p]`, its copy lies at `offset[p]` of every pool.
int mm_publish_parameters(mm_engine*, int op, int parameters, const int* node,
                          const uint64_t* offset, const uint64_t* bytes, const char* const* names);
// Open a round: these parameters get `version` (greater than any before).  All ranks of the rail,
// same order. The round before must be over (mm_publish_round_done).  Returns 0 or -1.
int mm_publish_begin(mm_engine*, int op, int parameters, const int* order, uint64_t version);
// An own parameter's copy is written: send it.
int mm_publish_task(mm_engine*, int op, int parameter);
// Version that has wholly arrived in this rank's copy (own parameters: that was handed over).
uint64_t mm_publish_arrived(mm_engine*, int op, int parameter);
// Compare what has arrived: -2 where each holds its version, else the place in `which` of the first
// that holds another; -1 where something is wrong with the call.
int mm_publish_compare(mm_engine*, int op, int parameters, const int* which,
                       const uint64_t* version);
// Wait until each has arrived in the given version; returns as mm_wait does.
int mm_publish_wait(mm_engine*, int op, int parameters, const int* which, const uint64_t* version,
                    double seconds);
// Wait until this rank's sends and relays of the round are over; returns as mm_wait does.
int mm_publish_drain(mm_engine*, int op, double seconds);
int mm_publish_round_done(mm_engine*, int op);

// --- for tests and error reports -----------------------------------------------------------------
// Digest of an operator's persistent cursors and of what it asserts about them (equal numbers of sent and
// acknowledged chunks at the two ends after a quiet barrier).  Fills up to `count` words:
// per queue sent, acknowledged, arrived, received.  Returns how many words there are.
int mm_operator_cursors(mm_engine*, int op, uint64_t* words, int count);

#ifdef __cplusplus
}
#endif
