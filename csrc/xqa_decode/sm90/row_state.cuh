#pragma once
#include "device/common/tree_rows.cuh"
#include "device/sm80/mma.cuh"
#include "device/sm90/barrier.cuh"
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// What masks must know of a piece.
struct SeenKeys {
  int request_, length_;
  KvRange keys_;

  __device__ __forceinline__ int request() const { return request_; }
  __device__ __forceinline__ int length() const { return length_; }
  __device__ __forceinline__ const KvRange& keys() const { return keys_; }
};

// What masks must know of a call; by value, as TreeRules.
struct MaskRules : TreeRules {
  bool causal;
  float logit_cap;
  Divisor by_group;

  __device__ __forceinline__ MaskRules(const Params& p, const Shape& shape)
      : TreeRules(p), causal(p.causal), logit_cap(p.logit_cap), by_group(shape.by_group) {}
};

// Which keys a query row may see, but for what a tree hides; the rules are those of the reference. They are a kernel's
// Params and Shape, or a MaskRules as both.
struct RowMask {
  int begin, end, first_draft;
  const uint8_t* tree;

  template <class Rules, class Group, class Piece>
  __device__ __forceinline__ RowMask(const Rules& p, const Group& shape, const Piece& piece, int row) {
    const int token = min_of(shape.by_group.divide(row), p.seqlen_q - 1);
    first_draft = piece.length() - p.tree_keys;
    const int position = piece.length() - p.seqlen_q + token;
    begin = max_of(p.window_left < 0 || p.tree_mask ? 0 : position - p.window_left, piece.keys().begin);
    end = p.causal && !p.tree_mask ? min_of(position + 1, piece.keys().end) : piece.keys().end;
    tree = p.tree_mask ? p.tree_mask + piece.request() * p.tree_mask_stride_request + token * p.tree_mask_stride_token
                       : nullptr;
  }

  __device__ __forceinline__ bool in_range(int key) const { return key >= begin && key < end; }

  // Where the row's window begins, where there is a tree.
  __device__ __forceinline__ int window_begin(const TreeRules& rules) const {
    if (rules.window_left < 0) return begin;
    const int64_t first = tree_window_begin(tree, rules.tree_keys, first_draft, rules.window_left);
    return static_cast<int>(max_of<int64_t>(first, begin));
  }
};

inline constexpr uint64_t kAllSeen = ~uint64_t{0};

// Keys [begin, end) of the 64 from `first_key` on, a bit each.
__device__ __forceinline__ uint64_t keys_in_tile(int begin, int end, int first_key) {
  const int from = min_of(max_of(begin - first_key, 0), 64), count = min_of(end - first_key, 64) - from;
  return count <= 0 ? 0 : kAllSeen >> (64 - count) << from;
}

// What row `row` sees of the tile from `first_key` on, a bit a key. Few instructions, in line and from parameters that
// are constants: a tile that masks cut is mostly a CTA's only one, and neither code nor parameters are in a cache then.
template <class Piece>
__device__ __forceinline__ uint64_t seen_by_row(const Params& p, const Shape& shape, const Piece& piece, int row,
                                                int first_key) {
  const RowMask mask(p, shape, piece, row);
  if (p.tree_mask == nullptr) return keys_in_tile(mask.begin, mask.end, first_key);
  const uint64_t drafts = seen_drafts(mask.tree, p.tree_keys, first_key - mask.first_draft);
  return drafts & keys_in_tile(mask.window_begin(TreeRules(p)), mask.end, first_key);
}

// Which keys of the tile from `first_key` on some row of the request sees, a bit each. For all lanes of a warp.
// `Rules`: TreeRules, or a reference to Params where registers for a call are short.
template <class Rules>
__device__ __noinline__ uint64_t find_seen_keys(Rules p, int request, int first_draft, int begin, int end,
                                                int first_key) {
  uint32_t seen[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 32 * half + static_cast<int>(threadIdx.x % 32);
    bool is_seen = key >= begin && key < end;
    if (is_seen && p.tree_mask && key >= first_draft) {
      is_seen = some_row_sees(TreeRules(p), request, key - first_draft);
    }
    seen[half] = __ballot_sync(~0u, is_seen);
  }
  return uint64_t{seen[1]} << 32 | seen[0];
}

template <class Rules, class Piece>
__device__ __forceinline__ uint64_t seen_keys(const Params& p, const Piece& piece, int first_key) {
  const KvRange keys = piece.keys();
  if (!p.tree_mask && first_key >= keys.begin && first_key + 64 <= keys.end) return kAllSeen;
  return find_seen_keys<Rules>(static_cast<Rules>(p), piece.request(), piece.length() - p.tree_keys, keys.begin,
                               keys.end, first_key);
}

// A thread's warpgroup, of those with rows of their own.
template <class Tr>
__device__ __forceinline__ int own_group() {
  return Tr::kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / Tr::kGroupThreads);
}

template <class Tr>
__device__ __forceinline__ void sync_group() {
  hopper::named_barrier_sync(kMultiply + own_group<Tr>(), Tr::kGroupThreads);
}

// A thread of a warpgroup that multiplies, and where its warps tell each other of their rows.
struct GroupPlace {
  int warp, lane;
  float* exchange;  // float [kWarps][kRows]
};

// What a warpgroup knows of a pass's few query rows over one piece, and how a tile's scores change it. Both products
// are transposed: keys, then output dims, are the M = 64 of the matrix instruction, query rows its N, so that few rows
// waste little. In a lane with g = lane / 4, t = lane % 4 of warp w:
//   scores[4 n + 2 h + i]: key 16 w + g + 8 h of the tile, row 8 n + 2 t + i;
//   out[b][4 n + 2 h + i]: dims of block b that the kernel chooses, the same row.
// All warps of a group hold the same reference maxima; sums are those of a lane's own keys. A `Scale` has at(n, i),
// what a row's scores must be multiplied by.
template <class Tr>
struct RowState {
  static constexpr int kScores = Tr::kRows / 2;
  static constexpr int kOutBlocks = Tr::kHeadDim / 64;
  using Scores = float[kScores];

  float out[kOutBlocks][kScores];
  float reference[Tr::kRowTiles][2];  // in units of log2; kNothingSeen before the first visible key
  float sum[Tr::kRowTiles][2];

  static constexpr float kNothingSeen = -1e30f;  // finite, so that it can be subtracted from a hidden key's -inf

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < kOutBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) out[b][i] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) reference[n][i] = kNothingSeen, sum[n][i] = 0.f;
    }
  }

  // Hides the keys that a row may not see. Those that a tree hides out of line: trees are seldom.
  template <class Piece>
  __device__ __forceinline__ static void mask_scores(const MaskRules& rules, const Piece& piece, int first_row,
                                                     int first_key, Scores& scores) {
    const int own = threadIdx.x / 32 % Tr::kWarps * 16 + threadIdx.x % 32 / 4, own_key = first_key + own;
    const int t = threadIdx.x % 4;
    if (Tr::kRowTiles > 1 && rules.seqlen_q == 1 && rules.tree_mask == nullptr) {  // all rows see the same
      const RowMask mask(rules, rules, piece, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (mask.in_range(own_key + 8 * h)) continue;
#pragma unroll
        for (int n = 0; n < Tr::kRowTiles; ++n) scores[4 * n + 2 * h] = scores[4 * n + 2 * h + 1] = -INFINITY;
      }
      return;
    }
    if (Tr::kRowTiles > 1 && rules.tree_mask == nullptr) {  // a lane finds a row's range for all
      const RowMask mask(rules, rules, piece, first_row + threadIdx.x % 32 % Tr::kRows);
      const auto in_tile = [&](int key) { return min_of(max_of(key - first_key, 0), Tr::kTileTokens); };
      const int range = in_tile(mask.begin) << 8 | in_tile(mask.end);
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int seen = __shfl_sync(~0u, range, 8 * n + 2 * t + i), begin = seen >> 8, end = seen & 255;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (own + 8 * h < begin || own + 8 * h >= end) scores[4 * n + 2 * h + i] = -INFINITY;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowMask mask(rules, rules, piece, first_row + 8 * n + 2 * t + i);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!mask.in_range(own_key + 8 * h)) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
    if (rules.tree_mask == nullptr) return;
    const uint8_t* const tree = rules.tree_mask + piece.request() * rules.tree_mask_stride_request;
    const uint32_t hidden =
        hidden_by_tree(tree, rules.tree_mask_stride_token, rules.tree_keys, rules.window_left, rules.seqlen_q - 1,
                       rules.by_group, first_row + 2 * t, own_key - (piece.length() - rules.tree_keys));
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (hidden >> i & 1) scores[i] = -INFINITY;
    }
  }

  // The row whose keys a lane knows for all lanes, of up to 32.
  __device__ __forceinline__ static int known_row() { return threadIdx.x % 32 % Tr::kRows; }

  // Hides what rows do not see, where a lane has `seen`, what its known row sees of the tile.
  __device__ __forceinline__ static void mask_unseen(uint64_t seen, Scores& scores) {
    static_assert(Tr::kRows <= 32);
    const int lane = threadIdx.x % 32, t = lane % 4;
    const uint32_t of_warp = static_cast<uint32_t>(seen >> threadIdx.x / 32 % Tr::kWarps * 16);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t own = __shfl_sync(~0u, of_warp, 8 * n + 2 * t + i) >> lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!(own >> 8 * h & 1)) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
  }

  // What some row sees.
  __device__ __forceinline__ static uint64_t seen_by_some(uint64_t seen) {
    const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(seen));
    return uint64_t{__reduce_or_sync(~0u, static_cast<uint32_t>(seen >> 32))} << 32 | low;
  }

  // Where a lane's probabilities begin in a buffer of them.
  __device__ __forceinline__ static uint32_t prob_offset(int warp, int lane) {
    const int keys = 16 * warp * 16;
    return Tr::kRowTiles == 1 ? keys + lane * 4 : keys + lane / 16 * (Tr::kTileTokens * 16) + lane % 16 * 16;
  }

  // Turns scores into probabilities in shared memory, at `place` for this lane, visible to the matrix units of the
  // group's warps, and brings the state up to date. The old reference is tried first, and one barrier then both shows
  // the probabilities and tells whether some row must move it: only then `find` is asked for the GroupPlace.
  template <class Scale, class Find>
  __device__ __forceinline__ void soften(bool first, const Scores& scores, const Scale& scale, uint32_t place,
                                         int barrier, const Find& find) {
    float added[Tr::kRowTiles][2];
    if (!first) {
      const float highest = write_probs(scores, scale, place, added);
      hopper::fence_async_proxy();
      if (!hopper::named_barrier_any(barrier, Tr::kGroupThreads, highest > kSlack + Tr::kProbShift)) {
        add(added);
        return;
      }
    }
    move_reference(first, scores, scale, barrier, find());
    write_probs(scores, scale, place, added);
    add(added);
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(barrier, Tr::kGroupThreads);
  }

  // The warp's part of the rows' sums, to where the group's others find it; and the references, where somebody asks for
  // them.
  __device__ __forceinline__ void share_sums(const GroupPlace& me, float* references = nullptr) const {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = sum[n][i];
        x += __shfl_xor_sync(~0u, x, 4);
        x += __shfl_xor_sync(~0u, x, 8);
        x += __shfl_xor_sync(~0u, x, 16);
        if (me.lane >= 4) continue;
        me.exchange[me.warp * Tr::kRows + 8 * n + 2 * me.lane + i] = x;
        if (references && me.warp == 0) references[8 * n + 2 * me.lane + i] = reference[n][i];
      }
    }
  }

  // The whole sum of a row, of those that a group has shared.
  __device__ __forceinline__ static float whole_sum(const float* exchange, int row) {
    const float* part = exchange + row;
    return (part[0] + part[Tr::kRows]) + (part[2 * Tr::kRows] + part[3 * Tr::kRows]);
  }

 private:
  // Which of a lane's scores a tree hides, a bit each. `tree`: the request's mask; `row`: the lane's first; `draft`:
  // what its first key is.
  __device__ __noinline__ static uint32_t hidden_by_tree(const uint8_t* tree, int64_t stride_token, int tree_keys,
                                                         int window_left, int last_token, Divisor by_group, int row,
                                                         int draft) {
    static_assert(kScores <= 32);
    const auto row_of = [&](int n, int i) {
      return tree + min_of(by_group.divide(row + 8 * n + i), last_token) * stride_token;
    };
    const int last = (tree_keys - 1) / 8;
    uint32_t bytes[Tr::kRowTiles][2][2];
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {  // all are asked for before one is looked at
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) bytes[n][i][h] = row_of(n, i)[min_of(max_of((draft >> 3) + h, 0), last)];
      }
    }
    uint32_t hidden = 0;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (draft + 8 * h >= 0 && !(bytes[n][i][h] >> (draft & 7) & 1)) hidden |= 1u << (4 * n + 2 * h + i);
        }
      }
    }
    if (window_left < 0) return hidden;
#pragma unroll 1
    for (int j = 0; j < 2 * Tr::kRowTiles; ++j) {
      const int64_t begin = tree_window_begin(row_of(j / 2, j % 2), tree_keys, 0, window_left);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (draft + 8 * h < begin) hidden |= 1u << (4 * (j / 2) + 2 * h + j % 2);
      }
    }
    return hidden;
  }

  __device__ __forceinline__ void add(const float (&added)[Tr::kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] += added[n][i];
    }
  }

  // Returns the highest exponent.
  template <class Scale>
  __device__ __forceinline__ float write_probs(const Scores& scores, const Scale& scale, uint32_t place,
                                               float (&added)[Tr::kRowTiles][2]) const {
    float highest = -INFINITY;
    uint32_t packed[Tr::kRowTiles][2];
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = fmaf(scores[4 * n + i], scale.at(n, i & 1), Tr::kProbShift - reference[n][i & 1]);
        highest = fmaxf(highest, x[i]);
        x[i] = exp2_approx(x[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) added[n][i] = x[i] + x[i + 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) packed[n][h] = hopper::pack_pair<typename Tr::T>(x[2 * h], x[2 * h + 1]);
    }
    if constexpr (Tr::kRowTiles == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + h * 128), "r"(packed[0][h]) : "memory");
      }
    } else {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; n += 2) {
        const uint32_t four[4] = {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]};
        hopper::store_fragment(four, place + n * (Tr::kTileTokens * 16));
      }
    }
    return highest;
  }

  // Moves the reference to the true maximum of what the group has seen; `first`: there are no sums yet.
  template <class Scale>
  __device__ __forceinline__ void move_reference(bool first, const Scores& scores, const Scale& scale, int barrier,
                                                 const GroupPlace& me) {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = scale.at(n, i) * fmaxf(scores[4 * n + i], scores[4 * n + 2 + i]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        if (me.lane < 4) me.exchange[me.warp * Tr::kRows + 8 * n + 2 * me.lane + i] = top;
      }
    }
    hopper::named_barrier_sync(barrier, Tr::kGroupThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float before = reference[n][i];
        float after = before;
#pragma unroll
        for (int w = 0; w < Tr::kWarps; ++w) {
          after = fmaxf(after, me.exchange[w * Tr::kRows + 8 * n + me.lane % 4 * 2 + i]);
        }
        reference[n][i] = after;
        if (first) continue;
        const float factor = exp2_approx(before - after);
        sum[n][i] *= factor;
#pragma unroll
        for (int b = 0; b < kOutBlocks; ++b) {
          out[b][4 * n + i] *= factor;
          out[b][4 * n + 2 + i] *= factor;
        }
      }
    }
  }
};

}  // namespace attnops::xqa_decode::sm90
