#pragma once
#include "causal_conv1d/params.h"
#include "core/linear_step.h"
#include "device/common/pdl.cuh"
#include "device/common/row_vec.cuh"
#include "device/common/vec.h"

namespace attnops::causal_conv1d {

inline constexpr int kThreads = 128;
inline constexpr int kAhead = 4;  // tokens whose inputs a thread asks for at once

// The last request that begins at or before token t; -1: none does. Bounds that decrease give some request.
__device__ __forceinline__ int64_t request_of(const Params& p, int64_t t) {
  if (p.cu_seqlens == nullptr) return t / p.tokens_per_request;
  int64_t low = -1, high = p.batch_size;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.first_token(middle) <= t ? low : high) = middle;
  }
  return low;
}

// Tokens [begin, end) that a CTA computes, of its tile. The first tokens of a request need its old state, which the CTA
// of its first token overwrites: so that CTA takes them all, and a tile that begins among them begins behind them.
struct Span {
  int64_t begin, end;

  __device__ Span(const Params& p, int64_t tile_begin, int64_t tile_end) {
    begin = behind_the_first(p, tile_begin);
    end = tile_end < p.num_tokens ? behind_the_first(p, tile_end) : p.num_tokens;
  }

  __device__ static int64_t behind_the_first(const Params& p, int64_t t) {
    const int64_t request = request_of(p, t);
    if (request < 0) return t;
    const int64_t first = p.first_token(request), last = p.first_token(request + 1);
    if (t <= first || t >= first + p.width - 1 || t >= last) return t;
    return first + p.width - 1 < last ? first + p.width - 1 : last;
  }
};

// kVec channels of a thread, in float.
template <typename T, int kVec>
struct Channels {
  float at[kVec];

  __device__ static Channels zero() {
    Channels x;
#pragma unroll
    for (int i = 0; i < kVec; ++i) x.at[i] = 0.f;
    return x;
  }
  __device__ static Channels load(const T* pointer) {
    const auto vec = load_vec<RowVec<T, kVec>>(pointer);
    Channels x;
#pragma unroll
    for (int i = 0; i < kVec; ++i) x.at[i] = vec.at(i);
    return x;
  }
  __device__ static Channels load_strided(const T* pointer, int64_t stride) {
    Channels x;
#pragma unroll
    for (int i = 0; i < kVec; ++i) x.at[i] = static_cast<float>(pointer[i * stride]);
    return x;
  }
  __device__ void store_strided(T* pointer, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) pointer[i * stride] = static_cast<T>(at[i]);
  }
  __device__ void store(T* pointer) const {
    Vec<T, kVec> vec;
#pragma unroll
    for (int i = 0; i < kVec; ++i) vec.data[i] = static_cast<T>(at[i]);
    store_vec(pointer, vec);
  }
};

// A thread's channels, and the tokens that it computes of them.
template <typename T, int kVec, int kWidth>
struct Walk {
  static constexpr int kHistory = kWidth - 1;
  using Lane = Channels<T, kVec>;
  const Params& p;
  int64_t channel;
  Lane weights[kWidth], bias;

  __device__ Walk(const Params& params, int64_t first_channel) : p(params), channel(first_channel), bias(Lane::zero()) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      weights[j] = Lane::load_strided(static_cast<const T*>(p.weight) + channel * kWidth + j, kWidth);
    }
    if (p.bias != nullptr) bias = Lane::load_strided(static_cast<const T*>(p.bias) + channel, 1);
  }

  __device__ const T* x(int64_t t) const { return static_cast<const T*>(p.x) + channel + t * p.stride_x; }
  __device__ T* out(int64_t t) const { return static_cast<T*>(p.out) + channel + t * p.stride_out; }

  __device__ void clear(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) Lane::zero().store(out(t));
  }

  // Tokens [begin, end) of a request whose tokens are [first, last). The thread of its first token writes its new
  // state.
  __device__ void convolve(int64_t request, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    T* states = static_cast<T*>(p.states) + p.state_indices[request] * p.stride_slot + channel * p.stride_channel;
    const bool starts_at_zero = p.has_initial_state != nullptr && p.has_initial_state[request] == 0;
    const auto input = [&](int64_t t) {
      if (t >= first) return Lane::load(x(t));
      if (starts_at_zero) return Lane::zero();
      return Lane::load_strided(states + (kHistory - (first - t)) * p.stride_time, p.stride_channel);
    };
    Lane window[kWidth];
#pragma unroll
    for (int j = 0; j < kHistory; ++j) window[j] = input(begin - kHistory + j);
    if (begin == first) {
      Lane newest[kHistory];
#pragma unroll
      for (int j = 0; j < kHistory; ++j) newest[j] = input(last - kHistory + j);
#pragma unroll
      for (int j = 0; j < kHistory; ++j) newest[j].store_strided(states + j * p.stride_time, p.stride_channel);
    }
    for (int64_t t = begin; t < end; t += kAhead) {
      Lane ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (t + a < end) ahead[a] = Lane::load(x(t + a));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (t + a >= end) break;
        window[kHistory] = ahead[a];
        sum_of(window).store(out(t + a));
#pragma unroll
        for (int j = 0; j < kHistory; ++j) window[j] = window[j + 1];
      }
    }
  }

  __device__ Lane sum_of(const Lane (&window)[kWidth]) const {
    Lane sum = bias;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum.at[i] = fmaf(weights[j].at[i], window[j].at[i], sum.at[i]);
      if (p.silu) sum.at[i] = __fdividef(sum.at[i], 1.f + __expf(-sum.at[i]));
    }
    return sum;
  }
};

// A CTA per tile of tokens and block of channels; a thread walks along its channels with the window in registers.
template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_kernel(const __grid_constant__ Params p, int tile) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr && blockIdx.y == 0) {
    const int64_t threads = int64_t{gridDim.x} * kThreads;
    for (int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x; r < p.batch_size; r += threads) p.check(r, p.report);
  }
  const int64_t channel = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kVec;
  if (channel >= p.channels) return;
  const int64_t tile_begin = int64_t{blockIdx.x} * tile;
  const Span span(p, tile_begin, tile_begin + tile);
  const Walk<T, kVec, kWidth> walk(p, channel);
  int64_t t = span.begin;
  for (int64_t request = t < span.end ? request_of(p, t) : 0; t < span.end; ++request) {
    const bool exists = request >= 0 && request < p.batch_size;
    const int64_t last = exists || request < 0 ? p.first_token(request + 1) : span.end;
    const int64_t end = last < span.end ? last : span.end;
    if (end <= t) continue;
    if (exists && p.in_pool(request)) {
      walk.convolve(request, p.first_token(request), last, t, end);
    } else {
      walk.clear(t, end);
    }
    t = end;
  }
}

}  // namespace attnops::causal_conv1d
