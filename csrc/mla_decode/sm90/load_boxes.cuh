#pragma once
#include "mla_decode/sm90/load_rows.cuh"

// Tiles by the copy engine: whole, or as boxes of smaller pages.
namespace attnops::mla_decode::sm90 {

class BoxLoads : protected RowLoads {
 protected:
  __device__ BoxLoads(const Params& p, const Maps& maps, const Modes& modes, uint8_t* base, uint32_t shared,
                      bool read_once)
      : RowLoads(p, modes, base, shared, read_once), maps_(maps) {}

  // From a page of whole tiles: all of tile `tile`, or its first half.
  __device__ void load_boxes(int tile, int page, bool half) const {
    if (lane_ == 0) {
      const int token = modes_.tiles_per_page == 1 ? 0 : tile % modes_.tiles_per_page * kPlanTileTokens;
      if (has_rope()) {
        wait_empty(kPartRope);
        load_unit(kRope, kRopeTile, 1, token, page, half);
      }
      wait_empty(part_);
      const int column = first_tile_of_part(part_);
      load_unit(2 * part_ - 1, column, 2, token, page, half);
      load_unit(2 * part_, column + 2, 2, token, page, half);
    }
    __syncwarp();
  }

  // The same from pages of half a tile, whose numbers lanes hold, the first of them `lane`.
  __device__ void load_small_boxes(int pages, int lane, int boxes) const {
    if (has_rope()) {
      wait_empty(kPartRope);
      load_small_unit(kRope, kRopeTile, 1, pages, lane, boxes);
    }
    wait_empty(part_);
    const int column = first_tile_of_part(part_);
    load_small_unit(2 * part_ - 1, column, 2, pages, lane, boxes);
    load_small_unit(2 * part_, column + 2, 2, pages, lane, boxes);
  }

  const Maps& maps_;

 private:
  __device__ void load_unit(int unit, int column, int tiles, int token, int page, bool half) const {
    const CUtensorMap* map = half ? &maps_.kv_half : &maps_.kv;
    expect(unit, tiles * (half ? kTileBytes / 2 : kTileBytes));
    for (int k = column; k < column + tiles; ++k) {
      attnops::sm90::copy_box(kv_tile(k), map, unit_full(unit), k * 64, token, page, read_once_);
    }
  }

  __device__ void load_small_unit(int unit, int column, int tiles, int pages, int lane, int boxes) const {
    const int box_bytes = kTileBytes >> modes_.box_shift;
    if (lane_ == 0) expect(unit, tiles * boxes * box_bytes);
#pragma unroll 1
    for (int i = 0; i < boxes; ++i) {
      const int page = __shfl_sync(0xffffffffu, pages, lane + i);
      if (lane_ == 0) {
        for (int k = column; k < column + tiles; ++k) {
          const uint32_t place = kv_tile(k) + i * box_bytes;
          attnops::sm90::copy_box(place, &maps_.kv, unit_full(unit), k * 64, 0, page, read_once_);
        }
      }
      __syncwarp();
    }
  }

  __device__ void expect(int unit, int bytes) const {
    attnops::sm90::mbarrier_arrive(unit_full(unit), kFullArrivals - 1);
    attnops::sm90::mbarrier_arrive_expect(unit_full(unit), bytes);
  }
};

}  // namespace attnops::mla_decode::sm90
