// The schedule fuzzer of the operators: random shapes, random timing, and mutants that it must
// catch.
//
// Owns the command line, the mutants and the report; chaos_world.h runs a schedule, scenario.h
// makes one. Invariant: schedule i of seed s is the same on every machine, so a failure is replayed
// by its number. tools/chaos.py builds and runs this file.
//
//     chaos [--schedules N] [--first I] [--seed S] [--mutant NAME] [--stop]
//                                                  JSON on standard output
//     chaos --replay I [--seed S] [--mutant NAME]  one schedule, described
//     chaos --list                                 the mutants, as JSON
//     chaos --conversions                          bf16 and f16, exhaustively
//
// --stop: end at the first failure.
#include "../operators/all_gather.h"
#include "../operators/reduce_scatter.h"
#include "chaos_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

namespace megamuon {
namespace testing {

template <class Rules, class Op, bool reduce>
class Wrapped final : public Operator {
 public:
  Wrapped(SimulatedFabric& fabric, const ControlLayout& layout, const Geometry& place)
      : op_(fabric, layout, place) {}
  void begin(const TableView& table, const TestCall& call, u64 window_base, u64 epoch,
             QueueState* queues) override {
    if constexpr (reduce) {
      op_.begin(table, call.base, window_base, call.first, call.divisor, epoch, queues);
    } else {
      op_.begin(table, call.base, epoch, queues);
    }
  }
  void enter() override { op_.enter(); }
  void begin_group(int group, int groups) override { op_.begin_group(group, groups); }
  bool step(const Geometry& place, int group, int groups, int& turn) override {
    return step_group<Rules>(op_, place, group, groups, turn);
  }
  bool finished(const Geometry& place, int group, int groups) override {
    return group_finished(op_, place, group, groups);
  }
  void end_group(int group, int groups) override { op_.end_group(group, groups); }
  void leave() override { op_.leave(); }
  bool left() override { return op_.left(); }

 private:
  Op op_;
};

template <class Rules>
class WrappedPublish final : public Publisher {
 public:
  WrappedPublish(SimulatedFabric& fabric, const ControlLayout& layout, const Geometry& place,
                 const PublishParameter* parameters, PublishState* states, u64 tile_bytes)
      : sources_(place.nodes),
        op_(fabric, layout, place, parameters, states, sources_.data(), tile_bytes) {}
  void begin(const int* order, int count, u64 version) override {
    op_.begin(order, count, version);
  }
  bool step() override { return op_.step(); }
  bool finished() override { return op_.finished(); }

 private:
  std::vector<PublishSource> sources_;
  Publish<SimulatedFabric, Rules> op_;
};

template <class Rules>
std::unique_ptr<Operator> make_gather(SimulatedFabric& f, const ControlLayout& l,
                                      const Geometry& g) {
  return std::make_unique<Wrapped<Rules, AllGather<SimulatedFabric, Rules>, false>>(f, l, g);
}

template <class Rules>
std::unique_ptr<Operator> make_reduce(SimulatedFabric& f, const ControlLayout& l,
                                      const Geometry& g) {
  return std::make_unique<Wrapped<Rules, ReduceScatter<SimulatedFabric, Rules>, true>>(f, l, g);
}

template <class Rules>
std::unique_ptr<Publisher> make_publish(SimulatedFabric& f, const ControlLayout& l,
                                        const Geometry& g, const PublishParameter* p,
                                        PublishState* s, u64 bytes) {
  return std::make_unique<WrappedPublish<Rules>>(f, l, g, p, s, bytes);
}

// --- mutants -------------------------------------------------------------------------------------

struct Mutant {
  const char* name;
  bool caught;  // whether it must be; else it must pass
  Maker maker;
  Signals signals = Signals::strong;
  int slots = 0;  // fixed number of slots
};

#define MM_WITHOUT(rule) \
  struct Without_##rule : Sound { \
    static constexpr bool rule = false; \
  }
MM_WITHOUT(acknowledge_after_forward);
MM_WITHOUT(multicast_waits_for_node);
MM_WITHOUT(groups_do_not_block);
MM_WITHOUT(credit_per_queue);
MM_WITHOUT(counters_persist);
MM_WITHOUT(source_waits_for_owner);
MM_WITHOUT(slots_wait_for_acknowledgement);
MM_WITHOUT(leave_waits_for_node);
MM_WITHOUT(outbox_waits_for_put);
MM_WITHOUT(acknowledge_after_read);
MM_WITHOUT(sum_waits_for_node);
MM_WITHOUT(flags_carry_version);
MM_WITHOUT(sources_do_not_block);
MM_WITHOUT(retire_waits_for_puts);
#undef MM_WITHOUT

// Only the operators that have a rule are compiled without it.
constexpr Maker kSound{make_gather<Sound>, make_reduce<Sound>, make_publish<Sound>};
template <class Rules>
constexpr Maker kGather{make_gather<Rules>, make_reduce<Sound>, make_publish<Sound>};
template <class Rules>
constexpr Maker kReduce{make_gather<Sound>, make_reduce<Rules>, make_publish<Sound>};
template <class Rules>
constexpr Maker kPublish{make_gather<Sound>, make_reduce<Sound>, make_publish<Rules>};

// A rule that both collectives have is broken in each alone.
const Mutant kMutants[] = {
    {"acknowledge_after_forward", true, kGather<Without_acknowledge_after_forward>},
    {"multicast_waits_for_node", true, kGather<Without_multicast_waits_for_node>},
    {"groups_do_not_block", true, kGather<Without_groups_do_not_block>},
    {"groups_do_not_block_reduce", true, kReduce<Without_groups_do_not_block>},
    {"credit_per_queue", true, kGather<Without_credit_per_queue>},
    {"counters_persist", true, kGather<Without_counters_persist>},
    {"counters_persist_reduce", true, kReduce<Without_counters_persist>},
    {"source_waits_for_owner", true, kGather<Without_source_waits_for_owner>},
    {"slots_wait_for_acknowledgement", true, kGather<Without_slots_wait_for_acknowledgement>},
    {"slots_wait_for_acknowledgement_reduce", true,
     kReduce<Without_slots_wait_for_acknowledgement>},
    {"leave_waits_for_node", true, kGather<Without_leave_waits_for_node>},
    {"leave_waits_for_node_reduce", true, kReduce<Without_leave_waits_for_node>},
    {"outbox_waits_for_put", true, kReduce<Without_outbox_waits_for_put>},
    {"acknowledge_after_read", true, kReduce<Without_acknowledge_after_read>},
    {"sum_waits_for_node", true, kReduce<Without_sum_waits_for_node>},
    {"flags_carry_version", true, kPublish<Without_flags_carry_version>},
    {"sources_do_not_block", true, kPublish<Without_sources_do_not_block>},
    {"retire_waits_for_puts", true, kPublish<Without_retire_waits_for_puts>},
    {"weak_signals", true, kSound, Signals::own_data, 2},
    {"unordered_signals", true, kSound, Signals::unordered, 1},
    {"weak_signals_one_slot", false, kSound, Signals::own_data, 1},
};

const Mutant kNone{"", false, kSound};

// --- schedules -----------------------------------------------------------------------------------

Timing random_timing(Random& random) {
  Timing t;
  const int skips[] = {0, 0, 0, 50, 80, 95};
  for (int& skip : t.options.skip) skip = skips[random.below(6)];
  const int bounds[] = {1, 2, 4, 16, 63};
  t.options.puts_in_flight = bounds[random.below(5)];
  if (random.chance(30)) t.options.held = random.between(0, kLandings - 1);
  const int actors[] = {20, 50, 80, 95};
  t.actors = actors[random.below(4)];
  if (random.chance(30)) t.late_place = random.between(0, 7);
  if (random.chance(40)) t.interlude = random.between(1, 5);
  if (random.chance(4)) t.abort_after = random.between(1, 500);
  return t;
}

struct Options {
  u64 schedules = 1000, first = 0, seed = 0;
  bool stop = false, replay = false;
  const Mutant* mutant = &kNone;
};

std::string run_schedule(World& world, const Options& o, u64 index, std::string* text) {
  Random random(mix(o.seed, index));
  Limits limits;
  limits.slots_fixed = o.mutant->slots;
  const Scenario scenario = random_scenario(random, limits);
  Timing timing = random_timing(random);
  timing.options.signals = o.mutant->signals;
  if (text) *text = scenario.text();
  return world.run(scenario, timing, o.mutant->maker, random.next());
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

int run(const Options& o) {
  World world;
  const double start = seconds();
  u64 done = 0, failures = 0, where = 0;
  std::string first, scenario;
  for (u64 i = o.first; i < o.first + o.schedules; ++i, ++done) {
    const std::string failure = run_schedule(world, o, i, nullptr);
    if (failure.empty()) continue;
    if (failures++ == 0) {
      first = failure, where = i;
      World again;  // the description, and that the failure can be replayed
      if (run_schedule(again, o, i, &scenario) != failure) first += " (and not when replayed)";
    }
    if (o.stop) {
      ++done;
      break;
    }
  }
  printf("{\"schedules\": %llu, \"failures\": %llu, \"turns\": %llu, \"seconds\": %.3f",
         (unsigned long long)done, (unsigned long long)failures,
         (unsigned long long)world.turns(), seconds() - start);
  printf(", \"cpu_seconds\": %.3f", double(clock()) / CLOCKS_PER_SEC);
  if (failures) {
    printf(", \"first\": {\"schedule\": %llu, \"failure\": %s, \"scenario\": %s}",
           (unsigned long long)where, quoted(first).c_str(), quoted(scenario).c_str());
  }
  printf("}\n");
  return 0;
}

int replay(const Options& o) {
  World world;
  std::string text;
  const std::string failure = run_schedule(world, o, o.first, &text);
  printf("%s\n%s\n", text.c_str(), failure.empty() ? "all is well" : failure.c_str());
  return failure.empty() ? 0 : 1;
}

int list() {
  printf("[");
  const char* comma = "";
  for (const Mutant& m : kMutants) {
    printf("%s{\"name\": \"%s\", \"caught\": %s}", comma, m.name, m.caught ? "true" : "false");
    comma = ", ";
  }
  printf("]\n");
  return 0;
}

// Every half of a dtype there and back, and what lies between two neighbours; how many are wrong.
template <class Half>
int wrong_conversions(Dtype dtype) {
  int wrong = 0;
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float value = Half::load(uint16_t(h)), next = Half::load(uint16_t(h + 1));
    if (isnan(value)) {
      wrong += !isnan(Half::load(Half::store(value)));
      continue;
    }
    wrong += Half::store(value) != h;
    if (isinf(value) || isinf(next)) continue;
    wrong += rounded_to(dtype, double(value)) != double(value);
    const float middle = float((double(value) + double(next)) / 2);  // exact
    if (h == 0x7fff || h == 0xffff || middle == value) continue;
    wrong += Half::store(middle) != (h % 2 ? h + 1 : h);
    wrong += Half::store(nextafterf(middle, value)) != h;
    wrong += Half::store(nextafterf(middle, next)) != h + 1;
    wrong += double(Half::load(Half::store(middle))) != rounded_to(dtype, double(middle));
  }
  return wrong;
}

int conversions() {
  printf("{\"bf16\": %d, \"f16\": %d}\n", wrong_conversions<arithmetic::BF16>(Dtype::bf16),
         wrong_conversions<arithmetic::F16>(Dtype::f16));
  return 0;
}

const Mutant* find(const std::string& name) {
  for (const Mutant& m : kMutants) {
    if (name == m.name) return &m;
  }
  fprintf(stderr, "chaos: there is no mutant '%s'; --list shows them\n", name.c_str());
  exit(2);
}

int main(int count, char** arguments) {
  Options o;
  for (int i = 1; i < count; ++i) {
    const std::string flag = arguments[i];
    if (flag == "--list") return list();
    if (flag == "--conversions") return conversions();
    if (flag == "--stop") {
      o.stop = true;
      continue;
    }
    if (i + 1 == count) {
      fprintf(stderr, "chaos: %s needs a value\n", flag.c_str());
      return 2;
    }
    const char* value = arguments[++i];
    const u64 number = strtoull(value, nullptr, 10);
    if (flag == "--schedules") {
      o.schedules = number;
    } else if (flag == "--first") {
      o.first = number;
    } else if (flag == "--seed") {
      o.seed = number;
    } else if (flag == "--replay") {
      o.first = number, o.replay = true;
    } else if (flag == "--mutant") {
      o.mutant = find(value);
    } else {
      fprintf(stderr, "chaos: unknown argument %s\n", flag.c_str());
      return 2;
    }
  }
  return o.replay ? replay(o) : run(o);
}

}  // namespace testing
}  // namespace megamuon

int main(int count, char** arguments) { return megamuon::testing::main(count, arguments); }
