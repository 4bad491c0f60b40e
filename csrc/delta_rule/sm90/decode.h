#pragma once
#include "core/linear_step.h"

struct CUstream_st;

namespace attnops::delta_rule::sm90 {

// A token of each request of a large batch, for dense states of a type, of kMaxKeys keys.
template <DType kState, int kMaxKeys>
struct Stream {
  static void launch(const LinearStep& params, CUstream_st* stream);
};

}  // namespace attnops::delta_rule::sm90
