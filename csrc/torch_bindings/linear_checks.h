#pragma once
#include "core/linear_chunk.h"
#include "core/linear_prefill.h"
#include "core/linear_step.h"
#include "core/linear_verify.h"
#include "core/state_report.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// What the ops of linear recurrences check alike: states in slots of a pool, and who uses which.
namespace attnops {

struct StateArguments {
  const Tensor &states, &tokens;
  const char* tokens_name;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
};

inline StepRows step_rows(const Tensor& tensor) {
  return {.data = tensor.const_data_ptr(), .stride_request = tensor.stride(0), .stride_head = tensor.stride(1)};
}

inline void set_step_out(LinearStep& p, const Tensor& out) {
  p.out = out.mutable_data_ptr();
  p.out_stride_request = out.stride(0);
  p.out_stride_head = out.stride(1);
}

// Gates may be float32 beside tokens of fewer bits: models compute them so.
inline TensorCheck gate_check(const char* op, const char* name, const Tensor& gate, const char* other_name,
                              const Tensor& other) {
  TensorCheck check(op, name, gate);
  check.device_as(other_name, other).dtype({dtype_of(other), DType::kFloat32});
  return check;
}

inline DType same_gate_dtype(const char* op, const char* name, const Tensor& gate, const char* other_name,
                             const Tensor& other) {
  TensorCheck(op, other_name, other).dtype_as(name, gate);
  return dtype_of(gate);
}

// Slots of a pool: int32 [B], on the tokens' device.
inline const int32_t* checked_slots(const char* op, const char* name, const Tensor& slots, const char* other_name,
                                    const Tensor& other, Dim& count) {
  TensorCheck(op, name, slots).device_as(other_name, other).dtype({DType::kInt32}).shape({count}).contiguous();
  return static_cast<const int32_t*>(slots.const_data_ptr());
}

// Whether groups of keys can share heads of values among them: as many each, at least one.
inline bool groups_share(int64_t groups, int64_t heads) {
  return groups == 0 || heads == 0 ? groups == heads : heads % groups == 0;
}

// The part of LinearStep that extents and states give; the rest is zero.
inline LinearStep checked_states(const char* op, const StateArguments& given, Dim& batch, Dim& groups, Dim& heads,
                                 Dim& key_dim, Dim& value_dim) {
  Dim num_slots("num_slots");
  TensorCheck(op, "states", given.states)
      .device_as(given.tokens_name, given.tokens)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({num_slots, heads, value_dim, key_dim})
      .dense_last()
      .apart();
  check_range(op, "states.shape[3] (key_dim)", *key_dim, 1, kMaxStateDim);
  check_range(op, "states.shape[2] (value_dim)", *value_dim, 1, kMaxStateDim);
  if (!groups_share(*groups, *heads)) {
    fail(op, "the heads of values must be a multiple of those of keys, got " + std::to_string(*heads) + " and " +
                 std::to_string(*groups));
  }
  LinearStep p{};
  p.num_heads = heads.as_int();
  p.heads_per_group = *groups == 0 ? 1 : static_cast<int>(*heads / *groups);
  p.key_dim = key_dim.as_int();
  p.value_dim = value_dim.as_int();
  p.dtype = dtype_of(given.tokens);
  p.state_dtype = dtype_of(given.states);
  p.states = given.states.mutable_data_ptr();
  p.num_slots = *num_slots;
  p.stride_slot = given.states.stride(0);
  p.stride_head = given.states.stride(1);
  p.stride_row = given.states.stride(2);
  p.state_indices = checked_slots(op, "state_indices", given.state_indices, given.tokens_name, given.tokens, batch);
  p.batch_size = batch.as_int();
  if (given.out_state_indices) {
    p.out_state_indices =
        checked_slots(op, "out_state_indices", *given.out_state_indices, given.tokens_name, given.tokens, batch);
  }
  return p;
}

// An optional float32 value per head.
inline const float* checked_per_head(const char* op, const char* name, const OptionalTensor& values,
                                     const char* other_name, const Tensor& other, Dim& heads) {
  if (!values) return nullptr;
  TensorCheck(op, name, *values).device_as(other_name, other).dtype({DType::kFloat32}).shape({heads}).contiguous();
  return static_cast<const float*>(values->const_data_ptr());
}

struct PrefillArguments {
  const Tensor &cu_seqlens, &prefix_lens;
  const OptionalTensor &checkpoint_slots, &plan, &scratch;
  bool cut;
};

// Room for the kernels that take whole chunks; the CPU's take none.
inline void add_scratch(const char* op, LinearPrefill& p, bool delta, const OptionalTensor& scratch,
                        const char* other_name, const Tensor& other) {
  if (!scratch) return;
  Dim bytes("bytes");
  TensorCheck(op, "scratch", *scratch)
      .device_as(other_name, other)
      .dtype({DType::kUInt8})
      .shape({bytes})
      .contiguous()
      .aligned(16);
  const int panels = p.step.key_dim <= 64 ? 1 : p.step.key_dim <= 128 ? 2 : 4;
  const ChunkScratch layout{.panels = panels, .delta = delta, .channels = p.step.gate_per_channel};
  const int64_t heads = p.step.num_heads, room = segment_room(p.num_tokens, p.step.batch_size, heads);
  int64_t needed = chunk_places(p.num_tokens, p.step.batch_size) * heads * layout.bytes();
  if (p.cut && panels <= 2) needed += segment_bytes(room, heads, p.step.value_dim, 64 * panels, delta);
  if (*bytes < needed) {
    fail(op, "scratch.shape[0] (bytes) must be at least " + std::to_string(needed) + ", got " + std::to_string(*bytes));
  }
  p.scratch = scratch->mutable_data_ptr();
  p.scratch_bytes = *bytes;
}

// A step whose rows are the tokens of ragged requests.
inline LinearPrefill checked_prefill(const char* op, const LinearStep& step, bool delta, const PrefillArguments& given,
                                     const char* other_name, const Tensor& other, Dim& num_tokens, Dim& batch) {
  LinearPrefill p{};
  p.step = step;
  p.num_tokens = *num_tokens;
  Dim bounds("batch_size + 1", *batch + 1, "state_indices"), max_checkpoints("max_checkpoints");
  p.cu_seqlens = checked_slots(op, "cu_seqlens", given.cu_seqlens, other_name, other, bounds);
  p.prefix_lens = checked_slots(op, "prefix_lens", given.prefix_lens, other_name, other, batch);
  if (given.checkpoint_slots) {
    TensorCheck(op, "checkpoint_slots", *given.checkpoint_slots)
        .device_as(other_name, other)
        .dtype({DType::kInt32})
        .shape({batch, max_checkpoints})
        .dense_last();
    p.checkpoint_slots = static_cast<const int32_t*>(given.checkpoint_slots->const_data_ptr());
    p.max_checkpoints = *max_checkpoints;
    p.stride_checkpoints = given.checkpoint_slots->stride(0);
  }
  if (given.plan) p.plan = checked_slots(op, "plan", *given.plan, other_name, other, batch);
  p.cut = given.cut;
  add_scratch(op, p, delta, given.scratch, other_name, other);
  return p;
}

inline RequestOrder checked_plan(const char* op, const Tensor& plan, const Tensor& cu_seqlens) {
  Dim batch("batch_size");
  TensorCheck(op, "plan", plan).dtype({DType::kInt32}).shape({batch}).contiguous();
  Dim bounds("batch_size + 1", *batch + 1, "plan");
  return {.plan = static_cast<int32_t*>(plan.mutable_data_ptr()),
          .cu_seqlens = checked_slots(op, "cu_seqlens", cu_seqlens, "plan", plan, bounds),
          .batch_size = batch.as_int()};
}

struct RingArguments {
  const Tensor &ring_u, &ring_k, &ring_decay, &ring_len;
};

// Rings of updates, one for each slot of the states that `step` has.
inline StateRings checked_rings(const char* op, const LinearStep& step, const RingArguments& given,
                                const char* other_name, const Tensor& other, int drafts) {
  Dim num_slots("num_slots", step.num_slots, "states"), heads("num_heads", step.num_heads, "states"), rows("ring_rows");
  Dim value_dim("value_dim", step.value_dim, "states"), key_dim("key_dim", step.key_dim, "states"),
      groups("num_groups");
  const auto ring = [&](const char* name, const Tensor& tensor) {
    return TensorCheck(op, name, tensor).device_as(other_name, other).dtype({DType::kFloat32}).contiguous();
  };
  ring("ring_u", given.ring_u).shape({num_slots, heads, rows, value_dim});
  ring("ring_k", given.ring_k).shape({num_slots, groups, rows, key_dim});
  const bool per_channel = given.ring_decay.dim() == 4;
  if (per_channel) {
    ring("ring_decay", given.ring_decay).shape({num_slots, heads, rows, key_dim});
  } else {
    ring("ring_decay", given.ring_decay).shape({num_slots, heads, rows});
  }
  TensorCheck(op, "ring_len", given.ring_len)
      .device_as(other_name, other)
      .dtype({DType::kInt32})
      .shape({num_slots})
      .contiguous();
  check_range(op, "drafts of a request", drafts, 1, kMaxDrafts);
  if (*rows < drafts) {
    fail(op, "ring_u.shape[2] (ring_rows) must be at least " + std::to_string(drafts) + " (drafts of a request), got " +
                 std::to_string(*rows));
  }
  if (!groups_share(*groups, *heads)) {
    fail(op, "ring_k.shape[1] (num_groups) must divide " + std::to_string(*heads) + " (num_heads), got " +
                 std::to_string(*groups));
  }
  return {.u = static_cast<float*>(given.ring_u.mutable_data_ptr()),
          .k = static_cast<float*>(given.ring_k.mutable_data_ptr()),
          .decay = static_cast<float*>(given.ring_decay.mutable_data_ptr()),
          .lengths = static_cast<int32_t*>(given.ring_len.mutable_data_ptr()),
          .rows = rows.as_int(),
          .num_groups = groups.as_int(),
          .per_channel = per_channel};
}

inline LinearVerify checked_verify(const char* op, const LinearStep& step, const RingArguments& rings,
                                   const OptionalTensor& tree_mask, const char* other_name, const Tensor& other,
                                   int64_t num_tokens) {
  const int64_t batch_size = step.batch_size;
  if (batch_size == 0 ? num_tokens != 0 : num_tokens % batch_size != 0) {
    fail(op, std::string(other_name) + ".shape[0] must be a multiple of " + std::to_string(batch_size) +
                 " (batch_size of state_indices), got " + std::to_string(num_tokens));
  }
  const int drafts = batch_size == 0 ? 1 : static_cast<int>(num_tokens / batch_size);
  LinearVerify p{};
  p.step = step;
  p.drafts = drafts;
  if (num_tokens != 0) p.rings = checked_rings(op, step, rings, other_name, other, drafts);
  if (tree_mask) {
    Dim batch("batch_size", batch_size, "state_indices"), tokens("drafts", drafts, other_name);
    Dim bytes("ceil(drafts / 8)", (drafts + 7) / 8, other_name);
    TensorCheck(op, "tree_mask", *tree_mask)
        .device_as(other_name, other)
        .dtype({DType::kUInt8})
        .shape({batch, tokens, bytes})
        .contiguous();
    p.tree_mask = static_cast<const uint8_t*>(tree_mask->const_data_ptr());
  }
  return p;
}

// That the rings are those of a verification's gates and keys.
inline void check_ring_kind(const char* op, const LinearVerify& p, bool per_channel, int num_groups) {
  if (p.rings.per_channel != per_channel) {
    fail(op, std::string("ring_decay must have ") + (per_channel ? "4 dimensions: a gate per channel, as in a"
                                                                 : "3 dimensions: a gate per head, as in a"));
  }
  if (p.rings.num_groups != num_groups) {
    fail(op, "ring_k.shape[1] (num_groups) must be " + std::to_string(num_groups) + " as in k, got " +
                 std::to_string(p.rings.num_groups));
  }
}

inline const int32_t* checked_path(const char* op, const Tensor& path, const Tensor& states, Dim& batch, Dim& drafts) {
  TensorCheck(op, "accepted_path", path)
      .device_as("states", states)
      .dtype({DType::kInt32})
      .shape({batch, drafts})
      .contiguous();
  return static_cast<const int32_t*>(path.const_data_ptr());
}

struct AcceptedArguments {
  const Tensor &path, &length;
  const OptionalTensor& semaphores;
};

// A step whose verification has been checked; `tokens` are its rows.
inline LinearDraftStep checked_draft_step(const char* op, const LinearVerify& verify, const AcceptedArguments& given,
                                          const Tensor& states) {
  Dim batch("batch_size", verify.step.batch_size, "state_indices");
  Dim drafts = verify.step.batch_size == 0 ? Dim("drafts") : Dim("drafts", verify.drafts, "tokens");
  LinearDraftStep p{};
  p.verify = verify;
  p.path = checked_path(op, given.path, states, batch, drafts);
  p.accepted = checked_slots(op, "accepted_len", given.length, "states", states, batch);
  if (given.semaphores) {
    Dim count("semaphores");
    TensorCheck(op, "semaphores", *given.semaphores)
        .device_as("states", states)
        .dtype({DType::kInt32})
        .shape({count})
        .contiguous();
    const int64_t needed = int64_t{verify.step.batch_size} * (verify.rings.num_groups + 1);
    if (*count < needed) {
      fail(op, "semaphores.shape[0] must be at least " + std::to_string(needed) +
                   " (batch_size * (num_groups + 1)), got " + std::to_string(*count));
    }
    p.semaphores = static_cast<int32_t*>(given.semaphores->mutable_data_ptr());
  }
  return p;
}

struct CommitArguments {
  const Tensor& states;
  RingArguments rings;
  const Tensor &state_indices, &accepted_path, &accepted_len;
  bool fold;
  const OptionalTensor& report;
};

inline LinearCommit checked_commit(const char* op, const CommitArguments& given) {
  Dim batch("batch_size"), heads("num_heads"), key_dim("key_dim"), value_dim("value_dim"), drafts("drafts");
  const OptionalTensor elsewhere;
  LinearCommit p{};
  p.step = checked_states(op, {given.states, given.states, "states", given.state_indices, elsewhere}, batch, heads,
                          heads, key_dim, value_dim);
  p.path = checked_path(op, given.accepted_path, given.states, batch, drafts);
  p.accepted = checked_slots(op, "accepted_len", given.accepted_len, "states", given.states, batch);
  p.drafts = drafts.as_int();
  p.rings = checked_rings(op, p.step, given.rings, "states", given.states, p.drafts);
  p.step.heads_per_group = p.rings.num_groups == 0 ? 1 : p.step.num_heads / p.rings.num_groups;
  p.fold = given.fold;
  p.step.report = checked_report(op, given.report, "states", given.states);
  return p;
}

}  // namespace attnops
