#pragma once
#include "xqa_decode/cuda/kernel.cuh"
#include "xqa_decode/cuda/work_walk.cuh"
#include "xqa_decode/sm90/dealt_works.cuh"
#include "xqa_decode/sm90/lone_warp.cuh"
#include "xqa_decode/sm90/query_copy.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

// Parts of many short works. A work of a tile or two takes a warpgroup 3 us and more, nearly all of it waits: for
// queries, for barriers, for one instruction after the other. So every warp of the CTA takes works of its own, by the
// portable kernel's arithmetic: more works wait at the same time.
namespace attnops::xqa_decode::sm90 {

inline constexpr int kMostShortTokens = 128;  // of a short work; half of them in the mean, where some are longer
inline constexpr int kFewestShortWorks = 4;   // of a part; of half their tokens LoneWarp takes two, too
// Of the longest work, for each work of the part: in the time that a warp needs for it the others do theirs, of which
// each would keep all of the CTA waiting.
inline constexpr int kMostTokensBesideWork = 16;

// The portable kernel's traits, for a warp alone. Its rows are a power of two.
inline constexpr int portable_head_dim(int head_dim) { return head_dim == 192 ? 256 : head_dim; }

template <class Tr>
struct WarpTraits : xqa_decode::Traits<typename Tr::T, Tr::kFp8, portable_head_dim(Tr::kHeadDim), Tr::kRows / 8> {
  using Base = xqa_decode::Traits<typename Tr::T, Tr::kFp8, portable_head_dim(Tr::kHeadDim), Tr::kRows / 8>;
  static constexpr int kWarps = 1;
  static constexpr int kThreads = 32;
  static constexpr int kStages = 2;
  static constexpr int kRingBytes = kStages * Base::kStageBytes;
};

template <class Tr>
struct ShortWorks {
  using Warp = WarpTraits<Tr>;
  using Shared = xqa_decode::SharedLayout<Warp>;
  static constexpr int kBytesOfWarp = (Shared::bytes(1) + 1023) / 1024 * 1024;
  // Below the barriers of the ring, and what nobody reads beside them.
  static constexpr int kWarps = min_of(Tr::kAllThreads / 32, sm90::SharedLayout<Tr>::kFull / kBytesOfWarp);
};

// Kernels that take such parts so. Of more rows, in blocks of a warp each, keys are read several times, which is
// slower; kernels that fold add cuts up in an order of their own, and those of two KV heads have another ring.
template <class Tr>
inline constexpr bool kHasShortWorks =
    !Tr::kFolds && !is_ragged<Tr>() && Tr::kHeads == 1 && (Tr::kRows == 8 || (Tr::kRows == 16 && Tr::kHeadDim <= 128));
// Those of the usual kind by LoneWarp, and all others by the portable kernel's arithmetic, but for two row tiles over
// e4m3 pages: registers are short. Two warpgroups for one KV head have none for LoneWarp; of those for two heads one
// gives the other one its own.
template <class Tr>
inline constexpr bool kHasLoneWarps = Tr::kHeads > 1 ||
                                      (kHasShortWorks<Tr> && Tr::kHeadDim <= 128 && !(Tr::kFp8 && Tr::kGroups > 1));
template <class Tr>
inline constexpr bool kHasAnyShortWorks = kHasShortWorks<Tr> && (Tr::kRows == 8 || !Tr::kFp8);

// Whether the part has many works, all of them whole, and short but for some. Every warp finds that out by itself.
template <class Tr>
__device__ __forceinline__ bool all_short(const Params& p, const Shape& shape, const SplitKvEntry& entry, bool lone,
                                          int lane) {
  const int works = entry.end_work - entry.begin_work;
  if (works < (lone ? kFewestShortWorks / 2 : kFewestShortWorks) || p.fixed_split_tokens != 0) return false;
  if (entry.begin_tile > 0 || entry.end_tile > 0) return false;
  if (entry.begin_num_splits > 1 || entry.last_num_splits > 1) return false;
  const bool whole_requests = shape.heads_side_by_side;
  const int first = whole_requests ? entry.begin_work : shape.by_kv_heads.divide(entry.begin_work);
  const int last = whole_requests ? entry.end_work - 1 : shape.by_kv_heads.divide(entry.end_work - 1);
  int longest = 0;
  unsigned total = 0;
#pragma unroll 1
  for (int request = first + lane; request <= last; request += 32) {
    const KvRange keys = visible_keys(length_of(__ldg(p.cache_seqlens + request)), p.seqlen_q, p.window_left);
    const int tokens = min_of(keys.end - keys.begin, 1 << 16);
    longest = max_of(longest, tokens), total += tokens;
  }
  longest = __reduce_max_sync(~0u, longest);
  if (longest <= (works < kFewestShortWorks ? kMostShortTokens / 2 : kMostShortTokens)) return true;
  return longest <= kMostTokensBesideWork * works &&
         __reduce_add_sync(~0u, total) <= static_cast<unsigned>(kMostShortTokens / 2) * (last - first + 1);
}

// The queries of a warp's works, one after the other.
template <class Warp>
class WarpQueries {
 public:
  using T = typename Warp::T;

  __device__ __forceinline__ WarpQueries(const Params& p, const Shape& shape, const Boxes& boxes, T* queries,
                                         float* row_scale, int lane)
      : p_(p), shape_(shape), boxes_(boxes), queries_(queries), row_scale_(row_scale), lane_(lane) {
    // Rows that there are not are zeros, once and for all.
    for (int i = lane; i < Warp::kRows * Warp::kHeadDim / 8; i += 32) {
      reinterpret_cast<uint4*>(queries)[i] = make_uint4(0, 0, 0, 0);
    }
    for (int i = lane; i < Warp::kRows; i += 32) row_scale[i] = 1.f;
    __syncwarp();
  }

  // Asks for those of a work, when nobody needs the last one's any more.
  template <class Walk>
  __device__ __forceinline__ void fetch(const Walk& work) {
    if constexpr (!Warp::kFp8) {
      copy_queries_of_warp<Warp>(p_, shape_, boxes_, work.request(), work.kv_head(), hopper::smem_address(queries_),
                                 lane_);
    }
  }

  // Until those of the work are where the product reads them. Over e4m3 pages they change their type on the way, a few
  // rows at a time: registers are short.
  __device__ __forceinline__ void wait(const WorkPlace& place) {
    if constexpr (Warp::kFp8) {
#pragma unroll 1
      for (int first = 0; first < shape_.rows; first += kRowsAtATime) {
        QueryRow<Warp> rows[kRowsAtATime];
#pragma unroll
        for (int i = 0; i < kRowsAtATime; ++i) rows[i].fetch(p_, shape_, place, first + i, lane_);
#pragma unroll
        for (int i = 0; i < kRowsAtATime; ++i) rows[i].place(queries_, row_scale_, first + i, lane_);
      }
    } else {
      cp_async_commit();
      cp_async_wait<0>();  // the work's first keys, too, are needed at once
    }
    __syncwarp();
  }

 private:
  static constexpr int kRowsAtATime = 2;

  const Params& p_;
  const Shape& shape_;
  const Boxes& boxes_;
  T* const queries_;
  float* const row_scale_;
  const int lane_;
};

// What a warp does with its works, of any kind.
template <class Tr, class Walk>
__device__ __forceinline__ void attend_short_works(const Params& p, const Shape& shape, const Boxes& boxes, Walk& work,
                                                   uint8_t* smem, int warp, int lane) {
  using Warp = typename ShortWorks<Tr>::Warp;
  using Shared = typename ShortWorks<Tr>::Shared;
  uint8_t* const own = smem + warp * ShortWorks<Tr>::kBytesOfWarp;
  auto* const stats = reinterpret_cast<float2*>(own + Shared::kStats);
  int* const free_stage = reinterpret_cast<int*>(own + Shared::kFree);
  auto* const row_scale = reinterpret_cast<float*>(own + Shared::kRowScale);
  auto* const queries = reinterpret_cast<typename Warp::T*>(own + Shared::kQueries);
  const uint32_t ring = hopper::smem_address(own) + Shared::kRing;

  if (!work.next()) return;
  WarpQueries<Warp> next_queries(p, shape, boxes, queries, row_scale, lane);
  next_queries.fetch(work);
  KeyStream<Warp, Walk> stream(p, shape, work, 0, lane, own);
  int head = 0;  // the stage to compute with next; the one before it is free
#pragma unroll 1
  for (int s = -1; s < Warp::kStages - 1; ++s) stream.issue(s);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkPlace place{work.work(), work.request(), work.kv_head()};
    next_queries.wait(place);
    RowTile<Warp> tile;
    {
      const float k_scale = p.k_scale ? __ldg(p.k_scale + place.kv_head * p.k_scale_stride) : 1.f;
      tile.begin(hopper::smem_address(queries), row_scale, p.softmax_scale * k_scale * kLog2e, lane);
    }
    const int chunks = num_chunks<Warp>(work);
    // Keys [all_begin, all_end) are seen by every row. A tree may hide even the first new token.
    const int all_end = p.causal || p.tree_mask
                            ? min_of(work.length() - (p.tree_mask ? p.tree_keys : p.seqlen_q - 1), work.keys().end)
                            : work.keys().end;
    const int all_begin = p.window_left < 0 ? 0 : work.length() - 1 - p.window_left;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      __syncwarp();  // all lanes are done with the free stage
      stream.issue(head == 0 ? Warp::kStages - 1 : head - 1);
      cp_async_wait<Warp::kStages - 1>();
      __syncwarp();  // all lanes' keys have come
      const uint32_t stage = ring + head * Warp::kStageBytes;
      const int first_key = work.first_token() + chunk * Warp::kChunk;
      float scores[Warp::kKeyTiles][Warp::kRowTiles][4] = {};
      uint32_t probs[Warp::kKeyTiles][Warp::kRowTiles][2];
      tile.multiply_keys(stage, lane, scores);
      tile.scale_scores(p.logit_cap, scores);
      if (first_key + Warp::kChunk > all_end || first_key < all_begin) {
        RowTile<Warp>::mask_scores(p, shape, work, 0, first_key, ~0u, lane, scores);
      }
      tile.soften(scores, probs);
      tile.multiply_values(stage + Warp::kChunk * Warp::kKeyBytes, lane, probs);
      head = head + 1 == Warp::kStages ? 0 : head + 1;
    }
    __syncwarp();
    const int free_offset = Shared::kRing + (head == 0 ? Warp::kStages - 1 : head - 1) * Warp::kStageBytes;
    tile.leave(reinterpret_cast<float*>(own + free_offset), stats, lane);
    if (lane == 0) free_stage[0] = free_offset;
    __syncwarp();
    more = work.next();
    if (more) next_queries.fetch(work);
    store_piece<Warp>(p, shape, place, {0, 1, 0, 0, 0, 1}, 0, own, lane);
    __syncwarp();  // the results are read
  }
}

// Whether the part was one of short works, and this warp has done its own.
template <class Tr>
__device__ __forceinline__ bool take_short_works(const Params& p, const Shape& shape, const Boxes& boxes,
                                                 const SplitKvEntry& entry, int part, uint8_t* smem, int warp,
                                                 int lane) {
  bool lone = false;
  if constexpr (kHasLoneWarps<Tr>) lone = LoneWarp<Tr>::serves(p, shape, boxes);
  if (!lone && !kHasAnyShortWorks<Tr>) return false;
  if (!all_short<Tr>(p, shape, entry, lone, lane)) return false;
  if constexpr (kHasLoneWarps<Tr>) {
    if (lone) {
      constexpr int kWarps = Tr::kHeads > 1 ? Tr::kWarps : Tr::kAllThreads / 32;
      if constexpr (Tr::kHeads > 1) {
        constexpr int kWarpsOfHead = Tr::kThreads / 32, kLeft = 24, kTaken = 160;
        if (warp >= Tr::kHeads * kWarpsOfHead) return true;
        if (warp % kWarpsOfHead >= kWarps) {
          hopper::registers_decrease<kLeft>();
          return true;
        }
        hopper::registers_increase<kTaken>();
      }
      auto* const queue = reinterpret_cast<int4*>(smem + warp * LoneWarp<Tr>::kQueueBytes);
      const int own = Tr::kHeads > 1 ? warp % kWarps : warp;
      LoneWarp<Tr>(p, shape, boxes, part, own, kWarps, queue, lane).run(entry);
      return true;
    }
  }
  if constexpr (kHasAnyShortWorks<Tr>) {
    if (warp >= ShortWorks<Tr>::kWarps) return true;
    WorkWalk work(p, shape, entry, part, warp, ShortWorks<Tr>::kWarps);
    attend_short_works<Tr>(p, shape, boxes, work, smem, warp, lane);
  }
  return true;
}

// Whether those of a batch-invariant call are for lone warps: by what all calls over the same pages have alike.
template <class Tr>
__device__ __forceinline__ bool leaves_short_works(const Params& p, const Shape& shape, const Boxes& boxes) {
  return LoneWarp<Tr>::serves(p, shape, boxes);
}

// Batch-invariant plans: the short works of a part, which its warps take alone wherever lone warps serve the call. A
// work is whoever's who has its beginning. False if no other work is left.
template <class Tr>
__device__ __forceinline__ bool take_invariant_works(const Params& p, const Shape& shape, const Boxes& boxes,
                                                     const SplitKvEntry& entry, int part, uint8_t* smem, int warp,
                                                     int lane) {
  constexpr int kWarps = Tr::kAllThreads / 32;
  static_assert(kWarps * LoneWarp<Tr>::kQueueBytes <= sm90::SharedLayout<Tr>::kFull);
  const bool begins = entry.begin_tile == 0, last_cut = entry.end_tile != 0 && entry.end_work < shape.plan_works;
  const int begin = entry.begin_work + (begins ? 0 : 1), end = entry.end_work + (last_cut ? 1 : 0);
  if (begin >= end) return true;
  const int kv_head = shape.heads_side_by_side ? part - shape.by_kv_heads.divide(part) * p.num_kv_heads : -1;
  auto* const queue = reinterpret_cast<int4*>(smem + warp * LoneWarp<Tr>::kQueueBytes);
  LoneWarp<Tr> works(p, shape, boxes, part, warp, kWarps, queue, lane);
  works.take_invariant({begin, end, kv_head, begins && end - begin == 1 ? 1 : 0});
  works.attend_all();
  if (begins && works.short_works() == end - begin) return false;
  // The ring was theirs, if only for what they count.
  hopper::fence_async_proxy();
  __syncthreads();
  return true;
}

// The works that are dealt to warps alone, or a part of short works; false if it is another part. They come first:
// those that CTAs take end together.
template <class Tr>
__device__ __forceinline__ bool take_short_works_or_part(const Params& p, const Shape& shape, const Boxes& boxes,
                                                         const SplitKvEntry& entry, const Deal& deal, int part,
                                                         uint8_t* smem, int warp, int lane) {
  static_assert(kHasLoneWarps<Tr>);
  constexpr int kWarps = Tr::kAllThreads / 32;
  const bool dealt = deal.by_warps > 0;
  if (!dealt && !all_short<Tr>(p, shape, entry, true, lane)) return false;
  const int parts = p.num_sm_parts - deal.first_part, number = warp * parts + part - deal.first_part;
  auto* const queue = reinterpret_cast<int4*>(smem + warp * LoneWarp<Tr>::kQueueBytes);
  LoneWarp<Tr> works(p, shape, boxes, part, warp, kWarps, queue, lane);
  if (dealt) {
    works.take_dealt(deal.by_ctas, deal.by_warps, number, kWarps * parts);
  } else {
    works.take_part(entry);
  }
  works.attend_all();
  return true;
}

}  // namespace attnops::xqa_decode::sm90
