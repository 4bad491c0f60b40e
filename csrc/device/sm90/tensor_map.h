#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

#include "core/types.h"
#include "device/common/launch.h"

namespace attnops::sm90 {

// A 3-dimensional tensor of 16-bit elements, innermost dimension dense, read in boxes of 64 x box_rows x 1 that land
// as rows of 128 bytes under the 128-byte swizzle. What lies outside is filled with zeros. Strides are in bytes.
struct MapGeometry {
  DType dtype;
  const void* base;
  uint64_t extents[3];  // innermost first
  uint64_t strides[2];  // of dimensions 1 and 2; multiples of 16
  uint32_t box_rows;
};

// The driver's encoder, found at run time: linking libcuda would make the module unloadable without a driver.
inline CUtensorMap make_tensor_map(const MapGeometry& g) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("attnops: the driver has no tensor maps");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint32_t box[3] = {64, g.box_rows, 1}, steps[3] = {1, 1, 1};
  const CUtensorMapDataType type =
      g.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t extents[3] = {g.extents[0], g.extents[1], g.extents[2]}, strides[2] = {g.strides[0], g.strides[1]};
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, 3, const_cast<void*>(g.base), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("attnops: cuTensorMapEncodeTiled refused the cache: CUresult " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace attnops::sm90
