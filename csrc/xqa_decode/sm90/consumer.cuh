#pragma once
#include "device/sm80/cp_async.cuh"
#include "xqa_decode/sm90/epilogue.cuh"
#include "xqa_decode/sm90/fp8/queries.cuh"
#include "xqa_decode/sm90/merge_items.cuh"
#include "xqa_decode/sm90/parked_walk.cuh"
#include "xqa_decode/sm90/query_copy.cuh"
#include "xqa_decode/sm90/staged_rows.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90 {

// Whether a tile's softmax may run beside the product with the values before.
template <class Tr>
constexpr bool overlaps_softmax() {
  return requires { requires Block<Tr>::kOverlaps; };
}

// Two warpgroups of three that merge, as many threads as a power of two.
struct MergingGroups {
  static constexpr int kThreads = 256;
  static __device__ __forceinline__ unsigned thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { hopper::named_barrier_sync(kMerge, kThreads); }
};
template <class Tr>
using Merging = std::conditional_t<Tr::kGroups == 3, MergingGroups, MergingCta<Tr::kThreads>>;

// What the warpgroup that multiplies does with the part's pieces.
template <class Tr>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem)
      : p_(p),
        shape_(shape),
        boxes_(boxes),
        smem_(smem),
        shared_(hopper::smem_address(smem)),
        row_block_(Tr::kRows < 64 || boxes.row_blocks == 1 ? 0 : static_cast<int>(blockIdx.x) % boxes.row_blocks),
        queries_(shared_ + Shared::kQueries + own_group<Tr>() * kGroupQueryBytes),
        exchange_(reinterpret_cast<float*>(smem + Shared::kExchange)) {}

  template <class Pieces>
  __device__ __forceinline__ void run(Pieces& piece) {
    bool fetched = false;                                 // this piece's queries are on their way
    if (own_group<Tr>() == Tr::kGroups - 1) pass_turn();  // the first turn is group 0's
    do {
      WorkPlace place = place_of(piece);
      if (piece.overflows()) {
        if (piece.starts_work() && piece.last_row_block()) {
          store_nan(p_, shape_, place, piece.splits(), Tr::kThreads);
        }
        cp_async_wait<0>();
        fetched = false;
        continue;
      }
      int first_row = first_row_of(piece.row_block());
      Block<Tr> block;
      if constexpr (Tr::kFetchesAhead && Tr::kFp8) {
        const fp8::Queries<Tr> rows(p_, shape_, boxes_, smem_);
        if (!fetched) rows.fetch(place, first_row);
        begin_fp8(place, first_row, block, false);
        piece.look_ahead([&](int request, int kv_head, int row_block) {
          rows.fetch({0, request, kv_head}, first_row_of(row_block));
        });
        fetched = true;
      } else if constexpr (Tr::kFetchesAhead) {
        begin(place, first_row, block, fetched);
        fetched = false;
        piece.look_ahead([&](int request, int kv_head, int row_block) {
          copy_queries<Tr>(p_, shape_, boxes_, {0, request, kv_head}, first_row_of(row_block), other_queries());
          fetched = true;
        });
        cp_async_commit();
      } else {
        begin(place, first_row, block, piece.continues_run());
      }
      if constexpr (Tr::kParksWalk) {
        const PlacedKeys keys(piece);
        const int tiles = num_tiles(piece);
        park_walk<Tr>(shared_, piece);
        attend_keys(keys, tiles, first_row, block);
        if constexpr (!Tr::kEndsOnce) {
          block.add_up(exchange_);  // the group meets
        } else if (tiles == 0) {
          sync_group<Tr>();
        }
        take_walk_back<Tr>(shared_, piece);
        place = place_of(piece), first_row = first_row_of(piece.row_block());
      } else {
        attend_keys(piece, num_tiles(piece), first_row, block);
        if constexpr (!Tr::kEndsOnce) block.add_up(exchange_);
      }
      if constexpr (Tr::kFetchesAhead && !Tr::kFp8) queries_ = other_queries();
      const Splits splits = piece.splits();
      float* const factors = reinterpret_cast<float*>(smem_ + Shared::kFactors);
      if constexpr (Tr::kEndsOnce) {
        const int64_t slot = splits.count == 1 ? -1 : splits.slot(splits.index);
        end_rows(p_, shape_, place, block, first_row, slot, exchange_, factors);
      }
      if (splits.count == 1) {
        if constexpr (Tr::kEndsOnce) {
          store_rows(p_, shape_, boxes_, place, block, first_row, stage_of_rows(), factors);
          if constexpr (!Tr::kFetchesAhead) sync_group<Tr>();  // the next queries come there at once
        } else if constexpr (Tr::kStagesRows) {
          store_rows(p_, shape_, boxes_, place, block, first_row, stage_of_rows());
          if constexpr (!Tr::kFetchesAhead) sync_group<Tr>();  // the next queries come there at once
        } else {
          store_rows(p_, shape_, place, block, first_row);
        }
        continue;
      }
      if constexpr (Tr::kEndsOnce) {
        store_partials(p_, shape_, block, first_row, splits.slot(splits.index), factors);
        if constexpr (Tr::kFp8) sync_group<Tr>();  // the next scales come there
      } else {
        store_partials(p_, shape_, block, first_row, splits.slot(splits.index));
      }
      if (!piece.last_row_block() || splits.arrivals == 0) continue;
      sync_threads<Tr::kThreads>();
      if (Tr::kGroups <= 2 || own_group<Tr>() < 2) {
        merge_items_after_sync<Merging<Tr>, Tr::kMergeBatch, (Tr::kRows > 16), is_ragged<Tr>()>(
            p_, shape_, place, splits, piece.is_last(), reinterpret_cast<MergeFlag*>(smem_ + Shared::kFlag),
            reinterpret_cast<float*>(smem_ + Shared::kMergeScratch));
      }
      // The next queries or probabilities lie where the merge has its scratch.
      if constexpr (Tr::kGroups > 1) {
        sync_threads<Tr::kThreads>();
      } else {
        sync_group<Tr>();
      }
      if constexpr (Tr::kParksWalk) take_walk_back<Tr>(shared_, piece);
    } while (piece.next());
    if (own_group<Tr>() == 0) take_turn();
  }

  // The rows, before any key. Their queries may lie there still.
  __device__ __forceinline__ void begin(const WorkPlace& place, int first_row, Block<Tr>& block,
                                        bool queries_are_there = false) const {
    if constexpr (Tr::kFp8) {
      begin_fp8(place, first_row, block, queries_are_there);
    } else {
      if (!queries_are_there) {
        copy_queries<Tr>(p_, shape_, boxes_, place, first_row, queries());
      }
      cp_async_commit();
      block.begin(score_scale(place), p_.logit_cap);
      cp_async_wait<0>();
      hopper::fence_async_proxy();
      sync_group<Tr>();
    }
    if constexpr (Tr::kKeepsQueries) block.load_queries(queries());
  }

  // All keys of a piece, and the sums of its rows.
  template <class Piece>
  __device__ __forceinline__ void attend(const Piece& piece, int first_row, Block<Tr>& block) {
    attend_keys(piece, num_tiles(piece), first_row, block);
    block.add_up(exchange_);
  }

  template <class Piece>
  __device__ __forceinline__ void attend_keys(const Piece& piece, int tiles, int first_row, Block<Tr>& block) {
    if (tiles > 0) {
      multiply_keys(block, scores_);
      attend_tiles(piece, first_row, 0, tiles, block);
      const RingPlace<Tr> values = multiply_values(block);
      block.template wait_for_values<0>();
      release(values);
    }
  }

  // The same of a piece that is divided every `leaf_tiles` tiles: `end_leaf` is called with each leaf's rows, whose
  // sums are added up, and with those of `empty` leaves behind, which hold no key: only of a length beyond the page
  // table.
  template <class Piece, class EndLeaf>
  __device__ __forceinline__ void attend_leaves(const Piece& piece, int leaf_tiles, int empty, Block<Tr>& block,
                                                const EndLeaf& end_leaf) {
    const int tiles = num_tiles(piece);
    float* const sums = reinterpret_cast<float*>(smem_ + Shared::kFoldSums);
    if (tiles > 0) {
      multiply_keys(block, scores_);
      int tile = 0;
#pragma unroll 1
      for (; tile + leaf_tiles < tiles; tile += leaf_tiles) {
        attend_tiles(piece, 0, tile, tile + leaf_tiles, block);
        // The first scores of the next leaf meanwhile. A place of its own for the sums: maxima of the next leaf may be
        // exchanged before all have read them.
        const RingPlace<Tr> values = multiply_values(block);
        multiply_keys(block, scores_);
        block.template wait_for_values<1>();
        release(values);
        block.add_up(sums);
        end_leaf();
        block.clear();
      }
      attend_tiles(piece, 0, tile, tiles, block);
      const RingPlace<Tr> values = multiply_values(block);
      block.template wait_for_values<0>();
      release(values);
      block.add_up(sums);
    } else {
      --empty;
    }
#pragma unroll 1
    for (;; --empty) {
      end_leaf();
      if (empty <= 0) return;
      block.clear();
    }
  }

 private:
  using Shared = SharedLayout<Tr>;

  using Scores = float[Block<Tr>::kScores];
  static constexpr int kGroupQueryBytes = Tr::kQueryBytes / Tr::kGroups;

  // The piece's rows of q, as a place in the merge: all, or a block that is a work of its own.
  __device__ __forceinline__ WorkPlace place_of(const PieceWalk& piece) const {
    WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    if (Tr::kRows < 64 || boxes_.row_blocks == 1) return place;
    place.work = place.work * boxes_.row_blocks + row_block_;
    place.first_row = row_block_ * Tr::kRows;
    place.rows = min_of(shape_.rows - place.first_row, Tr::kRows);
    return place;
  }
  // This group's first row.
  __device__ __forceinline__ int first_row_of(int row_block) const {
    return (row_block_ + row_block) * Tr::kRows + own_group<Tr>() * Tr::kGroupRows;
  }

  // Of raw scores, to units of log2.
  __device__ __forceinline__ float score_scale(const WorkPlace& place) const {
    const float k_scale = p_.k_scale ? __ldg(p_.k_scale + place.kv_head * p_.k_scale_stride) : 1.f;
    return p_.softmax_scale * k_scale * kLog2e;
  }

  // Over e4m3 pages queries become fp16 on the way, each row with a scale of its own.
  __device__ __forceinline__ void begin_fp8(const WorkPlace& place, int first_row, Block<Tr>& block,
                                            bool queries_are_there) const {
    const fp8::Queries<Tr> rows(p_, shape_, boxes_, smem_);
    const float to_log2 = score_scale(place);
    if constexpr (Tr::kWidens) {
      if (!queries_are_there) rows.convert_vectors(place, first_row, to_log2);
      block.begin(shared_ + Shared::kRowScale, shared_ + Shared::kProbs);
    } else {
      rows.convert(place, first_row, to_log2, queries_are_there);
      block.begin(shared_ + Shared::kRowScale, rows.scale_joins(to_log2), p_.head_dim);
    }
    hopper::fence_async_proxy();
    sync_group<Tr>();
  }

  // Tiles [begin, end) of a piece, whose first scores are in flight, up to the last one's probabilities.
  template <class Piece>
  __device__ __forceinline__ void attend_tiles(const Piece& piece, int first_row, int begin, int end,
                                               Block<Tr>& block) {
    TileMask mask = find_mask(piece, first_row, begin);
    hopper::wgmma_wait<0>(scores_);
    soften<true>(piece, first_row, begin, mask, block);
#pragma unroll 1
    for (int tile = begin + 1; tile < end; ++tile) {
      if constexpr (overlaps_softmax<Tr>()) {
        if (p_.logit_cap == 0.f && !block.scales_apart() && !is_edge(piece, tile)) {
          attend_whole_tile(block);
          continue;
        }
      }
      const RingPlace<Tr> values = multiply_values_and_keys(block);
      mask = find_mask(piece, first_row, tile);
      block.template wait_for_values<1>();
      release(values);
      hopper::wgmma_wait<0>(scores_);
      soften<false>(piece, first_row, tile, mask, block);
    }
  }

  // A tile that all rows see: its probabilities are computed while the values of the one before are multiplied.
  __device__ __forceinline__ void attend_whole_tile(Block<Tr>& block) {
    const RingPlace<Tr> values = place_;
    place_.advance();
    wait_for_unit(values);
    block.pin_operands();
    multiply_keys(block, scores_);
    block.multiply_pinned_values(unit_at(values));
    hopper::wgmma_wait<1>(scores_);
    release(place_);
    place_.advance();
    block.soften_early(scores_, [&] {
      block.template wait_for_values<0>();
      release(values);
    });
  }

  // Whether some row does not see all of a tile. A tree may hide even the first new token.
  template <class Piece>
  __device__ __forceinline__ bool is_edge(const Piece& piece, int tile) const {
    const int first_key = piece.first_token() + tile * Tr::kTileTokens;
    // Keys [all_begin, all_end) are seen by every row.
    const int all_end = p_.causal || p_.tree_mask
                            ? min_of(piece.length() - (p_.tree_mask ? p_.tree_keys : p_.seqlen_q - 1), piece.keys().end)
                            : piece.keys().end;
    const int all_begin = p_.window_left < 0 ? 0 : piece.length() - 1 - p_.window_left;
    return first_key + Tr::kTileTokens > all_end || first_key < all_begin;
  }

  // Of a tile, where masks are words: whether it is an edge, and what a lane's known row sees of one. Found while
  // products are in flight, as a tree's mask takes a while to come.
  static constexpr bool kMasksByWords = !Block<Tr>::kEdgesOutOfLine;
  struct TileMask {
    bool is_edge;
    uint64_t seen;
  };
  template <class Piece>
  __device__ __forceinline__ TileMask find_mask(const Piece& piece, int first_row, int tile) const {
    TileMask mask{false, kAllSeen};
    if constexpr (kMasksByWords) {
      mask.is_edge = is_edge(piece, tile);
      if (mask.is_edge) {
        const int first_key = piece.first_token() + tile * Tr::kTileTokens;
        mask.seen = seen_by_row(p_, shape_, piece, first_row + Block<Tr>::known_row(), first_key);
      }
    }
    return mask;
  }

  // The scores of the tile whose keys come next, in flight.
  __device__ __forceinline__ void multiply_keys(Block<Tr>& block, Scores& scores) {
    wait_for_unit();
    take_turn();
    block.multiply_keys(unit_at(place_), queries(), scores);
    pass_turn();
  }

  // From the scores of a tile, which are complete, to its probabilities.
  template <bool kFirst, class Piece>
  __device__ __forceinline__ void soften(const Piece& piece, int first_row, int tile, const TileMask& mask,
                                         Block<Tr>& block) {
    release(place_);
    place_.advance();
    const int first_key = piece.first_token() + tile * Tr::kTileTokens;
    const bool is_edge = kMasksByWords ? mask.is_edge : this->is_edge(piece, tile);
    if constexpr (Tr::kFp8 && !Tr::kWidens) block.end_scores();
    if constexpr (Block<Tr>::kEdgesOutOfLine) {
      const bool ranges = !block.scales_apart() && p_.logit_cap == 0.f && p_.tree_mask == nullptr;
      if (is_edge && ranges) Block<Tr>::mask_ranges(MaskRules(p_, shape_), piece, first_row, first_key, scores_);
      if (!ranges && (is_edge || block.scales_apart() || p_.logit_cap != 0.f)) {
        treat_edge(piece, first_row, first_key, is_edge, block);
      }
    } else {
      if constexpr (Tr::kFp8) {
        if (block.scales_apart() || p_.logit_cap != 0.f) scale_and_cap(block);
      } else {
        block.scale_scores(p_.logit_cap, scores_);
      }
      if (is_edge) Block<Tr>::mask_unseen(mask.seen, scores_);
    }
    if (!Tr::kGathers && is_edge) {
      uint64_t seen;
      if constexpr (kMasksByWords) {
        seen = Block<Tr>::seen_by_some(mask.seen);
      } else {
        seen = seen_keys<const Params&>(p_, piece, first_key);
      }
      if (seen != kAllSeen) {
        place_.wait(shared_ + Shared::kFull);
        Block<Tr>::clear_values(shared_ + Shared::kRing + place_.slot * Tr::kUnitBytes, seen);
      }
    }
    block.template soften<kFirst>(scores_, probs(), exchange_);
  }

  // Soft cap and masks of many scores, out of line: they need more registers and instructions than there is room for
  // between the products. The scores go through memory.
  template <class Piece>
  __device__ __forceinline__ void treat_edge(const Piece& piece, int first_row, int first_key, bool masked,
                                             const Block<Tr>& block) {
    Scores copy;
#pragma unroll
    for (int i = 0; i < Block<Tr>::kScores; ++i) copy[i] = scores_[i];
    const SeenKeys seen{piece.request(), piece.length(), piece.keys()};
    if constexpr (Tr::kWidens) {
      // Each row has a scale of its own, and one that is 1 says nothing of the lane's other row.
      if (block.scales_apart() || p_.logit_cap != 0.f) block.scale_scores(copy);
      treat_scores({p_, shape_}, seen, first_row, first_key, masked, 1.f, copy);
    } else {
      treat_scores({p_, shape_}, seen, first_row, first_key, masked, block.scales_apart() ? block.score_scale[0] : 1.f,
                   copy);
    }
#pragma unroll
    for (int i = 0; i < Block<Tr>::kScores; ++i) scores_[i] = copy[i];
  }
  __device__ __noinline__ static void treat_scores(MaskRules rules, SeenKeys seen, int first_row, int first_key,
                                                   bool masked, float scale, Scores& scores) {
    if (scale != 1.f || rules.logit_cap != 0.f) Block<Tr>::Narrow::cap_scores(scale, rules.logit_cap, scores);
    if (masked) Block<Tr>::mask_scores(rules, seen, first_row, first_key, scores);
  }
  // Soft cap over e4m3 pages, and scales that do not join the exponent: every row has one of its own. Seldom, and out
  // of line.
  __device__ __forceinline__ void scale_and_cap(const Block<Tr>& block) {
    Scores copy;
#pragma unroll
    for (int i = 0; i < Block<Tr>::kScores; ++i) copy[i] = scores_[i];
    scale_and_cap(p_.logit_cap, block.scales, copy);
#pragma unroll
    for (int i = 0; i < Block<Tr>::kScores; ++i) scores_[i] = copy[i];
  }
  __device__ __noinline__ static void scale_and_cap(float logit_cap, uint32_t scales, Scores& scores) {
    Block<Tr>::scale_scores(logit_cap, typename Block<Tr>::Scale(scales), scores);
  }

  // The product with the values that come next, in flight. Returns their place.
  __device__ __forceinline__ RingPlace<Tr> multiply_values(Block<Tr>& block) {
    const RingPlace<Tr> place = place_;
    wait_for_unit();
    take_turn();
    block.multiply_values(unit_at(place), probs());
    pass_turn();
    place_.advance();
    if constexpr (Tr::kProbBuffers == 2) prob_buffer_ ^= 1;
    return place;
  }

  // The same, and the next scores at once, so that the matrix units need not wait for a round trip.
  __device__ __forceinline__ RingPlace<Tr> multiply_values_and_keys(Block<Tr>& block) {
    if constexpr (!Tr::kTakesTurns) {
      const RingPlace<Tr> values = multiply_values(block);
      multiply_keys(block, scores_);
      return values;
    } else {
      const RingPlace<Tr> values = place_;
      place_.advance();
      values.wait(shared_ + Shared::kFull);
      wait_for_unit();
      take_turn();
      block.multiply_values(unit_at(values), probs());
      block.multiply_keys(unit_at(place_), queries(), scores_);
      pass_turn();
      return values;
    }
  }

  // Whoever has the turn waits for nothing.
  __device__ __forceinline__ static void take_turn() {
    if constexpr (Tr::kTakesTurns) hopper::named_barrier_sync(kTurn + own_group<Tr>(), 2 * Tr::kGroupThreads);
  }
  __device__ __forceinline__ static void pass_turn() {
    if constexpr (Tr::kTakesTurns) {
      const int next = own_group<Tr>() == Tr::kGroups - 1 ? 0 : own_group<Tr>() + 1;
      hopper::named_barrier_arrive(kTurn + next, 2 * Tr::kGroupThreads);
    }
  }

  __device__ __forceinline__ uint32_t unit_at(const RingPlace<Tr>& place) const {
    return shared_ + Shared::kRing + place.slot * Tr::kUnitBytes;
  }
  __device__ __forceinline__ void wait_for_unit() const { wait_for_unit(place_); }
  __device__ __forceinline__ void wait_for_unit(const RingPlace<Tr>& place) const {
    place.wait(shared_ + Shared::kFull);
    // Rows arrive by ordinary writes, and products read them. Those of e4m3 are read by loads, or widened by warps that
    // have done the same.
    if constexpr (Tr::kGathers && !Tr::kFp8) hopper::fence_async_proxy();
  }

  __device__ __forceinline__ uint32_t queries() const {
    return Tr::kFetchesAhead || Tr::kGroups > 1 ? queries_ : shared_ + Shared::kQueries;
  }
  __device__ __forceinline__ uint32_t other_queries() const {
    return 2 * (shared_ + Shared::kQueries + own_group<Tr>() * kGroupQueryBytes) + Tr::kQueryBytes - queries_;
  }
  // Nobody reads these queries any more; or probabilities.
  __device__ __forceinline__ uint32_t stage_of_rows() const {
    if constexpr (Tr::kWidensAhead) return queries();
    if constexpr (Tr::kFp8) return shared_ + Shared::kProbs;
    return Tr::kFetchesAhead ? other_queries() : queries();
  }
  __device__ __forceinline__ uint32_t probs() const { return shared_ + Shared::kProbs + prob_buffer_ * Tr::kProbBytes; }

  // A warp is done with a unit.
  __device__ __forceinline__ void release(const RingPlace<Tr>& place) const {
    if (arrives_by_lanes<Tr>() || threadIdx.x % 32 == 0) {
      hopper::mbarrier_arrive(shared_ + Shared::kEmpty + place.slot * 8);
    }
  }

  const Params& p_;
  const Shape& shape_;
  const Boxes& boxes_;
  uint8_t* const smem_;
  const uint32_t shared_;
  const int row_block_;  // of works, where its rows are a CTA's
  uint32_t queries_;     // of the piece at hand, where there are two places for them
  float* const exchange_;
  RingPlace<Tr> place_;
  int prob_buffer_ = 0;
  Scores scores_;
};

}  // namespace attnops::xqa_decode::sm90
