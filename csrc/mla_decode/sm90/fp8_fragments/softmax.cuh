#pragma once
#include <cmath>

#include "mla_decode/sm90/few_rows/softmax.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"

// The softmax of a transposed tile of scores, [64 keys, kSoftmaxRows queries], by one warpgroup, as in
// few_rows/softmax.cuh but for two things: the scores of each row have a scale of their own, and probabilities are
// rounded to fp16, so they are multiplied by 2^kLift, which a row sum undoes.
namespace attnops::mla_decode::sm90::fp8_fragments {

using few_rows::column_max;
using few_rows::column_sum;
using few_rows::element_of;
using few_rows::key_of;
using few_rows::mask_unlisted;
using few_rows::query_of;

// The reference maximum may be 2^kSlack behind: below 2^15 all the same.
inline constexpr float kLift = 7.f;
static_assert(kLift + kSlack <= 15.f);

// Of lists: which of the thread's two keys there are, bits h, as the loading warp of its keys has left it.
template <class At>
__device__ inline uint32_t listed_keys(const uint8_t* base, int slot) {
  if constexpr (At::kOptions != Options::kSelected) return 3;
  const int warp = threadIdx.x % kGroupThreads / 32, key = threadIdx.x % 32 / 4;
  const uint32_t keys = reinterpret_cast<const volatile uint16_t*>(base + At::kListed)[4 * slot + warp] >> key;
  return (keys & 1) | (keys >> 7 & 2);
}

// Which of the warpgroups that multiply a thread is in.
struct Place {
  int team, group;
  __device__ Place() {
    const int number = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
    team = number / kGroups, group = number % kGroups;
  }
  __device__ int number() const { return team * kGroups + group; }
  __device__ int own_barrier() const { return kOwn + number(); }
};

// Running state of a thread's queries, in the base-2 logarithm. All threads with the same queries hold the same
// reference maximum; the sums are of this thread's keys.
template <class At>
struct Softmax {
  static constexpr int kCount = At::kSoftmaxRows / 4;
  using Scores = float[At::kSoftmaxRows / 2];
  float reference[kCount], sum[kCount];
  float scale[kCount];  // of raw scores, to the base-2 logarithm
  KvRange clear;        // keys that need no mask
  Place place;

  __device__ int first_row() const { return place.group * At::kSoftmaxRows; }
  __device__ uint8_t* state(uint8_t* base) const { return base + At::kStates + place.team * At::kStateBytes; }

  __device__ void begin(const Params& p, const Piece& piece, const uint8_t* base, float kv_scale) {
    clear = few_rows::keys_of_all_rows(p, piece);
    const float* query_scale = reinterpret_cast<const float*>(base + At::kQueryScale) + first_row();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      reference[i] = -INFINITY;
      sum[i] = 0.f;
      scale[i] = query_scale[query_of(i)] * (p.softmax_scale * kv_scale * kLog2e);
    }
  }

  // Raw scores to probabilities of keys [first_key, first_key + 64) under the reference, which may move: then the
  // factors of what was accumulated before are left in shared memory, with the news that they are there. Where keys
  // have scales, `weight` is the base-2 logarithm of the largest of a key: the reference is one for probabilities times
  // scales, which must stay in the range of fp16.
  __device__ void tile(const Params& p, const Piece& piece, int first_key, Scores& s, const float (&weight)[2],
                       uint32_t listed, uint8_t* base, uint32_t shared) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[element_of(i, 0)] *= scale[i];
      s[element_of(i, 1)] *= scale[i];
    }
    if (p.logit_cap > 0.f) cap_scores(p, s);
    if constexpr (At::kOptions == Options::kSelected) {
      mask_unlisted<At, kCount>(listed, s);
    } else if (first_key < clear.begin || first_key + kPlanTileTokens > clear.end || p.report) {
      if (few_rows::sees_to_an_end(p)) {
        few_rows::mask_ends<kCount>(p, piece, first_row(), first_key, s);
      } else {
        mask(p, piece, first_key, s);
      }
    }
    bool above = false;
    float top[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float x = s[element_of(i, 0)], y = s[element_of(i, 1)];
      if constexpr (At::kScaled) x += weight[0], y += weight[1];
      top[i] = fmaxf(x, y);
      above |= top[i] > reference[i] + kSlack;
    }
    const bool moved = attnops::sm90::named_barrier_or(place.own_barrier(), kGroupThreads, above);
    if (moved) move_reference(top, base, shared);
    if (threadIdx.x % kGroupThreads == 0) reinterpret_cast<int*>(state(base) + At::kMoved)[place.group] = moved;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float below = (reference[i] == -INFINITY ? 0.f : reference[i]) - kLift;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s[element_of(i, h)];
        x = exp2_fast(x - below);
        sum[i] += x;
      }
    }
  }

 private:
  __device__ static void cap_scores(const Params& p, Scores& s) {
    const float cap = p.logit_cap * kLog2e, inner = kLn2 / p.logit_cap;
#pragma unroll
    for (float& x : s) x = soft_capped(x * inner, cap);
  }

  __device__ void mask(const Params& p, const Piece& piece, int first_key, Scores& s) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + key_of(h);
      const bool there = p.report == nullptr || few_rows::has_page(p, piece, key);
      uint32_t seen = 0;  // a bit per query, by a loop that is small: most tiles need none
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int row = min_of(first_row() + query_of(i), piece.num_rows - 1);  // spare rows see what the last one sees
        const int token = row_place(p, piece.first_row + row).token;
        seen |= static_cast<uint32_t>(there && few_rows::sees(p, piece, token, key)) << i;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(seen >> i & 1)) s[element_of(i, h)] = -INFINITY;
      }
    }
  }

  __device__ void move_reference(const float (&top)[kCount], uint8_t* base, uint32_t shared) {
    float* maxima = reinterpret_cast<float*>(state(base) + At::kMaxima) + first_row();
    float* factors = reinterpret_cast<float*>(state(base) + At::kFactor) + first_row();
    few_rows::move_references<At>(top, reference, sum, maxima, factors,
                                  shared + At::kMoveBarriers + 8 * place.number());
  }
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
