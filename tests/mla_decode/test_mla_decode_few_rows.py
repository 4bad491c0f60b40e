"""attnops::mla_decode for few query rows of a request: rings that go round many times, and what bits depend on.

The few-row kernels have a shape for up to 16 and up to 32 query rows; other rows and devices run the same cases.
"""

import dataclasses

import pytest
import torch
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, assert_equals_reference, decode
from problems import FP8, mla_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = [1, 8, 9, 16, 17, 32, 33, 48, 49, 64]
KV_DTYPES = [None, FP8, torch.uint8]  # None: q's dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_sm_parts", [1, 6])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_requests_of_many_tiles(rows, kv_dtype, num_sm_parts, device):
    """A part works through several requests and many more tiles than it can hold at once."""
    problem = mla_problem([1500, 20, 0, 700], num_q_heads=rows, kv_dtype=kv_dtype).to(device)
    assert_equals_reference(problem, *decode(problem, num_sm_parts=num_sm_parts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [1, 7, 8, 24, 64, 192])
def test_pages_that_hold_whole_groups_of_tokens_and_others(page_size, kv_dtype, dtype, device):
    problem = mla_problem([900, 130, 64], num_q_heads=16, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    problem = problem.to(device)
    for csr in (False, True):
        assert_equals_reference(problem, *decode(problem, csr=csr))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("heads, seqlen_q", [(5, 3), (16, 2), (16, 4)])
def test_windows_that_begin_inside_a_tile(heads, seqlen_q, kv_dtype, page_size, device):
    problem = mla_problem([900, 3, 500], seqlen_q, num_q_heads=heads, page_size=page_size, kv_dtype=kv_dtype)
    problem = problem.to(device)
    for window_left in (0, 63, 333):
        out, lse = decode(problem, window_left=window_left, num_sm_parts=3)
        assert_equals_reference(problem, out, lse, window_left=window_left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [4, 16, 33, 64])
def test_maxima_that_rise_and_fall(heads, device):
    """Scores grow by far more than the slack of the reference maximum, tile after tile, and shrink again."""
    problem = mla_problem([1024], num_q_heads=heads, dtype=torch.bfloat16)
    tokens = torch.arange(1024)
    gain = 1 + 6 * torch.sin(tokens / 160).abs()
    pages = problem.page_table[0, : 1024 // 64].long()
    problem.kv_pages[pages] *= gain.view(-1, 64, 1).to(problem.kv_pages.dtype)
    problem = dataclasses.replace(problem, latent_exact=problem.kv_pages[pages].flatten(0, 1).float()).to(device)
    out, lse = decode(problem, num_sm_parts=2)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    assert_attention_close(out.cpu(), expected_out, torch.bfloat16)
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rows", [8, 16, 32, 48, 64])
def test_bits_of_a_request_do_not_depend_on_the_width_of_the_merge(rows, kv_dtype, device):
    """One request is merged by columns, many by rows: the order of summation must be the same."""
    lengths = [2000] + [65] * 40
    problem = mla_problem(lengths, num_q_heads=rows, kv_dtype=kv_dtype).to(device)
    out, lse = decode(problem, fixed=64, num_sm_parts=33)
    alone = type(problem)(
        **{
            **vars(problem),
            "q": problem.q[:1],
            "page_table": problem.page_table[:1],
            "cache_seqlens": problem.cache_seqlens[:1],
        }
    )
    out_alone, lse_alone = decode(alone, fixed=64, num_sm_parts=7)
    assert torch.equal(out_alone, out[:1]) and torch.equal(lse_alone, lse[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 9, 17, 33, 65, 132])
@pytest.mark.parametrize("rows", [5, 16, 32, 48])
def test_merges_of_any_number_of_splits(rows, parts, device):
    """Two splits may meet in a cluster, a few are merged by the last, many by all; some parts begin with other work."""
    tiles = parts if device == "cuda" else 5
    whole = mla_problem([64 * tiles - 3], num_q_heads=rows).to(device)
    assert_equals_reference(whole, *decode(whole, num_sm_parts=parts))
    lengths = [64 * tiles, 1, 64 * (tiles // 2), 200, 64 * tiles - 1, 0, 65]
    problem = mla_problem(lengths, num_q_heads=rows).to(device)
    first = decode(problem, num_sm_parts=parts)
    assert_equals_reference(problem, *first)
    for _ in range(3):  # whoever comes last
        assert all(torch.equal(a, b) for a, b in zip(decode(problem, num_sm_parts=parts), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 2, 3])
@pytest.mark.parametrize("batch", [4, 64, 66])
def test_halves_of_requests_side_by_side(batch, seqlen_q):
    """An even batch, cut in the middle of every request, as often as the device has SMs, with sinks and empty rows."""
    lengths = [512] * (batch - 2) + [1, 512]
    problem = mla_problem(lengths, seqlen_q, num_q_heads=16).to("cuda")
    sinks = torch.randn(16, generator=torch.Generator().manual_seed(3)).to("cuda")
    out, lse = decode(problem, num_sm_parts=2 * batch, sinks=sinks)
    assert_equals_reference(problem, out, lse, sinks=sinks.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-90, -20, 20, 90])
def test_queries_of_any_magnitude_over_fp8(exponent, device):
    """Kernels that multiply in fp16 scale each row of a bf16 query by itself."""
    problem = mla_problem([700, 90], num_q_heads=16, dtype=torch.bfloat16, kv_dtype=FP8).to(device)
    plain_out, plain_lse = decode(problem)
    factors = torch.tensor([2.0**exponent, 1.0], device=device).repeat(8).view(-1, 1).to(torch.bfloat16)
    scaled = dataclasses.replace(problem, q=problem.q * factors)
    out, lse = decode(scaled)
    assert torch.equal(out[:, 1::2], plain_out[:, 1::2]) and torch.equal(lse[:, 1::2], plain_lse[:, 1::2])
    out, lse = decode(scaled, softmax_scale=SCALE * 2.0**-exponent)
    assert torch.equal(out[:, ::2], plain_out[:, ::2]) and torch.equal(lse[:, ::2], plain_lse[:, ::2])
