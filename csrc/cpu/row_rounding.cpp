#include "cpu/row_rounding.h"

#include "cpu/isa.h"
#include "cpu/quantize_key.h"

namespace attnops::cpu {

const RowRounding* row_rounding() {
  const Isa isa = current_isa();
  return isa == Isa::kScalar ? nullptr : isa == Isa::kAvx2 ? &avx2_row_rounding : &avx512_row_rounding;
}

float quantize_key(const RowRounding* rounding, const Quantization& how, float* x, int dim, uint8_t* out) {
  if (rounding == nullptr) return quantize_key(how, x, dim, out);
  const float scale = key_scale(rounding->rotate(x, dim, how.hadamard ? hadamard_factor(dim) : 0.f), how.ue8m0);
  rounding->round(x, dim, scale, out);
  return scale;
}

}  // namespace attnops::cpu
