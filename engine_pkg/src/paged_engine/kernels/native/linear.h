// Linear layers with packed weights: panels of 16 output channels, two of them interleaved row by row, so that reading a
// layer follows few long streams: [out_features / 32][in_features / pair][2][16][pair], the last pair filled with zeros.
//
// Few rows are limited by reading the weights: they are read once, in order, by all threads. Many rows are limited by
// arithmetic: a thread takes a chunk of rows and a group of panels that stays in its second-level cache. A row's result
// does not depend on the other rows.
#pragma once

#include "elementwise.h"
#include "tiles.h"

namespace {

constexpr int kGroupPanels = 4;
// With tiles many rows share one conversion of a group's int8 weights to bf16.
#if defined(__AMX_BF16__)
constexpr int kChunkRows = 384, kMaxDirectInt8Rows = 12;
#else
constexpr int kChunkRows = 96, kMaxDirectInt8Rows = INT32_MAX;
#endif

// Where a weight lies in its pair of panels. C++ type uint8_t holds int8 as sign and magnitude (see Int8Dot).
inline int64_t packed_index(int64_t k, int panel, int column, const float*) { return (k * 2 + panel) * kPanelWidth + column; }
inline int64_t packed_index(int64_t k, int panel, int column, const bf16*) {
  return (k / 2 * 2 + panel) * 2 * kPanelWidth + column * 2 + k % 2;
}
inline int64_t packed_index(int64_t k, int panel, int column, const int8_t*) {
  const int element = column * 2 + int(k % 2), second = int(k % 4 / 2);  // of the 32 of an interleaved row
  return (k / 4 * 2 + panel) * 64 + element / 8 * 16 + second * 8 + element % 8;
}
inline float pack_element(float x) { return x; }
inline bf16 pack_element(bf16 x) { return x; }
inline int8_t pack_element(int8_t x) { return int8_t(x < 0 ? 0x80 | -x : x); }

template <class Element>
void pack_linear(const Element* weight, Element* packed, int64_t out_features, int64_t in_features, int num_threads) {
  const int64_t num_pairs = ceil_div(out_features, int64_t(2 * kPanelWidth));
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    Element* out = packed + pair * 2 * kPanelWidth * in_features;
    for (int column = 0; column < 2 * kPanelWidth; column++) {
      const int64_t channel = pair * 2 * kPanelWidth + column;
      for (int64_t k = 0; k < in_features; k++)
        out[packed_index(k, column / kPanelWidth, column % kPanelWidth, out)] =
            channel < out_features ? pack_element(weight[channel * in_features + k]) : Element{};
    }
  }
}

// Symmetric int8 codes of each row, and its scale: what the code 1 stands for.
template <class Element>
void quantize_int8(const Element* weight, int8_t* codes, float* scales, int64_t num_rows, int64_t size, int num_threads) {
  typedef int8_t ByteVector __attribute__((vector_size(kWidth)));
  constexpr float kRounder = 0x1.8p23f;  // so large that floats have no fraction: adding it rounds to nearest even
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t row = 0; row < num_rows; row++) {
    const Element* x = weight + row * size;
    Vector largest = {};
    for_each_vector(size, [&](int64_t i, int count) {
      const Vector v = load(x + i, count);
      largest = maximum(maximum(v, -v), largest);
    });
    scales[row] = larger(horizontal_maximum(largest), 1e-12f) / 127;
    const Vector scale = broadcast(scales[row]);
    for_each_vector(size, [&](int64_t i, int count) {
      const Vector whole = load(x + i, count) / scale + kRounder - kRounder;
      const auto bytes = __builtin_convertvector(__builtin_convertvector(whole, IntVector), ByteVector);
      memcpy(codes + row * size + i, &bytes, count);
    });
  }
}

// One pair of int8 panels to bf16 panels.
inline void unpack_int8(const uint8_t* packed, bf16* panels, int64_t depth) {
  for (int64_t i = 0; i < depth / 4 * 2; i++, packed += 64) {
    bf16* first = panels + (i / 2 * 4 + i % 2) * 2 * kPanelWidth;
    bf16* second = first + 4 * kPanelWidth;
#if defined(__AVX512BF16__)
    const Int8Dot::Operand rows = Int8Dot::read(packed);
    _mm512_storeu_si512(first, rows.first);
    _mm512_storeu_si512(second, rows.second);
#else
    for (int j = 0; j < 64; j += kWidth) {
      typedef uint8_t ByteVector __attribute__((vector_size(kWidth)));
      ByteVector bytes;
      memcpy(&bytes, packed + j, sizeof bytes);
      const UIntVector codes = __builtin_convertvector(bytes, UIntVector);
      const Vector magnitude = __builtin_convertvector((IntVector)(codes & 127), Vector);
      const UIntVector bits = (UIntVector)magnitude >> 16 | (codes & 128) << 8;
      const HalfVector half = __builtin_convertvector(bits, HalfVector);
      memcpy((void*)((j % 16 < 8 ? first : second) + j / 16 * 8 + j % 8), &half, sizeof half);
    }
#endif
  }
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

// What leaves the sums of one group of panels: scales, bias, activation, accumulation, conversion.
inline void write_sums(const Linear& linear, const float* sums, int rows, int panel_begin, int panel_end, void* y,
                       int64_t y_stride) {
  const bool gated = linear.activation != kIdentity;
  const int width = gated ? 2 * kPanelWidth : kPanelWidth;  // columns of sums for one panel of y
  const int out_width = gated ? linear.out_features / 2 : linear.out_features;
  for (int column = panel_begin * kPanelWidth; column < panel_end * kPanelWidth; column += width) {
    const int out_column = column / width * kPanelWidth;
    for (int v = 0; v < kPanelWidth; v += kWidth) {
      const int count = smaller(kWidth, out_width - out_column - v);
      if (count <= 0) break;
      for (int r = 0; r < rows; r++) {
        const float* from = sums + r * kGroupPanels * kPanelWidth + column - panel_begin * kPanelWidth + v;
        const auto channel = [&](int offset) {
          Vector x = load(from + offset);
          if (linear.scales) x *= load(linear.scales + column + offset + v, count);
          return linear.bias ? x + load(linear.bias + column + offset + v, count) : x;
        };
        const Vector value = gated ? activate(linear.activation, channel(0)) * channel(kPanelWidth) : channel(0);
        void* to = at(y, r * y_stride + out_column + v, linear.output_type);
        with_type(linear.output_type, [&](auto element) {
          const auto out = (decltype(element)*)to;
          store(out, linear.accumulate ? load(out, count) + value : value, count);
        });
      }
    }
  }
}

// The rows of x and y that one thread multiplies with one group of panels. Weights of another type than the product's
// are int8 and are converted first.
template <class Product, class Input, class Weight>
void multiply_group(const Linear& linear, const Input* x, int64_t x_stride, int rows, int panel_begin, int panel_end, void* y,
                    int64_t y_stride) {
  using Right = typename Product::Right;
  using Left = typename Product::Left;
  static thread_local Scratch scratch;
  const int64_t depth = linear.in_features, pair_size = depth * 2 * kPanelWidth;
  const size_t group_size = ceil_div(kGroupPanels, 2) * pair_size;
  Pieces pieces(scratch.reserve(Pieces::bytes<float>(kChunkRows * kGroupPanels * kPanelWidth) +
                                Pieces::bytes<Left>(kChunkRows * depth) + Pieces::bytes<Right>(group_size)));
  float* sums = pieces.take<float>(kChunkRows * kGroupPanels * kPanelWidth);
  int64_t left_stride;
  const Left* left = left_rows(x, x_stride, rows, depth, pieces.take<Left>(kChunkRows * depth), &left_stride);
  const Weight* weights = (const Weight*)linear.weights + panel_begin / 2 * pair_size;
  const Right* pairs;
  if constexpr (sizeof(Weight) == sizeof(Right)) {
    pairs = weights;
  } else {
    Right* converted = pieces.take<Right>(group_size);
    for (int pair = 0; pair < ceil_div(panel_end - panel_begin, 2); pair++)
      unpack_int8(weights + pair * pair_size, converted + pair * pair_size, depth);
    pairs = converted;
  }
  const Right* bases[kGroupPanels];
  for (int n = 0; n < kGroupPanels; n++) bases[n] = pairs + n / 2 * pair_size + n % 2 * kPanelWidth * Product::kStep;
  const int row_stride = 2 * kPanelWidth * Product::kPair;
  const Panels<Right> panels = {bases, 1, 0, 1, 0, int(depth), row_stride, panel_end - panel_begin};
  multiply<Product>(left, left_stride, rows, panels, sums, kGroupPanels * kPanelWidth);
  write_sums(linear, sums, rows, panel_begin, panel_end, y, y_stride);
}

template <class Product, class Input, class Weight>
void run_linear(const Linear& linear, const Input* x, int64_t x_stride, int64_t num_rows, void* y, int64_t y_stride,
                int num_threads) {
  const int pairs = ceil_div(linear.out_features, 2 * kPanelWidth);
  const int chunks = int(ceil_div(num_rows, int64_t(kChunkRows)));
  // Groups of at most kGroupPanels; the same number for every thread where there are few.
  int groups = ceil_div(pairs * 2, kGroupPanels);
  if (chunks == 1) groups = smaller(ceil_div(groups, num_threads) * num_threads, pairs);
#pragma omp parallel num_threads(team_size(num_threads, groups * chunks))
  {
    TileScope tiles;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < int64_t(groups) * chunks; i++) {
      const int group = int(i / chunks), chunk = int(i % chunks);
      const int64_t row = num_rows * chunk / chunks;
      const int rows = int(num_rows * (chunk + 1) / chunks - row);
      const int begin = int(int64_t(pairs) * group / groups) * 2, end = int(int64_t(pairs) * (group + 1) / groups) * 2;
      multiply_group<Product, Input, Weight>(linear, x + row * x_stride, x_stride, rows, begin, end,
                                             at(y, row * y_stride, linear.output_type), y_stride);
    }
  }
}

inline void linear(const Linear& linear, const void* x, int64_t x_stride, int64_t num_rows, void* y, int64_t y_stride,
                   int num_threads) {
  if (num_rows == 0) return;
  const auto run = [&](auto product, auto input, auto weight) {
    run_linear<decltype(product), decltype(input), decltype(weight)>(linear, (const decltype(input)*)x, x_stride, num_rows, y,
                                                                     y_stride, num_threads);
  };
  if (linear.weight_type == kFloat32) return run(FloatProduct<float>{}, float{}, float{});
#if defined(__AVX512BF16__)
  if (linear.weight_type == kBfloat16) return run(BestBf16Product{}, bf16{}, bf16{});
  if (num_rows <= kMaxDirectInt8Rows) return run(Int8Dot{}, bf16{}, uint8_t{});
  run(BestBf16Product{}, bf16{}, uint8_t{});
#else
  if (linear.weight_type == kBfloat16) return run(Bf16Product{}, bf16{}, bf16{});
  run(Bf16Product{}, bf16{}, uint8_t{});
#endif
}

}  // namespace
