#pragma once
#include "core/types.h"

namespace attnops::cpu {

// The best instruction set of this processor and operating system that kernels are built for. Asks the kernel for
// leave to use AMX tiles once, which Linux grants per process.
Isa detected_isa();

// What ops use: `detected_isa()`, but not above the environment's ATTNOPS_CPU_ISA (scalar, avx2, avx512, avx512_bf16,
// amx), which is read at every call so that tests can walk through all kernels. Throws on any other text.
Isa current_isa();

}  // namespace attnops::cpu
