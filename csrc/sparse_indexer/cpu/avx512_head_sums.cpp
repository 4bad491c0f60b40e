#include "sparse_indexer/cpu/head_sums.h"

namespace attnops::sparse_indexer::cpu {

void avx512_head_sums(const HeadSums& p) { head_sums_here(p); }

}  // namespace attnops::sparse_indexer::cpu
