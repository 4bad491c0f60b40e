#pragma once
#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "sparse_indexer/sm90/logits.cuh"

namespace attnops::sparse_indexer::sm90 {

template <int kHeads>
void launch_heads(const LogitsParams& p, cudaStream_t stream) {
  constexpr int kTokens = kBlockColumns / kHeads;
  constexpr int kMost = 4 * (kKeyBytes + 2 * kBlockBytes);
  const int64_t together = !p.ragged ? p.seqlen_q : p.num_rows;
  if (p.num_rows == 0 || together == 0) return;
  Memory memory{};
  memory.blocks = static_cast<int>(min_of<int64_t>(kMaxBlocks, ceil_div<int64_t>(together, kTokens)));
  memory.stages = min_of(kMaxStages, kMost / (kKeyBytes + memory.blocks * kBlockBytes));
  const bool aligned_keys =
      !p.ragged ? rows_aligned(p.pages.data, 1, 16, p.pages.stride_page) : rows_aligned(p.k, 1, 16, p.stride_k);
  memory.wide = aligned_keys && rows_aligned(p.q, 1, 16, p.stride_token, p.stride_head);
  const int bytes = memory.stages * (kKeyBytes + memory.blocks * kBlockBytes);
  launch_dependent<&index_logits_kernel<kHeads>>("index_logits", {device_sms("index_logits"), kThreads, bytes, kMost},
                                                 stream, p, memory);
}

}  // namespace attnops::sparse_indexer::sm90
