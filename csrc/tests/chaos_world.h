// One schedule of the operators over the simulated fabric, with everything that must hold asserted.
//
// Owns the course of a run: whether an actor moves or something lands, aborts, the end.  A deadlock
// is a state where nothing is in flight, nobody can move and a call is open.  Used by
// csrc/tests/chaos.cpp; that it notices breaches is shown by its mutants.
#pragma once
#include "chaos_collectives.h"
#include "chaos_rails.h"

namespace megamuon {
namespace testing {

// Percentages and choices of one schedule.
struct Timing {
  SimulationOptions options;
  int actors = 50;       // how often an actor moves rather than something in flight
  int late_place = -1;   // its streams begin only when nothing else can move
  int interlude = 0;     // how often others move between two verbs of a turn
  int abort_after = 0;   // turns; 0: never
};

class World final : public Watcher {
 public:
  // Run one schedule; "" or what went wrong.
  std::string run(const Scenario& scenario, const Timing& timing, const Maker& maker, u64 seed) {
    bench_.scenario = &scenario, timing_ = timing, bench_.random = Random(seed);
    set_up(maker);
    u64 turns = 0;
    while (bench_.open > 0 && simulation_.failure().empty()) {
      if (!advance()) {
        simulation_.fail("deadlock: " + describe());
      } else if (++turns > kMostTurns) {
        simulation_.fail("no end: " + describe());
      } else if (turns == u64(timing_.abort_after)) {
        simulation_.abort();
        return stop();
      }
    }
    while (simulation_.failure().empty() && simulation_.land_one(random_, true)) {
    }
    if (simulation_.failure().empty()) {
      collectives_.check_quiet();
      rails_.check_quiet();
    }
    turns_ += turns;
    return simulation_.failure();
  }

  u64 turns() const { return turns_; }

 private:
  static constexpr u64 kMostTurns = 4000000;

  void set_up(const Maker& maker) {
    const Scenario& s = *bench_.scenario;
    simulation_.reset(s.places(), s.pool_bytes, timing_.options, this);
    collectives_.clear(), rails_.clear(), actors_.clear(), bench_.owners.clear();
    bench_.open = 0, depth_ = 0;
    for (size_t c = 0; c < s.collectives.size(); ++c) collectives_.add(int(c), maker);
    for (int k = 0; k < s.columns && !s.publish.parameters.empty(); ++k) rails_.add(k, maker);
    if (timing_.options.held >= 0) {
      simulation_.hold_back(int(random_.below(bench_.owners.size())));
    }
    for (int a = 0; a < actors_.count(); ++a) {
      if (actors_.group(a) >= 0) continue;
      const int owner = actors_.owner(a);
      const int place = actors_.rail(a) ? rails_.place(owner) : collectives_.place(owner);
      if (place == timing_.late_place) {
        actors_.make_late(a);
      } else {
        actors_.wake(a);
      }
    }
  }

  // Let something happen; false if nothing can.
  bool advance() {
    bool moved = true;
    if (actors_.any_ready() && (simulation_.quiet() || random_.chance(timing_.actors))) {
      turn(actors_.random_ready(random_));
    } else if (!simulation_.land_one(random_, false)) {
      if (actors_.any_ready()) {
        turn(actors_.random_ready(random_));
      } else {
        moved = depth_ == 0 && (actors_.let_late_begin() || simulation_.land_one(random_, true));
      }
    }
    simulation_.take_touched([&](int endpoint) {
      const Owner& o = bench_.owners[endpoint];
      const int first = o.rail ? rails_.first_actor(o.member) : collectives_.first_actor(o.member);
      const int count = o.rail ? 2 : bench_.scenario->groups + 1;
      for (int a = first; a < first + count; ++a) actors_.wake(a);
    });
    return moved;
  }

  void turn(int a) {
    actors_.begin_turn(a);
    const bool again = actors_.rail(a) ? rails_.turn(a)
                                       : collectives_.turn(actors_.owner(a), actors_.group(a));
    actors_.end_turn(a, again);
  }

  // Others move between two verbs of a turn, as if its thread had been preempted.
  void meanwhile() override {
    if (depth_ > 0 || timing_.interlude == 0 || !random_.chance(timing_.interlude)) return;
    ++depth_;
    for (u64 n = random_.below(60); n > 0 && simulation_.failure().empty() && advance(); --n) {
    }
    --depth_;
  }

  void written(int endpoint, u64 epoch, int place, u64 offset, u64 bytes, bool own_copy) override {
    if (bench_.owners[endpoint].rail) {
      rails_.written(endpoint, epoch, place, offset);
    } else {
      collectives_.written(endpoint, epoch, place, offset, bytes, own_copy);
    }
  }

  void read(int endpoint, u64 epoch, int place, u64, u64) override {
    if (!bench_.owners[endpoint].rail) collectives_.read(endpoint, epoch, place);
  }

  // After an abort every actor stops at its next turn, and what is in flight harms nobody.
  std::string stop() {
    while (actors_.let_late_begin()) {
    }
    for (int a = 0; a < actors_.count(); ++a) actors_.wake(a);
    for (int turns = 0; actors_.any_ready(); ++turns) {
      if (turns > actors_.count()) return "abort: an actor did not stop";
      const int a = actors_.random_ready(random_);
      actors_.begin_turn(a);
      if (actors_.rail(a)) {
        rails_.turn(a);
      } else if (actors_.group(a) >= 0) {
        collectives_.turn(actors_.owner(a), actors_.group(a));
      }
      actors_.retire(a);
    }
    while (simulation_.failure().empty() && simulation_.land_one(random_, true)) {
    }
    return simulation_.failure();
  }

  std::string describe() const {
    const std::string text = collectives_.describe();
    return text.empty() ? rails_.describe() : text;
  }

  Bench bench_;
  Simulation& simulation_ = bench_.simulation;
  Random& random_ = bench_.random;
  Actors& actors_ = bench_.actors;
  Collectives collectives_{bench_};
  Rails rails_{bench_};
  Timing timing_;
  int depth_ = 0;
  u64 turns_ = 0;
};

}  // namespace testing
}  // namespace megamuon
