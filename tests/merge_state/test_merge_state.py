"""attnops::merge_state and merge_states on every device: against one softmax over the union of the keys."""

import math

import pytest
import torch
from attnops import ops
from checks import assert_attention_close, assert_lse_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 8), (7, 3, 64), (5, 5, 33), (33, 16, 128), (4, 128, 512)]  # (num_tokens, num_heads, head_dim)


def attention(scores, values):
    """Softmax attention in float64. scores [T, H, K], values [T, H, K, D] -> out [T, H, D], lse [T, H]."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(nan=0.0)  # empty row: exp(-inf + inf)
    return torch.einsum("thk,thkd->thd", weights, values), lse


def partial_states(shape, dtype, device, num_keys=(5, 9), seed=0):
    """One attention problem cut into key sets: their results in the op's dtypes, and the float64 answer over all."""
    num_tokens, num_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    total = sum(num_keys)
    scores = 3 * torch.randn(num_tokens, num_heads, total, generator=generator, dtype=torch.float64)
    values = torch.randn(num_tokens, num_heads, total, head_dim, generator=generator, dtype=torch.float64)
    parts = [attention(s, v) for s, v in zip(scores.split(num_keys, -1), values.split(num_keys, 2), strict=True)]
    outs = [out.to(device, dtype) for out, _ in parts]
    lses = [lse.to(device, torch.float32) for _, lse in parts]
    return outs, lses, attention(scores, values)


def two_sides(shape, dtype, device):
    (out_a, out_b), (lse_a, lse_b), expected = partial_states(shape, dtype, device)
    return (out_a, lse_a, out_b, lse_b), expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_one_softmax_over_both_key_sets(shape, dtype, device):
    sides, (expected_out, expected_lse) = two_sides(shape, dtype, device)
    out, lse = ops.merge_state(*sides)
    assert_attention_close(out.cpu(), expected_out, dtype)
    assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", [(4,), (1, 2, 3), (5,) * 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_states_equal_one_softmax_over_all_key_sets(shape, num_keys, dtype, device):
    outs, lses, (expected_out, expected_lse) = partial_states(shape, dtype, device, num_keys)
    out, lse = ops.merge_states(torch.stack(outs), torch.stack(lses))
    assert_attention_close(out.cpu(), expected_out, dtype)
    assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_side_is_the_identity_even_when_it_holds_nan(device):
    (out_a, lse_a, out_b, lse_b), _ = two_sides((6, 2, 64), torch.bfloat16, device)
    out_b.fill_(math.nan)  # what an unwritten split looks like
    lse_b.fill_(-math.inf)
    for out, lse in (
        ops.merge_state(out_a, lse_a, out_b, lse_b),
        ops.merge_state(out_b, lse_b, out_a, lse_a),
        ops.merge_states(torch.stack([out_b, out_a, out_b]), torch.stack([lse_b, lse_a, lse_b])),
    ):
        torch.testing.assert_close(out, out_a, rtol=0, atol=0)
        torch.testing.assert_close(lse, lse_a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_all_sides_empty_gives_zero_and_minus_inf(device):
    nothing = torch.full((3, 2, 64), math.nan, dtype=torch.float16, device=device)
    minus_inf = torch.full((3, 2), -math.inf, device=device)
    for out, lse in (
        ops.merge_state(nothing, minus_inf, nothing, minus_inf),
        ops.merge_states(torch.stack([nothing] * 3), torch.stack([minus_inf] * 3)),
        ops.merge_states(nothing.expand(0, 3, 2, 64), minus_inf.expand(0, 3, 2).contiguous()),
    ):
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize("device", DEVICES)
def test_writes_in_place_and_into_a_strided_slice(device):
    sides, (expected_out, expected_lse) = two_sides((9, 4, 64), torch.float32, device)
    wide = torch.full((9, 4, 131), math.nan, device=device)
    ops.merge_state(*sides, out=wide[..., 1:65])
    assert_attention_close(wide[..., 1:65].cpu(), expected_out, torch.float32)
    assert wide[..., 65:].isnan().all() and wide[..., 0].isnan().all(), "wrote outside its slice"

    out_a, lse_a, out_b, lse_b = sides
    ops.merge_state(out_a, lse_a, out_b.clone(), lse_b.clone(), out=out_a, lse=lse_a)
    assert_attention_close(out_a.cpu(), expected_out, torch.float32)
    assert_lse_close(lse_a.cpu(), expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_states_may_be_strided(device):
    outs, lses, (expected_out, _) = partial_states((9, 4, 64), torch.float16, device, (3, 4, 5))
    by_token = torch.stack(outs, dim=1)  # [num_tokens, num_states, ...]
    out, _ = ops.merge_states(by_token.transpose(0, 1), torch.stack(lses))
    assert_attention_close(out.cpu(), expected_out, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_tokens(device):
    sides, _ = two_sides((0, 4, 64), torch.bfloat16, device)
    out, lse = ops.merge_state(*sides)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_error_names_argument_dimension_and_both_values():
    (out_a, lse_a, out_b, lse_b), _ = two_sides((4, 8, 64), torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match=r"lse_b\.shape\[1\] \(num_heads\) must be 8 as in out_a, got 7"):
        ops.merge_state(out_a, lse_a, out_b, lse_b[:, :7])
    with pytest.raises(RuntimeError, match=r"merge_state: out_b must have dtype bfloat16 as out_a, got float16"):
        ops.merge_state(out_a, lse_a, out_b.half(), lse_b)
    with pytest.raises(RuntimeError, match=r"merge_state: lse_a must have dtype float32, got float64"):
        ops.merge_state(out_a, lse_a.double(), out_b, lse_b)
    with pytest.raises(RuntimeError, match=r"merge_state: out_a\.stride\(2\) must be 1 .* got 2"):
        ops.merge_state(out_a[..., ::2], lse_a, out_b[..., :32], lse_b)
    with pytest.raises(RuntimeError, match=r"lses\.shape\[0\] \(num_states\) must be 2 as in outs, got 3"):
        ops.merge_states(torch.stack([out_a, out_b]), torch.stack([lse_a] * 3))


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_aliasing(device):
    sides, _ = two_sides((5, 2, 64), torch.float32, device)
    destinations = torch.empty_like(sides[0]), torch.empty_like(sides[1])
    torch.library.opcheck(torch.ops.attnops.merge_state.default, (*destinations, *sides))
    states = torch.stack([sides[0], sides[2]]), torch.stack([sides[1], sides[3]])
    torch.library.opcheck(torch.ops.attnops.merge_states.default, (*destinations, *states))
