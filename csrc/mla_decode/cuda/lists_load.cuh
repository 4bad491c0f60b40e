#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/fp8_rows.cuh"
#include "mla_decode/cuda/lists_layout.h"
#include "mla_decode/sm90/pieces.cuh"

// Queries and keys on their way into shared memory, as 16-bit values of T.
namespace attnops::mla_decode::lists {

using sm90::Piece;

// Where a key of a list is; null: there is none.
struct KeyPlace {
  const uint8_t* row;
  const uint8_t* scales;
};

// Key number `key` of a request's lists. Checked mode reports an index past the pool, by one lane of the key.
__device__ inline KeyPlace place_of_key(const Params& p, const ListKeys& keys, int request, int key, bool reports) {
  const bool is_extra = key >= keys.second;
  const SelectedRows& rows = is_extra ? p.extra : p.selected;
  const int i = is_extra ? key - keys.second : key;
  if (is_extra ? key >= keys.end : i >= keys.first) return {nullptr, nullptr};
  const int index = rows.list(request)[i];
  if (index < 0) return {nullptr, nullptr};
  if (index >= rows.num_rows) {
    if (p.report && reports) {
      record_fault(p.report,
                   {p.report_op, is_extra ? kReportExtraRowIndex : kReportRowIndex, request, i, index, rows.num_rows});
    }
    return {nullptr, nullptr};
  }
  const auto* pool = static_cast<const uint8_t*>(rows.pages);
  if (p.kv_dtype != DType::kUInt8) return {pool + 2 * rows.offset(index), nullptr};
  if (!p.shared_rows) return {pool + rows.offset(index), nullptr};
  const uint8_t* page = pool + index / rows.page_size * rows.stride_page;
  const int token = index % rows.page_size;
  return {page + int64_t{token} * kSharedDataBytes,
          page + int64_t{rows.page_size} * kSharedDataBytes + token * kSharedScaleBytes};
}

// 16 bytes from wherever they are.
__device__ inline uint4 load_16(const uint8_t* source) {
  const auto address = reinterpret_cast<uintptr_t>(source);
  if (address % 16 == 0) return *reinterpret_cast<const uint4*>(source);
  uint4 value;
  auto* bytes = reinterpret_cast<uint8_t*>(&value);
  if (address % 8 == 0) {
    reinterpret_cast<uint2*>(&value)[0] = reinterpret_cast<const uint2*>(source)[0];
    reinterpret_cast<uint2*>(&value)[1] = reinterpret_cast<const uint2*>(source)[1];
    return value;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) bytes[i] = source[i];
  return value;
}

// 16 bytes to shared memory; zeros where there is nothing to take.
__device__ inline void copy_16(void* to, const uint8_t* source, bool take) {
  if (reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    cp_async_16(smem_address(to), source, take);
  } else {
    *static_cast<uint4*>(to) = take ? load_16(source) : uint4{0, 0, 0, 0};
  }
}

// 16 e4m3 under a scale, as 16 of T.
template <typename T>
__device__ inline void store_scaled(const uint8_t* source, float scale, T* to) {
  const uint4 bytes = load_16(source);
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t out[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t pairs[2];
    e4m3x4_to_half(words[w], pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
      out[2 * w + i] = pack2<T>(x.x * scale, x.y * scale);
    }
  }
  reinterpret_cast<uint4*>(to)[0] = {out[0], out[1], out[2], out[3]};
  reinterpret_cast<uint4*>(to)[1] = {out[4], out[5], out[6], out[7]};
}

// Eight bf16 as eight of T.
template <typename T>
__device__ inline void store_rope(const uint8_t* source, T* to) {
  uint4 bits = load_16(source);
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack2<__half>(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
    }
  }
  *reinterpret_cast<uint4*>(to) = bits;
}

__device__ inline float power_of_two(uint8_t exponent) {
  if (exponent == 0xff) return NAN;
  return exponent == 0 ? 0x1p-127f : __uint_as_float(static_cast<uint32_t>(exponent) << 23);
}

// One key by kLanesPerRow lanes; zeros where there is none.
template <typename T>
__device__ inline void load_key(const Params& p, const KeyPlace& place, int lane, T* to) {
  const int chunks = (p.shared_rows ? kHeadDimShared : kHeadDimQk) / 8;
  if (p.kv_dtype != DType::kUInt8) {
    for (int c = lane; c < chunks; c += kLanesPerRow) {
      copy_16(to + 8 * c, place.row ? place.row + 16 * c : nullptr, place.row != nullptr);
    }
    return;
  }
  if (place.row == nullptr) {
    for (int c = lane; c < chunks; c += kLanesPerRow) reinterpret_cast<uint4*>(to)[c] = {0, 0, 0, 0};
    return;
  }
  if (p.shared_rows) {
    for (int c = lane; c < kSharedNope / 16; c += kLanesPerRow) {
      store_scaled(place.row + 16 * c, power_of_two(place.scales[c / (kSharedScaleWidth / 16)]), to + 16 * c);
    }
    return store_rope(place.row + kSharedNope + 16 * lane, to + kSharedNope + 8 * lane);
  }
  const uint4 bits = load_16(place.row + kHeadDimV);
  const float scales[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                           __uint_as_float(bits.w)};
#pragma unroll
  for (int i = 0; i < kHeadDimV / 16 / kLanesPerRow; ++i) {
    const int c = lane + kLanesPerRow * i;  // eight of them share a scale
    store_scaled(place.row + 16 * c, scales[i], to + 16 * c);
  }
  store_rope(place.row + kHeadDimV + 16 + 16 * lane, to + kHeadDimV + 8 * lane);
}

// The piece's rows; zeros behind the last.
template <typename T, int kTiles>
__device__ inline void load_queries(const Params& p, const Piece& piece, T* q) {
  const int chunks = (p.shared_rows ? kHeadDimShared : kHeadDimQk) / 8;
  const auto* latent = static_cast<const T*>(p.q) + piece.request * p.q_stride_request;
  const auto* rope = static_cast<const T*>(p.q_pe) + piece.request * p.q_pe_stride_request;
  for (int i = threadIdx.x; i < Layout<kTiles>::kRows * chunks; i += kThreads) {
    const int row = i / chunks, c = i % chunks, head = piece.first_row + row;
    const bool apart = p.q_pe != nullptr && c >= kHeadDimV / 8;
    const T* source =
        apart ? rope + head * p.q_pe_stride_head + 8 * c - kHeadDimV : latent + head * p.q_stride_head + 8 * c;
    const bool take = row < piece.num_rows;
    copy_16(q + row * kRowStride + 8 * c, take ? reinterpret_cast<const uint8_t*>(source) : nullptr, take);
  }
}

}  // namespace attnops::mla_decode::lists
