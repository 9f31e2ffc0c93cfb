// Weights and activations in int8, in groups of 64 along the depth that have a scale each.
//
// Both are first multiplied by the same orthogonal matrix, which leaves their products what they are: each group by a Hadamard
// matrix, whose sums and differences spread a single large value over the group instead of letting it take the precision of its
// 63 neighbours (as in QuaRot, arXiv 2404.00456, here within a group). The last group of a depth is filled up with zeros.
//
// Weights lie in pairs of panels of 16 channels, group by group: [16 steps of 4][2 panels][16 channels][4] codes, then
// [2][16] scales in bf16. A code is stored as code + 128, since the processors' byte products take one side unsigned; what
// that adds to the sum of a group, 128 times the sum of the row's codes, is taken off where the sum starts.
#pragma once

#include "elements.h"
#include "panels.h"
#include "team.h"

namespace {

constexpr int kGroupDepth = 64;
constexpr int kCodeBias = 128, kLargestCode = 127;
constexpr float kNegligible = 1e-30f;  // a group with nothing larger is zero: 127 / x must be finite
constexpr int kStepBytes = 4 * kPanelWidth;                                   // of one panel
constexpr int kScaleBytes = kPanelWidth * int(sizeof(bf16));                  // of one panel
constexpr int kGroupCodes = 2 * kPanelWidth * kGroupDepth;                    // of a pair of panels, one byte each
constexpr int kGroupBytes = kGroupCodes + 2 * kScaleBytes;

inline int64_t whole_groups(int64_t depth) { return ceil_div(depth, int64_t(kGroupDepth)); }

// A group of values times the Hadamard matrix, orthonormal.
struct HadamardGroup {
  static constexpr int kVectors = kGroupDepth / kWidth;
  Vector values[kVectors];

  template <class Element>
  __attribute__((always_inline)) explicit HadamardGroup(const Element* x) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) values[i] = load(x + i * kWidth) * kNorm;
    add_and_subtract<kGroupDepth / 2>();
  }

  // The largest magnitude, or something that is not finite where a value is not.
  float largest() const {
    IntVector most = {};  // magnitudes compare like their bits, of which NaN has the greatest
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) most = maximum(most, (IntVector)values[i] & 0x7fffffff);
    return from_bits(horizontal_maximum(most));
  }

 private:
  // Sums and differences of the values `Distance` apart, then of those half as far apart, in the same order on all machines.
  template <int Distance>
  __attribute__((always_inline)) void add_and_subtract() {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) {
      if constexpr (Distance < kWidth) {
        values[i] = add_or_subtract_partners<Distance>(values[i]);
      } else if (constexpr int kStep = Distance / kWidth; !(i & kStep)) {
        const Vector sum = values[i] + values[i + kStep];
        values[i + kStep] = values[i] - values[i + kStep];
        values[i] = sum;
      }
    }
    if constexpr (Distance > 1) add_and_subtract<Distance / 2>();
  }

  static constexpr float kNorm = 0.125f;  // 1 / sqrt(kGroupDepth)
};

// f(i, group) for the groups of `depth` elements at x, i counting elements; zeros fill up the last one.
template <class Element, class Function>
inline void for_each_group(const Element* x, int64_t depth, Function f) {
  int64_t i = 0;
  for (; i + kGroupDepth <= depth; i += kGroupDepth) f(i, HadamardGroup(x + i));
  if (i == depth) return;
  Element filled[kGroupDepth] = {};
  memcpy(filled, x + i, (depth - i) * sizeof(Element));
  f(i, HadamardGroup(filled));
}

// ---- How an instruction set multiplies: what it wants of a row's codes, where a group's sum starts, and one step of 4 for a
// vector of channels.

#if defined(__AVX512VNNI__)
struct ByteProduct {
  using Code = int8_t;
  using Start = int32_t;
  using Sum = IntVector;
  using Operand = __m512i;
  static constexpr int kRowsWith1 = 0, kRowsWith2 = 9, kRowsWith4 = 2;  // see panels.h; totals take registers too
  static void write(Code* codes, IntVector whole) { _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8((__m512i)whole)); }
  static Operand read(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Sum accumulate(Sum sum, const Code* codes, Operand weights) {
    int32_t four;
    memcpy(&four, codes, sizeof four);
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, weights, _mm512_set1_epi32(four));
  }
  static Vector to_float(Sum sum) { return __builtin_convertvector(sum, Vector); }
};
#elif defined(__AVX2__)
struct ByteProduct {  // codes 0, 2, 1, 3 of a step in 16 bits, for products of the even bytes and of the odd bytes
  using Code = int16_t;
  using Start = int32_t;
  using Sum = IntVector;
  struct Operand {
    __m256i even, odd;
  };
  static constexpr int kRowsWith1 = 4, kRowsWith2 = 0, kRowsWith4 = 0;
  static void write(Code* codes, IntVector whole) {
    const __m256i order = _mm256_shuffle_epi32((__m256i)whole, _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(order, order), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128((__m128i*)codes, _mm256_castsi256_si128(halves));
  }
  static Operand read(const uint8_t* p) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
  }
  static Sum accumulate(Sum sum, const Code* codes, const Operand& weights) {
    int32_t even, odd;
    memcpy(&even, codes, sizeof even);
    memcpy(&odd, codes + 2, sizeof odd);
    const __m256i products = _mm256_madd_epi16(weights.even, _mm256_set1_epi32(even));
    return sum + (Sum)_mm256_add_epi32(products, _mm256_madd_epi16(weights.odd, _mm256_set1_epi32(odd)));
  }
  static Vector to_float(Sum sum) { return __builtin_convertvector(sum, Vector); }
};
#else
struct ByteProduct {  // in floats, where whole numbers of this size are exact
  using Code = float;
  using Start = float;
  using Sum = Vector;
  struct Operand {
    Vector weights[4];
  };
  static constexpr int kRowsWith1 = 2, kRowsWith2 = 0, kRowsWith4 = 0;
  static void write(Code* codes, IntVector whole) { store(codes, __builtin_convertvector(whole, Vector)); }
  static Operand read(const uint8_t* p) {
    UIntVector bytes;
    memcpy(&bytes, p, sizeof bytes);
    Operand operand;
    for (int i = 0; i < 4; i++)
      operand.weights[i] = __builtin_convertvector((IntVector)(bytes >> 8 * i & 0xff), Vector);
    return operand;
  }
  static Sum accumulate(Sum sum, const Code* codes, const Operand& operand) {
    for (int i = 0; i < 4; i++) sum = multiply_add(broadcast(codes[i]), operand.weights[i], sum);
    return sum;
  }
  static Vector to_float(Sum sum) { return sum; }
};
#endif

// The codes of a group of activations, what code 1 stands for, and -128 times the sum of the codes.
inline void quantize_group(const HadamardGroup& group, ByteProduct::Code* codes, float* scale, ByteProduct::Start* start) {
  const float largest = group.largest();
  *scale = largest / kLargestCode;
  if (!(largest > kNegligible && largest < kInfinity)) {  // the scale says all
    memset(codes, 0, kGroupDepth * sizeof *codes);
    *start = 0;
    return;
  }
  IntVector sum = {};
#pragma GCC unroll 16
  for (int i = 0; i < HadamardGroup::kVectors; i++) {
    const IntVector whole = nearest_integers(group.values[i] * (kLargestCode / largest));
    sum += whole;
    ByteProduct::write(codes + i * kWidth, whole);
  }
  *start = ByteProduct::Start(-kCodeBias * horizontal_sum(sum));
}

// ---- Rows of activations

// Rows of codes, [row][depth], with what each group of them needs, [group][row].
struct QuantizedRows {
  ByteProduct::Code* codes;
  float* scales;
  ByteProduct::Start* starts;  // of a group's sum: -128 times the sum of its codes
  int64_t depth;  // of whole groups
  int64_t num_rows;

  static size_t bytes(int64_t num_rows, int64_t num_groups) {
    return Pieces::bytes<ByteProduct::Code>(num_rows * num_groups * kGroupDepth) +
           Pieces::bytes<float>(num_rows * num_groups) + Pieces::bytes<ByteProduct::Start>(num_rows * num_groups);
  }
  QuantizedRows(void* memory, int64_t num_rows, int64_t num_groups) : depth(num_groups * kGroupDepth), num_rows(num_rows) {
    Pieces pieces(memory);
    codes = pieces.take<ByteProduct::Code>(num_rows * depth);
    scales = pieces.take<float>(num_rows * num_groups);
    starts = pieces.take<ByteProduct::Start>(num_rows * num_groups);
  }
  QuantizedRows from(int64_t row) const {
    QuantizedRows rest = *this;
    rest.codes += row * depth;
    rest.scales += row;
    rest.starts += row;
    return rest;
  }
};

inline void quantize_row(const bf16* x, int64_t depth, const QuantizedRows& row) {
  for_each_group(x, depth, [&](int64_t i, const HadamardGroup& group) {
    const int64_t j = i / kGroupDepth * row.num_rows;
    quantize_group(group, row.codes + i, row.scales + j, row.starts + j);
  });
}

#if defined(__AMX_BF16__)
// For tiles, whose arithmetic on int8 could not keep groups apart without giving up their speed: a row transformed but in bf16, as
// long as whole groups are, and a pair of panels as bf16.
inline void transform_row(const bf16* x, int64_t depth, bf16* transformed) {
  for_each_group(x, depth, [&](int64_t i, const HadamardGroup& group) {
    for (int v = 0; v < HadamardGroup::kVectors; v++) store(transformed + i + v * kWidth, group.values[v]);
  });
}

inline void unpack_int8(const uint8_t* packed, bf16* panels, int64_t depth) {
  const auto bits = [](Vector values) {
    HalfVector half;
    store((bf16*)&half, values);
    return __builtin_convertvector(half, UIntVector);
  };
  for (int64_t group = 0; group < depth / kGroupDepth; group++, packed += kGroupBytes) {
    for (int i = 0; i < kGroupDepth / 4 * 2; i++, panels += 2 * kPanelWidth) {
      const Vector scale = load((const bf16*)(packed + kGroupCodes) + i % 2 * kPanelWidth);
      UIntVector codes;
      memcpy(&codes, packed + i * kStepBytes, sizeof codes);
      const auto weight = [&](int k) {
        return bits((__builtin_convertvector((IntVector)(codes >> 8 * k & 0xff), Vector) - float(kCodeBias)) * scale);
      };
      // Steps of 4 become two rows of pairs, between which the other panel has its first one.
      const UIntVector first = weight(0) | weight(1) << 16, second = weight(2) | weight(3) << 16;
      memcpy((void*)(panels), &first, sizeof first);
      memcpy((void*)(panels + 4 * kPanelWidth), &second, sizeof second);
      if (i % 2 == 1) panels += 4 * kPanelWidth;
    }
  }
}
#endif

// ---- Packing

// A channel's weights x into its column of a pair of panels.
template <class Element>
void pack_channel(const Element* x, int64_t depth, int column, uint8_t* pair) {
  for_each_group(x, depth, [&](int64_t i, const HadamardGroup& group) {
    uint8_t* codes = pair + i / kGroupDepth * kGroupBytes;
    bf16* scale = (bf16*)(codes + kGroupCodes) + column;
    codes += column / kPanelWidth * kStepBytes + column % kPanelWidth * 4;
    const float largest = group.largest();
    store_first(scale, broadcast(largest / kLargestCode), 1);
    for (int k = 0; k < kGroupDepth; k++) {
      const float value = group.values[k / kWidth][k % kWidth];
      const int whole = largest > kNegligible ? nearest_integers(broadcast(value / to_float(*scale)))[0] : 0;
      codes[k / 4 * 2 * kStepBytes + k % 4] = uint8_t(whole + kCodeBias);
    }
  });
}

template <class Element>
void pack_int8(const Element* weight, uint8_t* packed, int64_t out_features, int64_t in_features, Team& team) {
  const int64_t num_pairs = ceil_div(out_features, int64_t(2 * kPanelWidth));
  const int64_t pair_size = whole_groups(in_features) * kGroupBytes;
  team.divide(num_pairs, [&](int64_t pair) {
    uint8_t* out = packed + pair * pair_size;
    memset(out, 0, pair_size);  // channels that only fill up the last pair have scales of zero
    const int64_t first = pair * 2 * kPanelWidth;
    for (int column = 0; column < smaller(int64_t(2 * kPanelWidth), out_features - first); column++)
      pack_channel(weight + (first + column) * in_features, in_features, column, out);
  });
}

}  // namespace
