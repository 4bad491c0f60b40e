#pragma once
#include "device/sm90/tensor_map.h"
#include "mla_decode/sm90/raw_queries.cuh"

namespace attnops::mla_decode::sm90 {

// Where queries_fit says so. The latent part comes as boxes of so many rows and tiles of 64 columns.
inline QueryMaps make_raw_query_maps(const Params& p, int latent_rows = kPlanRows, int latent_tiles = kQueryTiles) {
  const auto rows = static_cast<cuuint64_t>(p.seqlen_q) * p.num_q_heads,
             requests = static_cast<cuuint64_t>(p.batch_size);
  const int64_t element = size_of(p.dtype);
  // Bytes from row to row, and from request to request.
  const auto row_stride = [&](int64_t head) { return static_cast<cuuint64_t>(head * element); };
  const auto request_stride = [&](int64_t head, int64_t request) {
    return p.batch_size == 1 ? row_stride(head) * rows : static_cast<cuuint64_t>(request * element);
  };
  const cuuint32_t latent_box[4] = {64, static_cast<cuuint32_t>(latent_rows), static_cast<cuuint32_t>(latent_tiles), 1},
                   rope_box[3] = {kQueryRopeDims, kPlanRows, 1};
  const cuuint64_t latent_extents[4] = {64, rows, kHeadDimV / 64, requests},
                   latent_strides[3] = {row_stride(p.q_stride_head), 64 * 2,
                                        request_stride(p.q_stride_head, p.q_stride_request)};
  const void* rope = p.q_pe ? p.q_pe : static_cast<const uint8_t*>(p.q) + (p.shared_rows ? 0 : kHeadDimV * element);
  const int64_t head = p.q_pe ? p.q_pe_stride_head : p.q_stride_head,
                request = p.q_pe ? p.q_pe_stride_request : p.q_stride_request;
  const cuuint64_t rope_extents[3] = {kHeadDimRope, rows, requests},
                   rope_strides[2] = {row_stride(head), request_stride(head, request)};
  constexpr auto kFetch = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return {attnops::sm90::encode_tensor_map(p.dtype, p.q, 4, latent_extents, latent_strides, latent_box, kFetch),
          attnops::sm90::encode_tensor_map(p.dtype, rope, 3, rope_extents, rope_strides, rope_box, kFetch,
                                           CU_TENSOR_MAP_SWIZZLE_NONE)};
}

}  // namespace attnops::mla_decode::sm90
