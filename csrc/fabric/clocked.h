// A rail on a virtual clock: one thread, any number of nodes, no payload.
//
// Owns the verbs that a publish uses, a link model and the queue of what is under way.  Invariants:
// a put holds its sender's link for bytes / bandwidth (and what its word and every put cost
// besides), first come first served, and is visible `latency` after that; what happens at one
// instant happens in the order in which it was caused, so a run is a function of its inputs.  Only
// words and lengths move: the schedule of a rail of terabytes costs neither memory nor copies.
// Tested by tests/tools/test_publish_replay.py.
#pragma once
#include "fabric.h"

#include <algorithm>
#include <queue>
#include <vector>

namespace megamuon {

// Times are whole nanoseconds, so that a sum does not depend on the order of its terms.
struct ClockedLink {
  double bytes_per_ns = 1;
  u64 latency_ns = 0;   // from the last byte's leaving to its being seen by the next node
  u64 put_ns = 0;       // the link's time for a put of no bytes
  u64 outstanding = 1;  // puts in flight (their sources not yet read) that a node may have
};

// What all nodes of the rail share: the clock, the words, the links.
class ClockedRail {
 public:
  // `words`: bytes of control memory of a node; `word_ns`: link time that a put costs besides, by
  // word / 8 (shorter: nothing).
  ClockedRail(int nodes, u64 words, const ClockedLink& link, std::vector<u64> word_ns)
      : link_(link),
        word_ns_(std::move(word_ns)),
        words_(nodes, std::vector<u64>(words / 8, 0)),
        free_at_(nodes, 0),
        busy_(nodes, 0),
        posted_(nodes, 0),
        completed_(nodes, 0),
        received_(nodes, 0) {}

  u64& word(int node, u64 offset) { return words_[node][offset / 8]; }

  void put(int from, int to, u64 bytes, u64 word, u64 delta) {
    const u64 own = word / 8 < word_ns_.size() ? word_ns_[word / 8] : 0;
    const double stream = double(bytes) / link_.bytes_per_ns;
    u64 hold = u64(stream) + own + link_.put_ns;
    if (double(u64(stream)) < stream) ++hold;
    free_at_[from] = std::max(free_at_[from], now_) + hold;
    busy_[from] += hold;
    ++posted_[from];
    push({free_at_[from], 0, from, 0, 0, 0});
    push({free_at_[from] + link_.latency_ns, 0, to, bytes, word, delta});
  }

  void raise(int to, u64 word, u64 delta) {
    push({now_ + link_.latency_ns, 0, to, 0, word, delta});
  }

  bool may_put(int from) const { return posted_[from] - completed_[from] < link_.outstanding; }
  bool put_done(int from, u64 count) const { return completed_[from] >= count; }

  // Go to the next instant at which something happens and let it; the nodes that it happened to, in
  // order.  Empty: nothing is under way.
  const std::vector<int>& advance() {
    touched_.clear();
    if (events_.empty()) return touched_;
    now_ = events_.top().due;
    while (!events_.empty() && events_.top().due == now_) {
      const Event event = events_.top();
      events_.pop();
      if (event.delta == 0) {
        ++completed_[event.node];
      } else {
        words_[event.node][event.word / 8] += event.delta;
        received_[event.node] += event.bytes;
      }
      touched_.push_back(event.node);
    }
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    return touched_;
  }

  u64 now() const { return now_; }
  u64 busy(int node) const { return busy_[node]; }          // its link, since the beginning
  u64 received(int node) const { return received_[node]; }  // bytes, since the beginning

 private:
  struct Event {
    u64 due, order;
    int node;
    u64 bytes, word, delta;  // delta 0: the source of a put of this node has been read
    bool operator>(const Event& other) const {
      return due != other.due ? due > other.due : order > other.order;
    }
  };

  void push(Event event) {
    event.order = ordered_++;
    events_.push(event);
  }

  const ClockedLink link_;
  const std::vector<u64> word_ns_;
  std::vector<std::vector<u64>> words_;
  std::vector<u64> free_at_, busy_, posted_, completed_, received_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::vector<int> touched_;
  u64 now_ = 0, ordered_ = 0;
};

// One node's view: the verbs of fabric.h that a scheduler of rails (K = 1, one queue) needs.
class ClockedFabric {
 public:
  ClockedFabric(ClockedRail& rail, int node) : rail_(rail), node_(node) {}

  u64 read(u64 word) const { return rail_.word(node_, word); }
  void raise(int node, u64 word, u64 delta) { rail_.raise(node, word, delta); }
  void set_local(int, u64 word, u64 value) { rail_.word(node_, word) = value; }
  void put(int, int node, Address, Address, u64 bytes, u64 word, u64 delta) {
    rail_.put(node_, node, bytes, word, delta);
  }
  bool may_put(int) const { return rail_.may_put(node_); }
  bool put_done(int, u64 count) const { return rail_.put_done(node_, count); }
  bool aborted() const { return false; }
  void pause() {}

 private:
  ClockedRail& rail_;
  const int node_;
};

}  // namespace megamuon
