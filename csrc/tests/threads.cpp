// The operators among real threads: every place an engine and a user, for ThreadSanitizer.
//
// Owns the threads, their random pauses and the driver's command line; scenario.h makes the
// scenarios and knows what must come out.  What runs is the host library itself (host_api.h), each
// rank's control memory and pool being plain memory of this process.  A user touches a range only
// before its call and after it is over, so a write that comes too late or a read that comes too
// early is a data race that the sanitizer reports. tools/chaos.py --tsan-seconds builds and runs
// this file.
//
//     threads [--seconds X] [--seed S] [--scenario I]   JSON on standard output
#include "threads_setup.h"

#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <thread>

namespace megamuon {
namespace testing {

// The user of one place: one thread that keeps all its operators going.
class User {
 public:
  User(Shared& shared, int place)
      : shared_(shared),
        scenario_(shared.scenario),
        place_(place),
        engine_(shared.engines[place]),
        pool_(static_cast<uint8_t*>(shared.bases[place])),
        random_(mix(shared.seed, u64(place))) {
    for (const TestCollective& c : scenario_.collectives) {
      jobs_.push_back({0, -1, std::vector<double>(c.reduce ? c.window_elements : 0, 0)});
    }
  }

  void run() {
    u64 turns = 0;
    const u64 gives_up = random_.below(200);
    while (open() > 0 && !shared_.failed()) {
      if (place_ == shared_.aborts_at && turns++ == gives_up) {
        mm_engine_abort(engine_, "the test says so");
        shared_.gave_up.store(true);
      }
      const size_t i = random_.below(jobs_.size() + 1);
      const int result = i < jobs_.size() ? advance(int(i)) : advance_publish();
      if (result < 0) {
        // Everybody must hear of it, and only where somebody gave up.
        if (shared_.aborts_at < 0) shared_.fail(place_, "failed: " + last_error(engine_));
        return;
      }
      rest();
    }
  }

 private:
  struct Job {
    int call;
    int64_t ticket;  // of the call under way; -1: none is
    std::vector<double> window;
  };

  int open() const {
    int count = rounds_left() > 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      count += jobs_[i].call < int(scenario_.collectives[i].calls.size());
    }
    return count;
  }

  int rounds_left() const {
    return scenario_.publish.parameters.empty() ? 0 : int(scenario_.publish.rounds.size()) - round_;
  }

  void rest() {
    const u64 what = random_.below(20);
    if (what == 0) usleep(useconds_t(random_.below(300)));
    if (what < 12) sched_yield();
  }

  // Begin a call, or look whether it is over; -1: the engine has failed.
  int advance(int i) {
    const TestCollective& c = scenario_.collectives[i];
    Job& job = jobs_[i];
    if (job.call == int(c.calls.size())) return 0;
    const TestCall& call = c.calls[job.call];
    const int op = shared_.operators[place_][i];
    if (job.ticket < 0) {
      prepare(c, job);
      job.ticket = c.reduce ? mm_reduce_scatter(engine_, op, call.table, call.base, c.window_base,
                                                call.first, call.divisor)
                            : mm_all_gather(engine_, op, call.table, call.base);
      return job.ticket < 0 ? -1 : 0;
    }
    // A user that still has other work must not stop for one operator: its peers may wait for
    // another.
    int over = mm_done(engine_, op, job.ticket);
    if (over == 0 && open() == 1) over = mm_wait(engine_, op, job.ticket, 100) == 0 ? 1 : -1;
    if (over <= 0) return over;
    verify(c, job);
    memset(pool_ + call.base, 0x5a, c.tables[call.table].extent);
    ++job.call, job.ticket = -1;
    return 1;
  }

  void prepare(const TestCollective& c, const Job& job) {
    const TestCall& call = c.calls[job.call];
    const TestTable& table = c.tables[call.table];
    const u64 key = c.call_key(job.call);
    for (size_t j = 0; j < table.segments.size(); ++j) {
      const Segment& g = table.segments[j];
      if (!c.reduce && owns(g)) fill_bytes(pool_ + call.base + g.offset, g.length, mix(key, j));
      for (u64 i = 0; c.reduce && i < g.length; ++i) {
        const double value = gradient(key, place_, g.offset + i, c.slot, c.integers);
        store_value(pool_ + call.base + (g.offset + i) * size_of(c.slot), c.slot, value);
      }
    }
  }

  bool owns(const Segment& g) const { return g.node * scenario_.columns + g.column == place_; }

  void verify(const TestCollective& c, Job& job) {
    const TestCall& call = c.calls[job.call];
    const TestTable& table = c.tables[call.table];
    for (size_t j = 0; j < table.segments.size(); ++j) {
      const Segment& g = table.segments[j];
      if (!c.reduce) {
        const u64 key = mix(c.call_key(job.call), j);
        if (!same_bytes(pool_ + call.base + g.offset, g.length, key)) {
          shared_.fail(place_, "segment " + std::to_string(j) + " differs from its owner's");
        }
        continue;
      }
      for (u64 i = 0; owns(g) && i < g.length; ++i) {
        const double mean = expected_mean(scenario_, c, job.call, g.offset + i, g.node);
        double& held = job.window[g.window + i];
        held = call.first ? mean : rounded_to(c.window, held + mean);
        const u64 at = c.window_base + (g.window + i) * size_of(c.window);
        if (!(load_value(pool_ + at, c.window) == held)) {
          shared_.fail(place_,
                       "element " + std::to_string(g.window + i) + " of the window differs");
        }
      }
    }
  }

  int advance_publish() {
    if (rounds_left() == 0) return 0;
    const TestPublish& p = scenario_.publish;
    const TestRound& round = p.rounds[round_];
    const int op = shared_.operators[place_].back();
    if (!begun_) {
      for (int rank : rail_of(scenario_, place_ % scenario_.columns)) {
        // A rank with nothing outstanding need not hear of an abort, so the step between rounds
        // asks.
        if (shared_.consumed[rank].load(std::memory_order_acquire) < round_) {
          return shared_.gave_up.load() ? -1 : 0;
        }
      }
      begun_ = true;
      tasks_.clear();
      for (int q : round.order) {
        if (p.parameters[q].node == place_ / scenario_.columns) tasks_.push_back(q);
      }
      return mm_publish_begin(engine_, op, int(round.order.size()), round.order.data(),
                              round.version);
    }
    if (!tasks_.empty()) return hand_over(op, round.version);
    for (int q : round.order) {
      if (mm_publish_arrived(engine_, op, q) < round.version) return -int(mm_failed());
    }
    check_copies(round);
    const int over = mm_publish_round_done(engine_, op);
    if (over <= 0) return over < 0 || mm_failed() ? -1 : 0;
    begun_ = false, ++round_;
    shared_.consumed[place_].store(round_, std::memory_order_release);
    return 1;
  }

  bool mm_failed() { return !last_error(engine_).empty(); }

  int hand_over(int op, u64 version) {
    const TestPublish& p = scenario_.publish;
    const int q = tasks_.back();
    tasks_.pop_back();
    fill_bytes(pool_ + p.parameters[q].offset, p.parameters[q].bytes,
               p.content_key(place_ % scenario_.columns, q, version));
    return mm_publish_task(engine_, op, q);
  }

  void check_copies(const TestRound& round) {
    const TestPublish& p = scenario_.publish;
    for (int q : round.order) {
      if (!same_bytes(pool_ + p.parameters[q].offset, p.parameters[q].bytes,
                      p.content_key(place_ % scenario_.columns, q, round.version))) {
        shared_.fail(place_, "parameter " + std::to_string(q) + " is not the version it claims");
      }
    }
  }

  Shared& shared_;
  const Scenario& scenario_;
  const int place_;
  mm_engine* engine_;
  uint8_t* pool_;
  Random random_;
  std::vector<Job> jobs_;
  std::vector<int> tasks_;
  int round_ = 0;
  bool begun_ = false;
};

// "" or what went wrong.
std::string run_scenario(u64 seed, std::string* text) {
  Random random(seed);
  Limits limits;
  limits.nodes = 4, limits.columns = 3, limits.slots = 4, limits.smallest_chunk = 256;
  limits.large_chunks = false;
  const Scenario scenario = random_scenario(random, limits);
  *text = scenario.text();
  const bool aborts = random.chance(15);
  const u64 link = random.chance(30) ? random.below(20000) : 0;
  Shared shared(scenario, seed, aborts ? random.between(0, scenario.places() - 1) : -1, link);
  if (open(shared)) {
    std::vector<std::thread> threads;
    for (int p = 0; p < scenario.places(); ++p) {
      threads.emplace_back([&shared, p] { User(shared, p).run(); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (mm_engine* engine : shared.engines) mm_engine_destroy(engine);
  return shared.failure;
}

int main(int count, char** arguments) {
  double limit = 10;
  u64 seed = 0, first = 0;
  bool one = false;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string flag = arguments[i];
    if (flag == "--seconds") limit = atof(arguments[i + 1]);
    if (flag == "--seed") seed = strtoull(arguments[i + 1], nullptr, 10);
    if (flag == "--scenario") first = strtoull(arguments[i + 1], nullptr, 10), one = true;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  u64 done = 0;
  std::string failure, text;
  while (failure.empty() && (one ? done == 0 : elapsed() < limit)) {
    failure = run_scenario(mix(seed, first + done), &text);
    ++done;
  }
  printf("{\"scenarios\": %llu, \"failures\": %d, \"seconds\": %.1f", (unsigned long long)done,
         failure.empty() ? 0 : 1, elapsed());
  if (!failure.empty()) {
    printf(", \"first\": {\"scenario\": %llu, \"failure\": \"%s\", \"shape\": \"%s\"}",
           (unsigned long long)(first + done - 1), failure.c_str(), text.c_str());
  }
  printf("}\n");
  return failure.empty() ? 0 : 1;
}

}  // namespace testing
}  // namespace megamuon

int main(int count, char** arguments) { return megamuon::testing::main(count, arguments); }
