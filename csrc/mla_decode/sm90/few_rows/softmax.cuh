#pragma once
#include <cmath>

#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_few.cuh"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/softmax.cuh"

// The softmax of a transposed tile of scores, [64 keys, kSoftmaxRows queries], by one warpgroup. A warp holds a quarter
// of the keys, a thread lane / 4 and lane / 4 + 8 of its sixteen, and of each the queries 8 j + 2 (lane % 4) + {0, 1}:
// element 4 j + 2 h + e of its fragment.
namespace attnops::mla_decode::sm90::few_rows {

// Query number 2 j + e of a thread.
__device__ inline int query_of(int i) { return i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2; }
__device__ constexpr int element_of(int i, int h) { return i / 2 * 4 + 2 * h + i % 2; }
__device__ inline int key_of(int h) { return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

// Of the scores of keys that there are not.
template <class At, int kCount, class Scores>
__device__ inline void mask_unlisted(uint32_t listed, Scores& s) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (listed >> h & 1) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[element_of(i, h)] = -INFINITY;
  }
}

// The largest of the eight lanes that hold the same queries.
__device__ inline float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

__device__ inline float column_sum(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// Keys that all query rows of a piece see, before a tree mask and the checked mode have their say.
__device__ inline KvRange keys_of_all_rows(const Params& p, const Piece& piece) {
  const int first = piece.length - p.seqlen_q;  // position of the first query token
  const int last_begin = p.window_left < 0 ? 0 : max_of(piece.length - 1 - p.window_left, 0);
  const int end = !p.causal ? piece.length : p.tree_mask ? piece.length - p.tree_keys : first + 1;
  return {last_begin, min_of(end, piece.keys.end)};
}

// Whether query token `token` sees the key.
__device__ inline bool sees(const Params& p, const Piece& piece, int token, int key) {
  const int first = piece.length - p.seqlen_q, position = first + token;
  if (key >= piece.keys.end) return false;
  if (p.tree_mask == nullptr) {
    return (p.window_left < 0 || key >= position - p.window_left) && (!p.causal || key <= position);
  }
  const int first_draft = piece.length - p.tree_keys, draft = key - first_draft;
  if (p.window_left >= 0 && key < draft_window_begin(p, piece.request, token, first_draft)) return false;
  if (draft < 0) return true;
  const uint8_t* row = p.tree_mask + piece.request * p.tree_mask_stride_request + token * p.tree_mask_stride_token;
  return row[draft / 8] >> (draft % 8) & 1;
}

// Whether each query row sees all keys up to an end of its own.
__device__ inline bool sees_to_an_end(const Params& p) {
  return p.tree_mask == nullptr && p.window_left < 0 && p.report == nullptr;
}

// Masks a tile of keys where that is so; `first_row` is that of the thread's queries. A piece ends with such a tile.
template <int kCount>
__device__ inline void mask_ends(const Params& p, const Piece& piece, int first_row, int first_key,
                                 float (&s)[2 * kCount]) {
  const int first = piece.length - p.seqlen_q + 1 - first_key - key_of(0),
            last = piece.keys.end - first_key - key_of(0);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = min_of(first_row + query_of(i), piece.num_rows - 1);  // spare rows see what the last one sees
    const int end = p.causal ? min_of(first + row_place(p, piece.first_row + row).token, last) : last;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= end) s[element_of(i, h)] = -INFINITY;
    }
  }
}

// Checked mode: whether the key's page exists. The loading warps report it when not.
__device__ inline bool has_page(const Params& p, const Piece& piece, int key) {
  if (key < piece.keys.begin || key >= piece.keys.end) return false;
  return p.page_table.has_page(p.page_table.row(piece.request)[key / p.page_table.page_size]);
}

// Takes the maxima of all warps, which meet at `barrier`; the thread's references follow where these are too far above
// them. `maxima` and `factors` are of the group's rows.
template <class At, int kCount>
__device__ inline void move_references(const float (&top)[kCount], float (&reference)[kCount], float (&sum)[kCount],
                                       float* maxima, float* factors, uint32_t barrier) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float most = column_max(top[i]);
    if (lane < 4) maxima[warp * At::kRows + query_of(i)] = most;
  }
  // Not a hardware barrier, of which all warps pass the same number: compute-sanitizer's racecheck goes by that.
  attnops::sm90::mbarrier_meet(barrier);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float* all = maxima + query_of(i);
    const float most = fmaxf(fmaxf(all[0], all[At::kRows]), fmaxf(all[2 * At::kRows], all[3 * At::kRows]));
    const float before = reference[i], after = most > before + kSlack ? most : before;
    const float factor = rescale_factor(before, after);
    reference[i] = after;
    sum[i] *= factor;
    if (thread < 4) factors[query_of(i)] = factor;
  }
}

// Leaves what all warps must know of the thread's rows in shared memory, of the group's rows.
template <class At, int kCount>
__device__ inline void publish_states(const float (&reference)[kCount], const float (&sum)[kCount], float* sums,
                                      float* references) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float total = column_sum(sum[i]);
    if (lane < 4) sums[warp * At::kRows + query_of(i)] = total;
    if (thread < 4) references[query_of(i)] = reference[i];
  }
}

// Gives the other group its half of the rows of scores, and completes the own half. `halves`: float4
// [2][kRows / 16][kGroupThreads]; `meet` is a barrier of both groups.
template <class At, class Meet>
__device__ inline void exchange_halves(float4* halves, int group, const float (&s)[At::kRows / 2],
                                       float (&own)[At::kSoftmaxRows / 2], const Meet& meet) {
  constexpr int kHalf = At::kSoftmaxRows / 2, kVecs = kHalf / 4;
  halves += threadIdx.x % kGroupThreads;
  float given[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    given[i] = group == 0 ? s[kHalf + i] : s[i];
    own[i] = group == 0 ? s[i] : s[kHalf + i];
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    halves[((1 - group) * kVecs + v) * kGroupThreads] = {given[4 * v], given[4 * v + 1], given[4 * v + 2],
                                                         given[4 * v + 3]};
  }
  meet();
  float4 other[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) other[v] = halves[(group * kVecs + v) * kGroupThreads];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    own[4 * v] += other[v].x;
    own[4 * v + 1] += other[v].y;
    own[4 * v + 2] += other[v].z;
    own[4 * v + 3] += other[v].w;
  }
}

// Running state of a thread's queries, in the base-2 logarithm. All threads with the same queries hold the same
// reference maximum; the sums are of this thread's keys.
template <class At>
struct Softmax {
  static constexpr int kCount = At::kSoftmaxRows / 4;
  using Scores = float[At::kSoftmaxRows / 2];
  float reference[kCount], sum[kCount];
  float most[kCount];  // of lists: the largest scores of this thread's keys
  KvRange clear;       // keys that need no mask
  const int group;

  __device__ explicit Softmax(int group) : group(group) {}

  __device__ void begin(const Params& p, const Piece& piece) {
    clear = keys_of_all_rows(p, piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      reference[i] = -INFINITY;
      sum[i] = 0.f;
      if constexpr (At::kSelects) most[i] = -INFINITY;
    }
  }

  // Raw scores to probabilities of keys [first_key, first_key + 64) under the reference, which may move: then the
  // factors of what was accumulated before are left in shared memory, and the answer is true. `listed` is of lists.
  __device__ bool tile(const Params& p, const Piece& piece, int first_key, Scores& s, uint32_t listed, uint8_t* base,
                       uint32_t shared) {
    float scale = p.softmax_scale * kLog2e;
    if (p.logit_cap > 0.f || scale <= 0.f) {
      const float cap = p.logit_cap * kLog2e, inner = p.logit_cap > 0.f ? p.softmax_scale / p.logit_cap : 0.f;
#pragma unroll
      for (float& x : s) x = p.logit_cap > 0.f ? soft_capped(x * inner, cap) : x * scale;
      scale = 1.f;
    }
    if constexpr (At::kSelects) {
      mask_unlisted<At, kCount>(listed, s);
    } else if (first_key < clear.begin || first_key + kPlanTileTokens > clear.end || p.report) {
      if (sees_to_an_end(p)) {
        mask_ends<kCount>(p, piece, At::first_softmax_row(group), first_key, s);
      } else {
        mask(p, piece, first_key, s);
      }
    }
    bool above = false;
    float top[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      top[i] = scale * fmaxf(s[element_of(i, 0)], s[element_of(i, 1)]);
      above |= top[i] > reference[i] + kSlack;
      if constexpr (At::kSelects) most[i] = fmaxf(most[i], top[i]);
    }
    const bool moved = attnops::sm90::named_barrier_or(kGroup0 + group, kGroupThreads, above);
    if (moved) move_reference(top, base, shared);
    if (threadIdx.x % kGroupThreads == 0) reinterpret_cast<int*>(base + At::kMoved)[group] = moved;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float below = reference[i] == -INFINITY ? 0.f : reference[i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s[element_of(i, h)];
        x = exp2_fast(fmaf(x, scale, -below));
        sum[i] += x;
      }
    }
    return moved;
  }

 private:
  __device__ void mask(const Params& p, const Piece& piece, int first_key, Scores& s) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + key_of(h);
      const bool there = p.report == nullptr || has_page(p, piece, key);
      uint32_t seen = 0;  // a bit per query, by a loop that is small: most tiles need none
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int row = min_of(At::first_softmax_row(group) + query_of(i),
                               piece.num_rows - 1);  // spare rows see what the last one sees
        seen |= static_cast<uint32_t>(there && sees(p, piece, row_place(p, row).token, key)) << i;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(seen >> i & 1)) s[element_of(i, h)] = -INFINITY;
      }
    }
  }

  __device__ void move_reference(const float (&top)[kCount], uint8_t* base, uint32_t shared) {
    float* maxima = reinterpret_cast<float*>(base + At::kMaxima) + At::first_softmax_row(group);
    float* factors = reinterpret_cast<float*>(base + At::kFactor) + At::first_softmax_row(group);
    move_references<At>(top, reference, sum, maxima, factors, shared + At::kMoveBarriers + 8 * group);
  }
};

}  // namespace attnops::mla_decode::sm90::few_rows
