#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstring>
#include <string>

#include "cpu/isa.h"
#include "cpu/partials.h"
#include "cpu/split_kv_plan.h"
#include "torch_bindings/cpu_faults.h"
#include "xqa_decode/cpu/driver.h"
#include "xqa_decode/op.h"

namespace attnops::xqa_decode {
namespace {

void xqa_decode_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                         int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens,
                         int64_t rows, int64_t kv_bytes) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q,
                                              num_kv_heads, window_left, fixed_split_tokens, rows, kv_bytes);
  attnops::cpu::SplitKvPlanner(plan.geometry, plan.tensors.cache_seqlens)
      .write(plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits);
}

// Planning again costs microseconds here, and a stale plan would be a wrong answer. What the call reads is its own
// plan.
attnops::cpu::SplitKvPlanner::Plan checked_plan_of(const Params& params) {
  const SplitKvGeometry geometry = plan_geometry(params.batch_size, params.seqlen_q, params.num_kv_heads,
                                                 params.window_left, params.num_sm_parts, params.fixed_split_tokens);
  auto plan = attnops::cpu::SplitKvPlanner(geometry, params.cache_seqlens).plan();
  if (!plan.matches(params.tile_scheduler_metadata, params.num_splits)) {
    fail("xqa_decode",
         "tile_scheduler_metadata and num_splits are not the plan of these cache_seqlens, seqlen_q, num_kv_heads, "
         "window_left and fixed_split_tokens: run xqa_decode_plan before");
  }
  // Checked mode records it, as on a GPU.
  if (!params.report) {
    check_room_for_cuts("xqa_decode", geometry, params.cache_seqlens, plan.num_splits.data(), params.num_partials);
  }
  return plan;
}

// On a CPU a value that would have the kernel read past the batch is an error.
void check_ragged(const Params& p) {
  const int tokens = static_cast<int>(p.num_tokens);
  int before = 0;
  for (int b = 0; b <= p.batch_size; ++b) {
    const int at = p.cu_seqlens_q[b], most = b == 0 ? tokens : min_of(tokens - before, p.seqlen_q) + before;
    if (at < before || at > most) {
      fail("xqa_decode", "cu_seqlens_q[" + std::to_string(b) + "] must be in [" + std::to_string(before) + ", " +
                             std::to_string(most) + "] (max_seqlen_q tokens at most for a request), got " +
                             std::to_string(at));
    }
    before = at;
  }
}

// Rows behind the last request: those of a row without keys.
void clear_rows_of_nobody(const Params& p) {
  const int64_t size = size_of(p.dtype);
  for (int64_t token = p.cu_seqlens_q[p.batch_size]; token < p.num_tokens; ++token) {
    for (int head = 0; head < p.num_q_heads; ++head) {
      char* const out = static_cast<char*>(p.out) + (token * p.out_stride_token + head * p.out_stride_head) * size;
      std::memset(out, 0, p.head_dim * size);
      if (p.lse) p.lse[token * p.num_q_heads + head] = -INFINITY;
    }
  }
}

}  // namespace

void run_cpu(Params params) {
  const cpu::TileKernel& kernel =
      cpu::select_tile_kernel({attnops::cpu::current_isa(), params.dtype, params.kv_dtype, params.head_dim});
  if (params.ragged) {
    check_ragged(params);
    clear_rows_of_nobody(params);
    if (params.num_tokens == 0) return;
  }
  if (params.batch_size == 0) return;
  CpuFaults faults("xqa_decode", "k_pages", params.report);
  const auto plan = checked_plan_of(params);
  params.tile_scheduler_metadata = plan.tile_scheduler_metadata.data();
  params.num_splits = plan.num_splits.data();
  params.report = faults.report();
  const int64_t rows = int64_t{params.seqlen_q} * (params.num_q_heads / params.num_kv_heads) * params.num_partials;
  const attnops::cpu::Partials partials(params.out_partial, rows * params.head_dim, params.lse_partial, rows,
                                        params.semaphores);
  params.out_partial = partials.out();
  params.lse_partial = partials.lse();

  const auto for_each = [](int64_t count, const auto& run) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(static_cast<int>(i));
    });
  };
  for_each(params.num_sm_parts, [&](int part) { cpu::run_part(params, kernel, part); });
  if (params.fixed_split_tokens != 0) {
    const int64_t works = int64_t{params.batch_size} * params.num_kv_heads;
    for_each(works, [&](int work) { cpu::merge_fixed(params, kernel, work); });
  } else {
    for_each(params.num_sm_parts, [&](int part) { cpu::merge_balanced(params, kernel, part); });
  }
  faults.check();
}

namespace {

void run_on_cpu(const Params& params, const Tensor&) { run_cpu(params); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cpu));
  m.impl("xqa_decode", TORCH_BOX(&xqa_decode<&run_on_cpu>));
}

}  // namespace attnops::xqa_decode
