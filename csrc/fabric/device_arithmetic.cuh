// What the workers of a thread group compute: copies and row sums.
//
// Owns wide copies, rounding and the order of additions on a GPU.  Invariants: the bits are those
// of csrc/fabric/arithmetic.h (one rounding per operation, k = 0 .. K-1, then the chain), except
// where a switch adds (see `MulticastSum`); whatever the alignment, every byte is moved once.
// Loads are relaxed at system scope, hence never served from a stale first-level cache.  The oracle
// of csrc/bindings/loopback_api.cu is arithmetic.h itself; compiled by `make device-compile`.
#pragma once
#include "device_group.cuh"

namespace megamuon {

// --- copies --------------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned16(u64 bits) { return (bits & 15) == 0; }

constexpr int kInFlight = 8;  // loads of a worker before its first store

// Read `bytes`, a multiple of 16 at a multiple of 16.  `store(each)` is told of what a worker has
// read: each(to, one) calls one(to + i, the 16 bytes at from + i) for all of it.
template <class Store>
__device__ __forceinline__ void copy_wide(const char* from, u64 bytes, int worker, Store store) {
  const u64 step = u64(kWorkers) * 16;
  for (u64 at = u64(worker) * 16; at < bytes; at += kInFlight * step) {
    uint4 v[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * step < bytes) v[i] = load16(from + at + i * step);
    }
    store([&](char* to, auto one) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (at + i * step < bytes) one(to + at + i * step, v[i]);
      }
    });
  }
}

// Copy to each `to(j)`, j = 0 .. count-1, reading once.  `whole`: every pointer and size allows 16
// bytes at a time.
template <class To>
__device__ __forceinline__ void copy_each(const char* from, u64 bytes, int count, To to, bool whole,
                                          int worker) {
  const u64 wide = whole ? bytes / 16 * 16 : 0;
  copy_wide(from, wide, worker, [&](auto each) {
    for (int j = 0; j < count; ++j) {
      char* target = to(j);
      if (target != from) each(target, [](char* at, const uint4& v) { store16(at, v); });
    }
  });
  for (u64 i = wide + worker; i < bytes; i += kWorkers) {
    const unsigned v = load1(from + i);
    for (int j = 0; j < count; ++j) {
      if (to(j) != from) store1(to(j) + i, v);
    }
  }
}

// --- rounding, as in arithmetic.h ----------------------------------------------------------------

__device__ __forceinline__ float from_bf16(unsigned stored) {
  return __uint_as_float(stored << 16);
}

__device__ __forceinline__ unsigned to_bf16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ float from_f16(unsigned stored) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(stored)));
}

__device__ __forceinline__ unsigned to_f16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16 & 0x8000u) | 0x7e00u;
  return __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::bf16) return from_bf16(to_bf16(value));
  if (dtype == Dtype::f16) return from_f16(to_f16(value));
  return value;
}

__device__ __forceinline__ double round_to(Dtype, double value) { return value; }

// --- packs of eight elements ---------------------------------------------------------------------

constexpr int kPack = 8;

// The memory of a pack; how many of the 16-byte pieces count follows from the dtype.
struct Raw {
  uint4 piece[4];
};

template <class Acc>
constexpr int kPieces = sizeof(Acc) == 8 ? 4 : 2;

template <class Acc>
__device__ __forceinline__ void load_raw(Raw& raw, const char* from, Dtype dtype) {
  if (sizeof(Acc) == 8) {
#pragma unroll
    for (int i = 0; i < kPieces<Acc>; ++i) raw.piece[i] = load16(from + 16 * i);
    return;
  }
  raw.piece[0] = load16(from);
  if (dtype == Dtype::f32) raw.piece[1] = load16(from + 16);
}

__device__ __forceinline__ void widen(const Raw& raw, Dtype dtype, double (&out)[kPack]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __hiloint2double(int(raw.piece[i].y), int(raw.piece[i].x));
    out[2 * i + 1] = __hiloint2double(int(raw.piece[i].w), int(raw.piece[i].z));
  }
}

__device__ __forceinline__ void widen(const Raw& raw, Dtype dtype, float (&out)[kPack]) {
  const unsigned words[8] = {raw.piece[0].x, raw.piece[0].y, raw.piece[0].z, raw.piece[0].w,
                             raw.piece[1].x, raw.piece[1].y, raw.piece[1].z, raw.piece[1].w};
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const unsigned half = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
    out[i] = dtype == Dtype::f32    ? __uint_as_float(words[i])
             : dtype == Dtype::bf16 ? from_bf16(half)
                                    : from_f16(half);
  }
}

__device__ __forceinline__ void store_pack(char* to, Dtype dtype, const double (&v)[kPack]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store16(to + 16 * i,
            make_uint4(unsigned(__double2loint(v[2 * i])), unsigned(__double2hiint(v[2 * i])),
                       unsigned(__double2loint(v[2 * i + 1])),
                       unsigned(__double2hiint(v[2 * i + 1]))));
  }
}

__device__ __forceinline__ void store_pack(char* to, Dtype dtype, const float (&v)[kPack]) {
  if (dtype == Dtype::f32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store16(to + 16 * i,
              make_uint4(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]),
                         __float_as_uint(v[4 * i + 2]), __float_as_uint(v[4 * i + 3])));
    }
    return;
  }
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool brain = dtype == Dtype::bf16;
    const unsigned low = brain ? to_bf16(v[2 * i]) : to_f16(v[2 * i]);
    const unsigned high = brain ? to_bf16(v[2 * i + 1]) : to_f16(v[2 * i + 1]);
    words[i] = low | high << 16;
  }
  store16(to, make_uint4(words[0], words[1], words[2], words[3]));
}

// One element at any address that its dtype allows.
__device__ __forceinline__ void load_element(const char* from, Dtype dtype, float& out) {
  if (dtype == Dtype::f32) {
    out = __uint_as_float(load4(from));
  } else {
    out = dtype == Dtype::bf16 ? from_bf16(load2(from)) : from_f16(load2(from));
  }
}

__device__ __forceinline__ void load_element(const char* from, Dtype, double& out) {
  out = __longlong_as_double(static_cast<long long>(load8(from)));
}

__device__ __forceinline__ void store_element(char* to, Dtype dtype, float value) {
  if (dtype == Dtype::f32) {
    store4(to, __float_as_uint(value));
  } else {
    store2(to, dtype == Dtype::bf16 ? to_bf16(value) : to_f16(value));
  }
}

__device__ __forceinline__ void store_element(char* to, Dtype, double value) {
  store8(to, u64(__double_as_longlong(value)));
}

// --- row sums ------------------------------------------------------------------------------------

// The sum of a node's columns, each read from its own memory: `slot(k)` is column k's first
// element.
template <class Slot>
struct ColumnSum {
  Slot slot;
  int columns;

  template <class Acc>
  __device__ __forceinline__ void pack(u64 first, const Sum& sum, Acc (&total)[kPack]) const {
    const u64 at = first * size_of(sum.slot);
    // All columns of a usual node are read before the first is added.
    constexpr int kBatch = sizeof(Acc) == 8 ? 4 : 8;
    for (int k0 = 0; k0 < columns; k0 += kBatch) {
      Raw raw[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (k0 + k < columns) load_raw<Acc>(raw[k], slot(k0 + k) + at, sum.slot);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (k0 + k >= columns) continue;
        Acc term[kPack];
        widen(raw[k], sum.slot, term);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const Acc rounded = round_to(sum.wire, term[i]);
          total[i] = k0 + k == 0 ? rounded : total[i] + rounded;
        }
      }
    }
  }

  template <class Acc>
  __device__ __forceinline__ Acc element(u64 index, const Sum& sum) const {
    Acc total = 0;
    for (int k = 0; k < columns; ++k) {
      Acc term;
      load_element(slot(k) + index * size_of(sum.slot), sum.slot, term);
      term = round_to(sum.wire, term);
      total = k == 0 ? term : total + term;
    }
    return total;
  }

  __device__ __forceinline__ bool wide() const {
    bool all = true;
    for (int k = 0; k < columns; ++k) all = all && aligned16(reinterpret_cast<u64>(slot(k)));
    return all;
  }
};

// The sum that a switch computes when the columns' common multicast address is read: in f32, in an
// order of its own, rounded to the slots' dtype.  Only for slots that are already in the wire's
// dtype.
struct MulticastSum {
  const char* slot;

  __device__ static bool can(Dtype slot, Dtype wire) { return slot == wire && slot != Dtype::f64; }

  template <class Acc>
  __device__ __forceinline__ void pack(u64 first, const Sum& sum, Acc (&total)[kPack]) const {
    Raw raw;
    const char* at = slot + first * size_of(sum.slot);
    raw.piece[0] = multimem_add16(at, sum.slot);
    if (sum.slot == Dtype::f32) raw.piece[1] = multimem_add16(at + 16, sum.slot);
    widen(raw, sum.slot, total);
  }

  __device__ __forceinline__ bool wide() const { return aligned16(reinterpret_cast<u64>(slot)); }
};

// What every finished element still goes through, a pack or one element at a time.
template <class Acc>
struct Finish {
  const Order& order;
  bool several_nodes;

  // `total`: the node's sum.
  __device__ __forceinline__ void element(u64 index, Acc total) const {
    const Sum& sum = order.sum;
    if (several_nodes) total = round_to(sum.wire, total);
    if (sum.upstreams > 0) {
      Acc t, next;
      load_element(order.upstream[0] + index * size_of(sum.wire), sum.wire, t);
      for (int j = 1; j < sum.upstreams; ++j) {
        load_element(order.upstream[j] + index * size_of(sum.wire), sum.wire, next);
        t = round_to(sum.wire, t + next);
      }
      total = t + total;
    }
    store(index, total);
  }

  __device__ __forceinline__ void store(u64 index, Acc value) const {
    const Sum& sum = order.sum;
    if (order.task == Task::sum_to_wire) {
      store_element(order.to + index * size_of(sum.wire), sum.wire, value);
      return;
    }
    char* at = order.to + index * size_of(sum.window);
    value = value / Acc(sum.divisor);
    if (!sum.first) {
      Acc before;
      load_element(at, sum.window, before);
      value = before + value;
    }
    store_element(at, sum.window, value);
  }

  __device__ __forceinline__ void pack(u64 first, Acc (&total)[kPack]) const {
    const Sum& sum = order.sum;
    if (several_nodes) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) total[i] = round_to(sum.wire, total[i]);
    }
    if (sum.upstreams > 0) {
      Acc t[kPack], next[kPack];
      Raw raw;
      load_raw<Acc>(raw, order.upstream[0] + first * size_of(sum.wire), sum.wire);
      widen(raw, sum.wire, t);
      for (int j = 1; j < sum.upstreams; ++j) {
        load_raw<Acc>(raw, order.upstream[j] + first * size_of(sum.wire), sum.wire);
        widen(raw, sum.wire, next);
#pragma unroll
        for (int i = 0; i < kPack; ++i) t[i] = round_to(sum.wire, t[i] + next[i]);
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) total[i] = t[i] + total[i];
    }
    if (order.task == Task::sum_to_wire) {
      store_pack(order.to + first * size_of(sum.wire), sum.wire, total);
      return;
    }
    char* at = order.to + first * size_of(sum.window);
    const Acc by = Acc(sum.divisor);
    Acc before[kPack];
    if (!sum.first) {
      Raw raw;
      load_raw<Acc>(raw, at, sum.window);
      widen(raw, sum.window, before);
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      total[i] = total[i] / by;
      if (!sum.first) total[i] = before[i] + total[i];
    }
    store_pack(at, sum.window, total);
  }

  __device__ __forceinline__ bool wide() const {
    bool all = aligned16(reinterpret_cast<u64>(order.to));
    for (int j = 0; j < order.sum.upstreams; ++j) {
      all = all && aligned16(reinterpret_cast<u64>(order.upstream[j]));
    }
    return all;
  }
};

// One worker's share of a sum over a node's columns.
template <class Acc, class Slot>
__device__ __forceinline__ void sum_columns(const Order& order, const ColumnSum<Slot>& row,
                                            bool several_nodes, int worker) {
  const Finish<Acc> finish{order, several_nodes};
  const u64 elements = order.sum.elements;
  const u64 packed = row.wide() && finish.wide() ? elements / kPack * kPack : 0;
  for (u64 first = u64(worker) * kPack; first < packed; first += u64(kWorkers) * kPack) {
    Acc total[kPack];
    row.pack(first, order.sum, total);
    finish.pack(first, total);
  }
  for (u64 index = packed + worker; index < elements; index += kWorkers) {
    finish.element(index, row.template element<Acc>(index, order.sum));
  }
}

// The same with the switch's sum; what is left after the last pack is added column by column.
template <class Slot>
__device__ __forceinline__ void sum_multicast(const Order& order, const MulticastSum& row,
                                              const ColumnSum<Slot>& rest, bool several_nodes,
                                              int worker) {
  const Finish<float> finish{order, several_nodes};
  const u64 elements = order.sum.elements, packed = elements / kPack * kPack;
  for (u64 first = u64(worker) * kPack; first < packed; first += u64(kWorkers) * kPack) {
    float total[kPack];
    row.pack(first, order.sum, total);
    finish.pack(first, total);
  }
  for (u64 index = packed + worker; index < elements; index += kWorkers) {
    finish.element(index, rest.template element<float>(index, order.sum));
  }
}

}  // namespace megamuon
