#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fmha/cuda/any.h"
#include "fmha/sm90/work.cuh"

// What no fast kernel takes: head dims above 256, of any type. In plain float32 arithmetic. A warp holds four query
// rows of a KV head, a lane every 32nd dim of them, and goes through keys one by one.
namespace attnops::fmha::any {

using sm90::KeyRange;
using sm90::Schedule;
using sm90::Work;

inline constexpr int kWarps = 4, kWarpRows = 4, kRows = kWarps * kWarpRows, kThreads = 32 * kWarps;
inline constexpr int kKeys = 1;  // of a tile: none is larger than what a row sees

template <typename T>
__device__ __forceinline__ float load(const T* at) {
  return static_cast<float>(*at);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Where a key of the request lies, in elements; false: its page is outside the pool.
struct KeyPlace {
  int64_t k, v;
};

__device__ __forceinline__ bool place_of(const Params& p, const Schedule& s, const Work& w, int key, KeyPlace& place) {
  int64_t page = 0, token = static_cast<int64_t>(w.first_k_token) + key;
  if (p.paged) {
    const int cell = s.page_size.divide(key);
    page = p.page_table.row(w.request)[cell];
    token = key - cell * p.page_table.page_size;
    if (!p.page_table.has_page(static_cast<int>(page))) {
      if (p.report != nullptr) {
        record_fault(p.report,
                     {ReportOp::kFmhaPaged, ReportKind::kPageIndex, w.request, cell, page, p.page_table.num_pages});
      }
      return false;
    }
  }
  place.k = page * p.k_stride_page + token * p.k_stride_token + w.kv_head * p.k_stride_head;
  place.v = page * p.v_stride_page + token * p.v_stride_token + w.kv_head * p.v_stride_head;
  return true;
}

// Four rows (token, head) of a work: their queries, and the softmax over the keys so far.
template <typename T, typename Kv, int kHeadDim>
class WarpRows {
 public:
  static constexpr int kDims = kHeadDim / 32;  // of a lane

  __device__ __forceinline__ WarpRows(const Params& p, const Schedule& s, const Work& w)
      : p_(p), w_(w), lane_(threadIdx.x % 32) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = threadIdx.x / 32 * kWarpRows + r;
      const sm90::RowPlace place = sm90::place_of_row(s, w, row);
      tokens_[r] = place.exists ? place.token : w.num_tokens;
      heads_[r] = place.head;
      const bool exists = place.exists;
      keys_[r] = exists ? sm90::keys_of_token(p, w, w.first_token + tokens_[r]) : KeyRange{0, 0};
      const T* q = static_cast<const T*>(p.q) + row_of(r) * p.q_stride_token + heads_[r] * p.q_stride_head;
#pragma unroll
      for (int i = 0; i < kDims; ++i) q_[r][i] = exists && dim(i) < p.head_dim_qk ? load(q + dim(i)) : 0.f;
#pragma unroll
      for (int i = 0; i < kDims; ++i) out_[r][i] = 0.f;
      top_[r] = -INFINITY;
      sum_[r] = 0.f;
    }
  }

  __device__ __forceinline__ void attend(const Schedule& s) {
    int begin = w_.key_end, end = w_.key_begin;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (keys_[r].begin >= keys_[r].end) continue;
      begin = min_of(begin, keys_[r].begin);
      end = max_of(end, keys_[r].end);
    }
    const float scale = p_.softmax_scale * (p_.k_scale != nullptr ? p_.k_scale[w_.kv_head * p_.k_scale_stride] : 1.f);
    for (int key = begin; key < end; ++key) {
      bool seen[kWarpRows], any = false;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) any |= seen[r] = sees(r, key);
      KeyPlace place;
      if (!any || !place_of(p_, s, w_, key, place)) continue;
      step(place, seen, scale);
    }
  }

  __device__ __forceinline__ void store() const {
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[w_.kv_head * p_.v_scale_stride] : 1.f;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (tokens_[r] >= w_.num_tokens) continue;
      const bool empty = sum_[r] == 0.f;  // NaN is not empty: it must show
      const float lse = empty ? -INFINITY : top_[r] + logf(sum_[r]);
      float factor = v_scale / sum_[r];
      if (p_.sinks != nullptr) factor /= 1.f + expf(p_.sinks[heads_[r]] - lse);
      T* out = static_cast<T*>(p_.out) + row_of(r) * p_.out_stride_token + heads_[r] * p_.out_stride_head;
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        if (dim(i) < p_.head_dim_v) out[dim(i)] = T(empty ? 0.f : out_[r][i] * factor);
      }
      if (p_.lse != nullptr && lane_ == 0) p_.lse[row_of(r) * p_.num_q_heads + heads_[r]] = lse;
    }
  }

 private:
  __device__ __forceinline__ int dim(int i) const { return lane_ + 32 * i; }

  __device__ __forceinline__ int64_t row_of(int r) const {
    return static_cast<int64_t>(w_.first_q_token) + w_.first_token + tokens_[r];
  }

  __device__ __forceinline__ bool sees(int r, int key) const {
    if (key < keys_[r].begin || key >= keys_[r].end) return false;
    if (sm90::hides(p_, w_, w_.first_token + tokens_[r], key)) return false;
    return p_.tree_mask == nullptr || sm90::tree_allows(p_, w_, w_.first_token + tokens_[r], key - w_.draft);
  }

  // A key that a row does not see may hold anything: the row neither multiplies nor adds it.
  __device__ __forceinline__ void step(const KeyPlace& place, const bool (&seen)[kWarpRows], float scale) {
    const Kv* k = static_cast<const Kv*>(p_.k) + place.k;
    const Kv* v = static_cast<const Kv*>(p_.v) + place.v;
    float keys[kDims], values[kDims];
#pragma unroll
    for (int i = 0; i < kDims; ++i) keys[i] = dim(i) < p_.head_dim_qk ? load(k + dim(i)) : 0.f;
#pragma unroll
    for (int i = 0; i < kDims; ++i) values[i] = dim(i) < p_.head_dim_v ? load(v + dim(i)) : 0.f;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (!seen[r]) continue;
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < kDims; ++i) score += q_[r][i] * keys[i];
      score = warp_sum(score) * scale;
      if (p_.logit_cap > 0.f) score = p_.logit_cap * tanhf(score / p_.logit_cap);
      if (score == -INFINITY) continue;
      if (score > top_[r]) {
        const float shrink = expf(top_[r] - score);
        top_[r] = score;
        sum_[r] *= shrink;
#pragma unroll
        for (int i = 0; i < kDims; ++i) out_[r][i] *= shrink;
      }
      const float weight = expf(score - top_[r]);
      sum_[r] += weight;
#pragma unroll
      for (int i = 0; i < kDims; ++i) out_[r][i] += weight * values[i];
    }
  }

  const Params& p_;
  const Work& w_;
  const int lane_;
  int tokens_[kWarpRows], heads_[kWarpRows];
  KeyRange keys_[kWarpRows];
  float q_[kWarpRows][kDims], out_[kWarpRows][kDims], top_[kWarpRows], sum_[kWarpRows];
};

template <typename T, typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    any_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  Work w;
  for (int index = static_cast<int>(blockIdx.x); index < s.num_works; index += gridDim.x) {
    if (!sm90::decode_work<kKeys>(p, s, {}, index, w)) break;
    if (w.num_tokens == 0) continue;
    WarpRows<T, Kv, kHeadDim> rows(p, s, w);
    rows.attend(s);
    rows.store();
  }
  sm90::clear_padding<T>(p);
}

template <typename T, typename Kv, int kHeadDim>
void launch_as(const Params& p, cudaStream_t stream) {
  // Heads before tokens: a row's keys are read once for all heads.
  const Schedule s = sm90::schedule_of(p, kRows, sm90::heads_per_tile(p.num_q_heads / p.num_kv_heads, 1, kRows));
  const int ctas = max_of(min_of(s.num_works, 8 * device_sms("fmha")), 1);
  launch_dependent<&any_kernel<T, Kv, kHeadDim>>("fmha", {ctas, kThreads, 0, 0}, stream, p, s);
}

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  switch (p.kv_dtype) {
    case DType::kFloat8E4M3: return launch_as<T, __nv_fp8_e4m3, kAnyHeadDim>(p, stream);
    case DType::kFloat8E5M2: return launch_as<T, __nv_fp8_e5m2, kAnyHeadDim>(p, stream);
    default: launch_as<T, T, kAnyHeadDim>(p, stream);
  }
}

}  // namespace attnops::fmha::any
