#pragma once
#include "xqa_decode/sm90/epilogue.cuh"

namespace attnops::xqa_decode::sm90 {

// Batch-invariant sums. A work is cut into leaves by its own length alone; every leaf is attended by itself, and their
// results are combined in a binary tree over the leaves' numbers: node (start, level) holds leaves [start, start +
// 2^level), as far as there are so many. Whoever combines two nodes, and wherever they come from, the bits are the
// same: so a request may be divided over few CTAs or many, in clusters or by the plan, as suits the batch.

// What two nodes' values are weighted with, by the natural logs of their sums.
struct PairWeights {
  float first, second, lse;
};

// Each operation is rounded by itself, whatever the compiler finds around it, and the two may be swapped. Beside a node
// that saw no key, or is not there (lse -inf, values 0), the other stays as it is: its weight is exactly 1.
__device__ __forceinline__ PairWeights weights_of(float first, float second) {
  const float top = fmaxf(first, second);
  const float distance = top == -INFINITY ? INFINITY : fabsf(__fsub_rn(first, second));
  const float lesser = exp2_approx(__fmul_rn(distance, -kLog2e)), sum = __fadd_rn(1.f, lesser);
  float inverse, log2_sum;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2_sum) : "f"(sum));
  const float other = __fmul_rn(lesser, inverse);
  return {first >= second ? inverse : other, first >= second ? other : inverse, __fmaf_rn(log2_sum, kLn2, top)};
}

__device__ __forceinline__ float weighted_pair(const PairWeights& weights, float first, float second) {
  return __fadd_rn(__fmul_rn(weights.first, first), __fmul_rn(weights.second, second));
}

// One row's share of a node: N of its values.
template <int N>
__device__ __forceinline__ void combine_row(float& lse, float (&values)[N], float other_lse, const float (&other)[N]) {
  const PairWeights weights = weights_of(lse, other_lse);
  lse = weights.lse;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = weighted_pair(weights, values[i], other[i]);
}

// A root's value before it goes to the output: zeros lose their sign, which a weight of 1 may keep or not.
__device__ __forceinline__ float root_value(float value) { return __fadd_rn(value, 0.f); }

// Some values of a row, for those who combine what others made.
template <int kQuads>
struct NodeItem {
  float lse = -INFINITY;
  float values[4 * kQuads] = {};

  __device__ __forceinline__ void combine(const NodeItem& other) { combine_row(lse, values, other.lse, other.values); }
  __device__ __forceinline__ void set(int quad, float4 v) {
    values[4 * quad] = v.x, values[4 * quad + 1] = v.y, values[4 * quad + 2] = v.z, values[4 * quad + 3] = v.w;
  }
  __device__ __forceinline__ float4 quad(int i) const {
    return make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
  }
  __device__ __forceinline__ NodeItem shuffled(int lanes) const {
    NodeItem other;
    other.lse = __shfl_xor_sync(~0u, lse, lanes);
#pragma unroll
    for (int i = 0; i < 4 * kQuads; ++i) other.values[i] = __shfl_xor_sync(~0u, values[i], lanes);
    return other;
  }
};

// The tree above N neighbouring nodes, N a power of two; the result is in the first.
template <int N, int kQuads>
__device__ __forceinline__ void combine_all(NodeItem<kQuads> (&nodes)[N]) {
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2 * step) nodes[i].combine(nodes[i + step]);
  }
}

// Where a walk up the tree stands that meets the nodes of leaves [begin, end) of a work of `count`, in order: left
// siblings wait for right ones. Nodes of level `cap` are handed out even if their parents are within [begin, end).
struct TreeWalk {
  int begin, end, count, cap;
  int start = 0, level = 0;

  // Goes up from node (start, level) as far as it may. `keep(level)` puts the node at hand aside, `combine(level)` adds
  // the one that waits there to it. True if the node at hand is one to hand out.
  template <class Keep, class Combine>
  __device__ __forceinline__ bool climb(int from, int from_level, const Keep& keep, const Combine& combine) {
    start = from, level = from_level;
#pragma unroll 1
    for (;; ++level) {
      const int size = 1 << level;
      if (start & size) {
        if (level >= cap || start - size < begin) return true;
        combine(level);
        start -= size;
      } else if (start + size < count) {
        if (level >= cap || min_of(start + 2 * size, count) > end) return true;
        keep(level);
        return false;
      } else if (start == 0) {
        return true;
      }
    }
  }

  __device__ int node_end() const { return min_of(start + (1 << level), count); }
  __device__ bool is_root() const { return start == 0 && node_end() == count; }
};

// The leaves that one CTA makes, in order. The node at hand is in the registers of its RowState: mean values in `out`
// and the lse of each row in `reference`. What waits, waits in registers (level 0) or in shared memory, where each
// thread has a place of its own for what it holds.
template <class Tr>
class Fold {
 public:
  __device__ __forceinline__ Fold(uint8_t* smem, int begin, int end, int count, int cap)
      : walk_{begin, end, count, cap}, waiting_(smem + SharedLayout<Tr>::kFold), next_(begin) {}

  // Turns the attended leaf, whose sums are added up, into a node and goes up the tree. True if the node at hand is one
  // to hand out.
  __device__ __forceinline__ bool take(RowState<Tr>& block) {
    finish(block);
    return walk_.climb(next_++, 0, [&](int level) { keep(block, level); }, [&](int level) { combine(block, level); });
  }

  // From the sums of an attended leaf to its node.
  __device__ __forceinline__ static void finish(RowState<Tr>& block) {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowEnd end = end_of(block, n, i);
        block.reference[n][i] = end.lse;
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& value = block.out[b][4 * n + 2 * h + i];
            value = end.factor == 0.f ? 0.f : __fmul_rn(end.factor, value);  // a row that saw no key may hold NaN
          }
        }
      }
    }
  }

  __device__ const TreeWalk& walk() const { return walk_; }

  __device__ __forceinline__ static void end_root(RowState<Tr>& block) {
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (float& value : block.out[b]) value = root_value(value);
    }
  }

 private:
  static constexpr int kQuads = Tr::kBlocks * Tr::kRowTiles;
  static_assert(Tr::kFoldLevels >= 1);

  __device__ __forceinline__ float4* values_at(int level) const {
    return reinterpret_cast<float4*>(waiting_ + (level - 1) * Tr::kFoldLevelBytes) + threadIdx.x;
  }
  __device__ __forceinline__ float2* lse_at(int level) const {
    return reinterpret_cast<float2*>(waiting_ + (level - 1) * Tr::kFoldLevelBytes + kQuads * Tr::kThreads * 16) +
           threadIdx.x;
  }

  __device__ __forceinline__ void keep(const RowState<Tr>& block, int level) {
    if (level == 0) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
        lse_[n] = make_float2(block.reference[n][0], block.reference[n][1]);
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) values_[n * Tr::kBlocks + b] = quad(block, n, b);
      }
      return;
    }
    if constexpr (Tr::kFoldLevels > 1) {
      float4* values = values_at(level);
      float2* lse = lse_at(level);
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
        lse[n * Tr::kThreads] = make_float2(block.reference[n][0], block.reference[n][1]);
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) values[(n * Tr::kBlocks + b) * Tr::kThreads] = quad(block, n, b);
      }
    }
  }

  __device__ __forceinline__ static float4 quad(const RowState<Tr>& block, int n, int b) {
    return make_float4(block.out[b][4 * n], block.out[b][4 * n + 1], block.out[b][4 * n + 2], block.out[b][4 * n + 3]);
  }

  __device__ __forceinline__ void combine(RowState<Tr>& block, int level) const {
    float4 other[kQuads];
    float2 other_lse[Tr::kRowTiles];
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      other_lse[n] = lse_[n];
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) other[n * Tr::kBlocks + b] = values_[n * Tr::kBlocks + b];
    }
    if constexpr (Tr::kFoldLevels > 1) {
      if (level > 0) {
#pragma unroll
        for (int n = 0; n < Tr::kRowTiles; ++n) {
          other_lse[n] = lse_at(level)[n * Tr::kThreads];
#pragma unroll
          for (int b = 0; b < Tr::kBlocks; ++b) {
            other[n * Tr::kBlocks + b] = values_at(level)[(n * Tr::kBlocks + b) * Tr::kThreads];
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const PairWeights weights = weights_of(block.reference[n][i], i == 0 ? other_lse[n].x : other_lse[n].y);
        block.reference[n][i] = weights.lse;
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
          const float4 v = other[n * Tr::kBlocks + b];
          float& first = block.out[b][4 * n + i];
          float& second = block.out[b][4 * n + 2 + i];
          first = weighted_pair(weights, first, i == 0 ? v.x : v.y);
          second = weighted_pair(weights, second, i == 0 ? v.z : v.w);
        }
      }
    }
  }

  TreeWalk walk_;
  uint8_t* const waiting_;
  int next_;
  float4 values_[kQuads];
  float2 lse_[Tr::kRowTiles];
};

}  // namespace attnops::xqa_decode::sm90
