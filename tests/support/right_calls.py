"""A right call of every function of `attnops.ops` and `attnops.compat`: tests spoil it, or move it to a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from attnops import ops
from attnops.compat import causal_conv1d, fla, flash_attn, flash_attn_interface, flash_mla, flashinfer, sgl_kernel
from attnops.metadata import FmhaPlan, MlaDecodePlan, SparseMlaPlan, XqaDecodePlan
from attnops.ops.speculation import Verified
from compress_calls import compress_arguments
from indexer_calls import indexer_arguments, indexer_peer_calls
from mla_calls import plan_for
from problems import mla_problem, paged_problem, ragged_problem
from right_peer_calls import flashinfer_calls
from sparse_calls import plan_of as sparse_plan
from sparse_calls import sparse_problem
from torch import Tensor
from xqa_decoding import make_plan

LENGTHS = [40, 20, 7]

PLANS = (XqaDecodePlan, MlaDecodePlan, SparseMlaPlan, FmhaPlan)

Call = tuple[Callable[..., Any], dict[str, Any]]


def moved(value: Any, device: str) -> Any:
    """An argument on another device: a tensor, a list of them, or a plan with its tensors; others as they are."""
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return [moved(part, device) for part in value]
    if device == "cpu" or not isinstance(value, (Tensor, *PLANS)):
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    parts = {key: part.to(device) for key, part in vars(value).items() if isinstance(part, Tensor)}
    return dataclasses.replace(value, **parts)


def states(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 64).to(device), torch.randn(4, 3).to(device)


def ops_calls() -> dict[str, Call]:
    """By name: the function and its arguments, new tensors at every call."""
    gqa, mla, ragged = paged_problem(LENGTHS), mla_problem(LENGTHS, num_q_heads=5), ragged_problem([5, 7])
    extend, prefill = FmhaPlan.allocate(3, 3), FmhaPlan.allocate(15, 2)
    ops.fmha_plan(extend, gqa.cu_seqlens_q, cache_seqlens=gqa.cache_seqlens)
    ops.fmha_plan(prefill, ragged.cu_seqlens_q, ragged.cu_seqlens_k)
    (out, lse), (out_b, lse_b) = states(), states()
    rows = {"req_to_token": torch.zeros(5, 64, dtype=torch.int32), "req_pool_indices": torch.tensor([0, 1, 2])}
    pages = {"cache_seqlens": gqa.cache_seqlens, "page_size": 16}
    paged = {
        "q": gqa.q,
        "k_pages": gqa.k_pages,
        "v_pages": gqa.v_pages,
        "page_table": gqa.page_table,
        "cache_seqlens": gqa.cache_seqlens,
    }
    latents = {"q": mla.q, "kv_pages": mla.kv_pages, "page_table": mla.page_table, "cache_seqlens": mla.cache_seqlens}
    sinks = {"sinks": torch.zeros(8)}
    keys = {"k": ragged.k, "v": ragged.v, "cu_seqlens_q": ragged.cu_seqlens_q, "cu_seqlens_k": ragged.cu_seqlens_k}
    slots = torch.arange(4)
    new = torch.randn(4, 2, 64).bfloat16()
    arguments: dict[str, dict[str, Any]] = speculation_arguments() | {
        "xqa_decode_plan": {"plan": make_plan(gqa), "cache_seqlens": gqa.cache_seqlens},
        "xqa_decode_chunks": {
            "chunks": torch.zeros(3, 9, dtype=torch.int32),
            "cu_seqlens_q": gqa.cu_seqlens_q,
            "cache_seqlens": gqa.cache_seqlens,
            "chunk_tokens": 2,
        },
        "xqa_decode": paged | sinks | {"plan": make_plan(gqa), "out": torch.empty_like(gqa.q), "lse": torch.ones(3, 8)},
        "mla_decode_plan": {"plan": plan_for(mla), "cache_seqlens": mla.cache_seqlens},
        "mla_decode": latents | {"plan": plan_for(mla), "softmax_scale": 0.1, "sinks": torch.zeros(5)},
        **sparse_arguments(),
        "fmha_plan": {"plan": prefill, "cu_seqlens_q": ragged.cu_seqlens_q, "cu_seqlens_k": ragged.cu_seqlens_k},
        "fmha_varlen": {"q": ragged.q, **keys, "plan": prefill, **sinks},
        "fmha_paged": paged | sinks | {"cu_seqlens_q": gqa.cu_seqlens_q, "plan": extend},
        "merge_state": {"out_a": out, "lse_a": lse, "out_b": out_b, "lse_b": lse_b},
        "merge_states": {"outs": torch.stack([out, out_b]), "lses": torch.stack([lse, lse_b])},
        "build_page_table": rows | pages,
        "build_kv_indices": rows | pages,
        "build_local_batches": {
            "cu_seqlens_q": gqa.cu_seqlens_q,
            "cache_seqlens": gqa.cache_seqlens,
            "page_table": gqa.page_table,
            "page_size": 16,
            "chunk_size": 32,
            "local_cu_seqlens_q": torch.zeros(4, dtype=torch.int32),
            "local_cache_seqlens": torch.zeros(3, dtype=torch.int32),
            "local_page_table": torch.zeros(3, 2, dtype=torch.int32),
        },
        **block_arguments(),
        "context_parallel_seqlens": {"seqlens": gqa.cache_seqlens, "rank": 1, "world_size": 2, "interleave": 16},
        "context_parallel_slots": {"slots": slots, "rank": 1, "world_size": 2, "interleave": 16},
        "build_cu_seqlens": {"seqlens": gqa.cache_seqlens},
        "translate_slots": {"slots": slots, "slot_map": torch.arange(9)},
        "store_kv": {"k_pages": gqa.k_pages, "v_pages": gqa.v_pages, "k": new, "v": new, "out_cache_loc": slots},
        "store_mla_kv": {"kv_pages": mla.kv_pages, "latent": mla.q[0, :4], "out_cache_loc": slots},
    }
    arguments |= linear_arguments() | indexer_arguments() | compress_arguments() | fp4_arguments()
    return {name: (getattr(ops, name), given) for name, given in arguments.items()}


def block_arguments() -> dict[str, dict[str, Any]]:
    """Three requests of two KV heads, with lists of four blocks."""
    table = {"page_table": torch.arange(9, dtype=torch.int32).view(3, 3)}
    lengths = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    sizes = {"block_size": 8, "page_size": 16, "num_pages": 9, "page_step": 4, "unit_step": 2, "head_step": 1}
    rows = {"block_tables": torch.zeros(3, 2, 4, dtype=torch.int32), "block_seqlens": torch.zeros(3, 2).int()}
    labels = {"q_labels": torch.randn(3, 8, 32), "label_pages": torch.randn(9, 16, 2, 32)}
    return {
        "build_block_tables": {"block_list": torch.zeros(3, 2, 4, dtype=torch.int32)} | table | lengths | sizes | rows,
        "label_scores": {"scores": torch.zeros(3, 2, 48)} | labels | table | lengths,
    }


def fp4_arguments() -> dict[str, dict[str, Any]]:
    """Three requests over pages of four bits that hold zeros."""
    codes = torch.zeros(8, 16, 2, 32, dtype=torch.uint8)
    scales = torch.zeros(8, 16, 2, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pages = {"k_pages": codes, "v_pages": codes.clone(), "k_block_scales": scales, "v_block_scales": scales.clone()}
    rows = {"k": torch.randn(4, 2, 64), "v": torch.randn(4, 2, 64), "out_cache_loc": torch.arange(4)}
    table = {"page_table": torch.arange(9, dtype=torch.int32).view(3, 3) % 8}
    lengths = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    return {
        "store_kv_fp4": pages | rows,
        "fp4_decode": {"q": torch.randn(3, 1, 8, 64)} | pages | table | lengths | {"sinks": torch.zeros(8)},
    }


def sparse_arguments() -> dict[str, dict[str, Any]]:
    """Three query tokens with two lists each."""
    problem = sparse_problem(shape=(3, 1), topk=20, extra_topk=9, lengths=True, sinks=True)
    lists, extra = problem.selected, problem.extra
    assert extra is not None
    lists.kv_pages, extra.kv_pages = lists.kv_pages.nan_to_num().contiguous(), extra.kv_pages.nan_to_num().contiguous()
    lengths = {"topk_length": lists.lengths, "extra_topk_length": extra.lengths}
    call = {"indices": lists.indices, "softmax_scale": 0.1, "sinks": problem.sinks}
    return {
        "sparse_mla_plan": {"plan": sparse_plan(problem), **lengths},
        "sparse_mla_decode": {"q": problem.q, "kv_pages": lists.kv_pages, "plan": sparse_plan(problem)}
        | call
        | lengths
        | {"extra_kv_pages": extra.kv_pages, "extra_indices": extra.indices},
        "sparse_mla_prefill": {"q": problem.q[:, 0], "kv": lists.kv_pages, "topk_length": lists.lengths[:, 0]}
        | call
        | {"indices": lists.indices[:, 0], "max_logits": torch.zeros(3, 5), "extra_kv": extra.kv_pages}
        | {"extra_indices": extra.indices[:, 0], "extra_topk_length": extra.lengths[:, 0]},
        "share_lists": {"indices": torch.arange(20, dtype=torch.int32).view(4, 5), "together": 2}
        | {
            "topk_length": torch.tensor([5, 3, 0, 1], dtype=torch.int32),
            "shared": torch.zeros(2, 10, dtype=torch.int32),
        }
        | {"masks": torch.zeros(2, 10, dtype=torch.uint8), "shared_length": torch.zeros(2, dtype=torch.int32)},
    }


def linear_arguments() -> dict[str, dict[str, Any]]:
    """Two requests in a pool of four states."""
    slots = {"state_indices": torch.tensor([2, 0], dtype=torch.int32)}
    gates, heads, states = torch.rand(2, 4), torch.rand(4), {"states": torch.randn(4, 4, 8, 16)}
    keys, values = {"q": torch.randn(2, 2, 16), "k": torch.randn(2, 2, 16)}, torch.randn(2, 4, 8)
    ragged = {name: torch.tensor([0, n], dtype=torch.int32) for name, n in [("prefix_lens", 64), ("plan", 1)]}
    ragged |= {"cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32)}
    ragged |= {"checkpoint_slots": torch.full((2, 3), -1, dtype=torch.int32)}
    conv = {"weight": torch.randn(6, 4), "bias": torch.randn(6), "conv_states": torch.randn(4, 6, 3)}
    pool = torch.randn(2, 4, 6)
    rings = {"ring_u": torch.randn(4, 4, 3, 8), "ring_k": torch.randn(4, 2, 3, 16), "ring_decay": torch.rand(4, 4, 3)}
    rings |= {"ring_len": torch.zeros(4, dtype=torch.int32)}
    accepted = {"accepted_path": torch.tensor([[0], [0]]).int(), "accepted_len": torch.tensor([1, 0]).int()}
    counters = {"semaphores": torch.zeros(6, dtype=torch.int32)}
    delta = {**keys, "v": values, "a": gates, "b": gates, "A_log": heads, "dt_bias": heads} | states | slots
    ssd = {"x": values, "dt": gates, "A": -heads, "B": keys["k"], "C": keys["q"], "D": heads} | states | slots
    ssd |= {"z": values.clone(), "dt_bias": heads, "dt_softplus": True}
    return {
        "delta_decode": delta,
        "delta_conv_decode": {name: delta[name] for name in ("a", "b", "A_log", "dt_bias")}
        | {"x": torch.randn(2, 96), "weight": torch.randn(96, 4), "bias": torch.randn(96), "num_k_heads": 2}
        | {"conv_states": torch.randn(4, 96, 3)}
        | states
        | slots,
        "ssd_decode": ssd,
        "ssd_conv_decode": {name: ssd[name] for name in ("dt", "A", "D", "z", "dt_bias", "dt_softplus")}
        | {"x": torch.randn(2, 96), "weight": torch.randn(96, 4), "bias": torch.randn(96), "num_groups": 2}
        | {"conv_states": torch.randn(4, 96, 3)}
        | states
        | slots,
        "delta_prefill": delta | ragged,
        "ssd_prefill": ssd | ragged,
        "delta_verify": delta | rings | {"tree_mask": torch.ones(2, 1, 1, dtype=torch.uint8)},
        "ssd_verify": ssd | rings,
        "delta_draft_step": delta | rings | accepted | {"tree_mask": torch.ones(2, 1, 1, dtype=torch.uint8)} | counters,
        "ssd_draft_step": ssd | rings | accepted | counters,
        "delta_commit": states | rings | slots | accepted,
        "ssd_commit": states | rings | slots | accepted,
        "delta_plan": {"cu_seqlens": ragged["cu_seqlens"]},
        "ssd_plan": {"cu_seqlens": ragged["cu_seqlens"]},
        "causal_conv1d": {"x": torch.randn(5, 6), "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}
        | {"has_initial_state": torch.ones(2, dtype=torch.uint8)}
        | conv
        | slots,
        "causal_conv1d_update": {"x": torch.randn(2, 6), "windows": torch.randn(2, 1, 6, 3)}
        | {"tree_mask": torch.ones(2, 1, 1, dtype=torch.uint8)}
        | conv
        | slots,
        "copy_states": {"states": pool, "src": torch.tensor([0, 1]).int(), "dst": torch.tensor([2, 3]).int()},
        "clear_states": {"states": pool, "slots": torch.tensor([1, 3]).int()},
    }


def linear_peer_calls(device: str) -> dict[str, Call]:
    """Functions of `attnops.compat.fla` and `causal_conv1d`, and FlashInfer's of linear attention."""
    q, k, v = (torch.randn(2, 9, 2, 16).to(device) for _ in range(3))  # the same numbers on every device
    g, beta = -torch.rand(2, 9, 2).to(device), torch.rand(2, 9, 2).to(device)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": torch.zeros(2, 2, 16, 16, device=device)}
    x, weight, kept = (torch.randn(shape).to(device) for shape in [(2, 6, 9), (6, 4), (2, 6, 3)])
    conv = {"x": x, "weight": weight, "bias": torch.randn(6).to(device)}
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    rate, bias, pool = (
        -torch.rand(2).to(device),
        torch.zeros(2, device=device),
        torch.zeros(4, 2, 16, 16, device=device),
    )
    drafts = {"q": q, "k": k, "v": v, "A_log": rate, "a": g, "dt_bias": bias, "b": beta}
    one = {name: tensor[:, :1] if tensor.dim() > 1 else tensor for name, tensor in drafts.items()}
    states = torch.zeros(2, 2, 16, 16, device=device)
    number = lambda x: x[..., None].expand(*x.shape, 16)  # noqa: E731
    mamba = {"state": pool.clone(), "x": v[:, 0], "dt": number(beta[:, 0]), "A": number(number(rate)), "B": k[:, 0]}
    mamba |= {"C": q[:, 0], "D": number(bias), "dt_bias": number(bias), "state_batch_indices": slots}
    return {
        "gated_delta_rule_decode": (flashinfer.gated_delta_rule_decode, {**one, "state": states.clone()}),
        "gated_delta_rule_decode_pretranspose": (
            flashinfer.gated_delta_rule_decode_pretranspose,
            {**one, "state": states.clone()},
        ),
        "gated_delta_rule_mtp": (
            flashinfer.gated_delta_rule_mtp,
            {**drafts, "initial_state": pool, "initial_state_indices": slots, "disable_state_update": False},
        ),
        "selective_state_update": (flashinfer.selective_state_update, mamba),
        "chunk_gated_delta_rule": (fla.chunk_gated_delta_rule, given),
        "fused_recurrent_gated_delta_rule": (fla.fused_recurrent_gated_delta_rule, given),
        "chunk_kda": (fla.chunk_kda, {**given, "g": -torch.rand(2, 9, 2, 16).to(device)}),
        "causal_conv1d_fn": (causal_conv1d.causal_conv1d_fn, {**conv, "initial_states": kept}),
        "causal_conv1d_update": (
            causal_conv1d.causal_conv1d_update,
            {**conv, "conv_state": kept, "conv_state_indices": slots},
        ),
    }


def speculation_arguments() -> dict[str, dict[str, Any]]:
    """Two requests, trees of a root, two children and one grandchild."""
    nodes = {
        "candidates": torch.tensor([[7, 3, 5, 1]] * 2),
        "retrieve_index": torch.arange(8).view(2, 4),
        "retrieve_next_token": torch.tensor([[1, 3, -1, -1]] * 2),
        "retrieve_next_sibling": torch.tensor([[-1, 2, -1, -1]] * 2),
    }
    lengths = torch.tensor([17, 5], dtype=torch.int32)
    table = torch.arange(128, dtype=torch.int32).view(2, 64)
    drafts = {"req_to_token": table, "req_pool_indices": torch.tensor([1, 0]), "cache_seqlens": lengths, "topk": 2}
    drafts["draft_steps"] = 3
    pages = [torch.zeros(8, 16, 2, 8), torch.zeros(8, 16, 24)]
    return {
        "build_draft_tree": {
            "parent_list": torch.tensor([[-1, 0, 1]] * 2),
            "top_scores_index": torch.tensor([[0, 1, 2]] * 2),
            "draft_tokens": torch.tensor([[3, 5, 1]] * 2),
            "bonus_tokens": torch.tensor([7, 7]),
            "cache_seqlens": lengths,
            "topk": 2,
        },
        "verify_tree_greedy": nodes | {"target_predict": torch.tensor([3, 1, 0, 9] * 2), "path_length": 3},
        "verify_tree_sampling": nodes
        | {"uniform_samples": torch.rand(2, 4), "uniform_samples_final": torch.rand(2)}
        | {"target_probs": torch.rand(2, 4, 9), "path_length": 3},
        "pack_tree_mask": {
            "mask": torch.ones(2 * 4 * 9, dtype=torch.uint8),
            "num_tokens": 4,
            "mask_indptr": torch.tensor([0, 36, 72]),
            "tree_mask": torch.zeros(2, 4, 1, dtype=torch.uint8),
        },
        "move_kv": {
            "accept_index": torch.tensor([[0, 2, 3], [4, 7, -1]]),
            "out_cache_loc": torch.arange(40, 48),
            "pages": pages,
        }
        | {key: drafts[key] for key in ("req_to_token", "req_pool_indices", "cache_seqlens")},
        "copy_page_tail": drafts | {"pages": pages},
        "generate_draft_decode_kv_indices": drafts | {"page_size": 16},
    }


def decode_wrapper_plan(problem) -> dict[str, Any]:
    """Pages of 16, as many as the three requests need."""
    indices = torch.cat([problem.page_table[0, :3], problem.page_table[1, :2], problem.page_table[2, :1]])
    return {
        "indptr": torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        "indices": indices,
        "last_page_len": torch.tensor([8, 4, 7], dtype=torch.int32),
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "q_data_type": "bfloat16",
    }


def mla_wrapper_plan(problem) -> dict[str, Any]:
    return {
        "qo_indptr": torch.arange(4, dtype=torch.int32),
        "kv_indptr": problem.kv_indptr,
        "kv_indices": problem.kv_indices,
        "kv_len_arr": problem.cache_seqlens,
        "num_heads": 5,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": 64,
        "causal": False,
        "sm_scale": 0.1,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


def sglang_tree_calls(device: str) -> dict[str, Call]:
    given = speculation_arguments()
    tree, judged = given["build_draft_tree"], given["verify_tree_sampling"]
    links = {f"retrive_{name}": judged[f"retrieve_{name}"] for name in ("index", "next_token", "next_sibling")}
    out = dict(zip(("predicts", "accept_index", "accept_token_num"), Verified.allocate(2, 4, 3)))
    calls = {
        "build_tree_kernel_efficient": {
            "parent_list": tree["parent_list"],
            "selected_index": tree["top_scores_index"],
            "verified_seq_len": tree["cache_seqlens"],
            "tree_mask": torch.ones(4 * (17 + 5 + 8), dtype=torch.bool),
            "positions": torch.zeros(8, dtype=torch.int64),
        }
        | {name: link.clone() for name, link in links.items()}
        | {"topk": 2, "depth": 2, "draft_token_num": 4},
        "verify_tree_greedy": out
        | {"candidates": judged["candidates"], **links}
        | {"target_predict": given["verify_tree_greedy"]["target_predict"]},
        "tree_speculative_sampling_target_only": out
        | {"candidates": judged["candidates"], **links, "uniform_samples": judged["uniform_samples"]}
        | {"uniform_samples_for_final_sampling": judged["uniform_samples_final"]}
        | {"target_probs": judged["target_probs"], "draft_probs": torch.zeros(2, 4, 9)},
    }
    return {
        name: (getattr(sgl_kernel, name), {k: v.to(device) if isinstance(v, Tensor) else v for k, v in one.items()})
        for name, one in calls.items()
    }


def compat_calls(device: str = "cpu") -> dict[str, Call]:
    """By the name that messages have."""
    gqa, mla = paged_problem(LENGTHS).to(device), mla_problem(LENGTHS, num_q_heads=5).to(device)
    ragged = ragged_problem([5, 7]).to(device)
    (out, lse), (out_b, lse_b) = states(device), states(device)
    workspace, sinks = torch.zeros(1 << 10, dtype=torch.uint8, device=device), torch.zeros(8, device=device)
    gqa_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    gqa_wrapper.plan(**decode_wrapper_plan(gqa))
    mla_wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    mla_wrapper.plan(**mla_wrapper_plan(mla))
    new_gqa_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    new_mla_wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    tables = {"block_tables": gqa.page_table, "seq_lens": gqa.cache_seqlens, "max_seq_len": 64}
    mla_tables = tables | {"block_tables": mla.page_table}
    listed = mla.page_table[0, :1] * mla.kv_pages.shape[1] + torch.arange(9, device=device)  # rows that hold tokens
    latent, rope = mla.kv_pages[..., :512], mla.kv_pages[..., 512:]
    q_nope, q_pe = mla.q[..., :512], mla.q[..., 512:]
    size = sgl_kernel.cutlass_mla_get_workspace_size(64, 3, device=device)
    peers = flashinfer_calls(gqa, mla, ragged, workspace, [(out, lse), (out_b, lse_b)]) | linear_peer_calls(device)
    return peers | {
        "merge_state": (flashinfer.merge_state, {"v_a": out, "s_a": lse, "v_b": out_b, "s_b": lse_b}),
        "BatchDecodeWithPagedKVCacheWrapper": (
            flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            {"float_workspace_buffer": workspace},
        ),
        "BatchDecodeWithPagedKVCacheWrapper.plan": (new_gqa_wrapper.plan, decode_wrapper_plan(gqa)),
        "BatchDecodeWithPagedKVCacheWrapper.run": (
            gqa_wrapper.run,
            {"q": gqa.q, "paged_kv_cache": (gqa.k_pages, gqa.v_pages), "sinks": sinks},
        ),
        "BatchMLAPagedAttentionWrapper": (
            flashinfer.BatchMLAPagedAttentionWrapper,
            {"float_workspace_buffer": workspace},
        ),
        "BatchMLAPagedAttentionWrapper.plan": (new_mla_wrapper.plan, mla_wrapper_plan(mla)),
        "BatchMLAPagedAttentionWrapper.run": (
            mla_wrapper.run,
            {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": latent, "kpe_cache": rope},
        ),
        "trtllm_batch_decode_with_kv_cache": (
            flashinfer.trtllm_batch_decode_with_kv_cache,
            tables
            | {"query": gqa.q, "kv_cache": (gqa.k_pages, gqa.v_pages), "kv_layout": "NHD", "bmm1_scale": 0.1}
            | {"workspace_buffer": workspace},
        ),
        "trtllm_batch_decode_with_kv_cache_mla": (
            flashinfer.trtllm_batch_decode_with_kv_cache_mla,
            mla_tables
            | {"query": mla.q_by_request, "kv_cache": mla.kv_pages, "workspace_buffer": workspace, "bmm1_scale": 0.1}
            | {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        ),
        "xqa": (
            flashinfer.xqa,
            {"q": gqa.q.unsqueeze(1), "k_cache": gqa.k_pages, "v_cache": gqa.v_pages, "page_table": gqa.page_table}
            | {"seq_lens": gqa.cache_seqlens.unsqueeze(1), "output": torch.empty_like(gqa.q).unsqueeze(1)}
            | {"workspace_buffer": workspace, "semaphores": workspace, "num_kv_heads": 2, "page_size": 16},
        ),
        "flash_attn_with_kvcache": (
            flash_attn_interface.flash_attn_with_kvcache,
            {"q": gqa.q_by_request, "k_cache": gqa.k_pages, "v_cache": gqa.v_pages, "causal": True}
            | {"cache_seqlens": gqa.cache_seqlens, "page_table": gqa.page_table, "sinks": sinks},
        ),
        "flash_attn_varlen_func": (
            flash_attn_interface.flash_attn_varlen_func,
            {"q": ragged.q, "k": ragged.k, "v": ragged.v, "max_seqlen_q": 7, "max_seqlen_k": 7}
            | {"cu_seqlens_q": ragged.cu_seqlens_q, "cu_seqlens_k": ragged.cu_seqlens_k},
        ),
        "flash_attn_func": (
            flash_attn.flash_attn_func,
            {"q": gqa.q_by_request, "k": ragged.k[:3].unsqueeze(1), "v": ragged.v[:3].unsqueeze(1), "causal": True},
        ),
        "get_scheduler_metadata": (
            flash_attn_interface.get_scheduler_metadata,
            {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 40, "num_heads_q": 8, "num_heads_kv": 2, "headdim": 64}
            | {"cache_seqlens": gqa.cache_seqlens},
        ),
        "flash_attn_combine": (
            flash_attn_interface.flash_attn_combine,
            {"out_partial": torch.stack([out, out_b]), "lse_partial": torch.stack([lse, lse_b])},
        ),
        "get_mla_metadata": (
            flash_mla.get_mla_metadata,
            {"cache_seqlens": mla.cache_seqlens, "num_q_tokens_per_head_k": 5},
        ),
        "flash_mla_with_kvcache": (
            flash_mla.flash_mla_with_kvcache,
            {"q": mla.q_by_request, "k_cache": mla.kv_pages.unsqueeze(2), "block_table": mla.page_table}
            | {"cache_seqlens": mla.cache_seqlens, "head_dim_v": 512, "attn_sink": sinks[:5]}
            | {"tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]},
        ),
        "flash_mla_sparse_fwd": (
            flash_mla.flash_mla_sparse_fwd,
            {"q": mla.q, "kv": mla.kv_pages.flatten(0, 1).unsqueeze(1).nan_to_num(), "sm_scale": 0.1}
            | {"indices": listed.int().repeat(3, 1, 1), "attn_sink": sinks[:5]}
            | {"topk_length": torch.tensor([9, 3, 0], dtype=torch.int32, device=device)},
        ),
        "merge_state_v2": (sgl_kernel.merge_state_v2, {"v_a": out, "s_a": lse, "v_b": out_b, "s_b": lse_b}),
        **sglang_tree_calls(device),
        **indexer_peer_calls(device),
        "cutlass_mla_get_workspace_size": (
            functools.partial(sgl_kernel.cutlass_mla_get_workspace_size, device=device),
            {"max_seq_len": 64, "num_batches": 3},
        ),
        "cutlass_mla_decode": (
            sgl_kernel.cutlass_mla_decode,
            {"q_nope": q_nope, "q_pe": q_pe, "kv_c_and_k_pe_cache": mla.kv_pages, "seq_lens": mla.cache_seqlens}
            | {"page_table": mla.page_table, "workspace": workspace.new_zeros(size), "sm_scale": 0.1},
        ),
    }
