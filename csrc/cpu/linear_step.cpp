#include "cpu/linear_step.h"

#include <initializer_list>

#include "cpu/isa.h"
#include "cpu/linear_head.h"
#include "cpu/linear_step_rows.h"
#include "cpu/slot_owners.h"

namespace attnops::cpu {

void step_rows_scalar(const HeadStep& head) { step_rows_here(head); }

StepRowsFunction step_rows_function() {
  const Isa isa = current_isa();
  return isa == Isa::kScalar ? &step_rows_scalar : isa == Isa::kAvx2 ? &avx2_step_rows : &avx512_step_rows;
}

void linear_step_heads(const LinearStep& p, bool delta, int64_t begin, int64_t end) {
  const StepRowsFunction step_rows = step_rows_function();
  for (int64_t i = begin; i < end; ++i) {
    Head head{.p = &p, .row = i / p.num_heads, .head = static_cast<int>(i % p.num_heads)};
    const int64_t source = p.state_indices[head.row];
    const int64_t target = p.out_state_indices == nullptr ? source : p.out_state_indices[head.row];
    const auto in_pool = [&](int64_t slot) { return slot >= 0 && slot < p.num_slots; };
    if (in_pool(source)) {
      head.load_rows();
      delta ? head.delta_gates() : head.ssd_gates();
      step_rows({.key = head.key,
                 .query = head.query,
                 .decay = head.decay,
                 .value = head.value,
                 .out = head.out,
                 .from = states_of(p, source, head.head),
                 .to = in_pool(target) ? states_of(p, target, head.head) : nullptr,
                 .stride_row = p.stride_row,
                 .key_dim = p.key_dim,
                 .value_dim = p.value_dim,
                 .coefficient = head.coefficient,
                 .key_query = head.key_query,
                 .dtype = p.state_dtype,
                 .delta = delta});
    }
    head.store(!in_pool(source));
  }
}

void check_step_slots(const LinearStep& p, ReportOp op, int32_t* report) {
  const int32_t* targets = p.out_state_indices == nullptr ? p.state_indices : p.out_state_indices;
  SlotOwners owners = owners_of(targets, p.batch_size);
  for (int request = 0; request < p.batch_size; ++request) {
    for (const int64_t slot : {int64_t{p.state_indices[request]}, int64_t{targets[request]}}) {
      if (slot >= p.num_slots) record_fault(report, {op, kReportStateSlot, request, 0, slot, p.num_slots});
    }
    owners.check_next(op, targets[request], request, report);
  }
}

}  // namespace attnops::cpu
