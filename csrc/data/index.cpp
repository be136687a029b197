// Blend, sample and shuffle indices, and the check of an index file.  See index_api.h.
#include "index_api.h"

#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kAhead = 16;    // documents whose lengths are fetched before they are needed
constexpr int kTwister = 624;     // words of the generator's state
constexpr int kVersion = 1;       // of the interface; megamuon/data/native.py asks for it

// The lengths of an index file lie at no multiple of four.
inline int64_t length_of(const int32_t* lengths, int64_t sequence) {
  int32_t length;
  std::memcpy(&length, reinterpret_cast<const char*>(lengths) + 4 * sequence, sizeof length);
  return length;
}

// One row: document position and offset, at which a sample begins.
template <class Document, class Row>
int fill_samples(const int32_t* lengths, const Document* documents, int64_t count, int64_t length,
                 int64_t extra, int64_t samples, bool clamp, Row* rows) {
  rows[0] = rows[1] = 0;
  int64_t total = 0;
  if (clamp) {
    for (int64_t place = 0; place < count; ++place) total += length_of(lengths, documents[place]);
  }
  int64_t end = 0;    // items before the end of the document at `place`
  int64_t sample = 1;
  int64_t last = length + extra;  // items before the end of sample - 1
  for (int64_t place = 0; place < count && sample <= samples; ++place) {
    if (place + kAhead < count) {
      __builtin_prefetch(reinterpret_cast<const char*>(lengths) + 4 * documents[place + kAhead]);
    }
    const int64_t start = end;
    end += length_of(lengths, documents[place]);
    while (sample <= samples) {
      const int64_t stop = clamp && last > total ? total : last;
      if (stop > end) break;
      rows[2 * sample] = Row(place);
      rows[2 * sample + 1] = Row(stop - start - extra);
      ++sample;
      last += length;
    }
  }
  return sample > samples ? 0 : -1;  // -1: the documents hold fewer items
}

// The Mersenne twister of NumPy's RandomState.
class Twister {
 public:
  Twister(uint32_t* state, int position) : state_(state), position_(position) {}

  int position() const { return position_; }

  uint32_t next() {
    if (position_ == kTwister) refill();
    uint32_t y = state_[position_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  // A number in [0, most], by rejection.
  uint64_t below(uint64_t most) {
    if (most == 0) return 0;
    const uint64_t mask = ~uint64_t(0) >> __builtin_clzll(most);
    uint64_t value;
    if (most <= 0xffffffffu) {
      do value = next() & mask; while (value > most);
    } else {
      do {
        const uint64_t high = next();
        value = (high << 32 | next()) & mask;
      } while (value > most);
    }
    return value;
  }

 private:
  void refill() {
    constexpr int kMiddle = 397;
    const auto mix = [this](int place, int next, int other) {
      const uint32_t y = (state_[place] & 0x80000000u) | (state_[next] & 0x7fffffffu);
      state_[place] = state_[other] ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
    };
    int place = 0;
    for (; place < kTwister - kMiddle; ++place) mix(place, place + 1, place + kMiddle);
    for (; place < kTwister - 1; ++place) mix(place, place + 1, place + kMiddle - kTwister);
    mix(place, 0, kMiddle - 1);
    position_ = 0;
  }

  uint32_t* state_;
  int position_;
};

// Swap from the end, with the partners drawn a few steps ahead so that their memory is on its way.
template <class Element>
void shuffle(Element* elements, int64_t count, Twister& twister) {
  constexpr int64_t kWindow = 32;
  uint64_t partners[kWindow];
  int64_t drawn = count - 1;
  for (int64_t place = count - 1; place > 0; --place) {
    for (; drawn > 0 && drawn > place - kWindow; --drawn) {
      const uint64_t partner = twister.below(uint64_t(drawn));
      partners[drawn % kWindow] = partner;
      __builtin_prefetch(elements + partner, 1);
    }
    const uint64_t partner = partners[place % kWindow];
    const Element kept = elements[place];
    elements[place] = elements[partner];
    elements[partner] = kept;
  }
}

}  // namespace

extern "C" {

int mm_index_version(void) { return kVersion; }

int mm_blend_indices(const double* weights, const int64_t* limits, int64_t parts, int64_t size,
                     int16_t* datasets, int64_t* samples) {
  if (parts < 1 || parts > std::numeric_limits<int16_t>::max() || size < 0) return -1;
  const double infinity = std::numeric_limits<double>::infinity();
  // Counts are exact in doubles up to 2^53.  An infinite one keeps a part from being drawn.
  std::vector<double> count(parts, 0.0);
  std::vector<int64_t> drawn(parts, 0);
  for (int64_t part = 0; part < parts; ++part) {
    if (limits != nullptr && limits[part] <= 0) count[part] = infinity;
  }
  for (int64_t draw = 0; draw < size; ++draw) {
    const double scale = draw > 0 ? double(draw) : 1.0;
    double most = -infinity;
    int64_t chosen = -1;
    for (int64_t part = 0; part < parts; ++part) {
      const double behind = weights[part] * scale - count[part];
      const bool further = behind > most;
      most = further ? behind : most;
      chosen = further ? part : chosen;
    }
    if (chosen < 0) return -1;  // every part is exhausted
    datasets[draw] = int16_t(chosen);
    samples[draw] = drawn[chosen]++;
    const bool exhausted = limits != nullptr && drawn[chosen] >= limits[chosen];
    count[chosen] = exhausted ? infinity : double(drawn[chosen]);
  }
  return 0;
}

int mm_sample_index(const int32_t* lengths, const void* documents, int wide_documents,
                    int64_t count, int64_t length, int64_t extra, int64_t samples, int clamp,
                    void* rows, int wide_rows) {
  if (count < 1 || length < 1 || samples < 0) return -1;
  const auto fill = [&](auto* places, auto* out) {
    return fill_samples(lengths, places, count, length, extra, samples, clamp != 0, out);
  };
  const auto* narrow = static_cast<const int32_t*>(documents);
  const auto* wide = static_cast<const int64_t*>(documents);
  if (wide_rows) {
    auto* out = static_cast<int64_t*>(rows);
    return wide_documents ? fill(wide, out) : fill(narrow, out);
  }
  auto* out = static_cast<int32_t*>(rows);
  return wide_documents ? fill(wide, out) : fill(narrow, out);
}

int mm_shuffle(void* elements, int64_t count, int element_bytes, uint32_t* state, int position) {
  if (position < 0 || position > kTwister || count < 0) return -1;
  Twister twister(state, position);
  if (element_bytes == 4) {
    shuffle(static_cast<uint32_t*>(elements), count, twister);
  } else if (element_bytes == 8) {
    shuffle(static_cast<uint64_t*>(elements), count, twister);
  } else {
    return -1;
  }
  return twister.position();
}

int64_t mm_check_pointers(const int32_t* lengths, const void* pointers, int64_t sequences,
                          int64_t item_bytes, int64_t* end) {
  const char* bytes = static_cast<const char*>(pointers);  // not aligned in the file
  int64_t sum = 0;
  for (int64_t place = 0; place < sequences; ++place) {
    const int64_t length = length_of(lengths, place);
    int64_t pointer;
    std::memcpy(&pointer, bytes + 8 * place, sizeof pointer);
    if (length < 0 || pointer != sum) {
      *end = sum;
      return place;
    }
    sum += length * item_bytes;
  }
  *end = sum;
  return sequences;
}

}  // extern "C"
