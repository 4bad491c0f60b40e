#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "compressed_kv/cuda/launch.h"
#include "compressed_kv/entries.h"
#include "device/common/block_scan.cuh"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/quantize_key.cuh"

namespace attnops::compressed_kv {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kPer = 4;        // neighbouring channels of a thread
constexpr int kThreads = 512;  // of an entry, at most: groups of dim / kPer threads share its tokens
constexpr int kCopyThreads = 128;

__global__ void __launch_bounds__(kPlanThreads) compress_plan_kernel(const __grid_constant__ PlanParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int64_t sum = 0;
  if (threadIdx.x == 0) p.entry_indptr[0] = 0;
  for (int64_t first = 0; first < p.batch_size; first += kPlanThreads) {
    const int64_t request = first + threadIdx.x;
    int64_t mine = 0, before = 0;
    if (request < p.batch_size) {
      if (p.report != nullptr) {
        report_request(p.report, kReportCompressPlan, p.cu_seqlens_q, p.cache_seqlens, request, INT32_MAX);
      }
      mine = entries_of({p.cu_seqlens_q, p.cache_seqlens, request, INT32_MAX}, p.ratio);
    }
    const int64_t all = block_exclusive_sum<kPlanThreads>(mine, &before);
    if (request < p.batch_size) p.entry_indptr[request + 1] = static_cast<int32_t>(sum + before + mine);
    sum += all;
  }
}

// Four neighbouring values; `aligned`: they lie on a boundary of their size.
template <typename T>
__device__ __forceinline__ void load4(const T* from, bool aligned, float (&x)[kPer]) {
  struct alignas(sizeof(T) * kPer) Four {
    T at[kPer];
  };
  Four four;
  if (aligned) {
    four = *reinterpret_cast<const Four*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) four.at[i] = from[i];
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = static_cast<float>(four.at[i]);
}

// A softmax under way over tokens, and the values that it weighs, of a thread's channels.
struct Pool {
  float highest[kPer], total[kPer], value[kPer];

  __device__ Pool() {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      highest[i] = -INFINITY;
      total[i] = value[i] = 0.f;
    }
  }

  // A share of the softmax: its highest score, the sum of its weights, and the sum of what they weigh.
  __device__ void add(int i, float high, float sum, float weighed) {
    const float top = high > highest[i] || isnan(high) ? high : highest[i];
    if (top == -INFINITY) return;
    const float old = __expf(highest[i] - top), fresh = __expf(high - top);
    total[i] = total[i] * old + sum * fresh;
    value[i] = value[i] * old + (fresh == 0.f ? 0.f : weighed * fresh);
    highest[i] = top;
  }
};

template <typename T>
__device__ Pool pool_tokens(const Params& p, const Entry& entry, int group, int groups, int channel) {
  const NewTokens tokens = new_tokens(p, entry.request);
  const int width = p.width();
  const bool aligned = p.stride_token % kPer == 0 && p.stride_slot % kPer == 0 &&
                       reinterpret_cast<uintptr_t>(p.kv_score) % (sizeof(T) * kPer) == 0 &&
                       reinterpret_cast<uintptr_t>(p.state) % (sizeof(T) * kPer) == 0;
  Pool pool;
#pragma unroll 4
  for (int64_t back = p.reach() - group; back > 0; back -= groups) {
    const int64_t position = (entry.index + 1) * p.ratio - back;
    if (position < 0) continue;  // there is no group before the first
    const int at = (p.overlap && back <= p.ratio ? p.dim : 0) + channel;
    const T* row = reinterpret_cast<const T*>(token_row(p, entry.request, tokens, position)) + at;
    const float* ape = p.ape + position % p.ratio * width + at;
    float values[kPer], scores[kPer];
    load4(row, aligned, values);
    load4(row + width, aligned, scores);
#pragma unroll
    for (int i = 0; i < kPer; ++i) pool.add(i, scores[i] + ape[i], 1.f, values[i]);
  }
  return pool;
}

__device__ void store_value(const Params& p, uint8_t* row, int channel, float x) {
  if (p.row_dtype == DType::kFloat32) {
    reinterpret_cast<float*>(row)[channel] = x;
  } else if (p.row_dtype == DType::kFloat16) {
    reinterpret_cast<__half*>(row)[channel] = __float2half_rn(x);
  } else {
    reinterpret_cast<__nv_bfloat16*>(row)[channel] = __float2bfloat16_rn(x);
  }
}

// Two neighbouring values of each lane, blocks of 64 dealt out to warps. `x` holds the entry.
__device__ void store_entry(const Params& p, const Place& place, const float* x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  uint8_t* const page = p.pages + place.page * p.stride_page;
  if (p.kind == RowKind::kIndex) {
    if (warp != 0) return;
    uint8_t* const key = page + int64_t{place.offset} * p.dim;
    float scale;
    if (p.dim == 128) {
      float mine[4] = {x[lane * 4], x[lane * 4 + 1], x[lane * 4 + 2], x[lane * 4 + 3]};
      scale = quantize_key<128>(p.how, mine, key);
    } else {
      float mine[2] = {x[lane * 2], x[lane * 2 + 1]};
      scale = quantize_key<64>(p.how, mine, key);
    }
    float* const scales = reinterpret_cast<float*>(page + int64_t{p.page_size} * p.dim);
    if (lane == 0) scales[place.offset] = scale;
    return;
  }
  for (int first = warp * 64; first < p.dim; first += warps * 64) {
    float mine[2] = {x[first + lane * 2], x[first + lane * 2 + 1]};
    if (p.kind == RowKind::kValues) {
      uint8_t* const row = page + place.offset * p.stride_row;
      store_value(p, row, first + lane * 2, mine[0]);
      store_value(p, row, first + lane * 2 + 1, mine[1]);
      continue;
    }
    uint8_t* const row = page + int64_t{place.offset} * kSharedRowDataBytes;
    if (first < kSharedRowNope) {
      const float scale = quantize_key<64>({false, true}, mine, row + first);
      uint8_t* const scales =
          page + int64_t{p.page_size} * kSharedRowDataBytes + int64_t{place.offset} * kSharedRowScaleBytes;
      if (lane == 0) scales[first / kSharedRowScaleWidth] = static_cast<uint8_t>(bits_of(scale) >> 23);
    } else {
      auto* const rope = reinterpret_cast<__nv_bfloat16*>(row + kSharedRowNope);
      rope[lane * 2] = __float2bfloat16_rn(mine[0]);
      rope[lane * 2 + 1] = __float2bfloat16_rn(mine[1]);
    }
  }
}

// A CTA per entry that a step may complete; most CTAs of a decode step find none.
template <typename T>
__global__ void __launch_bounds__(kThreads) compress_kernel(const __grid_constant__ Params p, int groups) {
  extern __shared__ float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr) {
    const int64_t threads = int64_t{gridDim.x} * blockDim.x;
    for (int64_t r = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; r < p.batch_size; r += threads) {
      report_request(p, r, p.report);
    }
  }
  const Entry entry = entry_of(p, blockIdx.x);
  int32_t* const report = threadIdx.x == 0 ? p.report : nullptr;  // a fault counts once
  if (entry.request < 0 || !has_rotation(p, entry, report)) return;
  const Place place = place_of(p, entry, report);
  if (!place.valid) return;

  const int lanes = p.dim / kPer, group = threadIdx.x / lanes, channel = threadIdx.x % lanes * kPer;
  float *const highest = shared, *const total = highest + groups * p.dim, *const value = total + groups * p.dim;
  float* const x = value + groups * p.dim;  // [dim]
  if (group < groups) {
    const Pool pool = pool_tokens<T>(p, entry, group, groups, channel);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int at = group * p.dim + channel + i;
      highest[at] = pool.highest[i];
      total[at] = pool.total[i];
      value[at] = pool.value[i];
    }
  }
  __syncthreads();
  if (group == 0) {
    Pool all;
    for (int g = 0; g < groups; ++g) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int at = g * p.dim + channel + i;
        all.add(i, highest[at], total[at], value[at]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[channel + i] = all.total[i] == 0.f ? 0.f : all.value[i] / all.total[i];
  }
  __syncthreads();

  float squares = 0.f;  // every warp adds up all of them
  for (int c = threadIdx.x % 32; c < p.dim; c += 32) squares = fmaf(x[c], x[c], squares);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = 1.f / sqrtf(squares / static_cast<float>(p.dim) + p.eps);
  float* const turned = highest;  // [dim]
  const float* const cosine = p.cos_sin + entry.index * p.ratio * kRopeDim;
  const float* const sine = cosine + kRopeDim / 2;
  const int rope = p.dim - kRopeDim;
  for (int c = threadIdx.x; c < p.dim; c += blockDim.x) {
    float mine = x[c] * factor * p.norm_weight[c];
    if (c >= rope) {
      const int r = c - rope, pair = p.interleaved ? r / 2 : r % (kRopeDim / 2);
      const bool second = p.interleaved ? r % 2 != 0 : r >= kRopeDim / 2;
      const int other = p.interleaved ? c ^ 1 : second ? c - kRopeDim / 2 : c + kRopeDim / 2;
      const float theirs = x[other] * factor * p.norm_weight[other];
      mine = mine * cosine[pair] + (second ? theirs : -theirs) * sine[pair];
    }
    turned[c] = mine;
  }
  __syncthreads();
  store_entry(p, place, turned);
}

// A CTA per new token: the newest of a request go into its state.
template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) keep_kernel(const __grid_constant__ Params p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t token = blockIdx.x, request = request_of(p.cu_seqlens_q, p.batch_size, token);
  if (request < 0 || !in_pool(p, request)) return;
  const NewTokens tokens = new_tokens(p, request);
  const int64_t nth = token - tokens.first;
  if (nth >= tokens.count || nth < tokens.count - p.state_tokens) return;
  const int64_t row = 2 * p.width(), size = size_of(p.dtype);
  const int64_t to = p.state_indices[request] * p.stride_slot + (tokens.start + nth) % p.state_tokens * row;
  const auto* const from =
      reinterpret_cast<const Word*>(static_cast<const char*>(p.kv_score) + token * p.stride_token * size);
  auto* const kept = reinterpret_cast<Word*>(static_cast<char*>(p.state) + to * size);
  const int words = static_cast<int>(row * size / static_cast<int64_t>(sizeof(Word)));
  for (int i = threadIdx.x; i < words; i += kCopyThreads) kept[i] = from[i];
}

template <typename T>
void launch_compress(const Params& p, CUstream_st* stream) {
  const int lanes = p.dim / kPer;
  const int groups = min_of(kThreads / lanes, p.reach());
  const int shared_bytes = (3 * groups + 1) * p.dim * static_cast<int>(sizeof(float));
  constexpr int kMostShared = (3 * kThreads * kPer + kMaxDim) * static_cast<int>(sizeof(float));
  launch_dependent<&compress_kernel<T>>(
      "compress_kv", {static_cast<int>(most_entries(p)), round_up(lanes * groups, 32), shared_bytes, kMostShared},
      stream, p, groups);
}

}  // namespace

void launch(const PlanParams& p, CUstream_st* stream) {
  launch_dependent<&compress_plan_kernel>("compress_plan", {1, kPlanThreads, 0, 0}, stream, p);
}

void launch(const Params& p, CUstream_st* stream) {
  if (p.num_tokens == 0 || p.batch_size == 0) return;  // a grid of zero CTAs is a launch error
  if (most_entries(p) > 0) {
    if (p.dtype == DType::kFloat32) {
      launch_compress<float>(p, stream);
    } else if (p.dtype == DType::kFloat16) {
      launch_compress<__half>(p, stream);
    } else {
      launch_compress<__nv_bfloat16>(p, stream);
    }
  }
  const int64_t size = size_of(p.dtype);
  const bool vectors = p.stride_token * size % 16 == 0 && reinterpret_cast<uintptr_t>(p.kv_score) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(p.state) % 16 == 0;
  const LaunchShape shape{static_cast<int>(p.num_tokens), kCopyThreads, 0, 0};
  if (vectors) {
    launch_dependent<&keep_kernel<uint4>>("compress_kv", shape, stream, p);
  } else {
    launch_dependent<&keep_kernel<uint16_t>>("compress_kv", shape, stream, p);
  }
}

}  // namespace attnops::compressed_kv
