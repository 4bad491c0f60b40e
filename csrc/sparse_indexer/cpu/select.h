#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops::sparse_indexer::cpu {

// A row longer than k.
struct Row {
  const void* logits;  // [count], of `dtype`
  int64_t count;
  DType dtype;
  int k;
  int32_t* positions;  // [k], rising
};

// One function per instruction set, each defined by the file that is compiled for it.
void avx2_select(const Row& row);
void avx512_select(const Row& row);

}  // namespace attnops::sparse_indexer::cpu
