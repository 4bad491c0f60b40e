#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "device/common/pdl.cuh"
#include "device/common/row_vec.cuh"
#include "device/common/vec.h"
#include "paged_kv/requests.h"

namespace attnops::paged_kv {

// The value with the smaller magnitude and the sign of x; NaN where x is. `limit` is positive.
__device__ __forceinline__ float limited(float x, float limit) {
#if __CUDA_ARCH__ >= 860
  float y;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
#else
  return fabsf(x) > limit ? copysignf(limit, x) : x;
#endif
}

// Quotients by one scale, as division rounds them, in five instructions instead of ten: a product with the reciprocal
// and one step of Newton's with what remains, exact by a theorem of Markstein's (1990). The step loses the sign of a
// zero, which is put back. What would leave the range of e5m2 far behind is cut off first, so that nothing is infinite.
class Quotient {
 public:
  __device__ explicit Quotient(float scale) : scale_(scale), inverse_(1.f / scale), limit_(scale * 0x1p17f) {}

  // Whether reciprocals and remainders of everything that matters are normal floats.
  __device__ bool is_easy() const { return scale_ > 0x1p-90f && scale_ < 0x1p90f; }
  __device__ float easy(float x) const {
    const float in_range = limited(x, limit_), near = in_range * inverse_;
    return copysignf(fmaf(fmaf(-near, scale_, in_range), inverse_, near), x);
  }
  __device__ float any(float x) const { return x / scale_; }

 private:
  float scale_, inverse_, limit_;
};

// A scale on the device, 1 where there is none.
__device__ __forceinline__ float read_scale(const float* scale) { return scale == nullptr ? 1.f : __ldg(scale); }

// Codecs: how one vector of a row becomes one vector of a page.

// The bytes as they are.
template <typename Bytes>
struct Copy {
  using In = Bytes;
  using Out = Bytes;
  static constexpr int kThreads = 256;        // of a CTA
  static constexpr bool kSidesApart = false;  // whether K and V of a token are for different CTAs
  __device__ static Out encode(const In& x, const Quotient&) { return x; }
};

// x / scale in e4m3 or e5m2: two at a time, as the hardware converts.
template <typename T, int kElements, __nv_fp8_interpretation_t kKind = __NV_E4M3>
struct Quantize {
  using In = RowVec<T, kElements>;
  using Word = std::conditional_t<kElements % 4 == 0, uint32_t, uint8_t>;
  using Out = Vec<Word, kElements / static_cast<int>(sizeof(Word))>;
  static constexpr int kThreads = 128;  // of a CTA: more registers than a copy's, so smaller CTAs fill an SM better
  static constexpr bool kSidesApart = true;

  __device__ static Out encode(const In& x, const Quotient& quotient) {
    return quotient.is_easy() ? encode_by(x, [&](float value) { return quotient.easy(value); })
                              : encode_any(x, quotient);
  }

 private:
  // Out of line: divisions are long, and hardly ever needed.
  __device__ __noinline__ static Out encode_any(In x, Quotient quotient) {
    return encode_by(x, [&](float value) { return quotient.any(value); });
  }

  template <class Divide>
  __device__ static Out encode_by(const In& x, const Divide& divide) {
    Out out;
    if constexpr (kElements % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        const auto pair = [&](int at) -> uint32_t {
          return __nv_cvt_float2_to_fp8x2(make_float2(divide(x.at(at)), divide(x.at(at + 1))), __NV_SATFINITE, kKind);
        };
        out.data[i / 4] = pair(i) | pair(i + 2) << 16;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        out.data[i] = __nv_cvt_float_to_fp8(divide(x.at(i)), __NV_SATFINITE, kKind);
      }
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

  // Vector i of a token.
  template <class Codec, bool kOneHead>
  __device__ typename Codec::In load(int64_t token, int i) const {
    const auto* row = static_cast<const typename Codec::In*>(rows) + token * stride_token;
    if constexpr (kOneHead) return row[i];
    const int head = i / per_head;
    return row[head * stride_head + i - head * per_head];
  }
  // `first` is the quotient of head 0.
  template <class Codec, bool kOneHead>
  __device__ void store(const Place& place, int i, const typename Codec::In& x, const Quotient& first) const {
    auto* row = static_cast<typename Codec::Out*>(pages) + place.page * stride_page + place.offset * stride_page_token;
    if constexpr (kOneHead) {
      row[i] = Codec::encode(x, first);
    } else {
      const int head = i / per_head;
      const Quotient own = head * scale_stride == 0 ? first : Quotient(read_scale(scale + head * scale_stride));
      row[head * stride_page_head + i - head * per_head] = Codec::encode(x, own);
    }
  }
};

// 2^log_lanes neighbouring threads store a token, or so much of it as one vector each is, blockIdx.y says which; in
// CTAs for K and for V (blockIdx.z) where the codec wants sides apart. Rows are asked for before it is known where they
// go: all loads are in flight at once.
template <class Codec, bool kOneHead>
__global__ void __launch_bounds__(Codec::kThreads)
    store_kv_kernel(const __grid_constant__ StoreTarget target, const __grid_constant__ SideInVectors k,
                    const __grid_constant__ SideInVectors v, int log_lanes) {
  using In = typename Codec::In;
  const int lanes = 1 << log_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int i = static_cast<int>(blockIdx.y) * lanes + lane;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (Codec::kThreads >> log_lanes) + (threadIdx.x >> log_lanes);
  const SideInVectors& first = Codec::kSidesApart && blockIdx.z != 0 ? v : k;
  const bool has_first = i < first.heads * first.per_head, has_v = !Codec::kSidesApart && i < v.heads * v.per_head;
  wait_for_earlier_kernels();  // the rows, and whoever still reads the pages
  let_next_kernel_start();
  if (token >= target.num_tokens) return;

  In in, v_in;
  if (has_first) in = first.load<Codec, kOneHead>(token, i);
  if (has_v) v_in = v.load<Codec, kOneHead>(token, i);
  const float scale = read_scale(first.scale);
  const Place place = place_of(target, token);
  if (target.report != nullptr && i == 0 && blockIdx.z == 0) report_slot(target, ReportOp::kStoreKv, token);
  if (!place.store) return;
  const Quotient quotient(scale);
  if (has_first) first.store<Codec, kOneHead>(place, i, in, quotient);
  if (has_v) v.store<Codec, kOneHead>(place, i, v_in, quotient);
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

inline constexpr int kMlaThreads = 288;  // 4 rows of 72 vectors of 8 elements, or 8 of 36 of 16

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
  constexpr int kSteps = ceil_div(Shape::kVecs, Shape::kLanes);
  const int lane = static_cast<int>(threadIdx.x) % Shape::kLanes;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * Shape::kRows + static_cast<int>(threadIdx.x) / Shape::kLanes;
  wait_for_earlier_kernels();  // the rows, and whoever still reads the pages
  let_next_kernel_start();
  if (token >= target.num_tokens) return;

  // Asked for before it is known where they go: all loads are in flight at once.
  const In* latent = reinterpret_cast<const In*>(p.latent + token * p.latent_stride);
  const In* k_pe = reinterpret_cast<const In*>(p.k_pe + token * p.k_pe_stride);
  In in[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = lane + step * Shape::kLanes;
    if (i < Shape::kVecs) in[step] = i < Shape::kLatentVecs ? latent[i] : k_pe[i - Shape::kLatentVecs];
  }
  const float scale = read_scale(p.scale);
  const Place place = place_of(target, token);
  if (target.report != nullptr && lane == 0) report_slot(target, ReportOp::kStoreMlaKv, token);
  if (!place.store) return;
  const Quotient quotient(scale);
  auto* out = reinterpret_cast<typename Codec::Out*>(p.row(place));
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = lane + step * Shape::kLanes;
    if (i < Shape::kVecs) out[i] = Codec::encode(in[step], quotient);
  }
}

// kElements at once, or one by one where rows may start anywhere.
template <bool kVectors, int kElements, typename T>
__device__ RowVec<T, kElements> load_some(const T* from) {
  using Values = RowVec<T, kElements>;
  if constexpr (kVectors) {
    return *reinterpret_cast<const Values*>(from);
  } else {
    union {
      Values whole;
      T elements[kElements];
    } values;
#pragma unroll
    for (int i = 0; i < kElements; ++i) values.elements[i] = from[i];
    return values.whole;
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
  const T* latent = reinterpret_cast<const T*>(p.latent + token * p.latent_stride) + lane * kOwn;
  const T* k_pe = reinterpret_cast<const T*>(p.k_pe + token * p.k_pe_stride) + lane * kOwnRope;
  const auto in = load_some<kVectors, kOwn>(latent);
  const auto rope = load_some<kVectors, kOwnRope>(k_pe);
  if (target.report != nullptr && lane == 0) report_slot(target, ReportOp::kStoreMlaKv, token);
  const Place place = place_of(target, token);
  if (!place.store) return;  // all lanes of the warp or none

  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) amax = fmaxf(amax, fabsf(in.at(i)));
#pragma unroll
  for (int step = 1; step < kLanesPerGroup; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const float scale = group_scale(amax);

  const auto stored = Quantize<T, kOwn>::encode(in, Quotient(scale));
  Vec<__nv_bfloat16, kOwnRope> stored_rope;
#pragma unroll
  for (int i = 0; i < kOwnRope; ++i) stored_rope.data[i] = __float2bfloat16(rope.at(i));

  uint8_t* out = reinterpret_cast<uint8_t*>(p.row(place));
  store_bytes<kVectors>(out + lane * kOwn, stored);
  if (lane % kLanesPerGroup == 0) {
    store_bytes<kVectors>(out + kLatentDim + lane / kLanesPerGroup * sizeof(float), scale);
  }
  store_bytes<kVectors>(out + kFp8RowBytes - kRopeDim * sizeof(__nv_bfloat16) + lane * sizeof(stored_rope),
                        stored_rope);
}

}  // namespace attnops::paged_kv
