// The product of panels.h on Intel AMX tiles: bf16 rows times pair-interleaved bf16 panels, accumulated in float.
//
// A panel's 32 rows of depth are one tile of 16 x 64 bytes as they lie in memory. Two tile configurations are used:
// up to 16 rows times four panels, where a step along the depth may be 32 or 16 (a page of 16 tokens), and up to 32 rows
// times two panels. Loading a configuration clears the tiles and takes long, so it is done only when the shape changes.
#pragma once

#include "panels.h"

namespace {

#if defined(__AMX_BF16__)

constexpr int kTileRows = 16, kTileDepth = 32;

struct Bf16Tiles : Bf16Dot {};
using BestBf16Product = Bf16Tiles;

struct alignas(64) TileConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// The tile intrinsics do not tell the compiler which memory they read: whatever was stored before must be in memory.
inline void finish_stores(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// The calling thread's tile registers: shaped when first needed in a parallel region, released at its end.
class TileScope {
 public:
  TileScope() { shape() = 0; }
  ~TileScope() {
    if (shape() != 0) _tile_release();
    shape() = 0;
  }

  // Tiles 0 to 3 hold sums; `first` rows in all four, or in 0 and 1 with `second` rows in 2 and 3. Tile 4 takes `first`
  // rows of the left side. Tile 5 takes `second` rows of it, or half the depth of `first` rows; tiles 6 and 7 take
  // panels, tile 7 of half the depth where tile 5 is.
  static void configure(int first, int second) {
    const int wanted = first << 8 | second;
    if (shape() == wanted) return;
    TileConfiguration tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; i++) {
      tiles.row_bytes[i] = 64;
      tiles.rows[i] = uint8_t(i < 6 ? first : kTileRows);
    }
    if (second > 0) {
      tiles.rows[2] = tiles.rows[3] = tiles.rows[5] = uint8_t(second);
    } else {
      tiles.row_bytes[5] = 32;
      tiles.rows[7] = kTileRows / 2;
    }
    finish_stores(&tiles);
    _tile_loadconfig(&tiles);
    shape() = wanted;
  }

 private:
  static int& shape() {
    static thread_local int rows = 0;
    return rows;
  }
};

// Up to 16 rows times up to four panels.
template <int Count, bool Fetch>
void multiply_tiles(const bf16* a, ptrdiff_t a_stride, const Panels<bf16>& panels, float* c, ptrdiff_t c_stride) {
  const ptrdiff_t a_bytes = a_stride * 2, b_bytes = panels.row_stride * 2;
  const ptrdiff_t segment_size = panels.segment_depth / 2 * panels.row_stride;
  _tile_zero(0);
  if constexpr (Count > 1) _tile_zero(1);
  if constexpr (Count > 2) _tile_zero(2);
  if constexpr (Count > 3) _tile_zero(3);
  for (int segment = 0; segment < panels.segments;) {
    // Segments that follow each other in memory are one longer segment.
    int joined = 1;
    while (panels.panel_stride == 0 && segment + joined < panels.segments &&
           panels.at(segment + joined, 0) == panels.at(segment, 0) + joined * segment_size)
      joined++;
    const bf16* b[Count];
    for (int n = 0; n < Count; n++) b[n] = panels.at(segment, n);
    if constexpr (Fetch) {
      for (int i = segment; i < segment + joined; i++)
        for (int n = 0; n < Count; n++) {
          const bf16* upcoming = panels.upcoming_at(i, n);
          for (int row = 0; row < panels.segment_depth / 2; row++) fetch(upcoming + row * panels.row_stride);
        }
    }
    int depth = panels.segment_depth * joined;
    for (; depth >= kTileDepth; depth -= kTileDepth, a += kTileDepth) {
      _tile_loadd(4, a, a_bytes);
      _tile_loadd(6, b[0], b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (Count > 1) {
        _tile_loadd(6, b[1], b_bytes);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (Count > 2) {
        _tile_loadd(6, b[2], b_bytes);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (Count > 3) {
        _tile_loadd(6, b[3], b_bytes);
        _tile_dpbf16ps(3, 4, 6);
      }
      for (int n = 0; n < Count; n++) b[n] += kTileRows * panels.row_stride;
    }
    if (depth > 0) {
      _tile_loadd(5, a, a_bytes);
      _tile_loadd(7, b[0], b_bytes);
      _tile_dpbf16ps(0, 5, 7);
      if constexpr (Count > 1) {
        _tile_loadd(7, b[1], b_bytes);
        _tile_dpbf16ps(1, 5, 7);
      }
      if constexpr (Count > 2) {
        _tile_loadd(7, b[2], b_bytes);
        _tile_dpbf16ps(2, 5, 7);
      }
      if constexpr (Count > 3) {
        _tile_loadd(7, b[3], b_bytes);
        _tile_dpbf16ps(3, 5, 7);
      }
      a += depth;
    }
    segment += joined;
  }
  const ptrdiff_t c_bytes = c_stride * 4;
  _tile_stored(0, c, c_bytes);
  if constexpr (Count > 1) _tile_stored(1, c + kPanelWidth, c_bytes);
  if constexpr (Count > 2) _tile_stored(2, c + 2 * kPanelWidth, c_bytes);
  if constexpr (Count > 3) _tile_stored(3, c + 3 * kPanelWidth, c_bytes);
}

// 17 to 32 rows times one or two panels of one segment whose depth is a multiple of 32.
template <int Count>
void multiply_tile_pairs(const bf16* a, ptrdiff_t a_stride, const Panels<bf16>& panels, float* c, ptrdiff_t c_stride) {
  const ptrdiff_t a_bytes = a_stride * 2, b_bytes = panels.row_stride * 2, c_bytes = c_stride * 4;
  const bf16* lower = a + kTileRows * a_stride;
  const bf16* b0 = panels.at(0, 0);
  const bf16* b1 = panels.at(0, Count - 1);
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (Count > 1) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int k = 0; k < panels.segment_depth; k += kTileDepth) {
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, b0, b_bytes);
    _tile_loadd(5, lower + k, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Count > 1) {
      _tile_loadd(7, b1, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    b0 += kTileRows * panels.row_stride;
    b1 += kTileRows * panels.row_stride;
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(2, c + kTileRows * c_stride, c_bytes);
  if constexpr (Count > 1) {
    _tile_stored(1, c + kPanelWidth, c_bytes);
    _tile_stored(3, c + kTileRows * c_stride + kPanelWidth, c_bytes);
  }
}

// Depths that are no multiple of 16 do not occur: heads are padded to it, linear layers demand 32.
template <bool Fetch>
void multiply_all_tiles(const bf16* a, ptrdiff_t a_stride, int rows, const Panels<bf16>& panels, float* c,
                        ptrdiff_t c_stride) {
  const bool pairs = rows > kTileRows && panels.segments == 1 && panels.segment_depth % kTileDepth == 0;
  // Blocks of one size, so that the tiles keep their shape; the last one repeats a few rows of the one before.
  const int blocks = ceil_div(rows, pairs ? 2 * kTileRows : kTileRows), size = ceil_div(rows, blocks);
  TileScope::configure(smaller(size, kTileRows), larger(size - kTileRows, 0));
  finish_stores(a);
  for (int n = 0; n < panels.count;) {
    const Panels<bf16> group = panels.from(n);
    const int count = pairs ? smaller(group.count, 2) : smaller(group.count, 4);
    for (int block = 0; block < blocks; block++) {
      const int begin = smaller(block * size, rows - size);
      const bf16* left = a + begin * a_stride;
      float* out = c + begin * c_stride + n * kPanelWidth;
      if (size > kTileRows && count == 2)
        multiply_tile_pairs<2>(left, a_stride, group, out, c_stride);
      else if (size > kTileRows)
        multiply_tile_pairs<1>(left, a_stride, group, out, c_stride);
      else if (count == 4)
        multiply_tiles<4, Fetch>(left, a_stride, group, out, c_stride);
      else if (count == 3)
        multiply_tiles<3, Fetch>(left, a_stride, group, out, c_stride);
      else if (count == 2)
        multiply_tiles<2, Fetch>(left, a_stride, group, out, c_stride);
      else
        multiply_tiles<1, Fetch>(left, a_stride, group, out, c_stride);
    }
    n += count;
  }
}
template <>
void multiply<Bf16Tiles, false>(const bf16* a, ptrdiff_t a_stride, int rows, const Panels<bf16>& panels, float* c,
                                ptrdiff_t c_stride) {
  multiply_all_tiles<false>(a, a_stride, rows, panels, c, c_stride);
}
template <>
void multiply<Bf16Tiles, true>(const bf16* a, ptrdiff_t a_stride, int rows, const Panels<bf16>& panels, float* c,
                               ptrdiff_t c_stride) {
  multiply_all_tiles<true>(a, a_stride, rows, panels, c, c_stride);
}

#else

class TileScope {
 public:
  TileScope() {}
};
#if defined(__AVX512BF16__)
using BestBf16Product = Bf16Dot;
#else
using BestBf16Product = Bf16Product;
#endif

#endif

}  // namespace
