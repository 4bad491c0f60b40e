#include <torch/csrc/stable/library.h>

#include <string>

#include "core/impl_table.h"

namespace attnops {
namespace {

std::string impl_counts_cuda() { return ImplCounts::text(); }

std::string cuda_archs() { return ATTNOPS_BUILT_ARCHS; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CompositeExplicitAutograd, m) {
  m.impl("impl_counts_cuda", TORCH_BOX(&impl_counts_cuda));
  m.impl("cuda_archs", TORCH_BOX(&cuda_archs));
}

}  // namespace attnops
