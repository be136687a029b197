// One operator's view of a simulation from one place: the verbs of fabric.h.
//
// Owns nothing but the translation of verbs; simulation.h owns memory and time.  Reads happen at
// once, and before each verb that writes others may move, so a turn is not atomic.  Tested by
// csrc/tests/chaos.cpp.
#pragma once
#include "simulation.h"

namespace megamuon {

class SimulatedFabric {
 public:
  // `peers`: the endpoints of the communicator, by node * columns + column.
  SimulatedFabric(Simulation& world, const Geometry& place, const std::vector<int>& peers)
      : world_(world), place_(place), peers_(peers), self_(at(place.node, place.column)) {}

  u64 read(u64 word) { return world_.word(self_, word); }
  void raise(int node, u64 word, u64 delta) {
    world_.meanwhile();
    world_.send_raise(self_, at(node, place_.column), word, delta, false);
  }
  void set_local(int column, u64 word, u64 value) {
    world_.meanwhile();
    world_.send_raise(self_, at(place_.node, column), word, value, true);
  }
  void set_row(u64 word, u64 value) {
    for (int k = 0; k < place_.columns; ++k) set_local(k, word, value);
  }
  void put(int queue, int node, Address to, Address from, u64 bytes, u64 word, u64 delta) {
    world_.meanwhile();
    world_.post(self_, at(node, place_.column), queue, to, from, bytes, word, delta);
  }
  bool may_put(int queue) { return world_.may_put(self_, queue); }
  bool put_done(int queue, u64 count) { return world_.put_done(self_, queue, count); }

  void load(u64 to, int column, u64 from, u64 bytes) {
    world_.meanwhile();
    world_.write_pool(self_, place_of(place_.column), to, pool(column, from, bytes), bytes, true);
  }

  void multicast(u64 to, int column, Address from, u64 bytes) {
    world_.meanwhile();
    const uint8_t* source;
    if (from.space == Space::pool) {
      source = pool(column, from.offset, bytes);
    } else {
      source = world_.endpoint(self_).control.data() + from.offset;
    }
    for (int k = 0; k < place_.columns; ++k) {
      world_.write_pool(self_, place_of(k), to, source, bytes, false);
    }
  }

  void reduce_to_outbox(u64 to, const Sum& sum) {
    world_.meanwhile();
    uint8_t* control = world_.endpoint(self_).control.data();
    if (!sum_to_wire(control + to, operands(sum))) world_.fail("a sum of unsupported dtypes");
  }

  void reduce_to_window(int column, const Sum& sum) {
    world_.meanwhile();
    const u64 bytes = sum.elements * size_of(sum.window);
    const uint8_t* window = world_.pool(place_of(column)) + sum.destination;
    if (sum.destination + bytes > world_.pool_bytes())
      return world_.fail("a window beyond the pool");
    scratch_.assign(window, window + bytes);
    sum_to_window(scratch_.data(), sum.divisor, sum.first, operands(sum));
    world_.write_pool(self_, place_of(column), sum.destination, scratch_.data(), bytes, false);
  }

  bool aborted() { return world_.aborted(); }
  void pause() {}

 private:
  int at(int node, int column) const { return peers_[node * place_.columns + column]; }
  int place_of(int column) { return world_.endpoint(at(place_.node, column)).place; }
  const uint8_t* pool(int column, u64 offset, u64 bytes) {
    return world_.read_pool(self_, place_of(column), offset, bytes);
  }

  arithmetic::Operands operands(const Sum& sum) {
    slots_.clear(), upstream_.clear();
    for (int k = 0; k < place_.columns; ++k) {
      slots_.push_back(pool(k, sum.slots, sum.elements * size_of(sum.slot)));
    }
    const uint8_t* control = world_.endpoint(self_).control.data();
    for (int j = 0; j < sum.upstreams; ++j) upstream_.push_back(control + sum.upstream[j]);
    return {slots_.data(), place_.columns, upstream_.data(), sum.upstreams, sum.elements,
            sum.slot,      sum.wire,       sum.window,       place_.nodes > 1};
  }

  Simulation& world_;
  Geometry place_;
  std::vector<int> peers_;
  int self_;
  std::vector<const void*> slots_, upstream_;
  std::vector<uint8_t> scratch_;
};

}  // namespace megamuon
