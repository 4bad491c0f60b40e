#pragma once
#include "device/sm80/mma.cuh"
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// With many rows tiles of e4m3 become fp16 once for all of them, between two rings: warps that bring tiles fill one,
// kWideners warps take each unit out of it and write it into the other, from which warpgroups multiply as over 16-bit
// pages.
//
//   bringing warps     ring of e4m3     widening warps     ring of fp16     warpgroups that multiply
//
// A unit is a tile's rows under the 128-byte swizzle, in blocks of 128 columns of e4m3, then of 64 of fp16. Sixteen
// elements of 32 rows are an item, a lane for each row; warps take the items of a unit by turns. Every lane arrives for
// itself, both for what it has read and for what it has written.
template <class Tr>
class WideningWarp {
 public:
  __device__ __forceinline__ WideningWarp(uint32_t shared, int warp, int lane)
      : shared_(shared), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void widen_pieces(PieceWalk& piece) {
    do {
#pragma unroll 1
      for (int units = 2 * num_tiles(piece); units > 0; --units) widen_unit();
    } while (piece.next());
  }

 private:
  using Raw = RawTraits<Tr>;
  static constexpr int kWarps = Tr::kWideners;
  static constexpr int kParts = Tr::kTileTokens / 32, kColumnBytes = Tr::kTileTokens * 128;
  static constexpr int kItems = kParts * Tr::kHeadDim / 16;
  static constexpr int kItemsOfWarp = ceil_div(kItems, kWarps);
  static constexpr bool kFewRegisters = Tr::kMovesRegisters && Tr::kBringerRegisters < 80;
  static constexpr int kPasses = ceil_div(kItemsOfWarp, kFewRegisters ? 3 : 6);
  static constexpr int kAtOnce = ceil_div(kItemsOfWarp, kPasses);

  // Where an item lies in a unit of either ring. Its place among the rows is the same in both.
  struct Item {
    uint32_t from, to;

    __device__ __forceinline__ Item(uint32_t own, unsigned chunk, unsigned part)
        : from((own ^ (chunk % 8 * 16)) + chunk / 8 * kColumnBytes + part * (32 * 128)),
          to((own ^ (chunk % 4 * 32)) + chunk / 4 * kColumnBytes + part * (32 * 128)) {}
  };
  // Two warps have the rows of a half each, so that all but the half is known to the compiler.
  __device__ __forceinline__ static Item item(uint32_t own, unsigned warp, unsigned i) {
    if constexpr (kWarps == kParts) return Item(own + warp * (32 * 128), i, 0);
    const unsigned number = warp + i * kWarps;
    return Item(own, number / kParts, number % kParts);
  }

  __device__ __forceinline__ void widen_unit() {
    uint32_t own = lane_ * 128 + lane_ % 8 * 16;
    unsigned warp = warp_;
    if constexpr (kFewRegisters) asm volatile("" : "+r"(own), "+r"(warp));  // places are found anew for each unit
    const uint32_t from = shared_ + SharedLayout<Raw>::kRing + from_.slot * Raw::kUnitBytes;
    const uint32_t to = shared_ + SharedLayout<Tr>::kRing + to_.slot * Tr::kUnitBytes;
    from_.wait(shared_ + SharedLayout<Raw>::kFull);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint32_t raw[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (has_item(pass * kAtOnce + i)) hopper::load_words(raw[i], from + item(own, warp, pass * kAtOnce + i).from);
      }
      if (pass == 0) hopper::mbarrier_wait(shared_ + SharedLayout<Tr>::kEmpty + to_.slot * 8, to_.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!has_item(pass * kAtOnce + i)) continue;
        const uint32_t at = item(own, warp, pass * kAtOnce + i).to;
        uint32_t wide[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) e4m3x4_to_half(raw[i][k], wide[2 * k], wide[2 * k + 1]);
        hopper::store_words(to + at, wide);
        hopper::store_words(to + (at ^ 16), wide + 4);
      }
    }
    // Behind the stores, and so behind the reads that they wait for. The copy engine may write into the one place next,
    // and matrix units read the other: the fence orders both behind these ordinary accesses.
    hopper::fence_async_proxy();
    hopper::mbarrier_arrive(shared_ + SharedLayout<Raw>::kEmpty + from_.slot * 8);
    from_.advance();
    hopper::mbarrier_arrive(shared_ + SharedLayout<Tr>::kFull + to_.slot * 8);
    to_.advance();
  }

  // Whether this warp has an `i`th item.
  __device__ __forceinline__ bool has_item(int i) const {
    return (i + 1) * kWarps <= kItems || warp_ + i * kWarps < kItems;
  }

  const uint32_t shared_;
  const unsigned warp_, lane_;
  RingPlace<Raw> from_;
  RingPlace<Tr> to_;
};

}  // namespace attnops::xqa_decode::sm90::fp8
