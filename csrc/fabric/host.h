// The host fabric: places are processes that share memory, or threads of one process.
//
// Owns the verbs on shared memory, the control header of a rank and its doorbell.  Invariants:
// words are C++ atomics with acquire and release, and there are no bare fences, so ThreadSanitizer
// sees every edge; data is really copied into each place's own memory; a put is over when it
// returns, unless a link is injected for measurements.  Tested by csrc/tests/threads.cpp and
// tests/distributed/test_ready.py.
#pragma once
#include "arithmetic.h"
#include "fabric.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <deque>
#include <vector>

namespace megamuon {

static_assert(sizeof(std::atomic<u64>) == 8 && std::atomic<u64>::is_always_lock_free,
              "control words are shared between processes");

// The start of a rank's control segment.
struct ControlHeader {
  std::atomic<uint32_t> bell;      // rung after a word of this rank was raised
  std::atomic<uint32_t> sleepers;  // threads of this rank that wait for the bell
  char pad0[120];
  std::atomic<u64> aborted;  // rank + 1 of whoever gave up first
  std::atomic<u64> closed;   // this rank is done and left nothing behind
  char pad1[112];
  std::atomic<uint32_t> reason_ready;
  char reason[508];
};
static_assert(sizeof(ControlHeader) == 768, "the layout is shared between processes");

inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
}

inline void ring(ControlHeader* header) {
  // Sequentially consistent on both sides: either the sleeper's futex sees the new count, or this
  // sees the sleeper.
  header->bell.fetch_add(1, std::memory_order_seq_cst);
  if (header->sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header->bell), FUTEX_WAKE, INT_MAX, nullptr,
            nullptr, 0);
  }
}

inline void sleep_until_rung(ControlHeader* header, uint32_t seen, u64 timeout_ns) {
  header->sleepers.fetch_add(1, std::memory_order_seq_cst);
  timespec limit{time_t(timeout_ns / 1000000000ull), long(timeout_ns % 1000000000ull)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header->bell), FUTEX_WAIT, seen, &limit, nullptr,
          0);
  header->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// What a link adds to memory speed.  Zero: nothing.
struct Link {
  u64 latency_ns = 0;
  double bytes_per_second = 0;
  bool injected() const { return latency_ns != 0 || bytes_per_second > 0; }
};

class HostFabric {
 public:
  // `control[i]`: the operator's control memory of place i = node * columns + column, as this
  // process sees it.
  HostFabric(const Geometry& place, std::vector<char*> control, std::vector<ControlHeader*> headers)
      : place_(place),
        control_(std::move(control)),
        headers_(std::move(headers)),
        pool_(control_.size(), nullptr),
        dirty_(control_.size(), 0),
        posted_(2 * place.nodes + 1, 0),
        completed_(2 * place.nodes + 1, 0) {}

  void set_pool(std::vector<char*> bases) { pool_ = std::move(bases); }
  void set_link(const Link& link) { link_ = link; }

  // --- verbs, see fabric.h -----------------------------------------------------------------------

  u64 read(u64 word) const { return word_at(self(), word).load(std::memory_order_acquire); }

  void raise(int node, u64 word, u64 delta) {
    if (link_.injected()) {
      late_.push_back({now_ns() + link_.latency_ns, node, word, delta, -1});
      return;
    }
    raise_now(node, word, delta);
  }

  void set_local(int column, u64 word, u64 value) {
    const int place = index(place_.node, column);
    word_at(place, word).store(value, std::memory_order_release);
    touch(place);
  }

  void set_row(u64 word, u64 value) {
    for (int k = 0; k < place_.columns; ++k) set_local(k, word, value);
  }

  void put(int queue, int node, Address to, Address from, u64 bytes, u64 word, u64 delta) {
    const int place = index(node, place_.column);
    std::memcpy(at(place, to), at(self(), from), bytes);
    ++posted_[queue];
    if (!link_.injected()) {
      ++completed_[queue];
      raise_now(node, word, delta);
      return;
    }
    const u64 now = now_ns();
    if (link_free_ < now) link_free_ = now;
    if (link_.bytes_per_second > 0) link_free_ += u64(double(bytes) / link_.bytes_per_second * 1e9);
    late_.push_back({link_free_ + link_.latency_ns, node, word, delta, queue});
  }

  bool may_put(int) const { return true; }
  bool put_done(int queue, u64 count) const { return completed_[queue] >= count; }

  void load(u64 to, int column, u64 from, u64 bytes) {
    copy(pool_[self()] + to, pool_[index(place_.node, column)] + from, bytes);
  }

  void multicast(u64 to, int column, Address from, u64 bytes) {
    const char* source = at(index(place_.node, column), from);
    for (int k = 0; k < place_.columns; ++k) {
      // Each rail begins at another column, so that the rails of a node do not write to one place
      // at a time.
      const int target = (place_.column + 1 + k) % place_.columns;
      copy(pool_[index(place_.node, target)] + to, source, bytes);
    }
  }

  void reduce_to_outbox(u64 to, const Sum& sum) {
    sum_to_wire(at(self(), {Space::control, to}), operands(sum));
  }

  void reduce_to_window(int column, const Sum& sum) {
    sum_to_window(pool_[index(place_.node, column)] + sum.destination, sum.divisor, sum.first,
                  operands(sum));
  }

  // --- between steps -----------------------------------------------------------------------------

  // Deliver what an injected link holds back; whether anything was.
  bool poll() {
    bool moved = false;
    for (std::size_t i = 0; i < late_.size();) {
      if (late_[i].due > now_ns()) {
        ++i;
        continue;
      }
      const Late late = late_[i];
      late_.erase(late_.begin() + long(i));
      if (late.queue >= 0) ++completed_[late.queue];
      raise_now(late.node, late.word, late.delta);
      moved = true;
    }
    return moved;
  }
  bool holds_back() const { return !late_.empty(); }

  // Nanoseconds until poll() has something to deliver; the largest number if it holds nothing back.
  u64 held_for() const {
    u64 due = ~u64(0);
    for (const Late& late : late_) due = std::min(due, late.due);
    const u64 now = late_.empty() ? 0 : now_ns();
    return due > now ? due - now : 0;
  }

  // Wake the ranks whose words were raised since the last call.
  void flush() {
    if (!any_dirty_) return;
    for (std::size_t place = 0; place < dirty_.size(); ++place) {
      if (!dirty_[place]) continue;
      dirty_[place] = 0;
      if (int(place) != self()) ring(headers_[place]);
    }
    any_dirty_ = false;
  }

  const Geometry& place() const { return place_; }

  // A word of this place, for the thread that hands work in.
  void store_own(u64 word, u64 value) {
    word_at(self(), word).store(value, std::memory_order_release);
  }

 private:
  struct Late {
    u64 due;
    int node;
    u64 word, delta;
    int queue;  // of a put; -1: a raise without data
  };

  int index(int node, int column) const { return node * place_.columns + column; }
  int self() const { return index(place_.node, place_.column); }

  std::atomic<u64>& word_at(int place, u64 word) const {
    return *reinterpret_cast<std::atomic<u64>*>(control_[place] + word);
  }

  char* at(int place, const Address& address) const {
    return (address.space == Space::pool ? pool_[place] : control_[place]) + address.offset;
  }

  static void copy(char* to, const char* from, u64 bytes) {
    if (to != from) std::memcpy(to, from, bytes);
  }

  void raise_now(int node, u64 word, u64 delta) {
    const int place = index(node, place_.column);
    word_at(place, word).fetch_add(delta, std::memory_order_release);
    touch(place);
  }

  void touch(int place) {
    dirty_[place] = 1;
    any_dirty_ = true;
  }

  arithmetic::Operands operands(const Sum& sum) {
    slots_.resize(place_.columns);
    for (int k = 0; k < place_.columns; ++k) {
      slots_[k] = pool_[index(place_.node, k)] + sum.slots;
    }
    upstream_.resize(sum.upstreams);
    for (int j = 0; j < sum.upstreams; ++j) {
      upstream_[j] = control_[self()] + sum.upstream[j];
    }
    return {slots_.data(),    place_.columns, upstream_.data(), sum.upstreams,
            sum.elements,     sum.slot,       sum.wire,         sum.window,
            place_.nodes > 1};
  }

  const Geometry place_;
  std::vector<char*> control_;
  std::vector<ControlHeader*> headers_;
  std::vector<char*> pool_;
  std::vector<char> dirty_;
  bool any_dirty_ = false;
  std::vector<u64> posted_, completed_;  // puts by queue
  std::vector<const void*> slots_, upstream_;
  Link link_;
  u64 link_free_ = 0;
  std::deque<Late> late_;
};

}  // namespace megamuon
