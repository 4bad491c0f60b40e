"""Right calls of the functions of `attnops.compat.flashinfer` that `right_calls` does not hold."""

from __future__ import annotations

import types

import torch
from attnops.compat import flashinfer
from flashinfer_paging import csr

TYPES = {"q_data_type": torch.bfloat16}


def _on_cpu(problem) -> types.SimpleNamespace:
    return types.SimpleNamespace(cache_seqlens=problem.cache_seqlens.cpu(), page_table=problem.page_table.cpu())


def flashinfer_calls(gqa, mla, ragged, workspace, states) -> dict:
    """By the name that messages have; of small problems on any device."""
    (out, lse), (out_b, lse_b) = states
    device = gqa.q.device
    q_nope, q_pe, latent, rope = mla.q[..., :512], mla.q[..., 512:], mla.kv_pages[..., :512], mla.kv_pages[..., 512:]
    cache = (gqa.k_pages, gqa.v_pages)
    hnd = tuple(pages.transpose(1, 2) for pages in cache)
    indptr, indices, last = (tensor.to(device) for tensor in csr(_on_cpu(gqa), 16))
    mla_indptr, mla_indices, mla_last = (tensor.to(device) for tensor in csr(_on_cpu(mla), 64))
    bounds, count = gqa.cu_seqlens_q, gqa.q.shape[0]
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    prefill_heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, **TYPES}
    table = {"indptr": indptr, "indices": indices, "last_page_len": last}
    tables = {"block_tables": gqa.page_table, "seq_lens": gqa.cache_seqlens, "max_seq_len": 64}
    nowhere = {"workspace_buffer": workspace}
    made = {
        name: getattr(flashinfer, name)
        for name in (
            "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
            "BatchDecodeMlaWithPagedKVCacheWrapper",
            "MultiLevelCascadeAttentionWrapper",
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
            "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
            "BatchPrefillWithPagedKVCacheWrapper",
            "BatchPrefillWithRaggedKVCacheWrapper",
            "BatchAttention",
            "BlockSparseAttentionWrapper",
            "VariableBlockSparseAttentionWrapper",
            "BatchAttentionWithAttentionSinkWrapper",
        )
    }
    buffers = {"indptr_buffer": indptr.clone(), "indices_buffer": indices.clone(), "last_page_len_buffer": last.clone()}
    float_workspace = {"float_workspace_buffer": workspace}
    arguments = {name: float_workspace for name in made} | {
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": nowhere | buffers,
        "MultiLevelCascadeAttentionWrapper": {"num_levels": 1} | float_workspace,
        "BatchAttention": {"kv_layout": "NHD", "device": device},
    }
    plans = {
        "BatchDecodeMlaWithPagedKVCacheWrapper.plan": {
            "indptr": mla_indptr,
            "indices": mla_indices,
            "last_page_len": mla_last,
            "num_qo_heads": mla.q.shape[1],
            "head_dim_compressed_kv": 512,
            "page_size": 64,
            "sm_scale": 0.1,
            "data_type": torch.bfloat16,
        },
        "MultiLevelCascadeAttentionWrapper.plan": {
            "qo_indptr_arr": [bounds],
            "paged_kv_indptr_arr": [indptr],
            "paged_kv_indices_arr": [indices],
            "paged_kv_last_page_len": [last],
            **heads,
            **TYPES,
        },
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": {
            **{f"unique_kv_{name}": value for name, value in table.items()},
            **heads,
            "data_type": torch.bfloat16,
        },
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": {
            "qo_indptr": bounds,
            **{f"paged_kv_{name}": value for name, value in table.items()},
            **heads,
        },
        "BatchPrefillWithPagedKVCacheWrapper.plan": {
            "qo_indptr": bounds,
            **{f"paged_kv_{name}": value for name, value in table.items()},
            **prefill_heads,
            "page_size": 16,
        },
        "BatchPrefillWithRaggedKVCacheWrapper.plan": {
            "qo_indptr": ragged.cu_seqlens_q,
            "kv_indptr": ragged.cu_seqlens_k,
            **prefill_heads,
        },
        "BlockSparseAttentionWrapper.plan": {
            "indptr": torch.tensor([0, 1, 3], dtype=torch.int32, device=device),
            "indices": torch.tensor([1, 0, 1], dtype=torch.int32, device=device),
            **{"M": 5, "N": 6, "R": 3, "C": 3, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64},
            **TYPES,
            "o_data_type": torch.bfloat16,
        },
        "VariableBlockSparseAttentionWrapper.plan": {
            "block_mask_map": torch.ones(2, 1, 2, dtype=torch.bool, device=device),
            "block_row_sz": torch.full((2, 1), 5, device=device),
            "block_col_sz": torch.full((2, 2), 3, device=device),
            **{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64},
            **TYPES,
        },
        "BatchAttention.plan": {
            "qo_indptr": bounds,
            "kv_indptr": indptr,
            "kv_indices": indices,
            "kv_len_arr": gqa.cache_seqlens,
            "num_qo_heads": 8,
            "num_kv_heads": 2,
            "head_dim_qk": 64,
            "head_dim_vo": 64,
            "page_size": 16,
        },
    }
    paged, unpaged = {"q": gqa.q, "paged_kv_cache": cache}, {"q": ragged.q, "k": ragged.k, "v": ragged.v}
    shared = {"q": gqa.q, "k_shared": ragged.k[:9], "v_shared": ragged.v[:9], "unique_kv_cache": cache}
    blocks = {"q": ragged.q[:5], "k": ragged.k[:6], "v": ragged.v[:6]}
    by_head = {name: x.transpose(0, 1).contiguous() for name, x in blocks.items()}
    runs = {
        "BatchDecodeMlaWithPagedKVCacheWrapper.run": {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "paged_ckv_cache": latent,
            "paged_kpe_cache": rope,
        },
        "MultiLevelCascadeAttentionWrapper.run": {"q": gqa.q, "paged_kv_cache": cache},
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": shared,
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": shared,
        "BatchPrefillWithPagedKVCacheWrapper.run": paged,
        "BatchPrefillWithPagedKVCacheWrapper.forward": paged,
        "BatchPrefillWithRaggedKVCacheWrapper.run": unpaged,
        "BatchPrefillWithRaggedKVCacheWrapper.forward": unpaged,
        "BatchAttention.run": {"q": gqa.q, "kv_cache": cache},
        "BlockSparseAttentionWrapper.run": blocks,
        "BlockSparseAttentionWrapper.forward": blocks,
        "VariableBlockSparseAttentionWrapper.run": by_head,
        "VariableBlockSparseAttentionWrapper.forward": by_head,
    }
    calls = {name: (made[name], arguments[name]) for name in made}
    for group in (plans, runs):
        for name, given in group.items():
            kind, method = name.split(".")
            wrapper = made[kind](**arguments[kind])
            for plan, options in plans.items():
                if plan.startswith(kind + ".") and group is runs:
                    getattr(wrapper, plan.split(".")[1])(**options)
            calls[name] = (getattr(wrapper, method), given)
    planned = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    planned.plan(**table, **heads, **TYPES)
    tokens = {"batch_indices": torch.arange(count, device=device).int(), "positions": gqa.cache_seqlens - 1}
    csr_table = {"kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last}
    mla_csr = {"kv_indices": mla_indices, "kv_indptr": mla_indptr, "kv_last_page_len": mla_last}
    lens = {"seq_lens": mla.cache_seqlens.unsqueeze(1), "page_table": mla.page_table}
    return calls | {
        "BatchDecodeWithPagedKVCacheWrapper.forward": (planned.forward, {"q": gqa.q, "paged_kv_cache": cache}),
        "fast_decode_plan": (flashinfer.fast_decode_plan, {"self": planned, **table, **heads, **TYPES}),
        "single_decode_with_kv_cache": (
            flashinfer.single_decode_with_kv_cache,
            {"q": gqa.q[0], "k": ragged.k[:9], "v": ragged.v[:9]},
        ),
        "single_prefill_with_kv_cache": (
            flashinfer.single_prefill_with_kv_cache,
            {"q": ragged.q[:4], "k": ragged.k[:9], "v": ragged.v[:9]},
        ),
        "xqa_batch_decode_with_kv_cache": (
            flashinfer.xqa_batch_decode_with_kv_cache,
            {"query": gqa.q, "kv_cache": cache, **tables, **nowhere},
        ),
        "cudnn_batch_decode_with_kv_cache": (
            flashinfer.cudnn_batch_decode_with_kv_cache,
            {"q": gqa.q, "k_cache": hnd[0], "v_cache": hnd[1], "scale": 0.1, "max_sequence_kv": 64, **nowhere}
            | {"actual_seq_lens_kv": gqa.cache_seqlens, "block_tables": gqa.page_table},
        ),
        "cudnn_batch_prefill_with_kv_cache": (
            flashinfer.cudnn_batch_prefill_with_kv_cache,
            {"q": gqa.q, "k_cache": hnd[0], "v_cache": hnd[1], "scale": 0.1, "max_sequence_kv": 64, **nowhere}
            | {"max_token_per_sequence": 1, "causal": True, "return_lse": True, "block_tables": gqa.page_table}
            | {"actual_seq_lens_kv": gqa.cache_seqlens, "batch_offsets_q": bounds, "batch_offsets_units": "tokens"},
        ),
        "trtllm_batch_context_with_kv_cache": (
            flashinfer.trtllm_batch_context_with_kv_cache,
            {"query": gqa.q, "kv_cache": hnd, "block_tables": gqa.page_table, "seq_lens": gqa.cache_seqlens}
            | {"max_q_len": 1, "max_kv_len": 64, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "batch_size": count, **nowhere}
            | {"cum_seq_lens_q": bounds, "cum_seq_lens_kv": bounds},
        ),
        "trtllm_fmha_v2_prefill": (
            flashinfer.trtllm_fmha_v2_prefill,
            {"qkv": (gqa.q, torch.stack(cache, 1)), "input_layout": "Q_PAGED_KV_NHD", "seq_lens": gqa.cache_seqlens}
            | {"max_q_len": 1, "max_kv_len": 64, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "batch_size": count, **nowhere}
            | {"cum_seq_lens_q": bounds, "cum_seq_lens_kv": bounds, "block_tables": gqa.page_table},
        ),
        "trtllm_ragged_attention_deepseek": (
            flashinfer.trtllm_ragged_attention_deepseek,
            {"query": ragged.q, "key": ragged.k, "value": ragged.v, "seq_lens": ragged.cu_seqlens_k.diff(), **nowhere}
            | {"max_q_len": 7, "max_kv_len": 7, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "o_sf_scale": 1.0}
            | {"batch_size": 2, "window_left": -1, "enable_pdl": None, "is_causal": True, "return_lse": False}
            | {"cum_seq_lens_q": ragged.cu_seqlens_q, "cum_seq_lens_kv": ragged.cu_seqlens_k},
        ),
        "xqa_batch_decode_with_kv_cache_mla": (
            flashinfer.xqa_batch_decode_with_kv_cache_mla,
            tables
            | {"block_tables": mla.page_table, "query": mla.q_by_request, "kv_cache": mla.kv_pages, **nowhere}
            | {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        ),
        "xqa_mla": (
            flashinfer.xqa_mla,
            {"q": mla.q_by_request, "k_cache": mla.kv_pages.unsqueeze(2), "v_cache": latent, "page_size": 64, **nowhere}
            | {"output": torch.empty_like(q_nope).unsqueeze(1), "semaphores": workspace, **lens},
        ),
        "append_paged_kv_cache": (
            flashinfer.append_paged_kv_cache,
            {
                "append_key": ragged.k[:count],
                "append_value": ragged.v[:count],
                "paged_kv_cache": cache,
                **tokens,
                **csr_table,
            },
        ),
        "append_paged_mla_kv_cache": (
            flashinfer.append_paged_mla_kv_cache,
            {"append_ckv": latent[0, :count], "append_kpe": rope[0, :count], **tokens, **mla_csr}
            | {"ckv_cache": latent, "kpe_cache": rope},
        ),
        "get_seq_lens": (
            flashinfer.get_seq_lens,
            {"kv_indptr": indptr, "kv_last_page_len": last, "page_size": 16},
        ),
        "get_batch_indices_positions": (
            flashinfer.get_batch_indices_positions,
            {"append_indptr": bounds, "seq_lens": gqa.cache_seqlens, "nnz": count},
        ),
        "merge_state_in_place": (
            flashinfer.merge_state_in_place,
            {"v": out.clone(), "s": lse.clone(), "v_other": out_b, "s_other": lse_b},
        ),
        "merge_states": (
            flashinfer.merge_states,
            {"v": torch.stack([out, out_b], 1), "s": torch.stack([lse, lse_b], 1)},
        ),
        "variable_length_merge_states": (
            flashinfer.variable_length_merge_states,
            {"v": out, "s": lse, "indptr": torch.tensor([0, 1, 2], device=device).int()},
        ),
    }
