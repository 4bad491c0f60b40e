#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/isa.h"
#include "sparse_indexer/checks.h"
#include "sparse_indexer/cpu/keys.h"
#include "sparse_indexer/cpu/reference.h"
#include "sparse_indexer/cpu/scalar_logits.h"
#include "sparse_indexer/cpu/tile_logits.h"
#include "sparse_indexer/rows.h"
#include "sparse_indexer/topk_pieces.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::sparse_indexer {
namespace {

using SelectFunction = void (*)(const cpu::Row&);

SelectFunction select_function() {
  const Isa isa = attnops::cpu::current_isa();
  return isa == Isa::kScalar ? &cpu::scalar_select : isa == Isa::kAvx2 ? &cpu::avx2_select : &cpu::avx512_select;
}

void select_row(const SelectParams& p, int64_t row, SelectFunction select) {
  const RowKeys keys = keys_of(p, row);
  int32_t* const indices = p.indices + row * p.stride_indices;
  int32_t* const positions = p.positions != nullptr ? p.positions + row * p.stride_positions : indices;
  const int selected = static_cast<int>(min_of<int64_t>(keys.count, p.k));
  if (keys.count > p.k) {
    select({.logits = static_cast<const char*>(p.logits) + (row * p.stride_row + keys.start) * size_of(p.dtype),
            .count = keys.count,
            .dtype = p.dtype,
            .k = p.k,
            .positions = positions});
  } else {
    for (int i = 0; i < selected; ++i) positions[i] = i;
  }
  for (int i = 0; i < selected; ++i) indices[i] = index_of(p, row, keys.request, positions[i]);
  for (int i = selected; i < p.k; ++i) indices[i] = positions[i] = -1;
}

void run_select(const char* op, SelectParams p) {
  CpuFaults faults(op, "page_table", p.report);
  p.report = faults.report();
  for (int64_t row = 0; row < p.num_rows; ++row) report_row(p, row);
  faults.check();
  if (p.k == 0) return;
  const SelectFunction select = select_function();
  torch::stable::parallel_for(0, p.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) select_row(p, row, select);
  });
  faults.check();
}

void topk_select_cpu(const Tensor& indices, const OptionalTensor& positions, const Tensor& logits,
                     const Tensor& lengths, const OptionalTensor& row_starts, const OptionalTensor& page_table,
                     const OptionalTensor& row_to_request, int64_t page_size, const OptionalTensor& offsets,
                     const OptionalTensor& report) {
  run_select("topk_select", checked_select({indices, positions, logits, lengths, row_starts, page_table, row_to_request,
                                            page_size, offsets, report}));
}

void store_index_k_cpu(const Tensor& index_pages, const Tensor& k, const Tensor& out_cache_loc, bool hadamard,
                       bool ue8m0, const OptionalTensor& report) {
  StoreIndexParams p = checked_store_index(index_pages, k, out_cache_loc, hadamard, ue8m0, report);
  CpuFaults faults("store_index_k", "out_cache_loc", p.report);
  p.report = faults.report();
  const cpu::RowRounding* const rounding = attnops::cpu::row_rounding();
  torch::stable::parallel_for(0, p.num_tokens, 64,
                              [&](int64_t begin, int64_t end) { cpu::store_index_k(p, rounding, begin, end); });
  faults.check();
}

void quantize_index_q_cpu(const Tensor& q_fp8, const Tensor& weights_out, const Tensor& q, const Tensor& weights,
                          double scale, bool hadamard, bool ue8m0) {
  const QuantizeQueryParams p = checked_quantize_query(q_fp8, weights_out, q, weights, scale, hadamard, ue8m0);
  const cpu::RowRounding* const rounding = attnops::cpu::row_rounding();
  torch::stable::parallel_for(0, p.num_tokens * p.num_heads, 64,
                              [&](int64_t begin, int64_t end) { cpu::quantize_index_q(p, rounding, begin, end); });
}

void gather_index_k_cpu(const Tensor& k, const Tensor& k_scale, const Tensor& index_pages, const Tensor& page_table,
                        const Tensor& cu_seqlens_k, const OptionalTensor& report) {
  GatherIndexParams p = checked_gather_index(k, k_scale, index_pages, page_table, cu_seqlens_k, report);
  CpuFaults faults("gather_index_k", "index_pages", p.report);
  p.report = faults.report();
  for (int64_t request = 0; request < p.batch_size; ++request)
    report_bounds(p.report, kReportGatherIndexK, p.cu_seqlens, request, p.num_keys);
  faults.check();
  torch::stable::parallel_for(0, p.num_keys, 256,
                              [&](int64_t begin, int64_t end) { cpu::gather_index_k(p, begin, end); });
  faults.check();
}

void expand_rows_cpu(const Tensor& seqlens, const Tensor& rows, const Tensor& topk_length, const Tensor& cache_seqlens,
                     const Tensor& cu_seqlens_q, int64_t topk, int64_t ratio, const OptionalTensor& report) {
  ExpandParams p = checked_expand(seqlens, rows, topk_length, cache_seqlens, cu_seqlens_q, topk, ratio, report);
  CpuFaults faults("expand_rows", "", p.report);
  p.report = faults.report();
  for (int64_t request = 0; request < p.batch_size; ++request) {
    report_bounds(p.report, kReportExpandRows, p.cu_seqlens_q, request, p.num_rows);
  }
  faults.check();
  cpu::expand_rows(p);
}

void run_logits(const char* op, LogitsParams p) {
  CpuFaults faults(op, "index_pages", p.report);
  p.report = faults.report();
  for (int64_t row = 0; row < p.num_rows; ++row) report_row(p, row);
  faults.check();
  const Isa isa = attnops::cpu::current_isa();
  const attnops::cpu::TileOps* const ops = attnops::cpu::tile_ops(isa, DType::kBFloat16);
  const cpu::HeadSumsFunction sums = isa == Isa::kAvx2 ? &cpu::avx2_head_sums : &cpu::avx512_head_sums;
  const cpu::LogitsTasks tasks(p);
  torch::stable::parallel_for(0, tasks.groups * tasks.pieces(), 1, [&](int64_t begin, int64_t end) {
    const auto run = [&](const auto& logits) {
      for (int64_t task = begin; task < end; ++task) tasks.run(task, logits);
    };
    if (ops == nullptr) {
      return run([&](int64_t first, int64_t last, int64_t first_key, int64_t last_key) {
        cpu::scalar_logits_of(p, first, last, first_key, last_key);
      });
    }
    const attnops::cpu::TileScope scope(*ops);
    run([&](int64_t first, int64_t last, int64_t first_key, int64_t last_key) {
      cpu::tile_logits_of(p, first, last, first_key, last_key, *ops, sums);
    });
  });
  faults.check();
}

void index_logits_paged_cpu(const Tensor& logits, const Tensor& q, const Tensor& index_pages, const Tensor& page_table,
                            const Tensor& weights, const Tensor& cache_seqlens, const OptionalTensor& report) {
  run_logits("index_logits_paged",
             checked_logits_paged(logits, q, index_pages, page_table, weights, cache_seqlens, report));
}

void index_logits_cpu(const Tensor& logits, const Tensor& q, const Tensor& k, const Tensor& k_scale,
                      const Tensor& weights, const Tensor& k_start, const Tensor& k_end, bool compressed,
                      const OptionalTensor& report) {
  run_logits("index_logits", checked_logits(logits, q, k, k_scale, weights, k_start, k_end, compressed, report));
}

void begin_pieces(PieceParams p) {
  CpuFaults faults("index_topk", "index_pages", p.logits.report);
  p.logits.report = p.select.report = faults.report();
  for (int64_t row = 0; row < p.logits.num_rows; ++row) {
    report_all(p, row, [](int64_t count, const auto& run) {
      for (int64_t i = 0; i < count; ++i) run(i);
    });
    const RowKeys keys = keys_of(p.select, row);
    for (int i = 0; keys.count == 0 && i < p.select.k; ++i) put(p, row, keys, i, -1);
    begin_piece(p, row, keys, 0, 0);
  }
  faults.check();
}

void carry_candidates(const PieceParams& piece) {
  PieceParams p = piece;
  CpuFaults faults("index_topk", "page_table", p.select.report);
  p.select.report = faults.report();
  const int64_t next_key = p.first_key + p.keys;
  for (int64_t row = 0; row < p.logits.num_rows; ++row) {
    const RowKeys keys = keys_of(p.select, row);
    const int count = min_of(p.counts[row], p.select.k);
    const bool ends = keys.start + keys.count <= next_key;
    for (int i = 0; count > 0 && ends && i < p.select.k; ++i) {
      put(p, row, keys, i, i < count ? candidate_of(p, row, keys, i).position : -1);
    }
    std::vector<Candidate> kept(static_cast<size_t>(ends ? 0 : count));
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = candidate_of(p, row, keys, static_cast<int>(i));
    const int left = static_cast<int>(kept.size());
    for (int i = 0; i < left; ++i) keep_candidate(p, row, kept[static_cast<size_t>(i)], i, left);
    begin_piece(p, row, keys, next_key, left);
  }
  faults.check();
}

void index_topk_cpu(const Tensor& indices, const OptionalTensor& positions, const Tensor& q, const Tensor& index_pages,
                    const Tensor& page_table, const Tensor& weights, const Tensor& cache_seqlens, const Tensor& scratch,
                    const OptionalTensor& report, const OptionalTensor& k_start) {
  const IndexTopkParams p = checked_index_topk(indices, positions, q, index_pages, page_table, weights, cache_seqlens,
                                               scratch, report, k_start);
  const auto run = [](const IndexTopkParams& part) {
    run_logits("index_topk", part.logits);
    run_select("index_topk", part.select);
  };
  if (p.piece_keys == 0) return for_each_part(p, run);
  int32_t told[kReportSize] = {};  // again, of a piece, what begin_pieces has told of
  for_each_part(p, [&](const IndexTopkParams& part) {
    for_each_piece(
        part, begin_pieces,
        [&](IndexTopkParams call) {
          call.logits.report = told;
          run(call);
        },
        carry_candidates);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("topk_select", TORCH_BOX(&topk_select_cpu));
  m.impl("store_index_k", TORCH_BOX(&store_index_k_cpu));
  m.impl("quantize_index_q", TORCH_BOX(&quantize_index_q_cpu));
  m.impl("gather_index_k", TORCH_BOX(&gather_index_k_cpu));
  m.impl("expand_rows", TORCH_BOX(&expand_rows_cpu));
  m.impl("index_logits_paged", TORCH_BOX(&index_logits_paged_cpu));
  m.impl("index_logits", TORCH_BOX(&index_logits_cpu));
  m.impl("index_topk", TORCH_BOX(&index_topk_cpu));
}

}  // namespace attnops::sparse_indexer
