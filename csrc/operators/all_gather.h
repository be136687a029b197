// AllGatherV: every segment from its owner to all places, in the order in which data becomes ready.
//
// Owns the scheduling of one call at one place: queues by source node, cursors, credit, the star
// path. Invariants: [Note: why this cannot deadlock]; a place's pool is written only after it
// entered; every byte of a call is written once per place.  Source: DMuon-2, section 5 and appendix
// C.2.  Tested in simulation with mutants (csrc/tests/chaos.cpp), under ThreadSanitizer
// (csrc/tests/threads.cpp), as a model (csrc/verification/queue_ring.pml).
//
// [Note: why this cannot deadlock]
//
// Fix a source node.  Its chunks travel an acyclic path, source, source + 1, ..., source - 1, in
// slots and with credit that no other source shares.  The last node consumes without asking anybody
// but its own node, whose places all enter the call in time because entering depends on their local
// streams alone.  So the last slot of the path becomes free, then the one before it, and so on back
// to the source.  This needs that a thread group never waits for one queue while another could
// move, that all places make the same calls in the same order, and that whatever spins at the same
// time is resident together.
//
// [Note: counters that are never reset]
//
// Words that others raise and the cursors that are compared with them only grow, from call to call.
// An early neighbour may raise a word before this place begins the call; a word that were zeroed,
// or sampled, at the start would lose that arrival.
#pragma once
#include "node_epoch.h"
#include "rules.h"
#include "table.h"

namespace megamuon {

template <class Fabric, class Rules = Sound>
class AllGather : public NodeEpoch<Fabric> {
  using Node = NodeEpoch<Fabric>;
  using Node::entered_, Node::epoch_, Node::fabric_, Node::layout_, Node::place_;

 public:
  MM_HD AllGather(Fabric& fabric, const ControlLayout& layout, const Geometry& place)
      : Node(fabric, layout, place) {}

  // Start a call at pool offset `base`.  `epoch` counts the operator's calls from 1; `queues` (one
  // per node) keep their first four cursors from call to call.  A place enters it when earlier
  // readers of the call's pool range are finished there and its own segments are written.
  MM_HD void begin(const TableView& table, u64 base, u64 epoch, QueueState* queues) {
    table_ = table, base_ = base, queues_ = queues;
    Node::begin_epoch(epoch);
  }

  // Reset what counts one call, of the queues of `group` out of `groups`.
  MM_HD void begin_group(int group, int groups) {
    for (int q = group; q < place_.nodes; q += groups) {
      QueueState& s = queues_[q];
      s.forwarded = s.delivered = s.acknowledged = s.local = 0;
      // The mutant: a count sampled at the start holds what an early neighbour has sent already.
      if (!Rules::counters_persist) s.received = fabric_.read(layout_.arrived(q));
      if (q != place_.node) continue;
      // The group of the own queue alone sends on the star path.
      for (int node = 0; node < place_.nodes; ++node) queues_[node].star_forwarded = 0;
    }
  }

  // Move queue q by at most a chunk; whether anything moved.  Never waits.
  MM_HD bool step(int q) {
    if (finished(q)) return false;
    return table_.star ? step_star(q) : step_ring(q);
  }

  MM_HD bool finished(int q) const {
    const QueueState& s = queues_[q];
    const u64 count = table_.count(q);
    if (table_.star) {
      if (q == place_.node) return s.delivered == count && star_sent_all(count);
      return s.delivered == count;
    }
    if (s.delivered != count) return false;
    if (!last(q) && s.forwarded != count) return false;
    if (q == place_.node) return last(q) || fabric_.put_done(q, s.sent + count);
    return s.acknowledged == count;
  }

  // After the queues of a group are finished: carry the persistent cursors on.
  MM_HD void end_group(int group, int groups) {
    for (int q = group; q < place_.nodes; q += groups) {
      QueueState& s = queues_[q];
      const u64 count = table_.count(q);
      if (table_.star) {
        if (q != place_.node) {
          s.star_received += count;
          continue;
        }
        for (int node = 0; node < place_.nodes; ++node) {
          if (node != q) queues_[node].star_sent += count;
        }
      } else {
        if (q != place_.node) s.received += count;
        if (!last(q)) s.sent += count;
      }
    }
  }

  // Whether every place of the node has written what this one receives.
  MM_HD bool left() { return !Rules::leave_waits_for_node || Node::all_left(); }

 private:
  MM_HD bool last(int q) const { return place_.next() == q; }

  MM_HD bool node_entered() { return !Rules::multicast_waits_for_node || Node::all_entered(); }

  MM_HD bool owner_entered(int column) {
    if (!Rules::source_waits_for_owner || entered_) return true;
    return fabric_.read(layout_.entry(column)) >= epoch_;
  }

  // How many chunks of another node's queue have arrived in this call.  The node before may have
  // begun the next call already, so its count may lie beyond this one's.
  MM_HD u64 arrived(u64 word, u64 before, u64 count) {
    const u64 now = fabric_.read(word) - before;
    return now < count ? now : count;
  }

  MM_HD bool credit(int q) {
    if (!Rules::slots_wait_for_acknowledgement) return true;
    if (Rules::credit_per_queue) {
      const QueueState& s = queues_[q];
      return s.sent + s.forwarded - fabric_.read(layout_.acknowledged(q)) < u64(layout_.slots);
    }
    u64 used = 0;  // the mutant: one pool of credit for the link
    for (int p = 0; p < place_.nodes; ++p) {
      if (last(p)) continue;
      used += queues_[p].sent + queues_[p].forwarded - fabric_.read(layout_.acknowledged(p));
    }
    return used < u64(layout_.slots);
  }

  MM_HD bool step_ring(int q) {
    QueueState& s = queues_[q];
    const u64 count = table_.count(q);
    const bool own = q == place_.node;
    bool moved = false;
    if (own) {
      // Read once over the node's links where the node is there: the copy into this place's pool is
      // then the source of the put.  Else copy it here first, where nobody but this place could
      // mind.
      moved = deliver_own(q, count);
      if (!last(q) && s.forwarded < count && owner_entered(chunk(q, s.forwarded).column) &&
          may_forward(q)) {
        forward(q, local_copy(q, s.forwarded));
        moved = true;
      }
      return moved;
    }
    const u64 available = arrived(layout_.arrived(q), s.received, count);
    if (!last(q) && s.forwarded < available && may_forward(q)) {
      forward(q, {Space::control, layout_.ring(q, s.received + s.forwarded)});
      moved = true;
    }
    if (s.delivered < available && node_entered()) {
      deliver(q, {Space::control, layout_.ring(q, s.received + s.delivered)}, place_.column);
      moved = true;
    }
    return acknowledge(q) || moved;
  }

  MM_HD bool acknowledge(int q) {
    QueueState& s = queues_[q];
    u64 until = s.delivered;
    if (Rules::acknowledge_after_forward && !last(q)) {
      if (s.forwarded < until) until = s.forwarded;
      while (until > s.acknowledged && !fabric_.put_done(q, s.sent + until)) --until;
    }
    if (until == s.acknowledged) return false;
    fabric_.raise(place_.previous(), layout_.acknowledged(q), until - s.acknowledged);
    s.acknowledged = until;
    return true;
  }

  MM_HD const Chunk& chunk(int q, u64 index) const { return table_.chunk(q, index); }

  MM_HD void deliver(int q, Address from, int column) {
    QueueState& s = queues_[q];
    const Chunk& c = chunk(q, s.delivered);
    fabric_.multicast(base_ + c.offset, column, from, c.length);
    ++s.delivered;
  }

  MM_HD bool deliver_own(int q, u64 count) {
    QueueState& s = queues_[q];
    if (s.delivered == count || !node_entered()) return false;
    const Chunk& c = chunk(q, s.delivered);
    if (!owner_entered(c.column)) return false;
    deliver(q, {Space::pool, base_ + c.offset}, c.column);
    if (s.local < s.delivered) s.local = s.delivered;
    return true;
  }

  // Where an own chunk lies in this place's pool; brought there if need be.
  MM_HD Address local_copy(int q, u64 index) {
    QueueState& s = queues_[q];
    const Chunk& c = chunk(q, index);
    if (s.local <= index) {
      fabric_.load(base_ + c.offset, c.column, base_ + c.offset, c.length);
      s.local = index + 1;
    }
    return {Space::pool, base_ + c.offset};
  }

  MM_HD bool may_forward(int q) { return credit(q) && fabric_.may_put(q); }

  MM_HD void forward(int q, Address from) {
    QueueState& s = queues_[q];
    fabric_.put(q, place_.next(), {Space::control, layout_.ring(q, s.sent + s.forwarded)}, from,
                chunk(q, s.forwarded).length, layout_.arrived(q), 1);
    ++s.forwarded;
  }

  // --- star: one hop from the source to each other node ------------------------------------------

  MM_HD bool star_sent_all(u64 count) const {
    for (int node = 0; node < place_.nodes; ++node) {
      if (node == place_.node) continue;
      const QueueState& s = queues_[node];
      if (s.star_forwarded != count) return false;
      if (!fabric_.put_done(place_.nodes + node, s.star_sent + count)) return false;
    }
    return true;
  }

  MM_HD bool step_star(int q) {
    QueueState& s = queues_[q];
    const u64 count = table_.count(q);
    bool moved = false;
    if (q != place_.node) {
      const u64 available = arrived(layout_.star_arrived(q), s.star_received, count);
      if (s.delivered < available && node_entered()) {
        const u64 slot = layout_.star_slot(q, s.star_received + s.delivered);
        deliver(q, {Space::control, slot}, place_.column);
        fabric_.raise(q, layout_.star_acknowledged(place_.node), 1);
        moved = true;
      }
      return moved;
    }
    moved = deliver_own(q, count);
    for (int hop = 1; hop < place_.nodes; ++hop) {
      moved |= star_forward(q, (place_.node + hop) % place_.nodes, count);
    }
    return moved;
  }

  MM_HD bool star_forward(int q, int node, u64 count) {
    QueueState& to = queues_[node];
    if (to.star_forwarded == count) return false;
    const Chunk& c = chunk(q, to.star_forwarded);
    if (!owner_entered(c.column)) return false;
    const u64 sequence = to.star_sent + to.star_forwarded;
    if (sequence - fabric_.read(layout_.star_acknowledged(node)) >= u64(layout_.slots))
      return false;
    if (!fabric_.may_put(place_.nodes + node)) return false;
    const Address from = local_copy(q, to.star_forwarded);
    fabric_.put(place_.nodes + node, node,
                {Space::control, layout_.star_slot(place_.node, sequence)}, from, c.length,
                layout_.star_arrived(place_.node), 1);
    ++to.star_forwarded;
    return true;
  }

  TableView table_{};
  u64 base_ = 0;
  QueueState* queues_ = nullptr;
};

}  // namespace megamuon
