#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

// AMX in plain C++, in place of the intrinsics, for checking amx_tile_ops.cpp on processors without AMX: tile shapes
// come from the configuration, tiles that are not configured trap, and products follow the manual's TDPBF16PS (pairs
// in order, subnormals flushed). Compiled only under ATTNOPS_EMULATE_AMX, never into the library.
namespace attnops::cpu {
namespace {

struct AmxModel {
  bool configured = false;
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
  uint8_t tiles[8][16][64];

  void configure(const void* config) {
    const uint8_t* bytes = static_cast<const uint8_t*>(config);
    if (bytes[0] != 1 || bytes[1] != 0) std::abort();
    for (int i = 2; i < 16; ++i) {
      if (bytes[i] != 0) std::abort();
    }
    std::memcpy(bytes_per_row, bytes + 16, sizeof(bytes_per_row));
    std::memcpy(rows, bytes + 48, sizeof(rows));
    for (int i = 0; i < 16; ++i) {
      if (bytes_per_row[i] > 64 || rows[i] > 16 || (i >= 8 && (bytes_per_row[i] != 0 || rows[i] != 0))) std::abort();
    }
    std::memset(tiles, 0, sizeof(tiles));
    configured = true;
  }
  void release() { configured = false; }

  void require(int tile) const {
    if (!configured || rows[tile] == 0 || bytes_per_row[tile] == 0) std::abort();
  }
  void zero(int tile) {
    require(tile);
    std::memset(tiles[tile], 0, sizeof(tiles[tile]));
  }
  void load(int tile, const void* base, int64_t stride) {
    zero(tile);
    for (int r = 0; r < rows[tile]; ++r) {
      std::memcpy(tiles[tile][r], static_cast<const char*>(base) + r * stride, bytes_per_row[tile]);
    }
  }
  void store(int tile, void* base, int64_t stride) const {
    require(tile);
    for (int r = 0; r < rows[tile]; ++r) {
      std::memcpy(static_cast<char*>(base) + r * stride, tiles[tile][r], bytes_per_row[tile]);
    }
  }

  static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.f, x) : x; }
  static float bf16_at(const uint8_t* row, int i) {
    const uint32_t bits = static_cast<uint32_t>(row[2 * i] | row[2 * i + 1] << 8) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return flushed(x);
  }
  void dot_pairs(int c, int a, int b) {
    require(c), require(a), require(b);
    if (rows[a] != rows[c] || bytes_per_row[b] != bytes_per_row[c] || bytes_per_row[a] != 4 * rows[b]) std::abort();
    for (int m = 0; m < rows[c]; ++m) {
      for (int k = 0; k < bytes_per_row[a] / 4; ++k) {
        for (int n = 0; n < bytes_per_row[c] / 4; ++n) {
          float sum;
          std::memcpy(&sum, &tiles[c][m][4 * n], sizeof(sum));
          sum = flushed(sum + bf16_at(tiles[a][m], 2 * k) * bf16_at(tiles[b][k], 2 * n));
          sum = flushed(sum + bf16_at(tiles[a][m], 2 * k + 1) * bf16_at(tiles[b][k], 2 * n + 1));
          std::memcpy(&tiles[c][m][4 * n], &sum, sizeof(sum));
        }
      }
    }
  }
};

thread_local AmxModel amx_model;

}  // namespace
}  // namespace attnops::cpu

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) amx_model.configure(config)
#define _tile_release() amx_model.release()
#define _tile_loadd(tile, base, stride) amx_model.load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_model.store(tile, base, stride)
#define _tile_zero(tile) amx_model.zero(tile)
#define _tile_dpbf16ps(c, a, b) amx_model.dot_pairs(c, a, b)
