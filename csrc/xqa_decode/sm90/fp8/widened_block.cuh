#pragma once
#include "device/sm80/mma.cuh"
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/wide_block.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// The power of two that brings values of up to `top` into the range of fp16, exactly for all but those 2^-28 below it.
__device__ __forceinline__ float range_of_half(float top) {
  const int exponent = static_cast<int>(__float_as_uint(top) >> 23);  // with its bias
  if (top == 0.f || exponent == 255) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(min_of(max_of(14 + 127 - exponent, -100), 100) + 127) << 23);
}

// What sm90::WideBlock is for 16-bit pages, over tiles of e4m3 that have become fp16: rows have scales of their own.
template <class Tr>
struct ScaledBlock : WideBlock<Tr> {
  using Base = WideBlock<Tr>;
  using Base::kScores;

  // `scales`: in shared memory, float [2][kRows]: of raw scores to units of log2, and what is left for the exponent.
  __device__ __forceinline__ void begin(uint32_t scales, uint32_t) {
    const uint32_t own = scales + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      hopper::load_word(Base::score_scale[h], own + h * 32);
      hopper::load_word(Base::scale[h], own + h * 32 + Tr::kRows * 4);
    }
    Base::clear();
  }

  // Where a soft cap, or a scale below zero, comes before the exponent.
  __device__ __forceinline__ void scale_scores(float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= Base::score_scale[i / 2 & 1];
  }
};

// The same where the warpgroup turns each tile into fp16 in shared memory, where its products read it. With many rows
// that is cheaper than operands in registers, whose scores and probabilities would go through shared memory.
template <class Tr>
struct WidenedBlock : ScaledBlock<Tr> {
  using Base = WideBlock<Tr>;
  using Base::kScores;
  static_assert(Tr::kGroups == 1);

  static constexpr int kTileBytes = Tr::kTileTokens * Tr::kHeadDim * 2;

  uint32_t widened;  // a tile of keys and one of values, in shared memory

  __device__ __forceinline__ void begin(uint32_t scales, uint32_t tiles) {
    widened = tiles;
    ScaledBlock<Tr>::begin(scales, tiles);
  }

  __device__ __forceinline__ void multiply_keys(uint32_t tile, uint32_t queries, float (&scores)[kScores]) {
    sync_group<Tr>();  // all warps have the scores before
    widen(tile, widened);
    Base::multiply_keys(widened, queries, scores);
  }

  __device__ __forceinline__ void multiply_values(uint32_t tile, uint32_t) {
    sync_group<Tr>();  // all warps are done with the values before
    widen(tile, widened + kTileBytes);
    Base::multiply_values(widened + kTileBytes, 0);
  }

  // Behind the product with newer keys: a barrier there says that all warps are done with the values before.
  __device__ __forceinline__ void multiply_pinned_values(uint32_t tile) {
    widen(tile, widened + kTileBytes);
    hopper::wgmma_fence();
    Base::multiply_pinned_values(widened + kTileBytes);
  }

 private:
  // A tile of 64 rows under the 128-byte swizzle to one of fp16, in blocks of 64 columns.
  __device__ __forceinline__ static void widen(uint32_t from, uint32_t to) {
    constexpr int kChunks = Tr::kHeadDim / 16;  // of a row, 16 elements each; a thread has every second
    const int row = threadIdx.x % 64, first = threadIdx.x / 64;
    from += hopper::swizzled(row, first), to += hopper::swizzled(row, 2 * first);
    // So that the other places are found anew for each tile: they would lie in registers from tile to tile.
    asm volatile("" : "+r"(from), "+r"(to));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      uint32_t raw[4], wide[8];
      hopper::load_words(raw, (from ^ (chunk % 8 * 16)) + chunk / 8 * hopper::kTileBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) e4m3x4_to_half(raw[k], wide[2 * k], wide[2 * k + 1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = (to ^ ((chunk % 4 * 2 + half) * 16)) + chunk / 4 * hopper::kTileBytes;
        hopper::store_words(at, wide + 4 * half);
      }
    }
    hopper::fence_async_proxy();
    sync_group<Tr>();
  }
};

}  // namespace attnops::xqa_decode::sm90::fp8
