#include "xqa_decode/cpu/vec512.h"
// the registers come first

// To L2: these cores have sixteen places for misses of L1, and three times as many for those of L2.
#define ATTNOPS_FETCH_HINT _MM_HINT_T1
#define ATTNOPS_FETCH_WITH_SCORES 2
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/kernel_amx.h"

namespace attnops::xqa_decode::cpu {

constexpr TileKernel amx_bfloat16 = amx_kernel();
constexpr TileKernel amx_bfloat16_fp8 = pair_kernel<true>();

}  // namespace attnops::xqa_decode::cpu
