#pragma once
#include "device/sm80/mma.cuh"
#include "xqa_decode/sm90/fp8/traits.cuh"

// Keys and values of a tile in shared memory, rows of 128 bytes under the 128-byte swizzle, as A operands of fp16
// products. `address` is that of the tile plus the lane's offset.
namespace attnops::xqa_decode::sm90::fp8 {

// Sixteen keys of a warp: of each, four lanes hold four neighbouring dims in every sixteen.
__device__ __forceinline__ uint32_t key_offset(int warp, int lane) {
  return hopper::swizzled(16 * warp + lane % 16, lane / 16);
}

// 32 dims per load: two steps of the product.
__device__ __forceinline__ void load_keys(uint32_t address, uint32_t (&raw)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) hopper::load_fragment(raw[i], address ^ (32 * i));
}

// Of sixteen dims, dims 4 t and 4 t + 1 are the step's k 2 t and 2 t + 1, the next two its 2 t + 8 and 2 t + 9: queries
// lie in the same order.
__device__ __forceinline__ void convert_keys(const uint32_t (&raw)[4], uint32_t (&first)[4], uint32_t (&second)[4]) {
  e4m3x4_to_half(raw[0], first[0], first[2]);
  e4m3x4_to_half(raw[1], first[1], first[3]);
  e4m3x4_to_half(raw[2], second[0], second[2]);
  e4m3x4_to_half(raw[3], second[1], second[3]);
}

// Sixteen dims of a warp in each block of 64, for all keys.
__device__ __forceinline__ uint32_t value_offset(int warp, int lane) { return hopper::swizzled(lane, warp); }

// 32 keys per load, transposed: [block][half of the keys].
__device__ __forceinline__ void load_values(uint32_t address, uint32_t (&raw)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(raw[i], (address ^ (i / 2 * 64)) + i % 2 * (32 * 128));
}

// A transposed load moves pairs of bytes: a lane has dims 2 g and 2 g + 1 of keys 2 t and 2 t + 1. Even dims become
// the product's rows g, odd ones rows g + 8.
__device__ __forceinline__ void convert_values(const uint32_t (&raw)[4], uint32_t (&first)[4], uint32_t (&second)[4]) {
  e4m3x4_to_half(__byte_perm(raw[0], 0, 0x3120), first[0], first[1]);
  e4m3x4_to_half(__byte_perm(raw[1], 0, 0x3120), first[2], first[3]);
  e4m3x4_to_half(__byte_perm(raw[2], 0, 0x3120), second[0], second[1]);
  e4m3x4_to_half(__byte_perm(raw[3], 0, 0x3120), second[2], second[3]);
}

}  // namespace attnops::xqa_decode::sm90::fp8
