#pragma once
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "device/sm90/guess.cuh"
#include "xqa_decode/sm90/consumer.cuh"
#include "xqa_decode/sm90/dealt_works.cuh"
#include "xqa_decode/sm90/fp8/widening.cuh"
#include "xqa_decode/sm90/gather_stream.cuh"
#include "xqa_decode/sm90/short_works.cuh"

namespace attnops::xqa_decode::sm90 {

// Arrivals that make a unit full: of lanes that copy its rows, of the warp that asks for its boxes, or of lanes that
// widen it.
template <class Tr>
constexpr int arrivals_of_full() {
  if constexpr (widens_ahead<Tr>()) {
    return 32 * Tr::kWideners;
  } else {
    return Tr::kGathers ? 32 * Tr::kBringersOfUnit : 1;
  }
}

template <class Tr>
__device__ __forceinline__ void init_barriers(uint32_t shared) {
  using Shared = SharedLayout<Tr>;
  for (int i = 0; i < Tr::kUnits; ++i) {
    hopper::mbarrier_init(shared + Shared::kFull + 8 * i, arrivals_of_full<Tr>());
    hopper::mbarrier_init(shared + Shared::kEmpty + 8 * i, arrives_by_lanes<Tr>() ? Tr::kReaders : Tr::kReaders / 32);
  }
  if constexpr (widens_ahead<Tr>()) {
    for (int i = 0; i < Tr::kRawUnits; ++i) {
      hopper::mbarrier_init(shared + Shared::kRawFull + 8 * i, arrivals_of_full<RawTraits<Tr>>());
      hopper::mbarrier_init(shared + Shared::kRawEmpty + 8 * i, 32 * Tr::kWideners);
    }
  }
  if constexpr (deals_works<Tr>()) DealtWalk<Tr, true>::init(shared + Shared::kDeal);
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
template <class Tr>
__device__ __forceinline__ void look_up_ahead(const Params& p, const LikelyStart& start, uint32_t nowhere, int lane) {
  if (lane == 0) return hopper::copy4(nowhere, p.cache_seqlens + start.request);
  if constexpr (is_ragged<Tr>()) {
    if (p.table_rows) {  // which says where the cells are
      if (lane == 1) hopper::copy4(nowhere + 4, p.table_rows + start.request);
      return;
    }
  }
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
    // Any words may stand there: unsigned, so that what wraps is seen below.
    const uint32_t tile = static_cast<uint32_t>(keys_.begin / kPlanTileTokens) + static_cast<uint32_t>(begin.y);
    first_token_ = static_cast<int>(tile * kPlanTileTokens);
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
  const int32_t* const cells =
      cells_of<Tr>(p, piece.request(), [](const int32_t* at) { return hopper::load_guess(at); });
  const int page = cell < p.page_table.max_pages ? hopper::load_guess(cells + cell) : -1;
  TileStream<Bringer<Tr>> stream(p, boxes, &key_map, &value_map, shape, shared, lane);
  stream.see(piece);
  stream.prefetch(piece, page);
  return {piece.request(), piece.first_token() >> shape.page_shift};
}

// What the warps beyond those that multiply do; `warp` is the number among them.
template <class Tr, class Pieces>
__device__ __forceinline__ void bring_pieces(const Params& p, const Shape& shape, const Boxes& boxes,
                                             const CUtensorMap& key_map, const CUtensorMap& value_map, Pieces& piece,
                                             uint32_t shared, int warp, int lane) {
  if constexpr (Tr::kGathers) {
    GatherStream<Bringer<Tr>> stream(p, shape, shared, warp, lane);
    do stream.bring(piece);
    while (piece.next());
  } else {
    TileStream<Bringer<Tr>> stream(p, boxes, &key_map, &value_map, shape, shared, lane);
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
  return requires { requires Tr::kMovesRegisters; };
}

// What a CTA does where works may be dealt out: it takes short ones, then others, or those of its part.
template <class Tr, class Multiplier>
__device__ __forceinline__ void run_dealing(const Params& p, const Shape& shape, const Boxes& boxes,
                                            const CUtensorMap& key_map, const CUtensorMap& value_map,
                                            const PartEntry& row, int part, uint8_t* smem, int warp, int lane) {
  const uint32_t shared = hopper::smem_address(smem), box = shared + SharedLayout<Tr>::kDeal;
  const bool serve = LoneWarp<Tr>::serves(p, shape, boxes);
  const Deal deal = Deal::of<Tr>(p, serve);
  if (!deal && !row.has_work) return;
  if (deal.by_warps > 0 ? part >= deal.first_part : !deal && serve) {
    if (take_short_works_or_part<Tr>(p, shape, boxes, row, deal, part, smem, warp, lane)) {
      if (part >= deal.by_ctas) return;
      hopper::fence_async_proxy();  // the ring was theirs
      __syncthreads();
    }
  }
  PartEntry entry = row;
  if (deal.by_ctas > 0) {
    const DealtWork first = dealt_work(p, shape, part);
    entry = PartEntry(shape.heads_side_by_side ? first.request : first.request * p.num_kv_heads + first.kv_head);
  }
  constexpr int kWarpsOfHead = Tr::kThreads / 32;
  if (warp >= kWarpsOfHead) {
    DealtWalk<Tr, true> piece(p, shape, entry, part, deal.by_ctas, box);
    if (!piece.next()) return;
    bring_pieces<Tr>(p, shape, boxes, key_map, value_map, piece, shared, warp - kWarpsOfHead, lane);
  } else {
    DealtWalk<Tr, false> piece(p, shape, entry, part, deal.by_ctas, box);
    if (!piece.next()) return;
    Multiplier(p, shape, boxes, smem).run(piece);
  }
}

// What a CTA does by its row of the plan.
template <class Tr, class Multiplier>
__device__ __forceinline__ void run_row(const Params& p, const Shape& shape, const Boxes& boxes,
                                        const CUtensorMap& key_map, const CUtensorMap& value_map,
                                        const PartEntry& entry, int part, uint8_t* smem, int warp, int lane) {
  constexpr int kHeads = heads_of_cta<Tr>(), kWarpsOfHead = Tr::kThreads / 32;
  const uint32_t shared = hopper::smem_address(smem);
  const bool brings = warp >= kHeads * kWarpsOfHead;
  const int head = kHeads == 1 || brings ? 0 : warp / kWarpsOfHead;
  if constexpr (is_ragged<Tr>()) clear_rows_behind(p);
  if (!entry.has_work) return;
  if constexpr (kHasShortWorks<Tr> || kHasLoneWarps<Tr>) {
    if (take_short_works<Tr>(p, shape, boxes, entry, part, smem, warp, lane)) return;
  }
  Walk<Tr> piece(p, shape, entry, part);
  if (!piece.next()) return;
  if (Tr::kFolds || brings) piece.walk_runs(Tr::kTileTokens);
  if (brings) {
    if constexpr (moves_registers<Tr>()) {
      hopper::registers_decrease<Tr::kBringerRegisters>();
      if (!widens_ahead<Tr>() && warp >= kWarpsOfHead + Tr::kBringers) return;
    }
    if constexpr (widens_ahead<Tr>()) {
      const int widener = warp - kWarpsOfHead - Tr::kBringers;
      if (widener >= 0) return fp8::WideningWarp<Tr>(shared, widener, lane).widen_pieces(piece);
    }
    bring_pieces<Tr>(p, shape, boxes, key_map, value_map, piece, shared, warp - kHeads * kWarpsOfHead, lane);
  } else if constexpr (Tr::kFolds) {
    run_folded<Tr>(p, shape, boxes, smem, piece);
  } else {
    if constexpr (moves_registers<Tr>()) hopper::registers_increase<Tr::kGroupRegisters>();
    Multiplier(p, shape, boxes, smem + head * head_stride<Tr>()).run(piece);
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
    const bool prefetches = widens_ahead<Tr>() ? warp == kHeads * kWarpsOfHead : brings;
    if (prefetches) start = prefetch_first_tile<Tr>(p, shape, boxes, key_map, value_map, part, shared, lane, start);
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();

  if (warp == kHeads * kWarpsOfHead) look_up_ahead<Tr>(p, start, shared + Shared::kNowhere, lane);
  // Neighbouring heads follow one row, so that all of the CTA count the same tiles, whatever the rows hold.
  const PartEntry entry(p, shape, kHeads == 1 ? part : static_cast<int>(blockIdx.x) * kHeads);
  if constexpr (deals_works<Tr>()) {
    run_dealing<Tr, Multiplier>(p, shape, boxes, key_map, value_map, entry, part, smem, warp, lane);
  } else {
    run_row<Tr, Multiplier>(p, shape, boxes, key_map, value_map, entry, part, smem, warp, lane);
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
