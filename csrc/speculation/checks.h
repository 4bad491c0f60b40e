#pragma once
#include <string>
#include <vector>

#include "speculation/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// The ops' whole contract, checked once for all devices. Params exist only when the arguments are right.
namespace attnops::speculation {

using TensorList = std::vector<Tensor>;

// int32 or int64 [rows, columns], rows dense.
inline IndexMatrix checked_matrix(const char* op, const char* name, const Tensor& tensor, Dim& rows, Dim& columns,
                                  const char* other_name, const Tensor& other) {
  TensorCheck(op, name, tensor)
      .device_as(other_name, other)
      .dtype({DType::kInt32, DType::kInt64})
      .shape({rows, columns})
      .dense_last();
  return {.data = tensor.const_data_ptr(),
          .stride_row = tensor.stride(0),
          .columns = tensor.size(1),
          .wide = has_dtype(tensor, DType::kInt64)};
}

// A dense destination or argument of one dtype.
template <typename T>
T* checked_dense(const char* op, const char* name, const Tensor& tensor, DType dtype,
                 std::initializer_list<std::reference_wrapper<Dim>> shape, const char* other_name,
                 const Tensor& other) {
  TensorCheck(op, name, tensor).device_as(other_name, other).dtype({dtype}).shape(shape).contiguous();
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline int checked_tree_size(const char* op, const char* name, const Tensor& tensor, int64_t axis, int64_t more) {
  const int64_t tokens = tensor.size(axis) + more;
  if (tokens < 1 || tokens > kMaxTreeTokens) {
    fail(op, std::string(name) + " must make trees of 1 to " + std::to_string(kMaxTreeTokens) + " tokens, got " +
                 std::to_string(tokens) + ", shape " + shape_text(tensor));
  }
  return static_cast<int>(tokens);
}

inline BuildTreeParams checked_build(const Tensor& tree_mask, const Tensor& positions, const Tensor& retrieve_index,
                                     const Tensor& next_token, const Tensor& next_sibling, const OptionalTensor& tokens,
                                     const Tensor& parent_list, const Tensor& top_scores_index,
                                     const OptionalTensor& draft_tokens, const OptionalTensor& bonus_tokens,
                                     const Tensor& cache_seqlens, int64_t topk, const OptionalTensor& report) {
  const char *op = "build_draft_tree", *home = "top_scores_index";
  const Tensor& same = top_scores_index;
  Dim batch("batch_size"), drafts("num_tokens - 1"), groups("num_groups");
  check_range(op, "topk", topk, 1, INT32_MAX);
  const IndexMatrix selected = checked_matrix(op, home, same, batch, drafts, home, same);
  const int n = checked_tree_size(op, home, same, 1, 1);
  Dim nodes("num_tokens", n, home), bytes("ceil(num_tokens / 8)", (n + 7) / 8, home);
  Dim rows("batch_size * num_tokens", *batch * n, home);
  if (tokens.has_value() != draft_tokens.has_value() || tokens.has_value() != bonus_tokens.has_value()) {
    fail(op, "tokens, draft_tokens and bonus_tokens must be given together, or none of them");
  }
  const auto nodes_of = [&](const char* name, const Tensor& tensor) {
    return checked_dense<int64_t>(op, name, tensor, DType::kInt64, {batch, nodes}, home, same);
  };
  return {
      .batch_size = batch.as_int(),
      .num_tokens = n,
      .topk = topk,
      .parent_list = checked_matrix(op, "parent_list", parent_list, batch, groups, home, same),
      .top_scores_index = selected,
      .draft_tokens =
          draft_tokens ? checked_matrix(op, "draft_tokens", *draft_tokens, batch, drafts, home, same) : IndexMatrix{},
      .bonus_tokens =
          bonus_tokens ? checked_indices(op, "bonus_tokens", *bonus_tokens, batch, home, same) : IndexArray{},
      .cache_seqlens =
          checked_dense<const int32_t>(op, "cache_seqlens", cache_seqlens, DType::kInt32, {batch}, home, same),
      .tree_mask = checked_dense<uint8_t>(op, "tree_mask", tree_mask, DType::kUInt8, {batch, nodes, bytes}, home, same),
      .positions = checked_dense<int64_t>(op, "positions", positions, DType::kInt64, {rows}, home, same),
      .retrieve_index = nodes_of("retrieve_index", retrieve_index),
      .next_token = nodes_of("retrieve_next_token", next_token),
      .next_sibling = nodes_of("retrieve_next_sibling", next_sibling),
      .tokens = tokens ? checked_dense<int64_t>(op, "tokens", *tokens, DType::kInt64, {rows}, home, same) : nullptr,
      .report = checked_report(op, report, home, same)};
}

struct VerifyTensors {
  const Tensor &predicts, &accept_index, &accept_token_num;
  const Tensor &candidates, &retrieve_index, &next_token, &next_sibling;
  const OptionalTensor& report;
};

// What greedy and sampled judging have in common.
inline VerifyParams checked_verify(const char* op, const VerifyTensors& t, Dim& batch, Dim& nodes) {
  const char* home = "candidates";
  const Tensor& same = t.candidates;
  const IndexMatrix candidates = checked_matrix(op, home, same, batch, nodes, home, same);
  const int n = checked_tree_size(op, home, same, 1, 0);
  Dim rows("batch_size * num_tokens", *batch * n, home), path("path_length");
  const auto links = [&](const char* name, const Tensor& tensor) {
    return checked_matrix(op, name, tensor, batch, nodes, home, same);
  };
  int32_t* accept_index =
      checked_dense<int32_t>(op, "accept_index", t.accept_index, DType::kInt32, {batch, path}, home, same);
  TensorCheck(op, "accept_index", t.accept_index).size_at_least(1, "path_length", 1, "a token always comes out");
  return {.batch_size = batch.as_int(),
          .num_tokens = n,
          .path_length = path.as_int(),
          .candidates = candidates,
          .retrieve_index = links("retrieve_index", t.retrieve_index),
          .next_token = links("retrieve_next_token", t.next_token),
          .next_sibling = links("retrieve_next_sibling", t.next_sibling),
          .target_predict = {},
          .uniform = nullptr,
          .uniform_final = nullptr,
          .target_probs = nullptr,
          .draft_probs = nullptr,
          .vocabulary = 0,
          .threshold_single = 1.f,
          .threshold_acc = 1.f,
          .predicts = checked_dense<int32_t>(op, "predicts", t.predicts, DType::kInt32, {rows}, home, same),
          .accept_index = accept_index,
          .accept_token_num =
              checked_dense<int32_t>(op, "accept_token_num", t.accept_token_num, DType::kInt32, {batch}, home, same),
          .report = checked_report(op, t.report, home, same)};
}

inline VerifyParams checked_greedy(const VerifyTensors& t, const Tensor& target_predict) {
  const char* op = "verify_tree_greedy";
  Dim batch("batch_size"), nodes("num_tokens");
  VerifyParams params = checked_verify(op, t, batch, nodes);
  Dim rows("batch_size * num_tokens", *batch * *nodes, "candidates");
  params.target_predict = checked_indices(op, "target_predict", target_predict, rows, "candidates", t.candidates);
  return params;
}

inline void check_threshold(const char* op, const char* name, double value, bool zero) {
  if (value <= 1.0 && (zero ? value >= 0.0 : value > 0.0)) return;
  fail(op, std::string(name) + " must be in " + (zero ? "[" : "(") + "0, 1], got " + std::to_string(value));
}

inline VerifyParams checked_sampling(const VerifyTensors& t, const Tensor& uniform, const Tensor& uniform_final,
                                     const Tensor& target_probs, const OptionalTensor& draft_probs,
                                     double threshold_single, double threshold_acc) {
  const char *op = "verify_tree_sampling", *home = "candidates";
  const Tensor& same = t.candidates;
  Dim batch("batch_size"), nodes("num_tokens"), vocabulary("vocabulary");
  VerifyParams params = checked_verify(op, t, batch, nodes);
  const auto floats = [&](const char* name, const Tensor& tensor,
                          std::initializer_list<std::reference_wrapper<Dim>> shape) {
    return checked_dense<const float>(op, name, tensor, DType::kFloat32, shape, home, same);
  };
  check_threshold(op, "threshold_single", threshold_single, true);
  check_threshold(op, "threshold_acc", threshold_acc, false);
  params.uniform = floats("uniform_samples", uniform, {batch, nodes});
  params.uniform_final = floats("uniform_samples_final", uniform_final, {batch});
  params.target_probs = floats("target_probs", target_probs, {batch, nodes, vocabulary});
  TensorCheck(op, "target_probs", target_probs).size_at_least(2, "vocabulary", 1, "a token always comes out");
  if (draft_probs) params.draft_probs = floats("draft_probs", *draft_probs, {batch, nodes, vocabulary});
  params.vocabulary = *vocabulary;
  params.threshold_single = static_cast<float>(threshold_single);
  params.threshold_acc = static_cast<float>(threshold_acc);
  return params;
}

// One buffer: [num_pages, page_size, num_heads, head_dim], or without heads, of any dtype of a pool.
inline Rows checked_rows(const char* op, const char* name, const Tensor& pages, Dim& page_size, const char* other_name,
                         const Tensor& other) {
  Dim num_pages("num_pages"), heads("num_heads"), width("row_width");
  const TensorCheck check(op, name, pages);
  check.device_as(other_name, other)
      .dtype(
          {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUInt8});
  const bool has_heads = pages.dim() == 4;
  if (has_heads) {
    check.shape({num_pages, page_size, heads, width});
  } else {
    check.shape({num_pages, page_size, width});
  }
  check.size_at_least(1, "page_size", 1, "a page holds a token").dense_last().apart();
  const int64_t size = size_of(dtype_of(pages));
  Rows rows{.pages = static_cast<char*>(pages.mutable_data_ptr()),
            .stride_page = pages.stride(0) * size,
            .stride_token = pages.stride(1) * size,
            .stride_head = has_heads ? pages.stride(2) * size : 0,
            .num_slots = pages.size(0) * pages.size(1),
            .heads = has_heads ? heads.as_int() : 1,
            .head_bytes = static_cast<int>(*width * size)};
  if (rows.heads == 1 || rows.stride_head == rows.head_bytes) {  // heads side by side are one
    rows.head_bytes *= rows.heads;
    rows.heads = 1;
  }
  return rows;
}

// All buffers of a call, in launches of at most kMaxBuffers.
inline std::vector<Buffers> checked_buffers(const char* op, const TensorList& pages, const TensorList& window_pages,
                                            const OptionalTensor& slot_map, Dim& page_size, const char* other_name,
                                            const Tensor& other) {
  if (window_pages.empty() != !slot_map.has_value()) {
    fail(op, "slot_map must be given where window_pages are, and only there: it says where their tokens are");
  }
  Dim num_slots("num_slots");
  Buffers empty{};
  if (slot_map) empty.slot_map = checked_indices(op, "slot_map", *slot_map, num_slots, other_name, other);
  std::vector<Buffers> launches(1, empty);
  const auto add = [&](const char* name, const Tensor& tensor, bool full) {
    const Rows rows = checked_rows(op, name, tensor, page_size, other_name, other);
    if (launches.back().count == kMaxBuffers) launches.push_back(empty);
    Buffers& last = launches.back();
    last.rows[last.count++] = rows;
    if (full) last.num_full = last.count;
  };
  for (const Tensor& tensor : pages) add("pages", tensor, true);
  for (const Tensor& tensor : window_pages) add("window_pages", tensor, false);
  for (Buffers& launch : launches) {
    launch.page_size = launch.count > 0 ? page_size.as_int() : 1;
    launch.page_shift = shift_of(launch.page_size);
  }
  return launches;
}

inline MoveParams checked_move(const Tensor& accept_index, const Tensor& out_cache_loc,
                               const OptionalTensor& req_to_token, const OptionalTensor& req_pool_indices,
                               const OptionalTensor& cache_seqlens, const OptionalTensor& report) {
  const char *op = "move_kv", *home = "accept_index";
  const Tensor& same = accept_index;
  Dim batch("batch_size"), path("path_length"), tokens("batch_size * num_tokens");
  const IndexMatrix accepted = checked_matrix(op, home, same, batch, path, home, same);
  MoveParams params{.batch_size = batch.as_int(),
                    .num_tokens = 0,
                    .path_length = path.as_int(),
                    .accept_index = accepted,
                    .out_cache_loc = checked_indices(op, "out_cache_loc", out_cache_loc, tokens, home, same),
                    .req_to_token = nullptr,
                    .req_to_token_stride = 0,
                    .max_requests = 0,
                    .max_context = 0,
                    .req_pool_indices = {},
                    .cache_seqlens = nullptr,
                    .report = checked_report(op, report, home, same)};
  const bool divides = *batch == 0 ? *tokens == 0 : *tokens % *batch == 0;
  if (!divides || (*batch > 0 && *tokens / *batch > kMaxTreeTokens)) {
    fail(op, "out_cache_loc.shape[0] must be batch_size " + std::to_string(*batch) + " times 0 to " +
                 std::to_string(kMaxTreeTokens) + " tokens, got " + std::to_string(*tokens));
  }
  params.num_tokens = *batch == 0 ? 0 : static_cast<int>(*tokens / *batch);
  if (req_to_token.has_value() != req_pool_indices.has_value() ||
      req_to_token.has_value() != cache_seqlens.has_value()) {
    fail(op, "req_to_token, req_pool_indices and cache_seqlens must be given together, or none of them");
  }
  if (req_to_token) {
    Dim requests("max_requests"), context("max_context");
    params.req_to_token = address_of<int32_t>(*req_to_token);
    TensorCheck(op, "req_to_token", *req_to_token)
        .device_as(home, same)
        .dtype({DType::kInt32})
        .shape({requests, context})
        .dense_last()
        .apart();
    params.req_to_token_stride = req_to_token->stride(0);
    params.max_requests = *requests;
    params.max_context = *context;
    params.req_pool_indices = checked_indices(op, "req_pool_indices", *req_pool_indices, batch, home, same);
    params.cache_seqlens =
        checked_dense<const int32_t>(op, "cache_seqlens", *cache_seqlens, DType::kInt32, {batch}, home, same);
  }
  return params;
}

inline DraftRequests checked_drafts(const char* op, const Tensor& req_to_token, const Tensor& req_pool_indices,
                                    const Tensor& cache_seqlens, int64_t topk, int64_t draft_steps, int64_t page_size,
                                    const OptionalTensor& report, Dim& batch) {
  const char* home = "req_to_token";
  Dim requests("max_requests"), context("max_context");
  TensorCheck(op, home, req_to_token).dtype({DType::kInt32}).shape({requests, context}).dense_last();
  check_range(op, "topk", topk, 1, kMaxTreeTokens);
  check_range(op, "draft_steps", draft_steps, 1, INT32_MAX);
  check_range(op, "page_size", page_size, 1, INT32_MAX);
  if (topk * draft_steps > *context) {
    fail(op, "topk * draft_steps must be at most " + std::to_string(*context) + " (max_context of req_to_token), got " +
                 std::to_string(topk) + " * " + std::to_string(draft_steps));
  }
  const IndexArray rows = checked_indices(op, "req_pool_indices", req_pool_indices, batch, home, req_to_token);
  return {.batch_size = batch.as_int(),
          .topk = topk,
          .draft_steps = draft_steps,
          .page_size = page_size,
          .req_to_token = static_cast<const int32_t*>(req_to_token.const_data_ptr()),
          .req_to_token_stride = req_to_token.stride(0),
          .max_requests = *requests,
          .max_context = *context,
          .req_pool_indices = rows,
          .cache_seqlens = checked_dense<const int32_t>(op, "cache_seqlens", cache_seqlens, DType::kInt32, {batch},
                                                        home, req_to_token),
          .checked = report.has_value(),
          .report = checked_report(op, report, home, req_to_token)};
}

// The pages' own size is the drafts'.
struct TailCall {
  std::vector<Buffers> launches;
  DraftRequests requests;

  TailCall(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& cache_seqlens,
           const TensorList& pages, const TensorList& window_pages, int64_t topk, int64_t draft_steps,
           const OptionalTensor& slot_map, const OptionalTensor& report) {
    const char* op = "copy_page_tail";
    Dim page_size("page_size"), batch("batch_size");
    launches = checked_buffers(op, pages, window_pages, slot_map, page_size, "req_to_token", req_to_token);
    if (launches[0].count == 0) fail(op, "pages must hold at least one buffer, got none");
    requests =
        checked_drafts(op, req_to_token, req_pool_indices, cache_seqlens, topk, draft_steps, *page_size, report, batch);
  }
};

inline DraftIndicesParams checked_draft_indices(const Tensor& kv_indptr, const Tensor& kv_indices,
                                                const Tensor& req_to_token, const Tensor& req_pool_indices,
                                                const Tensor& cache_seqlens, int64_t topk, int64_t draft_steps,
                                                int64_t page_size, const OptionalTensor& report) {
  const char* op = "generate_draft_decode_kv_indices";
  Dim batch("batch_size"), steps("num_steps"), width("num_indices");
  const DraftRequests requests =
      checked_drafts(op, req_to_token, req_pool_indices, cache_seqlens, topk, draft_steps, page_size, report, batch);
  Dim bounds("batch_size * topk + 1", *batch * topk + 1, "cache_seqlens");
  const auto check = [&](const char* name, const Tensor& tensor, Dim& columns) {
    TensorCheck(op, name, tensor)
        .device_as("req_to_token", req_to_token)
        .dtype({DType::kInt32})
        .shape({steps, columns})
        .dense_last()
        .apart();
    return static_cast<int32_t*>(tensor.mutable_data_ptr());
  };
  DraftIndicesParams params{.requests = requests,
                            .num_steps = 0,
                            .kv_indptr = check("kv_indptr", kv_indptr, bounds),
                            .kv_indices = check("kv_indices", kv_indices, width),
                            .indptr_stride = kv_indptr.stride(0),
                            .indices_stride = kv_indices.stride(0),
                            .num_indices = *width};
  params.num_steps = *steps;
  check_range(op, "kv_indptr.shape[0] (num_steps)", *steps, 0, draft_steps);
  return params;
}

inline PackMaskParams checked_pack(const Tensor& tree_mask, const Tensor& mask, int64_t mode,
                                   const OptionalTensor& mask_indptr, const OptionalTensor& report) {
  const char *op = "pack_tree_mask", *home = "tree_mask";
  Dim batch("batch_size"), nodes("num_tokens"), size("mask_size");
  check_range(op, "layout", mode, 0, 2);
  const MaskMode kind = static_cast<MaskMode>(mode);
  TensorCheck(op, home, tree_mask).rank(3);
  const int n = checked_tree_size(op, home, tree_mask, 1, 0);
  Dim bytes("ceil(num_tokens / 8)", (n + 7) / 8, home);
  uint8_t* out = checked_dense<uint8_t>(op, home, tree_mask, DType::kUInt8, {batch, nodes, bytes}, home, tree_mask);
  if (kind == MaskMode::kBits && n > 32)
    fail(op, "layout 2 (bits) is for trees of at most 32 tokens, got " + std::to_string(n));
  if ((kind == MaskMode::kFullRows) != mask_indptr.has_value()) {
    fail(op,
         "mask_indptr must be given in layout 0 (full rows), and only there: elsewhere shapes say where rows begin");
  }
  Dim mask_size = kind == MaskMode::kFullRows ? size
                                              : Dim("mask_size",
                                                    *batch * n *
                                                        (kind == MaskMode::kTree ? n
                                                         : n > 16                ? 4
                                                         : n > 8                 ? 2
                                                                                 : 1),
                                                    home);
  const uint8_t* in = checked_dense<const uint8_t>(op, "mask", mask, DType::kUInt8, {mask_size}, home, tree_mask);
  Dim bounds("batch_size + 1", *batch + 1, home);
  return {.mode = kind,
          .batch_size = batch.as_int(),
          .num_tokens = n,
          .mask = in,
          .num_bytes = *mask_size,
          .mask_indptr =
              mask_indptr ? checked_indices(op, "mask_indptr", *mask_indptr, bounds, home, tree_mask) : IndexArray{},
          .tree_mask = out,
          .report = checked_report(op, report, home, tree_mask)};
}

}  // namespace attnops::speculation
