#pragma once
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_fp8.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

// A tile of kKeys rows of values becomes one of kHeadDim rows of keys, 128 to a chunk. Of 16 keys 4 t + {0, 1, 2, 3}
// are 2 t + {0, 1} and 8 + 2 t + {0, 1}: the order in which a lane has its probabilities (Consumer::pack).
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void transpose_tile(uint32_t from, uint32_t to, int warp, int lane) {
  static_assert(kKeys % 32 == 0 && kHeadDim % 32 == 0);
  constexpr int kKeyBlocks = kKeys / 32;
#pragma unroll 4
  for (int i = warp; i < kKeyBlocks * kHeadDim / 16; i += 2) {
    const int key = i % kKeyBlocks * 32, dim = i / kKeyBlocks * 16;
    uint32_t pairs[4];  // of dims, by key: matrices of keys 0 .., 8 .., 16 .., 24 ..
    hopper::load_transposed(pairs, from + dim / 128 * kKeys * 128 + hopper::swizzled(key + lane, dim % 128 / 16));
    const uint32_t rows[4] = {
        __byte_perm(pairs[0], pairs[1], 0x6420),  // even dims, keys 0 .. 15
        __byte_perm(pairs[0], pairs[1], 0x7531),  // odd dims
        __byte_perm(pairs[2], pairs[3], 0x6420),
        __byte_perm(pairs[2], pairs[3], 0x7531),
    };
    const int row = dim + lane % 8 * 2 + lane / 8 % 2, piece = key % 128 / 16 + lane / 16;
    hopper::store_fragment(rows, to + key / 128 * kHeadDim * 128 + hopper::swizzled(row, piece));
  }
}

}  // namespace attnops::fmha::sm90
