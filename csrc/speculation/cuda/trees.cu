#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "speculation/cuda/launch.h"

namespace attnops::speculation {
namespace {

// A thread per node, at least a warp.
int threads_of(int num_tokens) { return round_up(num_tokens, 32); }

// ---- build_draft_tree: a CTA per request.
__global__ void __launch_bounds__(kMaxTreeTokens) build_tree_kernel(const __grid_constant__ BuildTreeParams p) {
  __shared__ int64_t selected[kMaxTreeTokens];
  __shared__ int parents[kMaxTreeTokens];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x, i = threadIdx.x;
  if (i > 0 && i < p.num_tokens) selected[i - 1] = p.top_scores_index.at(b, i - 1);
  __syncthreads();
  if (i > 0 && i < p.num_tokens) parents[i] = parent_of(p, b, i, selected);
  __syncthreads();
  if (i < p.num_tokens) write_node(p, b, i, parents);
}

// ---- verify_tree_*: a CTA per request, whose first thread walks.

// The tree in shared memory, where a step of the walk takes tens of cycles instead of hundreds.
struct SharedTree {
  int64_t candidates[kMaxTreeTokens];
  int64_t targets[kMaxTreeTokens];  // greedy: of the node whose row in the request it is
  int rows[kMaxTreeTokens];         // from the request's first
  int next_token[kMaxTreeTokens], next_sibling[kMaxTreeTokens];
  int predicts[kMaxTreeTokens];
  int16_t path[kMaxTreeTokens];  // rows, too

  __device__ void load(const VerifyParams& p, int b, int i) {
    if (i >= p.num_tokens) return;
    candidates[i] = p.candidates.at(b, i);
    rows[i] = clamp_to_int32(p.retrieve_index.at(b, i) - static_cast<int64_t>(b) * p.num_tokens);
    next_token[i] = clamp_to_int32(p.next_token.at(b, i));
    next_sibling[i] = clamp_to_int32(p.next_sibling.at(b, i));
    if (p.target_predict.data != nullptr) {
      targets[i] = p.target_predict[static_cast<int64_t>(b) * p.num_tokens + i];
    }
    predicts[i] = 0;
  }

  // What the walk has found out, written by all threads.
  __device__ void store(const VerifyParams& p, int b, int i, int count) const {
    const int64_t first = static_cast<int64_t>(b) * p.num_tokens;
    if (i < p.num_tokens) p.predicts[first + i] = predicts[i];
    for (int place = i; place < p.path_length; place += blockDim.x) {
      p.accept_index[static_cast<int64_t>(b) * p.path_length + place] =
          place <= count ? clamp_to_int32(first + path[place]) : -1;
    }
    if (i == 0) p.accept_token_num[b] = count;
  }
};

struct SharedLinks {
  const SharedTree& tree;
  int64_t first;  // row of the request

  __device__ int64_t candidate(int node) const { return tree.candidates[node]; }
  __device__ int64_t retrieve_index(int node) const { return first + tree.rows[node]; }
  __device__ int64_t next_token(int node) const { return tree.next_token[node]; }
  __device__ int64_t next_sibling(int node) const { return tree.next_sibling[node]; }
};

__global__ void __launch_bounds__(kMaxTreeTokens) verify_greedy_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ SharedTree tree;
  __shared__ int count;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x, i = threadIdx.x;
  tree.load(p, b, i);
  __syncthreads();
  if (i == 0) {
    const int64_t first = static_cast<int64_t>(b) * p.num_tokens;
    const SharedLinks links{tree, first};
    Walk walk(p, kReportVerifyTreeGreedy, b, links);
    int at = 0;
    const Accepted accepted = walk_tree(
        p, walk, b, [&](int, int child) { return links.candidate(child) == tree.targets[at]; },
        [&](int64_t row, int place, int) {
          at = static_cast<int>(row - first);
          tree.predicts[at] = clamp_to_int32(tree.targets[at]);
          tree.path[place] = static_cast<int16_t>(at);
        });
    count = accepted.count;
  }
  __syncthreads();
  tree.store(p, b, i, count);
}

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32;

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// The most likely token of all, the first of equals: what comes out where nothing else is left.
template <class Probability>
__device__ int64_t most_likely(int64_t vocabulary, const Probability& probability, double* best, int64_t* where) {
  float most = -1.f;
  int64_t token = 0;
  const auto take = [&](float value, int64_t other) {
    if (value < most || (value == most && other >= token)) return;
    most = value;
    token = other;
  };
  for (int64_t v = threadIdx.x; v < vocabulary; v += kSampleThreads) take(probability(v), v);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    take(__shfl_xor_sync(~0u, most, step), static_cast<int64_t>(__shfl_xor_sync(~0u, token, step)));
  }
  __syncthreads();  // what draw() has left was read
  if (threadIdx.x % 32 == 0) {
    best[threadIdx.x / 32] = most;
    where[threadIdx.x / 32] = token;
  }
  __syncthreads();
  for (int w = 0; w < kSampleWarps; ++w) take(static_cast<float>(best[w]), where[w]);
  return token;
}

// Tokens are counted in their order: the vocabulary is cut in 32 runs, the run that holds the drawn token in 32 again,
// and again, until a run is one token.
template <class Rest>
__device__ int64_t draw(int64_t vocabulary, float coin, const Rest& rest, double* sums, int64_t* last) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t begin = 0, end = vocabulary;
  double left = -1.0;  // of the sum up to the drawn token; known once the total is
  while (true) {
    const int64_t run = ceil_div<int64_t>(end - begin, kSampleWarps);
    const int64_t from = begin + warp * run, to = min_of(from + run, end);
    double sum = 0.0;
    int64_t newest = -1;
    for (int64_t v = from + lane; v < to; v += 32) {
      const double value = rest(v);
      sum += value;
      if (value > 0.0) newest = v;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      newest = max_of(newest, static_cast<int64_t>(__shfl_xor_sync(~0u, newest, step)));
    }
    __syncthreads();  // what the round before has left was read
    if (lane == 0) {
      sums[warp] = sum;
      last[warp] = newest;
    }
    __syncthreads();
    if (left < 0.0) {
      double total = 0.0;
      for (int w = 0; w < kSampleWarps; ++w) total += sums[w];
      left = coin * total;
      if (!(left >= 0.0)) left = total;  // a coin that is no number
    }
    // The run whose sum passes what is left, or the last that holds anything, where rounding lets none pass.
    int chosen = -1, fallback = -1;
    double before = 0.0, chosen_before = 0.0;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (last[w] >= 0) {
        fallback = w;
        if (chosen < 0 && before + sums[w] > left) {
          chosen = w;
          chosen_before = before;
        }
      }
      before += sums[w];
    }
    if (fallback < 0) return -1;
    if (chosen < 0) return last[fallback];
    if (run == 1) return begin + chosen;
    left -= chosen_before;
    begin += chosen * run;
    end = min_of(begin + run, end);
  }
}

__global__ void __launch_bounds__(kSampleThreads) verify_sampling_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ SharedTree tree;
  __shared__ int rejected[kMaxTreeTokens];
  __shared__ double sums[kSampleWarps];
  __shared__ int64_t last[kSampleWarps];
  __shared__ int shared_count, shared_node, shared_at, shared_rejected;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x, i = threadIdx.x;
  tree.load(p, b, i);
  __syncthreads();
  const int64_t first = static_cast<int64_t>(b) * p.num_tokens;
  const SharedLinks links{tree, first};
  Walk walk(p, kReportVerifyTreeSampling, b, links);
  Sampler sampler(p, walk, links, b, rejected);
  if (i == 0) {
    int at = -1;
    const Accepted accepted = walk_tree(
        p, walk, b, [&](int node, int child) { return sampler.accepts(node, child); },
        [&](int64_t row, int place, int node) {
          if (place > 0) tree.predicts[at] = clamp_to_int32(links.candidate(node));
          at = static_cast<int>(row - first);
          tree.path[place] = static_cast<int16_t>(at);
        });
    sampler.go_to(accepted.node);
    shared_count = accepted.count;
    shared_node = accepted.node;
    shared_at = at;
    shared_rejected = sampler.num_rejected();
  }
  __syncthreads();
  sampler.resume(shared_node, shared_rejected);
  const bool full_path = shared_count + 1 == p.path_length;
  int64_t token =
      draw(p.vocabulary, p.uniform_final[b], [&](int64_t v) { return sampler.rest(v, full_path); }, sums, last);
  if (token < 0) {  // the same in all threads
    token = most_likely(p.vocabulary, [&](int64_t v) { return sampler.probability(v); }, sums, last);
  }
  if (i == 0) tree.predicts[shared_at] = clamp_to_int32(token);
  __syncthreads();
  tree.store(p, b, i, shared_count);
}

// ---- pack_tree_mask: a CTA per request.
constexpr int kPackThreads = 256;

__global__ void __launch_bounds__(kPackThreads) pack_mask_kernel(const __grid_constant__ PackMaskParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x, bytes = (p.num_tokens + 7) / 8;
  const MaskRows rows = mask_rows(p, b);
  if (rows.tree == nullptr && threadIdx.x == 0) report_bounds(p, b);
  uint8_t* out = p.tree_mask + static_cast<int64_t>(b) * p.num_tokens * bytes;
  for (int at = threadIdx.x; at < p.num_tokens * bytes; at += kPackThreads) {
    out[at] = packed_byte(p, rows, at / bytes, at % bytes);
  }
  if (p.report == nullptr) return;
  for (int i = 0; i < p.num_tokens; ++i) {
    for (int64_t key = threadIdx.x; key < rows.prefix; key += kPackThreads) report_hidden(p, rows, b, i, key);
  }
}

template <auto kKernel, class Params>
void launch_by_request(const char* what, const Params& params, int threads, CUstream_st* stream) {
  if (params.batch_size > 0) launch_dependent<kKernel>(what, {params.batch_size, threads, 0, 0}, stream, params);
}

}  // namespace

void launch(const BuildTreeParams& params, CUstream_st* stream) {
  launch_by_request<&build_tree_kernel>("build_draft_tree", params, threads_of(params.num_tokens), stream);
}

void launch_greedy(const VerifyParams& params, CUstream_st* stream) {
  launch_by_request<&verify_greedy_kernel>("verify_tree_greedy", params, threads_of(params.num_tokens), stream);
}

void launch_sampling(const VerifyParams& params, CUstream_st* stream) {
  launch_by_request<&verify_sampling_kernel>("verify_tree_sampling", params, kSampleThreads, stream);
}

void launch(const PackMaskParams& params, CUstream_st* stream) {
  launch_by_request<&pack_mask_kernel>("pack_tree_mask", params, kPackThreads, stream);
}

}  // namespace attnops::speculation
