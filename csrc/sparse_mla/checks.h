#pragma once
#include <string>

#include "core/shared_rows.h"
#include "mla_decode/checks.h"
#include "mla_decode/params.h"
#include "mla_decode/plan.h"
#include "sparse_mla/convert_rows.h"
#include "sparse_mla/share_lists.h"
#include "torch_bindings/check.h"
#include "torch_bindings/split_kv_checks.h"

// Arguments to the Params of mla_decode, whose kernels attend to lists as well. A query token is a request there.
namespace attnops::sparse_mla {

// compress_kv writes the rows that these kernels read.
static_assert(mla_decode::kHeadDimShared == kSharedRowValues && mla_decode::kSharedNope == kSharedRowNope &&
              mla_decode::kSharedDataBytes == kSharedRowDataBytes &&
              mla_decode::kSharedScaleBytes == kSharedRowScaleBytes &&
              mla_decode::kSharedScaleWidth == kSharedRowScaleWidth);

using namespace mla_decode;

inline constexpr const char* kDecode = "sparse_mla_decode";
inline constexpr const char* kPrefill = "sparse_mla_prefill";
inline constexpr const char* kPlan = "sparse_mla_plan";
inline constexpr int64_t kMaxTopk = 1 << 24;

// The tokens of [B, S_q, ...] at one distance, which is returned.
inline int64_t token_stride(const char* op, const char* name, const Tensor& tensor, bool by_request) {
  if (!by_request) return tensor.stride(0);
  const int64_t tokens = tensor.size(1), expected = tokens * tensor.stride(1);
  if (tensor.size(0) <= 1) return tensor.stride(1);
  if (tokens == 1) return tensor.stride(0);
  if (tensor.stride(0) != expected) {
    fail(op, std::string(name) + ".stride(0) must be " + std::to_string(expected) +
                 " (seqlen_q times stride(1): tokens at one distance), got " + std::to_string(tensor.stride(0)));
  }
  return tensor.stride(1);
}

// The extents of a call: [B, S_q] tokens, or [T].
struct Tokens {
  Tokens(const char* op, bool by_request) : op(op), by_request(by_request) {}

  // The shape of a tensor with something per token.
  template <class... Rest>
  const TensorCheck& shape(const TensorCheck& check, Rest&... rest) {
    return by_request ? check.shape({batch, seqlen_q, rest...}) : check.shape({batch, rest...});
  }
  int64_t count() const { return by_request ? *batch * *seqlen_q : *batch; }

  const char* op;
  bool by_request;
  Dim batch{"batch_size"}, seqlen_q{"seqlen_q"}, heads{"num_q_heads"};
};

// What kind of rows a pool has, by its dtype and its last dimension.
inline bool has_shared_rows(const char* op, const char* name, const Tensor& kv, const Tensor& q) {
  const bool bytes = has_dtype(kv, DType::kUInt8);
  TensorCheck check(op, name, kv);
  check.device_as("q", q);
  if (!bytes) check.dtype({dtype_of(q), DType::kUInt8});
  if (kv.dim() < 2) fail(op, std::string(name) + " must have at least 2 dimensions, got shape " + shape_text(kv));
  const int64_t row = kv.size(kv.dim() - 1);
  const int64_t own = bytes ? kFp8RowBytes : kHeadDimQk, shared = bytes ? kSharedRowBytes : kHeadDimShared;
  if (row != own && row != shared) {
    fail(op, std::string(name) + ".shape[-1] must be " + std::to_string(own) + " or " + std::to_string(shared) +
                 (bytes ? " (bytes of a row)" : " (head_dim)") + ", got " + std::to_string(row));
  }
  return row == shared;
}

// A pool [P, page_size, row], or rows [S, row].
inline SelectedRows checked_pool(const char* op, const char* name, const Tensor& kv, bool shared) {
  Dim pages("num_pages"), page_size("page_size"), rows("num_rows"), row("row");
  const bool paged = kv.dim() != 2;
  const TensorCheck check(op, name, kv);
  if (paged) {
    check.shape({pages, page_size, row}).dense_last();
    check_range(op, (std::string(name) + ".shape[1] (page_size)").c_str(), *page_size, 1, INT32_MAX);
  } else {
    check.shape({rows, row}).dense_last();
  }
  if (shared && has_dtype(kv, DType::kUInt8)) {
    if (!paged)
      fail(op, std::string(name) + " must be [num_pages, page_size, 584]: these rows have their scales by page");
    if (*page_size > 1 && kv.stride(1) != kSharedRowBytes) {
      fail(op, std::string(name) + ".stride(1) must be 584 (a page's rows, then its scales, without gaps), got " +
                   std::to_string(kv.stride(1)));
    }
  }
  return {.pages = kv.const_data_ptr(),
          .stride_page = kv.stride(0),
          .stride_token = paged ? kv.stride(1) : 0,
          .num_rows = paged ? *pages * *page_size : *rows,
          .page_size = paged ? page_size.as_int() : 1,
          .indices = nullptr,
          .stride_list = 0,
          .lengths = nullptr,
          .count = 0};
}

inline const int32_t* checked_list_lengths(Tokens& tokens, const char* name, const OptionalTensor& lengths,
                                           const char* other_name, const Tensor& other) {
  if (!lengths) return nullptr;
  const TensorCheck check(tokens.op, name, *lengths);
  check.device_as(other_name, other).dtype({DType::kInt32}).contiguous();
  tokens.shape(check);
  return static_cast<const int32_t*>(lengths->const_data_ptr());
}

inline void check_lists(Tokens& tokens, SelectedRows& rows, const char* name, const Tensor& indices,
                        const char* length_name, const OptionalTensor& lengths, const Tensor& q) {
  Dim topk("topk");
  const TensorCheck check(tokens.op, name, indices);
  check.device_as("q", q).dtype({DType::kInt32});
  tokens.shape(check, topk).dense_last();
  check_range(tokens.op, (std::string(name) + ".shape[-1] (topk)").c_str(), *topk, 0, kMaxTopk);
  rows.indices = static_cast<const int32_t*>(indices.const_data_ptr());
  rows.stride_list = token_stride(tokens.op, name, indices, tokens.by_request);
  rows.lengths = checked_list_lengths(tokens, length_name, lengths, "q", q);
  rows.count = topk.as_int();
}

// What both ops have.
struct Arguments {
  const Tensor& out;
  const OptionalTensor& lse;
  const Tensor& q;
  const OptionalTensor& q_pe;
  const char* kv_name;
  const Tensor& kv;
  const Tensor& indices;
  const OptionalTensor& topk_length;
  double softmax_scale;
  const OptionalTensor& sinks;
  const OptionalTensor& report;
};

inline void check_queries(const Arguments& a, Tokens& tokens, Params& p) {
  const bool apart = a.q_pe.has_value();
  if (apart && p.shared_rows)
    fail(tokens.op, std::string("q_pe belongs to rows of 576 or 656, not to these ") + a.kv_name);
  const int64_t width = p.shared_rows ? kHeadDimShared : apart ? kHeadDimV : kHeadDimQk;
  Dim dim_q("head_dim_qk", width, apart ? "q beside q_pe" : a.kv_name), dim_pe("head_dim_rope", kHeadDimRope, "MLA");
  Dim dim_out("head_dim_v", kHeadDimV, "MLA");
  const TensorCheck q(tokens.op, "q", a.q), out(tokens.op, "out", a.out);
  tokens.shape(q, tokens.heads, dim_q).dense_last();
  check_range(tokens.op, "num_q_heads of q", *tokens.heads, 1, kMaxHeads);
  if (tokens.by_request) check_range(tokens.op, "q.shape[1] (seqlen_q)", *tokens.seqlen_q, 1, kMaxSeqlenQ);
  check_range(tokens.op, "query tokens", tokens.count(), 0, INT32_MAX);
  const int head_axis = tokens.by_request ? 2 : 1;
  p.q = a.q.const_data_ptr();
  p.q_stride_request = token_stride(tokens.op, "q", a.q, tokens.by_request);
  p.q_stride_head = a.q.stride(head_axis);
  if (apart) {
    const TensorCheck q_pe(tokens.op, "q_pe", *a.q_pe);
    q_pe.device_as("q", a.q).dtype_as("q", a.q);
    tokens.shape(q_pe, tokens.heads, dim_pe).dense_last();
    p.q_pe = a.q_pe->const_data_ptr();
    p.q_pe_stride_request = token_stride(tokens.op, "q_pe", *a.q_pe, tokens.by_request);
    p.q_pe_stride_head = a.q_pe->stride(head_axis);
  }
  out.device_as("q", a.q).dtype_as("q", a.q);
  tokens.shape(out, tokens.heads, dim_out).dense_last().apart();
  p.out = a.out.mutable_data_ptr();
  p.out_stride_request = token_stride(tokens.op, "out", a.out, tokens.by_request);
  p.out_stride_head = a.out.stride(head_axis);
}

inline float* checked_per_head(const Arguments& a, Tokens& tokens, const char* name, const OptionalTensor& tensor) {
  if (!tensor) return nullptr;
  const TensorCheck check(tokens.op, name, *tensor);
  check.device_as("q", a.q).dtype({DType::kFloat32});
  tokens.shape(check, tokens.heads).contiguous();
  return static_cast<float*>(tensor->mutable_data_ptr());
}

// Everything but the second list and the plan.
inline Params checked_arguments(const Arguments& a, Tokens& tokens, ReportOp report_op) {
  Params p{};
  p.selects = true;
  TensorCheck(tokens.op, "q", a.q).dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  p.shared_rows = has_shared_rows(tokens.op, a.kv_name, a.kv, a.q);
  check_queries(a, tokens, p);
  p.selected = checked_pool(tokens.op, a.kv_name, a.kv, p.shared_rows);
  check_lists(tokens, p.selected, "indices", a.indices, "topk_length", a.topk_length, a.q);
  p.extra.page_size = 1;
  p.lse = checked_per_head(a, tokens, "lse", a.lse);
  check_finite(tokens.op, "softmax_scale", a.softmax_scale);
  p.softmax_scale = static_cast<float>(a.softmax_scale);
  if (a.sinks) {
    TensorCheck(tokens.op, "sinks", *a.sinks)
        .device_as("q", a.q)
        .dtype({DType::kFloat32})
        .shape({tokens.heads})
        .contiguous();
    p.sinks = static_cast<const float*>(a.sinks->const_data_ptr());
  }
  if (a.report) {
    Dim report_size("report_size", kReportSize, "core/report.h");
    TensorCheck(tokens.op, "report", *a.report)
        .device_as("q", a.q)
        .dtype({DType::kInt32})
        .shape({report_size})
        .contiguous();
    p.report = static_cast<int32_t*>(a.report->mutable_data_ptr());
  }
  p.batch_size = static_cast<int>(tokens.count());
  p.seqlen_q = 1;
  p.num_q_heads = tokens.heads.as_int();
  p.division = work_division(p.seqlen_q, p.num_q_heads, 1);
  p.window_left = -1;
  p.dtype = dtype_of(a.q);
  p.kv_dtype = dtype_of(a.kv);
  p.report_op = report_op;
  return p;
}

// The second list and its pool, of rows as the first one's.
struct ExtraArguments {
  const char* kv_name;
  const OptionalTensor &kv, &indices, &topk_length;
};

inline void check_extra(Tokens& tokens, Params& p, const Arguments& a, const ExtraArguments& extra) {
  if (extra.kv.has_value() != extra.indices.has_value()) {
    fail(tokens.op, std::string(extra.kv_name) + " and extra_indices must be given together, got " +
                        (extra.kv ? extra.kv_name : "extra_indices") + " alone");
  }
  if (!extra.kv) {
    if (extra.topk_length) fail(tokens.op, "extra_topk_length belongs to extra_indices, which are not given");
    return;
  }
  TensorCheck(tokens.op, extra.kv_name, *extra.kv).device_as("q", a.q).dtype_as(a.kv_name, a.kv);
  if (has_shared_rows(tokens.op, extra.kv_name, *extra.kv, a.q) != p.shared_rows) {
    fail(tokens.op, std::string(extra.kv_name) + ".shape[-1] must be " + std::to_string(a.kv.size(a.kv.dim() - 1)) +
                        " as in " + a.kv_name + ", got " + std::to_string(extra.kv->size(extra.kv->dim() - 1)));
  }
  p.extra = checked_pool(tokens.op, extra.kv_name, *extra.kv, p.shared_rows);
  check_lists(tokens, p.extra, "extra_indices", *extra.indices, "extra_topk_length", extra.topk_length, a.q);
}

// Which keys of a list groups of heads see.
inline void check_head_masks(Tokens& tokens, Params& p, const Arguments& a, const OptionalTensor& head_masks,
                             int64_t head_groups, bool has_extra) {
  check_range(tokens.op, "head_groups", head_groups, 1, kMostHeadGroups);
  if (!head_masks) {
    if (head_groups > 1) fail(tokens.op, "head_groups belongs to head_masks, which are not given");
    return;
  }
  if (has_extra) fail(tokens.op, "head_masks and extra_kv must not both be given: masks are of one list");
  if (p.num_q_heads % head_groups != 0) {
    fail(tokens.op, "head_groups must divide " + std::to_string(p.num_q_heads) + " (num_q_heads of q), got " +
                        std::to_string(head_groups));
  }
  Dim topk("topk", p.selected.count, "indices");
  const TensorCheck check(tokens.op, "head_masks", *head_masks);
  check.device_as("q", a.q).dtype({DType::kUInt8});
  tokens.shape(check, topk).dense_last();
  p.tree_mask = address_of<const uint8_t>(*head_masks);
  p.tree_mask_stride_request = head_masks->stride(0);
  p.tree_keys = static_cast<int>(p.num_q_heads / head_groups);
}

// Memory that prefill may convert rows in.
struct Scratch {
  uint8_t* data;
  int64_t bytes;  // 0: rows stay as they are
};

// Whether a call's rows may be converted at all.
inline bool may_convert(const Params& p) {
  return p.kv_dtype == DType::kUInt8 && !p.shared_rows && p.dtype == DType::kBFloat16 && p.extra.count == 0 &&
         p.max_logits == nullptr && HeadMasks(p).bits == nullptr && p.batch_size > 0 && p.selected.count > 0 &&
         p.selected.num_rows > 0;
}

inline Scratch checked_scratch(const Params& p, const OptionalTensor& scratch, const Tensor& q) {
  if (!scratch) return {};
  Dim bytes("scratch_size");
  TensorCheck(kPrefill, "scratch", *scratch).device_as("q", q).dtype({DType::kUInt8}).shape({bytes}).contiguous();
  if (!may_convert(p)) return {};
  const ConvertLayout layout(p.selected.num_rows, p.batch_size, p.selected.count);
  if (layout.capacity(*bytes) < 1) {
    fail(kPrefill, "scratch.shape[0] must be at least " + std::to_string(layout.least_bytes()) +
                       " (lists of q, flags of kv, one row), got " + std::to_string(*bytes));
  }
  return {address_of<uint8_t>(*scratch), *bytes};
}

inline constexpr const char* kShare = "share_lists";

inline ShareParams checked_share(const Tensor& shared, const Tensor& masks, const Tensor& shared_length,
                                 const Tensor& indices, const OptionalTensor& topk_length, int64_t together) {
  check_range(kShare, "together", together, 1, kMostHeadGroups);
  Dim tokens("num_tokens"), topk("topk");
  TensorCheck(kShare, "indices", indices).dtype({DType::kInt32}).shape({tokens, topk}).dense_last();
  check_range(kShare, "indices.shape[1] (topk)", *topk, 0, kMaxTopk);
  check_range(kShare, "indices.shape[0] (num_tokens)", *tokens, 0, INT32_MAX);
  if (*tokens % together != 0) {
    fail(kShare, "indices.shape[0] (num_tokens) must be a multiple of " + std::to_string(together) +
                     " (together), got " + std::to_string(*tokens));
  }
  Dim groups("num_tokens / together", *tokens / together, "indices");
  Dim width("together * topk", together * *topk, "indices");
  const auto output = [&](const char* name, const Tensor& tensor, DType dtype) {
    TensorCheck(kShare, name, tensor).device_as("indices", indices).dtype({dtype}).shape({groups, width});
    TensorCheck(kShare, name, tensor).dense_last().apart();
  };
  output("shared", shared, DType::kInt32);
  output("masks", masks, DType::kUInt8);
  TensorCheck(kShare, "shared_length", shared_length)
      .device_as("indices", indices)
      .dtype({DType::kInt32})
      .shape({groups})
      .contiguous();
  if (topk_length) {
    TensorCheck(kShare, "topk_length", *topk_length)
        .device_as("indices", indices)
        .dtype({DType::kInt32})
        .shape({tokens})
        .contiguous();
  }
  return {.groups = groups.as_int(),
          .together = static_cast<int>(together),
          .topk = topk.as_int(),
          .indices = address_of<const int32_t>(indices),
          .stride_list = indices.stride(0),
          .lengths = data_or_null<const int32_t>(topk_length),
          .shared = address_of<int32_t>(shared),
          .masks = address_of<uint8_t>(masks),
          .stride_shared = shared.stride(0),
          .stride_masks = masks.stride(0),
          .shared_lengths = address_of<int32_t>(shared_length)};
}

struct CallPlan {
  const Tensor &tile_scheduler_metadata, &num_splits, &out_partial, &lse_partial, &semaphores;
  int64_t fixed_split_tokens;
};

// A plan as mla_decode's, of query tokens.
inline void check_call_plan(Params& p, const Tensor& q, const CallPlan& plan) {
  Dim parts("num_sm_parts"), partials("num_partials"), cells("num_works"), splits("tokens + 1", p.batch_size + 1, "q");
  Dim entry("entry", kSplitKvEntrySize, "SplitKvEntry"), rows("plan rows", kPlanRows, "the plan");
  Dim dim_out("head_dim_v", kHeadDimV, "MLA");
  TensorCheck(kDecode, "tile_scheduler_metadata", plan.tile_scheduler_metadata)
      .device_as("q", q)
      .dtype({DType::kInt32})
      .shape({parts, entry})
      .size_at_least(0, "num_sm_parts", 1, "a plan has a part")
      .contiguous();
  TensorCheck(kDecode, "num_splits", plan.num_splits)
      .device_as("q", q)
      .dtype({DType::kInt32})
      .shape({splits})
      .contiguous();
  check_split_tokens(kDecode, plan.fixed_split_tokens, kPlanTileTokens);
  const TensorCheck out_partial(kDecode, "out_partial", plan.out_partial);
  out_partial.device_as("q", q).dtype({DType::kFloat32}).shape({partials, rows, dim_out}).contiguous();
  if (plan.fixed_split_tokens == 0) {
    out_partial.size_at_least(0, "num_partials", 2 * *parts, "two per row of tile_scheduler_metadata");
  }
  TensorCheck(kDecode, "lse_partial", plan.lse_partial)
      .device_as("q", q)
      .dtype({DType::kFloat32})
      .shape({partials, rows})
      .contiguous();
  TensorCheck(kDecode, "semaphores", plan.semaphores)
      .device_as("q", q)
      .dtype({DType::kInt32})
      .shape({cells})
      .size_at_least(0, "num_works", int64_t{p.batch_size} * blocks_per_request(1, p.num_q_heads),
                     "one per 64 heads of a token")
      .contiguous();
  p.tile_scheduler_metadata = static_cast<const int32_t*>(plan.tile_scheduler_metadata.const_data_ptr());
  p.num_splits = static_cast<const int32_t*>(plan.num_splits.const_data_ptr());
  p.num_sm_parts = parts.as_int();
  p.division = work_division(p.seqlen_q, p.num_q_heads, p.num_sm_parts);
  p.fixed_split_tokens = static_cast<int>(plan.fixed_split_tokens);
  p.out_partial = static_cast<float*>(plan.out_partial.mutable_data_ptr());
  p.lse_partial = static_cast<float*>(plan.lse_partial.mutable_data_ptr());
  p.num_partials = *partials;
  p.semaphores = static_cast<int32_t*>(plan.semaphores.mutable_data_ptr());
}

// The planner's arguments: one work for each block of 64 heads of a token.
struct PlanParams {
  SplitKvGeometry geometry;
  SelectedRows selected, extra;  // counts and lengths alone
  int32_t* tile_scheduler_metadata;
  int32_t* num_splits;
};

inline PlanParams checked_plan(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                               const OptionalTensor& topk_length, const OptionalTensor& extra_topk_length, int64_t topk,
                               int64_t extra_topk, int64_t seqlen_q, int64_t num_q_heads, int64_t fixed_split_tokens) {
  check_range(kPlan, "topk", topk, 0, kMaxTopk);
  check_range(kPlan, "extra_topk", extra_topk, 0, kMaxTopk);
  check_range(kPlan, "seqlen_q", seqlen_q, 1, kMaxSeqlenQ);
  check_range(kPlan, "num_q_heads", num_q_heads, 1, kMaxHeads);
  check_split_tokens(kPlan, fixed_split_tokens, kPlanTileTokens);
  Dim parts("num_sm_parts"), entry("entry_size", kSplitKvEntrySize, "a plan row"), splits("tokens + 1");
  TensorCheck(kPlan, "tile_scheduler_metadata", tile_scheduler_metadata)
      .dtype({DType::kInt32})
      .shape({parts, entry})
      .size_at_least(0, "num_sm_parts", 1, "a plan has a part")
      .contiguous();
  check_range(kPlan, "num_sm_parts", *parts, 1, kMaxSmParts);
  const TensorCheck check(kPlan, "num_splits", num_splits);
  check.device_as("tile_scheduler_metadata", tile_scheduler_metadata).dtype({DType::kInt32}).shape({splits});
  check.size_at_least(0, "tokens + 1", 1, "one more than query tokens").contiguous();
  if ((*splits - 1) % seqlen_q != 0) {
    fail(kPlan, "num_splits.shape[0] - 1 (query tokens) must be a multiple of seqlen_q=" + std::to_string(seqlen_q) +
                    ", got " + std::to_string(*splits - 1));
  }
  Tokens tokens(kPlan, true);
  tokens.batch = Dim("batch_size", (*splits - 1) / seqlen_q, "num_splits");
  tokens.seqlen_q = Dim("seqlen_q", seqlen_q, "the plan");
  const auto lengths = [&](const char* name, const OptionalTensor& tensor) {
    return checked_list_lengths(tokens, name, tensor, "tile_scheduler_metadata", tile_scheduler_metadata);
  };
  SelectedRows selected{}, extra{};
  selected.count = static_cast<int>(topk);
  selected.lengths = lengths("topk_length", topk_length);
  extra.count = static_cast<int>(extra_topk);
  extra.lengths = lengths("extra_topk_length", extra_topk_length);
  return {.geometry = plan_geometry(static_cast<int>(*splits - 1), 1, static_cast<int>(num_q_heads), -1, parts.as_int(),
                                    static_cast<int>(fixed_split_tokens)),
          .selected = selected,
          .extra = extra,
          .tile_scheduler_metadata = static_cast<int32_t*>(tile_scheduler_metadata.mutable_data_ptr()),
          .num_splits = static_cast<int32_t*>(num_splits.mutable_data_ptr())};
}

}  // namespace attnops::sparse_mla
