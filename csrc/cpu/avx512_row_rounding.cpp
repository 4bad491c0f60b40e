#include "cpu/row_rounding_loops.h"

namespace attnops::cpu {

const RowRounding avx512_row_rounding{&rotate_here, &round_here};

}  // namespace attnops::cpu
