#pragma once
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/tile_place.cuh"

// Tiles row by row: whole ones by two warps, half of the rows each; ones with rows that may not be read by two warps,
// half of the columns each.
namespace attnops::mla_decode::sm90 {

class RowLoads : protected TilePlace {
 protected:
  static constexpr int kElement = 2;
  static constexpr int kRowsPerLane = 2;           // of a gathered tile: lane and lane + 32
  static constexpr int kHalfRows = 32;             // of a whole tile, by each of a buffer's two warps
  static constexpr int kRowSteps = kHalfRows / 4;  // of four rows, which a warp copies at once

  __device__ RowLoads(const Params& p, const Modes& modes, uint8_t* base, uint32_t shared, bool read_once)
      : TilePlace(base, shared, read_once), p_(p), modes_(modes) {}

  __device__ int page_cell(int key) const { return modes_.by_page_size.divide(key); }
  __device__ int token_of(int key) const { return key - page_cell(key) * p_.page_table.page_size; }

  // What rows are copied from, and the bytes of a unit of their places.
  struct Pool {
    const uint8_t* pages;
    uint32_t unit;
  };
  __device__ Pool own_pool() const { return {static_cast<const uint8_t*>(p_.kv_pages), modes_.units.bytes}; }

  // Where the rows of the warp's half of a tile lie, in units from the pool: those that eight lanes each copy, one
  // behind the other. Written down by the time that the tile's place falls free.
  __device__ void write_row_list(uint32_t place) const {
    __syncwarp();
    row_list()[lane_ % 4 * kRowSteps + lane_ / 4] = place;
    __syncwarp();
  }

  // The warp's half of a tile, in flight, each unit a group of copies; the part first that is given back first. Nothing
  // but the order of the groups where none of its rows is a key. Rows without a rope part leave its place as it is.
  __device__ void copy_half(const Pool& pool, bool has_keys, bool with_rope = true) const {
    wait_empty(kPartRope);
    copy_columns<1>(pool, kRopeTile, has_keys && with_rope);
#pragma unroll 1
    for (int i = 0; i < kParts - 1; ++i) {
      const int part = i == 0 ? first_part() : second_part();
      wait_empty(part);
      copy_columns<2>(pool, first_tile_of_part(part), has_keys);
      copy_columns<2>(pool, first_tile_of_part(part) + 2, has_keys);
    }
  }

  __device__ void hand_over_half() const {
    hand_over<4, 1>(kRope);
    hand_over<3, 1>(2 * first_part() - 1);
    hand_over<2, 1>(2 * first_part());
    hand_over<1, 1>(2 * second_part() - 1);
    hand_over<0, 1>(2 * second_part());
  }

  // The warp's half of the columns; `offset` says where rows lane and lane + 32 begin, in bytes from the pool, or that
  // they are zeros: below 0. `tell` runs when the place is free, before it is handed over.
  template <class Tell>
  __device__ void gather_rows(const Pool& pool, const int64_t (&offset)[kRowsPerLane], const Tell& tell,
                              bool with_rope = true) const {
    if (has_rope()) {
      wait_empty(kPartRope);
      if (with_rope) copy_rows(pool, offset, kRopeTile, 1);
    }
    wait_empty(part_);
    tell();
    copy_rows(pool, offset, first_tile_of_part(part_), 4);
    commit_copies();
    if (has_rope()) hand_over<0, 2>(kRope);
    hand_over<0, 2>(2 * part_ - 1);
    hand_over<0, 2>(2 * part_);
  }

  const Params& p_;
  const Modes& modes_;

 private:
  __device__ uint32_t* row_list() const { return reinterpret_cast<uint32_t*>(base_ + kRowLists) + warp_ * kHalfRows; }

  __device__ int first_part() const { return buffer_ == 0 ? kPartLeft : kPartRight; }
  __device__ int second_part() const { return buffer_ == 0 ? kPartRight : kPartLeft; }

  __device__ static uint64_t wide_product(uint32_t a, uint32_t b) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
  }

  // Of kTiles tiles of 64 columns; eight lanes copy the 128 bytes of a row of one of them.
  template <int kTiles>
  __device__ void copy_columns(const Pool& from, int column, bool has_keys) const {
    if (has_keys) {
      const uint8_t* pool = from.pages + column * 128 + lane_ % 8 * 16;
      asm volatile("" : "+l"(pool));  // in a pair of registers, where a row's place is added in one instruction
      // The swizzle repeats after eight rows, which are two steps.
      const uint32_t even = kv_tile(column) + attnops::sm90::swizzled(warp_ % 2 * kHalfRows + lane_ / 8, lane_ % 8);
      const uint32_t odd = (even ^ 64) + 512;
      const auto* list = reinterpret_cast<const uint4*>(row_list() + lane_ / 8 * kRowSteps);
      const uint8_t* source[kRowSteps];
#pragma unroll
      for (int i = 0; i < kRowSteps; i += 4) {
        const uint4 rows = list[i / 4];
        source[i] = pool + wide_product(rows.x, from.unit);
        source[i + 1] = pool + wide_product(rows.y, from.unit);
        source[i + 2] = pool + wide_product(rows.z, from.unit);
        source[i + 3] = pool + wide_product(rows.w, from.unit);
      }
      // A register that a copy reads is free for the next address some 20 cycles later: all addresses before all
      // copies.
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int i = 0; i < kRowSteps; ++i) {
          attnops::sm90::copy16((i % 2 ? odd : even) + i / 2 * 1024 + k * kTileBytes, source[i] + k * 128, read_once_);
        }
      }
    }
    commit_copies();
  }

  __device__ void copy_rows(const Pool& from, const int64_t (&offset)[kRowsPerLane], int column, int tiles) const {
    const uint8_t* pool = from.pages + lane_ % 8 * 16;
#pragma unroll
    for (int half = 0; half < kRowsPerLane; ++half) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int row = 4 * i + lane_ / 8;
        const int64_t begin = __shfl_sync(0xffffffffu, offset[half], row);
        const uint8_t* source = pool + max_of(begin, int64_t{0}) + column * 128;
        const uint32_t place = kv_tile(column) + attnops::sm90::swizzled(32 * half + row, lane_ % 8);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k < tiles) attnops::sm90::copy16(place + k * kTileBytes, source + k * 128, begin >= 0);
        }
      }
    }
  }
};

}  // namespace attnops::mla_decode::sm90
