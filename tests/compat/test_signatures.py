"""Names and positions of arguments are the peers', read off their sources: a call by position means what it meant."""

from __future__ import annotations

import inspect

import pytest
from attnops.compat import (
    causal_conv1d,
    deep_gemm,
    fla,
    flash_attn,
    flash_attn_interface,
    flash_mla,
    flashinfer,
    sgl_kernel,
)

# Positional arguments, in order. FlashInfer 0.7.2, the upstream FA3 and FlashMLA, sgl_kernel 0.3.21.
POSITIONAL = {
    flashinfer.merge_state: "v_a s_a v_b s_b",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__: """float_workspace_buffer kv_layout use_cuda_graph
        use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer
        backend jit_args""",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan: """indptr indices last_page_len num_qo_heads num_kv_heads
        head_dim page_size""",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.run: "q paged_kv_cache",
    flashinfer.trtllm_batch_decode_with_kv_cache: """query kv_cache workspace_buffer block_tables seq_lens
        max_seq_len bmm1_scale bmm2_scale window_left out out_dtype o_sf_scale o_sf_vec_size sinks kv_layout
        enable_pdl backend q_len_per_req o_scale mask max_q_len cum_seq_lens_q skip_softmax_threshold_scale_factor
        kv_cache_sf uses_shared_paged_kv_idx lse return_lse bmm1_scale_log2 multi_ctas_kv_counter_buffer
        enable_block_sparse_attention bf16q_fp8kv_transform_mode""",
    flashinfer.xqa: """q k_cache v_cache page_table seq_lens output
        workspace_buffer semaphores num_kv_heads page_size sinks q_scale kv_scale sliding_win_size kv_layout sm_count
        enable_pdl rcp_out_scale q_seq_len mask""",
    flashinfer.BatchMLAPagedAttentionWrapper.__init__: """float_workspace_buffer use_cuda_graph qo_indptr kv_indptr
        kv_indices kv_len_arr backend""",
    flashinfer.BatchMLAPagedAttentionWrapper.plan: """qo_indptr kv_indptr kv_indices kv_len_arr num_heads
        head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type use_profiler""",
    flashinfer.BatchMLAPagedAttentionWrapper.run: """q_nope q_pe ckv_cache kpe_cache out lse return_lse
        profiler_buffer kv_len page_table return_lse_base_on_e o_scale""",
    flashinfer.trtllm_batch_decode_with_kv_cache_mla: """query kv_cache workspace_buffer qk_nope_head_dim
        kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale
        sinks skip_softmax_threshold_scale_factor enable_pdl backend is_var_seq uses_shared_paged_kv_idx lse
        return_lse cute_dsl_impl kv_scale_format cum_seq_lens_q max_q_len multi_ctas_kv_counter_buffer
        sparse_mla_top_k_lens enable_dcp cp_world cp_rank causal_seqlens_kv_global use_fp16_softmax""",
    flash_attn_interface.flash_attn_with_kvcache: """q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens
        cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale
        k_descale v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved
        scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse""",
    flash_attn_interface.flash_attn_varlen_func: """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k
        seqused_q seqused_k softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap
        num_splits pack_gqa deterministic sm_margin return_attn_probs""",
    flash_attn_interface.flash_attn_func: """q k v softmax_scale causal qv q_descale k_descale v_descale window_size
        attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs""",
    flash_attn_interface.get_scheduler_metadata: """batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv
        headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size
        max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits pack_gqa sm_margin""",
    flash_mla.get_mla_metadata: "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q is_fp8_kvcache topk",
    flash_mla.flash_mla_with_kvcache: """q k_cache block_table cache_seqlens head_dim_v
        tile_scheduler_metadata num_splits softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache
        extra_indices_in_kvcache topk_length extra_topk_length""",
    flash_mla.flash_mla_sparse_fwd: "q kv indices sm_scale d_v attn_sink topk_length",
    sgl_kernel.flash_mla.flash_mla_sparse_fwd: "q kv indices sm_scale d_v attn_sink topk_length",
    sgl_kernel.merge_state_v2: "v_a s_a v_b s_b v_merged s_merged",
    sgl_kernel.fast_topk_v2: "score lengths topk row_starts",
    sgl_kernel.fast_topk_transform_fused: "score lengths page_table_size_1 cu_seqlens_q topk row_starts",
    sgl_kernel.fast_topk_transform_ragged_fused: "score lengths topk_indices_offset topk row_starts",
    flashinfer.top_k_page_table_transform: """input src_page_table lengths k row_to_batch deterministic tie_break
        dsa_graph_safe row_starts page_table_row_starts""",
    flashinfer.top_k_ragged_transform: "input offsets lengths k deterministic tie_break dsa_graph_safe row_starts",
    deep_gemm.fp8_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k",
    deep_gemm.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms",
    deep_gemm.fp8_paged_mqa_logits: """q fused_kv_cache weights context_lens block_table schedule_meta
        max_context_len clean_logits""",
    flashinfer.gated_delta_rule_decode_pretranspose: """q k v state A_log a dt_bias b scale output use_qk_l2norm
        initial_state initial_state_indices output_state_indices intermediate_states_buffer disable_state_update
        backend""",
    flashinfer.gated_delta_rule_decode: "q k v state A_log a dt_bias b scale output use_qk_l2norm backend",
    flashinfer.gated_delta_rule_mtp: """q k v initial_state initial_state_indices A_log a dt_bias b scale output
        intermediate_states_buffer ssm_state_indices disable_state_update use_qk_l2norm output_state_indices
        cache_replayssm replayssm_rawv replayssm_rawk replayssm_g replayssm_beta""",
    flashinfer.chunk_gated_delta_rule: """q k v g beta scale initial_state output_final_state cu_seqlens
        use_qk_l2norm_in_kernel output output_state state_checkpoints checkpoint_cu_starts checkpoint_every_n_tokens
        use_cp state_indices _cp_chunk_len backend max_seqlen""",
    flashinfer.selective_state_update: """state x dt A B C D z dt_bias dt_softplus state_batch_indices pad_slot_id
        state_scale out disable_state_update intermediate_states_buffer intermediate_state_indices
        intermediate_state_scales rand_seed philox_rounds cache_steps algorithm dst_state_batch_indices cu_seqlens
        num_accepted_tokens backend""",
    fla.chunk_gated_delta_rule: "q k v g beta scale initial_state output_final_state",
    fla.fused_recurrent_gated_delta_rule: """q k v g gk gv beta scale initial_state output_final_state
        use_qk_l2norm_in_kernel""",
    fla.chunk_kda: """q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
        use_beta_sigmoid_in_kernel""",
    causal_conv1d.causal_conv1d_fn: """x weight bias seq_idx initial_states return_final_states final_states_out
        activation""",
    causal_conv1d.causal_conv1d_update: "x conv_state weight bias activation cache_seqlens conv_state_indices",
    sgl_kernel.cutlass_mla_get_workspace_size: "max_seq_len num_batches sm_count num_kv_splits",
    sgl_kernel.cutlass_mla_decode: """q_nope q_pe kv_c_and_k_pe_cache seq_lens page_table
        workspace sm_scale num_kv_splits""",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.forward: """q paged_kv_cache pos_encoding_mode q_scale k_scale
        v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta""",
    flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__: """workspace_buffer indptr_buffer indices_buffer
        last_page_len_buffer kv_layout use_tensor_cores""",
    flashinfer.fast_decode_plan: """indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size
        pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale rope_scale rope_theta
        non_blocking fixed_split_size disable_split_kv q_len_per_req global_override_indptr_cpu""",
    flashinfer.single_decode_with_kv_cache: """q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale
        v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta return_lse""",
    flashinfer.xqa_batch_decode_with_kv_cache: """query kv_cache workspace_buffer block_tables seq_lens max_seq_len
        bmm1_scale bmm2_scale window_left out sinks kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf
        q_cu_seq_lens""",
    flashinfer.cudnn_batch_decode_with_kv_cache: "q k_cache v_cache scale workspace_buffer",
    flashinfer.cudnn_batch_prefill_with_kv_cache: "q k_cache v_cache scale workspace_buffer",
    flashinfer.trtllm_batch_context_with_kv_cache: """query kv_cache workspace_buffer block_tables seq_lens max_q_len
        max_kv_len bmm1_scale bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale
        o_sf_vec_size kv_layout enable_pdl sinks kv_cache_sf skip_softmax_threshold_scale_factor
        uses_shared_paged_kv_idx causal lse return_lse multi_ctas_kv_counter_buffer use_fp16_softmax uses_spcompress""",
    flashinfer.trtllm_fmha_v2_prefill: """qkv input_layout workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale
        bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv block_tables out out_dtype sinks pos_encoding_mode
        logits_soft_cap_scale mask_mode window_left chunked_attention_size save_softmax_stats
        skip_softmax_threshold_scale_factor""",
    flashinfer.trtllm_ragged_attention_deepseek: """query key value workspace_buffer seq_lens max_q_len max_kv_len
        bmm1_scale bmm2_scale o_sf_scale batch_size window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal
        return_lse attention_sinks skip_softmax_threshold_scale_factor out lse sage_attn_sfs num_elts_per_sage_attn_blk
        backend q_seq_lens_cpu kv_seq_lens_cpu use_fp16_softmax uses_spcompress""",
    flashinfer.xqa_batch_decode_with_kv_cache_mla: """query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank
        qk_rope_head_dim block_tables seq_lens max_seq_len out bmm1_scale bmm2_scale sinks enable_pdl""",
    flashinfer.xqa_mla: """q k_cache v_cache page_table seq_lens output workspace_buffer semaphores page_size q_scale
        kv_scale sm_count enable_pdl""",
    flashinfer.append_paged_kv_cache: """append_key append_value batch_indices positions paged_kv_cache
        kv_indices
        kv_indptr kv_last_page_len kv_layout""",
    flashinfer.append_paged_mla_kv_cache: """append_ckv append_kpe batch_indices positions ckv_cache kpe_cache
        kv_indices
        kv_indptr kv_last_page_len""",
    flashinfer.get_batch_indices_positions: "append_indptr seq_lens nnz batch_indices positions",
    flashinfer.get_seq_lens: "kv_indptr kv_last_page_len page_size",
    flashinfer.merge_state_in_place: "v s v_other s_other mask",
    flashinfer.merge_states: "v s",
    flashinfer.BlockSparseAttentionWrapper.plan: """indptr indices M N R C num_qo_heads num_kv_heads head_dim mask
        packed_mask causal pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta
        q_data_type kv_data_type o_data_type non_blocking block_mask""",
    flashinfer.BlockSparseAttentionWrapper.run: "q k v scale_q scale_k scale_v out lse return_lse enable_pdl",
    flashinfer.VariableBlockSparseAttentionWrapper.plan: """block_mask_map block_row_sz block_col_sz num_qo_heads
        num_kv_heads head_dim causal pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale
        rope_theta non_blocking q_data_type kv_data_type""",
    flashinfer.BlockSparseAttentionWrapper.forward: """q k v scale_q scale_k scale_v pos_encoding_mode
        use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta""",
    flashinfer.VariableBlockSparseAttentionWrapper.forward: """q k v pos_encoding_mode use_fp16_qk_reduction
        logits_soft_cap sm_scale rope_scale rope_theta""",
    flashinfer.VariableBlockSparseAttentionWrapper.run: "q k v out lse return_lse enable_pdl",
    flashinfer.BatchAttention.plan: """qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk
        head_dim_vo page_size causal sm_scale logits_soft_cap q_data_type kv_data_type use_profiler""",
    flashinfer.BatchAttention.run: "q kv_cache out lse k_scale v_scale logits_soft_cap profiler_buffer kv_cache_sf",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan: """qo_indptr paged_kv_indptr paged_kv_indices
        paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo custom_mask
        packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap
        rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr
        token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence
        max_sequence_kv fixed_split_size disable_split_kv""",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan: """qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk
        head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left
        logits_soft_cap sm_scale rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking
        prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr fixed_split_size
        disable_split_kv seq_lens seq_lens_q max_token_per_sequence max_sequence_kv v_indptr o_indptr""",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.forward: """q paged_kv_cache causal pos_encoding_mode
        use_fp16_qk_reduction k_scale v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta""",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.forward: """q k v causal pos_encoding_mode use_fp16_qk_reduction
        window_left logits_soft_cap sm_scale rope_scale rope_theta""",
    flashinfer.single_prefill_with_kv_cache: """q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask
        causal kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale
        rope_theta backend return_lse kv_cache_sf k_scale v_scale""",
    flashinfer.MultiLevelCascadeAttentionWrapper.plan: """qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr
        paged_kv_last_page_len num_qo_heads num_kv_heads head_dim page_size causal pos_encoding_mode
        use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type""",
    flash_attn_interface.flash_attn_combine: "out_partial lse_partial out out_dtype",
    flash_attn.flash_attn_func: """q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic
        return_attn_probs""",
    flash_attn.flash_attn_varlen_func: """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p
        softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table""",
    flash_attn.flash_attn_with_kvcache: """q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx
        cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits
        return_softmax_lse""",
    sgl_kernel.build_tree_kernel_efficient: """parent_list selected_index verified_seq_len tree_mask positions
        retrive_index retrive_next_token retrive_next_sibling topk depth draft_token_num tree_mask_mode""",
    sgl_kernel.verify_tree_greedy: """predicts accept_index accept_token_num candidates retrive_index
        retrive_next_token retrive_next_sibling target_predict""",
    sgl_kernel.tree_speculative_sampling_target_only: """predicts accept_index accept_token_num candidates retrive_index
        retrive_next_token retrive_next_sibling uniform_samples uniform_samples_for_final_sampling target_probs
        draft_probs threshold_single threshold_acc deterministic""",
    sgl_kernel.generate_draft_decode_kv_indices[1, 1, 1].func: """grid req_pool_indices req_to_token paged_kernel_lens
        kv_indices kv_indptr positions pool_len kv_indices_stride kv_indptr_stride bs_upper iter_upper num_tokens_upper
        page_size""",
    sgl_kernel.merge_state: "v_a s_a v_b s_b v_merged s_merged",
    sgl_kernel.flash_attn.flash_attn_varlen_func: """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q
        seqused_k page_table softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap
        num_splits pack_gqa only_qv sm_margin return_softmax_lse sinks out ver""",
    sgl_kernel.flash_attn.get_scheduler_metadata: """batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim
        cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size
        max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits pack_gqa sm_margin""",
    sgl_kernel.sparse_flash_attn.convert_vertical_slash_indexes: """q_seqlens kv_seqlens vertical_indexes slash_indexes
        context_size block_size_M block_size_N causal""",
    sgl_kernel.sparse_flash_attn.convert_vertical_slash_indexes_mergehead: """q_seqlens kv_seqlens vertical_indexes
        slash_indexes vertical_indices_count slash_indices_count context_size block_size_M block_size_N causal""",
    sgl_kernel.sparse_flash_attn.sparse_attn_func: """q k v block_count block_offset column_count column_index dropout_p
        softmax_scale causal softcap alibi_slopes deterministic return_attn_probs""",
    sgl_kernel.sparse_flash_attn.sparse_attn_varlen_func: """q k v block_count block_offset column_count column_index
        cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal softcap alibi_slopes
        deterministic return_attn_probs""",
    sgl_kernel.flash_mla.flash_mla_with_kvcache: """q k_cache block_table cache_seqlens head_dim_v
        tile_scheduler_metadata num_splits softmax_scale causal descale_q descale_k is_fp8_kvcache indices attn_sink
        extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length""",
}

KEYWORDS = {
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan: """pos_encoding_mode window_left logits_soft_cap q_data_type
        kv_data_type o_data_type sm_scale rope_scale rope_theta block_tables seq_lens fixed_split_size
        disable_split_kv q_len_per_req""",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.run: """q_scale k_scale v_scale out lse return_lse enable_pdl
        window_left sinks q_len_per_req""",
    flashinfer.xqa: "q_cu_seq_lens",
    flash_attn_interface.flash_attn_with_kvcache: "sinks out",
    flash_mla.get_mla_metadata: "num_heads_per_head_k",
    fla.chunk_gated_delta_rule: """use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first
        cu_seqlens cu_seqlens_cpu chunk_indices cp_context use_gate_in_kernel A_log dt_bias transpose_state_layout
        chunk_size""",
    fla.fused_recurrent_gated_delta_rule: """use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel
        allow_neg_eigval state_v_first cu_seqlens transpose_state_layout""",
    fla.chunk_kda: """allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first
        cu_seqlens cu_seqlens_cpu cp_context A_log dt_bias transpose_state_layout chunk_size""",
    flash_mla.flash_mla_with_kvcache: "descale_q descale_k",
}


def names(function, kind) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is kind and parameter.name != "self"]


@pytest.mark.parametrize("function", POSITIONAL, ids=lambda function: function.__qualname__)
def test_positional_arguments(function):
    assert names(function, inspect.Parameter.POSITIONAL_OR_KEYWORD) == POSITIONAL[function].split()


@pytest.mark.parametrize("function", KEYWORDS, ids=lambda function: function.__qualname__)
def test_arguments_by_keyword(function):
    assert set(KEYWORDS[function].split()) <= set(names(function, inspect.Parameter.KEYWORD_ONLY))
