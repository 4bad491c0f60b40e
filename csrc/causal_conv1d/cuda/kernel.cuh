#pragma once
#include "causal_conv1d/cuda/walk.cuh"
#include "device/common/pdl.cuh"

// The kernels: of prompts, of updates of some tokens, of one token, and of drafts.
namespace attnops::causal_conv1d {

__device__ __forceinline__ void check_requests(const Params& p) {
  if (p.report == nullptr) return;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t r = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; r < p.batch_size; r += threads) {
    p.check(r, p.report);
  }
}

// A CTA for each tile of tokens and block of channels, those of the same tokens side by side.
// kCopies: of a ring; 0: inputs on their way are in registers.
template <typename T, int kVec, int kWidth, int kAhead, int kCopies, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    conv_kernel(const __grid_constant__ Params p, StateLayout layout, int tile, int across) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  check_requests(p);
  const int64_t tile_begin = int64_t{blockIdx.x / across} * tile;
  const Span span(p, tile_begin, tile_begin + tile);
  int64_t t = span.begin;
  int64_t request = t < span.end ? request_of(p, t) : 0;
  const int64_t channel = (int64_t{blockIdx.x % across} * kThreads + threadIdx.x) * kVec;
  if (channel >= p.channels) return;
  const Walk<T, kVec, kWidth, kAhead> walk(p, channel);
  using Ring = InputRing<T, kVec, kAhead, kCopies, kThreads>;
  __shared__ __align__(16) unsigned char places[max_of(Ring::kBytes, 16)];
  for (; t < span.end; ++request) {
    const bool exists = request >= 0 && request < p.batch_size;
    const int64_t last = exists || request < 0 ? p.first_token(request + 1) : span.end;
    const int64_t end = min_of(last, span.end);
    if (end <= t) continue;
    if (exists && p.in_pool(request)) {
      const int64_t first = p.first_token(request);
      if constexpr (kCopies > 0) {
        walk.template convolve_copied<Ring, kCopies>(Ring{places}, request, first, last, t, end, layout);
      } else {
        walk.convolve(request, first, last, t, end, layout);
      }
    } else {
      walk.clear(t, end);
    }
    t = end;
  }
}

// Asks for a thread's part of a request's state to be in L2, before the kernel has waited. Its slot is read past the
// first cache, and may still change: then another's state is asked for, and nothing else comes of it.
template <typename T>
__device__ __forceinline__ void ask_for_state_ahead(const Params& p, StateLayout layout, int64_t request,
                                                    int64_t channel) {
#if __CUDA_ARCH__ >= 900
  if (channel >= p.channels || layout != StateLayout::kChannels) return;
  int32_t slot;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(slot) : "l"(p.state_indices + request));
  if (slot < 0 || slot >= p.num_slots) return;
  const T* state = static_cast<const T*>(p.states) + slot * p.stride_slot + channel * p.stride_channel;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(state));
#endif
}

// The same number of tokens for each request: a CTA for each request and block of channels.
template <typename T, int kVec, int kWidth, int kAhead, int kThreads>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Params p, StateLayout layout, int across) {
  const int64_t request = blockIdx.x / across;
  const int64_t channel = (int64_t{blockIdx.x % across} * kThreads + threadIdx.x) * kVec;
  ask_for_state_ahead<T>(p, layout, request, channel);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  check_requests(p);
  if (channel >= p.channels) return;
  const bool exists = p.in_pool(request);
  const Walk<T, kVec, kWidth, kAhead> walk(p, channel);
  const int64_t first = p.first_token(request), last = p.first_token(request + 1);
  exists ? walk.convolve(request, first, last, first, last, layout) : walk.clear(first, last);
}

// One token for each request, as when decoding. Grid: blocks of channels x requests. What a thread reads is asked for
// at once, and its output comes before its state: a step behind it waits for that.
template <typename T, int kVec, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) token_kernel(const __grid_constant__ Params p, StateLayout layout) {
  using Channels = Walk<T, kVec, kWidth, 1>;
  using Lane = typename Channels::Lane;
  constexpr int kHistory = kWidth - 1;
  const int64_t request = blockIdx.y, channel = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  const T* x = static_cast<const T*>(p.x) + request * p.stride_x + channel;
  T* out = static_cast<T*>(p.out) + request * p.stride_out + channel;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (blockIdx.y == 0) check_requests(p);
  if (channel >= p.channels) return;
  const int64_t slot = p.state_indices[request];
  const Lane newest = Lane::load(x);
  if (slot < 0 || slot >= p.num_slots) return Lane::zero().store(out);
  const Channels walk(p, channel);
  Lane state[kHistory];
  walk.load_state(state, walk.states(slot), layout);
  float window[kWidth][kVec];
#pragma unroll
  for (int j = 0; j < kHistory; ++j) Channels::unpack(window[j], state[j]);
  Channels::unpack(window[kHistory], newest);
  const Lane result = p.silu ? walk.template sum_of<true>(window, 0) : walk.template sum_of<false>(window, 0);
  result.store(out);
#pragma unroll
  for (int j = 0; j < kHistory - 1; ++j) state[j] = state[j + 1];
  state[kHistory - 1] = newest;
  Channels::store_state(state, walk.states(slot), layout, p);
}

// Drafts: a CTA for some of a request's, and a block of channels. All that they read is asked for before the first of
// them is computed; what an ancestor has already asked for comes from the first cache.
template <typename T, int kVec, int kWidth, int kDrafts, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    drafts_kernel(const __grid_constant__ DraftParams p, StateLayout states, StateLayout windows, int groups,
                  int across) {
  using Channels = Walk<T, kVec, kWidth, 1>;
  using Lane = typename Channels::Lane;
  constexpr int kHistory = kWidth - 1;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  check_requests(p.conv);
  const int64_t request = blockIdx.x / across / groups;
  const int begin = static_cast<int>(blockIdx.x / across % groups) * kDrafts, end = min_of(begin + kDrafts, p.drafts);
  const int64_t channel = (int64_t{blockIdx.x % across} * kThreads + threadIdx.x) * kVec;
  if (channel >= p.conv.channels) return;
  const Channels walk(p.conv, channel);
  const int64_t first = p.conv.first_token(request);
  if (!p.conv.in_pool(request)) return walk.clear(first + begin, first + end);

  Lane state[kHistory], inputs[kDrafts][kWidth];
  int places[kDrafts][kHistory];
  walk.load_state(state, walk.states(p.conv.state_indices[request]), states);
#pragma unroll
  for (int d = 0; d < kDrafts; ++d) {
    const int draft = min_of(begin + d, p.drafts - 1);
    p.places_of(request, draft, kHistory, places[d]);
#pragma unroll
    for (int j = 0; j < kHistory; ++j) {
      inputs[d][j] = Lane::load(walk.x(first + (places[d][j] < 0 ? draft : places[d][j])));
    }
    inputs[d][kHistory] = Lane::load(walk.x(first + draft));
  }
  T* to = static_cast<T*>(p.windows) + request * p.stride_request + channel * p.stride_channel;
#pragma unroll
  for (int d = 0; d < kDrafts; ++d) {
    if (begin + d >= end) return;
    float window[kWidth][kVec];
    Lane left[kHistory];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      Lane input = inputs[d][j];
#pragma unroll
      for (int i = 0; i < kHistory; ++i) {
        if (j < kHistory && places[d][j] == i - kHistory) input = state[i];
      }
      Channels::unpack(window[j], input);
      if (j > 0) left[j - 1] = input;
    }
    Channels::store_state(left, to + (begin + d) * p.stride_draft, windows, p);
    const Lane result = p.conv.silu ? walk.template sum_of<true>(window, 0) : walk.template sum_of<false>(window, 0);
    result.store(walk.out(first + begin + d));
  }
}

}  // namespace attnops::causal_conv1d
