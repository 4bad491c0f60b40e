#include "sparse_indexer/cpu/select_row.h"

namespace attnops::sparse_indexer::cpu {

void avx2_select(const Row& row) { select_here(row); }

}  // namespace attnops::sparse_indexer::cpu
