#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

#include "core/types.h"
#include "device/common/launch.h"

namespace attnops::sm90 {

// A 3-dimensional tensor of elements of one or two bytes, innermost dimension dense, read in boxes of 128 bytes x
// box_rows x 1 that land as rows of 128 bytes under the 128-byte swizzle. What lies outside is filled with zeros.
// Strides are in bytes.
struct MapGeometry {
  DType dtype;
  const void* base;
  uint64_t extents[3];  // innermost first
  uint64_t strides[2];  // of dimensions 1 and 2; multiples of 16
  uint32_t box_rows;
  CUtensorMapL2promotion fetch = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;  // at a miss in L2
};

// The driver's encoder, found at run time: linking libcuda would make the module unloadable without a driver.
// `promotion` is what a miss in L2 fetches.
inline CUtensorMap encode_tensor_map(DType dtype, const void* base, int rank, const cuuint64_t* extents,
                                     const cuuint64_t* strides, const cuuint32_t* box,
                                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("attnops: the driver has no tensor maps");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = size_of(dtype) == 1        ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult status = encode(&map, type, rank, const_cast<void*>(base), extents, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("attnops: cuTensorMapEncodeTiled refused the cache: CUresult " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

inline CUtensorMap make_tensor_map(const MapGeometry& g) {
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / size_of(g.dtype)), g.box_rows, 1};
  const cuuint64_t extents[3] = {g.extents[0], g.extents[1], g.extents[2]}, strides[2] = {g.strides[0], g.strides[1]};
  return encode_tensor_map(g.dtype, g.base, 3, extents, strides, box, g.fetch);
}

// The same rows read whole: boxes of `box_rows` rows of `pieces` pieces of 64 elements, which land piece by piece, each
// piece as rows of 128 bytes under the 128-byte swizzle. Extent 0 of the geometry must be 64 * pieces. A miss fetches
// 128 bytes: rows of an odd number of pieces begin at odd multiples of them, and pairs would reach into other rows.
inline CUtensorMap make_row_map(const MapGeometry& g) {
  const cuuint64_t pieces = g.extents[0] / 64;
  const cuuint32_t box[4] = {64, g.box_rows, static_cast<cuuint32_t>(pieces), 1};
  const cuuint64_t extents[4] = {64, g.extents[1], pieces, g.extents[2]},
                   strides[3] = {g.strides[0], 128, g.strides[1]};
  return encode_tensor_map(g.dtype, g.base, 4, extents, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace attnops::sm90
