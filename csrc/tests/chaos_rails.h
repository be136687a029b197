// The publishes of a run: rounds at every place of every rail, and what must hold.
//
// Owns a Relay per place.  Invariants asserted: every tile is written once per round and none
// before the place has used the version before (3, 4); a flag holds the version of the bytes in
// place (7); a round that is over reads no copy any more.
#pragma once
#include "chaos_actors.h"

namespace megamuon {
namespace testing {

class Rails {
 public:
  explicit Rails(Bench& bench)
      : bench_(bench), simulation_(bench.simulation), random_(bench.random) {}

  void clear() { relays_.clear(); }
  int first_actor(int relay) const { return relays_[relay]->first_actor; }
  int place(int relay) const { return relays_[relay]->place; }

  void add(int column, const Maker& maker) {
    const Scenario& s = *bench_.scenario;
    const TestPublish& p = s.publish;
    std::vector<int> peers;
    for (int n = 0; n < s.nodes; ++n) {
      peers.push_back(simulation_.add_endpoint(n * s.columns + column, p.layout));
    }
    for (int n = 0; n < s.nodes; ++n) {
      relays_.emplace_back(new Relay);
      Relay& r = *relays_.back();
      r.column = column, r.node = n, r.place = n * s.columns + column, r.endpoint = peers[n];
      r.geometry = {s.nodes, 1, n, 0};
      r.fabric.reset(new SimulatedFabric(simulation_, r.geometry, peers));
      for (const TestParameter& q : p.parameters) {
        r.parameters.push_back({q.node, q.offset, q.bytes, q.first_tile});
      }
      r.states.resize(p.parameters.size());
      r.tile_epoch.assign(p.layout.tiles, 0);
      r.publisher = maker.publish(*r.fabric, p.layout, r.geometry, r.parameters.data(),
                                  r.states.data(), p.tile_bytes);
      bench_.owners.push_back({int(relays_.size()) - 1, true});
      r.first_actor = bench_.actors.count();
      for (int g = -1; g < 1; ++g) bench_.actors.add(int(relays_.size()) - 1, g, true);
      ++bench_.open;
    }
  }

  // One turn of actor `a`; whether it wants another at once.
  bool turn(int a) {
    Relay& r = *relays_[bench_.actors.owner(a)];
    if (r.fabric->aborted()) {
      bench_.actors.retire(a);
      return false;
    }
    return bench_.actors.group(a) < 0 ? stream_turn(r) : step(r);
  }

  void written(int endpoint, u64 epoch, int place, u64 offset) {
    const TestPublish& p = bench_.scenario->publish;
    const int column = relays_[bench_.owners[endpoint].member]->column;
    for (auto& relay : relays_) {
      if (relay->place != place || relay->column != column) continue;
      size_t q = p.parameters.size() - 1;
      while (q > 0 && p.parameters[q].offset > offset) --q;
      const u64 within = offset - p.parameters[q].offset;
      u64& seen = relay->tile_epoch[p.parameters[q].first_tile + within / p.tile_bytes];
      if (seen >= epoch) fail(*relay, "invariant 3: a tile was written twice");
      if (relay->consumed + 1 != int(epoch)) fail(*relay, "invariant 7: a tile came too early");
      if (p.parameters[q].node == relay->node) fail(*relay, "an owner's copy was written");
      seen = epoch;
    }
  }

  void check_quiet() {
    for (auto& r : relays_) check_flags(*r);
  }

  // A round that is not over; "" if there is none.
  std::string describe() const {
    for (auto& r : relays_) {
      if (r->round < int(bench_.scenario->publish.rounds.size())) {
        return "publish, place (" + std::to_string(r->node) + ", " + std::to_string(r->column) +
               "), round " + std::to_string(r->round + 1);
      }
    }
    return "";
  }

 private:
  // A publish at a place.
  struct Relay {
    int column, node, place, endpoint, first_actor;
    Geometry geometry;
    std::unique_ptr<SimulatedFabric> fabric;
    std::unique_ptr<Publisher> publisher;
    std::vector<PublishParameter> parameters;
    std::vector<PublishState> states;
    std::vector<int> tasks, waiting;
    std::vector<u64> tile_epoch;
    u64 posted = 0;
    int round = 0;      // being published
    int consumed = 0;   // rounds that this place has verified and finished
    bool begun = false, finished = false;
  };

  void fail(const Relay& r, const std::string& text) {
    simulation_.fail("publish, place (" + std::to_string(r.node) + ", " + std::to_string(r.column) +
                     "), round " + std::to_string(r.round + 1) + ": " + text);
  }

  bool step(Relay& r) {
    if (!r.begun || r.finished) return false;
    const bool moved = r.publisher->step();
    if (!r.publisher->finished()) return moved;
    if (simulation_.endpoint(r.endpoint).unread != 0) {
      fail(r, "the round is over while a put still reads a copy");
    }
    r.finished = true;
    bench_.actors.wake(r.first_actor);
    return false;
  }

  bool stream_turn(Relay& r) {
    if (!r.begun) return begin_round(r);
    if (!r.tasks.empty()) {
      hand_over(r);
      return true;
    }
    for (size_t i = 0; i < r.waiting.size();) {
      if (!check_arrived(r, r.waiting[i])) {
        ++i;
        continue;
      }
      r.waiting[i] = r.waiting.back();
      r.waiting.pop_back();
    }
    if (!r.waiting.empty() || !r.finished) return false;
    for (int p : bench_.scenario->publish.rounds[r.round].order) check_copy(r, p);
    r.consumed = ++r.round;
    r.begun = false;
    for (auto& other : relays_) {
      if (other->column == r.column) bench_.actors.wake(other->first_actor);
    }
    if (r.round == int(bench_.scenario->publish.rounds.size())) --bench_.open;
    return true;
  }

  // The step between two rounds: every place of the rail has used the last version.
  bool begin_round(Relay& r) {
    const TestPublish& p = bench_.scenario->publish;
    if (r.round == int(p.rounds.size())) return false;
    for (auto& other : relays_) {
      if (other->column == r.column && other->consumed < r.round) return false;
    }
    const TestRound& round = p.rounds[r.round];
    simulation_.endpoint(r.endpoint).epoch = u64(r.round) + 1;
    r.publisher->begin(round.order.data(), int(round.order.size()), round.version);
    r.waiting = round.order;
    for (int q : round.order) {
      if (p.parameters[q].node == r.node) r.tasks.push_back(q);
    }
    r.begun = true, r.finished = false;
    bench_.actors.wake(r.first_actor + 1);
    return true;
  }

  void hand_over(Relay& r) {
    const TestPublish& p = bench_.scenario->publish;
    const size_t i = random_.below(r.tasks.size());
    const int q = r.tasks[i];
    r.tasks[i] = r.tasks.back();
    r.tasks.pop_back();
    fill_bytes(simulation_.pool(r.place) + p.parameters[q].offset, p.parameters[q].bytes,
               p.content_key(r.column, q, p.rounds[r.round].version));
    simulation_.store_word(r.endpoint, p.layout.task(r.posted % u64(p.layout.parameters)), u64(q));
    simulation_.store_word(r.endpoint, p.layout.task_tail(), ++r.posted);
  }

  bool check_arrived(Relay& r, int q) {
    const TestPublish& p = bench_.scenario->publish;
    const u64 flag = simulation_.word(r.endpoint, p.layout.parameter_flag(q));
    const u64 version = p.rounds[r.round].version;
    if (flag > version) fail(r, "invariant 7: a flag holds a version that does not exist yet");
    if (flag < version) return false;
    check_copy(r, q);
    return true;
  }

  // Invariant 7.
  void check_copy(Relay& r, int q) {
    const TestPublish& p = bench_.scenario->publish;
    const TestParameter& parameter = p.parameters[q];
    const u64 version = p.rounds[r.round].version;
    if (!same_bytes(simulation_.pool(r.place) + parameter.offset, parameter.bytes,
                    p.content_key(r.column, q, version))) {
      fail(r, "invariant 7: parameter " + std::to_string(q) + " is not version " +
                  std::to_string(version));
    }
  }

  void check_flags(const Relay& r) {
    const TestPublish& p = bench_.scenario->publish;
    for (size_t q = 0; q < p.parameters.size(); ++q) {
      u64 version = 0;
      for (const TestRound& round : p.rounds) {
        for (int index : round.order) version = index == int(q) ? round.version : version;
      }
      const u64 tiles = (p.parameters[q].bytes + p.tile_bytes - 1) / p.tile_bytes;
      for (u64 t = 0; t < tiles && p.parameters[q].node != r.node; ++t) {
        const u64 flag =
            simulation_.word(r.endpoint, p.layout.tile_flag(p.parameters[q].first_tile + t));
        if (flag != version) fail(r, "invariant 7: a tile's flag is " + std::to_string(flag));
      }
    }
  }

  Bench& bench_;
  Simulation& simulation_;
  Random& random_;
  std::vector<std::unique_ptr<Relay>> relays_;
};

}  // namespace testing
}  // namespace megamuon
