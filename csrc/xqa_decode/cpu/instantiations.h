#pragma once
#include "xqa_decode/cpu/tile.h"

// Tile kernels by instruction set and by the dtype of queries and output; `_fp8`: KV is float8_e4m3fn. Each is defined
// by the file of its name in instantiations/, compiled for its instruction set.
namespace attnops::xqa_decode::cpu {

extern const TileKernel avx2_float32, avx2_float32_fp8;
extern const TileKernel avx2_float16, avx2_float16_fp8;
extern const TileKernel avx2_bfloat16, avx2_bfloat16_fp8;
extern const TileKernel avx512_float32, avx512_float32_fp8;
extern const TileKernel avx512_float16, avx512_float16_fp8;
extern const TileKernel avx512_bfloat16, avx512_bfloat16_fp8;
extern const TileKernel avx512bf16_bfloat16, avx512bf16_bfloat16_fp8;
extern const TileKernel amx_bfloat16, amx_bfloat16_fp8;

}  // namespace attnops::xqa_decode::cpu
