#include "cpu/row_rounding_loops.h"

namespace attnops::cpu {

const RowRounding avx2_row_rounding{&rotate_here, &round_here};

}  // namespace attnops::cpu
