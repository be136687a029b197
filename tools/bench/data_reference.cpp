// The plain loops that tools/bench/data_room.py compares with: one statement of each rule, with no
// thought for speed beyond that of the compiler.
//
// Owns nothing of the product.  Built by the bench with g++ -O3.
#include <cstdint>

extern "C" {

void reference_blend(const double* weights, int64_t parts, int64_t size, int16_t* datasets,
                     int64_t* samples, int64_t* drawn) {
  for (int64_t part = 0; part < parts; ++part) drawn[part] = 0;
  for (int64_t draw = 0; draw < size; ++draw) {
    const double scale = draw > 1 ? double(draw) : 1.0;
    int64_t chosen = 0;
    double most = weights[0] * scale - double(drawn[0]);
    for (int64_t part = 1; part < parts; ++part) {
      const double behind = weights[part] * scale - double(drawn[part]);
      if (behind > most) {
        most = behind;
        chosen = part;
      }
    }
    datasets[draw] = int16_t(chosen);
    samples[draw] = drawn[chosen];
    ++drawn[chosen];
  }
}

// One sample after the other, walking on through the documents until it is full.
void reference_samples(const int32_t* lengths, const int32_t* documents, int64_t length,
                       int64_t samples, int32_t* rows) {
  int64_t place = 0;
  int32_t offset = 0;
  rows[0] = rows[1] = 0;
  for (int64_t sample = 1; sample <= samples; ++sample) {
    int64_t left = length + 1;
    while (left > 0) {
      const int32_t here = lengths[documents[place]] - offset;
      left -= here;
      if (left <= 0) {
        offset += int32_t(left) + here - 1;
        left = 0;
      } else {
        ++place;
        offset = 0;
      }
    }
    rows[2 * sample] = int32_t(place);
    rows[2 * sample + 1] = offset;
  }
}

}  // extern "C"
