#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/isa.h"

namespace attnops {
namespace {

std::string cpu_isa() { return name_of(cpu::current_isa()); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&cpu_isa)); }

}  // namespace attnops
