#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "warps.h"

// The functions of csrc/device/sm80/mma.cuh by the definitions of the PTX ISA.
namespace attnops {

alignas(1024) inline unsigned char memory[256 << 10];  // dynamic shared memory
inline float* const shared = reinterpret_cast<float*>(memory);

template <typename T>
float half_of(uint32_t word, int i) {
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

template <typename T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Own {
    uint32_t a[4], b[2];
  };
  const cuda_model::Lanes<Own> lanes(Own{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      const float x = half_of<T>(lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k);
      const float y = half_of<T>(lanes[column * 4 + k % 8 / 2].b[k / 8], k);
      sum += x * y;
    }
    c[i] += sum;
  }
}

inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Own {
    uint32_t a[4], b[2];
  };
  constexpr uint32_t kRead = 0xffffe000u;  // bits of a number that the product reads
  const cuda_model::Lanes<Own> lanes(
      Own{{a[0] & kRead, a[1] & kRead, a[2] & kRead, a[3] & kRead}, {b0 & kRead, b1 & kRead}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 8; ++k) {
      sum += __uint_as_float(lanes[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)]) *
             __uint_as_float(lanes[column * 4 + k % 4].b[k / 4]);
    }
    c[i] += sum;
  }
}

inline uint32_t shared_word(uint32_t address) {
  uint32_t word;
  if (address % 4 != 0 || address + 4 > sizeof(memory)) std::abort();
  std::memcpy(&word, memory + address, 4);
  return word;
}
inline uint16_t shared_half(uint32_t address) {
  uint16_t half;
  std::memcpy(&half, memory + address, 2);
  return half;
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  if (address % 16 != 0) std::abort();
  const cuda_model::Lanes<uint32_t> rows(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) r[i] = shared_word(rows[8 * i + lane / 4] + lane % 4 * 4);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  if (address % 16 != 0) std::abort();
  const cuda_model::Lanes<uint32_t> rows(address);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    r[i] = shared_half(rows[8 * i + 2 * t] + 2 * g) | uint32_t{shared_half(rows[8 * i + 2 * t + 1] + 2 * g)} << 16;
  }
}

inline uint32_t transpose_8x8(uint32_t source) {
  const cuda_model::Lanes<uint32_t> lanes(source);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto at = [&](int row, int column) { return lanes[row * 4 + column / 2] >> column % 2 * 16 & 0xffffu; };
  return at(2 * t, g) | at(2 * t + 1, g) << 16;
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float exp2_in_place(float x) { return exp2f(x); }

template <typename T>
uint32_t pack2(float low, float high) {
  const __nv_bfloat16 pair[2] = {__float2bfloat16(low), __float2bfloat16(high)};
  uint32_t word;
  std::memcpy(&word, pair, 4);
  return word;
}

}  // namespace attnops
