#pragma once
#include "torch_bindings/split_kv_checks.h"
#include "torch_bindings/tree_checks.h"
#include "xqa_decode/params.h"
#include "xqa_decode/plan.h"

namespace attnops::xqa_decode {

struct PlanParams {
  SplitKvGeometry geometry;
  SplitKvPlanTensors tensors;
};

inline PlanParams checked_plan_params(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                                      const Tensor& cache_seqlens, int64_t seqlen_q, int64_t num_kv_heads,
                                      int64_t window_left, int64_t fixed_split_tokens, int64_t rows, int64_t kv_bytes) {
  constexpr const char* kOp = "xqa_decode_plan";
  check_range(kOp, "rows", rows, 1, 1 << 30);
  check_range(kOp, "kv_bytes", kv_bytes, 1, 4);
  check_range(kOp, "seqlen_q", seqlen_q, 1, kMaxSeqlenQ);
  check_range(kOp, "num_kv_heads", num_kv_heads, 1, 1 << 16);
  check_range(kOp, "window_left", window_left, -1, kMaxWindow);
  check_splits(kOp, fixed_split_tokens, kPlanTileTokens);
  const SplitKvPlanTensors tensors = checked_split_kv_plan(kOp, tile_scheduler_metadata, num_splits, cache_seqlens);
  return {plan_geometry(tensors.batch_size, static_cast<int>(seqlen_q), static_cast<int>(num_kv_heads),
                        static_cast<int>(window_left), tensors.num_sm_parts, static_cast<int>(fixed_split_tokens)),
          tensors};
}

// The arguments of xqa_decode, by name.
struct Arguments {
  const Tensor& out;
  const OptionalTensor& lse = kAbsent;
  const Tensor& q;
  const Tensor& k_pages;
  const Tensor& v_pages;
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
  const OptionalTensor& k_scale = kAbsent;
  const OptionalTensor& v_scale = kAbsent;
  int64_t fixed_split_tokens;
  const OptionalTensor& report = kAbsent;
  int64_t tree_keys = 0;  // 0: as many as new tokens
  const OptionalTensor& cu_seqlens_q = kAbsent;
  int64_t max_seqlen_q = 0;  // with cu_seqlens_q alone
};

// The op's whole contract, checked once for all devices. Params exist only when the arguments are right. The good path
// builds no message: a call on a GPU has microseconds for all of this.
class Checker {
 public:
  explicit Checker(const Arguments& arguments) : a_(arguments) {}

  Params run() {
    check_numbers();
    check_queries();
    check_pages();
    check_plan();
    check_options();
    return params();
  }

 private:
  static constexpr const char* kOp = "xqa_decode";

  TensorCheck check(const char* name, const Tensor& tensor) const {
    const TensorCheck tensor_check(kOp, name, tensor);
    tensor_check.device_as("q", a_.q);
    return tensor_check;
  }

  void check_numbers() const {
    check_finite(kOp, "softmax_scale", a_.softmax_scale);
    check_finite(kOp, "logit_cap", a_.logit_cap);
    if (a_.logit_cap < 0) fail(kOp, "logit_cap must be 0 (off) or positive, got " + std::to_string(a_.logit_cap));
    check_range(kOp, "window_left", a_.window_left, -1, kMaxWindow);
    check_splits(kOp, a_.fixed_split_tokens, kPlanTileTokens);
  }

  // A ragged batch says how many tokens a request has at most.
  void check_ragged() {
    if (!a_.cu_seqlens_q) {
      if (a_.max_seqlen_q)
        fail(kOp, "max_seqlen_q must be 0 without cu_seqlens_q, got " + std::to_string(a_.max_seqlen_q));
      return;
    }
    check_range(kOp, "max_seqlen_q", a_.max_seqlen_q, 1, kMaxSeqlenQ);
    seqlen_q_ = Dim("seqlen_q", a_.max_seqlen_q, "max_seqlen_q");
    // Rows of nobody would see keys before every window, and the pages of those may be another's.
    if (a_.window_left >= 0)
      fail(kOp, "window_left must be -1 with cu_seqlens_q, got " + std::to_string(a_.window_left));
    if (a_.tree_mask) fail(kOp, "tree_mask must be absent with cu_seqlens_q, whose requests have no mask of one size");
    const TensorCheck bounds = check("cu_seqlens_q", *a_.cu_seqlens_q);
    Dim size("batch_size + 1");
    bounds.dtype({DType::kInt32})
        .shape({size})
        .size_at_least(0, "batch_size + 1", 1, "a batch has a beginning")
        .contiguous();
    batch_size_ = Dim("batch_size", *size - 1, "cu_seqlens_q");
  }

  void check_rows() {
    TensorCheck(kOp, "q", a_.q)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        .shape({num_tokens_, num_q_heads_, head_dim_})
        .dense_last();
    check_range(kOp, "q.shape[0] (num_tokens)", *num_tokens_, 0, INT32_MAX);
    if (*batch_size_ == 0 && *num_tokens_ > 0) {
      fail(kOp,
           "q.shape[0] (num_tokens) must be 0 where cu_seqlens_q has no request, got " + std::to_string(*num_tokens_));
    }
    check_range(kOp, "q.shape[2] (head_dim)", *head_dim_, 1, kMaxHeadDim);
    check("out", a_.out).dtype_as("q", a_.q).shape({num_tokens_, num_q_heads_, head_dim_}).dense_last().apart();
    if (a_.lse) check("lse", *a_.lse).dtype({DType::kFloat32}).shape({num_tokens_, num_q_heads_}).contiguous();
  }

  void check_queries() {
    check_ragged();
    if (a_.cu_seqlens_q) return check_rows();
    TensorCheck(kOp, "q", a_.q)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        .shape({batch_size_, seqlen_q_, num_q_heads_, head_dim_})
        .size_at_least(1, "seqlen_q", 1, "a request has a query")
        .dense_last();
    check_range(kOp, "q.shape[1] (seqlen_q)", *seqlen_q_, 1, kMaxSeqlenQ);
    check_range(kOp, "q.shape[3] (head_dim)", *head_dim_, 1, kMaxHeadDim);
    check("out", a_.out)
        .dtype_as("q", a_.q)
        .shape({batch_size_, seqlen_q_, num_q_heads_, head_dim_})
        .dense_last()
        .apart();
    if (a_.lse) {
      check("lse", *a_.lse).dtype({DType::kFloat32}).shape({batch_size_, seqlen_q_, num_q_heads_}).contiguous();
    }
  }

  void check_pages() {
    const TensorCheck k_check = check("k_pages", a_.k_pages);
    k_check.dtype({dtype_of(a_.q), DType::kFloat8E4M3, DType::kFloat8E5M2})
        .shape({num_pages_, page_size_, num_kv_heads_, head_dim_})
        .dense_last();
    k_check.size_at_least(1, "page_size", 1, "a page holds a token");
    k_check.size_at_least(2, "num_kv_heads", 1, "attention has a head");
    check("v_pages", a_.v_pages)
        .dtype_as("k_pages", a_.k_pages)
        .shape({num_pages_, page_size_, num_kv_heads_, head_dim_})
        .dense_last();
    check_range(kOp, "k_pages.shape[1] (page_size)", *page_size_, 1, INT32_MAX);
    if (*num_q_heads_ == 0 || *num_q_heads_ % *num_kv_heads_ != 0) {
      fail(kOp, "q.shape[2] (num_q_heads) must be a positive multiple of " + std::to_string(*num_kv_heads_) +
                    " as in k_pages.shape[2] (num_kv_heads), got " + std::to_string(*num_q_heads_));
    }
    if (a_.kv_indptr) {
      Dim num_indices("num_indices"), bounds("batch_size + 1", *batch_size_ + 1, "q");
      check("page_table", a_.page_table).dtype({DType::kInt32}).shape({num_indices}).contiguous();
      check("kv_indptr", *a_.kv_indptr).dtype({DType::kInt32}).shape({bounds}).contiguous();
    } else {
      Dim max_pages("max_pages");
      check("page_table", a_.page_table).dtype({DType::kInt32}).shape({batch_size_, max_pages}).dense_last();
    }
    check("cache_seqlens", a_.cache_seqlens).dtype({DType::kInt32}).shape({batch_size_}).contiguous();
  }

  void check_plan() {
    Dim entry_size("entry_size", kSplitKvEntrySize, "a plan row"), splits("batch_size + 1", *batch_size_ + 1, "q");
    Dim rows("seqlen_q * group", *seqlen_q_ * (*num_q_heads_ / *num_kv_heads_), "q and k_pages");
    Dim num_works("num_works");
    check("tile_scheduler_metadata", a_.tile_scheduler_metadata)
        .dtype({DType::kInt32})
        .shape({num_sm_parts_, entry_size})
        .size_at_least(0, "num_sm_parts", 1, "a plan has a part")
        .contiguous();
    check("num_splits", a_.num_splits).dtype({DType::kInt32}).shape({splits}).contiguous();
    check("out_partial", a_.out_partial).dtype({DType::kFloat32}).shape({num_partials_, rows, head_dim_}).contiguous();
    check("lse_partial", a_.lse_partial).dtype({DType::kFloat32}).shape({num_partials_, rows}).contiguous();
    const LeastPartials least = least_partials(a_.fixed_split_tokens, *num_sm_parts_, *batch_size_ * *num_kv_heads_);
    if (*num_partials_ < least.rows) {
      fail(kOp, "out_partial.shape[0] (num_partials) must be at least " + std::to_string(least.rows) + " (" +
                    least.what + "), got " + std::to_string(*num_partials_));
    }
    check_splits_of_a_work();
    const TensorCheck semaphores = check("semaphores", a_.semaphores);
    semaphores.dtype({DType::kInt32}).shape({num_works}).contiguous();
    if (*num_works < *batch_size_ * *num_kv_heads_) {
      semaphores.size_at_least(0, "num_works", *batch_size_ * *num_kv_heads_, "batch_size * num_kv_heads");
    }
  }

  // A balanced plan splits a work at most once a part. A batch-invariant one cuts it every fixed_split_tokens tokens,
  // as long as its request fits the page table and the cuts of its heads fit out_partial: what does not fit is not
  // computed.
  void check_splits_of_a_work() const {
    if (*num_sm_parts_ > kMaxSplits) {
      fail(kOp, "tile_scheduler_metadata.shape[0] (num_sm_parts) must be at most " + std::to_string(kMaxSplits) +
                    " (splits of a work), got " + std::to_string(*num_sm_parts_));
    }
    if (a_.fixed_split_tokens <= 0) return;
    const int64_t cells = a_.page_table.size(a_.kv_indptr ? 0 : 1);
    const int64_t tokens =
        a_.window_left < 0 ? cells * *page_size_ : std::min(cells * *page_size_, a_.window_left + *seqlen_q_ + 64);
    const int64_t cuts = std::min((tokens - 1) / a_.fixed_split_tokens + 1, *num_partials_ / *num_kv_heads_);
    if (cuts <= kMaxSplits) return;
    fail(kOp, "fixed_split_tokens must make at most " + std::to_string(kMaxSplits) + " cuts of a request, " +
                  std::to_string(a_.fixed_split_tokens) + " may make " + std::to_string(cuts) +
                  ": the page table has " + std::to_string(tokens) +
                  " tokens for one; allocate the plan with longer cuts");
  }

  void check_scale(const char* name, const OptionalTensor& scale) const {
    if (!scale) return;
    check(name, *scale).dtype({DType::kFloat32}).rank(1).contiguous();
    const int64_t size = scale->size(0);
    if (size != 1 && size != *num_kv_heads_) {
      fail(kOp, std::string(name) + ".shape[0] must be 1 or " + std::to_string(*num_kv_heads_) +
                    " (num_kv_heads) as in k_pages, got " + std::to_string(size));
    }
  }

  void check_options() {
    if (a_.sinks) check("sinks", *a_.sinks).dtype({DType::kFloat32}).shape({num_q_heads_}).contiguous();
    if (a_.tree_mask) {
      if (!a_.causal)
        fail(kOp, "causal must be True with tree_mask, which says what causal means among the new tokens");
      Dim mask_bytes("mask_bytes");
      const TensorCheck mask = check("tree_mask", *a_.tree_mask);
      mask.dtype({DType::kUInt8}).shape({batch_size_, seqlen_q_, mask_bytes}).dense_last();
      check_mask_bytes(mask, *mask_bytes, tree_keys_of(a_.tree_keys, *seqlen_q_), *seqlen_q_);
    }
    check_tree_keys(kOp, a_.tree_keys, *seqlen_q_, a_.window_left);
    check_scale("k_scale", a_.k_scale);
    check_scale("v_scale", a_.v_scale);
    if (a_.report) {
      Dim report_size("report_size", 8, "core/report.h");
      check("report", *a_.report).dtype({DType::kInt32}).shape({report_size}).contiguous();
    }
  }

  Params params() const {
    const bool csr = a_.kv_indptr.has_value(), ragged = a_.cu_seqlens_q.has_value();
    const int token_axis = ragged ? 0 : 1;
    const auto stride_of = [](const OptionalTensor& tensor, int64_t axis) { return tensor ? tensor->stride(axis) : 0; };
    const auto scale_stride = [](const OptionalTensor& scale) { return scale && scale->size(0) > 1 ? 1 : 0; };
    Params p{.batch_size = batch_size_.as_int(),
             .seqlen_q = seqlen_q_.as_int(),
             .num_q_heads = num_q_heads_.as_int(),
             .num_kv_heads = num_kv_heads_.as_int(),
             .head_dim = head_dim_.as_int(),
             .q = a_.q.const_data_ptr(),
             .q_stride_request = ragged ? 0 : a_.q.stride(0),
             .q_stride_token = a_.q.stride(token_axis),
             .q_stride_head = a_.q.stride(token_axis + 1),
             .k_pages = a_.k_pages.const_data_ptr(),
             .k_stride_page = a_.k_pages.stride(0),
             .k_stride_token = a_.k_pages.stride(1),
             .k_stride_head = a_.k_pages.stride(2),
             .v_pages = a_.v_pages.const_data_ptr(),
             .v_stride_page = a_.v_pages.stride(0),
             .v_stride_token = a_.v_pages.stride(1),
             .v_stride_head = a_.v_pages.stride(2),
             .page_table = {.cells = static_cast<const int32_t*>(a_.page_table.const_data_ptr()),
                            .kv_indptr = data_or_null<const int32_t>(a_.kv_indptr),
                            .stride_request = csr ? 0 : a_.page_table.stride(0),
                            .num_pages = *num_pages_,
                            .page_size = page_size_.as_int(),
                            .max_pages = csr ? 0 : a_.page_table.size(1),
                            .num_indices = csr ? a_.page_table.size(0) : 0},
             .table_tokens = 0,
             .cache_seqlens = static_cast<const int32_t*>(a_.cache_seqlens.const_data_ptr()),
             .out = a_.out.mutable_data_ptr(),
             .out_stride_request = ragged ? 0 : a_.out.stride(0),
             .out_stride_token = a_.out.stride(token_axis),
             .out_stride_head = a_.out.stride(token_axis + 1),
             .lse = data_or_null<float>(a_.lse),
             .tile_scheduler_metadata = static_cast<const int32_t*>(a_.tile_scheduler_metadata.const_data_ptr()),
             .num_splits = static_cast<const int32_t*>(a_.num_splits.const_data_ptr()),
             .num_sm_parts = num_sm_parts_.as_int(),
             .fixed_split_tokens = static_cast<int>(a_.fixed_split_tokens),
             .out_partial = static_cast<float*>(a_.out_partial.mutable_data_ptr()),
             .lse_partial = static_cast<float*>(a_.lse_partial.mutable_data_ptr()),
             .num_partials = *num_partials_,
             .semaphores = static_cast<int32_t*>(a_.semaphores.mutable_data_ptr()),
             .softmax_scale = static_cast<float>(a_.softmax_scale),
             .causal = a_.causal,
             .ragged = ragged,
             .window_left = static_cast<int>(a_.window_left),
             .logit_cap = static_cast<float>(a_.logit_cap),
             .sinks = data_or_null<const float>(a_.sinks),
             .tree_mask = data_or_null<const uint8_t>(a_.tree_mask),
             .tree_mask_stride_request = stride_of(a_.tree_mask, 0),
             .tree_mask_stride_token = stride_of(a_.tree_mask, 1),
             .k_scale = data_or_null<const float>(a_.k_scale),
             .v_scale = data_or_null<const float>(a_.v_scale),
             .k_scale_stride = scale_stride(a_.k_scale),
             .v_scale_stride = scale_stride(a_.v_scale),
             .dtype = dtype_of(a_.q),
             .kv_dtype = dtype_of(a_.k_pages),
             .report = data_or_null<int32_t>(a_.report),
             .num_semaphores = a_.semaphores.size(0),
             .tree_keys = static_cast<int>(tree_keys_of(a_.tree_keys, *seqlen_q_))};
    if (ragged) {
      p.cu_seqlens_q = static_cast<const int32_t*>(a_.cu_seqlens_q->const_data_ptr());
      p.num_tokens = *num_tokens_;
    }
    if (!csr) p.table_tokens = p.page_table.num_tokens(0);
    return p;
  }

  const Arguments& a_;
  Dim batch_size_{"batch_size"}, seqlen_q_{"seqlen_q"}, num_q_heads_{"num_q_heads"}, head_dim_{"head_dim"};
  Dim num_pages_{"num_pages"}, page_size_{"page_size"}, num_kv_heads_{"num_kv_heads"};
  Dim num_sm_parts_{"num_sm_parts"}, num_partials_{"num_partials"}, num_tokens_{"num_tokens"};
};

inline Params checked_params(const Arguments& arguments) { return Checker(arguments).run(); }

void run_cpu(Params params);  // op_cpu.cpp; throws when the plan is another step's, and on faults without a report

}  // namespace attnops::xqa_decode
