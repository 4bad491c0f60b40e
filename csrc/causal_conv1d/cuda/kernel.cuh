#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "causal_conv1d/params.h"
#include "core/linear_step.h"
#include "core/math.h"
#include "device/common/pdl.cuh"
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

template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<16> {
  using Type = uint4;
};
template <>
struct AccessOf<8> {
  using Type = uint2;
};
template <>
struct AccessOf<4> {
  using Type = uint32_t;
};
template <>
struct AccessOf<2> {
  using Type = uint16_t;
};

// kVec elements as an access brings and takes them, two of 16 bits in a word.
template <typename T, int kVec>
class Elements {
 public:
  using Access = typename AccessOf<static_cast<int>(sizeof(T)) * kVec>::Type;

  __device__ static Elements zero() { return Elements{}; }
  __device__ static Elements load(const T* from) {
    Elements x;
    x.set(*reinterpret_cast<const Access*>(from));
    return x;
  }
  // What another CTA reads much later stays in L2 until then.
  __device__ static Elements load_kept(const T* from) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(Access) == 16) {
      uint64_t policy;
      uint4 bits;
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "l"(from), "l"(policy));
      Elements x;
      x.set(bits);
      return x;
    }
#endif
    return load(from);
  }
  __device__ void store(T* to) const { *reinterpret_cast<Access*>(to) = access(); }

  // Element i is the one whose bits are `bits(i)`.
  template <typename Bits>
  __device__ static Elements of(const Bits& bits) {
    Elements x;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPairs) {
        x.words_[w] = bits(2 * w) | bits(2 * w + 1) << 16;
      } else {
        x.words_[w] = bits(w);
      }
    }
    return x;
  }
  __device__ static Elements round(const float (&from)[kVec]) {
    if constexpr (kPairs) {
      Elements x;
#pragma unroll
      for (int w = 0; w < kWords; ++w) x.words_[w] = round_pair(from[2 * w], from[2 * w + 1]);
      return x;
    } else {
      return of([&](int i) { return bits_of(from[i]); });
    }
  }

  __device__ uint32_t bits(int i) const {
    if constexpr (!kPairs) return words_[i];
    return i % 2 == 0 ? words_[i / 2] & 0xffffu : words_[i / 2] >> 16;
  }
  __device__ float at(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words_[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(kPairs && i % 2 == 1 ? words_[i / 2] & 0xffff0000u : words_[kPairs ? i / 2 : i] << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(bits(i))));
    }
  }

 private:
  static constexpr bool kPairs = sizeof(T) == 2 && kVec % 2 == 0;
  static constexpr int kWords = kPairs ? kVec / 2 : kVec;
  uint32_t words_[kWords];

  __device__ static uint32_t bits_of(float x) {
    if constexpr (sizeof(T) == 4) return __float_as_uint(x);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat16_as_ushort(__float2bfloat16(x));
    if constexpr (std::is_same_v<T, __half>) return __half_as_ushort(__float2half(x));
  }
  __device__ static uint32_t round_pair(float low, float high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  __device__ void set(const uint4& x) { words_[0] = x.x, words_[1] = x.y, words_[2] = x.z, words_[3] = x.w; }
  __device__ void set(const uint2& x) { words_[0] = x.x, words_[1] = x.y; }
  __device__ void set(uint32_t x) { words_[0] = x; }
  __device__ void set(uint16_t x) { words_[0] = x; }
  __device__ Access access() const {
    if constexpr (sizeof(Access) == 16) {
      return {words_[0], words_[1], words_[2], words_[3]};
    } else if constexpr (sizeof(Access) == 8) {
      return {words_[0], words_[1]};
    } else {
      return static_cast<Access>(words_[0]);
    }
  }
};

// x sigmoid(x) by the two approximations of the hardware. An exponential below 2^-126 may be 0: 1 is added to it.
__device__ __forceinline__ float silu_of(float x) {
#if defined(__CUDA_ARCH__)
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return x * inverse;
#else
  return x / (1.f + expf(-x));
#endif
}

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
