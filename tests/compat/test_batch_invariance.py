"""What asks for bits that do not depend on the batch: plans that split no keys, and on a GPU the bits themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.compat import flash_attn_interface as fa3
from attnops.compat import flashinfer
from attnops.compat.sgl_kernel import flash_attn as sgl
from attnops.metadata import FmhaPlan
from flashinfer_paging import csr
from problems import paged_problem, ragged_problem

TYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
WIDE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 320, "page_size": 16}


def paged_wrapper(problem, device="cpu", **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1, dtype=torch.uint8, device=device))
    table = csr(problem, problem.k_pages.shape[1])
    heads = (problem.q.shape[1], problem.k_pages.shape[2], problem.q.shape[2], problem.k_pages.shape[1])
    wrapper.plan(problem.cu_seqlens_q, *table, *heads, causal=True, **TYPES, **options)
    return wrapper.run(problem.q.to(device), (problem.k_pages.to(device), problem.v_pages.to(device)))


def ragged_wrapper(problem, **options):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1, dtype=torch.uint8))
    heads = (problem.q.shape[1], problem.k.shape[1], problem.q.shape[2])
    wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *heads, causal=True, **TYPES, **options)
    return wrapper.run(problem.q, problem.k, problem.v)


def decode_wrapper(problem, **options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1, dtype=torch.uint8))
    heads = (problem.q.shape[1], problem.k_pages.shape[2], problem.q.shape[2], 16)
    wrapper.plan(*csr(problem, 16), *heads, **TYPES, **options)
    return wrapper.run(problem.q, (problem.k_pages, problem.v_pages))


def cache(problem, ragged=False, device="cpu", **options):
    given = {"cache_seqlens": problem.cache_seqlens.to(device), "page_table": problem.page_table.to(device)}
    if ragged:
        given |= {"cu_seqlens_q": problem.cu_seqlens_q.to(device), "max_seqlen_q": 64}
    q = problem.q if ragged else problem.q_by_request
    pages = (problem.k_pages.to(device), problem.v_pages.to(device))
    return fa3.flash_attn_with_kvcache(q.to(device), *pages, **given, causal=True, **options)


def rows(function, problem, **options):
    bounds = {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
    return function(problem.q, problem.k, problem.v, **bounds, max_seqlen_q=64, max_seqlen_k=64, **options)


@pytest.mark.parametrize(
    ("call", "given", "whole"),
    [
        (paged_wrapper, {}, False),
        (paged_wrapper, {"disable_split_kv": True}, True),
        (paged_wrapper, {"fixed_split_size": 2048}, True),
        (ragged_wrapper, {}, False),
        (ragged_wrapper, {"disable_split_kv": True}, True),
        (ragged_wrapper, {"fixed_split_size": 2048}, True),
        (decode_wrapper, {}, False),
        (decode_wrapper, {"disable_split_kv": True}, True),
        (cache, {}, False),
        (cache, {"num_splits": 1}, True),
        (cache, {"num_splits": 1, "ragged": True}, True),
        (cache, {"num_splits": 0, "ragged": True}, False),
        (cache, {"num_splits": 1, "attention_chunk": 7}, True),
        (lambda problem, **given: rows(fa3.flash_attn_varlen_func, problem, **given), {}, True),
        (lambda problem, **given: rows(fa3.flash_attn_varlen_func, problem, **given), {"num_splits": 0}, False),
        (lambda problem, **given: rows(sgl.flash_attn_varlen_func, problem, **given), {"num_splits": 1}, True),
        (lambda problem, **given: rows(sgl.flash_attn_varlen_func, problem, **given), {"num_splits": 0}, False),
    ],
)
def test_plans_split_no_keys(monkeypatch, call, given, whole):
    asked, allocate = [], FmhaPlan.allocate.__func__

    def spy(cls, *args, split_keys=True, **options):
        asked.append(split_keys)
        return allocate(cls, *args, split_keys=split_keys, **options)

    monkeypatch.setattr(FmhaPlan, "allocate", classmethod(spy))
    if call in (paged_wrapper, cache):
        problem = paged_problem([130, 40, 64], [20, 20, 20], page_size=16)
    elif call is decode_wrapper:  # head dims that only prefill's kernels serve
        problem = paged_problem([130, 40, 64], **WIDE)
    else:
        problem = ragged_problem([33, 1, 64], [33, 5, 64])
    call(problem, **given)
    assert asked and all(split is not whole for split in asked)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FlashInfer", "FlashAttention", "ragged FlashAttention"])
def test_a_requests_bits_do_not_depend_on_its_batch(kind):
    both = paged_problem([20000, 300, 64], [40, 40, 40], page_size=16)
    alone = dataclasses.replace(
        both,
        q=both.q[:40],
        page_table=both.page_table[:1],
        cache_seqlens=both.cache_seqlens[:1],
        cu_seqlens_q=both.cu_seqlens_q[:2],
    )
    outs = []
    for problem in (both, alone):
        if kind == "FlashInfer":
            out = paged_wrapper(problem, "cuda", disable_split_kv=True)
        else:
            out = cache(problem, kind.startswith("ragged"), "cuda", num_splits=1)
        outs.append(out.view(-1, 8, 64)[:40])
    assert torch.equal(*outs)
