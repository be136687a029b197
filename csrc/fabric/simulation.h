// A fabric of virtual places in one thread, as late and as disordered as the contract allows.
//
// Owns the memory of the places, what is in flight between them, and the choice of what lands next.
// Invariants: every delay and every choice comes from the caller's Random, so a run is a function
// of its seed; O1 - O4 of fabric.h hold and nothing beyond them: a put reads its source, lands,
// raises its word and reports put_done at four separate times; only signals of one queue on one
// word keep their order; acknowledgements, raises and set_local overtake each other; what a place
// writes to other columns lands late, but before its later raise or set_local does.  `Signals`
// weakens O1 for mutants.  Tested by csrc/tests/chaos.cpp, whose mutants show that breaches are
// seen.
#pragma once
#include "arithmetic.h"
#include "fabric.h"

#include <string.h>

#include <string>
#include <vector>

namespace megamuon {

// splitmix64.
struct Random {
  u64 state;
  explicit Random(u64 seed) : state(seed) {}
  u64 next() {
    u64 z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u64 below(u64 n) { return ((next() >> 32) * n) >> 32; }
  int between(int low, int high) { return low + int(below(u64(high - low + 1))); }
  bool chance(int percent) { return int(below(100)) < percent; }
};

// strong: O1.  own_data: a signal follows the data of its own put alone.  unordered: it follows
// nothing.
enum class Signals : int { strong, own_data, unordered };

enum class Landing : int { read, done, data, signal, raise, set, write };
constexpr int kLandings = 7;

struct SimulationOptions {
  Signals signals = Signals::strong;
  int puts_in_flight = 8;       // per queue, at most 63
  int skip[kLandings] = {};     // percent: how often a chosen landing is put off
  int held = -1;                // this kind of landing ...
  int held_endpoint = -1;       // ... from here happens only when nothing else can
};

// What a test asserts about accesses to pools; `epoch` is the call in which the access was issued.
class Watcher {
 public:
  virtual ~Watcher() = default;
  // own_copy: `load` into the own pool.
  virtual void written(int endpoint, u64 epoch, int place, u64 offset, u64 bytes,
                       bool own_copy) = 0;
  virtual void read(int endpoint, u64 epoch, int place, u64 offset, u64 bytes) = 0;
  // Before each verb that writes: others may move here.
  virtual void meanwhile() = 0;
};

class Simulation {
 public:
  // An operator at a place.
  struct Channel {
    // done: the first so many puts are reported to have read their sources.
    u64 posted = 0, done = 0;
    u64 reported = 0;  // bit s % 64: put s is
    std::vector<int> unsignalled;
  };
  struct Endpoint {
    int place = 0;
    u64 epoch = 0;
    std::vector<uint8_t> control;
    std::vector<Channel> channels;
    std::vector<int> peers;  // endpoint by node * columns + column
    std::vector<int> writes;  // in flight to other columns, oldest first
    u64 written = 0;
    int unread = 0;  // puts that have not read their sources yet
    bool touched = false;
  };

  void reset(int places, u64 pool_bytes, const SimulationOptions& options, Watcher* watcher) {
    options_ = options, watcher_ = watcher, used_ = 0, aborted_ = false, failure_.clear();
    events_.clear(), touched_.clear(), free_.clear();
    for (size_t i = 0; i < cargo_.size(); ++i) free_.push_back(int(i));
    if (pools_.size() < size_t(places)) pools_.resize(places);
    for (int p = 0; p < places; ++p) pools_[p].assign(pool_bytes, 0xcd);
  }

  int add_endpoint(int place, const ControlLayout& layout) {
    if (endpoints_.size() == used_) endpoints_.emplace_back();
    Endpoint& e = endpoints_[used_];
    e.place = place, e.epoch = 0, e.written = 0, e.unread = 0, e.touched = false;
    e.control.assign(layout.bytes(), 0xa5);
    memset(e.control.data(), 0, layout.rings());
    e.channels.resize(2 * layout.nodes);
    for (Channel& c : e.channels) c.posted = c.done = c.reported = 0, c.unsignalled.clear();
    e.writes.clear();
    return int(used_++);
  }

  void hold_back(int endpoint) { options_.held_endpoint = endpoint; }
  Endpoint& endpoint(int index) { return endpoints_[index]; }
  uint8_t* pool(int place) { return pools_[place].data(); }
  u64 pool_bytes() const { return pools_[0].size(); }
  void meanwhile() { watcher_->meanwhile(); }
  bool quiet() const { return events_.empty(); }
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }
  const std::string& failure() const { return failure_; }
  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }

  u64 word(int endpoint, u64 offset) const {
    u64 value;
    memcpy(&value, endpoints_[endpoint].control.data() + offset, 8);
    return value;
  }
  void store_word(int endpoint, u64 offset, u64 value) {
    memcpy(endpoints_[endpoint].control.data() + offset, &value, 8);
    touch(endpoint);
  }

  // Endpoints where something landed since the last call.
  template <class Use>
  void take_touched(Use use) {
    for (int e : touched_) endpoints_[e].touched = false, use(e);
    touched_.clear();
  }

  // Let one landing happen; false if there is none (of those that are not held, unless `held`).
  bool land_one(Random& random, bool held) {
    if (events_.empty()) return false;
    for (int attempt = 0; attempt < 6; ++attempt) {
      const size_t i = random.below(events_.size());
      if (is_held(events_[i]) || random.chance(options_.skip[int(events_[i].kind)])) continue;
      if (land(i)) return true;
    }
    const size_t count = events_.size(), start = random.below(count);
    for (size_t n = 0; n < count; ++n) {
      const size_t i = (start + n) % count;
      if ((held || !is_held(events_[i])) && land(i)) return true;
    }
    return false;
  }

  // --- what a SimulatedFabric issues -------------------------------------------------------------

  void post(int from, int to, int queue, Address target, Address source, u64 bytes, u64 word_offset,
            u64 delta) {
    Endpoint& e = endpoints_[from];
    Channel& c = e.channels[queue];
    if (c.posted - c.done >= u64(options_.puts_in_flight)) {
      return fail("a put was posted without may_put: queue " + std::to_string(queue));
    }
    const int id = take_cargo();
    Cargo& p = cargo_[id];
    p.from = from, p.to = to, p.queue = queue, p.target = target, p.source = source;
    p.bytes = bytes, p.word = word_offset, p.value = delta, p.sequence = c.posted++;
    p.epoch = e.epoch, p.landed = false, p.left = 3, p.at_place = -1;
    c.unsignalled.push_back(id);
    ++e.unread;
    check_range(p.source, from, bytes, "a put's source");
    check_range(p.target, to, bytes, "a put's target");
    events_.push_back({Landing::read, from, id, 0, 0, 0});
    if (options_.signals == Signals::unordered) {
      events_.push_back({Landing::signal, from, id, 0, 0, 0});
    }
  }

  void send_raise(int from, int to, u64 word_offset, u64 delta, bool set) {
    const Landing kind = set ? Landing::set : Landing::raise;
    events_.push_back({kind, from, to, word_offset, delta, endpoints_[from].written});
  }

  // Bytes for the pool of `place`: at once if it is the own one.  `source` is read now.
  void write_pool(int from, int place, u64 offset, const void* source, u64 bytes, bool own_copy) {
    Endpoint& e = endpoints_[from];
    if (offset + bytes > pools_[place].size()) return fail("a write beyond the pool");
    if (place == e.place) {
      memmove(pools_[place].data() + offset, source, bytes);
      watcher_->written(from, e.epoch, place, offset, bytes, own_copy);
      return;
    }
    const int id = take_cargo();
    Cargo& p = cargo_[id];
    p.from = from, p.at_place = place, p.target = {Space::pool, offset}, p.bytes = bytes;
    p.epoch = e.epoch, p.sequence = e.written++;
    const uint8_t* bytes_now = static_cast<const uint8_t*>(source);
    p.data.assign(bytes_now, bytes_now + bytes);
    e.writes.push_back(id);
    events_.push_back({Landing::write, from, id, 0, 0, 0});
  }

  const uint8_t* read_pool(int from, int place, u64 offset, u64 bytes) {
    if (offset + bytes > pools_[place].size()) {
      fail("a read beyond the pool");
      offset = 0;
    }
    watcher_->read(from, endpoints_[from].epoch, place, offset, bytes);
    return pools_[place].data() + offset;
  }

  bool may_put(int from, int queue) const {
    const Channel& c = endpoints_[from].channels[queue];
    return c.posted - c.done < u64(options_.puts_in_flight);
  }
  bool put_done(int from, int queue, u64 count) const {
    return endpoints_[from].channels[queue].done >= count;
  }

 private:
  struct Cargo {
    int from, to, queue;
    Address target, source;
    u64 bytes, word, value, sequence, epoch;
    bool landed;
    int left;      // landings still to come after the read
    int at_place;  // write: whose pool
    std::vector<uint8_t> data;
  };
  // cargo: read, done, data, signal, write; raise, set: `cargo` is the endpoint they go to.
  struct Event {
    Landing kind;
    int endpoint, cargo;
    u64 word, value, mark;
  };

  bool is_held(const Event& e) const {
    return int(e.kind) == options_.held && e.endpoint == options_.held_endpoint;
  }

  int take_cargo() {
    if (free_.empty()) {
      cargo_.emplace_back();
      return int(cargo_.size()) - 1;
    }
    const int id = free_.back();
    free_.pop_back();
    return id;
  }

  void check_range(Address a, int endpoint, u64 bytes, const char* what) {
    const Endpoint& e = endpoints_[endpoint];
    const u64 size = a.space == Space::pool ? pools_[e.place].size() : e.control.size();
    if (a.offset + bytes > size) fail(std::string(what) + " lies beyond its memory");
  }

  uint8_t* at(Address a, int endpoint) {
    Endpoint& e = endpoints_[endpoint];
    return (a.space == Space::pool ? pools_[e.place].data() : e.control.data()) + a.offset;
  }

  void touch(int endpoint) {
    if (endpoints_[endpoint].touched) return;
    endpoints_[endpoint].touched = true;
    touched_.push_back(endpoint);
  }

  void remove(size_t i) {
    events_[i] = events_.back();
    events_.pop_back();
  }

  void finished_with(int id) {
    if (--cargo_[id].left == 0) free_.push_back(id);
  }

  bool land(size_t i) {
    if (!failure_.empty()) return false;
    const Event e = events_[i];
    if (e.kind == Landing::signal && !may_signal(e.cargo)) return false;
    remove(i);
    switch (e.kind) {
      case Landing::read: read_source(e.cargo); break;
      case Landing::done: report(e.cargo); break;
      case Landing::data: land_data(e.cargo); break;
      case Landing::signal: signal(e.cargo); break;
      case Landing::write: land_write(e.cargo); break;
      case Landing::raise:
      case Landing::set: {
        settle_writes(e.endpoint, e.mark);
        const u64 now = word(e.cargo, e.word);
        const u64 value = e.kind == Landing::raise ? now + e.value : now > e.value ? now : e.value;
        store_word(e.cargo, e.word, value);
      }
    }
    return true;
  }

  void read_source(int id) {
    Cargo& p = cargo_[id];
    --endpoints_[p.from].unread;
    const uint8_t* source = at(p.source, p.from);
    if (p.source.space == Space::pool) {
      watcher_->read(p.from, p.epoch, endpoints_[p.from].place, p.source.offset, p.bytes);
    }
    p.data.assign(source, source + p.bytes);
    const int from = p.from;
    events_.push_back({Landing::done, from, id, 0, 0, 0});
    events_.push_back({Landing::data, from, id, 0, 0, 0});
  }

  void report(int id) {
    Cargo& p = cargo_[id];
    if (memcmp(at(p.source, p.from), p.data.data(), p.bytes) != 0) {
      fail("O2: the source of a put was rewritten before put_done, queue " +
           std::to_string(p.queue));
    }
    Channel& c = endpoints_[p.from].channels[p.queue];
    c.reported |= u64(1) << (p.sequence % 64);
    while (c.done < c.posted && (c.reported >> (c.done % 64) & 1)) {
      c.reported &= ~(u64(1) << (c.done % 64));
      ++c.done;
    }
    touch(p.from);
    finished_with(id);
  }

  void land_data(int id) {
    Cargo& p = cargo_[id];
    memcpy(at(p.target, p.to), p.data.data(), p.bytes);
    if (p.target.space == Space::pool) {
      watcher_->written(p.from, p.epoch, endpoints_[p.to].place, p.target.offset, p.bytes, false);
    }
    p.landed = true;
    if (options_.signals != Signals::unordered) {
      events_.push_back({Landing::signal, p.from, id, 0, 0, 0});
    }
    finished_with(id);
  }

  // O1: earlier puts of this queue on this word have landed and signalled.
  bool may_signal(int id) const {
    if (options_.signals != Signals::strong) return true;
    const Cargo& p = cargo_[id];
    for (int other : endpoints_[p.from].channels[p.queue].unsignalled) {
      if (other == id) return true;
      if (cargo_[other].word == p.word && cargo_[other].to == p.to) return false;
    }
    return true;
  }

  void signal(int id) {
    Cargo& p = cargo_[id];
    std::vector<int>& waiting = endpoints_[p.from].channels[p.queue].unsignalled;
    for (size_t n = 0; n < waiting.size(); ++n) {
      if (waiting[n] == id) {
        waiting.erase(waiting.begin() + long(n));
        break;
      }
    }
    store_word(p.to, p.word, word(p.to, p.word) + p.value);
    finished_with(id);
  }

  void land_write(int id) {
    Cargo& p = cargo_[id];
    std::vector<int>& writes = endpoints_[p.from].writes;
    for (size_t n = 0; n < writes.size(); ++n) {
      if (writes[n] == id) {
        writes.erase(writes.begin() + long(n));
        break;
      }
    }
    memcpy(pools_[p.at_place].data() + p.target.offset, p.data.data(), p.bytes);
    watcher_->written(p.from, p.epoch, p.at_place, p.target.offset, p.bytes, false);
    free_.push_back(id);
  }

  // O4: what was written before a raise or set_local is there before it.
  void settle_writes(int endpoint, u64 mark) {
    std::vector<int>& writes = endpoints_[endpoint].writes;
    while (!writes.empty() && cargo_[writes.front()].sequence < mark) {
      const int id = writes.front();
      for (size_t i = 0; i < events_.size(); ++i) {
        if (events_[i].kind == Landing::write && events_[i].cargo == id) {
          remove(i);
          break;
        }
      }
      land_write(id);
    }
  }

  SimulationOptions options_;
  Watcher* watcher_ = nullptr;
  std::vector<std::vector<uint8_t>> pools_;
  std::vector<Endpoint> endpoints_;
  size_t used_ = 0;
  std::vector<Event> events_;
  std::vector<Cargo> cargo_;
  std::vector<int> free_, touched_;
  bool aborted_ = false;
  std::string failure_;
};

}  // namespace megamuon
