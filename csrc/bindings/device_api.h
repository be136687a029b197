// C interface of the device library, for ctypes: the operators on GPUs, over NCCL's device
// interface.
//
// Owns the names and types that cross from Python.  Invariants: nothing throws across it; a call
// that can fail returns a negative number or a null pointer and leaves a text, in the last
// argument's buffer or in mmd_error; offsets and sizes are bytes unless they are called elements.
// Streams are cudaStream_t as integers. The calls of the first group are collective: every rank of
// the communicator makes them, in one order.  Tested without a GPU through a library of the same
// names over host memory, csrc/tests/device_stand_in.cpp.
#pragma once
#include "host_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mmd_fabric mmd_fabric;

// Versions (NCCL_VERSION_CODE: 2.29.7 is 22907) of the headers that the kernels were compiled
// against, and of the library that is loaded.  They must be equal; mmd_create refuses others.
int mmd_code_version(void);
int mmd_compiled_nccl(void);
int mmd_loaded_nccl(char* error, int error_size);

// What a communicator offers, the least over its ranks.
typedef struct {
  int lsa_ranks;   // GPUs that address each other's memory
  int direct;      // 1: all places are among them
  int row;         // 1: they are this node's K columns
  int multimem;    // 1: one store reaches the row
  int gin;         // 1: the other nodes of a rail are reached over the network
} mmd_capability;

// --- collective ----------------------------------------------------------------------------------
// 128 bytes for mmd_create, from one rank; the caller hands them to the others.
int mmd_unique_id(void* id, char* error, int error_size);
// A communicator over R x K ranks, rank = node * columns + column, and its device communicator.
// `operators`: how many will be made, `blocks`: of each; both bound what GIN must provide.
// `multimem` 0: store to each GPU and add column by column, with the bits of the host library; 1:
// by the switch where the row has it, which adds in an order of its own and rounds a node's sum to
// the gradients' dtype, so the bits are others.
mmd_fabric* mmd_create(const void* id, int rank, int nodes, int columns, int device, int operators,
                       int blocks, int multimem, double deadline_seconds, char* error,
                       int error_size);
int mmd_query(mmd_fabric*, mmd_capability* out);
// Allocate and register the two windows, each one allocation: control words and rings, and the
// pool.  Once; after it, mmd_pool is where this rank's pool lies.
// `pool_of`, where it is not null: an open fabric of this process, over other ranks or in another
// arrangement of them, whose pool is to be this one's too.  Its memory gets a second window and is
// not allocated; `pool_bytes` must be what it was opened with, else -1 with a text that names both.
// Whoever allocated the pool frees it, so it must be destroyed after all fabrics that share it.
int mmd_open(mmd_fabric*, uint64_t control_bytes, uint64_t pool_bytes, mmd_fabric* pool_of);
uint64_t mmd_pool(mmd_fabric*);
// values[i] = the least over the ranks.
int mmd_agree(mmd_fabric*, int* values, int count);
// Give back windows, memory, communicators; any rank may call it after a failure.  Null is nothing.
// It ends this fabric's waits and waits for its own kernels.
// Without a failure, or with one: no wait of it is longer than some seconds.  What a kernel that
// does not end may still use stays allocated, and a line on standard error says so.
void mmd_destroy(mmd_fabric*);

// --- operators, after mmd_open -------------------------------------------------------------------
// As in host_api.h; of the configuration, `ranks` is not read and `groups` bounds the blocks of a
// call.
uint64_t mmd_operator_control_bytes(int nodes, int columns, const mm_operator_config*);
int mmd_operator_create(mmd_fabric*, const mm_operator_config*, const char* name);
// Refused (-1) where multimem would need 16-byte multiples that the segments do not have.  That is
// no failure, and the next mmd_error tells its text, once.
int mmd_all_gather_table(mmd_fabric*, int op, int segments, const int* node, const int* column,
                         const uint64_t* offset, const uint64_t* bytes, const char* name);
int mmd_reduce_scatter_table(mmd_fabric*, int op, int segments, const int* node, const int* column,
                             const uint64_t* offset, const uint64_t* elements,
                             const uint64_t* window, int slot_dtype, int wire_dtype,
                             int window_dtype, const char* name);
// Bring the tables that were made since the last time to the GPU, for each operator in one
// allocation and one copy.  A call of a table that is not there is refused, so that no call does
// this in the middle of a pass.
int mmd_upload(mmd_fabric*);
// Put a call on a stream.  An operator's calls are made in one order on all ranks, on one stream.
int mmd_all_gather(mmd_fabric*, int op, int table, uint64_t base, uint64_t stream);
int mmd_reduce_scatter(mmd_fabric*, int op, int table, uint64_t base, uint64_t window_base,
                       int first, double divisor, uint64_t stream);

// --- publish -------------------------------------------------------------------------------------
// The frozen list of a rail, at most as many parameters and tiles as the operator was made for: all
// rails are made for those of the rail that has most.
int mmd_publish_parameters(mmd_fabric*, int op, int parameters, const int* node,
                           const uint64_t* offset, const uint64_t* bytes, const char* const* names);
// The round's kernel, on a stream that nothing else waits on; the round before must be over, and
// all own parameters of this one handed over, no others: the kernel waits for them, so whatever
// synchronised the GPU while its host still had to hand some over would wait for ever.
int mmd_publish_begin(mmd_fabric*, int op, int parameters, const int* order, uint64_t version,
                      uint64_t stream);
// What `stream` has written of an own parameter is sent when the next round begins.
int mmd_publish_task(mmd_fabric*, int op, int parameter, uint64_t stream);
// `stream` goes on when all that a round brings has arrived: the parameters of `which`, each in its
// version.
int mmd_publish_wait(mmd_fabric*, int op, int parameters, const int* which, const uint64_t* version,
                     uint64_t stream);

// --- failure -------------------------------------------------------------------------------------
// End every wait of this GPU's kernels.
void mmd_abort(mmd_fabric*);
// Text of the first failure, or of a refused table that was not told yet; "" where there is
// neither.  Returns its length.
int mmd_error(mmd_fabric*, char* text, int text_size);

#ifdef __cplusplus
}
#endif
