#pragma once
#include "device/sm90/tensor_map.h"
#include "mla_decode/sm90/raw_queries.cuh"

namespace attnops::mla_decode::sm90 {

inline CUtensorMap make_raw_query_map(const Params& p, const void* base, int width, int64_t head, int64_t request) {
  const int rows = p.seqlen_q * p.num_q_heads;
  const int64_t element = size_of(p.dtype);
  const cuuint32_t box[3] = {kQueryBoxDims, kPlanRows, 1};
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(p.batch_size)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head * element),
                                 static_cast<cuuint64_t>((p.batch_size == 1 ? head * rows : request) * element)};
  return attnops::sm90::encode_tensor_map(p.dtype, base, 3, extents, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Where queries_fit says so.
inline QueryMaps make_raw_query_maps(const Params& p) {
  QueryMaps maps{};
  maps.q = make_raw_query_map(p, p.q, p.q_pe ? kHeadDimV : kHeadDimQk, p.q_stride_head, p.q_stride_request);
  if (p.q_pe) maps.q_pe = make_raw_query_map(p, p.q_pe, kHeadDimRope, p.q_pe_stride_head, p.q_pe_stride_request);
  return maps;
}

}  // namespace attnops::mla_decode::sm90
