#pragma once
#include "core/linear_prefill.h"

struct CUstream_st;

namespace attnops::ssd::sm90 {

// A prompt in chunks, for keys of at most kKeys elements.
template <int kKeys>
struct Chunks {
  static const int kSharedBytes;
  static void launch(const LinearPrefill& params, CUstream_st* stream);
};

}  // namespace attnops::ssd::sm90
