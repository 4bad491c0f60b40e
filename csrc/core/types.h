#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define ATTNOPS_HOST_DEVICE __host__ __device__
#else
#define ATTNOPS_HOST_DEVICE
#endif

namespace attnops {

// Element types that an op argument may have. Ops accept a subset each; their checks name it.
enum class DType : int8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt32,
  kInt64,
  kUInt8,
};

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
  }
  return "unknown";
}

constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kUInt8: return 1;
    case DType::kInt64: return 8;
  }
  return 0;
}

// GPU architectures that a kernel row may name: the compute capability times ten.
enum class Arch : int { kSm80 = 80, kSm90 = 90, kSm100 = 100 };

// Instruction sets that a CPU kernel row may name, weakest first; `scalar` is the reference.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

constexpr const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAmx: return "amx";
  }
  return "unknown";
}

}  // namespace attnops
