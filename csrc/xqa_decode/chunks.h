#pragma once
#include <cstdint>

#include "core/math.h"
#include "scheduler/split_kv.h"

// Requests of many tokens as several of few: chunks of up to `chunk_tokens`, one behind the other. A chunk is a request
// of a ragged batch. Its tokens are a part of the request's, its keys those that its last token sees, and its row of
// the page table is the request's. So kernels for few rows serve a batch in which few requests have more.
namespace attnops::xqa_decode {

inline constexpr int kMostChunks = 1 << 20;

struct ChunkParams {
  const int32_t* cu_seqlens_q;   // [B + 1]
  const int32_t* cache_seqlens;  // [B]
  int32_t* chunks;               // [3, max_chunks + 1]: cu_seqlens_q, cache_seqlens and rows of the page table
  int num_requests, max_chunks, chunk_tokens;
  bool causal;

  ATTNOPS_HOST_DEVICE int32_t* begins() const { return chunks; }
  ATTNOPS_HOST_DEVICE int32_t* lengths() const { return chunks + (max_chunks + int64_t{1}); }
  ATTNOPS_HOST_DEVICE int32_t* rows() const { return chunks + 2 * (max_chunks + int64_t{1}); }
};

// Of a request, `most` at most: sums over hostile lengths must not overflow.
ATTNOPS_HOST_DEVICE inline int num_chunks(int queries, int chunk_tokens, int most) {
  return queries > 0 ? min_of((queries - 1) / chunk_tokens + 1, most) : 0;
}

// Chunk `i` of request `request`, which owns the tokens [begin, end), becomes chunk `at` of the batch. Behind the last
// one stands where tokens end that a chunk has.
ATTNOPS_HOST_DEVICE inline void write_chunk(const ChunkParams& p, int request, int begin, int end, int length, int at,
                                            int i) {
  const int first = begin + i * p.chunk_tokens;
  p.begins()[at] = first;
  if (at >= p.max_chunks) return;
  const int behind = p.causal ? max_of(end - first - p.chunk_tokens, 0) : 0;  // tokens that it does not see
  p.lengths()[at] = max_of(length_of(length) - behind, 0);
  p.rows()[at] = request;
}

// A place that no chunk needs, or the one behind all of them.
ATTNOPS_HOST_DEVICE inline void write_no_chunk(const ChunkParams& p, int at) {
  p.begins()[at] = p.cu_seqlens_q[p.num_requests];
  if (at >= p.max_chunks) return;
  p.lengths()[at] = 0;
  p.rows()[at] = 0;
}

}  // namespace attnops::xqa_decode
