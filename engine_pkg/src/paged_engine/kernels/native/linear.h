// Linear layers with packed weights: panels of 16 output channels, two of them interleaved row by row, so that reading a
// layer follows few long streams: [out_features / 32][in_features / pair][2][16][pair], the last pair filled with zeros.
// int8 weights lie as quantized.h says.
//
// Few rows are limited by reading the weights: they are read once, in order, by all threads. Many rows are limited by
// arithmetic: a thread takes a chunk of rows and a group of panels that stays in its second-level cache. A row's result
// does not depend on the other rows.
#pragma once

#include "elementwise.h"
#include "quantized_product.h"
#include "tiles.h"

namespace {

constexpr int kGroupPanels = 4;
#if defined(__AMX_BF16__)
constexpr int kChunkRows = 384;
#else
constexpr int kChunkRows = 96;
#endif

// Where a weight lies in its pair of panels.
inline int64_t packed_index(int64_t k, int panel, int column, const float*) { return (k * 2 + panel) * kPanelWidth + column; }
inline int64_t packed_index(int64_t k, int panel, int column, const bf16*) {
  return (k / 2 * 2 + panel) * 2 * kPanelWidth + column * 2 + k % 2;
}

template <class Element>
void pack_linear(const Element* weight, Element* packed, int64_t out_features, int64_t in_features, Team& team) {
  const int64_t num_pairs = ceil_div(out_features, int64_t(2 * kPanelWidth));
  team.divide(num_pairs, [&](int64_t pair) {
    Element* out = packed + pair * 2 * kPanelWidth * in_features;
    for (int column = 0; column < 2 * kPanelWidth; column++) {
      const int64_t channel = pair * 2 * kPanelWidth + column;
      for (int64_t k = 0; k < in_features; k++)
        out[packed_index(k, column / kPanelWidth, column % kPanelWidth, out)] =
            channel < out_features ? weight[channel * in_features + k] : Element{};
    }
  });
}

// Activations that a product takes as they are, or converted to its left element type.
inline const float* left_rows(const float* x, int64_t stride, int, int64_t, float*, int64_t* left_stride) {
  *left_stride = stride;
  return x;
}
inline const bf16* left_rows(const bf16* x, int64_t stride, int, int64_t, bf16*, int64_t* left_stride) {
  *left_stride = stride;
  return x;
}
inline const float* left_rows(const bf16* x, int64_t stride, int rows, int64_t size, float* buffer, int64_t* left_stride) {
  *left_stride = size;
  for (int r = 0; r < rows; r++) convert(x + r * stride, buffer + r * size, size);
  return buffer;
}

// Who wrote the rows of x: any thread, or each row the one that Team::divide gives it to, so that this one need not wait to
// read it.
enum class RowsFrom { kAnyThread, kOwnThread };

// What one thread computes at a time: some rows of y for one group of panels.
struct Share {
  int64_t row;
  int rows, panel_begin, panel_end;

  int pairs() const { return (panel_end - panel_begin) / 2; }
};

// What leaves the sums of one group of panels: scales, bias, activation, accumulation, conversion.
template <class Output>
void write_sums(const Linear& linear, const float* sums, const Share& share, Output* y, int64_t y_stride) {
  const bool gated = linear.activation != kIdentity;
  const int width = gated ? 2 * kPanelWidth : kPanelWidth;  // columns of sums for one panel of y
  const int out_width = gated ? linear.out_features / 2 : linear.out_features;
  const int begin = share.panel_begin * kPanelWidth, end = share.panel_end * kPanelWidth;
  for (int r = 0; r < share.rows; r++) {
    const float* row = sums + r * kGroupPanels * kPanelWidth - begin;
    Output* out_row = y + (share.row + r) * y_stride;
    for (int column = begin, out_column = begin / width * kPanelWidth; column < end;
         column += width, out_column += kPanelWidth) {
      for (int v = 0; v < smaller(kPanelWidth, out_width - out_column); v += kWidth) {
        const int count = smaller(kWidth, out_width - out_column - v);
        const auto channel = [&](int i) {
          Vector x = load(row + i);
          if (linear.scales) x *= load(linear.scales + i, count);
          return linear.bias ? x + load(linear.bias + i, count) : x;
        };
        const Vector first = channel(column + v);
        const Vector value = gated ? activate(linear.activation, first) * channel(column + kPanelWidth + v) : first;
        Output* out = out_row + out_column + v;
        store(out, linear.accumulate ? load(out, count) + value : value, count);
      }
    }
  }
}

inline void write_sums(const Linear& linear, const float* sums, const Share& share, void* y, int64_t y_stride) {
  with_type(linear.output_type, [&](auto element) { write_sums(linear, sums, share, (decltype(element)*)y, y_stride); });
}

// Shares a layer's work out: work(share, upcoming) for every chunk of rows and group of panels, where `upcoming` is what the
// thread will do next, or null.
template <class Work>
void share_out(const Linear& linear, int64_t num_rows, Team& team, Work work) {
  const int pairs = ceil_div(linear.out_features, 2 * kPanelWidth);
  const int chunks = int(ceil_div(num_rows, int64_t(kChunkRows)));
  // Groups of at most kGroupPanels; the same number for every thread where there are few.
  int groups = ceil_div(pairs * 2, kGroupPanels);
  if (chunks == 1) groups = smaller(ceil_div(groups, team.size()) * team.size(), pairs);
  const auto share = [=](int64_t i) -> Share {
    const int group = int(i / chunks), chunk = int(i % chunks);
    const int64_t row = num_rows * chunk / chunks;
    return {row, int(num_rows * (chunk + 1) / chunks - row), int(int64_t(pairs) * group / groups) * 2,
            int(int64_t(pairs) * (group + 1) / groups) * 2};
  };
  const int64_t num_shares = int64_t(groups) * chunks;
  TileScope tiles;
  team.share(num_shares, [&](int64_t i, int64_t next) {
    const Share upcoming = share(next);
    work(share(i), next < num_shares ? &upcoming : nullptr);
  });
}

// A share by panels of the product's own element type, or of int8 ones that are made so first.
template <class Product, class Input, class Weight>
void multiply_share(const Linear& linear, const Input* x, int64_t x_stride, const Share& share, const Share* upcoming, void* y,
                    int64_t y_stride) {
  using Right = typename Product::Right;
  using Left = typename Product::Left;
  static thread_local Scratch scratch;
  const int64_t depth = linear.in_features, pair_size = depth * 2 * kPanelWidth;
  constexpr bool kUnpacks = sizeof(Weight) != sizeof(Right);
  const size_t unpacked_size = kUnpacks ? kGroupPanels / 2 * pair_size : 0;
  Pieces pieces(scratch.reserve(Pieces::bytes<float>(kChunkRows * kGroupPanels * kPanelWidth) +
                                Pieces::bytes<Left>(kChunkRows * depth) + Pieces::bytes<Right>(unpacked_size)));
  float* sums = pieces.take<float>(kChunkRows * kGroupPanels * kPanelWidth);
  int64_t left_stride;
  const Left* left = left_rows(x + share.row * x_stride, x_stride, share.rows, depth,
                               pieces.take<Left>(kChunkRows * depth), &left_stride);
  const auto packed_pair = [&](int pair) {
    const int64_t size = kUnpacks ? depth / kGroupDepth * kGroupBytes : pair_size;
    return (const Weight*)linear.weights + pair * size;
  };
  const Right* pairs[kGroupPanels / 2 + 1];
  for (int i = 0; i < share.pairs(); i++) {
    const Weight* packed = packed_pair(share.panel_begin / 2 + i);
    if constexpr (kUnpacks) {
      Right* unpacked = pieces.take<Right>(pair_size);
      unpack_int8(packed, unpacked, depth);
      pairs[i] = unpacked;
    } else {
      pairs[i] = packed;
    }
  }
  // Behind the share's own panels those that are needed next.
  const bool fetches = !kUnpacks && share.rows > kRowsWith4 && upcoming && upcoming->panel_begin != share.panel_begin;
  pairs[share.pairs()] = fetches ? (const Right*)packed_pair(upcoming->panel_begin / 2) : pairs[0];
  const Right* bases[kGroupPanels + 2];
  for (int n = 0; n < 2 * share.pairs() + 2; n++) bases[n] = pairs[n / 2] + n % 2 * kPanelWidth * Product::kStep;
  Panels<Right> panels = {bases, 1, 0, 1, 0, int(depth), 2 * kPanelWidth * Product::kPair, 2 * share.pairs(), bases + 2};
  if (fetches)
    multiply<Product, true>(left, left_stride, share.rows, panels, sums, kGroupPanels * kPanelWidth);
  else
    multiply<Product>(left, left_stride, share.rows, panels, sums, kGroupPanels * kPanelWidth);
  write_sums(linear, sums, share, y, y_stride);
}

template <class Product, class Input, class Weight>
void run_linear(const Linear& linear, const Input* x, int64_t x_stride, int64_t num_rows, void* y, int64_t y_stride,
                Team& team) {
  team.wait();
  share_out(linear, num_rows, team, [&](const Share& share, const Share* upcoming) {
    multiply_share<Product, Input, Weight>(linear, x, x_stride, share, upcoming, y, y_stride);
  });
}

#if defined(__AMX_BF16__)
// int8 weights as bf16 panels times transformed rows in bf16.
inline void run_int8(const Linear& linear, const bf16* x, int64_t x_stride, RowsFrom rows_from, int64_t num_rows, void* y,
                     int64_t y_stride, Team& team) {
  const int64_t depth = whole_groups(linear.in_features) * kGroupDepth;
  bf16* transformed = (bf16*)team.memory();
  if (rows_from == RowsFrom::kAnyThread) team.wait();
  team.divide(num_rows, [&](int64_t row) { transform_row(x + row * x_stride, linear.in_features, transformed + row * depth); });
  Linear filled = linear;
  filled.in_features = int(depth);
  run_linear<BestBf16Product, bf16, uint8_t>(filled, transformed, depth, num_rows, y, y_stride, team);
}

// Bytes that the team must share for `linear`.
inline size_t shared_bytes(const Linear& linear, int64_t num_rows) {
  return linear.weight_type == kInt8 ? num_rows * whole_groups(linear.in_features) * kGroupDepth * sizeof(bf16) : 0;
}
#else
inline void run_int8(const Linear& linear, const bf16* x, int64_t x_stride, RowsFrom rows_from, int64_t num_rows, void* y,
                     int64_t y_stride, Team& team) {
  const int64_t num_groups = whole_groups(linear.in_features), pair_size = num_groups * kGroupBytes;
  const QuantizedRows quantized(team.memory(), num_rows, num_groups);
  if (rows_from == RowsFrom::kAnyThread) team.wait();
  team.divide(num_rows, [&](int64_t row) { quantize_row(x + row * x_stride, linear.in_features, quantized.from(row)); });
  team.wait();
  share_out(linear, num_rows, team, [&](const Share& share, const Share* upcoming) {
    static thread_local Scratch scratch;
    float* sums = (float*)scratch.reserve(kChunkRows * kGroupPanels * kPanelWidth * sizeof(float));
    const auto packed_pair = [&](int panel) { return (const uint8_t*)linear.weights + panel / 2 * pair_size; };
    const uint8_t* pairs[kGroupPanels / 2 + 1];
    for (int i = 0; i < share.pairs(); i++) pairs[i] = packed_pair(share.panel_begin + 2 * i);
    const bool fetches = upcoming && upcoming->panel_begin != share.panel_begin;
    pairs[share.pairs()] = fetches ? packed_pair(upcoming->panel_begin) : nullptr;
    multiply_quantized(quantized.from(share.row), share.rows, pairs, 2 * share.pairs(), sums);
    write_sums(linear, sums, share, y, y_stride);
  });
}

// Bytes that the team must share for `linear`.
inline size_t shared_bytes(const Linear& linear, int64_t num_rows) {
  return linear.weight_type == kInt8 ? QuantizedRows::bytes(num_rows, whole_groups(linear.in_features)) : 0;
}
#endif

inline void linear(const Linear& linear, const void* x, int64_t x_stride, RowsFrom rows_from, int64_t num_rows, void* y,
                   int64_t y_stride, Team& team) {
  const auto run = [&](auto product, auto input, auto weight) {
    run_linear<decltype(product), decltype(input), decltype(weight)>(linear, (const decltype(input)*)x, x_stride, num_rows, y,
                                                                     y_stride, team);
  };
  if (linear.weight_type == kFloat32) return run(FloatProduct<float>{}, float{}, float{});
  if (linear.weight_type == kBfloat16) return run(BestBf16Product{}, bf16{}, bf16{});
  run_int8(linear, (const bf16*)x, x_stride, rows_from, num_rows, y, y_stride, team);
}

}  // namespace
