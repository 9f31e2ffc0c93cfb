// Weights and activations in int8, in groups of 64 along the depth that have a scale each.
//
// Both are first transformed group by group (hadamard.h), the last group of a depth filled up with zeros.
//
// Weights lie in pairs of panels of 16 channels, group by group: [16 steps of 4][2 panels][16 channels][4] codes + 128, then
// [2][16] scales in bf16. What the 128 add is taken off where the sum of a group starts.
#pragma once

#include "byte_product.h"
#include "elements.h"
#include "hadamard.h"
#include "panels.h"
#include "team.h"

namespace {

constexpr int kGroupDepth = 64;
constexpr int kStepBytes = 4 * kPanelWidth;                                   // of one panel
constexpr int kScaleBytes = kPanelWidth * int(sizeof(bf16));                  // of one panel
constexpr int kGroupCodes = 2 * kPanelWidth * kGroupDepth;                    // of a pair of panels, one byte each
constexpr int kGroupBytes = kGroupCodes + 2 * kScaleBytes;

using Group = HadamardGroup<kGroupDepth>;

inline int64_t whole_groups(int64_t depth) { return ceil_div(depth, int64_t(kGroupDepth)); }

// f(i, group) for the groups of `depth` elements at x, i counting elements; zeros fill up the last one.
template <class Element, class Function>
inline void for_each_group(const Element* x, int64_t depth, Function f) {
  int64_t i = 0;
  for (; i + kGroupDepth <= depth; i += kGroupDepth) f(i, Group(x + i));
  if (i == depth) return;
  Element filled[kGroupDepth] = {};
  memcpy(filled, x + i, (depth - i) * sizeof(Element));
  f(i, Group(filled));
}

// The codes of a group of activations, what code 1 stands for, and -128 times the sum of the codes.
inline void quantize_group(const Group& group, ByteProduct::Code* codes, float* scale, ByteProduct::Start* start) {
  const float largest = group.largest();
  *scale = largest / kLargestCode;
  if (!has_codes(largest)) {
    memset(codes, 0, kGroupDepth * sizeof *codes);
    *start = 0;
    return;
  }
  IntVector sum = {};
#pragma GCC unroll 16
  for (int i = 0; i < Group::kVectors; i++) {
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
  for_each_group(x, depth, [&](int64_t i, const Group& group) {
    const int64_t j = i / kGroupDepth * row.num_rows;
    quantize_group(group, row.codes + i, row.scales + j, row.starts + j);
  });
}

#if defined(__AMX_BF16__)
// For tiles, whose arithmetic on int8 could not keep groups apart without giving up their speed: a row transformed but in bf16, as
// long as whole groups are, and a pair of panels as bf16.
inline void transform_row(const bf16* x, int64_t depth, bf16* transformed) {
  for_each_group(x, depth, [&](int64_t i, const Group& group) {
    for (int v = 0; v < Group::kVectors; v++) store(transformed + i + v * kWidth, group.values[v]);
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
  for_each_group(x, depth, [&](int64_t i, const Group& group) {
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
