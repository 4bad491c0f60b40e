#pragma once
#include <utility>

#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "device/sm90/tensor_map.h"
#include "xqa_decode/cuda/launch.cuh"
#include "xqa_decode/sm90/fold_run.cuh"
#include "xqa_decode/sm90/kernel.cuh"
#include "xqa_decode/sm90/launch.h"

namespace attnops::xqa_decode::sm90 {

// K or V as the copy engine sees it: dims, tokens of a page, KV heads, pages. A miss in L2 fetches 128 bytes, a row of
// a box: what lies beyond belongs to other heads, and fetching it costs 6 %. `lone`: heads are read at times of their
// own. Where rows are no whole lines a miss then fetches the sectors that it needs, as the rest of a line would be
// fetched once more for the next head.
template <class Tr>
CUtensorMap make_map(const Params& p, const void* base, int64_t stride_token, int64_t stride_head, int64_t stride_page,
                     bool lone = false) {
  if constexpr (Tr::kGathers) return {};
  const auto extent = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  // The stride of a dimension of one element is free, but the encoder looks at it.
  const auto stride = [&](int64_t elements, int64_t n) { return n > 1 ? extent(elements * size_of(p.kv_dtype)) : 16; };
  const int64_t page_size = p.page_table.page_size, pages = p.page_table.num_pages, heads = p.num_kv_heads;
  const cuuint64_t extents[4] = {extent(p.head_dim), extent(page_size), extent(heads), extent(pages)};
  const cuuint64_t strides[3] = {stride(stride_token, page_size), stride(stride_head, heads),
                                 stride(stride_page, pages)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / size_of(p.kv_dtype)),
                             static_cast<cuuint32_t>(min_of(page_size, int64_t{64})), 1, 1};
  const bool sectors = lone && p.head_dim * size_of(p.kv_dtype) % 128 != 0;
  return hopper::encode_tensor_map(p.kv_dtype, base, 4, extents, strides, box,
                                   sectors ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <class Tr>
Boxes make_boxes(const Params& p) {
  Boxes boxes{};
  boxes.tokens = Tr::kGathers ? 1 : min_of(p.page_table.page_size, Tr::kTileTokens);
  boxes.bytes = boxes.tokens * 128;
  boxes.runs = Tr::kTileTokens / boxes.tokens;
  boxes.count = Tr::kColumns * boxes.runs * heads_of_cta<Tr>();
  boxes.units_of_long = Tr::kUnitsOfLong;
  boxes.row_blocks = 1;
  // Rows that are no whole lines share some with those of the next head: heads must not drift apart, or DRAM is read
  // twice. Measured over heads side by side, two, three and four units: d 80 197, 172, 206 us; d 112 242, 260, 286;
  // over e4m3 pages d 96 142, 135, 150 us; d 112 155, 170, 177.
  const bool heads_share_lines = p.num_kv_heads > 1 && p.k_stride_head < p.k_stride_token;
  if (Tr::kHeadDim == 128 && p.head_dim < 128 && heads_share_lines) {
    boxes.units_of_long = min_of(boxes.units_of_long, p.head_dim <= 96 ? 3 : 2);
  }
  const auto are_vectors = [&](const void* base, int64_t request, int64_t token, int64_t head) {
    const auto reach = [](int64_t stride, int64_t n) { return n > 1 ? (stride < 0 ? -stride : stride) * n : 0; };
    return p.head_dim % 8 == 0 && rows_aligned(base, size_of(p.dtype), 16, request, token, head) &&
           reach(token, p.seqlen_q) + reach(head, p.num_q_heads) < int64_t{1} << 31;
  };
  boxes.vector_queries = are_vectors(p.q, p.q_stride_request, p.q_stride_token, p.q_stride_head);
  boxes.vector_out = are_vectors(p.out, p.out_stride_request, p.out_stride_token, p.out_stride_head);
  boxes.q_token = static_cast<int>(p.q_stride_token), boxes.q_head = static_cast<int>(p.q_stride_head);
  boxes.out_token = static_cast<int>(p.out_stride_token), boxes.out_head = static_cast<int>(p.out_stride_head);
  return boxes;
}

template <class Tr>
void launch_traits(const Params& p, cudaStream_t stream) {
  Shape shape = make_shape(p, Tr::kRows, 1);
  Boxes boxes = make_boxes<Bringer<Tr>>(p);
  // A CTA for every block of rows, if they find their semaphores, one beside the other: the keys are then in L2.
  if (shape.row_blocks > 1 && p.num_semaphores >= int64_t{p.batch_size} * p.num_kv_heads * shape.row_blocks) {
    std::swap(shape.row_blocks, boxes.row_blocks);
  }
  const bool lone = Tr::kHeadDim <= 128 && p.num_kv_heads > 1 && !heads_side_by_side(p.num_sm_parts, p.num_kv_heads);
  const CUtensorMap keys = make_map<Tr>(p, p.k_pages, p.k_stride_token, p.k_stride_head, p.k_stride_page, lone);
  const CUtensorMap values = make_map<Tr>(p, p.v_pages, p.v_stride_token, p.v_stride_head, p.v_stride_page, lone);
  constexpr int kBytes = SharedLayout<Tr>::kBytes;
  launch_dependent<&xqa_decode_sm90_kernel<Tr>>("xqa_decode",
                                                {p.num_sm_parts * boxes.row_blocks, Tr::kAllThreads, kBytes, kBytes},
                                                stream, p, shape, boxes, keys, values);
}

// Whether works may be dealt out, if the plan says so. Where heads walk side by side, their groups divide many works
// well enough, but for few groups, and over e4m3 pages.
inline bool may_deal(const Params& p) {
  constexpr int kFewGroups = 3, kDealtWorksOfGroups = 2 * kDealtWorks;
  if (p.fixed_split_tokens != 0 || p.ragged) return false;
  const bool grouped = heads_side_by_side(p.num_sm_parts, p.num_kv_heads);
  const int64_t least = int64_t{grouped ? kDealtWorksOfGroups : kDealtWorks} * p.num_sm_parts;
  if (int64_t{p.batch_size} * p.num_kv_heads < least) return false;
  return !grouped || size_of(p.kv_dtype) == 1 || p.num_sm_parts / p.num_kv_heads <= kFewGroups;
}

// CTAs of an SM. Many rows of wide e4m3 pages hold their sums in nearly all registers of a thread, and need most of
// shared memory as fp16; up to 32 rows of 16-bit pages, which take long between tiles, leave room for a third. As in
// metadata/plan_parts.py.
template <typename Element, int kHeadDim, int kRows>
constexpr int most_ctas() {
  if (sizeof(Element) == 1) return kRows > 64 || kHeadDim * kRows > 128 * 64 ? 1 : 2;
  if (kHeadDim == 192 && kRows >= 64) return 1;
  return kRows == 32 && kHeadDim <= 128 ? 3 : 2;
}

template <typename T, int kHeadDim, int kRows, bool kGathers, typename Element = T>
using PlanTraits = Traits<T, kHeadDim, kRows, 0, most_ctas<Element, kHeadDim, kRows>(), kGathers, kNoFold, Element>;

// Whether these kernels have clusters beside them, and so compute batch-invariant plans by folding.
template <int kHeadDim>
inline constexpr bool kHasFolds = kHeadDim == 128;

template <typename T, int kHeadDim, int kRows, bool kGathers>
using FoldTraits = Traits<T, kHeadDim, kRows, 0, 2, kGathers, kRows == 8 ? 8 : 5>;  // as many levels as find room

// Rows that blocks of 64 take, two CTAs an SM, and not one of 128, which fills an SM: of two of those a half would be
// empty.
template <int kHeadDim>
constexpr bool in_small_blocks(int rows) {
  return rows <= 64 || (kHeadDim <= 128 && rows > 128 && rows <= 192);
}

// Whether one block of 192 rows takes the call, and reads its keys once: where works fill most SMs. It computes other
// bits than blocks of 64, so what else is in the batch must not choose it where plans are batch-invariant. All of this
// as in metadata/plan_parts.py.
inline constexpr int kLeastWorksOfLargeBlocks = 99;
template <int kHeadDim>
bool in_large_blocks(const Params& p, int rows) {
  return kHeadDim <= 128 && rows > 128 && rows <= 192 && p.fixed_split_tokens == 0 &&
         int64_t{p.batch_size} * p.num_kv_heads >= kLeastWorksOfLargeBlocks;
}

template <typename T, int kHeadDim, bool kGathers = false>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if constexpr (kHasFolds<kHeadDim>) {
    if (p.fixed_split_tokens != 0 && rows <= 8) return launch_traits<FoldTraits<T, kHeadDim, 8, kGathers>>(p, stream);
    if (p.fixed_split_tokens != 0 && rows <= 16) return launch_traits<FoldTraits<T, kHeadDim, 16, kGathers>>(p, stream);
  }
  if constexpr (kHeadDim <= 128) {
    if (rows <= 8 && may_deal(p)) return launch_traits<DealingTraits<PlanTraits<T, kHeadDim, 8, kGathers>>>(p, stream);
  }
  if (rows <= 8) return launch_traits<PlanTraits<T, kHeadDim, 8, kGathers>>(p, stream);
  if constexpr (kHeadDim == 128) {
    if (rows <= 16 && may_deal(p)) {
      return launch_traits<DealingTraits<PlanTraits<T, kHeadDim, 16, kGathers>>>(p, stream);
    }
  }
  if (rows <= 16) return launch_traits<PlanTraits<T, kHeadDim, 16, kGathers>>(p, stream);
  if (rows <= 32) return launch_traits<PlanTraits<T, kHeadDim, 32, kGathers>>(p, stream);
  if constexpr (kHeadDim <= 128) {
    if (in_large_blocks<kHeadDim>(p, rows)) return launch_traits<PlanTraits<T, kHeadDim, 192, kGathers>>(p, stream);
  }
  if (in_small_blocks<kHeadDim>(rows)) return launch_traits<PlanTraits<T, kHeadDim, 64, kGathers>>(p, stream);
  launch_traits<PlanTraits<T, kHeadDim, 128, kGathers>>(p, stream);
}

// Ragged requests of few rows: by the kernels of the plan alone, without those of short works.
template <typename T, int kHeadDim, bool kGathers, typename Element = T>
void launch_ragged(const Params& p, cudaStream_t stream) {
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (rows <= 8) return launch_traits<RaggedTraits<PlanTraits<T, kHeadDim, 8, kGathers, Element>>>(p, stream);
  if (rows <= 16) return launch_traits<RaggedTraits<PlanTraits<T, kHeadDim, 16, kGathers, Element>>>(p, stream);
  if constexpr (kHeadDim <= 128) {  // as most_ragged_rows of limits.h
    if (rows > 32) return launch_traits<RaggedTraits<PlanTraits<T, kHeadDim, 64, kGathers, Element>>>(p, stream);
  }
  launch_traits<RaggedTraits<PlanTraits<T, kHeadDim, 32, kGathers, Element>>>(p, stream);
}

// Over e4m3 pages, more than 32 rows.
template <int kHeadDim, bool kGathers>
void launch_fp8_rows(const Params& p, int rows, cudaStream_t stream) {
  if (in_small_blocks<kHeadDim>(rows)) {
    return launch_traits<PlanTraits<__half, kHeadDim, 64, kGathers, uint8_t>>(p, stream);
  }
  launch_traits<PlanTraits<__half, kHeadDim, 128, kGathers, uint8_t>>(p, stream);
}

// Over e4m3 pages.
template <int kHeadDim, bool kGathers>
void launch_fp8(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if constexpr (kHeadDim <= 128) {
    if (rows <= 8 && may_deal(p)) {
      return launch_traits<DealingTraits<PlanTraits<__half, kHeadDim, 8, kGathers, uint8_t>>>(p, stream);
    }
  }
  // Boxes of few rows leave room for a third CTA, for which plans have parts (metadata/plan_parts.py).
  constexpr int kCtasOfFew = kHeadDim == 128 && !kGathers ? 3 : 2;
  if (rows <= 8) {
    return launch_traits<Traits<__half, kHeadDim, 8, 0, kCtasOfFew, kGathers, kNoFold, uint8_t>>(p, stream);
  }
  if (rows <= 16) return launch_traits<PlanTraits<__half, kHeadDim, 16, kGathers, uint8_t>>(p, stream);
  if (rows <= 32) return launch_traits<PlanTraits<__half, kHeadDim, 32, kGathers, uint8_t>>(p, stream);
  if constexpr (kHeadDim == 256) {
    if (p.head_dim <= 192) return launch_fp8_rows<192, kGathers>(p, rows, stream);
  }
  launch_fp8_rows<kHeadDim, kGathers>(p, rows, stream);
}

}  // namespace attnops::xqa_decode::sm90
