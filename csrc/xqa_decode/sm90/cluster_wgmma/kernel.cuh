#pragma once
#include "xqa_decode/sm90/cluster_wgmma/fold_merge.cuh"
#include "xqa_decode/sm90/cluster_wgmma/leaf_piece.cuh"
#include "xqa_decode/sm90/cluster_wgmma/long_call.cuh"
#include "xqa_decode/sm90/cluster_wgmma/merge.cuh"
#include "xqa_decode/sm90/kernel.cuh"

namespace attnops::xqa_decode::sm90 {

// A share of a work: an even one, or one of whole leaves in batch-invariant mode.
template <class Tr>
__device__ __forceinline__ auto share_piece(const Params& p, const Team& team, const WorkPlace& place, int length,
                                            int share) {
  if constexpr (Tr::kFolds) {
    return LeafPiece(p, team, place.request, place.kv_head, length, share, Tr::kFp8);
  } else {
    return SharePiece(p, place.request, place.kv_head, length, share, team.lone_tiles, team.ctas, team.by_ctas,
                      team.shares, team.by_shares, Tr::kFp8);
  }
}

inline constexpr int kShortShare = 8;  // tiles

// The warp that asks for tiles. What can be done before the kernels ahead have ended is done then, on a guess of the
// length and of the page numbers; afterwards both are read again, together, and only these count.
template <class Tr>
__device__ __forceinline__ void bring_share(const Params& p, const Shape& shape, const Boxes& boxes, const Team& team,
                                            const CUtensorMap* keys, const CUtensorMap* values, const WorkPlace& place,
                                            int share, bool has_share, uint32_t shared, int lane) {
  if (lane == 0) {
    hopper::prefetch_map(keys);
    hopper::prefetch_map(values);
  }
  const int32_t* length_at = p.cache_seqlens + (has_share ? place.request : 0);
  const int guess = hopper::load_guess(length_at);
  const bool guessed_long = is_long<Tr, true>(p, team, lane);
  TileStream<Tr> stream(p, boxes, keys, values, shape, shared, lane);
  if (!has_share || guessed_long) {
    if (guessed_long) prefetch_first_tile<Tr>(p, shape, boxes, *keys, *values, blockIdx.x, shared, lane);
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int length = __ldcg(length_at);
    if (is_long<Tr>(p, team, lane)) return bring_part<Tr>(p, shape, boxes, keys, values, shared, 0, lane);
    if (has_share) stream.bring(share_piece<Tr>(p, team, place, length, share));
    return;
  }
  auto piece = share_piece<Tr>(p, team, place, guess, share);
  const int32_t* page_at = nullptr;              // of the l-th run of box tokens, in lane l, where there is one
  const bool guessed = !p.page_table.kv_indptr;  // else where a request's pages begin would be one more guess
  if (guessed) {
    const int token = piece.first_token() + lane * boxes.tokens, cell = token >> shape.page_shift;
    const bool wanted = token >= 0 && token < piece.end_token() && token + boxes.tokens > piece.keys().begin;
    if (wanted && cell < p.page_table.max_pages) page_at = p.page_table.row(place.request) + cell;
    stream.open(piece);
    stream.prefetch(piece, page_at ? hopper::load_guess(page_at) : -1);
  }
  const auto first = stream.first_tile(piece);
  // Of a short share the next kernel's first tiles, which it asks for ahead, should not come before this one's last.
  const int tiles = num_tiles(piece);
  const bool is_short = tiles > 0 && tiles <= kShortShare;
  if (!is_short) let_next_kernel_start();  // it waits for this one in any case, and this one for those ahead
  wait_for_earlier_kernels();
  const int length = __ldcg(length_at);
  const int pages = page_at ? __ldcg(page_at) : 0;
  if (is_long<Tr>(p, team, lane)) {
    let_next_kernel_start();
    return bring_part<Tr>(p, shape, boxes, keys, values, shared, 0, lane);
  }
  if (guessed && length == guess) {
    stream.bring(piece, first, pages, [is_short](int tiles_left) {
      if (is_short && tiles_left == 1) let_next_kernel_start();
    });
  } else {
    let_next_kernel_start();
    piece = share_piece<Tr>(p, team, place, length, share);
    stream.bring(piece);
  }
}

// The same where rows are gathered: the two warps that copy them.
template <class Tr>
__device__ __forceinline__ void gather_share(const Params& p, const Shape& shape, const Boxes& boxes, const Team& team,
                                             const WorkPlace& place, int share, bool has_share, uint32_t shared,
                                             int warp, int lane) {
  const int32_t* length_at = p.cache_seqlens + (has_share ? place.request : 0);
  const int guess = has_share ? hopper::load_guess(length_at) : 0;
  // A CTA without a share has a place behind the last request, for which a CSR table has no row to look up.
  auto piece = share_piece<Tr>(p, team, {place.work, has_share ? place.request : 0, place.kv_head}, guess, share);
  GatherStream<Tr> stream(p, shape, shared, warp, lane);
  const int32_t* cells[2] = {nullptr, nullptr};
  const bool guessed = has_share && !p.page_table.kv_indptr && num_tiles(piece) > 0;
  if (guessed) {
    stream.open(piece);
#pragma unroll
    for (int i = 0; i < 2; ++i) cells[i] = stream.first_cell(piece, i);
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int length = __ldcg(length_at);
  int pages[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) pages[i] = cells[i] ? __ldcg(cells[i]) : 0;
  if (is_long<Tr>(p, team, lane)) return bring_part<Tr>(p, shape, boxes, nullptr, nullptr, shared, warp, lane);
  if (!has_share) return;
  if (guessed && length == guess) {
    stream.bring(piece, pages);
  } else {
    piece = share_piece<Tr>(p, team, place, length, share);
    stream.bring(piece);
  }
}

// All leaves of a share, up to one node of the tree.
template <class Tr>
__device__ __forceinline__ void attend_node(uint8_t* smem, Consumer<Tr>& consumer, const LeafPiece& piece,
                                            Block<Tr>& block) {
  if (num_tiles(piece) == 0) return Fold<Tr>::finish(block);
  Fold<Tr> fold(smem, piece.first_leaf(), piece.end_leaf(), piece.known_leaves(), Tr::kFoldLevels);
  consumer.attend_leaves(piece, piece.leaf_tiles(), 0, block, [&] { fold.take(block); });
}

// The warpgroup that multiplies.
template <class Tr>
__device__ __forceinline__ void multiply_share(const Params& p, const Shape& shape, const Boxes& boxes,
                                               const Team& team, const WorkPlace& place, int share, bool has_share,
                                               int rank, int cluster_index, uint8_t* smem) {
  const uint32_t shared = hopper::smem_address(smem);
  wait_for_earlier_kernels();
  const int length = has_share ? __ldcg(p.cache_seqlens + place.request) : 0;
  if (is_long<Tr>(p, team, threadIdx.x % 32)) {
    cluster_wait();
    return multiply_part<Tr>(p, shape, boxes, smem);
  }
  if (!has_share) return cluster_wait();
  Consumer<Tr> consumer(p, shape, boxes, smem);
  Block<Tr> block;
  consumer.begin(place, place.first_row, block);
  const auto piece = share_piece<Tr>(p, team, place, length, share);
  const int senders = min_of(piece.used_shares() - cluster_index * team.ctas, team.ctas);
  if constexpr (Tr::kFolds) {
    if (rank < senders) attend_node<Tr>(smem, consumer, piece, block);
  } else {
    if (rank < senders) consumer.attend(piece, place.first_row, block);
  }
  cluster_wait();  // everybody's barrier is there
  if (senders <= 0) return;
  const int rows = rows_of(shape, place);
  if (rank < senders) send_units<Tr>(team, block, rows, rank, shared);
  const int first = rank * team.slice;
  const int own = min_of(rows * TeamInbox<Tr>::kUnitsPerRow - first, team.slice);
  if (own <= 0) return;
  if (threadIdx.x == 0) {
    hopper::mbarrier_arrive_expect(shared + SharedLayout<Tr>::kInboxFull, senders * own * kUnitItems * 24);
  }
  const int clusters = team.by_ctas.divide(piece.used_shares() + team.ctas - 1);
  const bool few = team.ctas <= kFew && team.clusters == 1;
  if constexpr (Tr::kFolds) {
    if (few) return merge_few_nodes<Tr>(p, shape, team, place, rank, senders, own, shared, smem);
    merge_nodes<Tr>(p, shape, team, place, rank, senders, cluster_index, clusters, shared, smem);
  } else {
    if (few) return merge_few<Tr>(p, shape, team, place, rank, senders, own, shared, smem);
    merge_units<Tr>(p, shape, team, place, rank, senders, cluster_index, clusters, shared, smem);
  }
}

// What a CTA of a team does. `place_of`: says where a work is, by its number.
template <class Tr, class PlaceOf>
__device__ __forceinline__ void run_team(const Params& p, const Shape& shape, const Boxes& boxes, const Team& team,
                                         const CUtensorMap& key_map, const CUtensorMap& value_map, uint8_t* smem,
                                         const PlaceOf& place_of) {
  const uint32_t shared = hopper::smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = cluster_rank(), index = team.by_ctas.divide(static_cast<int>(blockIdx.x));
  const int work = team.by_clusters.divide(index), cluster_index = index - work * team.clusters;
  const int share = cluster_index * team.ctas + rank;
  const WorkPlace place = place_of(work);
  const bool has_share = place.request < p.batch_size;  // there may be more parts than shares
  if (threadIdx.x == 0) {
    hopper::mbarrier_init(shared + SharedLayout<Tr>::kInboxFull, 1);
    init_barriers<Tr>(shared);
  }
  __syncthreads();
  cluster_arrive_relaxed();
  if (warp >= Tr::kWarps) {
    if constexpr (Tr::kGathers) {
      gather_share<Tr>(p, shape, boxes, team, place, share, has_share, shared, warp - Tr::kWarps, lane);
    } else {
      bring_share<Tr>(p, shape, boxes, team, &key_map, &value_map, place, share, has_share, shared, lane);
    }
    cluster_wait();
  } else {
    multiply_share<Tr>(p, shape, boxes, team, place, share, has_share, rank, cluster_index, smem);
  }
}

// Calls of few works. Short ones: as in cluster/ the CTAs of a cluster divide a work evenly from its length alone,
// without the plan, and merge through each other's shared memory; but keys stream and are multiplied as in the kernel
// of the plan. Long ones: CTA i does part i of the plan. The lengths decide, here: the host sees none.
template <class Tr>
__global__ void __launch_bounds__(Tr::kAllThreads, Tr::kCtasPerSm)
    xqa_cluster_wgmma_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                             const __grid_constant__ Boxes boxes, const __grid_constant__ Team team,
                             const __grid_constant__ CUtensorMap key_map,
                             const __grid_constant__ CUtensorMap value_map) {
  extern __shared__ __align__(1024) uint8_t smem[];
  run_team<Tr>(p, shape, boxes, team, key_map, value_map, smem, [&](int work) {
    const int request = shape.by_kv_heads.divide(work);
    return WorkPlace{work, request, work - request * p.num_kv_heads};
  });
}

// The same of many rows: a block of them is a work of its own, whose keys another one's CTAs read, too.
template <class Tr>
__global__ void __launch_bounds__(Tr::kAllThreads, Tr::kCtasPerSm)
    xqa_cluster_blocks_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                              const __grid_constant__ Boxes boxes, const __grid_constant__ BlockTeam team,
                              const __grid_constant__ CUtensorMap key_map,
                              const __grid_constant__ CUtensorMap value_map) {
  extern __shared__ __align__(1024) uint8_t smem[];
  run_team<Tr>(p, shape, boxes, team, key_map, value_map, smem, [&](int work) {
    const int of_keys = team.by_row_blocks.divide(work), request = shape.by_kv_heads.divide(of_keys);
    const int first_row = (work - of_keys * team.row_blocks) * Tr::kRows;
    return WorkPlace{work, request, of_keys - request * p.num_kv_heads, first_row,
                     min_of(shape.rows - first_row, Tr::kRows)};
  });
}

}  // namespace attnops::xqa_decode::sm90
