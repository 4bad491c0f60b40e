#include "cpu/tile_ops.h"

namespace attnops::cpu {

const TileOps* tile_ops(Isa isa, DType dtype) {
  const bool bf16 = dtype == DType::kBFloat16;
  switch (isa) {
    case Isa::kScalar: return nullptr;
    case Isa::kAvx2: return &avx2_tile_ops();
    case Isa::kAvx512: return &avx512_tile_ops();
    case Isa::kAvx512Bf16: return bf16 ? &avx512bf16_tile_ops() : &avx512_tile_ops();
    case Isa::kAmx: return bf16 ? &amx_tile_ops() : &avx512_tile_ops();
  }
  return nullptr;
}

}  // namespace attnops::cpu
