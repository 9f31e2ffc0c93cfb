// How an instruction set multiplies rows of int8 codes with panels of them: what it wants of a row's codes, where a sum starts,
// and one step of 4 along the depth for a vector of columns.
//
// A panel's codes are stored as code + 128, since the processors' byte products take one side unsigned; what that adds to a sum,
// 128 times the sum of the row's codes, is taken off by its user. Sums are whole numbers.
#pragma once

#include "simd.h"

namespace {

constexpr int kCodeBias = 128;

#if defined(__AVX512VNNI__)
struct ByteProduct {
  using Code = int8_t;
  using Start = int32_t;
  using Sum = IntVector;
  using Operand = __m512i;
  static void write(Code* codes, IntVector whole) { store(codes, whole); }
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

}  // namespace
