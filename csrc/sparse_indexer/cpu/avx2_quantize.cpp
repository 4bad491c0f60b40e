#include "sparse_indexer/cpu/quantize_loops.h"

namespace attnops::sparse_indexer::cpu {

const RowRounding avx2_row_rounding{&rotate_here, &round_here};

}  // namespace attnops::sparse_indexer::cpu
