// The verbs of a fabric, and what a scheduler may rely on.
//
// Owns the types that schedulers and fabrics share: places, addresses, the layout of control
// memory, and the contract below.  A scheduler (csrc/operators) is a template over a fabric and
// contains no other way to touch memory of another rank, so what runs on a cluster is what the host
// tests run. Tested through the operators: csrc/tests (simulation, threads),
// tests/distributed/test_ready.py.
//
// [Note: the fabric contract]
//
// A place is (node, column): R nodes of K columns.  The places of one column form a *rail*.  Each
// place has control memory (words, ring slots, outboxes; laid out by ControlLayout, the same
// everywhere) and a pool (the memory that training uses, planned to the same offsets everywhere).
// A fabric object belongs to one place and offers:
//
//   u64  read(word)                        own control word.  Acquire.
//   void raise(node, word, delta)          word of the same column of `node` += delta.  Release.
//   void set_local(column, word, value)    word of a place of this node = value.  Release.
//   void set_row(word, value)              the same word of every place of this node.  Release.
//   void put(queue, node, to, from, bytes, word, delta)
//                                          copy own memory at `from` to the same column of `node`,
//                                          then raise(node, word, delta) there.  Returns at once.
//   bool may_put(queue)                    room for one more put in flight.
//   bool put_done(queue, count)            the first `count` puts of the queue, counted since the
//                                          fabric was made, have read their sources.
//   void load(to, column, from, bytes)     own pool = pool of a place of this node.
//   void multicast(to, column, from, bytes)
//                                          pool of every place of this node = memory of `column`
//                                          (its pool, or this place's own control memory).
//   void reduce_to_outbox(to, sum)         row sum of this node, plus what came from upstream,
//   void reduce_to_window(column, sum)     rounded to the wire; or finished, into the window of a
//                                          place of this node.
//   bool aborted(), void pause()
//
// The verbs are called by the one thread of a group that runs the operator: the only thread on a
// CPU; on a GPU the first thread of a block, whose other warps carry the data verbs out
// (device_group.cuh).
//
// O1  If read(word) counts x puts of a queue, the bytes of its first x puts are visible to the
//     group. Puts and raises of different queues are not ordered, nor are those to different nodes.
// O2  A put may read its source until put_done says otherwise.
// O3  raise is additive, set_local and set_row monotone, and nothing is ever reset.
// O4  What a group has written or read in this node's memory (load, multicast, reduce) comes before
//     its later set_local, set_row and raise, for whoever reads the word.
//
// Data verbs move a whole chunk instead of 16 bytes, so that a fabric may use wide copies.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define MM_HD __host__ __device__ __forceinline__
#else
#define MM_HD inline
#endif

namespace megamuon {

using u64 = uint64_t;

enum class Dtype : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

MM_HD u64 size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

struct Geometry {
  int nodes, columns;  // R, K
  int node, column;    // this place
  MM_HD int next() const { return node + 1 == nodes ? 0 : node + 1; }
  MM_HD int previous() const { return node == 0 ? nodes - 1 : node - 1; }
};

enum class Space : int { pool, control };

struct Address {
  Space space;
  u64 offset;  // control: from the operator's own control memory
};

constexpr int kMaxNodes = 64;    // queues of an operator on a GPU
constexpr int kMaxBlocks = 16;   // thread groups of a call at one place
constexpr int kStarNodes = 16;  // the star path is for at most so many nodes

// One chunk of a row's gradients and where its sum goes.  In order: the columns k = 0 .. K-1 of
// this node, each rounded to `wire`, added in `window`'s dtype, the sum rounded to `wire` if there
// are several nodes; then t = upstream[0], t = round(t + upstream[j]) for j = 1 .., and t + the
// node's sum.
struct Sum {
  u64 slots;            // pool offset of the first gradient, the same at every column
  u64 elements;
  const u64* upstream;  // control offsets of what arrived, in the order of addition
  int upstreams;
  Dtype slot, wire, window;
  u64 destination;      // reduce_to_window: pool offset in the owner's memory
  double divisor;
  bool first;           // store, else add
};

// Offsets of an operator's control words and rings.  Every hot word has 128 bytes of its own.
struct ControlLayout {
  static constexpr u64 kLine = 128;
  int nodes, columns, slots;
  u64 chunk_bytes;
  bool outboxes;      // a reduction sends from an outbox; a gather forwards from the ring slot
  bool star;
  u64 tiles;          // publish: number of tile flags
  int parameters;     // publish

  MM_HD u64 entry(int column) const { return column * kLine; }
  MM_HD u64 done(int column) const { return (columns + column) * kLine; }
  MM_HD u64 arrived(int queue) const { return (2 * columns + queue) * kLine; }
  MM_HD u64 acknowledged(int queue) const { return (2 * columns + nodes + queue) * kLine; }
  // Star path: at a receiver by source, at a source by receiver.
  MM_HD u64 star_arrived(int node) const { return (2 * columns + 2 * nodes + node) * kLine; }
  MM_HD u64 star_acknowledged(int node) const { return (2 * columns + 3 * nodes + node) * kLine; }
  MM_HD u64 task_tail() const { return (2 * columns + 4 * nodes) * kLine; }
  MM_HD u64 words_end() const { return (2 * columns + 4 * nodes + 1) * kLine; }
  // Publish: which version of a tile and of a parameter has arrived, and the queue of own tasks.
  MM_HD u64 tile_flag(u64 tile) const { return words_end() + 8 * tile; }
  MM_HD u64 parameter_flag(int p) const { return words_end() + 8 * (tiles + p); }
  MM_HD u64 task(u64 index) const { return words_end() + 8 * (tiles + parameters + index); }
  MM_HD u64 rings() const {
    const u64 end = words_end() + 8 * (tiles + 2 * u64(parameters));
    return (end + 255) / 256 * 256;
  }
  MM_HD u64 ring(int queue, u64 sequence) const {
    return rings() + (u64(queue) * slots + sequence % slots) * chunk_bytes;
  }
  MM_HD u64 block() const { return u64(nodes) * slots * chunk_bytes; }
  MM_HD bool has_rings() const { return nodes > 1 && parameters == 0; }
  MM_HD u64 outbox(int queue, u64 sequence) const { return ring(queue, sequence) + block(); }
  MM_HD u64 star_begin() const { return rings() + (outboxes ? 2 : 1) * block(); }
  MM_HD u64 star_slot(int node, u64 sequence) const {
    return star_begin() + (u64(node) * slots + sequence % slots) * chunk_bytes;
  }
  MM_HD u64 star_outbox(int node, u64 sequence) const {
    return star_slot(node, sequence) + block();
  }
  MM_HD u64 bytes() const {
    if (!has_rings()) return rings();
    const int blocks = (outboxes ? 2 : 1) * (star ? 2 : 1);
    return rings() + blocks * block();
  }
};

// A queue's cursors.  The first four live as long as the operator; the others count chunks of one
// call.
struct QueueState {
  // Ring chunks of this queue to the next and from the previous node.
  u64 sent = 0, received = 0;
  u64 star_sent = 0, star_received = 0;  // star chunks to and from the node of this number
  u64 forwarded = 0, delivered = 0, acknowledged = 0, local = 0;
  u64 star_forwarded = 0;
};

}  // namespace megamuon
