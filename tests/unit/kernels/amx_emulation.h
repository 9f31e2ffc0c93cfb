// Intel AMX tiles in plain C++, so that the AMX kernels can be tested on a machine without them.
//
// Included before everything else when the amx variant is compiled for a test. An instruction that the hardware would
// refuse (an unconfigured tile, shapes that do not fit) ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1
#define __AMX_TILE__ 1

namespace amx_emulation {

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) uint8_t data[16][64];
};

inline Tile* tiles() {
  static thread_local Tile registers[8];
  return registers;
}

inline void demand(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "amx emulation: %s\n", what);
  abort();
}

inline Tile& configured(int index) {
  Tile& tile = tiles()[index];
  demand(tile.rows > 0 && tile.bytes > 0, "tile used without a configuration");
  return tile;
}

inline void load_configuration(const void* memory) {
  const uint8_t* bytes = (const uint8_t*)memory;
  demand(bytes[0] == 1 && bytes[1] == 0, "palette 1 expected");
  for (int i = 2; i < 16; i++) demand(bytes[i] == 0, "reserved bytes must be zero");
  for (int i = 0; i < 16; i++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    const int rows = bytes[48 + i];
    demand(i < 8 ? rows <= 16 && row_bytes <= 64 : rows == 0 && row_bytes == 0, "tile shape out of range");
    if (i < 8) {
      tiles()[i].rows = rows;
      tiles()[i].bytes = row_bytes;
      memset(tiles()[i].data, 0, sizeof tiles()[i].data);
    }
  }
}

inline void release() {
  for (int i = 0; i < 8; i++) tiles()[i].rows = tiles()[i].bytes = 0;
}

inline void zero(int index) { memset(configured(index).data, 0, sizeof Tile::data); }

inline void load(int index, const void* base, int64_t stride) {
  Tile& tile = configured(index);
  memset(tile.data, 0, sizeof tile.data);
  for (int r = 0; r < tile.rows; r++) memcpy(tile.data[r], (const char*)base + r * stride, tile.bytes);
}

inline void save(int index, void* base, int64_t stride) {
  const Tile& tile = configured(index);
  for (int r = 0; r < tile.rows; r++) memcpy((char*)base + r * stride, tile.data[r], tile.bytes);
}

inline float element(const Tile& tile, int row, int column) {
  uint16_t half;
  memcpy(&half, tile.data[row] + 2 * column, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void multiply_bf16(int sums, int left, int right) {
  Tile& c = configured(sums);
  const Tile &a = configured(left), &b = configured(right);
  demand(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "tile shapes do not fit");
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.bytes / 4; n++) {
      float sum;
      memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < a.bytes / 4; k++)
        for (int half = 0; half < 2; half++) sum += element(a, m, 2 * k + half) * element(b, k, 2 * n + half);
      memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_emulation::load_configuration
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stored amx_emulation::save
#define _tile_dpbf16ps amx_emulation::multiply_bf16
