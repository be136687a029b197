// A fabric of places whose memory one GPU can address: virtual places of one GPU, or GPUs that
// share an NVLink domain.
//
// Owns the verbs over a `Memory`, which says where the memory of a place lies.  Invariants: a put
// is a copy by the group and over when it returns; a word is raised or set by the leader after its
// fence at system scope, so that all that the group did before is seen by whoever reads it (O1,
// O4).  Used by loopback.cuh and nccl.cuh; checked on a GPU by tools/gpu_checks.sh.
//
// [Note: fences by the leader alone]
//
// What the workers did comes before what the leader does after the barrier of the block, and what
// it does before the barrier comes before what they do: PTX's causality order runs through
// barriers, from the scope of a block to that of the system.  So one fence of the leader serves all
// workers.  A multicast address is another alias of memory that this and other GPUs also reach
// directly, and between accesses through the two there must be a proxy fence on the way: before a
// multicast, against what was read or written directly (by its places before they entered, by
// `load`), and after it, against whoever reads or writes directly from then on.
// csrc/verification has these hand-offs as litmus tests.
//
//   struct Memory {
//     static constexpr bool kMulticast;           // whether multicast_pool() may be non-null
//     char* pool(int node, int column) const;
//     char* control(int node, int column) const;  // of the operator
//     char* multicast_pool() const;               // common address of the row's pools, or null
//     bool multicast_sums() const;                // whether sums may be left to the switch
//   };
#pragma once
#include "device_arithmetic.cuh"

namespace megamuon {

template <class MemoryType>
class DirectFabric {
 public:
  using Memory = MemoryType;

  __device__ DirectFabric(const Memory& memory, const Geometry& place, Group& group)
      : memory_(memory), place_(place), group_(group) {}

  // --- verbs, see fabric.h; called by the leader -------------------------------------------------

  __device__ u64 read(u64 word) const { return load_acquire(own_control() + word); }

  __device__ void raise(int node, u64 word, u64 delta) {
    fence_system();
    add_word(memory_.control(node, place_.column) + word, delta);
  }

  __device__ void set_local(int column, u64 word, u64 value) {
    fence_system();
    store_word(memory_.control(place_.node, column) + word, value);
  }

  __device__ void set_row(u64 word, u64 value) {
    fence_system();
    for (int k = 0; k < place_.columns; ++k) {
      store_word(memory_.control(place_.node, k) + word, value);
    }
  }

  __device__ void put(int, int node, Address to, Address from, u64 bytes, u64 word, u64 delta) {
    copy(at(node, place_.column, to), at(place_.node, place_.column, from), bytes);
    raise(node, word, delta);
  }

  __device__ bool may_put(int) const { return true; }
  __device__ bool put_done(int, u64) const { return true; }

  __device__ void load(u64 to, int column, u64 from, u64 bytes) {
    char* target = memory_.pool(place_.node, place_.column) + to;
    const char* source = memory_.pool(place_.node, column) + from;
    if (target != source) copy(target, source, bytes);
  }

  __device__ void multicast(u64 to, int column, Address from, u64 bytes) {
    Order& order = group_.order();
    order.task = Task::copy_to_all;
    order.from = at(place_.node, column, from);
    order.offset = to, order.bytes = bytes;
    if (multicasts()) fence_alias();
    group_.carry_out();
    if (multicasts()) fence_alias();
  }

  __device__ void reduce_to_outbox(u64 to, const Sum& sum) {
    reduce(Task::sum_to_wire, own_control() + to, sum);
  }

  __device__ void reduce_to_window(int column, const Sum& sum) {
    reduce(Task::sum_to_window, memory_.pool(place_.node, column) + sum.destination, sum);
  }

  __device__ void end() {}  // after the group's part of a call

  // --- called by the workers ---------------------------------------------------------------------

  // `Sums`: whether the operator adds at all; a kernel that only copies needs half the registers.
  template <bool Sums>
  __device__ void work(const Order& order, int worker) const {
    if (order.task == Task::copy) {
      const bool whole = aligned16(reinterpret_cast<u64>(order.from)) &&
                         aligned16(reinterpret_cast<u64>(order.to));
      copy_each(order.from, order.bytes, 1, [&](int) { return order.to; }, whole, worker);
    } else if (order.task == Task::copy_to_all) {
      copy_to_all(order, worker);
    } else if constexpr (Sums) {
      if (order.sum.window == Dtype::f64) {
        sum_columns<double>(order, columns(order), place_.nodes > 1, worker);
      } else {
        sum(order, worker);
      }
    }
  }

 protected:
  __device__ char* own_control() const { return memory_.control(place_.node, place_.column); }

  __device__ char* at(int node, int column, const Address& address) const {
    return (address.space == Space::pool ? memory_.pool(node, column)
                                         : memory_.control(node, column)) +
           address.offset;
  }

  __device__ bool multicasts() const {
    return Memory::kMulticast && memory_.multicast_pool() != nullptr;
  }
  __device__ bool switch_adds(const Sum& sum) const {
    return multicasts() && memory_.multicast_sums() && MulticastSum::can(sum.slot, sum.wire);
  }

  __device__ void copy(char* to, const char* from, u64 bytes) {
    Order& order = group_.order();
    order.task = Task::copy;
    order.to = to, order.from = from, order.bytes = bytes;
    group_.carry_out();
  }

  __device__ void reduce(Task task, char* to, const Sum& sum) {
    Order& order = group_.order();
    order.task = task, order.to = to, order.sum = sum;
    for (int j = 0; j < sum.upstreams; ++j) order.upstream[j] = own_control() + sum.upstream[j];
    if (switch_adds(sum)) fence_alias();
    group_.carry_out();
    if (switch_adds(sum)) fence_alias();
  }

  __device__ auto columns(const Order& order) const {
    const auto slot = [this, offset = order.sum.slots](int column) -> const char* {
      return memory_.pool(place_.node, column) + offset;
    };
    return ColumnSum<decltype(slot)>{slot, place_.columns};
  }

  __device__ void copy_to_all(const Order& order, int worker) const {
    if constexpr (Memory::kMulticast) {
      if (multicasts()) {
        copy_to_multicast(order, worker);
        return;
      }
    }
    // Each rail begins at another column, so that the rails of a node do not write to one place at
    // a time.
    const auto to = [&](int j) {
      const int column = (place_.column + 1 + j) % place_.columns;
      return memory_.pool(place_.node, column) + order.offset;
    };
    bool whole = aligned16(reinterpret_cast<u64>(order.from));
    for (int j = 0; j < place_.columns; ++j) {
      whole = whole && aligned16(reinterpret_cast<u64>(to(j)));
    }
    copy_each(order.from, order.bytes, place_.columns, to, whole, worker);
  }

  // Tables whose offsets or sizes are no multiples of 16 bytes are refused where there is a
  // multicast address.
  __device__ void copy_to_multicast(const Order& order, int worker) const {
    char* to = memory_.multicast_pool() + order.offset;
    copy_wide(order.from, order.bytes, worker, [&](auto each) {
      each(to, [](char* at, const uint4& v) { multicast16(at, v); });
    });
  }

  __device__ void sum(const Order& order, int worker) const {
    if constexpr (Memory::kMulticast) {
      if (switch_adds(order.sum)) {
        const MulticastSum row{memory_.multicast_pool() + order.sum.slots};
        sum_multicast(order, row, columns(order), place_.nodes > 1, worker);
        return;
      }
    }
    sum_columns<float>(order, columns(order), place_.nodes > 1, worker);
  }

  const Memory memory_;
  const Geometry& place_;
  Group& group_;
};

}  // namespace megamuon
