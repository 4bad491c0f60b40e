#include "core/impl_table.h"
#include "delta_rule/cuda/launch.h"
#include "device/common/linear_commit.cuh"
#include "device/sm80/linear_verify_tiles.cuh"

namespace attnops::delta_rule {
namespace {

struct VerifyImpl {
  const char* name;
  DType state_dtype;
  int max_keys;
  void (*verify)(const LinearVerify&, cudaStream_t);
  void (*commit)(const LinearCommit&, cudaStream_t);

  std::string reject(const LinearStep& p) const {
    if (p.state_dtype != state_dtype) {
      return std::string("takes states of ") + name_of(state_dtype) + ", got " + name_of(p.state_dtype);
    }
    if (p.key_dim > max_keys) return "takes keys of at most " + std::to_string(max_keys) + " elements";
    return "";
  }
};

template <typename State, int kMaxKeys>
void verify_of(const LinearVerify& p, cudaStream_t stream) {
  p.step.gate_per_channel ? launch_linear_drafts<State, kMaxKeys, true, true>("delta_verify", p, stream)
                          : launch_linear_drafts<State, kMaxKeys, true, false>("delta_verify", p, stream);
}

template <typename State, int kMaxKeys>
void commit_of(const LinearCommit& p, cudaStream_t stream) {
  launch_linear_commit<State, kMaxKeys>("delta_commit", kReportDeltaCommit, p, stream);
}

#define ATTNOPS_VERIFY_IMPL(name, dtype, State, keys) \
  {name, dtype, keys, &verify_of<State, keys>, &commit_of<State, keys>}

constexpr VerifyImpl kImpls[] = {
    ATTNOPS_VERIFY_IMPL("fp32_64", DType::kFloat32, float, 64),
    ATTNOPS_VERIFY_IMPL("fp32_128", DType::kFloat32, float, 128),
    ATTNOPS_VERIFY_IMPL("fp32_256", DType::kFloat32, float, 256),
    ATTNOPS_VERIFY_IMPL("bf16_64", DType::kBFloat16, __nv_bfloat16, 64),
    ATTNOPS_VERIFY_IMPL("bf16_128", DType::kBFloat16, __nv_bfloat16, 128),
    ATTNOPS_VERIFY_IMPL("bf16_256", DType::kBFloat16, __nv_bfloat16, 256),
    ATTNOPS_VERIFY_IMPL("fp16_64", DType::kFloat16, __half, 64),
    ATTNOPS_VERIFY_IMPL("fp16_128", DType::kFloat16, __half, 128),
    ATTNOPS_VERIFY_IMPL("fp16_256", DType::kFloat16, __half, 256),
};

}  // namespace

void launch_verify(const LinearVerify& params, CUstream_st* stream) {
  if (int64_t{params.step.batch_size} * params.step.num_heads == 0) return;  // a grid of zero CTAs is a launch error
  select_impl("delta_verify", kImpls, params.step).verify(params, stream);
}

void launch_commit(const LinearCommit& params, CUstream_st* stream) {
  if (int64_t{params.step.batch_size} * params.step.num_heads == 0) return;
  select_impl("delta_commit", kImpls, params.step).commit(params, stream);
}

}  // namespace attnops::delta_rule
