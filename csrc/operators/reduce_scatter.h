// ReduceScatterV: the mean of every segment over all places, at its owner.
//
// Owns the scheduling of one call at one place: a queue per owner node, cursors, credit, outboxes,
// the star path.  Invariants: one order of additions, whatever the timing: inside a node k = 0 ..
// K-1, then for an owner in node o the nodes o+1, o+2, ..., o (mod R), each partial sum rounded to
// the wire, not after the last addition, then one division; the star path computes the same bits
// from one partial sum per node.  Each chunk leaves each node once.  Source: DMuon-2, section 5 and
// appendix C.2.  Tested in simulation with mutants (csrc/tests/chaos.cpp), under ThreadSanitizer
// (csrc/tests/threads.cpp), against sums in one process (tests/distributed/test_ready.py).  Why
// this cannot deadlock: see all_gather.h; the path of an owner's queue is owner + 1, ..., owner.
#pragma once
#include "node_epoch.h"
#include "rules.h"
#include "table.h"

namespace megamuon {

template <class Fabric, class Rules = Sound>
class ReduceScatter : public NodeEpoch<Fabric> {
  using Node = NodeEpoch<Fabric>;
  using Node::fabric_, Node::layout_, Node::place_;

 public:
  MM_HD ReduceScatter(Fabric& fabric, const ControlLayout& layout, const Geometry& place)
      : Node(fabric, layout, place) {}

  // Start a call on gradients at pool offset `base`; finished sums go to `window_base` (bytes) of
  // their owners, stored if `first`, else added.  A place enters the call when its gradients are
  // final and its window may be written.
  MM_HD void begin(const TableView& table, u64 base, u64 window_base, bool first, double divisor,
                   u64 epoch, QueueState* queues) {
    table_ = table, base_ = base, window_base_ = window_base, first_ = first, divisor_ = divisor;
    queues_ = queues;
    Node::begin_epoch(epoch);
  }

  MM_HD void begin_group(int group, int groups) {
    for (int q = group; q < place_.nodes; q += groups) {
      QueueState& s = queues_[q];
      s.forwarded = s.delivered = s.acknowledged = s.local = s.star_forwarded = 0;
      // The mutant: a count sampled at the start holds what an early neighbour has sent already.
      if (!Rules::counters_persist) s.received = fabric_.read(layout_.arrived(q));
    }
  }

  MM_HD bool step(int q) {
    if (queues_[q].delivered == table_.count(q)) return false;  // its last puts may still be read
    if (Rules::sum_waits_for_node && !Node::all_entered()) return false;
    if (q == place_.node) return finish_chunk(q);
    return table_.star ? send_star(q) : send_ring(q);
  }

  // `delivered` counts the chunks that have left this place (own queue: that are finished).
  MM_HD bool finished(int q) const {
    const QueueState& s = queues_[q];
    const u64 count = table_.count(q);
    if (s.delivered != count) return false;
    if (q == place_.node) return true;
    return table_.star ? fabric_.put_done(place_.nodes + q, s.star_sent + count)
                       : fabric_.put_done(q, s.sent + count);
  }

  MM_HD void end_group(int group, int groups) {
    for (int q = group; q < place_.nodes; q += groups) {
      QueueState& s = queues_[q];
      const u64 count = table_.count(q);
      if (table_.star) {
        if (q != place_.node) {
          s.star_sent += count;
          continue;
        }
        // The group of the own queue alone receives on the star path.
        for (int node = 0; node < place_.nodes; ++node) {
          if (node != q) queues_[node].star_received += count;
        }
      } else {
        if (q != place_.node) s.sent += count;
        if (!head(q)) s.received += count;
      }
    }
  }

  // All gradients of this place that others sum have been read when every column has left.
  MM_HD bool left() { return !Rules::leave_waits_for_node || Node::all_left(); }

 private:
  // Whether this node is the first of the chain of owner node q.
  MM_HD bool head(int q) const { return place_.previous() == q; }

  MM_HD Sum sum_of(int q, u64 index) const {
    const Chunk& c = table_.chunk(q, index);
    Sum sum{};
    sum.slots = base_ + c.offset * size_of(table_.slot);
    sum.elements = c.length;
    sum.slot = table_.slot, sum.wire = table_.wire, sum.window = table_.window;
    sum.destination = window_base_ + c.window * size_of(table_.window);
    sum.divisor = divisor_, sum.first = first_;
    return sum;
  }

  MM_HD bool credit(u64 sent, u64 acknowledged_word) {
    if (!Rules::slots_wait_for_acknowledgement) return true;
    return sent - fabric_.read(acknowledged_word) < u64(layout_.slots);
  }

  // Whether the outbox slot that put number `sent` (from 0) of a queue would use has been read by
  // its last put.
  MM_HD bool outbox_free(int queue, u64 sent) const {
    const u64 slots = u64(layout_.slots);
    if (!Rules::outbox_waits_for_put || sent < slots) return true;
    return fabric_.put_done(queue, sent + 1 - slots);
  }

  MM_HD bool send_ring(int q) {
    QueueState& s = queues_[q];
    const bool relays = !head(q);
    const u64 sent = s.sent + s.delivered;
    if (relays && fabric_.read(layout_.arrived(q)) - s.received <= s.delivered) return false;
    if (!credit(sent, layout_.acknowledged(q))) return false;
    if (!outbox_free(q, sent) || !fabric_.may_put(q)) return false;
    Sum sum = sum_of(q, s.delivered);
    u64 slot = 0;
    if (relays) {
      slot = layout_.ring(q, s.received + s.delivered);
      sum.upstream = &slot, sum.upstreams = 1;
      if (!Rules::acknowledge_after_read)
        fabric_.raise(place_.previous(), layout_.acknowledged(q), 1);
    }
    const u64 outbox = layout_.outbox(q, sent);
    fabric_.reduce_to_outbox(outbox, sum);
    // The outbox is the source of the put, so the ring slot is free as soon as it is added.
    if (relays && Rules::acknowledge_after_read) {
      fabric_.raise(place_.previous(), layout_.acknowledged(q), 1);
    }
    fabric_.put(q, place_.next(), {Space::control, layout_.ring(q, sent)}, {Space::control, outbox},
                sum.elements * size_of(table_.wire), layout_.arrived(q), 1);
    ++s.delivered;
    return true;
  }

  MM_HD bool send_star(int q) {
    QueueState& s = queues_[q];
    const u64 sent = s.star_sent + s.delivered;
    const int queue = place_.nodes + q;
    if (!credit(sent, layout_.star_acknowledged(q))) return false;
    if (!outbox_free(queue, sent) || !fabric_.may_put(queue)) return false;
    const Sum sum = sum_of(q, s.delivered);
    const u64 outbox = layout_.star_outbox(q, sent);
    fabric_.reduce_to_outbox(outbox, sum);
    fabric_.put(queue, q, {Space::control, layout_.star_slot(place_.node, sent)},
                {Space::control, outbox}, sum.elements * size_of(table_.wire),
                layout_.star_arrived(place_.node), 1);
    ++s.delivered;
    return true;
  }

  // The last addition of a chunk, at its owner's node.
  MM_HD bool finish_chunk(int q) {
    QueueState& s = queues_[q];
    u64 upstream[kStarNodes];
    Sum sum = sum_of(q, s.delivered);
    sum.upstream = upstream;
    if (table_.star) {
      for (int hop = 1; hop < place_.nodes; ++hop) {
        const int node = (q + hop) % place_.nodes;
        const u64 before = queues_[node].star_received + s.delivered;
        if (fabric_.read(layout_.star_arrived(node)) <= before) return false;
        upstream[sum.upstreams++] = layout_.star_slot(node, before);
      }
    } else if (!head(q)) {
      const u64 before = s.received + s.delivered;
      if (fabric_.read(layout_.arrived(q)) <= before) return false;
      upstream[sum.upstreams++] = layout_.ring(q, before);
    }
    fabric_.reduce_to_window(table_.chunk(q, s.delivered).column, sum);
    for (int hop = 1; table_.star && hop < place_.nodes; ++hop) {
      const int node = (q + hop) % place_.nodes;
      fabric_.raise(node, layout_.star_acknowledged(place_.node), 1);
    }
    if (!table_.star && !head(q)) fabric_.raise(place_.previous(), layout_.acknowledged(q), 1);
    ++s.delivered;
    return true;
  }

  TableView table_{};
  u64 base_ = 0, window_base_ = 0;
  bool first_ = true;
  double divisor_ = 1;
  QueueState* queues_ = nullptr;
};

}  // namespace megamuon
