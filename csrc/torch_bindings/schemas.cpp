#include <torch/csrc/stable/library.h>

// Every op of attnops, on one page. (x!) marks what an op writes; nothing else is touched, allocated or synchronized.
// `report` is the checked mode's buffer (core/report.h), absent in production.
STABLE_TORCH_LIBRARY(attnops, m) {
  // Name of the instruction set that CPU kernels run with now: cpu/isa.h.
  m.def("cpu_isa() -> str");
  // Lines "op row count" of the kernel tables of this module, and of _C_cuda: core/impl_table.h.
  m.def("impl_counts() -> str");
  m.def("impl_counts_cuda() -> str");
  // Architectures that _C_cuda has kernels of, with spaces between them.
  m.def("cuda_archs() -> str");

  // merge_state/
  m.def("merge_state(Tensor(a!) out, Tensor(b!) lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()");
  m.def("merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses) -> ()");

  // paged_kv/
  m.def(
      "build_page_table(Tensor(a!) page_table, Tensor req_to_token, Tensor req_pool_indices, Tensor cache_seqlens, "
      "int page_size, Tensor? slot_map=None, Tensor(b!)? report=None) -> ()");
  m.def(
      "build_kv_indices(Tensor(a!) kv_indptr, Tensor(b!) kv_indices, Tensor(c!)? kv_last_page_len, Tensor "
      "req_to_token, "
      "Tensor req_pool_indices, Tensor cache_seqlens, int page_size, Tensor? slot_map=None, Tensor(d!)? report=None, "
      "Tensor? kv_start_idx=None) -> ()");
  m.def("build_cu_seqlens(Tensor(a!) cu_seqlens, Tensor seqlens) -> ()");
  m.def("translate_slots(Tensor(a!) out, Tensor slots, Tensor slot_map, Tensor(b!)? report=None) -> ()");
  m.def(
      "store_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor out_cache_loc, "
      "Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? report=None) -> ()");
  m.def(
      "store_mla_kv(Tensor(a!) kv_pages, Tensor latent, Tensor? k_pe, Tensor out_cache_loc, Tensor? kv_scale=None, "
      "Tensor(b!)? report=None) -> ()");

  // fp4_kv/
  m.def(
      "store_kv_fp4(Tensor(a!) k_pages, Tensor(b!)? v_pages, Tensor(c!) k_block_scales, Tensor(d!)? v_block_scales, "
      "Tensor k, Tensor? v, Tensor out_cache_loc, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(e!)? report=None) "
      "-> ()");
  m.def(
      "fp4_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_pages, Tensor? v_pages, Tensor k_block_scales, "
      "Tensor? v_block_scales, Tensor page_table, Tensor? kv_indptr, Tensor cache_seqlens, float softmax_scale, "
      "int window_left=-1, float logit_cap=0.0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
      "Tensor(c!)? report=None, Tensor(d!)? out_partial=None, Tensor(e!)? lse_partial=None) -> ()");

  // context_parallel/
  m.def(
      "context_parallel_seqlens(Tensor(a!) local_seqlens, Tensor seqlens, int rank, int world_size, int interleave=1, "
      "int tokens_per_request=1) -> ()");
  m.def(
      "context_parallel_slots(Tensor(a!) local_slots, Tensor slots, int rank, int world_size, int interleave=1) -> ()");

  // local_batches/
  m.def(
      "build_local_batches(Tensor(a!) local_cu_seqlens_q, Tensor(b!) local_cache_seqlens, Tensor(c!) local_page_table, "
      "Tensor cu_seqlens_q, Tensor cache_seqlens, Tensor page_table, int page_size, int chunk_size) -> ()");

  // block_lists/
  m.def(
      "build_block_tables(Tensor(a!) block_tables, Tensor(b!) block_seqlens, Tensor block_list, Tensor page_table, "
      "Tensor? kv_indptr, Tensor cache_seqlens, Tensor? cu_seqlens_q, int page_size, int num_pages, int block_size, "
      "int page_step, int unit_step, int head_step, bool causal=True, Tensor(c!)? report=None, int window_left=-1) -> "
      "()");
  m.def(
      "label_scores(Tensor(a!) scores, Tensor q_labels, Tensor label_pages, Tensor page_table, Tensor cache_seqlens, "
      "Tensor(b!)? report=None) -> ()");

  // speculation/
  m.def(
      "build_draft_tree(Tensor(a!) tree_mask, Tensor(b!) positions, Tensor(c!) retrieve_index, "
      "Tensor(d!) retrieve_next_token, Tensor(e!) retrieve_next_sibling, Tensor(f!)? tokens, Tensor parent_list, "
      "Tensor top_scores_index, Tensor? draft_tokens, Tensor? bonus_tokens, Tensor cache_seqlens, int topk, "
      "Tensor(g!)? report=None) -> ()");
  m.def(
      "verify_tree_greedy(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
      "Tensor candidates, Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
      "Tensor target_predict, Tensor(d!)? report=None) -> ()");
  m.def(
      "verify_tree_sampling(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
      "Tensor candidates, Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
      "Tensor uniform_samples, Tensor uniform_samples_final, Tensor target_probs, Tensor? draft_probs=None, "
      "float threshold_single=1.0, float threshold_acc=1.0, Tensor(d!)? report=None) -> ()");
  m.def(
      "move_kv(Tensor accept_index, Tensor out_cache_loc, Tensor(a!)[] pages, Tensor(b!)[] window_pages, "
      "Tensor? slot_map=None, Tensor(c!)? req_to_token=None, Tensor? req_pool_indices=None, "
      "Tensor? cache_seqlens=None, Tensor(d!)? report=None) -> ()");
  m.def(
      "copy_page_tail(Tensor req_to_token, Tensor req_pool_indices, Tensor cache_seqlens, Tensor(a!)[] pages, "
      "Tensor(b!)[] window_pages, int topk, int draft_steps, Tensor? slot_map=None, Tensor(c!)? report=None) -> ()");
  m.def(
      "generate_draft_decode_kv_indices(Tensor(a!) kv_indptr, Tensor(b!) kv_indices, Tensor req_to_token, "
      "Tensor req_pool_indices, Tensor cache_seqlens, int topk, int draft_steps, int page_size, "
      "Tensor(c!)? report=None) -> ()");
  m.def(
      "pack_tree_mask(Tensor(a!) tree_mask, Tensor mask, int layout, Tensor? mask_indptr=None, "
      "Tensor(b!)? report=None) -> ()");

  // sparse_indexer/
  m.def(
      "store_index_k(Tensor(a!) index_pages, Tensor k, Tensor out_cache_loc, bool hadamard=True, bool ue8m0=False, "
      "Tensor(b!)? report=None) -> ()");
  m.def(
      "quantize_index_q(Tensor(a!) q_fp8, Tensor(b!) weights_out, Tensor q, Tensor weights, float scale, "
      "bool hadamard=True, bool ue8m0=False) -> ()");
  m.def(
      "gather_index_k(Tensor(a!) k, Tensor(b!) k_scale, Tensor index_pages, Tensor page_table, Tensor cu_seqlens_k, "
      "Tensor(c!)? report=None) -> ()");
  m.def(
      "index_logits_paged(Tensor(a!) logits, Tensor q, Tensor index_pages, Tensor page_table, Tensor weights, "
      "Tensor cache_seqlens, Tensor(b!)? report=None) -> ()");
  m.def(
      "index_logits(Tensor(a!) logits, Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor k_start, "
      "Tensor k_end, bool compressed=False, Tensor(b!)? report=None) -> ()");
  m.def(
      "index_topk(Tensor(a!) indices, Tensor(b!)? positions, Tensor q, Tensor index_pages, Tensor page_table, "
      "Tensor weights, Tensor cache_seqlens, Tensor(c!) scratch, Tensor(d!)? report=None, "
      "Tensor? k_start=None) -> ()");
  m.def(
      "expand_rows(Tensor(a!) seqlens, Tensor(b!) rows, Tensor(c!) topk_length, Tensor cache_seqlens, "
      "Tensor cu_seqlens_q, int topk, int ratio=1, Tensor(d!)? report=None) -> ()");
  m.def(
      "topk_select(Tensor(a!) indices, Tensor(b!)? positions, Tensor logits, Tensor lengths, Tensor? row_starts=None, "
      "Tensor? page_table=None, Tensor? row_to_request=None, int page_size=1, Tensor? offsets=None, "
      "Tensor(c!)? report=None) -> ()");

  // compressed_kv/
  m.def(
      "compress_plan(Tensor(a!) entry_indptr, Tensor cache_seqlens, Tensor cu_seqlens_q, int ratio, "
      "Tensor(b!)? report=None) -> ()");
  m.def(
      "compress_kv(Tensor(a!) kv_pages, Tensor(b!) state, Tensor kv_score, Tensor ape, Tensor norm_weight, "
      "Tensor cos_sin, Tensor page_table, Tensor state_indices, Tensor cache_seqlens, Tensor cu_seqlens_q, "
      "Tensor entry_indptr, int ratio, float eps=1e-6, bool interleaved=True, bool hadamard=True, bool ue8m0=False, "
      "Tensor(c!)? report=None) -> ()");

  // xqa_decode/
  m.def(
      "xqa_decode_plan(Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, Tensor cache_seqlens, int seqlen_q, "
      "int num_kv_heads, int window_left=-1, int fixed_split_tokens=0, int rows=1, "
      "int kv_bytes=2) -> ()");
  m.def(
      "xqa_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, "
      "Tensor? kv_indptr, Tensor cache_seqlens, Tensor tile_scheduler_metadata, Tensor num_splits, "
      "Tensor(c!) out_partial, Tensor(d!) lse_partial, Tensor(e!) semaphores, float softmax_scale, bool causal=True, "
      "int window_left=-1, float logit_cap=0.0, Tensor? sinks=None, Tensor? tree_mask=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, int fixed_split_tokens=0, Tensor(f!)? report=None, int tree_keys=0, "
      "Tensor? cu_seqlens_q=None, int max_seqlen_q=0, Tensor? table_rows=None) -> ()");
  m.def(
      "xqa_decode_chunks(Tensor(a!) chunks, Tensor cu_seqlens_q, Tensor cache_seqlens, int chunk_tokens, "
      "bool causal=True) -> ()");

  // mla_decode/
  m.def(
      "mla_decode_plan(Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, Tensor cache_seqlens, int seqlen_q, "
      "int num_q_heads, int window_left=-1, int fixed_split_tokens=0) -> ()");
  m.def(
      "mla_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor? q_pe, Tensor kv_pages, Tensor page_table, "
      "Tensor? kv_indptr, Tensor cache_seqlens, Tensor tile_scheduler_metadata, Tensor num_splits, "
      "Tensor(c!) out_partial, Tensor(d!) lse_partial, Tensor(e!) semaphores, float softmax_scale, bool causal=True, "
      "int window_left=-1, float logit_cap=0.0, Tensor? sinks=None, Tensor? tree_mask=None, Tensor? kv_scale=None, "
      "int fixed_split_tokens=0, Tensor(f!)? report=None, bool fp8_products=False, int tree_keys=0) -> ()");

  // sparse_mla/: rows that a list per query token selects. It joins mla_decode, whose kernels these are.
  m.def(
      "sparse_mla_plan(Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, Tensor? topk_length, "
      "Tensor? extra_topk_length, int topk, int extra_topk, int seqlen_q, int num_q_heads, int fixed_split_tokens=0) "
      "-> ()");
  m.def(
      "sparse_mla_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor? q_pe, Tensor kv_pages, Tensor indices, "
      "Tensor? topk_length, Tensor? extra_kv_pages, Tensor? extra_indices, Tensor? extra_topk_length, "
      "Tensor tile_scheduler_metadata, Tensor num_splits, Tensor(c!) out_partial, Tensor(d!) lse_partial, "
      "Tensor(e!) semaphores, float softmax_scale, Tensor? sinks=None, int fixed_split_tokens=0, "
      "Tensor(f!)? report=None, bool rounded_keys=False) -> ()");
  m.def(
      "sparse_mla_prefill(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? max_logits, Tensor q, Tensor? q_pe, Tensor kv, "
      "Tensor indices, Tensor? topk_length, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, "
      "float softmax_scale, Tensor? sinks=None, Tensor(d!)? report=None, Tensor? head_masks=None, "
      "int head_groups=1, Tensor(e!)? scratch=None) -> ()");
  m.def(
      "share_lists(Tensor(a!) shared, Tensor(b!) masks, Tensor(c!) shared_length, Tensor indices, "
      "Tensor? topk_length, int together) -> ()");

  // layer_call/: store and attend in one call, of what a layer's calls share and bound before. `bound` holds addresses,
  // so these write pages and scratch that are none of their arguments: for opaque callers only, not for traced code.
  m.def(
      "_xqa_layer_bind(Tensor(a!) bound, Tensor out, Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, "
      "Tensor cache_seqlens, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor out_partial, "
      "Tensor lse_partial, Tensor semaphores, float softmax_scale, bool causal=True, int window_left=-1, "
      "float logit_cap=0.0, int fixed_split_tokens=0, Tensor? report=None, int tree_keys=0, "
      "bool heads_first=False) -> ()");
  m.def(
      "xqa_layer(Tensor(a!) out, Tensor q, Tensor? k, Tensor? v, Tensor? out_cache_loc, Tensor cache_seqlens, "
      "Tensor? tree_mask, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor(b!) bound) -> ()");
  m.def(
      "xqa_pages_layer(Tensor(a!) out, Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, "
      "Tensor cache_seqlens, Tensor? tree_mask, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
      "Tensor(b!) bound) -> ()");
  m.def(
      "_mla_layer_bind(Tensor(a!) bound, Tensor out, Tensor q, Tensor? q_pe, Tensor kv_pages, Tensor page_table, "
      "Tensor cache_seqlens, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor out_partial, "
      "Tensor lse_partial, Tensor semaphores, float softmax_scale, bool causal=True, int window_left=-1, "
      "float logit_cap=0.0, int fixed_split_tokens=0, Tensor? report=None, "
      "bool fp8_products=False, int tree_keys=0) -> ()");
  m.def(
      "mla_layer(Tensor(a!) out, Tensor q, Tensor? q_pe, Tensor? latent, Tensor? k_pe, Tensor? out_cache_loc, "
      "Tensor cache_seqlens, Tensor? tree_mask, Tensor? sinks, Tensor? kv_scale, Tensor(b!) bound) -> ()");

  // fmha/
  m.def(
      "fmha_plan(Tensor(a!) tile_order, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cache_seqlens, int tile_q, "
      "bool causal=True, int window_left=-1, Tensor(b!)? pieces=None, int works_per_tile=1, "
      "int num_sms=0, bool cut_in_part=True) -> ()");
  m.def(
      "fmha_varlen(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, Tensor tile_order, int tile_q, float softmax_scale, bool causal=True, int window_left=-1, "
      "int window_right=-1, float logit_cap=0.0, Tensor? sinks=None, Tensor? tree_mask=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, Tensor(c!)? report=None, Tensor(d!)? semaphores=None, Tensor? pieces=None, "
      "Tensor(e!)? partial=None, Tensor? hidden_keys=None) -> ()");
  m.def(
      "fmha_paged(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, "
      "Tensor? kv_indptr, Tensor cache_seqlens, Tensor cu_seqlens_q, Tensor tile_order, int tile_q, float "
      "softmax_scale, "
      "bool causal=True, int window_left=-1, int window_right=-1, float logit_cap=0.0, Tensor? sinks=None, "
      "Tensor? tree_mask=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? report=None, Tensor(d!)? "
      "semaphores=None, Tensor? pieces=None, Tensor(e!)? partial=None, Tensor? hidden_keys=None) -> ()");

  // delta_rule/, ssd/: one token per request through a recurrence, with states in slots of a pool
  m.def(
      "delta_decode(Tensor(a!) out, Tensor(b!) states, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
      "Tensor? A_log, Tensor? dt_bias, Tensor state_indices, Tensor? out_state_indices, float scale, "
      "float lower_bound=0.0, bool qk_l2norm=True, Tensor(c!)? report=None) -> ()");
  m.def(
      "delta_conv_decode(Tensor(a!) out, Tensor(b!) states, Tensor(c!) conv_states, Tensor x, Tensor weight, "
      "Tensor? bias, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, Tensor state_indices, int num_k_heads, "
      "bool silu, float scale, float lower_bound=0.0, bool qk_l2norm=True, Tensor(d!)? mixed=None, "
      "Tensor(e!)? report=None) -> ()");
  m.def(
      "ssd_conv_decode(Tensor(a!) out, Tensor(b!) states, Tensor(c!) conv_states, Tensor x, Tensor weight, "
      "Tensor? bias, Tensor? dt, Tensor A, Tensor? D, Tensor? dt_bias, Tensor? z, Tensor state_indices, "
      "int num_groups, bool silu, float scale=1.0, bool dt_softplus=False, Tensor(d!)? mixed=None, "
      "Tensor(e!)? report=None) -> ()");
  m.def(
      "ssd_decode(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor? dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? dt_bias, Tensor? z, Tensor state_indices, Tensor? out_state_indices, float scale=1.0, "
      "bool dt_softplus=False, Tensor(c!)? report=None) -> ()");
  m.def(
      "delta_prefill(Tensor(a!) out, Tensor(b!) states, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
      "Tensor? A_log, Tensor? dt_bias, Tensor cu_seqlens, Tensor prefix_lens, Tensor state_indices, "
      "Tensor? checkpoint_slots, Tensor? plan, Tensor(c!)? scratch, float scale, float lower_bound=0.0, "
      "bool qk_l2norm=True, Tensor(d!)? report=None, bool cut_prompts=False) -> ()");
  m.def(
      "ssd_prefill(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor? dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? dt_bias, Tensor? z, Tensor cu_seqlens, Tensor prefix_lens, Tensor state_indices, "
      "Tensor? checkpoint_slots, Tensor? plan, Tensor(c!)? scratch, float scale=1.0, bool dt_softplus=False, "
      "Tensor(d!)? report=None, bool cut_prompts=False) -> ()");
  m.def(
      "delta_verify(Tensor(a!) out, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, Tensor states, "
      "Tensor ring_len, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, "
      "Tensor state_indices, Tensor? tree_mask, float scale, float lower_bound=0.0, bool qk_l2norm=True, "
      "Tensor(e!)? report=None) -> ()");
  m.def(
      "ssd_verify(Tensor(a!) out, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, Tensor states, "
      "Tensor ring_len, Tensor x, Tensor? dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? z, "
      "Tensor state_indices, Tensor? tree_mask, float scale=1.0, bool dt_softplus=False, Tensor(e!)? report=None) -> "
      "()");
  m.def(
      "delta_commit(Tensor(a!) states, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, "
      "Tensor(e!) ring_len, Tensor state_indices, Tensor accepted_path, Tensor accepted_len, bool fold=False, "
      "Tensor(f!)? report=None) -> ()");
  m.def(
      "ssd_commit(Tensor(a!) states, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, "
      "Tensor(e!) ring_len, Tensor state_indices, Tensor accepted_path, Tensor accepted_len, bool fold=False, "
      "Tensor(f!)? report=None) -> ()");
  m.def(
      "delta_draft_step(Tensor(a!) out, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, "
      "Tensor(e!) states, Tensor(f!) ring_len, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, "
      "Tensor? dt_bias, Tensor state_indices, Tensor accepted_path, Tensor accepted_len, Tensor? tree_mask, "
      "float scale, float lower_bound=0.0, bool qk_l2norm=True, Tensor(g!)? semaphores=None, "
      "Tensor(h!)? report=None) -> ()");
  m.def(
      "ssd_draft_step(Tensor(a!) out, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_decay, "
      "Tensor(e!) states, Tensor(f!) ring_len, Tensor x, Tensor? dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? dt_bias, Tensor? z, Tensor state_indices, Tensor accepted_path, Tensor accepted_len, "
      "Tensor? tree_mask, float scale=1.0, bool dt_softplus=False, Tensor(g!)? semaphores=None, "
      "Tensor(h!)? report=None) -> ()");
  m.def("delta_plan(Tensor(a!) plan, Tensor cu_seqlens) -> ()");
  m.def("ssd_plan(Tensor(a!) plan, Tensor cu_seqlens) -> ()");

  // causal_conv1d/
  m.def(
      "causal_conv1d(Tensor(a!) out, Tensor(b!) conv_states, Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, "
      "Tensor state_indices, Tensor? has_initial_state=None, bool silu=True, Tensor(c!)? report=None) -> ()");
  m.def(
      "causal_conv1d_update(Tensor(a!) out, Tensor(b!) conv_states, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor state_indices, bool silu=True, Tensor(c!)? report=None, Tensor(d!)? windows=None, "
      "Tensor? tree_mask=None) -> ()");

  // linear_state/
  m.def("copy_states(Tensor(a!) states, Tensor src, Tensor dst, Tensor(b!)? report=None, Tensor? source=None) -> ()");
  m.def("clear_states(Tensor(a!) states, Tensor slots, Tensor(b!)? report=None) -> ()");
}
