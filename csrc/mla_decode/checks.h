#pragma once
#include <optional>
#include <string>

#include "core/report.h"
#include "mla_decode/params.h"
#include "mla_decode/plan.h"
#include "torch_bindings/check.h"

namespace attnops::mla_decode {

// The arguments of mla_decode as the schema names them.
struct Arguments {
  const Tensor& out;
  const std::optional<Tensor>& lse;
  const Tensor& q;
  const std::optional<Tensor>& q_pe;
  const Tensor& kv_pages;
  const Tensor& page_table;
  const std::optional<Tensor>& kv_indptr;
  const Tensor& cache_seqlens;
  const Tensor& tile_scheduler_metadata;
  const Tensor& num_splits;
  const Tensor& out_partial;
  const Tensor& lse_partial;
  const Tensor& semaphores;
  double softmax_scale;
  bool causal;
  int64_t window_left;
  double logit_cap;
  const std::optional<Tensor>& sinks;
  const std::optional<Tensor>& tree_mask;
  const std::optional<Tensor>& kv_scale;
  int64_t fixed_split_tokens;
  const std::optional<Tensor>& report;
};

inline constexpr const char* kOp = "mla_decode";
inline constexpr const char* kPlanOp = "mla_decode_plan";
inline constexpr int64_t kMaxInt32 = INT32_MAX;

inline void check_fixed_split(const char* op, int64_t fixed_split_tokens) {
  check_range(op, "fixed_split_tokens", fixed_split_tokens, 0, kMaxInt32);
  if (fixed_split_tokens % kPlanTileTokens != 0) {
    fail(op, "fixed_split_tokens must be a multiple of " + std::to_string(kPlanTileTokens) + " (0: balanced), got " +
                 std::to_string(fixed_split_tokens));
  }
}

// Row numbers (token, head) and works stay int32 in every kernel.
inline void check_geometry(const char* op, int64_t batch_size, int64_t seqlen_q, int64_t num_q_heads) {
  if (batch_size * seqlen_q * num_q_heads > kMaxInt32) {
    fail(op, "batch_size * seqlen_q * num_q_heads must be below 2^31, got " + std::to_string(batch_size) + " * " +
                 std::to_string(seqlen_q) + " * " + std::to_string(num_q_heads));
  }
}

// The planner's arguments; they describe the same plan that checked_params accepts.
inline SplitKvGeometry checked_plan_geometry(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                                             const Tensor& cache_seqlens, int64_t seqlen_q, int64_t num_q_heads,
                                             int64_t window_left, int64_t fixed_split_tokens) {
  Dim batch("batch_size"), parts("num_sm_parts"), entry("entry", kSplitKvEntrySize, "SplitKvEntry");
  TensorCheck(kPlanOp, "cache_seqlens", cache_seqlens).dtype({DType::kInt32}).shape({batch}).contiguous();
  TensorCheck(kPlanOp, "tile_scheduler_metadata", tile_scheduler_metadata)
      .device_as("cache_seqlens", cache_seqlens)
      .dtype({DType::kInt32})
      .shape({parts, entry})
      .size_at_least(0, "num_sm_parts", 1, "somebody must work")
      .contiguous();
  Dim batch_and_end("batch_size + 1", *batch + 1, "cache_seqlens");
  TensorCheck(kPlanOp, "num_splits", num_splits)
      .device_as("cache_seqlens", cache_seqlens)
      .dtype({DType::kInt32})
      .shape({batch_and_end})
      .contiguous();
  check_range(kPlanOp, "seqlen_q", seqlen_q, 1, kMaxInt32);
  check_range(kPlanOp, "num_q_heads", num_q_heads, 1, kMaxInt32);
  check_range(kPlanOp, "window_left", window_left, -1, kMaxInt32);
  check_geometry(kPlanOp, *batch, seqlen_q, num_q_heads);
  check_fixed_split(kPlanOp, fixed_split_tokens);
  return plan_geometry(batch.as_int(), static_cast<int>(seqlen_q), static_cast<int>(num_q_heads),
                       static_cast<int>(window_left), parts.as_int(), static_cast<int>(fixed_split_tokens));
}

// The extents that several arguments share.
struct Extents {
  Dim batch{"batch_size"}, seqlen_q{"seqlen_q"}, heads{"num_q_heads"}, parts{"num_sm_parts"}, partials{"num_partials"};
};

inline void check_queries(const Arguments& a, Extents& e) {
  const bool apart = a.q_pe.has_value();
  Dim dim_q(apart ? "latent" : "head_dim_qk", apart ? kHeadDimV : kHeadDimQk, apart ? "MLA with q_pe apart" : "MLA");
  Dim dim_pe("head_dim_rope", kHeadDimRope, "MLA"), dim_out("head_dim_v", kHeadDimV, "MLA");
  TensorCheck(kOp, "q", a.q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({e.batch, e.seqlen_q, e.heads, dim_q})
      .size_at_least(1, "seqlen_q", 1, "a decode step has queries")
      .size_at_least(2, "num_q_heads", 1, "attention has heads")
      .dense_last();
  if (apart) {
    TensorCheck(kOp, "q_pe", *a.q_pe)
        .device_as("q", a.q)
        .dtype_as("q", a.q)
        .shape({e.batch, e.seqlen_q, e.heads, dim_pe})
        .dense_last();
  }
  TensorCheck(kOp, "out", a.out)
      .device_as("q", a.q)
      .dtype_as("q", a.q)
      .shape({e.batch, e.seqlen_q, e.heads, dim_out})
      .dense_last();
  if (a.lse) {
    TensorCheck(kOp, "lse", *a.lse)
        .device_as("q", a.q)
        .dtype({DType::kFloat32})
        .shape({e.batch, e.seqlen_q, e.heads})
        .contiguous();
  }
  check_geometry(kOp, *e.batch, *e.seqlen_q, *e.heads);
}

inline void check_cache(const Arguments& a, Extents& e) {
  const bool rows = has_dtype(a.kv_pages, DType::kUInt8);
  const bool fp8 = has_dtype(a.kv_pages, DType::kFloat8E4M3);
  Dim pages("num_pages"), page_size("page_size");
  Dim row(rows ? "row bytes" : "head_dim_qk", rows ? kFp8RowBytes : kHeadDimQk, rows ? "the 656-byte FP8 row" : "MLA");
  const TensorCheck kv(kOp, "kv_pages", a.kv_pages);
  kv.device_as("q", a.q);
  if (!rows && !fp8) kv.dtype({dtype_of(a.q), DType::kFloat8E4M3, DType::kUInt8});
  kv.shape({pages, page_size, row}).size_at_least(1, "page_size", 1, "a page holds tokens").dense_last();
  if (a.kv_scale) {
    Dim one("1", 1, "a scale per tensor");
    if (!fp8) {
      fail(kOp, std::string("kv_scale belongs to float8_e4m3fn kv_pages; ") +
                    (rows ? "uint8 rows carry their own scales" : "unquantized kv_pages have none"));
    }
    TensorCheck(kOp, "kv_scale", *a.kv_scale).device_as("q", a.q).dtype({DType::kFloat32}).shape({one});
  }

  Dim batch_and_end("batch_size + 1", *e.batch + 1, "q"), cells("num_cells");
  const TensorCheck table(kOp, "page_table", a.page_table);
  table.device_as("q", a.q).dtype({DType::kInt32});
  if (a.kv_indptr) {
    table.shape({cells}).contiguous();
    TensorCheck(kOp, "kv_indptr", *a.kv_indptr)
        .device_as("q", a.q)
        .dtype({DType::kInt32})
        .shape({batch_and_end})
        .contiguous();
  } else {
    table.shape({e.batch, cells}).dense_last();
  }
  TensorCheck(kOp, "cache_seqlens", a.cache_seqlens)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({e.batch})
      .contiguous();
}

inline void check_plan(const Arguments& a, Extents& e) {
  Dim entry("entry", kSplitKvEntrySize, "SplitKvEntry"), batch_and_end("batch_size + 1", *e.batch + 1, "q");
  Dim rows("plan rows", kPlanRows, "the plan"), dim_out("head_dim_v", kHeadDimV, "MLA"), cells("num_semaphores");
  TensorCheck(kOp, "tile_scheduler_metadata", a.tile_scheduler_metadata)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({e.parts, entry})
      .size_at_least(0, "num_sm_parts", 1, "somebody must work")
      .contiguous();
  TensorCheck(kOp, "num_splits", a.num_splits)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({batch_and_end})
      .contiguous();
  check_fixed_split(kOp, a.fixed_split_tokens);
  const TensorCheck out_partial(kOp, "out_partial", a.out_partial);
  out_partial.device_as("q", a.q).dtype({DType::kFloat32}).shape({e.partials, rows, dim_out}).contiguous();
  if (a.fixed_split_tokens == 0) {
    out_partial.size_at_least(0, "num_partials", 2 * *e.parts, "two per part of the plan");
  }
  TensorCheck(kOp, "lse_partial", a.lse_partial)
      .device_as("q", a.q)
      .dtype({DType::kFloat32})
      .shape({e.partials, rows})
      .contiguous();
  const int works = works_per_request(e.seqlen_q.as_int(), e.heads.as_int());
  TensorCheck(kOp, "semaphores", a.semaphores)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({cells})
      .size_at_least(0, "num_semaphores", *e.batch * works, "one per work")
      .contiguous();
}

inline void check_options(const Arguments& a, Extents& e) {
  check_finite(kOp, "softmax_scale", a.softmax_scale);
  check_finite(kOp, "logit_cap", a.logit_cap);
  if (a.logit_cap < 0) fail(kOp, "logit_cap must be at least 0 (0: off), got " + std::to_string(a.logit_cap));
  check_range(kOp, "window_left", a.window_left, -1, kMaxInt32);
  if (a.sinks) {
    TensorCheck(kOp, "sinks", *a.sinks).device_as("q", a.q).dtype({DType::kFloat32}).shape({e.heads}).contiguous();
  }
  if (a.tree_mask) {
    Dim mask_bytes("mask bytes", ceil_div(*e.seqlen_q, static_cast<int64_t>(8)), "q (a bit per query token)");
    TensorCheck(kOp, "tree_mask", *a.tree_mask)
        .device_as("q", a.q)
        .dtype({DType::kUInt8})
        .shape({e.batch, e.seqlen_q, mask_bytes})
        .dense_last();
  }
  if (a.report) {
    TensorCheck(kOp, "report", *a.report)
        .device_as("q", a.q)
        .dtype({DType::kInt32})
        .rank(1)
        .size_at_least(0, "report slots", kReportSize, "core/report.h")
        .contiguous();
  }
}

// The op's whole contract, checked once for all devices. Params exist only when the arguments are right.
inline Params checked_params(const Arguments& a) {
  Extents e;
  check_queries(a, e);
  check_cache(a, e);
  check_plan(a, e);
  check_options(a, e);

  const auto int32_data = [](const Tensor& tensor) { return static_cast<const int32_t*>(tensor.const_data_ptr()); };
  const auto stride = [](const std::optional<Tensor>& tensor, int64_t axis) {
    return tensor ? tensor->stride(axis) : 0;
  };
  return {.batch_size = e.batch.as_int(),
          .seqlen_q = e.seqlen_q.as_int(),
          .num_q_heads = e.heads.as_int(),
          .q = a.q.const_data_ptr(),
          .q_stride_request = a.q.stride(0),
          .q_stride_token = a.q.stride(1),
          .q_stride_head = a.q.stride(2),
          .q_pe = a.q_pe ? a.q_pe->const_data_ptr() : nullptr,
          .q_pe_stride_request = stride(a.q_pe, 0),
          .q_pe_stride_token = stride(a.q_pe, 1),
          .q_pe_stride_head = stride(a.q_pe, 2),
          .kv_pages = a.kv_pages.const_data_ptr(),
          .kv_stride_page = a.kv_pages.stride(0),
          .kv_stride_token = a.kv_pages.stride(1),
          .page_table = {.cells = int32_data(a.page_table),
                         .kv_indptr = a.kv_indptr ? int32_data(*a.kv_indptr) : nullptr,
                         .stride_request = a.kv_indptr ? 0 : a.page_table.stride(0),
                         .num_pages = a.kv_pages.size(0),
                         .page_size = static_cast<int>(a.kv_pages.size(1)),
                         .max_pages = a.kv_indptr ? 0 : a.page_table.size(1)},
          .cache_seqlens = int32_data(a.cache_seqlens),
          .out = a.out.mutable_data_ptr(),
          .out_stride_request = a.out.stride(0),
          .out_stride_token = a.out.stride(1),
          .out_stride_head = a.out.stride(2),
          .lse = data_or_null<float>(a.lse),
          .tile_scheduler_metadata = int32_data(a.tile_scheduler_metadata),
          .num_splits = int32_data(a.num_splits),
          .num_sm_parts = e.parts.as_int(),
          .fixed_split_tokens = static_cast<int>(a.fixed_split_tokens),
          .out_partial = static_cast<float*>(a.out_partial.mutable_data_ptr()),
          .lse_partial = static_cast<float*>(a.lse_partial.mutable_data_ptr()),
          .num_partials = *e.partials,
          .semaphores = static_cast<int32_t*>(a.semaphores.mutable_data_ptr()),
          .softmax_scale = static_cast<float>(a.softmax_scale),
          .causal = a.causal,
          .window_left = static_cast<int>(a.window_left),
          .logit_cap = static_cast<float>(a.logit_cap),
          .sinks = data_or_null<const float>(a.sinks),
          .tree_mask = data_or_null<const uint8_t>(a.tree_mask),
          .tree_mask_stride_request = stride(a.tree_mask, 0),
          .tree_mask_stride_token = stride(a.tree_mask, 1),
          .kv_scale = data_or_null<const float>(a.kv_scale),
          .dtype = dtype_of(a.q),
          .kv_dtype = dtype_of(a.kv_pages),
          .report = data_or_null<int32_t>(a.report)};
}

}  // namespace attnops::mla_decode
