#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "cpu/slot_owners.h"
#include "linear_state/checks.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::linear_state {
namespace {

// What Params::check records, without a walk over all pairs for each of them.
void check_pairs(const Params& p, int32_t* report) {
  attnops::cpu::SlotOwners writers, readers;
  for (int64_t i = 0; i < p.count; ++i) {
    if (!p.moves(i)) continue;
    writers.add(p.dst[i], i);
    if (p.src != nullptr && p.within) readers.add(p.src[i], i);
  }
  writers.sort();
  readers.sort();
  for (int64_t i = 0; i < p.count; ++i) {
    p.check_with(i, report, [&] {
      int64_t other = readers.first(p.dst[i]);  // not this pair, whose slots differ
      const int64_t writer = writers.first(p.dst[i]);
      if (writer < i && (other < 0 || writer < other)) other = writer;
      if (other >= 0) record_fault(report, {p.op, kReportSharedSlot, i, other, p.dst[i], 0});
    });
  }
}

void run(const char* op, Params p) {
  CpuFaults faults(op, p.within ? "states" : "states, or of source for src", p.report);
  check_pairs(p, faults.report());
  faults.check();
  if (p.slot_bytes == 0) return;  // and no address to copy from
  torch::stable::parallel_for(0, p.num_layers * p.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t layer = task / p.count, i = task % p.count;
      if (!p.moves(i)) continue;
      if (p.src == nullptr) {
        std::memset(p.at(layer, p.dst[i]), 0, static_cast<size_t>(p.slot_bytes));
      } else {
        std::memcpy(p.at(layer, p.dst[i]), p.source_at(layer, p.src[i]), static_cast<size_t>(p.slot_bytes));
      }
    }
  });
}

void copy_states_cpu(const Tensor& states, const Tensor& src, const Tensor& dst, const OptionalTensor& report,
                     const OptionalTensor& source) {
  run("copy_states", checked_params("copy_states", kReportCopyStates, states, &src, dst, "dst", report, source));
}

void clear_states_cpu(const Tensor& states, const Tensor& slots, const OptionalTensor& report) {
  run("clear_states",
      checked_params("clear_states", kReportClearStates, states, nullptr, slots, "slots", report, OptionalTensor()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("copy_states", TORCH_BOX(&copy_states_cpu));
  m.impl("clear_states", TORCH_BOX(&clear_states_cpu));
}

}  // namespace attnops::linear_state
