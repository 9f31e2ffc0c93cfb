// The one matrix product all heavy kernels are made of: a few rows times a panel of 16 columns.
//
// A panel holds `depth` rows of 16 columns. Elements of 16 bits that are multiplied in pairs (bf16) lie pair-interleaved,
// [depth / 2][16][2]; others lie [depth][16]. That is what both AVX512-BF16's dot product and an AMX tile read. Keys of 16
// tokens, values of 16 tokens, and 16 output channels of a linear layer are all panels. The int8 codes of keys lie
// [depth / 4][16][4], those of values like bf16 (quantized_heads.h); int8 weights have a product of their own (quantized.h).
//
// Every element of a product is one sum over the depth in ascending order, whatever the rows or panels beside it, so a
// row's result does not depend on its neighbours.
#pragma once

#include "simd.h"

namespace {

constexpr int kPanelWidth = 16;
constexpr int kChunks = kPanelWidth / kWidth;  // vectors per panel row

// How many rows the innermost loop takes with 1, 2 or 4 panels, so that the sums fill the registers. Few rows go with
// many panels and many rows with few, so that up to the largest number of rows a panel is read once.
#if defined(__AVX512F__)
constexpr int kRowsWith1 = 12, kRowsWith2 = 12, kRowsWith4 = 6;
#elif defined(__AVX2__)
constexpr int kRowsWith1 = 6, kRowsWith2 = 0, kRowsWith4 = 0;
#else
constexpr int kRowsWith1 = 2, kRowsWith2 = 0, kRowsWith4 = 0;
#endif

// Where `count` panels lie. A panel may be cut into segments (the pages of a sequence), each with its own address:
// panel n of segment s starts at bases[s * segment_stride + n * panel_stride] + n * panel_offset, n counted from `first`.
template <class Element>
struct Panels {
  const Element* const* bases;
  int segments;
  int segment_stride;
  int panel_stride;
  ptrdiff_t panel_offset;
  int segment_depth;     // rows of the panel in one segment
  ptrdiff_t row_stride;  // elements from one interleaved row to the next
  int count;
  // Panels of the same form that will be needed next, fetched into the second-level cache while these are multiplied: pages
  // lie too scattered for the machine to foresee, and with many rows it does not read ahead while it multiplies. Null: none.
  const Element* const* upcoming = nullptr;
  int first = 0;

  const Element* at(int segment, int panel) const {
    return bases[segment * segment_stride + (first + panel) * panel_stride] + (first + panel) * panel_offset;
  }
  const Element* upcoming_at(int segment, int panel) const {
    return upcoming[segment * segment_stride + (first + panel) * panel_stride] + (first + panel) * panel_offset;
  }
  Panels from(int panel) const {
    Panels rest = *this;
    rest.first += panel;
    rest.count -= panel;
    return rest;
  }
};

// ---- The element kinds: what a row (Left) and a panel (Right) hold, and one step along the depth.

constexpr int kBlockRows = 12;  // rows that attention takes at a time: their scores over a span stay in the nearest cache

struct FloatSums {
  using Sum = Vector;
  static Vector to_float(Sum sum) { return sum; }
};

template <class Element>
struct FloatProduct : FloatSums {  // float rows times float or fp16 panels
  using Left = float;
  using Right = Element;
  using Operand = Vector;
  static constexpr int kStep = 1, kPair = 1;
  static Operand read(const Right* p) { return load(p); }
  static Vector accumulate(Vector sum, const Left* a, Operand b) { return multiply_add(broadcast(*a), b, sum); }
};

struct Bf16Product : FloatSums {  // float rows times pair-interleaved bf16 panels
  using Left = float;
  using Right = bf16;
  struct Operand {
    Vector even, odd;
  };
  static constexpr int kStep = 2, kPair = 2;
  static Operand read(const Right* p) {
    UIntVector pairs;
    memcpy(&pairs, p, sizeof pairs);
    return {(Vector)(pairs << 16), (Vector)(pairs & 0xffff0000u)};
  }
  static Vector accumulate(Vector sum, const Left* a, const Operand& b) {
    return multiply_add(broadcast(a[1]), b.odd, multiply_add(broadcast(a[0]), b.even, sum));
  }
};

#if defined(__AVX512BF16__)
struct Bf16Dot : FloatSums {  // bf16 rows times pair-interleaved bf16 panels
  using Left = bf16;
  using Right = bf16;
  using Operand = __m512i;
  static constexpr int kStep = 2, kPair = 2;
  static Operand read(const Right* p) { return _mm512_loadu_si512(p); }
  static Vector accumulate(Vector sum, const Left* a, Operand b) {
    int32_t pair;
    memcpy(&pair, a, sizeof pair);
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
  }
};
#endif

// ---- The product

inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// One of the blocks of nearly equal size that rows are cut into. Each fetches its share of the upcoming panels, so that reading
// them takes as long as multiplying does.
struct Block {
  int index, count;
  int begin, rows;
};

// f(block) for the blocks of at most `most` rows.
template <class Function>
inline void for_each_block(int rows, int most, Function f) {
  const int count = ceil_div(rows, most);
  for (int i = 0; i < count; i++) {
    const int begin = rows * i / count;
    f(Block{i, count, begin, rows * (i + 1) / count - begin});
  }
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// f(Constant<n>{}) for an n from 1 to Most.
template <int Most, class Function>
inline void with_constant(int n, Function f) {
  if constexpr (Most > 0) {
    if (n == Most) return f(Constant<Most>{});
    with_constant<Most - 1>(n, f);
  }
}

// c[r][n * 16 + j] = sum over the depth of a[r] times column j of panel n, for Rows rows and Count panels.
template <class Product, int Rows, int Count, bool Fetch>
__attribute__((noinline)) void multiply_in_registers(const typename Product::Left* a, ptrdiff_t a_stride,
                                                     const Panels<typename Product::Right>& panels, Block block, float* c,
                                                     ptrdiff_t c_stride) {
  constexpr int kVectors = Count * kChunks;
  constexpr int kRowGroup = 3;  // rows that one address register serves
  const typename Product::Left* rows[(Rows + kRowGroup - 1) / kRowGroup];
  for (int r = 0; r < Rows; r += kRowGroup) rows[r / kRowGroup] = a + r * a_stride;
  typename Product::Sum sums[Rows][kVectors] = {};
  const ptrdiff_t step_stride = panels.row_stride * (Product::kStep / Product::kPair);
  const int steps = panels.segment_depth / Product::kStep;
  for (int segment = 0; segment < panels.segments; segment++) {
    const typename Product::Right *b[Count], *upcoming[Count];
    for (int n = 0; n < Count; n++) {
      b[n] = panels.at(segment, n);
      if constexpr (Fetch) upcoming[n] = panels.upcoming_at(segment, n) + steps * step_stride * block.index / block.count;
    }
    const ptrdiff_t fetch_stride = ceil_div(step_stride, ptrdiff_t(block.count));
    for (int step = 0; step < steps; step++) {
      typename Product::Operand operands[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v++)
        operands[v] = Product::read(b[v / kChunks] + v % kChunks * kWidth * Product::kPair);
#pragma GCC unroll 24
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; v++)
          sums[r][v] = Product::accumulate(sums[r][v], rows[r / kRowGroup] + r % kRowGroup * a_stride, operands[v]);
#pragma GCC unroll 8
      for (int n = 0; n < Count; n++) {
        b[n] += step_stride;
        if constexpr (Fetch) {
          fetch(upcoming[n]);
          upcoming[n] += fetch_stride;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r += kRowGroup) rows[r / kRowGroup] += Product::kStep;
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) store(c + r * c_stride + v * kWidth, Product::to_float(sums[r][v]));
}

// The same for any number of rows and all panels.
template <class Product, bool Fetch = false>
void multiply(const typename Product::Left* a, ptrdiff_t a_stride, int rows, const Panels<typename Product::Right>& panels,
              float* c, ptrdiff_t c_stride) {
  const int most = rows <= kRowsWith4 ? 4 : kRowsWith2 > 0 ? 2 : 1;
  for (int n = 0, count; n < panels.count; n += count) {
    count = panels.count - n >= most ? most : 1;
    const Panels<typename Product::Right> group = panels.from(n);
    for_each_block(rows, kRowsWith1, [&](Block block) {
      const typename Product::Left* left = a + block.begin * a_stride;
      float* out = c + block.begin * c_stride + n * kPanelWidth;
      if (count == 4)
        with_constant<kRowsWith4>(block.rows, [&](auto size) {
          multiply_in_registers<Product, size.value, 4, Fetch>(left, a_stride, group, block, out, c_stride);
        });
      else if (count == 2)
        with_constant<kRowsWith2>(block.rows, [&](auto size) {
          multiply_in_registers<Product, size.value, 2, Fetch>(left, a_stride, group, block, out, c_stride);
        });
      else
        with_constant<kRowsWith1>(block.rows, [&](auto size) {
          constexpr bool kFetch = Fetch && kRowsWith2 == 0;
          multiply_in_registers<Product, size.value, 1, kFetch>(left, a_stride, group, block, out, c_stride);
        });
    });
  }
}

}  // namespace
