#pragma once
#include "device/sm80/mma.cuh"
#include "mla_decode/rounded_keys.h"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"

// Scores over keys rounded to bf16, of tiles of a list with few keys. What rounding adds to each key is multiplied
// apart, on top of the scores. A warp with its 16 keys needs no other for that, so these products are not wgmma's.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Counts the keys of a piece as its tiles come, as far as that matters.
class FewKeys {
 public:
  // Whether there were few up to this tile, some of which are this warp's. The tile must be there.
  template <class At>
  __device__ bool in_tile(const uint8_t* base, int slot, int warp) {
    if (count_ > kFewKeys) return false;
    const auto* listed = reinterpret_cast<const volatile uint32_t*>(base + At::kListed) + 2 * slot;
    const uint32_t words[2] = {listed[0], listed[1]};
    count_ += __popc(words[0]) + __popc(words[1]);
    return count_ <= kFewKeys && ((warp < 2 ? words[0] : words[1]) >> 16 * (warp % 2) & 0xffffu) != 0;
  }

 private:
  int count_ = 0;
};

// What rounding adds to 16 keys x 32 columns as convert_keys leaves them, whose fragments have keys g and g + 8 in
// turns. In fp16, whose smallest step is below any that shows.
__device__ inline void to_added(const float (&scale)[2], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 x = __half22float2(reinterpret_cast<const __half2&>(a[step][i]));
      x.x *= scale[i % 2], x.y *= scale[i % 2];
      const float2 rounded = unpack_pair(attnops::sm90::pack_pair<__nv_bfloat16>(x.x, x.y), __nv_bfloat16{});
      a[step][i] = attnops::sm90::pack_pair<__half>(rounded.x - x.x, rounded.y - x.y);
    }
  }
}

// A key's scale; where what rounding adds would leave fp16's range, none.
__device__ inline float scale_of_added(const uint8_t* scales, int block) {
  const float scale = reinterpret_cast<const float*>(scales)[block];
  return fabsf(scale) < 0x1p16f ? scale : 0.f;
}

// Adds it to the scores of kLoads times 32 columns from `first` on: of the tile and of the queries at these places.
template <class At, int kLoads, class Scores>
__device__ inline void round_keys(const uint8_t* base, uint32_t shared, int slot, int first, Scores& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % few_rows::kGroupThreads / 32;
  const int tile = At::kKv + slot * At::kTileBytes;
  const uint8_t* row = base + tile + (16 * warp + lane / 4) * At::Rows::kRowBytes + At::Rows::kScales;
  constexpr int kTogether = At::kQueriesInRing ? 2 : 1;  // where calls that do not ask have this code, too: registers
#pragma unroll kTogether
  for (int load = first; load < first + kLoads; ++load) {
    uint32_t raw[4], keys[2][4];
    const uint32_t place = shared + tile + At::Rows::place(16 * warp + lane % 16, load / 2, lane / 16);
    attnops::sm90::load_fragment(raw, load % 2 ? At::Rows::second_half(place) : place);
    const float scale[2] = {scale_of_added(row, load / 4), scale_of_added(row + 8 * At::Rows::kRowBytes, load / 4)};
    convert_keys(raw, keys);
    to_added(scale, keys);
#pragma unroll
    for (int block = 0; block < At::kRows / 8; ++block) {
      uint32_t queries[4];
      ldmatrix_x4(queries, shared + At::kQ + load / 2 * At::kQueryPiece +
                               attnops::sm90::swizzled(8 * block + lane % 8, load % 2 * 4 + lane / 8));
      float sum[4] = {s[4 * block], s[4 * block + 1], s[4 * block + 2], s[4 * block + 3]};
      mma_m16n8k16<__half>(sum, keys[0], queries[0], queries[1]);
      mma_m16n8k16<__half>(sum, keys[1], queries[2], queries[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * block + i] = sum[i];
    }
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
