#pragma once
#include "device/common/launch_dependent.cuh"
#include "mla_decode/sm90/fp8_products/kernel.cuh"
#include "mla_decode/sm90/fp8_products/launch.h"
#include "mla_decode/sm90/launch.cuh"
#include "mla_decode/sm90/raw_query_maps.h"

namespace attnops::mla_decode::sm90::fp8_products {

// Boxes of 64 bytes x 64 rows for the rope part, under the 64-byte swizzle.
inline CUtensorMap make_rope_map(const Params& p) {
  const cuuint32_t box[3] = {kHeadDimRope, kPlanTileTokens, 1};
  const cuuint64_t extents[3] = {kHeadDimQk, static_cast<cuuint64_t>(p.page_table.page_size),
                                 static_cast<cuuint64_t>(p.page_table.num_pages)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(p.kv_stride_token), static_cast<cuuint64_t>(p.kv_stride_page)};
  return attnops::sm90::encode_tensor_map(p.kv_dtype, p.kv_pages, 3, extents, strides, box,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_SWIZZLE_64B);
}

template <typename T, Options kOptions>
void launch_attention(const Params& p, const Modes& modes, cudaStream_t stream) {
  Maps maps{};
  if (modes.use_boxes) maps.latent = make_map(p), maps.rope = make_rope_map(p);
  if (modes.queries_by_map) maps.queries = make_raw_query_maps(p);
  constexpr int kBytes = Layout::kBytes;
  launch_dependent<&mla_decode_fp8_products_kernel<T, kOptions>>(
      "mla_decode_fp8_products_kernel", {p.num_sm_parts, kAllThreads, kBytes, kBytes}, stream, p, maps, modes);
}

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const Modes modes{.use_boxes = boxes_fit(p),
                    .queries_by_map = queries_fit(p),
                    .out_aligned = output_aligned(p),
                    .tiles_per_page = max_of(p.page_table.page_size / kPlanTileTokens, 1)};
  if (is_common(p, modes.out_aligned)) {
    launch_attention<T, Options::kCommon>(p, modes, stream);
  } else {
    launch_attention<T, Options::kAll>(p, modes, stream);
  }
  launch_merge<T>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::fp8_products
