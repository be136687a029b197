// Persistent publish: new weights from their owners down the rail, one stream per step.
//
// Owns the scheduling of one round at one place of a rail (K = 1: the rail's places are its nodes).
// Invariants: a tile's flag holds the version of the bytes in place, and only grows; a parameter
// has arrived in a version when all its tiles have; a round is over when every own parameter has
// been sent and every other one has arrived and been passed on.  Source: DMuon-2, section 5.3 and
// appendix C.2. Tested in simulation with mutants (csrc/tests/chaos.cpp), by replay on a virtual
// clock (csrc/tests/replay.cpp), as a model (csrc/verification/publish.pml).
//
// [Note: no staging and no credit]
//
// A copy's bytes are written by the place before this one and by nobody else, once per version.
// Version t + 1 of a copy is written only after its owner's update t + 1, which follows the global
// gradient norm, to which this place contributes after its last read of version t (its gathers are
// over) and which needs every place further down to have gathered, hence received, version t (this
// place's relays are over). So a copy never needs a second buffer, and a sender no acknowledgement.
// Where rounds follow each other without such a step between them (weights loaded from a file), the
// caller puts a barrier there.
#pragma once
#include "rules.h"

#include "../fabric/fabric.h"

namespace megamuon {

// Frozen.
struct PublishParameter {
  int node;  // of the owner
  u64 offset, bytes;
  u64 first_tile;
};

struct PublishState {
  u64 version = 0;   // wanted by the round, or last published
  u64 previous = 0;  // before it
  u64 tiles_seen = 0;  // own: posted; other: arrived and passed on
  int next = -1;       // place in the round's order of the same source's next parameter; -1: none
  bool finished = true;
};

// Of the other nodes' parameters in a round, places in its order.
struct PublishSource {
  int open = -1;  // by rank: the first of a source that is not over, in the order of the round
  int last = -1;  // by node, while the round is opened; -1: none
};

template <class Fabric, class Rules = Sound>
class Publish {
 public:
  // `states`: by parameter; `sources`: by node.
  MM_HD Publish(Fabric& fabric, const ControlLayout& layout, const Geometry& place,
                const PublishParameter* parameters, PublishState* states, PublishSource* sources,
          u64 tile_bytes)
      : fabric_(fabric),
        layout_(layout),
        place_(place),
        parameters_(parameters),
        states_(states),
        sources_(sources),
        tile_bytes_(tile_bytes) {}

  // Open a round: `count` parameters (in `order`, the same at every place) get `version`.
  MM_HD void begin(const int* order, int count, u64 version) {
    order_ = order, count_ = count, first_open_ = 0;
    open_sources_ = 0;
    for (int node = 0; node < place_.nodes; ++node) sources_[node] = PublishSource{};
    for (int i = 0; i < count; ++i) {
      PublishState& s = states_[order[i]];
      const int node = parameters_[order[i]].node;
      int& last = sources_[node].last;
      if (last >= 0) states_[order[last]].next = i;
      if (last < 0 && node != place_.node) sources_[open_sources_++].open = i;
      last = i;
      s.next = -1;
      s.previous = s.version;
      s.version = version;
      s.tiles_seen = 0;
      s.finished = false;
    }
  }

  // Move by at most a few tiles; whether anything moved.  Never waits.
  MM_HD bool step() { return step_tasks() | step_relays() | retire(); }

  MM_HD bool finished() const { return first_open_ == count_; }

  // Puts posted and tasks taken since the operator was made; an operator that is made again for
  // each round resumes there.
  MM_HD u64 puts() const { return posted_; }
  MM_HD u64 tasks() const { return head_; }
  MM_HD void resume(u64 puts, u64 tasks) { posted_ = puts, head_ = tasks; }

  // The first parameter of the round that is not finished (for error texts); -1: none.
  MM_HD int open_parameter() const { return finished() ? -1 : order_[first_open_]; }

 private:
  static constexpr int kBurst = 4;    // tiles of one parameter per turn

  MM_HD u64 tiles(const PublishParameter& p) const {
    return (p.bytes + tile_bytes_ - 1) / tile_bytes_;
  }

  MM_HD void post(int index, u64 tile) {
    const PublishParameter& p = parameters_[index];
    const PublishState& s = states_[index];
    const u64 start = tile * tile_bytes_;
    const u64 bytes = p.bytes - start < tile_bytes_ ? p.bytes - start : tile_bytes_;
    const Address place{Space::pool, p.offset + start};
    fabric_.put(0, place_.next(), place, place, bytes, layout_.tile_flag(p.first_tile + tile),
                s.version - s.previous);
    ++posted_;
  }

  // Own parameters that have been handed over.
  MM_HD bool step_tasks() {
    const u64 tail = fabric_.read(layout_.task_tail());
    bool moved = false;
    while (head_ < tail) {
      const int index = int(fabric_.read(layout_.task(head_ % u64(layout_.parameters))));
      PublishState& s = states_[index];
      const u64 all = place_.nodes > 1 ? tiles(parameters_[index]) : 0;
      for (int i = 0; i < kBurst && s.tiles_seen < all && fabric_.may_put(0); ++i) {
        post(index, s.tiles_seen++);
        moved = true;
      }
      if (s.tiles_seen < all) return moved;
      fabric_.set_local(place_.column, layout_.parameter_flag(index), s.version);
      s.finished = true;
      ++head_;
      moved = true;
    }
    return moved;
  }

  MM_HD bool arrived(u64 flag, const PublishState& s) const {
    return Rules::flags_carry_version ? flag >= s.version : flag != 0;
  }

  // Tiles that have arrived go on at once.  Owners hand over in the order of the round, so of each
  // source only the first parameter that is not over is polled: a turn costs as many polls as there
  // are sources, however many parameters are open.  What comes first in the round goes first; no
  // source hides another one's arrivals: a window of parameters over all sources would, and leave
  // the link idle.
  MM_HD bool step_relays() {
    bool moved = false;
    for (int k = 0; k < open_sources_;) {
      const int index = order_[sources_[k].open];
      if ((!Rules::sources_do_not_block && !nearest(k)) || !relay(index, moved)) {
        ++k;
        continue;
      }
      const int next = states_[index].next;
      int to = k;  // of the source, which may now stand behind others, or be over
      while (to + 1 < open_sources_ && (next < 0 || sources_[to + 1].open < next)) {
        sources_[to].open = sources_[to + 1].open;
        ++to;
      }
      if (next >= 0) {
        sources_[to].open = next;
      } else {
        --open_sources_;
      }
    }
    return moved;
  }

  // The mutant: one source after the other, each place beginning with the node after it.
  MM_HD bool nearest(int k) const {
    for (int other = 0; other < open_sources_; ++other) {
      if (hops(other) < hops(k)) return false;
    }
    return true;
  }
  MM_HD int hops(int k) const {
    const int node = parameters_[order_[sources_[k].open]].node;
    return (node - place_.node + place_.nodes) % place_.nodes;
  }

  // Pass on what has arrived of a parameter, at most a burst; whether it is over.
  MM_HD bool relay(int index, bool& moved) {
    const PublishParameter& p = parameters_[index];
    PublishState& s = states_[index];
    const u64 all = tiles(p);
    const bool passes = place_.next() != p.node;
    for (int n = 0; n < kBurst && s.tiles_seen < all; ++n) {
      if (!arrived(fabric_.read(layout_.tile_flag(p.first_tile + s.tiles_seen)), s)) break;
      if (passes && !fabric_.may_put(0)) break;
      if (passes) post(index, s.tiles_seen);
      ++s.tiles_seen;
      moved = true;
    }
    if (s.tiles_seen < all) return false;
    fabric_.set_local(place_.column, layout_.parameter_flag(index), s.version);
    return s.finished = moved = true;
  }

  MM_HD bool retire() {
    bool moved = false;
    while (first_open_ < count_ && states_[order_[first_open_]].finished) {
      const bool over = first_open_ + 1 == count_;
      if (over && Rules::retire_waits_for_puts && !fabric_.put_done(0, posted_)) return moved;
      ++first_open_;
      moved = true;
    }
    return moved;
  }

  Fabric& fabric_;
  const ControlLayout& layout_;
  const Geometry& place_;
  const PublishParameter* parameters_;
  PublishState* states_;
  PublishSource* sources_;
  u64 tile_bytes_;
  const int* order_ = nullptr;
  int count_ = 0, first_open_ = 0;
  int open_sources_ = 0;  // other nodes with parameters that are not over
  u64 posted_ = 0;  // puts since the operator was made
  u64 head_ = 0;    // own tasks taken since then
};

}  // namespace megamuon
