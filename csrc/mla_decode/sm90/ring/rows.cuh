#pragma once
#include "mla_decode/sm90/results.cuh"

// Rows of the output straight from an accumulator: all of shared memory is on its way to be filled again.
namespace attnops::mla_decode::sm90::ring {

// Four lanes hold four words each of a row, word i of lane l the columns 8 i + 2 l and the next one. Gives each lane
// those of eight neighbours: lane l all words l.
__device__ inline uint4 exchange_words(const uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const auto swap = [](uint32_t word, int lanes) { return __shfl_xor_sync(0xffffffffu, word, lanes); };
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = swap(odd ? words[i] : words[i + 1], 1);
    pairs[i] = odd ? other : words[i];
    pairs[i + 1] = odd ? words[i + 1] : other;
  }
  const uint32_t first = swap(high ? pairs[0] : pairs[2], 2), second = swap(high ? pairs[1] : pairs[3], 2);
  if (high) return {first, second, pairs[2], pairs[3]};
  return {pairs[0], pairs[1], first, second};
}

// Writes this group's 256 of the 512 columns of the piece's rows.
template <typename T>
__device__ inline void store_rows_from_registers(const Params& p, const Piece& piece, const RowState& rows,
                                                 const RowSums& sums, int group, float (&o)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  auto [lse, factor] = RowEnds(rows, sums, o);
  if (piece.partial >= 0) return store_partial(p, piece, lse, factor, group, o);
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    const bool valid = row < piece.num_rows;
    const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
    T* out = static_cast<T*>(p.out) + piece.request * p.out_stride_request + at.token * p.out_stride_token +
             at.head * p.out_stride_head + group * 256 + 8 * (lane % 4);
    if (valid && group == 0 && lane % 4 == 0) store_lse(p, piece, at, lse[h]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = 16 * c + 4 * i + 2 * h;
        words[i] = attnops::sm90::pack_pair<T>(o[from] * factor[h], o[from + 1] * factor[h]);
      }
      const uint4 vec = exchange_words(words);
      if (valid) *reinterpret_cast<uint4*>(out + 32 * c) = vec;
    }
  }
}

}  // namespace attnops::mla_decode::sm90::ring
