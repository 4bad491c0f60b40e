#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Neighbouring channels of a token as a thread brings, computes and takes them.
namespace attnops::causal_conv1d {

template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<16> {
  using Type = uint4;
};
template <>
struct AccessOf<8> {
  using Type = uint2;
};
template <>
struct AccessOf<4> {
  using Type = uint32_t;
};
template <>
struct AccessOf<2> {
  using Type = uint16_t;
};

// kVec elements as an access brings and takes them, two of 16 bits in a word.
template <typename T, int kVec>
class Elements {
 public:
  using Access = typename AccessOf<static_cast<int>(sizeof(T)) * kVec>::Type;

  __device__ static Elements zero() { return Elements{}; }
  __device__ static Elements load(const T* from) {
    Elements x;
    x.set(*reinterpret_cast<const Access*>(from));
    return x;
  }
  // What another CTA reads much later stays in L2 until then.
  __device__ static Elements load_kept(const T* from) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(Access) == 16) {
      uint64_t policy;
      uint4 bits;
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "l"(from), "l"(policy));
      Elements x;
      x.set(bits);
      return x;
    }
#endif
    return load(from);
  }
  __device__ void store(T* to) const { *reinterpret_cast<Access*>(to) = access(); }

  // Element i is the one whose bits are `bits(i)`.
  template <typename Bits>
  __device__ static Elements of(const Bits& bits) {
    Elements x;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPairs) {
        x.words_[w] = bits(2 * w) | bits(2 * w + 1) << 16;
      } else {
        x.words_[w] = bits(w);
      }
    }
    return x;
  }
  __device__ static Elements round(const float (&from)[kVec]) {
    if constexpr (kPairs) {
      Elements x;
#pragma unroll
      for (int w = 0; w < kWords; ++w) x.words_[w] = round_pair(from[2 * w], from[2 * w + 1]);
      return x;
    } else {
      return of([&](int i) { return bits_of(from[i]); });
    }
  }

  __device__ uint32_t bits(int i) const {
    if constexpr (!kPairs) return words_[i];
    return i % 2 == 0 ? words_[i / 2] & 0xffffu : words_[i / 2] >> 16;
  }
  __device__ float at(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words_[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(kPairs && i % 2 == 1 ? words_[i / 2] & 0xffff0000u : words_[kPairs ? i / 2 : i] << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(bits(i))));
    }
  }

 private:
  static constexpr bool kPairs = sizeof(T) == 2 && kVec % 2 == 0;
  static constexpr int kWords = kPairs ? kVec / 2 : kVec;
  uint32_t words_[kWords];

  __device__ static uint32_t bits_of(float x) {
    if constexpr (sizeof(T) == 4) return __float_as_uint(x);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat16_as_ushort(__float2bfloat16(x));
    if constexpr (std::is_same_v<T, __half>) return __half_as_ushort(__float2half(x));
  }
  __device__ static uint32_t round_pair(float low, float high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  __device__ void set(const uint4& x) { words_[0] = x.x, words_[1] = x.y, words_[2] = x.z, words_[3] = x.w; }
  __device__ void set(const uint2& x) { words_[0] = x.x, words_[1] = x.y; }
  __device__ void set(uint32_t x) { words_[0] = x; }
  __device__ void set(uint16_t x) { words_[0] = x; }
  __device__ Access access() const {
    if constexpr (sizeof(Access) == 16) {
      return {words_[0], words_[1], words_[2], words_[3]};
    } else if constexpr (sizeof(Access) == 8) {
      return {words_[0], words_[1]};
    } else {
      return static_cast<Access>(words_[0]);
    }
  }
};

// x sigmoid(x) by the two approximations of the hardware. An exponential below 2^-126 may be 0: 1 is added to it.
__device__ __forceinline__ float silu_of(float x) {
#if defined(__CUDA_ARCH__)
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return x * inverse;
#else
  return x / (1.f + expf(-x));
#endif
}

}  // namespace attnops::causal_conv1d
