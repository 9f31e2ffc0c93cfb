// Weights and activations in int8: both are quantized in groups of 32 along the depth, each group with a scale of its own, so
// that a single large value costs precision only among its 31 neighbours.
//
// Weights lie in pairs of panels of 16 channels, group by group: [8 steps of 4][2 panels][16 channels][4] codes, then
// [2][16] scales in bf16. A code is stored as code + 128, since the processors' byte products take one side unsigned; what
// that adds to the sum of a group, 128 times the sum of the row's codes, is taken off where the sum starts.
#pragma once

#include "elements.h"
#include "panels.h"
#include "team.h"

namespace {

constexpr int kGroupDepth = 32;
constexpr int kCodeBias = 128, kLargestCode = 127;
constexpr float kNegligible = 1e-30f;  // a group with nothing larger is zero: 127 / x must be finite
constexpr int kStepBytes = 4 * kPanelWidth;                                   // of one panel
constexpr int kScaleBytes = kPanelWidth * int(sizeof(bf16));                  // of one panel
constexpr int kGroupCodes = 2 * kPanelWidth * kGroupDepth;                    // of a pair of panels, one byte each
constexpr int kGroupBytes = kGroupCodes + 2 * kScaleBytes;

// What code 127 of the group at x stands for; infinity where an element is not finite.
template <class Element>
inline float largest_magnitude(const Element* x) {
  Vector largest = {};
  for (int i = 0; i < kGroupDepth; i += kWidth) {
    const Vector v = maximum(load(x + i), -load(x + i));
    largest = maximum(v == v ? v : broadcast(kInfinity), largest);
  }
  return horizontal_maximum(largest);
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
  static void write(Code* codes, Vector values) {
    const __m256i whole = _mm256_shuffle_epi32(_mm256_cvtps_epi32((__m256)values), _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole, whole), _MM_SHUFFLE(3, 1, 2, 0));
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
  static void write(Code* codes, Vector values) { store(codes, values); }
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
#if defined(__AVX512VNNI__)
inline void quantize_group(const bf16* x, int8_t* codes, float* scale, int32_t* start) {
  // Magnitudes of bf16 compare like their bits; the instruction for eight lanes finds the least.
  const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  const uint16_t bits = uint16_t(~_mm_cvtsi128_si32(least));
  const float largest = bits < 0x7f80 ? to_float(bf16{bits}) : kInfinity;
  const Vector factor = broadcast(largest > kNegligible ? kLargestCode / largest : 0);
  const __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(load(x) * factor)));
  const __m128i second = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(load(x + kWidth) * factor)));
  _mm_storeu_si128((__m128i*)codes, first);
  _mm_storeu_si128((__m128i*)(codes + kWidth), second);
  const __m128i bias = _mm_set1_epi8(char(kCodeBias)), zero = _mm_setzero_si128();
  const __m128i sums =
      _mm_add_epi64(_mm_sad_epu8(_mm_xor_si128(first, bias), zero), _mm_sad_epu8(_mm_xor_si128(second, bias), zero));
  const int sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - kGroupDepth * kCodeBias;
  *scale = largest / kLargestCode;
  *start = -kCodeBias * sum;
}
#else
inline void quantize_group(const bf16* x, ByteProduct::Code* codes, float* scale, ByteProduct::Start* start) {
  const float largest = largest_magnitude(x);
  const Vector factor = broadcast(largest > kNegligible ? kLargestCode / largest : 0);
  Vector sum = {};
  for (int i = 0; i < kGroupDepth; i += kWidth) {
    const Vector scaled = load(x + i) * factor;
    const Vector whole = scaled == scaled ? round_to_integer(scaled) : Vector{};  // with an infinite scale, 0 is enough
    sum += whole;
    ByteProduct::write(codes + i, whole);
  }
  *scale = largest / kLargestCode;
  *start = ByteProduct::Start(-kCodeBias * horizontal_sum(sum));
}
#endif

// ---- Rows of activations

// Rows of codes, [row][depth], with what each group of them needs, [group][row].
struct QuantizedRows {
  ByteProduct::Code* codes;
  float* scales;
  ByteProduct::Start* starts;  // of a group's sum: -128 times the sum of its codes
  int64_t depth;
  int64_t num_rows;

  static size_t bytes(int64_t num_rows, int64_t depth) {
    return Pieces::bytes<ByteProduct::Code>(num_rows * depth) +
           Pieces::bytes<float>(num_rows * (depth / kGroupDepth)) +
           Pieces::bytes<ByteProduct::Start>(num_rows * (depth / kGroupDepth));
  }
  QuantizedRows(void* memory, int64_t num_rows, int64_t depth) : depth(depth), num_rows(num_rows) {
    Pieces pieces(memory);
    codes = pieces.take<ByteProduct::Code>(num_rows * depth);
    scales = pieces.take<float>(num_rows * (depth / kGroupDepth));
    starts = pieces.take<ByteProduct::Start>(num_rows * (depth / kGroupDepth));
  }
  QuantizedRows from(int64_t row) const {
    QuantizedRows rest = *this;
    rest.codes += row * depth;
    rest.scales += row;
    rest.starts += row;
    return rest;
  }
};

inline void quantize_row(const bf16* x, const QuantizedRows& row) {
  for (int64_t group = 0; group < row.depth / kGroupDepth; group++) {
    const int64_t i = group * kGroupDepth, j = group * row.num_rows;
    quantize_group(x + i, row.codes + i, row.scales + j, row.starts + j);
  }
}

#if defined(__AMX_BF16__)
// A pair of panels as bf16, for tiles, whose arithmetic on int8 could not keep groups apart without giving up their speed.
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

template <class Element>
void pack_int8(const Element* weight, uint8_t* packed, int64_t out_features, int64_t in_features, Team& team) {
  const int64_t num_pairs = ceil_div(out_features, int64_t(2 * kPanelWidth)), groups = in_features / kGroupDepth;
  team.divide(num_pairs, [&](int64_t pair) {
    uint8_t* out = packed + pair * groups * kGroupBytes;
    for (int column = 0; column < 2 * kPanelWidth; column++) {
      const int64_t channel = pair * 2 * kPanelWidth + column;
      for (int64_t group = 0; group < groups; group++) {
        uint8_t* codes = out + group * kGroupBytes;
        bf16* scale = (bf16*)(codes + kGroupCodes) + column;
        codes += column / kPanelWidth * kStepBytes + column % kPanelWidth * 4;
        const Element* x = weight + channel * in_features + group * kGroupDepth;
        const float largest = channel < out_features ? largest_magnitude(x) : 0;
        store_first(scale, broadcast(largest / kLargestCode), 1);
        for (int k = 0; k < kGroupDepth; k++) {
          const float whole = largest > kNegligible ? round_to_integer(broadcast(to_float(x[k]) / to_float(*scale)))[0] : 0;
          codes[k / 4 * 2 * kStepBytes + k % 4] = uint8_t(int(whole) + kCodeBias);
        }
      }
    }
  });
}

}  // namespace
