#include "cpu/tile/vec_avx2.h"
// Vec comes first.
#include "cpu/tile/micro_gemm.h"
#include "cpu/tile/softmax.h"

namespace attnops::cpu {

const TileOps& avx2_tile_ops() {
  static constexpr TileOps kOps = {.name = "avx2_float",
                                   .element_size = 4,
                                   .k_multiple = 1,
                                   .begin = &nothing,
                                   .end = &nothing,
                                   .load_rows = &load_rows<DType::kFloat32>,
                                   .pack_keys = &pack_keys_as_floats,
                                   .pack_values = &pack_values_as_floats,
                                   .gemm = &gemm_floats<6, 1>,
                                   .gemm_ahead = &gemm_unasked<gemm_floats<6, 1>>,
                                   .gemm_rows = &gemm_rows_floats<4, 2>,
                                   .split = nullptr,
                                   .transpose = &transpose_floats,
                                   .softmax = &softmax<StoreFloat>,
                                   .store_rows = &store_rows};
  return kOps;
}

}  // namespace attnops::cpu
