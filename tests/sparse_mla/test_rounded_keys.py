"""`rounded_keys` of sparse_mla_decode: FlashMLA's rounding of rows to bfloat16, in lists of few keys."""

import pytest
import torch
from attnops import reference
from sparse_calls import Lists, SparseProblem, decode, plan_of

FEW = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def listing(counts, shape=(6, 1), heads=9, dtype=torch.float32, device="cpu"):
    """(problem over the stored rows, the values rounded): 64 entries of a list with counts[i] keys."""
    generator = torch.Generator().manual_seed(heads)
    rows = 64 * len(counts)
    stored = reference.pack_mla_fp8_rows(torch.randn(rows, 576, generator=generator))
    values = reference.unpack_mla_fp8_rows(stored)
    indices = torch.full((*shape, rows), -1, dtype=torch.int32)
    for token in indices.flatten(0, 1):
        for tile, count in enumerate(counts):  # rows of its own: none is in two tiles
            at = 64 * tile + torch.randperm(64, generator=generator)[:count]
            token[at] = at.int()
    rounded = values.float().bfloat16().double()
    q = torch.randn(*shape, heads, 576, generator=generator).to(dtype)
    return SparseProblem(q, Lists(stored.unsqueeze(1), values, indices, None), None, None).to(device), rounded


def misses(lse, expected):
    """By the bound of sgl_kernel's tests, and what float32 scores near 10 are off by."""
    return ((lse.double().cpu() - expected).abs() > 1e-5 + 8.01 / 65536 * expected.abs()).sum().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape,heads,num_sm_parts",
    [((6, 1), 9, 6), ((3, 2), 16, 200), ((4, 1), 20, 3), ((3, 1), 64, 2), ((2, 1), 128, 200), ((20, 1), 128, 100)],
)
@pytest.mark.parametrize("counts", [(1,), (2, 0), (0, 3, 1), (FEW,), (5, 0, 0, FEW - 5)])
def test_lists_of_few_keys_are_rounded(device, dtype, shape, heads, num_sm_parts, counts):
    if (device == "cpu") != (dtype == torch.float32):
        pytest.skip("the CPU's kernels of 16 bit round all rows, and CUDA has none of 32")
    problem, rounded = listing(counts, shape, heads, dtype, device)
    exact = problem.expected()[1]
    plan = plan_of(problem, num_sm_parts=num_sm_parts)
    assert misses(decode(problem, plan)[1], exact) == 0
    out, lse = decode(problem, plan, rounded_keys=True)
    problem.selected.values = rounded
    expected, expected_lse, _ = problem.expected()
    assert misses(lse, expected_lse) == 0
    assert misses(exact, expected_lse) > 0
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads,num_sm_parts", [(9, 6), (16, 200), (20, 3), (40, 200), (64, 2), (128, 200)])
@pytest.mark.parametrize("counts", [(0, 3), (FEW, 0), (5, FEW - 5)])
def test_two_lists_of_few_keys_are_rounded(device, heads, num_sm_parts, counts):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    problem, rounded = listing(counts, heads=heads, dtype=dtype, device=device)
    lists = problem.selected
    problem.extra = Lists(lists.kv_pages, lists.values, lists.indices[..., 64:].contiguous(), None)
    lists.indices = lists.indices[..., :64].contiguous()
    plan = plan_of(problem, num_sm_parts=num_sm_parts)
    assert misses(decode(problem, plan)[1], problem.expected()[1]) == 0
    lse = decode(problem, plan, rounded_keys=True)[1]
    lists.values = problem.extra.values = rounded
    assert misses(lse, problem.expected()[1]) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [(FEW + 1,), (64, 40, FEW + 1), (0, 0)])
@pytest.mark.parametrize("heads", [9, 20, 40, 64, 128])
def test_lists_of_more_keys_are_not(device, dtype, counts, heads):
    problem, _ = listing(counts, heads=heads, dtype=dtype, device=device)
    for plan in (plan_of(problem), plan_of(problem, fixed=64)):
        for x, y in zip(decode(problem, plan), decode(problem, plan, rounded_keys=True), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [9, 16, 20, 128])
def test_the_end_of_a_long_list_is_not(device, heads):
    """As long as it is in one piece with what comes before."""
    problem, _ = listing((64, 64, 3), heads=heads, dtype=torch.bfloat16, device=device)
    plan = plan_of(problem, fixed=192)
    out, lse = decode(problem, plan)
    again, lse_again = decode(problem, plan, rounded_keys=True)
    if device == "cpu" or heads > 16:  # elsewhere two teams share the tiles of a piece
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
    torch.testing.assert_close(lse, lse_again, rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_gets_the_same_bits_alone(device):
    problem, _ = listing((64, 3), shape=(5, 1), heads=16, dtype=torch.bfloat16, device=device)
    out = decode(problem, plan_of(problem, fixed=64), rounded_keys=True)[0]
    problem.q, problem.selected.indices = problem.q[2:3], problem.selected.indices[2:3]
    assert torch.equal(decode(problem, plan_of(problem, fixed=64), rounded_keys=True)[0][0], out[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1e4, float("nan")])
def test_scales_of_any_size(device, scale):
    """What rounding adds has fp16's range in the kernels: it may be lost, and spoils nothing."""
    problem, _ = listing((3,), heads=20, dtype=torch.bfloat16, device=device)
    rows = problem.selected.kv_pages
    rows[..., 512:528] = torch.tensor([scale] * 4, device=device).view(torch.uint8)
    problem.q *= 1e-3 / max(scale, 1)
    plain, with_rounding = decode(problem)[1], decode(problem, rounded_keys=True)[1]
    torch.testing.assert_close(with_rounding, plain, rtol=1e-2, atol=1e-2, equal_nan=True)
