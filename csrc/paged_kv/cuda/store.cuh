#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "paged_kv/requests.h"

namespace attnops::paged_kv {

// Codecs: how one vector of a row becomes one vector of a page.

// The bytes as they are.
template <typename Bytes>
struct Copy {
  using In = Bytes;
  using Out = Bytes;
  __device__ static Out encode(const In& x, float) { return x; }
};

// x / scale in e4m3: two at a time, as the hardware converts.
template <typename T, int kElements>
struct QuantizeE4M3 {
  using In = Vec<T, kElements>;
  using Out = Vec<uint8_t, kElements>;
  __device__ static Out encode(const In& x, float scale) {
    const auto quotient = [&](int i) { return static_cast<float>(x.data[i]) / scale; };
    Out out;
#pragma unroll
    for (int i = 0; i + 1 < kElements; i += 2) {
      const unsigned pair =
          __nv_cvt_float2_to_fp8x2(make_float2(quotient(i), quotient(i + 1)), __NV_SATFINITE, __NV_E4M3);
      out.data[i] = static_cast<uint8_t>(pair);
      out.data[i + 1] = static_cast<uint8_t>(pair >> 8);
    }
    if constexpr (kElements % 2 != 0) {
      out.data[kElements - 1] = __nv_cvt_float_to_fp8(quotient(kElements - 1), __NV_SATFINITE, __NV_E4M3);
    }
    return out;
  }
};

// ---- store_kv

// One of K and V, in vectors of the codec: every stride and extent counts vectors. Heads that follow one another
// without a gap, on both sides, are one long head.
struct SideInVectors {
  void* pages;
  int64_t stride_page, stride_page_token, stride_page_head;
  const void* rows;
  int64_t stride_token, stride_head;
  int heads, per_head;
  const float* scale;
  int scale_stride;
};

// Vector i of a token: where it comes from and where it goes.
template <class Codec>
struct Cursor {
  const typename Codec::In* from;
  typename Codec::Out* to;
  float scale;

  __device__ Cursor(const SideInVectors& s, const Place& place, int64_t token, int i) {
    const int head = s.heads == 1 ? 0 : i / s.per_head;
    const int d = i - head * s.per_head;
    from = static_cast<const typename Codec::In*>(s.rows) + token * s.stride_token + head * s.stride_head + d;
    to = static_cast<typename Codec::Out*>(s.pages) + place.page * s.stride_page + place.offset * s.stride_page_token +
         head * s.stride_page_head + d;
    scale = s.scale == nullptr ? 1.f : s.scale[head * s.scale_stride];
  }
};

// `lanes` neighbouring threads (a power of two) store a token, each every lanes-th vector of K and of V: both loads are
// in flight before either store.
template <class Codec, int kThreads>
__global__ void __launch_bounds__(kThreads)
    store_kv_kernel(const __grid_constant__ StoreTarget target, const __grid_constant__ SideInVectors k,
                    const __grid_constant__ SideInVectors v, int lanes) {
  wait_for_earlier_kernels();  // the rows, and whoever still reads the pages
  let_next_kernel_start();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (token >= target.num_tokens) return;
  int i = threadIdx.x % lanes;
  if (target.report != nullptr && i == 0) report_slot(target, ReportOp::kStoreKv, token);
  const Place place = place_of(target, token);
  if (!place.store) return;

  const int vecs_k = k.heads * k.per_head, vecs_v = v.heads * v.per_head;
  for (; i < min_of(vecs_k, vecs_v); i += lanes) {
    const Cursor<Codec> k_at(k, place, token, i), v_at(v, place, token, i);
    const typename Codec::In k_in = *k_at.from, v_in = *v_at.from;
    *k_at.to = Codec::encode(k_in, k_at.scale);
    *v_at.to = Codec::encode(v_in, v_at.scale);
  }
  for (; i < max_of(vecs_k, vecs_v); i += lanes) {
    const Cursor<Codec> at(vecs_k > vecs_v ? k : v, place, token, i);
    *at.to = Codec::encode(*at.from, at.scale);
  }
}

// ---- store_mla_kv

// Strides in bytes.
struct MlaInBytes {
  char* pages;
  int64_t stride_page, stride_page_token;
  const char* latent;
  int64_t latent_stride;
  const char* k_pe;
  int64_t k_pe_stride;
  const float* scale;

  __device__ char* row(const Place& place) const {
    return pages + place.page * stride_page + place.offset * stride_page_token;
  }
};

inline constexpr int kMlaThreads = 288;  // 4 rows of 72 vectors of 8 elements

// How a CTA is divided when a vector holds kElements.
template <int kElements>
struct MlaShape {
  static constexpr int kVecs = kMlaDim / kElements;
  static constexpr int kLatentVecs = kLatentDim / kElements;
  static constexpr int kRows = kVecs < kMlaThreads ? kMlaThreads / kVecs : 1;  // of a CTA
  static constexpr int kLanes = kMlaThreads / kRows;
};

template <class Codec, int kElements>
__global__ void __launch_bounds__(kMlaThreads)
    store_mla_kernel(const __grid_constant__ StoreTarget target, const __grid_constant__ MlaInBytes p) {
  using In = typename Codec::In;
  using Shape = MlaShape<kElements>;
  wait_for_earlier_kernels();  // the rows, and whoever still reads the pages
  let_next_kernel_start();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * Shape::kRows + threadIdx.x / Shape::kLanes;
  if (token >= target.num_tokens) return;
  const int lane = threadIdx.x % Shape::kLanes;
  if (target.report != nullptr && lane == 0) report_slot(target, ReportOp::kStoreMlaKv, token);
  const Place place = place_of(target, token);
  if (!place.store) return;

  const In* latent = reinterpret_cast<const In*>(p.latent + token * p.latent_stride);
  const In* k_pe = reinterpret_cast<const In*>(p.k_pe + token * p.k_pe_stride);
  auto* out = reinterpret_cast<typename Codec::Out*>(p.row(place));
  const float scale = p.scale == nullptr ? 1.f : *p.scale;
#pragma unroll
  for (int i = lane; i < Shape::kVecs; i += Shape::kLanes) {
    out[i] = Codec::encode(i < Shape::kLatentVecs ? latent[i] : k_pe[i - Shape::kLatentVecs], scale);
  }
}

// kElements at once, or one by one where rows may start anywhere.
template <bool kVectors, int kElements, typename T>
__device__ Vec<T, kElements> load_some(const T* from) {
  if constexpr (kVectors) {
    return load_vec<Vec<T, kElements>>(from);
  } else {
    Vec<T, kElements> values;
#pragma unroll
    for (int i = 0; i < kElements; ++i) values.data[i] = from[i];
    return values;
  }
}

template <bool kVectors, typename V>
__device__ void store_bytes(uint8_t* to, const V& value) {
  if constexpr (kVectors) {
    *reinterpret_cast<V*>(to) = value;
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(V)); ++i) to[i] = reinterpret_cast<const uint8_t*>(&value)[i];
  }
}

// The 656-byte row: a warp per token. A lane quantizes 16 latents, eight lanes share a group's scale, and every lane
// brings two elements of rope.
template <typename T, bool kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads)
    store_fp8_row_kernel(const __grid_constant__ StoreTarget target, const __grid_constant__ MlaInBytes p) {
  constexpr int kOwn = kLatentDim / 32, kLanesPerGroup = kGroupDim / kOwn, kOwnRope = kRopeDim / 32;
  wait_for_earlier_kernels();  // the rows, and whoever still reads the pages
  let_next_kernel_start();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (token >= target.num_tokens) return;
  const int lane = threadIdx.x % 32;
  if (target.report != nullptr && lane == 0) report_slot(target, ReportOp::kStoreMlaKv, token);
  const Place place = place_of(target, token);
  if (!place.store) return;  // all lanes of the warp or none

  const T* latent = reinterpret_cast<const T*>(p.latent + token * p.latent_stride) + lane * kOwn;
  const T* k_pe = reinterpret_cast<const T*>(p.k_pe + token * p.k_pe_stride) + lane * kOwnRope;
  const auto in = load_some<kVectors, kOwn>(latent);
  const auto rope = load_some<kVectors, kOwnRope>(k_pe);

  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) amax = fmaxf(amax, fabsf(static_cast<float>(in.data[i])));
#pragma unroll
  for (int step = 1; step < kLanesPerGroup; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const float scale = group_scale(amax);

  const Vec<uint8_t, kOwn> stored = QuantizeE4M3<T, kOwn>::encode(in, scale);
  Vec<__nv_bfloat16, kOwnRope> stored_rope;
#pragma unroll
  for (int i = 0; i < kOwnRope; ++i) stored_rope.data[i] = __float2bfloat16(static_cast<float>(rope.data[i]));

  uint8_t* out = reinterpret_cast<uint8_t*>(p.row(place));
  store_bytes<kVectors>(out + lane * kOwn, stored);
  if (lane % kLanesPerGroup == 0) {
    store_bytes<kVectors>(out + kLatentDim + lane / kLanesPerGroup * sizeof(float), scale);
  }
  store_bytes<kVectors>(out + kFp8RowBytes - kRopeDim * sizeof(__nv_bfloat16) + lane * sizeof(stored_rope),
                        stored_rope);
}

}  // namespace attnops::paged_kv
