#pragma once
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/guess.cuh"
#include "xqa_decode/cuda/query_row.cuh"
#include "xqa_decode/sm90/epilogue.cuh"
#include "xqa_decode/sm90/gather_stream.cuh"
#include "xqa_decode/sm90/query_copy.cuh"
#include "xqa_decode/sm90/short_works.cuh"
#include "xqa_decode/sm90/staged_rows.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"
#include "xqa_decode/sm90/wide_block.cuh"

namespace attnops::xqa_decode::sm90 {

__device__ __forceinline__ SplitKvEntry load_entry(const Params& p, int part) {
  const auto* words = reinterpret_cast<const int4*>(p.tile_scheduler_metadata) + 2 * static_cast<int64_t>(part);
  const int4 a = __ldg(words), b = __ldg(words + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Whether a tile's softmax may run beside the product with the values before.
template <class Tr>
constexpr bool overlaps_softmax() {
  if constexpr (requires { Block<Tr>::kOverlaps; }) {
    return Block<Tr>::kOverlaps;
  } else {
    return false;
  }
}

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

  __device__ __forceinline__ void run(PieceWalk& piece) {
    bool fetched = false;  // this piece's queries are on their way
    do {
      const WorkPlace place = place_of(piece);
      if (piece.overflows()) {
        if (piece.starts_work() && piece.last_row_block()) {
          store_nan(p_, shape_, place, piece.splits(), Tr::kThreads);
        }
        cp_async_wait<0>();
        fetched = false;
        continue;
      }
      const int first_row = first_row_of(piece.row_block());
      Block<Tr> block;
      if constexpr (Tr::kFetchesAhead && Tr::kFp8) {
        if (!fetched) fetch_raw_queries(place, first_row);
        if constexpr (Tr::kWidens) {
          begin_widened(place, first_row, block);
        } else {
          begin_fp8(place, first_row, block, false);
        }
        piece.look_ahead([&](int request, int kv_head, int row_block) {
          fetch_raw_queries({0, request, kv_head}, first_row_of(row_block));
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
      attend(piece, first_row, block);
      if constexpr (Tr::kFetchesAhead && !Tr::kFp8) queries_ = other_queries();
      const Splits splits = piece.splits();
      if (splits.count == 1) {
        if constexpr (Tr::kStagesRows) {
          store_rows(p_, shape_, boxes_, place, block, first_row, stage_of_rows());
          if constexpr (!Tr::kFetchesAhead) sync_group<Tr>();  // the next queries come there at once
        } else {
          store_rows(p_, shape_, place, block, first_row);
        }
        continue;
      }
      store_partials(p_, shape_, block, first_row, splits.slot(splits.index));
      if (!piece.last_row_block() || splits.arrivals == 0) continue;
      arrive_and_merge<Tr::kThreads, false, (Tr::kRows > 32)>(p_, shape_, place, splits, piece.is_last(),
                                     reinterpret_cast<MergeFlag*>(smem_ + Shared::kFlag),
                                     reinterpret_cast<float*>(smem_ + Shared::kMergeScratch));
      // The next queries or probabilities lie where the merge has its scratch.
      if constexpr (Tr::kGroups > 1) {
        sync_threads<Tr::kThreads>();
      } else {
        sync_group<Tr>();
      }
    } while (piece.next());
  }

  // The rows, before any key. Their queries may lie there still.
  __device__ __forceinline__ void begin(const WorkPlace& place, int first_row, Block<Tr>& block,
                                        bool queries_are_there = false) const {
    if constexpr (Tr::kFp8 && !Tr::kWidens) return begin_fp8(place, first_row, block, queries_are_there);
    if (!queries_are_there) {
      copy_queries<Tr>(p_, shape_, boxes_, place, first_row, queries());
    }
    cp_async_commit();
    block.begin(score_scale(place), p_.logit_cap);
    cp_async_wait<0>();
    hopper::fence_async_proxy();
    sync_group<Tr>();
    if constexpr (Tr::kKeepsQueries) block.load_queries(queries());
  }

  // All keys of a piece.
  template <class Piece>
  __device__ __forceinline__ void attend(const Piece& piece, int first_row, Block<Tr>& block) {
    const int tiles = num_tiles(piece);
    if (tiles > 0) {
      multiply_keys(block, scores_);
      attend_tiles(piece, first_row, 0, tiles, block);
      const RingPlace<Tr> values = multiply_values(block);
      block.template wait_for_values<0>();
      release(values);
    }
    block.add_up(exchange_);
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

  // Over e4m3 pages a warp's rows of q as they are, behind the queries that products read. Rows that are no vectors do
  // not come ahead.
  __device__ __forceinline__ void fetch_raw_queries(const WorkPlace& place, int first_row) const {
    constexpr int kVecsPerRow = Tr::kHeadDim / 8, kRowsPerWarp = Tr::kRows / Tr::kWarps;
    constexpr int kRowsAtATime = 32 / kVecsPerRow;
    if (boxes_.vector_queries) {
      const int lane = threadIdx.x % 32, d = lane % kVecsPerRow * 8, first_head = place.kv_head * shape_.group;
      const bool inside = d < p_.head_dim;
      const auto* q = static_cast<const uint16_t*>(p_.q) + place.request * p_.q_stride_request + (inside ? d : 0);
      const int first = threadIdx.x / 32 * kRowsPerWarp;
      const uint32_t to = raw_queries() + first * (Tr::kHeadDim * 2) + lane * 16;
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; i += kRowsAtATime) {
        const int own = first_row + first + i + lane / kVecsPerRow, row = min_of(own, shape_.rows - 1);
        if (kRowsPerWarp < kRowsAtATime && lane / kVecsPerRow >= kRowsPerWarp) break;
        const int token = shape_.by_group.divide(row);
        const int at = token * boxes_.q_token + (first_head + row - token * shape_.group) * boxes_.q_head;
        cp_async_16(to + i * (Tr::kHeadDim * 2), q + at, inside && own < shape_.rows);
      }
    }
    cp_async_commit();
  }
  __device__ __forceinline__ uint32_t raw_queries() const { return shared_ + Shared::kQueries + Tr::kQueryBytes; }

  // A row of them; or straight from q.
  __device__ __forceinline__ void take_query(const WorkPlace& place, int first_row, int i, int lane,
                                             QueryRow<Tr>& row) const {
    if constexpr (Tr::kFetchesAhead) {
      if (boxes_.vector_queries) {
        row.bf16 = p_.dtype == DType::kBFloat16;
#pragma unroll
        for (int k = 0; k < QueryRow<Tr>::kPairs; ++k) {
          const uint32_t at = raw_queries() + (i * (Tr::kHeadDim / 2) + k * 32 + lane) * 4;
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(row.pairs[k]) : "r"(at) : "memory");
        }
        return;
      }
    }
    row.fetch(p_, shape_, place, first_row + i, lane);
  }

  // Over e4m3 pages queries become fp16 on the way, each row with a scale of its own.
  __device__ __forceinline__ void begin_fp8(const WorkPlace& place, int first_row, Block<Tr>& block,
                                            bool queries_are_there) const {
    constexpr int kRowsPerWarp = Tr::kRows / Tr::kWarps, kRowsAtATime = min_of(kRowsPerWarp, 8);
    const float to_log2 = score_scale(place);
    // A positive scale alone waits for the exponent's subtraction: both are one instruction there.
    const bool joined = p_.logit_cap == 0.f && to_log2 > 0.f;
    float* const scales = reinterpret_cast<float*>(smem_ + Shared::kRowScale);
    if constexpr (Tr::kFetchesAhead) {
      cp_async_wait<0>();
      __syncwarp();
    }
    if (!queries_are_there) {
      const int lane = threadIdx.x % 32;
#pragma unroll 1
      for (int some = 0; some < kRowsPerWarp; some += kRowsAtATime) {
        const int first = threadIdx.x / 32 * kRowsPerWarp + some;
        QueryRow<Tr> rows[kRowsAtATime];
#pragma unroll
        for (int i = 0; i < kRowsAtATime; ++i) take_query(place, first_row, first + i, lane, rows[i]);
#pragma unroll
        for (int i = 0; i < kRowsAtATime; ++i) {
          rows[i].place(reinterpret_cast<typename Tr::T*>(smem_ + Shared::kQueries), scales, first + i, lane);
          if (lane > 0) continue;
          scales[first + i] *= to_log2;
          scales[Tr::kRows + first + i] = joined ? scales[first + i] : 1.f;
        }
      }
    }
    block.begin(shared_ + Shared::kRowScale, joined);
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
  }

  // The same where tiles become fp16 in shared memory: the warp's sixteen rows lie there as they are in q, and the first
  // product finds them in the order of their dims.
  __device__ __forceinline__ void begin_widened(const WorkPlace& place, int first_row, Block<Tr>& block) const {
    constexpr int kVecs = Tr::kHeadDim / 8, kRowsAtATime = 32 / kVecs, kRowsOfWarp = 16;
    const int first = threadIdx.x / 32 * kRowsOfWarp, lane = threadIdx.x % 32, vec = lane % kVecs;
    const uint32_t raw = raw_queries() + first * (Tr::kHeadDim * 2);
    const float to_log2 = score_scale(place);
    const bool joined = p_.logit_cap == 0.f && to_log2 > 0.f, bf16 = p_.dtype == DType::kBFloat16;
    float* const scales = reinterpret_cast<float*>(smem_ + Shared::kRowScale);
    cp_async_wait<0>();
    if (!boxes_.vector_queries) copy_raw_queries(p_, shape_, place.request, place.kv_head, first_row + first, raw);
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < kRowsOfWarp; i += kRowsAtATime) {
      const int row = first + i + lane / kVecs;
      uint32_t words[4], top = 0;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(raw + i * (Tr::kHeadDim * 2) + lane * 16)
                   : "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k) top = __vmaxu2(top, words[k] & 0x7fff7fffu);  // of both halves: ordered as numbers
#pragma unroll
      for (int step = kVecs / 2; step > 0; step /= 2) top = __vmaxu2(top, __shfl_xor_sync(~0u, top, step));
      const float scale = fp8::range_of_half(widest_pair(max_of(top >> 16, top & 0xffffu), bf16).x);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = widest_pair(words[k], bf16);
        words[k] = pack2<__half>(pair.x * scale, pair.y * scale);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(queries() + vec / 8 * (Tr::kRows * 128) +
                                                                   hopper::swizzled(row, vec % 8)),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
      if (vec > 0) continue;
      const float of_scores = __fdividef(to_log2, scale);
      scales[row] = of_scores;
      scales[Tr::kRows + row] = joined ? of_scores : 1.f;
    }
    __syncwarp();
    block.begin(shared_ + Shared::kRowScale, shared_ + Shared::kProbs);
    hopper::fence_async_proxy();
    sync_group<Tr>();
  }
  __device__ __forceinline__ static float2 widest_pair(uint32_t pair, bool bf16) {
    if (bf16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  // A warp's rows of q that are no vectors.
  __device__ __noinline__ static void copy_raw_queries(const Params& p, const Shape& shape, int request, int kv_head,
                                                       int first_row, uint32_t raw) {
    constexpr int kVecs = Tr::kHeadDim / 8;
    const __half* q = static_cast<const __half*>(p.q) + request * p.q_stride_request;
    for (int item = threadIdx.x % 32; item < 16 * kVecs; item += 32) {
      const int row = min_of(first_row + item / kVecs, shape.rows - 1), token = shape.by_group.divide(row);
      const int head = kv_head * shape.group + row - token * shape.group, d = item % kVecs * 8;
      copy_odd_queries(raw + item * 16, q + token * p.q_stride_token + head * p.q_stride_head + d,
                       first_row + item / kVecs < shape.rows ? p.head_dim - d : 0);
    }
  }

  // Tiles [begin, end) of a piece, whose first scores are in flight, up to the last one's probabilities.
  template <class Piece>
  __device__ __forceinline__ void attend_tiles(const Piece& piece, int first_row, int begin, int end,
                                               Block<Tr>& block) {
    hopper::wgmma_wait<0>(scores_);
    soften<true>(piece, first_row, begin, block);
#pragma unroll 1
    for (int tile = begin + 1; tile < end; ++tile) {
      if constexpr (overlaps_softmax<Tr>()) {
        if (p_.logit_cap == 0.f && !block.scales_apart() && !is_edge(piece, tile)) {
          attend_whole_tile(block);
          continue;
        }
      }
      // The next scores follow at once, so that the matrix units need not wait for a round trip.
      const RingPlace<Tr> values = multiply_values(block);
      multiply_keys(block, scores_);
      block.template wait_for_values<1>();
      release(values);
      hopper::wgmma_wait<0>(scores_);
      soften<false>(piece, first_row, tile, block);
    }
  }

  // A tile that all rows see: its probabilities are computed while the values of the one before are multiplied.
  __device__ __forceinline__ void attend_whole_tile(Block<Tr>& block) {
    const RingPlace<Tr> values = place_;
    place_.advance();
    wait_for_unit(values);
    block.pin_operands();
    multiply_keys(block, scores_);
    block.multiply_pinned_values(shared_ + Shared::kRing + values.slot * Tr::kUnitBytes);
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

  // The scores of the tile whose keys come next, in flight.
  __device__ __forceinline__ void multiply_keys(Block<Tr>& block, Scores& scores) {
    wait_for_unit();
    block.multiply_keys(shared_ + Shared::kRing + place_.slot * Tr::kUnitBytes, queries(), scores);
  }

  // From the scores of a tile, which are complete, to its probabilities.
  template <bool kFirst, class Piece>
  __device__ __forceinline__ void soften(const Piece& piece, int first_row, int tile, Block<Tr>& block) {
    release(place_);
    place_.advance();
    const int first_key = piece.first_token() + tile * Tr::kTileTokens;
    const bool is_edge = this->is_edge(piece, tile);
    if constexpr (Tr::kFp8 && !Tr::kWidens) block.end_scores();
    if constexpr (Block<Tr>::kEdgesOutOfLine) {
      constexpr bool kRanges = !Tr::kFp8 || Tr::kWidens;
      const bool ranges = kRanges && !block.scales_apart() && p_.logit_cap == 0.f && p_.tree_mask == nullptr;
      if constexpr (kRanges) {
        if (is_edge && ranges) Block<Tr>::mask_ranges(p_, shape_, piece, first_row, first_key, scores_);
      }
      if (!ranges && (is_edge || block.scales_apart() || p_.logit_cap != 0.f)) {
        treat_edge(piece, first_row, first_key, is_edge, block);
      }
    } else {
      block.scale_scores(p_.logit_cap, scores_);
      if (is_edge) Block<Tr>::mask_scores(p_, shape_, piece, first_row, first_key, scores_);
    }
    if (!Tr::kGathers && is_edge) {
      const uint64_t seen = seen_keys(p_, piece, first_key);
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
      if (block.scales_apart()) block.scale_scores(copy);
      treat_scores(p_, shape_, seen, first_row, first_key, masked, 1.f, copy);
    } else if constexpr (Tr::kFp8) {
      treat_scaled_scores(p_, shape_, seen, first_row, first_key, masked, block.scales_apart() ? block.scales : 0,
                          copy);
    } else {
      treat_scores(p_, shape_, seen, first_row, first_key, masked, block.scales_apart() ? block.score_scale[0] : 1.f,
                   copy);
    }
#pragma unroll
    for (int i = 0; i < Block<Tr>::kScores; ++i) scores_[i] = copy[i];
  }
  __device__ __noinline__ static void treat_scores(const Params& p, const Shape& shape, const SeenKeys& seen,
                                                   int first_row, int first_key, bool masked, float scale,
                                                   Scores& scores) {
    if (scale != 1.f || p.logit_cap != 0.f) Block<Tr>::Narrow::cap_scores(scale, p.logit_cap, scores);
    if (masked) Block<Tr>::mask_scores(p, shape, seen, first_row, first_key, scores);
  }
  // Where every row has a scale of its own, at `scales` in shared memory; 0: it joins the exponent.
  __device__ __noinline__ static void treat_scaled_scores(const Params& p, const Shape& shape, const SeenKeys& seen,
                                                          int first_row, int first_key, bool masked, uint32_t scales,
                                                          Scores& scores) {
    if (scales != 0) Block<Tr>::scale_scores(p.logit_cap, typename Block<Tr>::Scale(scales), scores);
    if (masked) Block<Tr>::mask_scores(p, shape, seen, first_row, first_key, scores);
  }

  // The product with the values that come next, in flight. Returns their place.
  __device__ __forceinline__ RingPlace<Tr> multiply_values(Block<Tr>& block) {
    const RingPlace<Tr> place = place_;
    wait_for_unit();
    block.multiply_values(shared_ + Shared::kRing + place.slot * Tr::kUnitBytes, probs());
    place_.advance();
    if constexpr (Tr::kProbBuffers == 2) prob_buffer_ ^= 1;
    return place;
  }

  __device__ __forceinline__ void wait_for_unit() const { wait_for_unit(place_); }
  __device__ __forceinline__ void wait_for_unit(const RingPlace<Tr>& place) const {
    place.wait(shared_ + Shared::kFull);
    if constexpr (Tr::kGathers) hopper::fence_async_proxy();  // rows arrive by ordinary writes
  }

  __device__ __forceinline__ uint32_t queries() const {
    return Tr::kFetchesAhead || Tr::kGroups > 1 ? queries_ : shared_ + Shared::kQueries;
  }
  __device__ __forceinline__ uint32_t other_queries() const {
    return 2 * (shared_ + Shared::kQueries + own_group<Tr>() * kGroupQueryBytes) + Tr::kQueryBytes - queries_;
  }
  // Nobody reads these queries any more; or probabilities.
  __device__ __forceinline__ uint32_t stage_of_rows() const {
    if constexpr (Tr::kFp8) return shared_ + Shared::kProbs;
    return Tr::kFetchesAhead ? other_queries() : queries();
  }
  __device__ __forceinline__ uint32_t probs() const { return shared_ + Shared::kProbs + prob_buffer_ * Tr::kProbBytes; }

  // A warp is done with a unit. Where rows are gathered, ordinary writes come next, which are ordered only behind the
  // reads of lanes that arrive.
  __device__ __forceinline__ void release(const RingPlace<Tr>& place) const {
    if (Tr::kGathers || threadIdx.x % 32 == 0) hopper::mbarrier_arrive(shared_ + Shared::kEmpty + place.slot * 8);
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

template <class Tr>
__device__ __forceinline__ void init_barriers(uint32_t shared) {
  using Shared = SharedLayout<Tr>;
  for (int i = 0; i < Tr::kUnits; ++i) {
    hopper::mbarrier_init(shared + Shared::kFull + 8 * i, Tr::kGathers ? 32 * Tr::kBringersOfUnit : 1);
    hopper::mbarrier_init(shared + Shared::kEmpty + 8 * i, Tr::kGathers ? Tr::kReaders : Tr::kReaders / 32);
  }
  hopper::mbarrier_init_fence();
}

// Where a part will probably begin, before the kernels ahead have ended: a request and a cell of its pages.
struct LikelyStart {
  int request, cell;
};

// By the numbers alone.
__device__ __forceinline__ LikelyStart likely_start(const Params& p, int part) {
  return {static_cast<int>(static_cast<int64_t>(part) * p.batch_size / p.num_sm_parts), 0};
}

// The length and the first pages that it needs, into L1 while the plan is on its way: each would cost a round trip to
// L2 of its own. For three lanes; sixteen bytes at `nowhere` take the copies.
__device__ __forceinline__ void look_up_ahead(const Params& p, const LikelyStart& start, uint32_t nowhere, int lane) {
  if (lane == 0) return hopper::copy4(nowhere, p.cache_seqlens + start.request);
  const int cell = lane == 1 ? start.cell : start.cell + 31;  // of the 32 that a warp looks up at a time
  if (lane > 2 || p.page_table.kv_indptr || cell >= p.page_table.max_pages) return;
  hopper::copy4(nowhere + 4 * lane, p.page_table.row(start.request) + cell);
}

// A part's first piece, by the plan and the length as they are before the kernels ahead have ended. Most often they are
// what they were for the layer before; else what is asked for on this guess is of no use, and nothing is wrong.
class GuessedPiece {
 public:
  __device__ __forceinline__ GuessedPiece(const Params& p, const Shape& shape, int part) {
    const auto* rows = reinterpret_cast<const int4*>(p.tile_scheduler_metadata);
    const int4 begin = hopper::load_guess(rows + 2 * static_cast<int64_t>(part));  // of SplitKvEntry
    request_ = shape.by_kv_heads.divide(begin.x), kv_head_ = begin.x - request_ * p.num_kv_heads;
    if (shape.heads_side_by_side) {
      request_ = begin.x, kv_head_ = part - shape.by_kv_heads.divide(part) * p.num_kv_heads;
    }
    is_one_ = request_ >= 0 && request_ < p.batch_size && !p.page_table.kv_indptr;
    if (!is_one_) return;
    const int length = hopper::load_guess(p.cache_seqlens + request_);
    length_ = length_of(length), keys_ = visible_keys(length, p.seqlen_q, p.window_left);
    keys_.end = min_of(keys_.end, p.table_tokens);
    first_token_ = (keys_.begin / kPlanTileTokens + begin.y) * kPlanTileTokens;
    is_one_ = first_token_ >= 0 && first_token_ < keys_.end;
  }

  // Whether it may be one.
  __device__ bool is_one() const { return is_one_; }
  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }
  __device__ int first_token() const { return first_token_; }
  __device__ int end_token() const { return keys_.end; }

 private:
  int request_, kv_head_, length_ = 0, first_token_ = 0;
  KvRange keys_{0, 0};
  bool is_one_;
};

// Asks for the first tile that a part will probably need to be in L2. Returns where that is, or `start`.
template <class Tr>
__device__ __forceinline__ LikelyStart prefetch_first_tile(const Params& p, const Shape& shape, const Boxes& boxes,
                                                           const CUtensorMap& key_map, const CUtensorMap& value_map,
                                                           int part, uint32_t shared, int lane,
                                                           const LikelyStart& start = {}) {
  if (part >= p.num_sm_parts) return start;
  const GuessedPiece piece(p, shape, part);
  if (!piece.is_one()) return start;
  const int cell = (piece.first_token() + lane * boxes.tokens) >> shape.page_shift;
  const int page = cell < p.page_table.max_pages ? hopper::load_guess(p.page_table.row(piece.request()) + cell) : -1;
  TileStream<Tr> stream(p, boxes, &key_map, &value_map, shape, shared, lane);
  stream.open(piece);
  stream.prefetch(piece, page);
  return {piece.request(), piece.first_token() >> shape.page_shift};
}

// What the warps beyond those that multiply do; `warp` is the number among them.
template <class Tr>
__device__ __forceinline__ void bring_pieces(const Params& p, const Shape& shape, const Boxes& boxes,
                                             const CUtensorMap& key_map, const CUtensorMap& value_map, PieceWalk& piece,
                                             uint32_t shared, int warp, int lane) {
  if constexpr (Tr::kGathers) {
    GatherStream<Tr> stream(p, shape, shared, warp, lane);
    do stream.bring(piece);
    while (piece.next());
  } else {
    TileStream<Tr> stream(p, boxes, &key_map, &value_map, shape, shared, lane);
    do stream.bring(piece);
    while (piece.next());
  }
}

// In fold_run.cuh, for batch-invariant plans.
template <class Tr>
__device__ __forceinline__ void run_folded(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem,
                                           PieceWalk& piece);

template <class Tr>
constexpr bool moves_registers() {
  if constexpr (requires { Tr::kMovesRegisters; }) {
    return Tr::kMovesRegisters;
  } else {
    return false;
  }
}

// What a CTA does: a part of the plan, or one for each of its KV heads, which are neighbours and walk the same tiles.
// Units of keys and values stream through the ring, and a `Multiplier` for each head takes them out.
template <class Tr, class Multiplier>
__device__ __forceinline__ void run_parts(const Params& p, const Shape& shape, const Boxes& boxes,
                                          const CUtensorMap& key_map, const CUtensorMap& value_map, uint8_t* smem) {
  using Shared = SharedLayout<Tr>;
  constexpr int kHeads = heads_of_cta<Tr>(), kWarpsOfHead = Tr::kThreads / 32;
  const uint32_t shared = hopper::smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool brings = warp >= kHeads * kWarpsOfHead;
  const int head = kHeads == 1 || brings ? 0 : warp / kWarpsOfHead;
  const int part = Tr::kRows >= 64 ? blockIdx.x / boxes.row_blocks : blockIdx.x * kHeads + head;
  LikelyStart start = likely_start(p, part);
  asm volatile("" : "+r"(start.request));  // a division: before the wait
  if (threadIdx.x == 0) {
    for (int i = 0; i < kHeads; ++i) init_barriers<Tr>(shared + i * head_stride<Tr>());
    hopper::prefetch_map(&key_map);
    hopper::prefetch_map(&value_map);
  }
  __syncthreads();
  if constexpr (!Tr::kGathers) {
    if (brings) start = prefetch_first_tile<Tr>(p, shape, boxes, key_map, value_map, part, shared, lane, start);
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();

  if (warp == kHeads * kWarpsOfHead) look_up_ahead(p, start, shared + Shared::kNowhere, lane);
  const SplitKvEntry entry = load_entry(p, part);
  if (entry.begin_work == entry.end_work && entry.begin_tile >= entry.end_tile) return;
  if constexpr (kHasShortWorks<Tr>) {
    if (all_short<Tr>(p, shape, entry, lane)) {
      return attend_short_works<Tr>(p, shape, boxes, entry, part, smem, warp, lane);
    }
  }
  PieceWalk piece(p, shape, entry, part);
  if (!piece.next()) return;
  if (Tr::kFolds || brings) piece.walk_runs(Tr::kTileTokens);
  if (brings) {
    if constexpr (moves_registers<Tr>()) {
      hopper::registers_decrease<Tr::kBringerRegisters>();
      if (warp >= kWarpsOfHead + Tr::kBringers) return;
    }
    bring_pieces<Tr>(p, shape, boxes, key_map, value_map, piece, shared, warp - kHeads * kWarpsOfHead, lane);
  } else if constexpr (Tr::kFolds) {
    run_folded<Tr>(p, shape, boxes, smem, piece);
  } else {
    if constexpr (moves_registers<Tr>()) hopper::registers_increase<Tr::kGroupRegisters>();
    Multiplier(p, shape, boxes, smem + head * head_stride<Tr>()).run(piece);
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kAllThreads, Tr::kCtasPerSm)
    xqa_decode_sm90_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                           const __grid_constant__ Boxes boxes, const __grid_constant__ CUtensorMap key_map,
                           const __grid_constant__ CUtensorMap value_map) {
  extern __shared__ __align__(1024) uint8_t smem[];
  run_parts<Tr, Consumer<Tr>>(p, shape, boxes, key_map, value_map, smem);
}

}  // namespace attnops::xqa_decode::sm90
