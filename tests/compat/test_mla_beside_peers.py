"""compat's MLA functions beside the real ones, on a GPU, with the same arguments: FlashMLA (sgl_kernel), FlashInfer."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from attnops.compat import flash_mla, flashinfer, sgl_kernel
from checks import relative_error
from problems import mla_problem

pytestmark = pytest.mark.gpu

# Both round q x k, P and the output to bf16; against float64 each may be off by 6e-3.
BOUND = 1e-2
LENGTHS = [1000, 65, 64, 4096, 7]


def peer(name: str):
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"no {name} here: {error}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("heads", [16, 128])
def test_flash_mla(heads, seqlen_q, causal):
    theirs = peer("sgl_kernel.flash_mla")
    problem = mla_problem(LENGTHS, seqlen_q, num_q_heads=heads).to("cuda")
    table = problem.page_table.clamp(0, problem.kv_pages.shape[0] - 1)  # the peer reads cells beyond a request's length
    cache = torch.nan_to_num(problem.kv_pages).unsqueeze(2)  # and multiplies the tails of pages by zero
    results = []
    for library in (flash_mla, theirs):
        metadata = library.get_mla_metadata()
        results.append(
            library.flash_mla_with_kvcache(
                problem.q_by_request,
                cache,
                table,
                problem.cache_seqlens,
                512,
                *metadata,
                softmax_scale=0.07,
                causal=causal,
            )
        )
    (out, lse), (their_out, their_lse) = results
    assert out.shape == their_out.shape and lse.shape == their_lse.shape
    assert relative_error(out, their_out) <= BOUND
    torch.testing.assert_close(lse, their_lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("heads", [16, 128])
def test_flashinfer_mla_wrapper(heads):
    theirs = peer("flashinfer.mla")
    problem = mla_problem(LENGTHS, num_q_heads=heads).to("cuda")
    pages = -(-problem.cache_seqlens // 64)
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    indices = torch.cat([problem.page_table[b, :n] for b, n in enumerate(pages.tolist())])
    latents = torch.nan_to_num(problem.kv_pages)
    parts = (problem.q[..., :512], problem.q[..., 512:], latents[..., :512], latents[..., 512:])
    results = []
    for library in (flashinfer, theirs):
        wrapper = library.BatchMLAPagedAttentionWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"))
        qo_indptr = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device="cuda")
        bf16 = torch.bfloat16
        wrapper.plan(qo_indptr, indptr, indices, problem.cache_seqlens, heads, 512, 64, 64, True, 0.07, bf16, bf16)
        results.append(wrapper.run(*(part.contiguous() for part in parts[:2]), *parts[2:], return_lse=True))
    (out, lse), (their_out, their_lse) = results
    assert relative_error(out, their_out) <= BOUND
    torch.testing.assert_close(lse, their_lse, rtol=1e-4, atol=2e-3 / math.log(2))


@pytest.mark.parametrize("heads", [16, 100, 128])
def test_cutlass_mla_decode_is_the_flash_mla_call_at_page_128(heads):
    """The real one needs sm_100: its arguments, against our own FlashMLA interface over the same tokens."""
    problem = mla_problem(LENGTHS, num_q_heads=heads, page_size=128).to("cuda")
    q = problem.q_by_request
    bytes_needed = sgl_kernel.cutlass_mla_get_workspace_size(4096, len(LENGTHS))
    workspace = torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
    out = sgl_kernel.cutlass_mla_decode(
        q[:, 0, :, :512],
        q[:, 0, :, 512:],
        problem.kv_pages,
        problem.cache_seqlens,
        problem.page_table,
        workspace,
        0.07,
    )
    expected, _ = flash_mla.flash_mla_with_kvcache(
        q,
        problem.kv_pages.unsqueeze(2),
        problem.page_table,
        problem.cache_seqlens,
        512,
        *flash_mla.get_mla_metadata(),
        softmax_scale=0.07,
    )
    assert relative_error(out, expected[:, 0]) <= BOUND
