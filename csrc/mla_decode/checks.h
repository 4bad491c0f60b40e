#pragma once
#include <optional>
#include <string>

#include "core/report.h"
#include "mla_decode/params.h"
#include "mla_decode/plan.h"
#include "torch_bindings/check.h"
#include "torch_bindings/split_kv_checks.h"
#include "torch_bindings/tree_checks.h"

namespace attnops::mla_decode {

// The arguments of mla_decode as the schema names them.
struct Arguments {
  const Tensor& out;
  const OptionalTensor& lse = kAbsent;
  const Tensor& q;
  const OptionalTensor& q_pe = kAbsent;
  const Tensor& kv_pages;
  const Tensor& page_table;
  const OptionalTensor& kv_indptr = kAbsent;
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
  const OptionalTensor& sinks = kAbsent;
  const OptionalTensor& tree_mask = kAbsent;
  const OptionalTensor& kv_scale = kAbsent;
  int64_t fixed_split_tokens;
  const OptionalTensor& report = kAbsent;
  bool fp8_products = false;
  int64_t tree_keys = 0;  // 0: as many as new tokens
};

inline constexpr const char* kOp = "mla_decode";
inline constexpr int64_t kMaxHeads = 1 << 14;  // with kMaxSeqlenQ, row numbers of a request stay far inside int32

// The planner's arguments; they describe the same plan that checked_params accepts.
struct PlanParams {
  SplitKvGeometry geometry;
  SplitKvPlanTensors tensors;
};

inline PlanParams checked_plan_params(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                                      const Tensor& cache_seqlens, int64_t seqlen_q, int64_t num_q_heads,
                                      int64_t window_left, int64_t fixed_split_tokens) {
  constexpr const char* kPlanOp = "mla_decode_plan";
  check_range(kPlanOp, "seqlen_q", seqlen_q, 1, kMaxSeqlenQ);
  check_range(kPlanOp, "num_q_heads", num_q_heads, 1, kMaxHeads);
  check_range(kPlanOp, "window_left", window_left, -1, kMaxWindow);
  check_split_tokens(kPlanOp, fixed_split_tokens, kPlanTileTokens);
  const SplitKvPlanTensors tensors = checked_split_kv_plan(kPlanOp, tile_scheduler_metadata, num_splits, cache_seqlens);
  return {plan_geometry(tensors.batch_size, static_cast<int>(seqlen_q), static_cast<int>(num_q_heads),
                        static_cast<int>(window_left), tensors.num_sm_parts, static_cast<int>(fixed_split_tokens)),
          tensors};
}

// The extents that several arguments share.
struct Extents {
  Dim batch{"batch_size"}, seqlen_q{"seqlen_q"}, heads{"num_q_heads"}, parts{"num_sm_parts"}, partials{"num_partials"};
};

inline void check_queries(const Arguments& a, Extents& e) {
  const bool apart = a.q_pe.has_value();
  Dim dim_q(apart ? "latent" : "head_dim_qk", apart ? kHeadDimV : kHeadDimQk, apart ? "q beside q_pe" : "MLA");
  Dim dim_pe("head_dim_rope", kHeadDimRope, "MLA"), dim_out("head_dim_v", kHeadDimV, "MLA");
  TensorCheck(kOp, "q", a.q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({e.batch, e.seqlen_q, e.heads, dim_q})
      .dense_last();
  check_range(kOp, "q.shape[1] (seqlen_q)", *e.seqlen_q, 1, kMaxSeqlenQ);
  check_range(kOp, "q.shape[2] (num_q_heads)", *e.heads, 1, kMaxHeads);
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
      .dense_last()
      .apart();
  if (a.lse) {
    TensorCheck(kOp, "lse", *a.lse)
        .device_as("q", a.q)
        .dtype({DType::kFloat32})
        .shape({e.batch, e.seqlen_q, e.heads})
        .contiguous();
  }
}

inline void check_cache(const Arguments& a, Extents& e) {
  const bool rows = has_dtype(a.kv_pages, DType::kUInt8);
  const bool e4m3 = has_dtype(a.kv_pages, DType::kFloat8E4M3);
  const bool fp8 = e4m3 || has_dtype(a.kv_pages, DType::kFloat8E5M2);
  Dim pages("num_pages"), page_size("page_size");
  Dim row(rows ? "row bytes" : "head_dim_qk", rows ? kFp8RowBytes : kHeadDimQk, rows ? "an FP8 row" : "MLA");
  const TensorCheck kv(kOp, "kv_pages", a.kv_pages);
  kv.device_as("q", a.q);
  if (!rows && !fp8) kv.dtype({dtype_of(a.q), DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUInt8});
  kv.shape({pages, page_size, row}).dense_last();
  check_range(kOp, "kv_pages.shape[1] (page_size)", *page_size, 1, INT32_MAX);
  if (a.kv_scale) {
    Dim one("1", 1, "a scale per tensor");
    if (!fp8) {
      fail(kOp, std::string("kv_scale belongs to float8_e4m3fn or float8_e5m2 kv_pages; ") +
                    (rows ? "uint8 rows carry their own scales" : "unquantized kv_pages have none"));
    }
    TensorCheck(kOp, "kv_scale", *a.kv_scale).device_as("q", a.q).dtype({DType::kFloat32}).shape({one});
  }

  if (a.fp8_products && !e4m3) {
    fail(kOp, std::string("fp8_products belongs to float8_e4m3fn kv_pages, got ") + name_of(dtype_of(a.kv_pages)));
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
  Dim rows("plan rows", kPlanRows, "the plan"), dim_out("head_dim_v", kHeadDimV, "MLA"), cells("num_works");
  TensorCheck(kOp, "tile_scheduler_metadata", a.tile_scheduler_metadata)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({e.parts, entry})
      .size_at_least(0, "num_sm_parts", 1, "a plan has a part")
      .contiguous();
  TensorCheck(kOp, "num_splits", a.num_splits)
      .device_as("q", a.q)
      .dtype({DType::kInt32})
      .shape({batch_and_end})
      .contiguous();
  check_split_tokens(kOp, a.fixed_split_tokens, kPlanTileTokens);
  const TensorCheck out_partial(kOp, "out_partial", a.out_partial);
  out_partial.device_as("q", a.q).dtype({DType::kFloat32}).shape({e.partials, rows, dim_out}).contiguous();
  if (a.fixed_split_tokens == 0 && *e.partials < 2 * *e.parts) {
    out_partial.size_at_least(0, "num_partials", 2 * *e.parts, "two per row of tile_scheduler_metadata");
  }
  TensorCheck(kOp, "lse_partial", a.lse_partial)
      .device_as("q", a.q)
      .dtype({DType::kFloat32})
      .shape({e.partials, rows})
      .contiguous();
  const int64_t num_works = *e.batch * blocks_per_request(e.seqlen_q.as_int(), e.heads.as_int());
  const TensorCheck semaphores(kOp, "semaphores", a.semaphores);
  semaphores.device_as("q", a.q).dtype({DType::kInt32}).shape({cells}).contiguous();
  if (*cells < num_works) semaphores.size_at_least(0, "num_works", num_works, "one per 64 query rows of a request");
}

inline void check_options(const Arguments& a, Extents& e) {
  check_finite(kOp, "softmax_scale", a.softmax_scale);
  check_finite(kOp, "logit_cap", a.logit_cap);
  if (a.logit_cap < 0) fail(kOp, "logit_cap must be 0 (off) or positive, got " + std::to_string(a.logit_cap));
  check_range(kOp, "window_left", a.window_left, -1, kMaxWindow);
  if (a.sinks) {
    TensorCheck(kOp, "sinks", *a.sinks).device_as("q", a.q).dtype({DType::kFloat32}).shape({e.heads}).contiguous();
  }
  if (a.tree_mask) {
    if (!a.causal) fail(kOp, "causal must be True with tree_mask, which says what causal means among the new tokens");
    Dim mask_bytes("mask_bytes");
    const TensorCheck mask(kOp, "tree_mask", *a.tree_mask);
    mask.device_as("q", a.q).dtype({DType::kUInt8}).shape({e.batch, e.seqlen_q, mask_bytes}).dense_last();
    check_mask_bytes(mask, *mask_bytes, tree_keys_of(a.tree_keys, *e.seqlen_q), *e.seqlen_q);
  }
  check_tree_keys(kOp, a.tree_keys, *e.seqlen_q, a.window_left);
  if (a.report) {
    Dim report_size("report_size", kReportSize, "core/report.h");
    TensorCheck(kOp, "report", *a.report).device_as("q", a.q).dtype({DType::kInt32}).shape({report_size}).contiguous();
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
  const auto stride = [](const OptionalTensor& tensor, int64_t axis) { return tensor ? tensor->stride(axis) : 0; };
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
                         .max_pages = a.kv_indptr ? 0 : a.page_table.size(1),
                         .num_indices = a.kv_indptr ? a.page_table.size(0) : 0},
          .cache_seqlens = int32_data(a.cache_seqlens),
          .out = a.out.mutable_data_ptr(),
          .out_stride_request = a.out.stride(0),
          .out_stride_token = a.out.stride(1),
          .out_stride_head = a.out.stride(2),
          .lse = data_or_null<float>(a.lse),
          .tile_scheduler_metadata = int32_data(a.tile_scheduler_metadata),
          .num_splits = int32_data(a.num_splits),
          .num_sm_parts = e.parts.as_int(),
          .division = work_division(e.seqlen_q.as_int(), e.heads.as_int(), e.parts.as_int()),
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
          .fp8_products = a.fp8_products,
          .report = data_or_null<int32_t>(a.report),
          .selects = false,
          .shared_rows = false,
          .selected = {},
          .extra = {},
          .max_logits = nullptr,
          .report_op = ReportOp::kMlaDecode,
          .tree_keys = static_cast<int>(tree_keys_of(a.tree_keys, *e.seqlen_q)),
          .list_cuts = 0};
}

void run_cpu(Params p);  // op_cpu.cpp; throws when the plan is another step's, and on faults without a report
void run_unplanned_on_cpu(Params p);  // the same without a plan: each work is one piece

}  // namespace attnops::mla_decode
