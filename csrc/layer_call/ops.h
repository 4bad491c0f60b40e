#pragma once
#include "layer_call/mla.h"
#include "layer_call/xqa.h"

// The ops of this folder, the same for every device but for how a checked call runs: `Device` has prepare(Call&), once
// after the checks, and run(const Call&, int32_t device), for calls of either kind.
namespace attnops::layer_call {

template <class Device, class Bound>
const char* repeat(BoundHeader* header, uint64_t calls, void* const* addresses) {
  thread_local std::string problem;
  try {
    // The header is the first member of a standard-layout struct.
    const Bound& bound = *reinterpret_cast<const Bound*>(header);
    std::optional<decltype(bound.last)> call;
    {
      const BoundLock lock(*header);
      if (header->calls == calls) call.emplace(bound.last);
    }
    if (!call) return kOutdated;
    Device::run(moved(*call, addresses), header->device);
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

// Runs a checked call and keeps it, to be repeated.
template <class Device, class Bound, class Call>
void run_and_keep(Bound& bound, Call call) {
  Device::prepare(call);
  Device::run(call, bound.header.device);
  const BoundLock lock(bound.header);
  bound.last = call;
  __atomic_store_n(&bound.header.repeat, &repeat<Device, Bound>, __ATOMIC_RELEASE);
  __atomic_fetch_add(&bound.header.calls, 1, __ATOMIC_RELEASE);
}

inline void xqa_layer_bind(const Tensor& bound, const Tensor& out, const Tensor& q, const Tensor& k_pages,
                           const Tensor& v_pages, const Tensor& page_table, const Tensor& cache_seqlens,
                           const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& out_partial,
                           const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale, bool causal,
                           int64_t window_left, double logit_cap, int64_t fixed_split_tokens,
                           const OptionalTensor& report, int64_t tree_keys, bool heads_first) {
  write_bound<XqaBound>(kXqaLayer, bound, device_of(q),
                        xqa_decode::checked_params({.out = out,
                                                    .q = q,
                                                    .k_pages = k_pages,
                                                    .v_pages = v_pages,
                                                    .page_table = page_table,
                                                    .cache_seqlens = cache_seqlens,
                                                    .tile_scheduler_metadata = tile_scheduler_metadata,
                                                    .num_splits = num_splits,
                                                    .out_partial = out_partial,
                                                    .lse_partial = lse_partial,
                                                    .semaphores = semaphores,
                                                    .softmax_scale = softmax_scale,
                                                    .causal = causal,
                                                    .window_left = window_left,
                                                    .logit_cap = logit_cap,
                                                    .fixed_split_tokens = fixed_split_tokens,
                                                    .report = report,
                                                    .tree_keys = tree_keys}))
      .heads_first = heads_first;
}

inline void mla_layer_bind(const Tensor& bound, const Tensor& out, const Tensor& q, const OptionalTensor& q_pe,
                           const Tensor& kv_pages, const Tensor& page_table, const Tensor& cache_seqlens,
                           const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& out_partial,
                           const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale, bool causal,
                           int64_t window_left, double logit_cap, int64_t fixed_split_tokens,
                           const OptionalTensor& report, bool fp8_products, int64_t tree_keys) {
  write_bound<MlaBound>(kMlaLayer, bound, device_of(q),
                        mla_decode::checked_params({.out = out,
                                                    .q = q,
                                                    .q_pe = q_pe,
                                                    .kv_pages = kv_pages,
                                                    .page_table = page_table,
                                                    .cache_seqlens = cache_seqlens,
                                                    .tile_scheduler_metadata = tile_scheduler_metadata,
                                                    .num_splits = num_splits,
                                                    .out_partial = out_partial,
                                                    .lse_partial = lse_partial,
                                                    .semaphores = semaphores,
                                                    .softmax_scale = softmax_scale,
                                                    .causal = causal,
                                                    .window_left = window_left,
                                                    .logit_cap = logit_cap,
                                                    .fixed_split_tokens = fixed_split_tokens,
                                                    .report = report,
                                                    .fp8_products = fp8_products,
                                                    .tree_keys = tree_keys}));
}

template <class Device>
void xqa_layer(const Tensor& out, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v,
               const OptionalTensor& out_cache_loc, const Tensor& cache_seqlens, const OptionalTensor& tree_mask,
               const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
               const Tensor& bound_bytes) {
  XqaBound& bound = checked_bound<XqaBound>(kXqaLayer, bound_bytes, q);
  run_and_keep<Device>(
      bound, checked_call(XqaArguments{out, q, k, v, out_cache_loc, cache_seqlens, tree_mask, sinks, k_scale, v_scale},
                          bound));
}

template <class Device>
void xqa_pages_layer(const Tensor& out, const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                     const Tensor& page_table, const Tensor& cache_seqlens, const OptionalTensor& tree_mask,
                     const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                     const Tensor& bound_bytes) {
  XqaBound& bound = checked_bound<XqaBound>(kXqaPagesLayer, bound_bytes, q);
  run_and_keep<Device>(bound, checked_call(XqaPagesArguments{out, q, k_pages, v_pages, page_table, cache_seqlens,
                                                             tree_mask, sinks, k_scale, v_scale},
                                           bound));
}

template <class Device>
void mla_layer(const Tensor& out, const Tensor& q, const OptionalTensor& q_pe, const OptionalTensor& latent,
               const OptionalTensor& k_pe, const OptionalTensor& out_cache_loc, const Tensor& cache_seqlens,
               const OptionalTensor& tree_mask, const OptionalTensor& sinks, const OptionalTensor& kv_scale,
               const Tensor& bound_bytes) {
  MlaBound& bound = checked_bound<MlaBound>(kMlaLayer, bound_bytes, q);
  run_and_keep<Device>(bound, checked_call(MlaArguments{out, q, q_pe, latent, k_pe, out_cache_loc, cache_seqlens,
                                                        tree_mask, sinks, kv_scale},
                                           bound));
}

}  // namespace attnops::layer_call
