#include "xqa_decode/cpu/vec512.h"
// the registers come first
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/kernel.h"

namespace attnops::xqa_decode::cpu {

constexpr TileKernel avx512_float16 = float_kernel<Half>();
constexpr TileKernel avx512_float16_fp8 = float_fp8_kernel<Half>();

}  // namespace attnops::xqa_decode::cpu
