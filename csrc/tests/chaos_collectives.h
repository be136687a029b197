// All-gathers and reduce-scatters of a run: the turns of their streams and groups, and what must
// hold.
//
// Owns a Member per collective and place.  Invariants asserted: 1 and 2 (credit, cursors) after
// every turn; 3 and 4 (every byte once, none outside, none before entry or after the end) as writes
// land; contents and sums when a call is over; 6 (both ends of every counter agree) when all is
// quiet.
#pragma once
#include "../operators/group.h"
#include "chaos_actors.h"

namespace megamuon {
namespace testing {

class Collectives {
 public:
  explicit Collectives(Bench& bench)
      : bench_(bench), simulation_(bench.simulation), random_(bench.random) {}

  void clear() { members_.clear(); }
  int first_actor(int member) const { return members_[member]->first_actor; }
  int place(int member) const { return members_[member]->place; }

  void add(int index, const Maker& maker) {
    const Scenario& s = *bench_.scenario;
    const TestCollective& c = s.collectives[index];
    std::vector<int> peers;
    for (int p = 0; p < s.places(); ++p) peers.push_back(simulation_.add_endpoint(p, c.layout));
    for (int p = 0; p < s.places(); ++p) {
      members_.emplace_back(new Member);
      Member& m = *members_.back();
      m.collective = index, m.place = p, m.endpoint = peers[p];
      m.geometry = {s.nodes, s.columns, p / s.columns, p % s.columns};
      m.fabric.reset(new SimulatedFabric(simulation_, m.geometry, peers));
      for (int g = 0; g < s.groups; ++g) {
        m.groups.push_back(
            (c.reduce ? maker.reduce : maker.gather)(*m.fabric, c.layout, m.geometry));
      }
      m.queues.resize(s.nodes);
      m.seen.resize(s.nodes);
      m.turn.assign(s.groups, int(random_.below(8)));
      if (c.reduce) m.window.assign(c.window_elements, 0);
      bench_.owners.push_back({int(members_.size()) - 1, false});
      m.first_actor = bench_.actors.count();
      for (int g = -1; g < s.groups; ++g) bench_.actors.add(int(members_.size()) - 1, g, false);
      ++bench_.open;
    }
  }

  // One turn; whether the actor wants another at once.
  bool turn(int member, int group) {
    Member& m = *members_[member];
    return group < 0 ? stream_turn(m) : group_turn(m, group);
  }

  void written(int endpoint, u64 epoch, int place, u64 offset, u64 bytes, bool own_copy) {
    const int collective = members_[bench_.owners[endpoint].member]->collective;
    Member& to = *members_[collective * bench_.scenario->places() + place];
    const TestCollective& c = bench_.scenario->collectives[collective];
    if (!inside(to, epoch)) return fail(to, "invariant 4: written outside of its call");
    if (own_copy) return;
    const u64 base = c.reduce ? c.window_base : c.calls[to.call].base;
    if (offset < base || offset - base + bytes > to.written.size()) {
      return fail(to, "invariant 3: written outside of the call's range");
    }
    uint8_t bad = 0;
    uint8_t* times = to.written.data() + (offset - base);
    for (u64 i = 0; i < bytes; ++i) bad |= times[i], times[i] = 1;
    if (bad) fail(to, bad & 0x80 ? "invariant 3: written outside of segments"
                                 : "invariant 3: a byte was written twice");
    to.to_write -= bytes;
  }

  void read(int endpoint, u64 epoch, int place) {
    const int collective = members_[bench_.owners[endpoint].member]->collective;
    Member& from = *members_[collective * bench_.scenario->places() + place];
    if (!inside(from, epoch)) fail(from, "read outside of its call");
  }

  // Invariant 6: both ends of every counter agree.
  void check_quiet() {
    for (auto& pointer : members_) {
      Member& m = *pointer;
      const ControlLayout& l = bench_.scenario->collectives[m.collective].layout;
      const int next = m.geometry.next() * bench_.scenario->columns + m.geometry.column;
      for (int q = 0; q < bench_.scenario->nodes && bench_.scenario->nodes > 1; ++q) {
        const Member& n = *members_[m.collective * bench_.scenario->places() + next];
        agree(m, m.queues[q].sent, simulation_.word(m.endpoint, l.acknowledged(q)), "acknowledged");
        agree(m, m.queues[q].sent, simulation_.word(n.endpoint, l.arrived(q)), "arrived");
        agree(m, m.queues[q].sent, n.queues[q].received, "received");
        agree(m, m.queues[q].sent, simulation_.endpoint(m.endpoint).channels[q].posted, "posted");
        if (q == m.geometry.node) continue;
        const int at = q * bench_.scenario->columns + m.geometry.column;
        const Member& o = *members_[m.collective * bench_.scenario->places() + at];
        const u64 sent = m.queues[q].star_sent;
        agree(m, sent, simulation_.word(m.endpoint, l.star_acknowledged(q)), "star acknowledged");
        agree(m, sent, simulation_.word(o.endpoint, l.star_arrived(m.geometry.node)),
              "star arrived");
        agree(m, sent, o.queues[m.geometry.node].star_received, "star received");
      }
    }
  }

  // A call that is not over; "" if there is none.
  std::string describe() const {
    for (auto& m : members_) {
      if (m->call < int(bench_.scenario->collectives[m->collective].calls.size())) {
        return where(*m) + ", phase " + std::to_string(int(m->phase)) + ", groups that ended " +
               std::to_string(m->ended);
      }
    }
    return "";
  }

 private:
  enum class Phase { idle, running, leaving, over };

  // A collective at a place.
  struct Member {
    int collective, place, endpoint, first_actor;
    Geometry geometry;
    std::unique_ptr<SimulatedFabric> fabric;
    std::vector<std::unique_ptr<Operator>> groups;
    std::vector<QueueState> queues, seen;
    std::vector<char> begun;
    std::vector<int> turn;
    std::vector<uint8_t> written;  // per byte of the call's range or window: times, 0x80 outside
    std::vector<double> window;    // what it should hold
    u64 to_write = 0;
    int call = 0, ended = 0;
    Phase phase = Phase::idle;
  };

  static bool inside(const Member& m, u64 epoch) {
    return u64(m.call) + 1 == epoch && (m.phase == Phase::running || m.phase == Phase::leaving);
  }

  void agree(const Member& m, u64 sent, u64 other, const char* what) {
    if (sent != other) {
      fail(m, std::string("invariant 6: sent ") + std::to_string(sent) + ", " + what + " " +
                  std::to_string(other));
    }
  }

  // --- a collective's stream: begin, wait, verify, use the memory for something else -------------

  bool stream_turn(Member& m) {
    const TestCollective& c = bench_.scenario->collectives[m.collective];
    if (m.phase == Phase::idle) {
      if (m.call < int(c.calls.size())) begin_call(m, c);
    } else if (m.phase == Phase::leaving && m.groups[0]->left()) {
      m.phase = Phase::over;
      verify(m, c);
      return true;
    } else if (m.phase == Phase::over) {
      uint8_t* pool = simulation_.pool(m.place);
      const TestCall& call = c.calls[m.call];
      memset(pool + call.base, 0x5a + m.call, c.tables[call.table].extent);
      m.phase = Phase::idle;
      if (++m.call < int(c.calls.size())) return true;
      --bench_.open;
    }
    return false;
  }

  void begin_call(Member& m, const TestCollective& c) {
    const TestCall& call = c.calls[m.call];
    const TestTable& table = c.tables[call.table];
    uint8_t* pool = simulation_.pool(m.place);
    const u64 key = c.call_key(m.call), unit = c.reduce ? size_of(c.slot) : 1;
    m.to_write = 0;
    m.written.assign(c.reduce ? c.window_elements * size_of(c.window) : table.extent, 0x80);
    for (size_t j = 0; j < table.segments.size(); ++j) {
      const Segment& g = table.segments[j];
      const bool own = g.node == m.geometry.node && g.column == m.geometry.column;
      if (!c.reduce && own) fill_bytes(pool + call.base + g.offset, g.length, mix(key, j));
      for (u64 i = 0; c.reduce && i < g.length; ++i) {
        const double value = gradient(key, m.place, g.offset + i, c.slot, c.integers);
        store_value(pool + call.base + (g.offset + i) * unit, c.slot, value);
      }
      if (c.reduce && !own) continue;
      const u64 size = c.reduce ? size_of(c.window) : 1;
      memset(m.written.data() + (c.reduce ? g.window : g.offset) * size, 0, g.length * size);
      m.to_write += g.length * size;
    }
    simulation_.endpoint(m.endpoint).epoch = u64(m.call) + 1;
    const TableView view = table.rails[m.geometry.column].view();
    for (auto& group : m.groups) {
      group->begin(view, call, c.window_base, u64(m.call) + 1, m.queues.data());
    }
    m.ended = 0, m.phase = Phase::running;
    m.begun.assign(m.groups.size(), 0);
    for (int g = 0; g < bench_.scenario->groups; ++g) bench_.actors.wake(m.first_actor + 1 + g);
  }

  bool group_turn(Member& m, int g) {
    const int groups = bench_.scenario->groups;
    if (m.fabric->aborted()) {
      bench_.actors.retire(m.first_actor + 1 + g);
      return false;
    }
    if (m.phase != Phase::running || m.begun[g] == 2) return false;
    Operator& op = *m.groups[g];
    if (m.begun[g] == 0) {
      m.begun[g] = 1;
      op.begin_group(g, groups);
      for (int q = g; q < bench_.scenario->nodes; q += groups) m.seen[q] = m.queues[q];
      if (g == 0) op.enter();
      return true;
    }
    const bool moved = op.step(m.geometry, g, groups, m.turn[g]);
    check_queues(m, g);
    if (!op.finished(m.geometry, g, groups)) return moved;
    op.end_group(g, groups);
    m.begun[g] = 2;
    if (++m.ended == groups) {
      m.groups[0]->leave();
      m.phase = Phase::leaving;
      bench_.actors.wake(m.first_actor);
    }
    return false;
  }

  // --- what must hold ----------------------------------------------------------------------------

  std::string where(const Member& m) const {
    return std::string(bench_.scenario->collectives[m.collective].reduce ? "reduce" : "gather") +
           " " + std::to_string(m.collective) + ", place (" + std::to_string(m.geometry.node) +
           ", " + std::to_string(m.geometry.column) + "), call " + std::to_string(m.call + 1);
  }

  void fail(const Member& m, const std::string& text) { simulation_.fail(where(m) + ": " + text); }

  void bounded(const Member& m, u64 more, u64 less, const char* what) {
    if (more - less > u64(bench_.scenario->slots)) {
      fail(m, std::string("invariant 1: ") + what + " " + std::to_string(int64_t(more - less)));
    }
  }

  // Invariants 1 and 2 of the queues of a group.
  void check_queues(Member& m, int group) {
    const TestCollective& c = bench_.scenario->collectives[m.collective];
    const GroupTable& table = c.tables[c.calls[m.call].table].rails[m.geometry.column];
    for (int q = group; q < bench_.scenario->nodes; q += bench_.scenario->groups) {
      const QueueState& s = m.queues[q];
      QueueState& seen = m.seen[q];
      const bool own = q == m.geometry.node;
      const bool last = m.geometry.next() == q;
      if (s.forwarded < seen.forwarded || s.delivered < seen.delivered ||
          s.acknowledged < seen.acknowledged || s.delivered > table.view().count(q)) {
        fail(m, "invariant 2: a cursor went back or too far");
      }
      if (s.acknowledged > s.delivered || (!last && s.acknowledged > s.forwarded)) {
        fail(m, "invariant 2: acknowledged before its uses");
      }
      seen = s;
      if (table.star) {
        check_star(m, c, q, own);
      } else {
        check_ring(m, c, q, own, last);
      }
    }
  }

  void check_ring(Member& m, const TestCollective& c, int q, bool own, bool last) {
    const QueueState& s = m.queues[q];
    const ControlLayout& l = c.layout;
    const bool sends = c.reduce ? !own : !last;
    const bool receives = c.reduce ? m.geometry.previous() != q : !own;
    if (sends) {
      const u64 sent = s.sent + (c.reduce ? s.delivered : s.forwarded);
      bounded(m, sent, simulation_.word(m.endpoint, l.acknowledged(q)), "sent - ack");
    }
    if (receives && bench_.scenario->nodes > 1) {
      const u64 taken = s.received + (c.reduce ? s.delivered : s.acknowledged);
      bounded(m, simulation_.word(m.endpoint, l.arrived(q)), taken, "arrived - received");
    }
  }

  void check_star(Member& m, const TestCollective& c, int q, bool own) {
    const ControlLayout& l = c.layout;
    for (int n = 0; n < bench_.scenario->nodes; ++n) {
      if (n == m.geometry.node || (!own && n != q)) continue;
      const QueueState& s = m.queues[n];
      // The own queue of a gather and the others of a reduction send; the others receive.
      if (own != c.reduce) {
        const u64 sent = s.star_sent + (c.reduce ? s.delivered : s.star_forwarded);
        bounded(m, sent, simulation_.word(m.endpoint, l.star_acknowledged(n)), "star sent - ack");
      } else {
        const u64 taken = s.star_received + (c.reduce ? m.queues[q].delivered : s.delivered);
        bounded(m, simulation_.word(m.endpoint, l.star_arrived(n)), taken,
                "star arrived - received");
      }
    }
  }

  // Invariant 3 and the contents of a call that is over.
  void verify(Member& m, const TestCollective& c) {
    const TestCall& call = c.calls[m.call];
    const TestTable& table = c.tables[call.table];
    if (m.to_write != 0) {
      return fail(m, "invariant 3: over with " + std::to_string(m.to_write) + " bytes missing");
    }
    const uint8_t* pool = simulation_.pool(m.place);
    for (size_t j = 0; j < table.segments.size(); ++j) {
      const Segment& g = table.segments[j];
      if (!c.reduce) {
        const u64 key = mix(c.call_key(m.call), j);
        if (!same_bytes(pool + call.base + g.offset, g.length, key)) {
          return fail(m, "contents: segment " + std::to_string(j) + " differs from its owner's");
        }
      } else if (g.node == m.geometry.node && g.column == m.geometry.column) {
        verify_window(m, c, g);
      }
    }
  }

  void verify_window(Member& m, const TestCollective& c, const Segment& g) {
    const TestCall& call = c.calls[m.call];
    const uint8_t* pool = simulation_.pool(m.place) + c.window_base;
    for (u64 i = 0; i < g.length; ++i) {
      const double mean = expected_mean(*bench_.scenario, c, m.call, g.offset + i, g.node);
      double& held = m.window[g.window + i];
      held = call.first ? mean : rounded_to(c.window, held + mean);
      const double found = load_value(pool + (g.window + i) * size_of(c.window), c.window);
      if (!(found == held)) {
        return fail(m, "contents: element " + std::to_string(g.window + i) + " of the window is " +
                           std::to_string(found) + ", not " + std::to_string(held));
      }
    }
  }

  Bench& bench_;
  Simulation& simulation_;
  Random& random_;
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace testing
}  // namespace megamuon
