// The Hadamard transform that precedes every quantization: its sums and differences spread a single large value over its group
// instead of letting it take the precision of its neighbours (as in QuaRot, arXiv 2404.00456). It is orthonormal and its own
// inverse, so products of two transformed groups stay what they are.
#pragma once

#include "simd.h"

namespace {

constexpr int kLargestCode = 127;
constexpr float kNegligible = 1e-30f;  // a group with nothing larger is zero: 127 / x must be finite

// Of magnitudes: they compare like their bits, of which NaN has the greatest.
inline IntVector magnitude_bits(Vector v) { return (IntVector)v & 0x7fffffff; }

// Whether codes can tell what a group holds; otherwise its scale says all, and the codes are zero.
inline bool has_codes(float largest) { return largest > kNegligible && largest < kInfinity; }

// `Size` values times the Hadamard matrix.
template <int Size>
struct HadamardGroup {
  static constexpr int kVectors = Size / kWidth;
  Vector values[kVectors];

  template <class Element>
  __attribute__((always_inline)) explicit HadamardGroup(const Element* x) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) values[i] = load(x + i * kWidth) * kNorm;
    add_and_subtract<Size / 2>();
  }

  // The largest magnitude, or something that is not finite where a value is not.
  float largest() const {
    IntVector most = {};
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) most = maximum(most, magnitude_bits(values[i]));
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

  static_assert(Size == 64 || Size == 32 || Size == 16, "the norm is 1 / sqrt(Size)");
  static constexpr float kNorm = Size == 64 ? 0.125f : Size == 32 ? 0.176776695f : 0.25f;
};

}  // namespace
