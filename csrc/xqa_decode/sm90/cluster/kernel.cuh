#pragma once
#include "device/sm90/barrier.cuh"
#include "xqa_decode/sm90/cluster/attend.cuh"
#include "xqa_decode/sm90/cluster/merge.cuh"

namespace attnops::xqa_decode::sm90 {

// One CTA's share of a work, and its slice of the merge. `pages` are those of the warp's first chunks, if the guess was
// right.
template <class Tr>
__device__ __forceinline__ void run_share(const Params& p, const Shape& shape, const ClusterShape& cluster,
                                          const WorkPlace& place, const SharePiece& piece, bool pages_known, int pages,
                                          int rank, int share, int warp, int lane, uint8_t* smem) {
  const int cluster_index = share >> cluster.log_ctas;
  const int senders = min_of(piece.used_shares() - (cluster_index << cluster.log_ctas), 1 << cluster.log_ctas);
  if (senders <= 0) return;
  const int own_items = min_of(shape.rows * (Tr::kHeadDim / 4) - (rank << cluster.log_slice), 1 << cluster.log_slice);
  if (rank < senders) {
    KeyStream<Tr, SharePiece> stream(p, shape, piece, warp, lane, smem);
    if (pages_known && stream.chunks_stay_in_pages()) {
      stream.start(pages);
    } else {
      stream.start();
    }
#pragma unroll 1
    for (int s = 0; s < Tr::kStages - 1; ++s) stream.issue(s);
    attend_share<Tr>(p, shape, piece, place, stream, warp, lane, smem);
  }
  cluster_wait();  // everybody's barrier is there
  if (rank < senders) send_items<Tr>(shape, cluster, rank, smem);
  if (own_items <= 0) return;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(attnops::smem_address(smem) + Inbox<Tr>::kBarrier, senders * own_items * 24);
  }
  const int clusters = ceil_div(piece.used_shares(), 1 << cluster.log_ctas);
  merge_slice<Tr>(p, shape, cluster, place, rank, senders, cluster_index, clusters, warp, lane, smem);
}

// Short calls. The CTAs of a cluster divide a work evenly from its length alone, without the plan, and merge through
// each other's shared memory.
//
// Little happens in such a call, and all of it in a row: so as much as possible is done before the kernels ahead have
// ended, the first loads after that do not wait for each other, and code on the way is short.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    xqa_cluster_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                       const __grid_constant__ ClusterShape cluster) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = cluster_rank(), index = static_cast<int>(blockIdx.x) >> cluster.log_ctas;
  const int work = index >> cluster.log_clusters;
  const int share = ((index & ((1 << cluster.log_clusters) - 1)) << cluster.log_ctas) + rank;
  const int request = shape.by_kv_heads.divide(work);
  const WorkPlace place{work, request, work - request * p.num_kv_heads};
  if (threadIdx.x == 0) {
    mbarrier_init(attnops::smem_address(smem) + Inbox<Tr>::kBarrier, 1);
    mbarrier_init_fence();
  }
  cluster_arrive();
  const ShareGuess<Tr> guess(p, shape, cluster, request, place.kv_head, share, warp, lane);
  guess.prefetch(p, shape, lane);

  let_next_kernel_start();  // it waits for this one in any case, and this one for those ahead
  wait_for_earlier_kernels();
  const int length = __ldcg(p.cache_seqlens + request);
  const int pages = guess.pages_now();
  if constexpr (!Tr::kFp8) {
    ask_for_queries<Tr>(p, shape, place, attnops::smem_address(smem) + SharedLayout<Tr>::kQueries);
  }
  SharePiece piece = guess.piece();
  const bool right = guess.is_right(length);
  if (!right) piece = SharePiece(p, request, place.kv_head, length, share, cluster.log_shares());
  run_share<Tr>(p, shape, cluster, place, piece, right && !p.page_table.kv_indptr, pages, rank, share, warp, lane,
                smem);
}

}  // namespace attnops::xqa_decode::sm90
