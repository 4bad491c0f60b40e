#include "cpu/linear_step_rows.h"

namespace attnops::cpu {

void avx2_step_rows(const HeadStep& head) { step_rows_here(head); }

}  // namespace attnops::cpu
