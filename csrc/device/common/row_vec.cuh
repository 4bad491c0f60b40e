#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attnops {

// kElements of a row as one access brings them. Elements of 16 bits stay in words of two.
template <typename T, int kElements>
class alignas(sizeof(T) * kElements) RowVec {
 public:
  __device__ float at(int i) const {
    if constexpr (!kPairs) {
      return static_cast<float>(words_[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? words_[i / 2] << 16 : words_[i / 2] & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(words_[i / 2] >> (i % 2 * 16))));
    }
  }

 private:
  static constexpr bool kPairs = sizeof(T) == 2 && kElements % 2 == 0;
  std::conditional_t<kPairs, uint32_t, T> words_[kPairs ? kElements / 2 : kElements];
};

}  // namespace attnops
