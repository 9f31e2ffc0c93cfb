// The matrix product of int8 weights and int8 activations (quantized.h).
//
// Within a group, sums of products are whole numbers below 2^24: exact, in integers and in floats. Groups are added in
// ascending order, in float, so a row's result does not depend on the rows beside it.
#pragma once

#include "quantized.h"

namespace {

constexpr int kLineBytes = 64;               // of a cache
constexpr int kSumStride = 4 * kPanelWidth;  // floats from one row of sums to the next

// How many rows go with 1, 2 or 4 panels; fewer than in panels.h, since totals take registers too.
#if defined(__AVX512F__)
constexpr int kCodeRowsWith1 = 0, kCodeRowsWith2 = 9, kCodeRowsWith4 = 2;
#elif defined(__AVX2__)
constexpr int kCodeRowsWith1 = 4, kCodeRowsWith2 = 0, kCodeRowsWith4 = 0;
#else
constexpr int kCodeRowsWith1 = 2, kCodeRowsWith2 = 0, kCodeRowsWith4 = 0;
#endif

// c[r][n * 16 + j] = sum over the depth of row r times channel j of panel n, for Rows rows and the Count panels from `first`
// on. Pairs of panels begin where `pairs` says; from `upcoming` on, `fetched` bytes a step are read for later. Rows of c lie
// kSumStride apart.
template <int Rows, int Count, bool Fetch>
__attribute__((noinline)) void multiply_quantized_block(const QuantizedRows& rows, const uint8_t* const* pairs, int first,
                                                        const uint8_t* upcoming, int fetched, float* c) {
  constexpr int kVectors = Count * kChunks;
  constexpr int kRowGroup = 3;  // rows that one address register serves
  const ByteProduct::Code* codes[(Rows + kRowGroup - 1) / kRowGroup];
  for (int r = 0; r < Rows; r += kRowGroup) codes[r / kRowGroup] = rows.codes + r * rows.depth;
  const uint8_t* panels[Count];
  for (int n = 0; n < Count; n++) panels[n] = pairs[(first + n) / 2] + (first + n) % 2 * kStepBytes;
  const float* row_scales = rows.scales;
  const ByteProduct::Start* starts = rows.starts;
  const ptrdiff_t depth = rows.depth, num_rows = rows.num_rows;
  Vector totals[Rows][kVectors] = {};
  for (int64_t group = 0; group < depth / kGroupDepth; group++) {
    ByteProduct::Sum sums[Rows][kVectors];
#pragma GCC unroll 24
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v++) sums[r][v] = starts[r] - ByteProduct::Sum{};
#pragma GCC unroll 2
    for (int step = 0; step < kGroupDepth / 4; step++) {
      ByteProduct::Operand operands[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v++) operands[v] = ByteProduct::read(panels[v / kChunks] + v % kChunks * kWidth * 4);
#pragma GCC unroll 24
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; v++)
          sums[r][v] = ByteProduct::accumulate(sums[r][v], codes[r / kRowGroup] + r % kRowGroup * depth, operands[v]);
#pragma GCC unroll 8
      for (int n = 0; n < Count; n++) panels[n] += 2 * kStepBytes;
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r += kRowGroup) codes[r / kRowGroup] += 4;
      if constexpr (Fetch) {
        for (int line = 0; line < 3; line++) fetch(upcoming + line * kLineBytes);
        upcoming += fetched;
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v++) {
      const int panel = v / kChunks, odd = (first + panel) % 2;
      const Vector scale = load((const bf16*)(panels[panel] - odd * (kStepBytes - kScaleBytes)) + v % kChunks * kWidth);
#pragma GCC unroll 24
      for (int r = 0; r < Rows; r++) {
        totals[r][v] = multiply_add(ByteProduct::to_float(sums[r][v]), scale * row_scales[r], totals[r][v]);
      }
    }
    for (int n = 0; n < Count; n++) panels[n] += 2 * kScaleBytes;
    row_scales += num_rows;
    starts += num_rows;
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) store(c + r * kSumStride + v * kWidth, totals[r][v]);
}

// Any number of rows times `num_panels` panels in pairs. What pairs[num_panels / 2] points to will be needed next.
inline void multiply_quantized(const QuantizedRows& rows, int num_rows, const uint8_t* const* pairs, int num_panels, float* c) {
  constexpr int kFew = kCodeRowsWith4, kUsual = kCodeRowsWith2, kSingle = kCodeRowsWith1;
  const int64_t pair_size = rows.depth / kGroupDepth * kGroupBytes;
  for (int n = 0, count; n < num_panels; n += count) {
    count = num_rows <= kFew && num_panels - n >= 4 ? 4 : kUsual > 0 ? 2 : 1;
    const uint8_t* next = pairs[n / 2 + 1];
    for_each_block(num_rows, kUsual > 0 ? kUsual : kSingle, [&](Block block) {
      const QuantizedRows left = rows.from(block.begin);
      float* out = c + block.begin * kSumStride + n * kPanelWidth;
      if (count == 4)
        with_constant<kFew>(block.rows, [&](auto size) {
          multiply_quantized_block<size.value, 4, false>(left, pairs, n, nullptr, 0, out);
        });
      else if (count == 2 && next)
        with_constant<kUsual>(block.rows, [&](auto size) {
          const int fetched = ceil_div(kGroupBytes / (kGroupDepth / 4), block.count);  // bytes of the next pair a step
          const uint8_t* upcoming = next + pair_size * block.index / block.count;
          multiply_quantized_block<size.value, 2, true>(left, pairs, n, upcoming, fetched, out);
        });
      else if (count == 2)
        with_constant<kUsual>(block.rows, [&](auto size) {
          multiply_quantized_block<size.value, 2, false>(left, pairs, n, nullptr, 0, out);
        });
      else
        with_constant<kSingle>(block.rows, [&](auto size) {
          multiply_quantized_block<size.value, 1, false>(left, pairs, n, nullptr, 0, out);
        });
    });
  }
}

}  // namespace
