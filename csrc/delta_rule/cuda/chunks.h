#pragma once
#include "core/linear_prefill.h"

struct CUstream_st;

namespace attnops::delta_rule {

// A prompt in chunks, for keys of at most kKeys elements.
template <int kKeys, bool kChannels>
struct Chunks {
  static const int kSharedBytes;
  static void launch(const LinearPrefill& params, CUstream_st* stream);
};

// A prompt token by token.
template <int kMaxKeys>
struct Tokens {
  static void launch(const LinearPrefill& params, CUstream_st* stream);
};

}  // namespace attnops::delta_rule
