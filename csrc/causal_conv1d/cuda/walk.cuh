#pragma once
#include "causal_conv1d/cuda/elements.cuh"
#include "causal_conv1d/params.h"
#include "core/linear_step.h"
#include "core/math.h"
#include "device/sm80/cp_async.cuh"

// Bound by memory: a thread walks along some neighbouring channels, an access a token, with the window in registers.
// Later tokens' inputs are asked for before earlier ones are used. No load stands in a branch of its own, since
// it would be waited for there: loads behind a thread's last token read that token again.
namespace attnops::causal_conv1d {

// How the states lie, or the windows of drafts.
enum class StateLayout {
  kAny,
  kChannels,  // a channel's inputs side by side, channel after channel
  kTimes,     // channels side by side, a row for each time
};

// The last request that begins at or before token t; -1: none does. Bounds that decrease give some request of which
// that is true. Asked by a whole warp, which looks at 32 bounds at once.
__device__ __forceinline__ int64_t request_of(const Params& p, int64_t t) {
  if (p.cu_seqlens == nullptr) return t / p.tokens_per_request;
  int64_t low = -1, high = p.batch_size;
  while (high - low > 1) {
    const int64_t step = ceil_div<int64_t>(high - low, 33), probe = low + (threadIdx.x % 32 + 1) * step;
    const unsigned before = __ballot_sync(0xffffffffu, probe < high && p.first_token(probe) <= t);
    const int last = 32 - __clz(static_cast<int>(before));  // of the probes, counted from 1
    high = min_of(high, low + (last + 1) * step);
    low += last * step;
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

// Inputs that a thread has asked for: kAhead tokens a copy, in places of shared memory that no other thread sees. So no
// barrier is needed, and what is on its way takes no registers.
template <typename T, int kVec, int kAhead, int kCopies, int kThreads>
struct InputRing {
  using Lane = Elements<T, kVec>;
  static constexpr int kBytes = kCopies * kAhead * kThreads * 16;
  unsigned char* places;

  __device__ unsigned char* at(int copy, int token) const {
    return places + ((copy * kAhead + token) * kThreads + static_cast<int>(threadIdx.x)) * 16;
  }
  // Tokens behind the last one are that token again, and not read.
  __device__ void ask(int copy, const T* from, int64_t stride, int left) const {
    if (left > 0) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const T* token = from + min_of(a, left - 1) * stride;
        cp_async_16(smem_address(at(copy, a)), token, true);
      }
    }
    cp_async_commit();
  }
  __device__ Lane take(int copy, int token) const { return Lane::load(reinterpret_cast<const T*>(at(copy, token))); }
};

// A thread's channels, and the tokens that it computes of them. It asks for the inputs of kAhead tokens at once.
template <typename T, int kVec, int kWidth, int kAhead>
struct Walk {
  static constexpr int kHistory = kWidth - 1;
  using Lane = Elements<T, kVec>;
  const Params& p;
  int64_t channel;
  float weights[kWidth][kVec], bias[kVec];

  // The kRows elements of each channel, which lie side by side, as one vector for each row.
  template <int kRows>
  __device__ static void load_rows(Lane (&rows)[kRows], const T* from) {
    Lane flat[kRows];
#pragma unroll
    for (int v = 0; v < kRows; ++v) flat[v] = Lane::load(from + v * kVec);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      rows[j] = Lane::of([&](int i) { return flat[(i * kRows + j) / kVec].bits((i * kRows + j) % kVec); });
    }
  }

  __device__ Walk(const Params& params, int64_t first_channel) : p(params), channel(first_channel) {
    Lane flat[kWidth], added = Lane::zero();
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      flat[v] = Lane::load(static_cast<const T*>(p.weight) + channel * kWidth + v * kVec);
    }
    if (p.bias != nullptr) added = Lane::load(static_cast<const T*>(p.bias) + channel);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weights[j][i] = flat[(i * kWidth + j) / kVec].at((i * kWidth + j) % kVec);
      bias[i] = added.at(i);
    }
  }

  __device__ const T* x(int64_t t) const { return static_cast<const T*>(p.x) + channel + t * p.stride_x; }
  __device__ T* out(int64_t t) const { return static_cast<T*>(p.out) + channel + t * p.stride_out; }
  __device__ T* states(int64_t slot) const {
    return static_cast<T*>(p.states) + slot * p.stride_slot + channel * p.stride_channel;
  }

  __device__ void clear(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) Lane::zero().store(out(t));
  }

  __device__ void load_state(Lane (&state)[kHistory], const T* from, StateLayout layout) const {
    if (layout == StateLayout::kChannels) return load_rows(state, from);
    if (layout == StateLayout::kTimes) {
#pragma unroll
      for (int j = 0; j < kHistory; ++j) state[j] = Lane::load(from + j * p.stride_time);
      return;
    }
#pragma unroll
    for (int j = 0; j < kHistory; ++j) {
      state[j] = Lane::of(
          [&](int i) { return Elements<T, 1>::load(from + i * p.stride_channel + j * p.stride_time).bits(0); });
    }
  }

  // `strides`: whose stride_channel and stride_time are those of `to`.
  template <typename Strides>
  __device__ static void store_state(const Lane (&state)[kHistory], T* to, StateLayout layout, const Strides& strides) {
    if (layout == StateLayout::kChannels) {
#pragma unroll
      for (int v = 0; v < kHistory; ++v) {
        const auto bits = [&](int i) { return state[(v * kVec + i) % kHistory].bits((v * kVec + i) / kHistory); };
        Lane::of(bits).store(to + v * kVec);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kHistory; ++j) {
      if (layout == StateLayout::kTimes) {
        state[j].store(to + j * strides.stride_time);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const auto bits = [&](int) { return state[j].bits(i); };
        Elements<T, 1>::of(bits).store(to + i * strides.stride_channel + j * strides.stride_time);
      }
    }
  }

  // Tokens [begin, end) of a request whose tokens are [first, last). The thread of its first token writes its new
  // state.
  __device__ void convolve(int64_t request, int64_t first, int64_t last, int64_t begin, int64_t end,
                           StateLayout layout) const {
    Lane ahead[kAhead], window[kHistory];
    load_tokens(ahead, begin, end - begin);
    begin_window(window, request, first, last, begin, layout);
    p.silu ? run<true>(window, ahead, begin, end) : run<false>(window, ahead, begin, end);
  }

  // The inputs before token `begin`. That of its request's first token also writes the new state.
  __device__ void begin_window(Lane (&window)[kHistory], int64_t request, int64_t first, int64_t last, int64_t begin,
                               StateLayout layout) const {
    if (begin == first) {
      T* slot = states(p.state_indices[request]);
      const bool starts_at_zero = p.has_initial_state != nullptr && p.has_initial_state[request] == 0;
      Lane newest[kHistory];
#pragma unroll
      for (int j = 0; j < kHistory; ++j) newest[j] = Lane::load(x(max_of(last - kHistory + j, first)));
      if (starts_at_zero) {
#pragma unroll
        for (int j = 0; j < kHistory; ++j) window[j] = Lane::zero();
      } else {
        load_state(window, slot, layout);
      }
      const int64_t count = last - first;
#pragma unroll
      for (int j = 0; j < kHistory; ++j) {
#pragma unroll
        for (int moved = 1; j + moved < kHistory; ++moved) {
          if (count == moved) newest[j] = window[j + moved];
        }
      }
      store_state(newest, slot, layout, p);
    } else {
#pragma unroll
      for (int j = 0; j < kHistory; ++j) window[j] = Lane::load_kept(x(max_of(begin - kHistory + j, first)));
    }
  }

  // The same, the inputs by way of a ring.
  template <class Ring, int kCopies>
  __device__ void convolve_copied(const Ring& ring, int64_t request, int64_t first, int64_t last, int64_t begin,
                                  int64_t end, StateLayout layout) const {
    const int left = static_cast<int>(end - begin);
#pragma unroll
    for (int c = 0; c < kCopies; ++c) ring.ask(c, x(begin + c * kAhead), p.stride_x, left - c * kAhead);
    Lane window[kHistory];
    begin_window(window, request, first, last, begin, layout);
    p.silu ? run_copied<true, kCopies>(ring, window, begin, left)
           : run_copied<false, kCopies>(ring, window, begin, left);
  }

  template <bool kSilu, int kCopies, class Ring>
  __device__ void run_copied(const Ring& ring, const Lane (&before)[kHistory], int64_t begin, int left) const {
    const T* from = x(begin + kCopies * kAhead);
    T* to = out(begin);
    float window[kHistory + kAhead][kVec];
#pragma unroll
    for (int j = 0; j < kHistory; ++j) unpack(window[j], before[j]);
    for (int copy = 0; left > 0; left -= kAhead) {
      cp_async_wait<kCopies - 1>();
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        unpack(window[kHistory + a], ring.take(copy, a));
        const Lane result = sum_of<kSilu>(window, a);
        if (a < left) result.store(to + a * p.stride_out);
      }
      ring.ask(copy, from, p.stride_x, left - kCopies * kAhead);
      from += kAhead * p.stride_x, to += kAhead * p.stride_out;
      if (++copy == kCopies) copy = 0;
#pragma unroll
      for (int j = 0; j < kHistory; ++j) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) window[j][i] = window[kAhead + j][i];
      }
    }
    cp_async_wait<0>();
  }

  // Token `begin` and those after it, of `left` in all.
  __device__ void load_tokens(Lane (&lanes)[kAhead], int64_t begin, int64_t left) const {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) lanes[a] = Lane::load(x(begin + min_of<int64_t>(a, left - 1)));
  }

  template <bool kSilu>
  __device__ void run(const Lane (&before)[kHistory], Lane (&ahead)[kAhead], int64_t begin, int64_t end) const {
    int left = static_cast<int>(end - begin);
    const T* from = x(begin);
    T* to = out(begin);
    float window[kHistory + kAhead][kVec];
#pragma unroll
    for (int j = 0; j < kHistory; ++j) unpack(window[j], before[j]);
    while (true) {
      Lane now[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) now[a] = ahead[a];
      const int here = left;
      left -= kAhead;
      from += kAhead * p.stride_x;
      if (left > 0) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) ahead[a] = Lane::load(from + min_of(a, left - 1) * p.stride_x);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        unpack(window[kHistory + a], now[a]);
        const Lane result = sum_of<kSilu>(window, a);
        if (a < here) result.store(to + a * p.stride_out);
      }
      if (left <= 0) return;
      to += kAhead * p.stride_out;
#pragma unroll
      for (int j = 0; j < kHistory; ++j) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) window[j][i] = window[kAhead + j][i];
      }
    }
  }

  __device__ static void unpack(float (&to)[kVec], const Lane& from) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = from.at(i);
  }

  template <bool kSilu>
  __device__ Lane sum_of(const float (&window)[kHistory + kAhead][kVec], int a) const {
    float sum[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum[i] = bias[i];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[i] = fmaf(weights[j][i], window[a + j][i], sum[i]);
      if constexpr (kSilu) sum[i] = silu_of(sum[i]);
    }
    return Lane::round(sum);
  }
};

}  // namespace attnops::causal_conv1d
