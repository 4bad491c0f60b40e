#include "compressed_kv/cpu/entry_values_loops.h"

namespace attnops::compressed_kv::cpu {

void avx2_entry_values(const Pooled& pooled, float* x) { entry_values_here(pooled, x); }

}  // namespace attnops::compressed_kv::cpu
