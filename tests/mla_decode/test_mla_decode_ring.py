"""attnops::mla_decode over many rows and pages of whole tiles, in a ring of three tiles, against float64 attention."""

import pytest
import torch
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, decode
from problems import mla_problem

pytestmark = pytest.mark.gpu
LENGTHS = [2053, 1, 0, 3000, 64 * 30, 64]
DTYPES = [torch.float16, torch.bfloat16]


def check(dtype, page_size=64, num_q_heads=128, seqlen_q=1, scale=SCALE, **options):
    problem = mla_problem(LENGTHS, seqlen_q, num_q_heads=num_q_heads, page_size=page_size, dtype=dtype)
    out, lse = decode(problem.to("cuda"), softmax_scale=scale, **options)
    masks = {name: options[name] for name in ("causal",) if name in options}
    expected_out, expected_lse = problem.expected(softmax_scale=scale, **masks)
    assert_attention_close(out.cpu(), expected_out, dtype)
    # A score near a thousand is known to 1e-5 of it.
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-4 if scale < 1 else 2e-3 * scale)


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_page_sizes(dtype, page_size):
    check(dtype, page_size)


@pytest.mark.parametrize("num_sm_parts", [1, 2, 3, 4, 12, 132])
def test_parts_share_works(num_sm_parts):
    check(torch.bfloat16, num_sm_parts=num_sm_parts)


@pytest.mark.parametrize("heads, tokens", [(128, 2), (70, 1), (65, 3), (16, 5), (24, 8)])
def test_rows_of_several_tokens(heads, tokens):
    check(torch.bfloat16, num_q_heads=heads, seqlen_q=tokens)
    check(torch.float16, num_q_heads=heads, seqlen_q=tokens, causal=False, apart=True)


def test_pages_in_csr_form():
    check(torch.bfloat16, csr=True)


@pytest.mark.parametrize("scale", [0.5, 4.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_rise_on_the_way(dtype, scale):
    """Maxima that later tiles raise by powers of two, and by so much that probabilities overflow first."""
    check(dtype, scale=scale)
    check(dtype, num_q_heads=40, seqlen_q=2, scale=scale, num_sm_parts=3)
