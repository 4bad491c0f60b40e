#pragma once
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/fp8/row_block.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// What tiles at the edges of a piece need, in shared memory while others are at work: a stand-in for the piece.
struct Edges {
  int request_, length_, first_token_, first_row_;
  KvRange keys_;
  int joined_;  // whether scales join the exponent

  __device__ __forceinline__ int request() const { return request_; }
  __device__ __forceinline__ int length() const { return length_; }
  __device__ __forceinline__ const KvRange& keys() const { return keys_; }
};

// Where the stream of tiles stands between two pieces.
struct TilePlace {
  int slot;
  uint32_t parity;
  int turn;  // the group that has the next tile
};

// A group's share of a piece's tiles: tiles belong to the groups by turns, over the ends of pieces. Everything here is
// found anew for each piece, so that what lives between pieces takes no registers from the loop.
template <class Tr>
class TileLoop {
 public:
  __device__ __forceinline__ TileLoop(const Params& p, const Shape& shape, uint8_t* smem)
      : p_(p), shape_(shape), smem_(smem), shared_(opaque(hopper::smem_address(smem))) {
    const Thread<Tr> me;
    key_place_ = shared_ + Shared::kRing + key_offset(me.warp, me.lane);
    value_place_ = shared_ + Shared::kRing + value_offset(me.warp, me.lane);
    probs_ = shared_ + Shared::kProbs + me.group * (Tr::kProbBuffers * Tr::kProbBytes);
    both_probs_ = 2 * probs_ + Tr::kProbBytes;
    prob_offset_ = RowBlock<Tr>::prob_offset(me.warp, me.lane);
    scales_ = shared_ + Shared::kScale + me.lane % 4 * 8;
    group_ = __shfl_sync(~0u, me.group, 0);
    first_lane_ = me.lane == 0;
    const uint32_t at = shared_ + Shared::kPlace;
    hopper::load_word(place_.slot, at);
    hopper::load_word(place_.parity, at + 4);
    hopper::load_word(turn_, at + 8);
  }

  // Returns where the next piece begins.
  __device__ __forceinline__ TilePlace run(int tiles, TileRange plain, RowBlock<Tr>& block) {
    const int own = turn_ ^ group_;  // the first tile that is this group's
    if (own < tiles) {
      if (own > 0) skip_tile();
      run(own, tiles, plain, block);
    } else if (tiles > 0) {
      skip_tile();
    }
    return {place_.slot, place_.parity, turn_ ^ (tiles & 1)};
  }

 private:
  using Shared = SharedLayout<Tr>;
  using Scores = typename RowBlock<Tr>::Scores;
  using Scale = typename RowBlock<Tr>::Scale;

  __device__ __forceinline__ void run(int own, int tiles, TileRange plain, RowBlock<Tr>& block) {
    Scores scores;
    uint32_t raw[4][4];
    typename RowBlock<Tr>::Keys keys;
    typename RowBlock<Tr>::Values values;
    take_keys(raw);
    RowBlock<Tr>::multiply_keys(raw, shared_ + Shared::kQueries, keys, scores);
    release();
    int tile = own;
#pragma unroll 1
    while (true) {
      const bool is_plain = static_cast<unsigned>(tile - plain.first) < static_cast<unsigned>(plain.count);
      const Scale scale(scales_);
      hopper::wgmma_wait<0>(scores, block.out[0], block.out[1]);
      if (!is_plain) {
        clear_values(tile);  // with nothing in flight: it calls functions
        treat_edge(tile, scores);
      }
      probs_ = both_probs_ - probs_;
      block.soften(tile == own, scores, scale, probs_ + prob_offset_, kOwn + first_barrier<Tr>() + group_,
                   reinterpret_cast<float*>(smem_ + Shared::kExchange));
      take_values(raw);  // no sooner: registers are short
      block.multiply_values(raw, probs_, values);
      release();
      tile += Tr::kGroups;
      if (tile >= tiles) break;
      skip_tile();
      take_keys(raw);
      block.template wait_for_values<0>();
      RowBlock<Tr>::multiply_keys(raw, shared_ + Shared::kQueries, keys, scores);
      release();
    }
    block.template wait_for_values<0>();
    if (tile == tiles) skip_tile();  // the other group has the piece's last
  }

  // The next keys, on their way to registers. `release` comes once they have been converted: the copy engine's writes
  // are not ordered behind loads that nobody has waited for.
  __device__ __forceinline__ void take_keys(uint32_t (&raw)[4][4]) const {
    place_.wait(shared_ + Shared::kFull);
    load_keys(key_place_ + place_.slot * Tr::kUnitBytes, raw);
  }

  __device__ __forceinline__ void take_values(uint32_t (&raw)[4][4]) const {
    place_.wait(shared_ + Shared::kFull);
    load_values(value_place_ + place_.slot * Tr::kUnitBytes, raw);
  }

  // Zeros for values that nobody sees, before they are taken.
  __device__ __forceinline__ void clear_values(int tile) {
    if constexpr (Tr::kGathers) return;
    const Edges edges = load_edges();
    const uint64_t seen = seen_keys<TreeRules>(p_, edges, edges.first_token_ + tile * Tr::kTileTokens);
    if (seen == kAllSeen) return;
    place_.wait(shared_ + Shared::kFull);
    // All lanes of the group's warps have read what was here before: `release` says so of one lane of each.
    hopper::named_barrier_sync(kOwn + first_barrier<Tr>() + group_, Tr::kGroupThreads);
    RowBlock<Tr>::clear_values(shared_ + Shared::kRing + place_.slot * Tr::kUnitBytes, seen);
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(kOwn + first_barrier<Tr>() + group_, Tr::kGroupThreads);
  }

  __device__ __forceinline__ void treat_edge(int tile, Scores& scores) const {
    Scores copy;
#pragma unroll
    for (int i = 0; i < Tr::kRows / 2; ++i) copy[i] = scores[i];
    treat_edge_scores({p_, shape_}, smem_, tile, copy);
#pragma unroll
    for (int i = 0; i < Tr::kRows / 2; ++i) scores[i] = copy[i];
  }

  // Soft cap and masks. Out of line: it needs more registers than there are beside the loop.
  __device__ __noinline__ static void treat_edge_scores(MaskRules rules, const uint8_t* smem, int tile,
                                                        Scores& scores) {
    const Edges edges = *reinterpret_cast<const Edges*>(smem + Shared::kEdges);
    if (!edges.joined_) {
      const uint32_t scales = hopper::smem_address(smem) + Shared::kRowScale;
      RowBlock<Tr>::scale_scores(rules.logit_cap, Scale(scales + threadIdx.x % 4 * 8), scores);
    }
    RowBlock<Tr>::mask_scores(rules, edges, edges.first_row_, edges.first_token_ + tile * Tr::kTileTokens, scores);
  }

  // Read by every tile that needs them, so that they take no registers from the others.
  __device__ __forceinline__ Edges load_edges() const {
    const uint32_t at = shared_ + Shared::kEdges;
    Edges e;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(e.request_), "=r"(e.length_), "=r"(e.first_token_), "=r"(e.first_row_)
                 : "r"(at));
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(e.keys_.begin), "=r"(e.keys_.end) : "r"(at + 16));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(e.joined_) : "r"(at + 24));
    return e;
  }

  // A warp is done with a unit: all lanes say so where rows are gathered, as in the kernel of 16-bit pages.
  __device__ __forceinline__ void release() {
    hopper::mbarrier_arrive_if(shared_ + Shared::kEmpty + place_.slot * 8, Tr::kGathers || first_lane_);
    place_.advance();
  }

  __device__ __forceinline__ void skip_tile() {
    place_.advance();
    place_.advance();
  }

  const Params& p_;
  const Shape& shape_;
  uint8_t* const smem_;
  const uint32_t shared_;
  uint32_t key_place_, value_place_;  // this lane's, in the ring's first unit
  uint32_t probs_, both_probs_;       // the group's buffer that was written last; the sum of both
  uint32_t prob_offset_, scales_;     // this lane's place in one; its rows' scales
  int group_;
  bool first_lane_;
  RingPlace<Tr> place_;
  int turn_;
};

}  // namespace attnops::xqa_decode::sm90::fp8
