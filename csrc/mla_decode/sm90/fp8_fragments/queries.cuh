#pragma once
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/raw_queries.cuh"

// Queries to fp16. bf16 rows are scaled by a power of two, so that their largest value lies in [2^14, 2^15): exact of
// everything above 2^-28 of it, and 2^-39 of it off below. fp16 rows stay what they are.
namespace attnops::mla_decode::sm90::fp8_fragments {

// A row, spread over a warp: 16 bytes at dims 8 lane and 256 + 8 lane, and 4 at the rope's 2 lane.
struct QueryRow {
  uint4 latent[2];
  uint32_t rope;

  template <typename T>
  __device__ void load(const Params& p, int request, const RowPlace& at) {
    const int lane = threadIdx.x % 32;
    const QueryPlace q = query_place(p, request, at);
    latent[0] = __ldg(reinterpret_cast<const uint4*>(q.latent) + lane);
    latent[1] = __ldg(reinterpret_cast<const uint4*>(q.latent) + 32 + lane);
    rope = __ldg(reinterpret_cast<const uint32_t*>(q.rope) + lane);
  }

  template <typename T>
  __device__ float largest() const {
    float top = 0.f;
    const auto see = [&](uint32_t pair) {
      const float2 x = unpack_pair(pair, T{});
      top = fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y)));
    };
#pragma unroll
    for (int k = 0; k < 2; ++k) see(latent[k].x), see(latent[k].y), see(latent[k].z), see(latent[k].w);
    see(rope);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    return top;
  }
};

__device__ inline void store_shared(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ inline void store_shared32(uint32_t address, uint32_t a) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

template <typename T>
__device__ inline uint32_t query_pair(uint32_t pair, float factor) {
  if constexpr (std::is_same_v<T, __half>) return pair;
  const float2 x = unpack_pair(pair, T{});
  return attnops::sm90::pack_pair<__half>(x.x * factor, x.y * factor);
}

// Writes a row in the order of K's fragments (convert.cuh): of 16 columns, the pairs 0, 2, 4, 6 and then 1, 3, 5, 7.
// Returns what the row's scores must be multiplied by.
template <typename T, class At>
__device__ inline float store_query(const QueryRow& q, uint32_t queries, int row) {
  const int lane = threadIdx.x % 32;
  float factor = 1.f, inverse = 1.f;
  if constexpr (!std::is_same_v<T, __half>) {
    const float top = q.largest<T>();
    const int exponent = top > 0.f ? (__float_as_int(top) >> 23) - 127 : 0;
    const int shift = min_of(max_of(14 - exponent, -126), 126);
    factor = __int_as_float((shift + 127) << 23), inverse = __int_as_float((127 - shift) << 23);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t words[4] = {q.latent[k].x, q.latent[k].y, q.latent[k].z, q.latent[k].w};
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = query_pair<T>(words[i], factor);
    const int piece = 4 * k + lane / 8, chunk = lane % 8 / 2 * 2;
    const uint32_t place = queries + piece * At::kQueryPiece + lane % 2 * 8;
    store_shared(place + attnops::sm90::swizzled(row, chunk), pairs[0], pairs[2]);
    store_shared(place + attnops::sm90::swizzled(row, chunk + 1), pairs[1], pairs[3]);
  }
  const uint32_t rope = queries + 8 * At::kQueryPiece;
  if constexpr (At::kScaled) {  // K's rope part is 16 bit, and in order
    const float2 x = unpack_pair(q.rope, T{});
    store_shared32(rope + attnops::sm90::swizzled(row, lane / 4) + lane % 4 * 4,
                   attnops::sm90::pack_pair<T>(x.x * factor, x.y * factor));
  } else {
    const int chunk = lane / 8 * 2 + lane % 2;
    store_shared32(rope + attnops::sm90::swizzled(row, chunk) + lane % 8 / 2 * 4, query_pair<T>(q.rope, factor));
  }
  return inverse;
}

// All rows of a piece, by kQueryThreads. Rows that the piece does not have are zeros. Several rows of a warp
// are asked for together; they take turns in the registers of the first, so that this code, which runs once a piece, is
// short.
template <typename T, class At>
__device__ inline void load_queries(const Params& p, const Piece& piece, uint8_t* base, uint32_t shared) {
  constexpr int kRowsPerWarp = At::kRows * 32 / At::kQueryThreads, kTogether = min_of(kRowsPerWarp, 4);
  const int first_row = threadIdx.x / 32 * kRowsPerWarp;
#pragma unroll 1
  for (int row = first_row; row < first_row + kRowsPerWarp; row += kTogether) {
    QueryRow q[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (row + i < piece.num_rows) q[i].template load<T>(p, piece.request, row_place(p, piece.first_row + row + i));
    }
#pragma unroll 1
    for (int i = 0; i < kTogether; ++i) {
      const float scale = store_query<T, At>(q[0], shared + At::kQ, row + i);
      if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(base + At::kQueryScale)[row + i] = scale;
#pragma unroll
      for (int next = 1; next < kTogether; ++next) q[next - 1] = q[next];
    }
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
