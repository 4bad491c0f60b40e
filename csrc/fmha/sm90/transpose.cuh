#pragma once
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_fp8.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

// Of 32 rows of values, 32 columns of a tile of kHeadDim rows of keys, 128 to a chunk, by a warp. Of 16 keys 4 t + {0,
// 1, 2, 3} are 2 t + {0, 1} and 8 + 2 t + {0, 1}: the order in which a lane has its probabilities (Consumer::pack).
// Several blocks of 32 keys and 16 dims are read before the first is stored: a warp alone would wait for each. `before`
// runs when the first are read.
//
// `from`: of the first of the rows, where chunks have kKeys rows. `to`: of the first of kDimBlocks blocks of dims.
template <int kKeys, int kDimBlocks, class Before>
__device__ __forceinline__ void transpose_rows(uint32_t from, uint32_t to, int key_block, int lane,
                                               const Before& before) {
  constexpr int kAtOnce = 4;
  static_assert(kDimBlocks % kAtOnce == 0);
  const int row = lane % 8 * 2 + lane / 8 % 2;  // of a block of dims
  const uint32_t source = from + lane * 128, target = to + hopper::swizzled(row, 2 * key_block + lane / 16);
#pragma unroll
  for (int first = 0; first < kDimBlocks; first += kAtOnce) {
    uint32_t pairs[kAtOnce][4];  // of dims, by key: matrices of keys 0 .., 8 .., 16 .., 24 ..
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + i;
      hopper::load_transposed(pairs[i], source + block / 8 * kKeys * 128 + ((block % 8 ^ lane % 8) << 4));
    }
    if (first == 0) before();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t(&p)[4] = pairs[i];
      const uint32_t rows[4] = {
          __byte_perm(p[0], p[1], 0x6420),  // even dims, keys 0 .. 15
          __byte_perm(p[0], p[1], 0x7531),  // odd dims
          __byte_perm(p[2], p[3], 0x6420),
          __byte_perm(p[2], p[3], 0x7531),
      };
      hopper::store_fragment(rows, target + (first + i) * 16 * 128);
    }
  }
}

// A tile of kKeys rows of values, by two warps.
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void transpose_tile(uint32_t from, uint32_t to, int warp, int lane) {
  static_assert(kKeys <= 128 && kKeys % 64 == 0 && kHeadDim % 64 == 0);
#pragma unroll
  for (int half = 0; half < kKeys / 64; ++half) {
    const int key_block = 2 * half + warp;
    transpose_rows<kKeys, kHeadDim / 16>(from + key_block * 4096, to, key_block, lane, [] {});
  }
}

}  // namespace attnops::fmha::sm90
