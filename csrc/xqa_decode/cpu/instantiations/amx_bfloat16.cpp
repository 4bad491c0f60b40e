#include "xqa_decode/cpu/vec512.h"
// the registers come first
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/kernel_amx.h"

namespace attnops::xqa_decode::cpu {

constexpr TileKernel amx_bfloat16 = amx_kernel();

}  // namespace attnops::xqa_decode::cpu
