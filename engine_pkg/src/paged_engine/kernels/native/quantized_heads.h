// Keys, values and queries in int8: a head of one token is transformed (hadamard.h) and gets one scale.
//
// The product of a query with keys is one of codes, and exact up to a head size of 512. Softmax weights take their value's scale
// before they are rounded to 15 bits, and the weighted values are transformed back at the end. All of it is the same whatever
// rows and tokens are near.
#pragma once

#include "byte_product.h"
#include "hadamard.h"
#include "panels.h"

namespace {

// ---- Heads

template <int Size, class Element>
float transform_head(const Element* x, float* transformed, int dim) {
  IntVector most = {};
  for (int i = 0; i < dim; i += Size) {
    const HadamardGroup<Size> group(x + i);
#pragma GCC unroll 16
    for (int v = 0; v < HadamardGroup<Size>::kVectors; v++) {
      store(transformed + i + v * kWidth, group.values[v]);
      most = maximum(most, magnitude_bits(group.values[v]));
    }
  }
  return from_bits(horizontal_maximum(most));
}

// Transforms a head, perhaps in place, in groups as long as its size lets them be; `dim` is a multiple of 16. Returns the largest
// magnitude.
template <class Element>
inline float transform_head(const Element* x, float* transformed, int dim) {
  if (dim % 64 == 0) return transform_head<64>(x, transformed, dim);
  if (dim % 32 == 0) return transform_head<32>(x, transformed, dim);
  return transform_head<16>(x, transformed, dim);
}

// Transforms a head and hands its codes to write(i, vector of codes). Returns what code 1 stands for.
template <class Element, class Function>
inline float quantize_head(const Element* x, float* transformed, int dim, Function write) {
  const float largest = transform_head(x, transformed, dim);
  if (has_codes(largest))
    for (int i = 0; i < dim; i += kWidth) write(i, nearest_integers(load(transformed + i) * (kLargestCode / largest)));
  else
    for (int i = 0; i < dim; i += kWidth) write(i, IntVector{});
  return largest / kLargestCode;
}

// ---- Products, as panels.h wants them

// Codes of queries times panels of keys, which hold code + 128.
struct KeyCodes : ByteProduct {
  using Left = ByteProduct::Code;
  using Right = int8_t;
  static constexpr int kStep = 4, kPair = 4;
  static Operand read(const Right* p) { return ByteProduct::read((const uint8_t*)p); }
};

constexpr int kLargestWeight = 32767;  // 256 of them times codes stay below 2^31

// Softmax weights, as whole numbers up to kLargestWeight, times panels of values.
#if defined(__AVX2__)
struct ValueCodes {
  using Left = int16_t;
  using Right = int8_t;
  using Sum = IntVector;
  static constexpr int kStep = 2, kPair = 2;
  static void write(Left* weights, Vector whole) { store(weights, nearest_integers(whole)); }
  static Vector to_float(Sum sum) { return __builtin_convertvector(sum, Vector); }
#if defined(__AVX512F__)
  using Operand = __m512i;
  static Operand read(const Right* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static Sum accumulate(Sum sum, const Left* weights, Operand values) {
    int32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, values, _mm512_set1_epi32(pair));
  }
#else
  using Operand = __m256i;
  static Operand read(const Right* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static Sum accumulate(Sum sum, const Left* weights, Operand values) {
    int32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return sum + (Sum)_mm256_madd_epi16(values, _mm256_set1_epi32(pair));
  }
#endif
};
#else
struct ValueCodes {
  using Left = float;
  using Right = int8_t;
  using Sum = Vector;
  struct Operand {
    Vector even, odd;
  };
  static constexpr int kStep = 2, kPair = 2;
  static void write(Left* weights, Vector whole) { store(weights, round_to_integer(whole)); }
  static Vector to_float(Sum sum) { return sum; }
  static Operand read(const Right* p) {
    HalfVector halves;
    memcpy(&halves, p, sizeof halves);
    const IntVector pairs = __builtin_convertvector(halves, IntVector);
    return {__builtin_convertvector(pairs << 24 >> 24, Vector), __builtin_convertvector(pairs << 16 >> 24, Vector)};
  }
  static Sum accumulate(Sum sum, const Left* weights, const Operand& values) {
    return multiply_add(broadcast(weights[1]), values.odd, multiply_add(broadcast(weights[0]), values.even, sum));
  }
};
#endif

// ---- Before and after the softmax

// Turns sums of products of codes into scores but for the row's scale; `start` is -128 times the sum of the row's codes.
inline void scale_scores(float* scores, int num_panels, float start, const float* const* key_scales) {
  for (int panel = 0; panel < num_panels; panel++)
    for (int i = 0; i < kPanelWidth; i += kWidth, scores += kWidth)
      store(scores, (load(scores) + start) * load(key_scales[panel] + i));
}

// A row's softmax weights times their values' scales, which become whole numbers when the largest is known.
class ScaledWeights {
 public:
  // `weights` has room for a float for each key; scales[i] are those of the keys from i * 16 on.
  ScaledWeights(float* weights, const float* const* scales) : weights_(weights), scales_(scales) {}

  void keep(int key, Vector weight) {
    const Vector scaled = weight * load(scales_[key / kPanelWidth] + key % kPanelWidth);
    store(weights_ + key, scaled);
    most_ = maximum(most_, (IntVector)scaled);  // of what is never negative
  }

  // Rounds those of the keys [begin, end). Returns what 1 stands for; not finite where a scale that counts is not.
  float quantize(ValueCodes::Left* whole, int begin, int end) const {
    const float largest = from_bits(horizontal_maximum(most_));
    const float factor = has_codes(largest) ? kLargestWeight / largest : 0;
    if (factor == 0)
      memset((void*)(whole + begin), 0, (end - begin) * sizeof *whole);
    else
      for (int i = begin; i < end; i += kWidth) ValueCodes::write(whole + i, load(weights_ + i) * factor);
    return largest / kLargestWeight;
  }

 private:
  float* weights_;
  const float* const* scales_;
  IntVector most_ = {};
};

}  // namespace
