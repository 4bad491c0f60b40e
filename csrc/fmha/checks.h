#pragma once
#include <optional>
#include <string>

#include "core/math.h"
#include "core/report.h"
#include "fmha/params.h"
#include "scheduler/varlen_tiles.h"
#include "torch_bindings/check.h"

namespace attnops::fmha {

inline constexpr int64_t kMaxInt32 = INT32_MAX;
inline constexpr int64_t kMaxTileQ = 1024;
inline constexpr int64_t kMaxWorksPerTile = 1 << 16, kMostPieces = 1 << 12, kMaxSms = 1 << 12;
inline constexpr int64_t kMinHeadDim = 32, kMaxHeadDim = 576, kHeadDimMultiple = 8;

struct PlanParams {
  VarlenGeometry geometry;
  int32_t* tile_order;  // [max_tiles, 2]
  int64_t max_tiles;
  const int32_t* cu_seqlens_q;   // [B + 1]
  const int32_t* cu_seqlens_k;   // [B + 1], or null
  const int32_t* cache_seqlens;  // [B], or null; neither: as many keys as queries
  int32_t* pieces;               // [1 + max_pieces, 4], or null
  int max_pieces, works_per_tile, num_sms;
  bool cut_in_part;  // scheduler/varlen_cuts.h
};

inline const int32_t* int32_data(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.const_data_ptr()); }

inline void check_tile_order(const char* op, const Tensor& tile_order, const Tensor& like, const char* like_name) {
  Dim max_tiles("max_tiles"), pair("request, tile", 2, "a plan row");
  TensorCheck(op, "tile_order", tile_order)
      .device_as(like_name, like)
      .dtype({DType::kInt32})
      .shape({max_tiles, pair})
      .contiguous();
}

inline void check_pieces(const char* op, const Tensor& pieces, const Tensor& like, const char* like_name) {
  Dim rows("max_pieces + 1"), fields("request, tile, piece, pieces", 4, "a plan row");
  TensorCheck(op, "pieces", pieces)
      .device_as(like_name, like)
      .dtype({DType::kInt32})
      .shape({rows, fields})
      .size_at_least(0, "max_pieces + 1", 2, "one row for their number")
      .contiguous();
  check_range(op, "pieces.shape[0] (max_pieces + 1)", pieces.size(0), 2, kMostPieces + 1);
}

// Binds `batch` to one less than the size of an array of B + 1 bounds.
inline Dim checked_batch(const char* op, const char* name, const Tensor& bounds) {
  TensorCheck(op, name, bounds)
      .dtype({DType::kInt32})
      .rank(1)
      .size_at_least(0, "batch_size + 1", 1, "bounds of B requests")
      .contiguous();
  return Dim("batch_size", bounds.size(0) - 1, name);
}

inline PlanParams checked_plan_params(const Tensor& tile_order, const Tensor& cu_seqlens_q,
                                      const OptionalTensor& cu_seqlens_k, const OptionalTensor& cache_seqlens,
                                      int64_t tile_q, bool causal, int64_t window_left, const OptionalTensor& pieces,
                                      int64_t works_per_tile, int64_t num_sms, bool cut_in_part) {
  constexpr const char* kOp = "fmha_plan";
  Dim batch = checked_batch(kOp, "cu_seqlens_q", cu_seqlens_q);
  check_tile_order(kOp, tile_order, cu_seqlens_q, "cu_seqlens_q");
  if (cu_seqlens_k && cache_seqlens) fail(kOp, "cu_seqlens_k and cache_seqlens exclude each other, got both");
  if (cu_seqlens_k) {
    Dim bounds("batch_size + 1", *batch + 1, "cu_seqlens_q");
    TensorCheck(kOp, "cu_seqlens_k", *cu_seqlens_k)
        .device_as("cu_seqlens_q", cu_seqlens_q)
        .dtype({DType::kInt32})
        .shape({bounds})
        .contiguous();
  }
  if (cache_seqlens) {
    TensorCheck(kOp, "cache_seqlens", *cache_seqlens)
        .device_as("cu_seqlens_q", cu_seqlens_q)
        .dtype({DType::kInt32})
        .shape({batch})
        .contiguous();
  }
  check_range(kOp, "tile_q", tile_q, 1, kMaxTileQ);
  check_range(kOp, "window_left", window_left, -1, kMaxInt32);
  check_range(kOp, "works_per_tile", works_per_tile, 1, kMaxWorksPerTile);
  check_range(kOp, "num_sms", num_sms, 0, kMaxSms);
  if (pieces) check_pieces(kOp, *pieces, cu_seqlens_q, "cu_seqlens_q");
  if (pieces && num_sms == 0 && !cu_seqlens_q.is_cuda()) fail(kOp, "num_sms must be given with pieces on a CPU");
  return {.geometry = {.num_requests = batch.as_int(),
                       .tile_q = static_cast<int>(tile_q),
                       .window_left = static_cast<int>(window_left),
                       .causal = causal},
          .tile_order = static_cast<int32_t*>(tile_order.mutable_data_ptr()),
          .max_tiles = tile_order.size(0),
          .cu_seqlens_q = int32_data(cu_seqlens_q),
          .cu_seqlens_k = data_or_null<const int32_t>(cu_seqlens_k),
          .cache_seqlens = data_or_null<const int32_t>(cache_seqlens),
          .pieces = data_or_null<int32_t>(pieces),
          .max_pieces = pieces ? static_cast<int>(pieces->size(0)) - 1 : 0,
          .works_per_tile = static_cast<int>(works_per_tile),
          .num_sms = static_cast<int>(num_sms),
          .cut_in_part = cut_in_part};
}

// What fmha_varlen and fmha_paged share, by the schema's names; k and v are the rows or the pages.
struct Arguments {
  const char* op;
  const char* k_name;
  const char* v_name;
  const Tensor& out;
  const OptionalTensor& lse;
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& cu_seqlens_q;
  const Tensor& tile_order;
  int64_t tile_q;
  double softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  double logit_cap;
  const OptionalTensor& sinks;
  const OptionalTensor& tree_mask;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
  const OptionalTensor& report;
  const OptionalTensor& semaphores;
  const OptionalTensor& pieces;
  const OptionalTensor& partial;
  const OptionalTensor& hidden_keys;
};

// The contract of both ops, checked once for all devices. Params exist only when the arguments are right.
class Checker {
 public:
  explicit Checker(const Arguments& a) : a_(a), batch_(checked_batch(a.op, "cu_seqlens_q", a.cu_seqlens_q)) {}

  // k, v: [T_k, H_kv, D]
  Params ragged(const Tensor& cu_seqlens_k) {
    check_queries();
    Dim tokens("num_k_tokens");
    check_keys({tokens, kv_heads_, dim_qk_}, {tokens, kv_heads_, dim_v_});
    Dim bounds("batch_size + 1", *batch_ + 1, "cu_seqlens_q");
    check("cu_seqlens_k", cu_seqlens_k).dtype({DType::kInt32}).shape({bounds}).contiguous();
    check_rest();
    Params p = params(0);
    p.num_k_tokens = *tokens;
    p.cu_seqlens_k = int32_data(cu_seqlens_k);
    return p;
  }

  // k, v: [P, page_size, H_kv, D]
  Params paged(const Tensor& page_table, const OptionalTensor& kv_indptr, const Tensor& cache_seqlens) {
    check_queries();
    Dim pages("num_pages"), page_size("page_size");
    check_keys({pages, page_size, kv_heads_, dim_qk_}, {pages, page_size, kv_heads_, dim_v_});
    const std::string page_size_name = std::string(a_.k_name) + ".shape[1] (page_size)";
    check_range(a_.op, page_size_name.c_str(), *page_size, 1, kMaxInt32);
    Dim cells("max_pages"), bounds("batch_size + 1", *batch_ + 1, "cu_seqlens_q");
    const TensorCheck table = check("page_table", page_table);
    table.dtype({DType::kInt32});
    if (kv_indptr) {
      table.shape({cells}).contiguous();
      check("kv_indptr", *kv_indptr).dtype({DType::kInt32}).shape({bounds}).contiguous();
    } else {
      table.shape({batch_, cells}).dense_last();
    }
    check("cache_seqlens", cache_seqlens).dtype({DType::kInt32}).shape({batch_}).contiguous();
    check_rest();
    Params p = params(1);
    p.paged = true;
    p.k_stride_page = a_.k.stride(0);
    p.v_stride_page = a_.v.stride(0);
    p.page_table = {.cells = int32_data(page_table),
                    .kv_indptr = data_or_null<const int32_t>(kv_indptr),
                    .stride_request = kv_indptr ? 0 : page_table.stride(0),
                    .num_pages = *pages,
                    .page_size = page_size.as_int(),
                    .max_pages = kv_indptr ? 0 : *cells,
                    .num_indices = kv_indptr ? *cells : 0};
    p.cache_seqlens = int32_data(cache_seqlens);
    return p;
  }

 private:
  using Shape = std::initializer_list<std::reference_wrapper<Dim>>;

  TensorCheck check(const char* name, const Tensor& tensor) const {
    const TensorCheck tensor_check(a_.op, name, tensor);
    tensor_check.device_as("q", a_.q);
    return tensor_check;
  }

  void check_head_dim(const char* name, int64_t head_dim) const {
    if (head_dim < kMinHeadDim || head_dim > kMaxHeadDim || head_dim % kHeadDimMultiple != 0) {
      fail(a_.op, std::string(name) + " must be a multiple of " + std::to_string(kHeadDimMultiple) + " in [" +
                      std::to_string(kMinHeadDim) + ", " + std::to_string(kMaxHeadDim) + "], got " +
                      std::to_string(head_dim) + " (pad q, k or v with zeros)");
    }
  }

  void check_queries() {
    TensorCheck(a_.op, "q", a_.q)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3})
        .shape({tokens_, q_heads_, dim_qk_})
        .size_at_least(1, "num_q_heads", 1, "attention has a head")
        .dense_last();
    check_range(a_.op, "q.shape[0] (num_q_tokens)", *tokens_, 0, kMaxInt32);
    check_head_dim("q.shape[2] (head_dim_qk)", *dim_qk_);
    const TensorCheck out = check("out", a_.out);
    has_dtype(a_.q, DType::kFloat8E4M3) ? out.dtype({DType::kBFloat16}) : out.dtype_as("q", a_.q);
    out.shape({tokens_, q_heads_, dim_v_}).dense_last().apart();
    check_head_dim("out.shape[2] (head_dim_v)", *dim_v_);
    if (a_.lse) check("lse", *a_.lse).dtype({DType::kFloat32}).shape({tokens_, q_heads_}).contiguous();
  }

  void check_keys(Shape k_shape, Shape v_shape) {
    const TensorCheck k_check = check(a_.k_name, a_.k);
    if (has_dtype(a_.q, DType::kFloat8E4M3)) {
      k_check.dtype_as("q", a_.q);
    } else if (!has_dtype(a_.k, DType::kFloat8E4M3) && !has_dtype(a_.k, DType::kFloat8E5M2)) {
      k_check.dtype({dtype_of(a_.q), DType::kFloat8E4M3, DType::kFloat8E5M2});
    }
    k_check.shape(k_shape).dense_last();
    check(a_.v_name, a_.v).dtype_as(a_.k_name, a_.k).shape(v_shape).dense_last();
    if (*kv_heads_ < 1 || *q_heads_ % *kv_heads_ != 0) {
      fail(a_.op, "q.shape[1] (num_q_heads) must be a multiple of " + std::to_string(*kv_heads_) +
                      ", the num_kv_heads of " + a_.k_name + ", got " + std::to_string(*q_heads_));
    }
  }

  void check_scale(const char* name, const OptionalTensor& scale) const {
    if (!scale) return;
    check(name, *scale).dtype({DType::kFloat32}).rank(1).contiguous();
    const int64_t size = scale->size(0);
    if (size != 1 && size != *kv_heads_) {
      fail(a_.op, std::string(name) + ".shape[0] must be 1 or " + std::to_string(*kv_heads_) +
                      " (num_kv_heads) as in " + a_.k_name + ", got " + std::to_string(size));
    }
  }

  void check_rest() {
    check("cu_seqlens_q", a_.cu_seqlens_q);  // shape and dtype were first
    check_tile_order(a_.op, a_.tile_order, a_.q, "q");
    check_range(a_.op, "tile_q", a_.tile_q, 1, kMaxTileQ);
    TensorCheck(a_.op, "tile_order", a_.tile_order)
        .size_at_least(0, "max_tiles", ceil_div(*tokens_, a_.tile_q) + *batch_, "num_q_tokens / tile_q + batch_size");
    check_finite(a_.op, "softmax_scale", a_.softmax_scale);
    check_finite(a_.op, "logit_cap", a_.logit_cap);
    if (a_.logit_cap < 0) fail(a_.op, "logit_cap must be 0 (off) or positive, got " + std::to_string(a_.logit_cap));
    check_range(a_.op, "window_left", a_.window_left, -1, kMaxInt32);
    check_range(a_.op, "window_right", a_.window_right, -1, kMaxInt32);
    if (a_.sinks) check("sinks", *a_.sinks).dtype({DType::kFloat32}).shape({q_heads_}).contiguous();
    if (a_.tree_mask) {
      if (!a_.causal) {
        fail(a_.op, "causal must be True with tree_mask, which says what causal means among the new tokens");
      }
      Dim mask_bytes("mask_bytes");
      check("tree_mask", *a_.tree_mask).dtype({DType::kUInt8}).shape({tokens_, mask_bytes}).dense_last();
    }
    if (a_.hidden_keys) {
      Dim bounds("begin, end", 2, "keys that a query does not see");
      check("hidden_keys", *a_.hidden_keys).dtype({DType::kInt32}).shape({tokens_, bounds}).contiguous();
    }
    check_scale("k_scale", a_.k_scale);
    check_scale("v_scale", a_.v_scale);
    if (a_.report) {
      Dim report_size("report_size", kReportSize, "core/report.h");
      check("report", *a_.report).dtype({DType::kInt32}).shape({report_size}).contiguous();
    }
    if (a_.semaphores) {
      Dim counters("counters", 3, "works taken, CTAs that have left, parts of pieces done");
      check("semaphores", *a_.semaphores).dtype({DType::kInt32}).shape({counters}).contiguous();
    }
    if (a_.pieces) {
      if (!a_.q.is_cuda()) fail(a_.op, "pieces must be None on a CPU, which cuts no tile");
      check_pieces(a_.op, *a_.pieces, a_.q, "q");
      if (!a_.partial || !a_.semaphores) fail(a_.op, "partial and semaphores must be given with pieces");
    }
    if (a_.partial) {
      Dim floats("partial_size");
      check("partial", *a_.partial).dtype({DType::kFloat32}).shape({floats}).contiguous();
    }
  }

  // `axis`: of the tokens in k and v.
  Params params(int axis) const {
    const auto scale_stride = [](const OptionalTensor& scale) { return scale && scale->size(0) > 1 ? 1 : 0; };
    return {.batch_size = batch_.as_int(),
            .num_q_heads = q_heads_.as_int(),
            .num_kv_heads = kv_heads_.as_int(),
            .head_dim_qk = dim_qk_.as_int(),
            .head_dim_v = dim_v_.as_int(),
            .num_q_tokens = *tokens_,
            .num_k_tokens = 0,
            .q = a_.q.const_data_ptr(),
            .q_stride_token = a_.q.stride(0),
            .q_stride_head = a_.q.stride(1),
            .k = a_.k.const_data_ptr(),
            .k_stride_page = 0,
            .k_stride_token = a_.k.stride(axis),
            .k_stride_head = a_.k.stride(axis + 1),
            .v = a_.v.const_data_ptr(),
            .v_stride_page = 0,
            .v_stride_token = a_.v.stride(axis),
            .v_stride_head = a_.v.stride(axis + 1),
            .paged = false,
            .page_table = {},
            .cu_seqlens_q = int32_data(a_.cu_seqlens_q),
            .cu_seqlens_k = nullptr,
            .cache_seqlens = nullptr,
            .tile_order = int32_data(a_.tile_order),
            .num_tiles = static_cast<int>(a_.tile_order.size(0)),
            .tile_q = static_cast<int>(a_.tile_q),
            .pieces = data_or_null<const int32_t>(a_.pieces),
            .max_pieces = a_.pieces ? static_cast<int>(a_.pieces->size(0)) - 1 : 0,
            .partial = data_or_null<float>(a_.partial),
            .partial_size = a_.partial ? a_.partial->size(0) : 0,
            .out = a_.out.mutable_data_ptr(),
            .out_stride_token = a_.out.stride(0),
            .out_stride_head = a_.out.stride(1),
            .lse = data_or_null<float>(a_.lse),
            .softmax_scale = static_cast<float>(a_.softmax_scale),
            .causal = a_.causal,
            .window_left = static_cast<int>(a_.window_left),
            .window_right = static_cast<int>(a_.window_right),
            .logit_cap = static_cast<float>(a_.logit_cap),
            .sinks = data_or_null<const float>(a_.sinks),
            .tree_mask = data_or_null<const uint8_t>(a_.tree_mask),
            .tree_mask_stride_token = a_.tree_mask ? a_.tree_mask->stride(0) : 0,
            .tree_mask_bytes = a_.tree_mask ? a_.tree_mask->size(1) : 0,
            .k_scale = data_or_null<const float>(a_.k_scale),
            .v_scale = data_or_null<const float>(a_.v_scale),
            .k_scale_stride = scale_stride(a_.k_scale),
            .v_scale_stride = scale_stride(a_.v_scale),
            .dtype = dtype_of(a_.q),
            .kv_dtype = dtype_of(a_.k),
            .semaphores = data_or_null<int32_t>(a_.semaphores),
            .report = data_or_null<int32_t>(a_.report),
            .hidden_keys = data_or_null<const int32_t>(a_.hidden_keys)};
  }

  const Arguments& a_;
  Dim batch_, tokens_{"num_q_tokens"}, q_heads_{"num_q_heads"}, kv_heads_{"num_kv_heads"};
  Dim dim_qk_{"head_dim_qk"}, dim_v_{"head_dim_v"};
};

}  // namespace attnops::fmha
