#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Warpgroup products with float32 accumulators, m = 64 and k = 16, over operands in tiles of 64 x 64 16-bit elements:
// rows of 128 bytes, their 16-byte chunks permuted by the 128-byte swizzle, so a tile is 8 KB and starts on 1 KB.
//
// An accumulator that a product in flight writes must not be touched before a wait that names it: the wait functions
// take the arrays, which keeps the compiler from moving their uses across.
namespace attnops::sm90 {

inline constexpr int kTileBytes = 64 * 128;

__device__ inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Descriptor of an operand at a shared-memory address. K-major (rows are m or n, k is dense): the stride is that
// between groups of eight rows. MN-major (rows are k): the leading stride leads to the next 64 elements of m or n.
__device__ inline uint64_t operand_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{kTileBytes >> 4} << 16;
  return kSwizzle128 | kStride | kLeading | ((address & 0x3FFFF) >> 4);
}

// Descriptor steps for the next k = 16 of a tile.
inline constexpr int kStepKMajor = 32 >> 4;
inline constexpr int kStepMnMajor = 16 * 128 >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps values in their registers here: no reordering across.
template <int kCount>
__device__ inline void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ inline void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Waits until at most kPending groups are in flight; the arrays are those of the groups that are then complete.
template <int kPending, int... kCounts>
__device__ inline void wgmma_wait(float (&... arrays)[kCounts]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(arrays), ...);
}

#define ATTNOPS_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTNOPS_F16(d, i) ATTNOPS_F4(d, i), ATTNOPS_F4(d, i + 4), ATTNOPS_F4(d, i + 8), ATTNOPS_F4(d, i + 12)
#define ATTNOPS_F32(d) ATTNOPS_F16(d, 0), ATTNOPS_F16(d, 16)
#define ATTNOPS_F128(d)                                                                              \
  ATTNOPS_F16(d, 0), ATTNOPS_F16(d, 16), ATTNOPS_F16(d, 32), ATTNOPS_F16(d, 48), ATTNOPS_F16(d, 64), \
      ATTNOPS_F16(d, 80), ATTNOPS_F16(d, 96), ATTNOPS_F16(d, 112)

#define ATTNOPS_D32                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define ATTNOPS_D128                                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "  \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "  \
  "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "  \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// d [64, 64] (+)= a b^T: both K-major in shared memory. `accumulate` 0 overwrites d.
#define ATTNOPS_WGMMA_N64_SS(types)                                                                         \
  asm volatile(                                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " ATTNOPS_D32 ", %32, %33, p, 1, 1, 0, 0;\n}\n" \
      : ATTNOPS_F32(d)                                                                                      \
      : "l"(a), "l"(b), "r"(accumulate))

// The same with a in registers.
#define ATTNOPS_WGMMA_N64_RS(types)                                       \
  asm volatile(                                                           \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                        \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " ATTNOPS_D32 \
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"                     \
      : ATTNOPS_F32(d)                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// d [64, 256] += a b: a K-major in shared memory, b MN-major.
#define ATTNOPS_WGMMA_N256_SS(types)                                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." types " " ATTNOPS_D128 ", %128, %129, 1, 1, 1, 0, 1;\n" \
               : ATTNOPS_F128(d)                                                                                      \
               : "l"(a), "l"(b))

// The same with a in registers.
#define ATTNOPS_WGMMA_N256_RS(types)                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." types " " ATTNOPS_D128 \
               ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"                     \
               : ATTNOPS_F128(d)                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename T>
__device__ inline void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_N64_SS("f16.f16");
  } else {
    ATTNOPS_WGMMA_N64_SS("bf16.bf16");
  }
}

template <typename T>
__device__ inline void wgmma_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_N64_RS("f16.f16");
  } else {
    ATTNOPS_WGMMA_N64_RS("bf16.bf16");
  }
}

template <typename T>
__device__ inline void wgmma_n256(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_N256_SS("f16.f16");
  } else {
    ATTNOPS_WGMMA_N256_SS("bf16.bf16");
  }
}

template <typename T>
__device__ inline void wgmma_n256(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_N256_RS("f16.f16");
  } else {
    ATTNOPS_WGMMA_N256_RS("bf16.bf16");
  }
}

// Four 8 x 8 matrices of 16-bit elements: the A fragment (m = 16 per warp, k = 16) of a K-major tile. Lane l gives the
// address of row l % 16, chunk l / 16 of the step.
__device__ inline void load_fragment(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ inline void store_fragment(const uint32_t (&a)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]), "r"(a[1]),
               "r"(a[2]), "r"(a[3])
               : "memory");
}

template <typename T>
__device__ inline uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace attnops::sm90
