#pragma once
#include "device/sm80/mma.cuh"

// Warpgroup products whose first operand lies in registers: a warp has 16 rows of it and of the result.
namespace attnops::sm90 {

inline constexpr int kStepKMajor = 32 >> 4;
inline constexpr int kStepMnMajor = 16 * 128 >> 4;

inline uint64_t operand_descriptor(uint32_t address) {
  if (address % 1024 != 0) std::abort();
  return address >> 4;
}

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending, int... kCounts>
void wgmma_wait(float (&... arrays)[kCounts]) {}

template <int kCount>
void store_numbers(const float (&)[kCount], uint32_t) {
  std::abort();  // what calls it never does
}

// An element of an operand under the 128-byte swizzle: bits 4 to 6 of its address are those and bits 7 to 9.
inline float swizzled_element(uint32_t address) {
  return __uint_as_float(uint32_t{shared_half(address ^ (address >> 7 & 7) << 4)} << 16);
}

template <typename T, int kBMnMajor>
void wgmma_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  struct Own {
    uint32_t a[4];
  };
  const cuda_model::Lanes<Own> lanes(Own{{a[0], a[1], a[2], a[3]}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t base = static_cast<uint32_t>(b << 4);
  for (int i = 0; i < 32; ++i) {
    const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      const float x = half_of<T>(lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k);
      const uint32_t at = kBMnMajor ? k * 128 + column * 2 : column * 128 + k * 2;
      sum += x * swizzled_element(base + at);
    }
    d[i] = accumulate ? d[i] + sum : sum;
  }
}

template <typename T>
void wgmma_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  wgmma_rows<T, 0>(d, a, b, accumulate);
}

// The same with the first operand in shared memory, rows of m.
template <typename T>
void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = threadIdx.x / 32 % 4 * 16;
  const uint32_t rows = static_cast<uint32_t>(a << 4), columns = static_cast<uint32_t>(b << 4);
  __syncwarp();
  for (int i = 0; i < 32; ++i) {
    const int row = first + g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      sum += swizzled_element(rows + row * 128 + k * 2) * swizzled_element(columns + column * 128 + k * 2);
    }
    d[i] = accumulate ? d[i] + sum : sum;
  }
  __syncwarp();
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
inline void store_fragment(const uint32_t (&a)[4], uint32_t address) {
  if (address % 16 != 0) std::abort();
  const cuda_model::Lanes<uint32_t> rows(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) std::memcpy(memory + rows[8 * i + lane / 4] + lane % 4 * 4, &a[i], 4);
}

}  // namespace attnops::sm90
