// Row sums of a reduction on a CPU, in the one order that `Sum` (fabric.h) fixes.
//
// Owns rounding to bf16 and f16 (to nearest, ties to even; NaN stays NaN) and the additions.
// Invariants: every operation rounds once, in the dtype that Sum names, so a build must not
// contract or reassociate (no -ffast-math); the result does not depend on how the elements are cut
// into blocks.  The loops are plain enough for g++ -O3 to vectorise.  Tested by
// csrc/tests/chaos.cpp against sums of one element at a time, and by
// tests/distributed/test_ready.py against sums in torch.
#pragma once
#include "fabric.h"

#include <string.h>

namespace megamuon {
namespace arithmetic {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// a if condition, else b; without a branch, which would keep the compiler from vectorising float
// arithmetic.
inline uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - uint32_t(condition);
  return (a & mask) | (b & ~mask);
}

// How a dtype lies in memory, and the two conversions; `Wide` holds each of its values exactly.
struct F32 {
  using Stored = float;
  using Wide = float;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide value) { return value; }
};

struct F64 {
  using Stored = double;
  using Wide = double;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide value) { return value; }
};

struct BF16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored stored) { return from_bits(uint32_t(stored) << 16); }
  static Stored store(Wide value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return Stored(choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded));
  }
};

struct F16 {
  using Stored = uint16_t;
  using Wide = float;
  // Normal halves: the exponent is rebiased by a multiplication.  Subnormal ones: their bits, under
  // the exponent of 0.5, are 0.5 plus the value, exactly.
  static Wide load(Stored stored) {
    const uint32_t word = uint32_t(stored) << 16;
    const uint32_t magnitude = word + word;
    const float normal = from_bits((magnitude >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = from_bits((magnitude >> 17) | (126u << 23)) - 0.5f;
    const uint32_t chosen = choose(magnitude < (1u << 27), bits_of(subnormal), bits_of(normal));
    return from_bits((word & 0x80000000u) | chosen);
  }
  // Adding a power of two whose last bit is the half's last bit lets the addition itself round.
  static Stored store(Wide value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits + bits;
    const float clamped = (from_bits(magnitude >> 1) * 0x1.0p+112f) * 0x1.0p-110f;
    uint32_t exponent = magnitude & 0xff000000u;
    exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t sum = bits_of(from_bits((exponent >> 1) + 0x07800000u) + clamped);
    const uint32_t half = ((sum >> 13) & 0x7c00u) + (sum & 0xfffu);
    return Stored((bits >> 16 & 0x8000u) | choose(magnitude > 0xff000000u, 0x7e00u, half));
  }
};

constexpr u64 kBlock = 1024;  // elements; the partial sums of a block stay in the first-level cache

// What `Sum` says, with pointers for places.
struct Operands {
  const void* const* slots;  // one per column, at the first element
  int columns;
  const void* const* upstream;  // in the order of addition
  int upstreams;
  u64 elements;
  Dtype slot, wire, window;
  bool round_sum;  // several nodes: the node's sum is rounded to the wire
};

template <class Slot, class Wire, class Window>
struct RowSum {
  using Acc = typename Window::Stored;
  using SlotMemory = typename Slot::Stored;
  using WireMemory = typename Wire::Stored;

  static Acc rounded(Acc value) { return Acc(Wire::load(Wire::store(typename Wire::Wide(value)))); }
  static Acc term(SlotMemory stored) { return rounded(Acc(Slot::load(stored))); }

  // The finished sum of elements start .. start + count - 1, before its last rounding or division.
  static void block(Acc* __restrict total, u64 start, u64 count, const Operands& o) {
    const SlotMemory* __restrict row = static_cast<const SlotMemory*>(o.slots[0]) + start;
    for (u64 i = 0; i < count; ++i) total[i] = term(row[i]);
    for (int k = 1; k < o.columns; ++k) {
      row = static_cast<const SlotMemory*>(o.slots[k]) + start;
      for (u64 i = 0; i < count; ++i) total[i] += term(row[i]);
    }
    if (o.round_sum) {
      for (u64 i = 0; i < count; ++i) total[i] = rounded(total[i]);
    }
    if (o.upstreams == 1) {
      const WireMemory* __restrict from = static_cast<const WireMemory*>(o.upstream[0]) + start;
      for (u64 i = 0; i < count; ++i) total[i] = Acc(Wire::load(from[i])) + total[i];
    } else if (o.upstreams > 1) {
      Acc chain[kBlock];
      add_chain(chain, start, count, o);
      for (u64 i = 0; i < count; ++i) total[i] = chain[i] + total[i];
    }
  }

  // Partial sums of several nodes, added in their order as the nodes of a chain would.
  static void add_chain(Acc* __restrict chain, u64 start, u64 count, const Operands& o) {
    const WireMemory* __restrict from = static_cast<const WireMemory*>(o.upstream[0]) + start;
    for (u64 i = 0; i < count; ++i) chain[i] = Acc(Wire::load(from[i]));
    for (int j = 1; j < o.upstreams; ++j) {
      from = static_cast<const WireMemory*>(o.upstream[j]) + start;
      for (u64 i = 0; i < count; ++i) chain[i] = rounded(chain[i] + Acc(Wire::load(from[i])));
    }
  }

  static void to_wire(void* out, const Operands& o) {
    Acc total[kBlock];
    WireMemory* __restrict wire = static_cast<WireMemory*>(out);
    for (u64 start = 0; start < o.elements; start += kBlock) {
      const u64 count = o.elements - start < kBlock ? o.elements - start : kBlock;
      block(total, start, count, o);
      for (u64 i = 0; i < count; ++i) {
        wire[start + i] = Wire::store(typename Wire::Wide(total[i]));
      }
    }
  }

  static void to_window(void* out, double divisor, bool first, const Operands& o) {
    Acc total[kBlock];
    Acc* __restrict window = static_cast<Acc*>(out);
    const Acc by = Acc(divisor);
    for (u64 start = 0; start < o.elements; start += kBlock) {
      const u64 count = o.elements - start < kBlock ? o.elements - start : kBlock;
      block(total, start, count, o);
      if (first) {
        for (u64 i = 0; i < count; ++i) window[start + i] = total[i] / by;
      } else {
        for (u64 i = 0; i < count; ++i) window[start + i] += total[i] / by;
      }
    }
  }
};

// Call `use` with the RowSum of the dtypes; false if there is none.
template <class Use>
bool dispatch(Dtype slot, Dtype wire, Dtype window, Use use) {
  if (slot == Dtype::f64 && wire == Dtype::f64 && window == Dtype::f64) {
    use(RowSum<F64, F64, F64>{});
    return true;
  }
  if (window != Dtype::f32 || slot == Dtype::f64 || wire == Dtype::f64) return false;
  const auto with = [&](auto wire_type) {
    using Wire = decltype(wire_type);
    if (slot == Dtype::f32) use(RowSum<F32, Wire, F32>{});
    if (slot == Dtype::bf16) use(RowSum<BF16, Wire, F32>{});
    if (slot == Dtype::f16) use(RowSum<F16, Wire, F32>{});
  };
  if (wire == Dtype::f32) with(F32{});
  if (wire == Dtype::bf16) with(BF16{});
  if (wire == Dtype::f16) with(F16{});
  return true;
}

}  // namespace arithmetic

// Whether a reduction of these dtypes can be computed: f32, bf16 or f16 into an f32 window, or f64
// throughout.
inline bool sum_supported(Dtype slot, Dtype wire, Dtype window) {
  return arithmetic::dispatch(slot, wire, window, [](auto) {});
}

// reduce_to_outbox: the sum rounded to the wire.  False: the dtypes are not supported, nothing was
// written.
inline bool sum_to_wire(void* out, const arithmetic::Operands& operands) {
  return arithmetic::dispatch(operands.slot, operands.wire, operands.window,
                              [&](auto row) { decltype(row)::to_wire(out, operands); });
}

// reduce_to_window: the sum divided, stored if `first`, else added.
inline bool sum_to_window(void* window, double divisor, bool first,
                          const arithmetic::Operands& operands) {
  return arithmetic::dispatch(operands.slot, operands.wire, operands.window, [&](auto row) {
    decltype(row)::to_window(window, divisor, first, operands);
  });
}

}  // namespace megamuon
