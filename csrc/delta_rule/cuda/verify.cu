#include "delta_rule/cuda/launch.h"
#include "device/sm80/linear_verify_table.cuh"

namespace attnops::delta_rule {
namespace {

struct Drafts {
  static constexpr const char *kVerify = "delta_verify", *kCommit = "delta_commit", *kStep = "delta_draft_step";
  static constexpr ReportOp kReportCommit = kReportDeltaCommit, kReportStep = kReportDeltaDraftStep;

  template <typename State, int kMaxKeys>
  static void verify(const LinearVerify& p, cudaStream_t stream) {
    p.step.gate_per_channel ? launch_linear_drafts<State, kMaxKeys, true, true>(kVerify, p, stream)
                            : launch_linear_drafts<State, kMaxKeys, true, false>(kVerify, p, stream);
  }

  template <typename State, int kMaxKeys>
  static bool step(const LinearDraftStep& p, cudaStream_t stream) {
    return p.verify.step.gate_per_channel ? launch_draft_tiles<State, kMaxKeys, true, true>(kStep, p, stream)
                                          : launch_draft_tiles<State, kMaxKeys, true, false>(kStep, p, stream);
  }
};

}  // namespace

void launch_verify(const LinearVerify& params, CUstream_st* stream) { verify_drafts<Drafts>(params, stream); }

void launch_commit(const LinearCommit& params, CUstream_st* stream) { commit_drafts<Drafts>(params, stream); }

void launch_draft_step(const LinearDraftStep& params, CUstream_st* stream) { step_drafts<Drafts>(params, stream); }

}  // namespace attnops::delta_rule
