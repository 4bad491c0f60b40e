#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/convert.h"
#include "sparse_indexer/cpu/select.h"
#include "sparse_indexer/ordered.h"

// The definition of right: a stable sort.
namespace attnops::sparse_indexer::cpu {

inline void scalar_select(const Row& row) {
  using attnops::cpu::BFloat16;
  const auto key = [&](int32_t i) {
    return ordered(row.dtype == DType::kFloat32 ? static_cast<const float*>(row.logits)[i]
                                                : to_float(static_cast<const BFloat16*>(row.logits)[i]));
  };
  std::vector<int32_t> order(static_cast<size_t>(row.count));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  std::copy_n(order.begin(), row.k, row.positions);
  std::sort(row.positions, row.positions + row.k);
}

}  // namespace attnops::sparse_indexer::cpu
