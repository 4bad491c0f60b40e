#include "delta_rule/cuda/launch.h"
#include "device/sm80/linear_verify_table.cuh"

namespace attnops::delta_rule {
namespace {

struct Drafts {
  static constexpr const char *kVerify = "delta_verify", *kCommit = "delta_commit";
  static constexpr ReportOp kReportCommit = kReportDeltaCommit;

  template <typename State, int kMaxKeys>
  static void verify(const LinearVerify& p, cudaStream_t stream) {
    p.step.gate_per_channel ? launch_linear_drafts<State, kMaxKeys, true, true>(kVerify, p, stream)
                            : launch_linear_drafts<State, kMaxKeys, true, false>(kVerify, p, stream);
  }
};

}  // namespace

void launch_verify(const LinearVerify& params, CUstream_st* stream) { verify_drafts<Drafts>(params, stream); }

void launch_commit(const LinearCommit& params, CUstream_st* stream) { commit_drafts<Drafts>(params, stream); }

}  // namespace attnops::delta_rule
