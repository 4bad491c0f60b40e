#pragma once
#include "core/impl_table.h"
#include "device/common/linear_commit.cuh"
#include "device/sm80/linear_verify_tiles.cuh"

// The table of kernels for drafts and for accepted ones, by what states are and by the longest keys. `Family` has the
// names of its ops, what a commit and a step report, verify<State, kMaxKeys>(params, stream) and step<...>.
namespace attnops {

template <class Family>
struct LinearVerifyImpl {
  const char* name;
  DType state_dtype;
  int max_keys;
  void (*verify)(const LinearVerify&, cudaStream_t);
  void (*commit)(const LinearCommit&, ReportOp, cudaStream_t);
  bool (*step)(const LinearDraftStep&, cudaStream_t);  // both in one launch; false: it cannot

  std::string reject(const LinearStep& p) const {
    if (p.state_dtype != state_dtype) {
      return std::string("takes states of ") + name_of(state_dtype) + ", got " + name_of(p.state_dtype);
    }
    if (p.key_dim > max_keys) return "takes keys of at most " + std::to_string(max_keys) + " elements";
    return "";
  }
};

template <class Family, typename State, int kMaxKeys>
void commit_of(const LinearCommit& p, ReportOp op, cudaStream_t stream) {
  launch_linear_commit<State, kMaxKeys>(Family::kCommit, op, p, stream);
}

template <class Family, typename State, int kMaxKeys>
constexpr LinearVerifyImpl<Family> verify_impl(const char* name, DType state_dtype) {
  return {name,
          state_dtype,
          kMaxKeys,
          &Family::template verify<State, kMaxKeys>,
          &commit_of<Family, State, kMaxKeys>,
          &Family::template step<State, kMaxKeys>};
}

template <class Family>
constexpr LinearVerifyImpl<Family> kVerifyImpls[] = {
    verify_impl<Family, float, 64>("fp32_64", DType::kFloat32),
    verify_impl<Family, float, 128>("fp32_128", DType::kFloat32),
    verify_impl<Family, float, 256>("fp32_256", DType::kFloat32),
    verify_impl<Family, __nv_bfloat16, 64>("bf16_64", DType::kBFloat16),
    verify_impl<Family, __nv_bfloat16, 128>("bf16_128", DType::kBFloat16),
    verify_impl<Family, __nv_bfloat16, 256>("bf16_256", DType::kBFloat16),
    verify_impl<Family, __half, 64>("fp16_64", DType::kFloat16),
    verify_impl<Family, __half, 128>("fp16_128", DType::kFloat16),
    verify_impl<Family, __half, 256>("fp16_256", DType::kFloat16),
};

template <class Family>
void verify_drafts(const LinearVerify& params, cudaStream_t stream) {
  if (int64_t{params.step.batch_size} * params.step.num_heads == 0) return;  // a grid of zero CTAs is a launch error
  select_impl(Family::kVerify, kVerifyImpls<Family>, params.step).verify(params, stream);
}

template <class Family>
void commit_drafts(const LinearCommit& params, cudaStream_t stream) {
  if (int64_t{params.step.batch_size} * params.step.num_heads == 0) return;
  select_impl(Family::kCommit, kVerifyImpls<Family>, params.step).commit(params, Family::kReportCommit, stream);
}

// Two launches where no kernel takes both, or where there are no semaphores. A commit finds all that its verification
// would.
template <class Family>
void step_drafts(const LinearDraftStep& params, cudaStream_t stream) {
  LinearVerify verify = params.verify;
  if (int64_t{verify.step.batch_size} * verify.step.num_heads == 0) return;
  const auto& impl = select_impl(Family::kStep, kVerifyImpls<Family>, verify.step);
  if (params.semaphores != nullptr && impl.step(params, stream)) return;
  impl.commit(params.commit(), Family::kReportStep, stream);
  verify.step.report = nullptr;
  impl.verify(verify, stream);
}

}  // namespace attnops
