#pragma once
#include "core/math.h"
#include "sparse_indexer/topk_pieces.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// The ops' whole contract, checked once for all devices. Params exist only when the arguments are right.
namespace attnops::sparse_indexer {

// Contiguous int32 [extent]; null where it is absent.
inline const int32_t* checked_per_row(const char* op, const char* name, const OptionalTensor& tensor, Dim& extent,
                                      const char* other_name, const Tensor& other) {
  if (!tensor) return nullptr;
  TensorCheck(op, name, *tensor).device_as(other_name, other).dtype({DType::kInt32}).shape({extent}).contiguous();
  return static_cast<const int32_t*>(tensor->const_data_ptr());
}

struct SelectTensors {
  const Tensor& indices;
  const OptionalTensor& positions;
  const Tensor &logits, &lengths;
  const OptionalTensor &row_starts, &page_table, &row_to_request;
  int64_t page_size;
  const OptionalTensor &offsets, &report;
};

inline SelectParams checked_select(const SelectTensors& t) {
  const char *op = "topk_select", *home = "logits";
  Dim rows("num_rows"), columns("num_columns"), k("k"), requests("num_requests"), pages("max_pages");
  TensorCheck(op, home, t.logits).dtype({DType::kFloat32, DType::kBFloat16}).shape({rows, columns}).dense_last();
  check_range(op, "num_rows of logits", *rows, 0, kMaxRows);
  const auto output = [&](const char* name, const Tensor& tensor) {
    TensorCheck(op, name, tensor)
        .device_as(home, t.logits)
        .dtype({DType::kInt32})
        .shape({rows, k})
        .dense_last()
        .apart();
    return static_cast<int32_t*>(tensor.mutable_data_ptr());
  };
  SelectParams p{};
  p.indices = output("indices", t.indices);
  check_range(op, "k, columns of indices,", *k, 0, kMaxSelected);
  if (t.positions) {
    p.positions = output("positions", *t.positions);
    p.stride_positions = t.positions->stride(0);
  }
  check_range(op, "page_size", t.page_size, 1, INT32_MAX);
  if (t.page_table) {
    if (t.offsets) fail(op, "page_table and offsets must not both be given: an index is a slot or a row");
    TensorCheck(op, "page_table", *t.page_table)
        .device_as(home, t.logits)
        .dtype({DType::kInt32})
        .shape({requests, pages})
        .dense_last();
    p.page_table = address_of<const int32_t>(*t.page_table);
    p.stride_table = t.page_table->stride(0);
    p.num_requests = *requests;
    p.max_pages = *pages;
    if (!t.row_to_request && *requests != *rows) {
      fail(op, "page_table.shape[0] (num_requests) must be " + std::to_string(*rows) +
                   " (num_rows of logits) without row_to_request, got " + std::to_string(*requests));
    }
  } else if (t.row_to_request) {
    fail(op, "row_to_request must not be given without page_table: it names rows of it");
  }
  const auto per_row = [&](const char* name, const OptionalTensor& tensor) {
    return checked_per_row(op, name, tensor, rows, home, t.logits);
  };
  p.num_rows = *rows;
  p.k = k.as_int();
  p.logits = t.logits.const_data_ptr();
  p.stride_row = t.logits.stride(0);
  p.columns = *columns;
  p.dtype = dtype_of(t.logits);
  p.lengths = per_row("lengths", t.lengths);
  p.row_starts = per_row("row_starts", t.row_starts);
  p.row_to_request = per_row("row_to_request", t.row_to_request);
  p.offsets = per_row("offsets", t.offsets);
  p.page_size = static_cast<int>(t.page_size);
  p.page_shift = shift_of(t.page_size);
  p.stride_indices = t.indices.stride(0);
  p.report = checked_report(op, t.report, home, t.logits);
  return p;
}

// uint8 [num_pages, page_size, dim + 4], each page without gaps.
inline IndexPages checked_index_pages(const char* op, const Tensor& pages) {
  Dim num_pages("num_pages"), page_size("page_size"), width("dim + 4");
  TensorCheck(op, "index_pages", pages).dtype({DType::kUInt8}).shape({num_pages, page_size, width});
  TensorCheck(op, "index_pages", pages)
      .size_at_least(1, "page_size", 1, "a page holds a token")
      .dense_last()
      .aligned(4);
  const int64_t dim = *width - 4;
  if (dim != 64 && dim != 128) {
    fail(op,
         "index_pages.shape[2] must be 132 (128 bytes of a key, 4 of its scale) or 68, got " + std::to_string(*width));
  }
  if ((*page_size > 1 && pages.stride(1) != *width) || pages.stride(0) % 4 != 0) {
    fail(op, "index_pages must have pages without gaps on 4-byte boundaries, got strides " +
                 std::to_string(pages.stride(0)) + " and " + std::to_string(pages.stride(1)));
  }
  return {.data = static_cast<uint8_t*>(pages.mutable_data_ptr()),
          .stride_page = pages.stride(0),
          .num_pages = *num_pages,
          .dim = static_cast<int>(dim),
          .page_size = page_size.as_int(),
          .page_shift = shift_of(*page_size)};
}

inline StoreIndexParams checked_store_index(const Tensor& index_pages, const Tensor& k, const Tensor& out_cache_loc,
                                            bool hadamard, bool ue8m0, const OptionalTensor& report) {
  const char *op = "store_index_k", *home = "index_pages";
  const IndexPages pages = checked_index_pages(op, index_pages);
  TensorCheck(op, home, index_pages).apart();
  Dim tokens("num_tokens"), dim("dim", pages.dim, home);
  TensorCheck(op, "k", k)
      .device_as(home, index_pages)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({tokens, dim})
      .dense_last();
  return {.pages = pages,
          .how = {hadamard, ue8m0},
          .k = k.const_data_ptr(),
          .num_tokens = *tokens,
          .stride_token = k.stride(0),
          .dtype = dtype_of(k),
          .out_cache_loc = checked_indices(op, "out_cache_loc", out_cache_loc, tokens, home, index_pages),
          .report = checked_report(op, report, home, index_pages)};
}

inline QuantizeQueryParams checked_quantize_query(const Tensor& q_fp8, const Tensor& weights_out, const Tensor& q,
                                                  const Tensor& weights, double scale, bool hadamard, bool ue8m0) {
  const char *op = "quantize_index_q", *home = "q";
  Dim tokens("num_tokens"), heads("num_heads"), dim("dim");
  TensorCheck(op, home, q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({tokens, heads, dim})
      .dense_last();
  if (*dim != 64 && *dim != 128) fail(op, "q.shape[2] (dim) must be 64 or 128, got " + std::to_string(*dim));
  TensorCheck(op, "weights", weights)
      .device_as(home, q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({tokens, heads})
      .dense_last();
  TensorCheck(op, "q_fp8", q_fp8)
      .device_as(home, q)
      .dtype({DType::kFloat8E4M3})
      .shape({tokens, heads, dim})
      .dense_last()
      .apart();
  TensorCheck(op, "weights_out", weights_out)
      .device_as(home, q)
      .dtype({DType::kFloat32})
      .shape({tokens, heads})
      .dense_last()
      .apart();
  check_finite(op, "scale", scale);
  return {.how = {hadamard, ue8m0},
          .q = q.const_data_ptr(),
          .num_tokens = *tokens,
          .stride_token = q.stride(0),
          .stride_head = q.stride(1),
          .num_heads = heads.as_int(),
          .dim = dim.as_int(),
          .dtype = dtype_of(q),
          .weights_dtype = dtype_of(weights),
          .weights = weights.const_data_ptr(),
          .stride_weights = weights.stride(0),
          .scale = static_cast<float>(scale),
          .q_fp8 = static_cast<uint8_t*>(q_fp8.mutable_data_ptr()),
          .stride_out_token = q_fp8.stride(0),
          .stride_out_head = q_fp8.stride(1),
          .weights_out = static_cast<float*>(weights_out.mutable_data_ptr()),
          .stride_weights_out = weights_out.stride(0)};
}

inline GatherIndexParams checked_gather_index(const Tensor& k, const Tensor& k_scale, const Tensor& index_pages,
                                              const Tensor& page_table, const Tensor& cu_seqlens_k,
                                              const OptionalTensor& report) {
  const char *op = "gather_index_k", *home = "index_pages";
  const IndexPages pages = checked_index_pages(op, index_pages);
  Dim batch("batch_size"), columns("max_pages"), keys("num_keys"), dim("dim", pages.dim, home);
  TensorCheck(op, "page_table", page_table)
      .device_as(home, index_pages)
      .dtype({DType::kInt32})
      .shape({batch, columns})
      .dense_last();
  Dim bounds("batch_size + 1", *batch + 1, "page_table");
  TensorCheck(op, "cu_seqlens_k", cu_seqlens_k)
      .device_as(home, index_pages)
      .dtype({DType::kInt32})
      .shape({bounds})
      .contiguous();
  TensorCheck(op, "k", k).device_as(home, index_pages).dtype({DType::kFloat8E4M3, DType::kUInt8}).shape({keys, dim});
  TensorCheck(op, "k", k).dense_last().apart().aligned(4);
  if (k.stride(0) % 4 != 0) fail(op, "k.stride(0) must be a multiple of 4, got " + std::to_string(k.stride(0)));
  TensorCheck(op, "k_scale", k_scale).device_as(home, index_pages).dtype({DType::kFloat32}).shape({keys}).contiguous();
  return {.pages = pages,
          .page_table = static_cast<const int32_t*>(page_table.const_data_ptr()),
          .stride_table = page_table.stride(0),
          .batch_size = *batch,
          .max_pages = *columns,
          .cu_seqlens = static_cast<const int32_t*>(cu_seqlens_k.const_data_ptr()),
          .k = static_cast<uint8_t*>(k.mutable_data_ptr()),
          .num_keys = *keys,
          .stride_k = k.stride(0),
          .k_scale = static_cast<float*>(k_scale.mutable_data_ptr()),
          .report = checked_report(op, report, home, index_pages)};
}

// Where logits go, a row of them for each of q's.
inline void check_logits(const char* op, const Tensor& logits, const Tensor& q, int64_t num_rows, LogitsParams& p) {
  Dim rows("num_rows", num_rows, "q"), columns("num_columns");
  TensorCheck(op, "logits", logits)
      .device_as("q", q)
      .dtype({DType::kFloat32, DType::kBFloat16})
      .shape({rows, columns})
      .dense_last()
      .apart();
  p.logits = logits.mutable_data_ptr();
  p.stride_row = logits.stride(0);
  p.columns = *columns;
  p.bf16 = has_dtype(logits, DType::kBFloat16);
}

// What all ops over index queries check alike; the rest of the params is zero.
inline LogitsParams checked_queries(const char* op, const Tensor& q, int64_t num_rows, const char* weights_name,
                                    const Tensor& weights) {
  Dim rows("num_rows", num_rows, "q"), heads("num_heads", q.size(q.dim() - 2), "q");
  TensorCheck(op, weights_name, weights).device_as("q", q).dtype({DType::kFloat32}).shape({rows, heads}).dense_last();
  check_range(op, "num_heads of q", *heads, 0, kMaxIndexHeads);
  const int64_t dim = q.size(q.dim() - 1);
  if (dim != 64 && dim != 128) fail(op, "dim of q must be 64 or 128, got " + std::to_string(dim));
  for (int64_t axis = 0; axis < q.dim() - 1; ++axis) {
    if (q.stride(axis) % 4 != 0 && q.size(axis) > 1) {
      fail(op, "q.stride(" + std::to_string(axis) + ") must be a multiple of 4, got " + std::to_string(q.stride(axis)));
    }
  }
  TensorCheck(op, "q", q).aligned(4);
  LogitsParams p{};
  p.q = static_cast<const uint8_t*>(q.const_data_ptr());
  p.num_rows = num_rows;
  p.num_heads = heads.as_int();
  p.dim = static_cast<int>(dim);
  p.stride_head = q.stride(q.dim() - 2);
  p.weights = static_cast<const float*>(weights.const_data_ptr());
  p.stride_weights = weights.stride(0);
  return p;
}

// All but where the logits go.
inline LogitsParams checked_paged_queries(const char* op, const Tensor& q, const Tensor& index_pages,
                                          const Tensor& page_table, const Tensor& weights, const Tensor& cache_seqlens,
                                          const OptionalTensor& report) {
  Dim batch("batch_size"), seqlen_q("seqlen_q"), heads("num_heads"), dim("dim"), pages("max_pages");
  TensorCheck(op, "q", q).dtype({DType::kFloat8E4M3}).shape({batch, seqlen_q, heads, dim}).dense_last();
  LogitsParams p = checked_queries(op, q, *batch * *seqlen_q, "weights", weights);
  p.pages = checked_index_pages(op, index_pages);
  TensorCheck(op, "index_pages", index_pages).device_as("q", q);
  if (p.pages.dim != p.dim) {
    fail(op, "index_pages.shape[2] must be " + std::to_string(p.dim + 4) + " (dim of q + 4), got " +
                 std::to_string(p.pages.dim + 4));
  }
  if (*seqlen_q > 1 && *batch > 1 && q.stride(0) != *seqlen_q * q.stride(1)) {
    fail(op, "q.stride(0) must be " + std::to_string(*seqlen_q * q.stride(1)) +
                 " (seqlen_q tokens of q.stride(1)), got " + std::to_string(q.stride(0)));
  }
  TensorCheck(op, "page_table", page_table).device_as("q", q).dtype({DType::kInt32}).shape({batch, pages}).dense_last();
  TensorCheck(op, "cache_seqlens", cache_seqlens)
      .device_as("q", q)
      .dtype({DType::kInt32})
      .shape({batch, seqlen_q})
      .contiguous();
  p.stride_token = *seqlen_q > 1 ? q.stride(1) : q.stride(0);
  p.page_table = static_cast<const int32_t*>(page_table.const_data_ptr());
  p.stride_table = page_table.stride(0);
  p.max_pages = *pages;
  p.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr());
  p.seqlen_q = seqlen_q.as_int();
  p.report = checked_report(op, report, "q", q);
  return p;
}

inline LogitsParams checked_logits_paged(const Tensor& logits, const Tensor& q, const Tensor& index_pages,
                                         const Tensor& page_table, const Tensor& weights, const Tensor& cache_seqlens,
                                         const OptionalTensor& report) {
  const char* op = "index_logits_paged";
  LogitsParams p = checked_paged_queries(op, q, index_pages, page_table, weights, cache_seqlens, report);
  check_logits(op, logits, q, p.num_rows, p);
  return p;
}

// How index_topk uses a scratch of so many floats: by rows of logits, or by pieces of them.
inline void lay_out_topk(const char* op, int64_t floats, int k, LogitsParams& logits, IndexTopkParams& p) {
  const int page_size = logits.pages.page_size;
  logits.columns = logits.max_pages * page_size;
  logits.stride_row = round_up<int64_t>(logits.columns, 4);
  const TopkLayout layout = topk_layout(floats, logits.num_rows, logits.columns, k, page_size);
  if (layout.least > 0) {
    fail(op, "scratch.shape[0] must be at least " + std::to_string(layout.least) + " (a page of keys, and 3 k), got " +
                 std::to_string(floats));
  }
  p.rows_at_once = layout.rows;
  p.piece_keys = layout.keys;
  p.scratch = static_cast<float*>(logits.logits);
}

inline IndexTopkParams checked_index_topk(const Tensor& indices, const OptionalTensor& positions, const Tensor& q,
                                          const Tensor& index_pages, const Tensor& page_table, const Tensor& weights,
                                          const Tensor& cache_seqlens, const Tensor& scratch,
                                          const OptionalTensor& report, const OptionalTensor& k_start) {
  const char* op = "index_topk";
  LogitsParams logits = checked_paged_queries(op, q, index_pages, page_table, weights, cache_seqlens, report);
  logits.report_op = kReportIndexTopk;
  if (k_start) {
    Dim batch("batch_size", q.size(0), "q"), seqlen_q("seqlen_q", q.size(1), "q");
    TensorCheck(op, "k_start", *k_start).device_as("q", q).dtype({DType::kInt32}).shape({batch, seqlen_q}).contiguous();
    logits.row_starts = static_cast<const int32_t*>(k_start->const_data_ptr());
  }
  Dim rows("num_rows", logits.num_rows, "q"), k("k"), some("rows_at_once"), columns("num_columns");
  const bool is_flat = scratch.dim() == 1;
  TensorCheck(op, "scratch", scratch).device_as("q", q).dtype({DType::kFloat32});
  if (is_flat) {
    TensorCheck(op, "scratch", scratch).shape({columns}).contiguous().aligned(16);
  } else {
    TensorCheck(op, "scratch", scratch).shape({some, columns}).dense_last().apart();
    if (*some < 1 && *rows > 0) fail(op, "scratch.shape[0] (rows at once) must be at least 1, got 0");
    logits.stride_row = scratch.stride(0);
    logits.columns = *columns;
  }
  logits.logits = scratch.mutable_data_ptr();
  const auto output = [&](const char* name, const Tensor& tensor) {
    TensorCheck(op, name, tensor).device_as("q", q).dtype({DType::kInt32}).shape({rows, k}).dense_last().apart();
    return static_cast<int32_t*>(tensor.mutable_data_ptr());
  };
  SelectParams select{};
  select.indices = output("indices", indices);
  select.stride_indices = indices.stride(0);
  check_range(op, "k, columns of indices,", *k, 0, kMaxSelected);
  if (positions) {
    select.positions = output("positions", *positions);
    select.stride_positions = positions->stride(0);
  }
  select.k = k.as_int();
  IndexTopkParams p{};
  p.rows_at_once = is_flat ? 0 : *some;
  if (is_flat) lay_out_topk(op, *columns, select.k, logits, p);
  select.logits = logits.logits;
  select.stride_row = logits.stride_row;
  // No logits lie behind what the page table holds, whatever the lengths are.
  select.columns = min_of(logits.columns, logits.max_pages * logits.pages.page_size);
  select.dtype = DType::kFloat32;
  select.lengths = logits.cache_seqlens;
  select.row_starts = logits.row_starts;
  select.lengths_are_ends = logits.row_starts != nullptr;
  select.page_table = logits.page_table;
  select.stride_table = logits.stride_table;
  select.max_pages = logits.max_pages;
  select.page_size = logits.pages.page_size;
  select.page_shift = logits.pages.page_shift;
  select.report = logits.report;
  select.report_op = kReportIndexTopk;
  p.logits = logits;
  p.select = select;
  return p;
}

inline LogitsParams checked_logits(const Tensor& logits, const Tensor& q, const Tensor& k, const Tensor& k_scale,
                                   const Tensor& weights, const Tensor& k_start, const Tensor& k_end, bool compressed,
                                   const OptionalTensor& report) {
  const char* op = "index_logits";
  Dim rows("num_rows"), heads("num_heads"), dim("dim"), keys("num_keys");
  TensorCheck(op, "q", q).dtype({DType::kFloat8E4M3}).shape({rows, heads, dim}).dense_last();
  LogitsParams p = checked_queries(op, q, *rows, "weights", weights);
  check_logits(op, logits, q, *rows, p);
  TensorCheck(op, "k", k).device_as("q", q).dtype({DType::kFloat8E4M3, DType::kUInt8}).shape({keys, dim}).dense_last();
  TensorCheck(op, "k", k).aligned(4);
  if (k.stride(0) % 4 != 0 && *keys > 1) {
    fail(op, "k.stride(0) must be a multiple of 4, got " + std::to_string(k.stride(0)));
  }
  TensorCheck(op, "k_scale", k_scale).device_as("q", q).dtype({DType::kFloat32}).shape({keys}).contiguous();
  p.stride_token = q.stride(0);
  p.k = static_cast<const uint8_t*>(k.const_data_ptr());
  p.num_keys = *keys;
  p.stride_k = k.stride(0);
  p.k_scale = static_cast<const float*>(k_scale.const_data_ptr());
  p.row_starts = checked_per_row(op, "k_start", k_start, rows, "q", q);
  p.row_ends = checked_per_row(op, "k_end", k_end, rows, "q", q);
  p.compressed = compressed;
  p.ragged = true;
  p.report = checked_report(op, report, "q", q);
  return p;
}

inline ExpandParams checked_expand(const Tensor& seqlens, const Tensor& rows, const Tensor& topk_length,
                                   const Tensor& cache_seqlens, const Tensor& cu_seqlens_q, int64_t topk, int64_t ratio,
                                   const OptionalTensor& report) {
  const char *op = "expand_rows", *home = "cache_seqlens";
  Dim batch("batch_size"), tokens("num_rows");
  const auto ints = [&](const char* name, const Tensor& tensor, Dim& extent) {
    TensorCheck(op, name, tensor).device_as(home, cache_seqlens).dtype({DType::kInt32}).shape({extent}).contiguous();
    return static_cast<int32_t*>(tensor.mutable_data_ptr());
  };
  ExpandParams p{};
  p.cache_seqlens = ints(home, cache_seqlens, batch);
  Dim bounds("batch_size + 1", *batch + 1, home);
  p.cu_seqlens_q = ints("cu_seqlens_q", cu_seqlens_q, bounds);
  p.seqlens = ints("seqlens", seqlens, tokens);
  p.rows = ints("rows", rows, tokens);
  p.topk_length = ints("topk_length", topk_length, tokens);
  check_range(op, "topk", topk, 0, INT32_MAX);
  check_range(op, "ratio", ratio, 1, INT32_MAX);
  p.num_rows = *tokens;
  p.batch_size = *batch;
  p.ratio = static_cast<int>(ratio);
  p.topk = static_cast<int>(topk);
  p.report = checked_report(op, report, home, cache_seqlens);
  return p;
}

}  // namespace attnops::sparse_indexer
