#include "device/sm80/linear_verify_table.cuh"
#include "ssd/cuda/launch.h"

namespace attnops::ssd {
namespace {

struct Drafts {
  static constexpr const char *kVerify = "ssd_verify", *kCommit = "ssd_commit", *kStep = "ssd_draft_step";
  static constexpr ReportOp kReportCommit = kReportSsdCommit, kReportStep = kReportSsdDraftStep;

  template <typename State, int kMaxKeys>
  static void verify(const LinearVerify& p, cudaStream_t stream) {
    launch_linear_drafts<State, kMaxKeys, false, false>(kVerify, p, stream);
  }

  template <typename State, int kMaxKeys>
  static bool step(const LinearDraftStep& p, cudaStream_t stream) {
    return launch_draft_tiles<State, kMaxKeys, false, false>(kStep, p, stream);
  }
};

}  // namespace

void launch_verify(const LinearVerify& params, CUstream_st* stream) { verify_drafts<Drafts>(params, stream); }

void launch_commit(const LinearCommit& params, CUstream_st* stream) { commit_drafts<Drafts>(params, stream); }

void launch_draft_step(const LinearDraftStep& params, CUstream_st* stream) { step_drafts<Drafts>(params, stream); }

}  // namespace attnops::ssd
