"""The calls that SGLang's attention backends make, argument by argument as they are written there (0.5.15, 0.5.23)."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attnops.compat import flashinfer, sgl_kernel
from attnops.compat.sgl_kernel.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    is_fa3_supported,
)
from attnops.compat.sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from attnops.layers import RadixAttention
from attnops.pools import MLATokenToKVPool
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention
from flashinfer_paging import csr
from graph_tape import GraphTape
from problems import FP8, mla_problem, paged_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)
LENGTHS = [130, 5, 64]


@pytest.mark.parametrize("fp8", [False, True])
def test_flashinfer_backend_decode(fp8):
    """`kv_indptr` is a view of a longer buffer, pages are of one token, `data_type` is the cache's."""
    dtype = torch.float16
    problem = paged_problem(LENGTHS, page_size=1, dtype=dtype, kv_dtype=FP8 if fp8 else None)
    kv_indptr, kv_indices, last_page_len = csr(problem, 1)
    whole = torch.cat([kv_indptr, torch.full((9,), 10**6, dtype=torch.int32)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="auto", use_tensor_cores=True)
    data_type = FP8 if fp8 else dtype
    wrapper.begin_forward(
        whole,
        kv_indices,
        last_page_len,
        8,
        2,
        64,
        1,
        data_type=data_type,
        q_data_type=dtype,
        non_blocking=True,
        fixed_split_size=None,
        disable_split_kv=False,
    )
    scales = (problem.k_scale.item(), problem.v_scale.item()) if fp8 else (None, None)
    out = wrapper.forward(
        problem.q.contiguous(),
        (problem.k_pages, problem.v_pages),
        sm_scale=0.2,
        logits_soft_cap=30.0,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    expected = problem.expected(softmax_scale=0.2, logit_cap=30.0)
    assert relative_error(out, expected[0]) <= MAX_RELATIVE_ERROR[dtype]
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    assert wrapper.begin_forward.func == flashinfer.fast_decode_plan


def test_names_stand_in_flashinfers_modules():
    """As SGLang and others import them; the package has them by attribute, too."""
    from attnops.compat.flashinfer.cascade import merge_state
    from attnops.compat.flashinfer.decode import trtllm_batch_decode_with_kv_cache
    from attnops.compat.flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
    from attnops.compat.flashinfer.page import append_paged_kv_cache
    from attnops.compat.flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    for named in (
        merge_state,
        trtllm_batch_decode_with_kv_cache,
        trtllm_batch_decode_with_kv_cache_mla,
        append_paged_kv_cache,
        BatchPrefillWithRaggedKVCacheWrapper,
    ):
        assert getattr(flashinfer, named.__name__) is named
    for module in (flashinfer.cascade, flashinfer.decode, flashinfer.mla, flashinfer.page, flashinfer.prefill):
        assert module.__all__ == sorted(module.__all__)
        assert all(getattr(module, name) is getattr(flashinfer, name) for name in module.__all__)


class CudaTape:
    """`GraphTape` on a GPU."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def capture(self):
        return torch.cuda.graph(self.graph)

    def replay(self) -> None:
        self.graph.replay()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flashinfer_backend_of_a_captured_verification(device):
    """Wrappers are made at capture, of views of the longest batch's buffers. Masks are longer than the batch's then:
    all ones, as lengths are. Every replay's plan brings its tree."""
    batch, draft, most, heads, kv_heads, dim, bf16 = 3, 4, 160, 8, 2, 64, torch.bfloat16
    generator = torch.Generator().manual_seed(2)
    pools = [torch.randn(most, kv_heads, dim, generator=generator).to(device, bf16) for _ in range(2)]
    int32 = {"dtype": torch.int32, "device": device}
    qo_indptr, kv_indptr, qk_indptr = (torch.zeros(9, **int32) for _ in range(3))
    kv_indices, kv_last_page_len = torch.zeros(8 * most, **int32), torch.ones(8, **int32)
    custom_mask = torch.zeros(8 * draft * most, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE.to(device),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=qo_indptr[: batch + 1],
        paged_kv_indptr_buf=kv_indptr[: batch + 1],
        paged_kv_indices_buf=kv_indices,
        paged_kv_last_page_len_buf=kv_last_page_len[:batch],
        custom_mask_buf=custom_mask,
        mask_indptr_buf=qk_indptr[: batch + 1],
    )

    def begin_forward(lens: list[int], mask: torch.Tensor, slots: torch.Tensor) -> None:
        wrapper.begin_forward(
            torch.arange(0, (batch + 1) * draft, draft, **int32),
            torch.tensor([0, *lens]).cumsum(0).to(**int32),
            slots,
            kv_last_page_len[:batch],
            heads,
            kv_heads,
            dim,
            1,
            q_data_type=bf16,
            kv_data_type=bf16,
            custom_mask=mask,
            non_blocking=True,
            fixed_split_size=None,
        )

    q = torch.zeros(batch * draft, heads, dim, dtype=bf16, device=device)
    forward = lambda: wrapper.forward(  # noqa: E731
        q, pools, causal=True, sm_scale=0.2, window_left=-1, logits_soft_cap=0.0, k_scale=None, v_scale=None
    )
    fill = [1 + draft] * batch
    ones = torch.ones((sum(fill) + 8 * draft) * draft, dtype=torch.bool, device=device)
    begin_forward(fill, ones, torch.zeros(sum(fill), **int32))
    forward()
    tape = GraphTape() if device == "cpu" else CudaTape()
    with tape.capture():
        out = forward()
    for lens in ([70, 4, 33], [5, 60, 90]):
        slots = torch.randperm(most, generator=generator)[: sum(lens)].to(**int32)
        masks = [torch.rand(draft, n, generator=generator) < 0.5 for n in lens]
        for mask, n in zip(masks, lens):
            mask[:, : n - draft] = True
            mask[range(draft), range(n - draft, n)] = True
        begin_forward(lens, torch.cat([mask.flatten() for mask in masks]).to(device), slots)
        q.copy_(torch.randn(q.shape, generator=generator))
        tape.replay()
        for b, own in enumerate(slots.cpu().long().split(lens)):
            rows = slice(b * draft, (b + 1) * draft)
            k, v = (pool.cpu()[own] for pool in pools)
            expected = attention(q[rows].cpu(), k, v, ~masks[b], 0.2)[0]
            assert relative_error(out[rows].cpu(), expected) <= BOUND


def test_flashinfer_mla_backend_decode():
    """Both parts are views of one buffer ``[slots, 1, 576]`` there; pages are of one token."""
    problem = mla_problem(LENGTHS, page_size=1)
    indptr, indices, _ = csr(problem, 1)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="auto")
    bf16, lens = torch.bfloat16, problem.cache_seqlens
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, lens, 16, 512, 64, 1, False, 0.1, bf16, bf16)
    q_nope, q_rope = problem.q[:, :, :512], problem.q[:, :, 512:]
    k_buffer = problem.kv_pages.to(problem.q.dtype)
    o = q_nope.new_empty(q_nope.shape)
    out = wrapper.run(q_nope, q_rope, k_buffer[:, :, :512], k_buffer[:, :, 512:], out=o, return_lse=False)
    assert out is o
    assert relative_error(out, problem.expected(softmax_scale=0.1)[0]) <= BOUND


def test_an_empty_pool_as_two_views():
    """An idle rank's."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    none, bf16 = torch.zeros(0, dtype=torch.int32), torch.bfloat16
    start = torch.zeros(1, dtype=torch.int32)
    wrapper.plan(start, start, none, none, 16, 512, 64, 1, False, 0.1, bf16, bf16)
    pool = torch.zeros(0, 1, 576, dtype=bf16)
    q = torch.zeros(0, 16, 576, dtype=bf16)
    out = wrapper.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:])
    assert out.shape == (0, 16, 512)


@pytest.mark.parametrize("fp8", [False, True])
def test_flash_attention_backend(fp8):
    """`cu_seqlens_k_new` without k and v, `ver`, `out`; descales expanded from one number."""
    problem = paged_problem([130, 40, 64], [3, 40, 1], kv_dtype=FP8 if fp8 else None)
    kwargs = {"k_descale": problem.k_scale.expand(3, 2), "v_descale": problem.v_scale.expand(3, 2)} if fp8 else {}
    out = torch.empty_like(problem.q)
    result = flash_attn_with_kvcache(
        q=problem.q.contiguous(),
        k_cache=problem.k_pages,
        v_cache=problem.v_pages,
        page_table=problem.page_table,
        cache_seqlens=problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k_new=torch.nn.functional.pad(problem.cache_seqlens.cumsum(0), (1, 0)).int(),
        max_seqlen_q=40,
        softmax_scale=0.2,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        return_softmax_lse=True,
        num_splits=0,
        out=out,
        ver=3,
        **kwargs,
    )
    o, softmax_lse, *rest = result
    expected = problem.expected(softmax_scale=0.2)
    assert not rest and o.data_ptr() == out.data_ptr()
    assert relative_error(o, expected[0]) <= BOUND
    assert_lse_close(softmax_lse.T.contiguous(), expected[1])


def test_flash_attention_backend_by_position():
    """As the wrapper of sgl_kernel's function passes them on."""
    problem = paged_problem(LENGTHS, 2)
    sinks = torch.randn(8).bfloat16()
    tail = [None, None, 0.2, True, (20, 0), None, 0.0, True, None, 0, None]
    out = flash_attn_with_kvcache(
        problem.q_by_request,
        problem.k_pages,
        problem.v_pages,
        *[None] * 5,
        problem.cache_seqlens,
        None,
        None,
        problem.page_table,
        None,
        None,
        None,
        torch.tensor([3, 4, 5]).int(),
        None,
        *tail,
        sm_margin=0,
        only_qv=False,
        return_softmax_lse=False,
        sinks=sinks,
        out=None,
    )
    expected = problem.expected(softmax_scale=0.2, window_left=20, sinks=sinks)
    assert relative_error(out.flatten(0, 1), expected[0]) <= BOUND


def test_flash_attention_backend_of_a_captured_decode():
    """The schedule is copied to the front of a buffer that every layer of a decode step takes."""
    problem, most = paged_problem(LENGTHS), 8
    schedule = get_scheduler_metadata(
        batch_size=3,
        max_seqlen_q=1,
        max_seqlen_k=4096,
        num_heads=8,
        num_heads_k=2,
        headdim=64,
        cache_seqlens=problem.cache_seqlens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=problem.cu_seqlens_q,
        page_size=16,
        causal=True,
        has_softcap=False,
        num_splits=0,
    )
    buffer = torch.zeros(1 + most * 4, dtype=torch.int32)
    buffer[: len(schedule)].copy_(schedule)
    out = flash_attn_with_kvcache(
        q=problem.q.contiguous(),
        k_cache=problem.k_pages,
        v_cache=problem.v_pages,
        page_table=problem.page_table,
        cache_seqlens=problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        max_seqlen_q=1,
        softmax_scale=0.2,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        k_descale=None,
        v_descale=None,
        return_softmax_lse=False,
        scheduler_metadata=buffer[: len(schedule)],
        num_splits=0,
        ver=3,
    )
    assert relative_error(out, problem.expected(softmax_scale=0.2)[0]) <= BOUND
    assert is_fa3_supported() is True
    with pytest.raises(ValueError, match=r"get_scheduler_metadata: cache_seqlens must be \[4\]"):
        get_scheduler_metadata(4, 1, 130, 8, 2, 64, problem.cache_seqlens)


def test_flash_attention_backend_of_mla():
    """q is the rotary part; the two caches are views of one buffer."""
    problem = mla_problem(LENGTHS, 2)
    pages = problem.kv_pages.unsqueeze(2)
    out = flash_attn_with_kvcache(
        q=problem.q[..., 512:],
        k_cache=pages[..., 512:],
        v_cache=pages[..., :512],
        qv=problem.q[..., :512],
        page_table=problem.page_table,
        cache_seqlens=problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k_new=problem.cu_seqlens_q,
        max_seqlen_q=2,
        softmax_scale=0.1,
        causal=True,
        softcap=0.0,
        k_descale=None,
        v_descale=None,
        return_softmax_lse=False,
        num_splits=0,
        ver=3,
    )
    assert relative_error(out, problem.expected(softmax_scale=0.1)[0]) <= BOUND


def test_varlen_of_the_fork():
    problem = ragged_problem([33, 4, 64], [40, 5, 64])
    out = torch.empty(problem.q.shape[0], 8, 64, dtype=torch.bfloat16)
    result, lse = flash_attn_varlen_func(
        q=problem.q,
        k=problem.k,
        v=problem.v,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        max_seqlen_q=64,
        max_seqlen_k=64,
        seqused_q=None,
        seqused_k=None,
        page_table=None,
        softmax_scale=0.2,
        causal=True,
        qv=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        only_qv=False,
        sm_margin=0,
        return_softmax_lse=True,
        sinks=None,
        out=out,
        ver=3,
    )
    expected = problem.expected(softmax_scale=0.2)
    assert result is out
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse.T, expected[1])
    for options in ({"page_table": torch.zeros(1)}, {"only_qv": True}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flash_attn_varlen_func(
                problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, 64, 64, **options
            )


@pytest.mark.parametrize("fp8", [False, True])
def test_flashmla_backend(fp8):
    """Over an e4m3 cache queries are e4m3, descales are given, `is_fp8_kvcache` is not."""
    problem = mla_problem(LENGTHS, 2, kv_dtype=FP8 if fp8 else None)
    metadata, num_splits = get_mla_metadata(problem.cache_seqlens.to(torch.int32), 32, 1, is_fp8_kvcache=fp8)
    q, kwargs = problem.q_by_request, {}
    if fp8:
        q, kwargs = (q / 0.5).to(FP8), {"descale_q": torch.tensor([0.5]), "descale_k": problem.kv_scale.reshape(1)}
    out, lse = flash_mla_with_kvcache(
        q=q,
        k_cache=problem.kv_pages.unsqueeze(2),
        block_table=problem.page_table,
        cache_seqlens=problem.cache_seqlens.to(torch.int32),
        head_dim_v=512,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        softmax_scale=0.1,
        causal=True,
        **kwargs,
    )
    assert out.shape == (3, 2, 16, 512) and lse.shape == (3, 16, 2)
    assert relative_error(out.flatten(0, 1), problem.expected(softmax_scale=0.1)[0]) <= (0.04 if fp8 else BOUND)


@pytest.mark.parametrize("kind", ["fixed", "ragged"])
def test_trtllm_mha_backend(kind):
    counts = [3, 3, 3] if kind == "fixed" else [3, 1, 2]
    problem = paged_problem(LENGTHS, counts, layout="hnd")
    kv_cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    lens = {"q_len_per_req": 3}
    if kind == "ragged":
        lens = {"q_len_per_req": None, "max_q_len": 3, "cum_seq_lens_q": problem.cu_seqlens_q}
    out = torch.empty_like(problem.q)
    result = flashinfer.trtllm_batch_decode_with_kv_cache(
        query=problem.q,
        kv_cache=kv_cache,
        workspace_buffer=WORKSPACE,
        block_tables=problem.page_table,
        seq_lens=problem.cache_seqlens,
        max_seq_len=4096,
        bmm1_scale=0.2,
        bmm2_scale=1.0,
        window_left=-1,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        out=out,
        out_dtype=torch.bfloat16,
        kv_cache_sf=None,
        multi_ctas_kv_counter_buffer=WORKSPACE,
        **lens,
    )
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out, problem.expected(softmax_scale=0.2)[0]) <= BOUND


@pytest.mark.parametrize("enable_pdl", [True, False, None])
def test_trtllm_mla_backend(enable_pdl):
    problem = mla_problem(LENGTHS, 2, page_size=32)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        query=problem.q_by_request,
        kv_cache=problem.kv_pages.unsqueeze(1),
        enable_pdl=enable_pdl,
        workspace_buffer=WORKSPACE,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=problem.page_table,
        seq_lens=problem.cache_seqlens,
        max_seq_len=4096,
        bmm1_scale=0.1,
        return_lse=False,
        skip_softmax_threshold_scale_factor=None,
        multi_ctas_kv_counter_buffer=WORKSPACE,
    )
    assert relative_error(out.flatten(0, 1), problem.expected(softmax_scale=0.1)[0]) <= BOUND


def test_cutedsl_mla_backend_of_context_parallel_ranks():
    problem = mla_problem(LENGTHS, 1, page_size=32)
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        query=problem.q_by_request,
        kv_cache=problem.kv_pages,
        workspace_buffer=WORKSPACE,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=problem.page_table,
        seq_lens=problem.cache_seqlens,
        max_seq_len=4096,
        bmm1_scale=0.1,
        skip_softmax_threshold_scale_factor=None,
        backend="cute-dsl",
        enable_dcp=True,
        cp_world=2,
        cp_rank=1,
        causal_seqlens_kv_global=problem.cache_seqlens * 2,
        return_lse=True,
    )
    expected = problem.expected(softmax_scale=0.1)
    assert relative_error(out.flatten(0, 1), expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


def test_merges_of_the_fork():
    v_a, v_b = torch.randn(2, 9, 4, 64).half()
    s_a, s_b = torch.randn(2, 9, 4) * 3
    for function, base in ((sgl_kernel.merge_state, 2.0), (sgl_kernel.merge_state_v2, math.e)):
        weight = 1 / (1 + base ** (s_b.double() - s_a.double())).unsqueeze(-1)
        out, s = function(v_a, s_a, v_b, s_b)
        assert relative_error(out, weight * v_a + (1 - weight) * v_b) <= 1e-3
        assert_lse_close(s, torch.log(base ** s_a.double() + base ** s_b.double()) / math.log(base))
        given = torch.empty_like(v_a), torch.empty_like(s_a)
        assert function(v_a, s_a, v_b, s_b, *given)[1] is given[1] and torch.equal(given[0], out)
    empty = torch.full_like(s_b, math.inf)
    assert torch.equal(sgl_kernel.merge_state_v2(v_a, s_a, torch.full_like(v_b, math.nan), empty)[0], v_a)


def test_set_mla_kv_buffer_with_an_axis_of_one_head():
    pool = MLATokenToKVPool(64, 16, torch.bfloat16, 1)
    layer = RadixAttention(16, 576, 0.1, 1, 0, v_head_dim=512)
    latent, rope, slots = torch.randn(3, 1, 512).bfloat16(), torch.randn(3, 1, 64).bfloat16(), torch.tensor([5, 17, 40])
    pool.set_mla_kv_buffer(layer, slots, latent, rope)
    pages = pool.get_latent_buffer(0)
    stored = pages[slots // pages.shape[1], slots % pages.shape[1]]
    assert torch.equal(stored, torch.cat([latent, rope], -1)[:, 0])
