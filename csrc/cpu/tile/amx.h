#pragma once
#include <immintrin.h>

#include <cstdint>

#if defined(ATTNOPS_EMULATE_AMX)
#include "cpu/tile/amx_model.h"
#endif

// What every file with AMX code shares. Local to the including file, as all code for one instruction set.
namespace attnops::cpu {
namespace {

// Palette 1: all eight tiles with 16 rows of 64 bytes, that is 16 x 16 floats or 16 x 32 bf16.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

constexpr TileConfig kTileConfig;

inline void configure_tiles() { _tile_loadconfig(&kTileConfig); }
inline void release_tiles() { _tile_release(); }

// The intrinsics of some compilers do not say that they read memory.
inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace attnops::cpu
