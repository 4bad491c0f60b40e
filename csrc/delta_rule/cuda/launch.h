#pragma once
#include "core/linear_prefill.h"
#include "core/linear_verify.h"

struct CUstream_st;

namespace attnops::delta_rule {

// A token of each request, for states of a type and keys of at most kMaxKeys elements.
template <DType kState, int kMaxKeys>
struct Decode {
  static void launch(const LinearStep& params, CUstream_st* stream);
};

void launch_plan(const RequestOrder& params, CUstream_st* stream);
void launch_verify(const LinearVerify& params, CUstream_st* stream);
void launch_commit(const LinearCommit& params, CUstream_st* stream);

}  // namespace attnops::delta_rule
