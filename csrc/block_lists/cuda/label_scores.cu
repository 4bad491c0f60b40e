#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block_lists/cuda/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "device/sm80/mma.cuh"

namespace attnops::block_lists {
namespace {

constexpr int kThreads = 128;
constexpr int kHeadsAtOnce = 8;  // query heads whose sums a thread holds
constexpr int64_t kMostBlocks = 132 * 32;
constexpr int kMostChannels = 64;  // of their queries that are in shared memory at once

__device__ float as_float(float x) { return x; }
__device__ float as_float(__half x) { return __half2float(x); }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The largest product of one label with the queries of its group; all threads of a CTA come here together.
template <typename T, int kPer>
__device__ float best_product(const ScoreParams& p, const T* q, const T* label,
                              float (&queries)[kHeadsAtOnce][kMostChannels]) {
  float best = -INFINITY;
  const int group = p.group();
  for (int g = 0; g < group; g += kHeadsAtOnce) {
    const int count = min_of(group - g, kHeadsAtOnce);
    float sums[kHeadsAtOnce] = {};
    for (int base = 0; base < p.num_channels; base += kMostChannels) {
      const int channels = min_of(p.num_channels - base, kMostChannels);
      __syncthreads();
      for (int i = threadIdx.x; i < count * channels; i += kThreads) {
        const int h = i / channels, c = i - h * channels;
        queries[h][c] = as_float(q[(g + h) * p.q_stride_head + base + c]);
      }
      __syncthreads();
      if (label == nullptr) continue;
      for (int c = 0; c < channels; c += kPer) {
        const auto values = load_vec<Vec<T, kPer>>(label + base + c);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h) {
          if (h >= count) break;
#pragma unroll
          for (int i = 0; i < kPer; ++i) sums[h] += queries[h][c + i] * as_float(values.data[i]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (h < count) best = fmaxf(best, sums[h]);
    }
  }
  return label == nullptr ? -INFINITY : best;
}

// A thread has a key: it reads its label in vectors of kPer elements, once for each 8 query heads. Queries are read
// from shared memory by all threads at once. CTAs take turns, so that a wide page table costs nothing.
template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ ScoreParams p) {
  __shared__ float queries[kHeadsAtOnce][kMostChannels];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int request = blockIdx.z, head = blockIdx.y;
  const int64_t keys = scored_keys(p, request), step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (p.report != nullptr && blockIdx.x == 0 && head == 0 && threadIdx.x == 0) report_columns(p, request);
  const T* const q = static_cast<const T*>(p.q) + request * p.q_stride_request + head * p.group() * p.q_stride_head;
  float* const row = p.scores + request * p.score_stride_request + head * p.score_stride_head;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < keys; first += step) {
    const int64_t key = first + threadIdx.x;
    const int64_t place = key < keys ? label_place(p, request, head, static_cast<int>(key)) : -1;
    const T* const label = place < 0 ? nullptr : static_cast<const T*>(p.labels) + place;
    const float best = best_product<T, kPer>(p, q, label, queries);
    if (key < keys) row[key] = best;
  }
}

constexpr int kTileKeys = 32, kTileThreads = 256, kTileWarps = kTileThreads / 32;
constexpr int64_t kMostTileBlocks = 132 * 16;
constexpr int kMostFragments = 4;

// Labels of 32 keys and a KV head, of 8 * kWords * kDepth channels, in products of matrices: a row of A is a key, a
// column of B one of 8 * kWidth query heads. A lane has kWords words of two channels for each step of depth, in one
// access. The order of channels does not matter to a sum: words of A and of B stand where the instruction wants pairs.
template <typename T, int kWords, int kDepth, int kWidth>
class ScoreTile {
 public:
  __device__ ScoreTile(const ScoreParams& p, int request, int head)
      : group_(p.group()), lane_(static_cast<int>(threadIdx.x) % 32) {
    const T* const q = static_cast<const T*>(p.q) + request * p.q_stride_request;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      const int row = 8 * w + lane_ / 4;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        Vec<T, kOfLane> values{};
        if (row < group_) {
          const T* const from = q + (int64_t{head} * group_ + row) * p.q_stride_head + channel(d);
#pragma unroll
          for (int i = 0; i < kOfLane; ++i) values.data[i] = from[i];
        }
        q_[w][d] = __builtin_bit_cast(Words, values);
      }
    }
  }

  // `place`: of the lane's key, as label_place has it. All labels are asked for before the first product.
  __device__ void load(const T* labels, int64_t place) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t from = __shfl_sync(~0u, place, 8 * i + lane_ / 4);
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        labels_[i][d] = Words{};
        if (from >= 0) labels_[i][d] = load_vec<Words>(labels + from + channel(d));
      }
    }
  }

  // The largest product of key key_of_lane().
  __device__ float best() const {
    float best[4];  // of keys lane / 4, those 8, 16 and 24 behind; of the lane's columns alone
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &low = best[2 * half], &high = best[2 * half + 1];
      low = high = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        float sums[4] = {};
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          const auto &a = labels_[2 * half][d].data, &b = labels_[2 * half + 1][d].data, &q = q_[w][d].data;
#pragma unroll
          for (int i = 0; i < kWords; i += 2) mma_m16n8k16<T>(sums, {a[i], b[i], a[i + 1], b[i + 1]}, q[i], q[i + 1]);
        }
        const int column = 8 * w + 2 * (lane_ % 4);
        if (column < group_) low = fmaxf(low, sums[0]), high = fmaxf(high, sums[2]);
        if (column + 1 < group_) low = fmaxf(low, sums[1]), high = fmaxf(high, sums[3]);
      }
    }
    // Each of four lanes keeps one of the four.
    const bool odd = lane_ & 1, upper = lane_ & 2;
    const float first = fmaxf(odd ? best[1] : best[0], __shfl_xor_sync(~0u, odd ? best[0] : best[1], 1));
    const float second = fmaxf(odd ? best[3] : best[2], __shfl_xor_sync(~0u, odd ? best[2] : best[3], 1));
    return fmaxf(upper ? second : first, __shfl_xor_sync(~0u, upper ? first : second, 2));
  }
  __device__ int key_of_lane() const { return 8 * (lane_ % 4) + lane_ / 4; }

 private:
  static constexpr int kOfLane = 2 * kWords;  // channels
  using Words = Vec<uint32_t, kWords>;

  __device__ int channel(int depth) const { return (4 * depth + lane_ % 4) * kOfLane; }

  int group_, lane_;
  Words q_[kWidth][kDepth], labels_[4][kDepth];
};

// A warp has 32 keys of a KV head at a time. The warps of a CTA share keys as long as there are heads, so that what
// they read lies side by side. Places of the next keys are looked up while labels are on their way.
template <typename T, int kWords, int kDepth, int kWidth>
__global__ void __launch_bounds__(kTileThreads) score_tiles_kernel(const __grid_constant__ ScoreParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int request = blockIdx.y, lane = threadIdx.x % 32;
  const int warp = static_cast<int>(blockIdx.x) * kTileWarps + static_cast<int>(threadIdx.x) / 32;
  const int head = warp % p.num_kv_heads, step = static_cast<int>(gridDim.x) * kTileWarps / p.num_kv_heads;
  const auto keys = static_cast<int>(scored_keys(p, request)), tiles = ceil_div(keys, kTileKeys);
  int tile = warp / p.num_kv_heads;
  if (p.report != nullptr && warp == 0 && lane == 0) report_columns(p, request);
  if (tile >= step || tile >= tiles) return;  // the warps are no multiple of the heads
  const T* const labels = static_cast<const T*>(p.labels);
  float* const row = p.scores + request * p.score_stride_request + head * p.score_stride_head;
  const auto place_of = [&](int of_tile) {
    const int key = of_tile * kTileKeys + lane;
    return of_tile < tiles && key < keys ? label_place(p, request, head, key) : int64_t{-1};
  };
  ScoreTile<T, kWords, kDepth, kWidth> scores(p, request, head);
  int64_t place = place_of(tile);
  for (; tile < tiles; tile += step) {
    scores.load(labels, place);
    const uint32_t there = __ballot_sync(~0u, place >= 0);
    place = place_of(tile + step);
    const float best = scores.best();
    const int own = scores.key_of_lane(), key = tile * kTileKeys + own;
    if (key < keys) row[key] = there >> own & 1 ? best : -INFINITY;
  }
}

template <typename T, int kWords, int kDepth, int kWidth>
void launch_tiles_as(const ScoreParams& p, CUstream_st* stream) {
  const int64_t tiles = ceil_div<int64_t>(p.columns, kTileKeys), heads = p.num_kv_heads;
  const int64_t least = ceil_div<int64_t>(heads, kTileWarps), most = ceil_div<int64_t>(tiles * heads, kTileWarps);
  const int64_t blocks = max_of(least, min_of(most, kMostTileBlocks / p.num_requests));
  const LaunchShape shape{.blocks = static_cast<int>(blocks),
                          .threads = kTileThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0,
                          .blocks_y = p.num_requests};
  launch_dependent<&score_tiles_kernel<T, kWords, kDepth, kWidth>>("label_scores", shape, stream, p);
}

// False: there is no kernel of matrix products for these shapes.
template <typename T, int kWords, int kDepth = 1, int kWidth = 1>
bool launch_tiles(const ScoreParams& p, CUstream_st* stream) {
  if constexpr (kDepth * kWidth > kMostFragments) {
    return false;
  } else {
    constexpr int kChannels = 8 * kWords * kDepth;
    if constexpr (kWords == 4) {
      if (p.num_channels > kChannels) return launch_tiles<T, kWords, 2 * kDepth, kWidth>(p, stream);
    }
    if (p.group() > 8 * kWidth) return launch_tiles<T, kWords, kDepth, 2 * kWidth>(p, stream);
    if (p.num_channels != kChannels) return false;
    launch_tiles_as<T, kWords, kDepth, kWidth>(p, stream);
    return true;
  }
}

template <typename T>
void launch_of(const ScoreParams& p, CUstream_st* stream) {
  constexpr int kPer = 16 / sizeof(T);
  const bool vectors = p.num_channels % kPer == 0 && rows_aligned(p.labels, sizeof(T), 16, p.label_stride_page,
                                                                  p.label_stride_token, p.label_stride_head);
  if constexpr (sizeof(T) == 2) {
    if (vectors && (p.num_channels == 16 ? launch_tiles<T, 2>(p, stream) : launch_tiles<T, 4>(p, stream))) return;
  }
  const int64_t tiles = ceil_div<int64_t>(p.columns, kThreads), rows = int64_t{p.num_requests} * p.num_kv_heads;
  const LaunchShape shape{.blocks = static_cast<int>(min_of(tiles, max_of(kMostBlocks / rows, int64_t{1}))),
                          .threads = kThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0,
                          .blocks_y = p.num_kv_heads,
                          .blocks_z = p.num_requests};
  if (vectors) {
    launch_dependent<&score_kernel<T, kPer>>("label_scores", shape, stream, p);
  } else {
    launch_dependent<&score_kernel<T, 1>>("label_scores", shape, stream, p);
  }
}

}  // namespace

void launch(const ScoreParams& p, CUstream_st* stream) {
  if (p.num_requests == 0 || p.columns == 0) return;
  if (p.dtype == DType::kFloat32) return launch_of<float>(p, stream);
  if (p.dtype == DType::kFloat16) return launch_of<__half>(p, stream);
  launch_of<__nv_bfloat16>(p, stream);
}

}  // namespace attnops::block_lists
