#pragma once
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "xqa_decode/cuda/kernel.cuh"
#include "xqa_decode/cuda/launch.h"

namespace attnops::xqa_decode {

inline int log2_or_minus_one(int value) {
  for (int shift = 0; shift < 31; ++shift) {
    if (value == 1 << shift) return shift;
  }
  return -1;
}

inline Shape make_shape(const Params& p, int rows_per_warp, int warps) {
  Shape shape{};
  shape.group = p.num_q_heads / p.num_kv_heads;
  shape.rows = p.seqlen_q * shape.group;
  shape.heads_side_by_side = heads_side_by_side(p.num_sm_parts, p.num_kv_heads);
  const int heads_of_work = shape.heads_side_by_side ? p.num_kv_heads : 1;
  shape.plan_works = p.batch_size * (p.num_kv_heads / heads_of_work);
  shape.plan_groups = p.num_sm_parts / heads_of_work;
  shape.by_group = Divisor(shape.group);
  shape.by_kv_heads = Divisor(p.num_kv_heads);
  shape.by_page_size = Divisor(p.page_table.page_size);
  shape.row_groups = 1;
  while (shape.row_groups < warps && shape.row_groups * rows_per_warp < shape.rows) shape.row_groups *= 2;
  shape.row_blocks = ceil_div(shape.rows, shape.row_groups * rows_per_warp);
  shape.page_shift = log2_or_minus_one(p.page_table.page_size);
  const int kv_size = size_of(p.kv_dtype), size = size_of(p.dtype);
  shape.vector_keys = p.head_dim * kv_size % 16 == 0 &&
                      rows_aligned(p.k_pages, kv_size, 16, p.k_stride_page, p.k_stride_token, p.k_stride_head) &&
                      rows_aligned(p.v_pages, kv_size, 16, p.v_stride_page, p.v_stride_token, p.v_stride_head);
  shape.k_page = p.k_stride_page * kv_size, shape.k_token = p.k_stride_token * kv_size;
  shape.v_page = p.v_stride_page * kv_size, shape.v_token = p.v_stride_token * kv_size;
  shape.same_strides = shape.k_page == shape.v_page && shape.k_token == shape.v_token;
  shape.pair_queries =
      p.head_dim % 2 == 0 && rows_aligned(p.q, size, 4, p.q_stride_request, p.q_stride_token, p.q_stride_head);
  shape.wide_partials = p.head_dim % 4 == 0;
  shape.vector_out =
      shape.wide_partials && rows_aligned(p.out, size, 8, p.out_stride_request, p.out_stride_token, p.out_stride_head);
  return shape;
}

template <class Tr>
void launch_rows(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const Shape shape = make_shape(p, Tr::kRows, Tr::kWarps);
  using Shared = SharedLayout<Tr>;
  launch_dependent<&xqa_decode_kernel<Tr>>(
      "xqa_decode", {p.num_sm_parts, Tr::kThreads, Shared::bytes(shape.row_groups), Shared::bytes(Tr::kWarps)}, stream,
      p, shape);
}

// A warp has one row tile, or two when there are more than 8 query rows.
template <typename T, bool kFp8, int kHeadDim, typename Fp8 = __nv_fp8_e4m3>
void launch(const Params& p, cudaStream_t stream) {
  if (p.seqlen_q * (p.num_q_heads / p.num_kv_heads) <= 8)
    return launch_rows<Traits<T, kFp8, kHeadDim, 1, Fp8>>(p, stream);
  launch_rows<Traits<T, kFp8, kHeadDim, 2, Fp8>>(p, stream);
}

}  // namespace attnops::xqa_decode
