#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/isa.h"
#include "sparse_indexer/checks.h"
#include "sparse_indexer/cpu/reference.h"
#include "sparse_indexer/rows.h"
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

void topk_select_cpu(const Tensor& indices, const OptionalTensor& positions, const Tensor& logits,
                     const Tensor& lengths, const OptionalTensor& row_starts, const OptionalTensor& page_table,
                     const OptionalTensor& row_to_request, int64_t page_size, const OptionalTensor& offsets,
                     const OptionalTensor& report) {
  SelectParams p = checked_select(
      {indices, positions, logits, lengths, row_starts, page_table, row_to_request, page_size, offsets, report});
  CpuFaults faults("topk_select", "page_table", p.report);
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("topk_select", TORCH_BOX(&topk_select_cpu)); }

}  // namespace attnops::sparse_indexer
