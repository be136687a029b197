// Whose turn it is: actors that are ready, asleep until something lands at their place, late, or
// gone.
//
// Owns what the parts of a run share (Bench) and the choice of the next turn.  Invariant: an actor
// sleeps only after a turn in which nothing moved, and whatever could let it move wakes it; so when
// nobody is ready and nothing is in flight, nobody will ever move.
#pragma once
#include "../operators/publish.h"
#include "scenario.h"

#include <memory>

namespace megamuon {
namespace testing {

class Actors {
 public:
  // Group -1 is a place's stream, which begins calls; the others step the queues of an operator.
  int add(int owner, int group, bool rail) {
    actors_.push_back({owner, group, rail, Mode::asleep, false, 0});
    return int(actors_.size()) - 1;
  }
  void clear() { actors_.clear(), ready_.clear(), late_.clear(); }

  int count() const { return int(actors_.size()); }
  int owner(int a) const { return actors_[a].owner; }
  int group(int a) const { return actors_[a].group; }
  bool rail(int a) const { return actors_[a].rail; }
  bool any_ready() const { return !ready_.empty(); }
  int random_ready(Random& random) const { return ready_[random.below(ready_.size())]; }

  void wake(int a) {
    if (actors_[a].mode == Mode::asleep) make_ready(a);
    if (actors_[a].mode == Mode::busy) actors_[a].woken = true;
  }

  // Ready only when `let_late_begin` says so.
  void make_late(int a) {
    actors_[a].mode = Mode::late;
    late_.push_back(a);
  }
  bool let_late_begin() {
    if (late_.empty()) return false;
    make_ready(late_.back());
    late_.pop_back();
    return true;
  }

  void begin_turn(int a) {
    const size_t i = actors_[a].index;
    ready_[i] = ready_.back();
    actors_[ready_[i]].index = i;
    ready_.pop_back();
    actors_[a].mode = Mode::busy, actors_[a].woken = false;
  }
  void end_turn(int a, bool again) {
    if (actors_[a].mode == Mode::gone) return;
    actors_[a].mode = Mode::asleep;
    if (again || actors_[a].woken) make_ready(a);
  }
  void retire(int a) { actors_[a].mode = Mode::gone; }

 private:
  enum class Mode { asleep, ready, busy, late, gone };
  struct Actor {
    int owner, group;
    bool rail;
    Mode mode;
    bool woken;    // while it was busy
    size_t index;  // in ready_
  };

  void make_ready(int a) {
    actors_[a].mode = Mode::ready;
    actors_[a].index = ready_.size();
    ready_.push_back(a);
  }

  std::vector<Actor> actors_;
  std::vector<int> ready_, late_;
};

// Who an endpoint of the simulation belongs to.
struct Owner {
  int member;  // or relay
  bool rail;
};

struct Bench {
  const Scenario* scenario = nullptr;
  Random random{0};
  Simulation simulation;
  Actors actors;
  std::vector<Owner> owners;  // by endpoint
  int open = 0;               // members and relays that are not through
};

// An all-gather or a reduce-scatter as one thread group sees it.
class Operator {
 public:
  virtual ~Operator() = default;
  virtual void begin(const TableView& table, const TestCall& call, u64 window_base, u64 epoch,
                     QueueState* queues) = 0;
  virtual void enter() = 0;
  virtual void begin_group(int group, int groups) = 0;
  virtual bool step(const Geometry& place, int group, int groups, int& turn) = 0;
  virtual bool finished(const Geometry& place, int group, int groups) = 0;
  virtual void end_group(int group, int groups) = 0;
  virtual void leave() = 0;
  virtual bool left() = 0;
};

class Publisher {
 public:
  virtual ~Publisher() = default;
  virtual void begin(const int* order, int count, u64 version) = 0;
  virtual bool step() = 0;
  virtual bool finished() = 0;
};

// Makes the operators of one set of rules.
struct Maker {
  std::unique_ptr<Operator> (*gather)(SimulatedFabric&, const ControlLayout&, const Geometry&);
  std::unique_ptr<Operator> (*reduce)(SimulatedFabric&, const ControlLayout&, const Geometry&);
  std::unique_ptr<Publisher> (*publish)(SimulatedFabric&, const ControlLayout&, const Geometry&,
                                        const PublishParameter*, PublishState*, u64);
};

}  // namespace testing
}  // namespace megamuon
