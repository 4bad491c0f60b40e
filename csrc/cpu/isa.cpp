#include "cpu/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attnops::cpu {
namespace {

#if defined(__x86_64__)

// Leaf 7 bits of EDX that __builtin_cpu_supports does not name in every compiler.
constexpr unsigned kAmxBf16Bit = 1u << 22;
constexpr unsigned kAmxTileBit = 1u << 24;

// Linux saves the 8 KiB of tile data only for processes that asked (arch_prctl ARCH_REQ_XCOMP_PERM, XFEATURE 18).
bool may_use_amx_tiles() {
#if defined(__linux__)
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kAmxBf16Bit) && (d & kAmxTileBit) && may_use_amx_tiles();
}

Isa detect() {
  __builtin_cpu_init();  // the builtins also ask XGETBV whether the system saves the registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return Isa::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
  // One processor has the first without the second (Cooper Lake); it runs the AVX-512 kernels.
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return Isa::kAvx512;
  return has_amx_bf16() ? Isa::kAmx : Isa::kAvx512Bf16;
}

#else

Isa detect() { return Isa::kScalar; }

#endif

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa current_isa() {
  const Isa best = detected_isa();
  const char* limit = std::getenv("ATTNOPS_CPU_ISA");
  if (limit == nullptr || *limit == '\0') return best;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx}) {
    if (std::strcmp(limit, name_of(isa)) == 0) return isa < best ? isa : best;
  }
  throw std::runtime_error(
      "attnops: the environment's ATTNOPS_CPU_ISA must be scalar, avx2, avx512, avx512_bf16 or amx, got " +
      std::string(limit));
}

}  // namespace attnops::cpu
