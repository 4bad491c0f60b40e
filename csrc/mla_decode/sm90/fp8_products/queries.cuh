#pragma once
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// Queries to e4m3: every row is scaled by a power of two, so that its largest value lies in [128, 256).
namespace attnops::mla_decode::sm90::fp8_products {

__device__ inline float2 unpack_pair(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ inline float2 unpack_pair(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// A row, spread over a warp: 16 bytes at dims 8 lane and 256 + 8 lane, and 4 at the rope's 2 lane.
struct QueryRow {
  uint4 latent[2];
  uint32_t rope;

  template <typename T>
  __device__ void load(const Params& p, int request, const RowPlace& at) {
    const int lane = threadIdx.x % 32;
    const T* q = static_cast<const T*>(p.q) + request * p.q_stride_request + at.token * p.q_stride_token +
                 at.head * p.q_stride_head;
    const T* pe = p.q_pe ? static_cast<const T*>(p.q_pe) + request * p.q_pe_stride_request +
                               at.token * p.q_pe_stride_token + at.head * p.q_pe_stride_head
                         : q + kHeadDimV;
    latent[0] = __ldg(reinterpret_cast<const uint4*>(q) + lane);
    latent[1] = __ldg(reinterpret_cast<const uint4*>(q) + 32 + lane);
    rope = __ldg(reinterpret_cast<const uint32_t*>(pe) + lane);
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
__device__ inline void store_shared(uint32_t address, uint16_t a) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(a) : "memory");
}

// Writes row `row` and returns what its scores must be multiplied by.
template <typename T>
__device__ inline float store_query(const QueryRow& q, uint32_t queries, int row) {
  const int lane = threadIdx.x % 32;
  const float top = q.largest<T>();
  const int exponent = top > 0.f ? (__float_as_int(top) >> 23) - 127 : 0;
  // 2^(7 - exponent), kept a normal number; and its inverse.
  const int shift = min_of(max_of(7 - exponent, -126), 126);
  const float factor = __int_as_float((shift + 127) << 23), inverse = __int_as_float((127 - shift) << 23);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t words[4] = {q.latent[k].x, q.latent[k].y, q.latent[k].z, q.latent[k].w};
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair(words[i], T{});
      pairs[i] = attnops::sm90::pack_e4m3(x.x * factor, x.y * factor);
    }
    const int byte = 256 * k + 8 * lane;
    store_shared(queries + byte / 128 * kTileBytes + attnops::sm90::swizzled(row, byte % 128 / 16) + byte % 16,
                 pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
  const float2 x = unpack_pair(q.rope, T{});
  store_shared(queries + kLatentTiles * kTileBytes + attnops::sm90::swizzled(row, 2 * lane / 16) + 2 * lane % 16,
               static_cast<uint16_t>(attnops::sm90::pack_e4m3(x.x * factor, x.y * factor)));
  return top < INFINITY ? inverse : NAN;  // e4m3 has no infinity: it must show all the same
}

// A row that the piece does not have.
__device__ inline void clear_query(uint32_t queries, int row) {
  constexpr int kBytes = kKeyTiles * 128;
#pragma unroll
  for (int byte = 8 * (threadIdx.x % 32); byte < kBytes; byte += 256) {
    store_shared(queries + byte / 128 * kTileBytes + attnops::sm90::swizzled(row, byte % 128 / 16) + byte % 16, 0, 0);
  }
}

// All rows of a piece, by all consumers. This code runs once a piece, and finds the instruction cache cold: it is kept
// short. So rows take turns in the registers of the first, and are not converted each by code of its own.
template <typename T>
__device__ inline void load_queries(const Params& p, const Piece& piece, uint8_t* base, uint32_t shared) {
  constexpr int kRows = 64 / (kConsumerThreads / 32), kTogether = 4;
  const int first_row = threadIdx.x / 32 * kRows;
  RowPlace at = row_place(p, piece.first_row + first_row);
#pragma unroll 1
  for (int row = first_row; row < first_row + kRows; row += kTogether) {
    QueryRow rows[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (row + i < piece.num_rows) rows[i].load<T>(p, piece.request, at);
      if (++at.head == p.num_q_heads) {
        at.head = 0;
        ++at.token;
      }
    }
#pragma unroll 1
    for (int i = 0; i < kTogether; ++i) {
      float scale = 1.f;
      if (row + i < piece.num_rows) {
        scale = store_query<T>(rows[0], shared + Layout::kQ, row + i);
      } else {
        clear_query(shared + Layout::kQ, row + i);
      }
      if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(base + Layout::kQueryScale)[row + i] = scale;
#pragma unroll
      for (int next = 1; next < kTogether; ++next) rows[next - 1] = rows[next];
    }
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
