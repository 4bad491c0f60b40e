"""FlashInfer's wrappers of block-sparse attention against float64."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention

WORKSPACE = torch.zeros(1, dtype=torch.uint8)
BF16 = {"q_data_type": "bfloat16", "o_data_type": "bfloat16"}
BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]


def tensors(rows, keys, heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, h, 64, generator=generator).bfloat16() for n, h in zip((rows, keys, keys), heads)]


def expected(q, k, v, hidden):
    """attention() gives out and lse ``[S, H]`` of one request."""
    return attention(q, k, v, hidden, 64**-0.5)


def check(out, lse, shown, hidden):
    seen = ~hidden.all(1)
    assert relative_error(out[seen], shown[0][seen]) <= BOUND
    assert not out[~seen].any() and (lse[~seen] == -math.inf).all()
    assert_lse_close(lse[seen] * math.log(2), shown[1][seen])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("block", "rows"), [((1, 1), 24), ((4, 16), 24), ((16, 4), 40)])
def test_blocks_of_one_size(block, rows, masked):
    keys, (height, width) = 64, block
    seen = torch.rand(-(-rows // height), keys // width, generator=torch.Generator().manual_seed(1)) < 0.3
    seen[1] = False  # a row of blocks that sees nothing
    indptr = torch.nn.functional.pad(seen.sum(1).cumsum(0), (1, 0)).int()
    indices = seen.nonzero()[:, 1].int()
    mask = torch.rand(len(indices), height, width, generator=torch.Generator().manual_seed(2)) < 0.6
    inside = torch.zeros(*seen.shape, height, width, dtype=torch.bool)
    inside[seen] = mask if masked else True
    hidden = ~inside.transpose(1, 2).reshape(-1, keys)[:rows]
    q, k, v = tensors(rows, keys, (8, 2, 2))
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(indptr, indices, rows, keys, height, width, 8, 2, 64, mask=mask if masked else None, **BF16)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    check(out, lse, expected(q, k, v, hidden), hidden)
    again, again_lse = torch.empty_like(out), torch.empty_like(lse)
    wrapper.run(q, k, v, out=again, lse=again_lse)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_fp8_has_scales_per_head():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(16, 32, (4, 2, 2)))
    scales = [torch.tensor([0.5, 1.0, 2.0, 1.5]), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 3.0])]
    real = [x.float() * scale.unsqueeze(1) for x, scale in zip((q, k, v), scales)]
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    types = {"q_data_type": torch.float8_e4m3fn, "kv_data_type": torch.float8_e4m3fn, "o_data_type": torch.bfloat16}
    wrapper.plan(torch.tensor([0, 1, 3]).int(), torch.tensor([1, 0, 1]).int(), 16, 32, 8, 16, 4, 2, 64, **types)
    hidden = torch.zeros(16, 32, dtype=torch.bool)
    hidden[:8, :16] = True
    out, lse = wrapper.run(q, k, v, *scales, return_lse=True)
    check(out, lse, expected(*real, hidden), hidden)


def test_blocks_of_any_size_for_every_kv_head():
    generator = torch.Generator().manual_seed(4)
    heights, widths = torch.tensor([[3, 9, 4], [8, 1, 7]]), torch.tensor([[10, 1, 9, 12], [4, 4, 20, 4]])
    seen = torch.rand(2, 3, 4, generator=generator) < 0.5
    seen[1, 0] = False
    q, k, v = (x.transpose(0, 1).contiguous() for x in tensors(16, 32, (6, 2, 2)))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE, backend="fa3")
    wrapper.plan(seen, heights.int(), widths.int(), 6, 2, 64, q_data_type=torch.bfloat16)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    for head in range(2):
        of_rows = seen[head].repeat_interleave(heights[head], 0)
        hidden = ~of_rows.repeat_interleave(widths[head], 1)
        mine = slice(3 * head, 3 * head + 3)
        one = [x.transpose(0, 1) for x in (q[mine], k[head : head + 1], v[head : head + 1])]
        check(out[mine].transpose(0, 1), lse[mine].T, expected(*one, hidden), hidden)
    again, again_lse = torch.empty_like(out), torch.empty_like(lse)
    wrapper.run(q, k, v, out=again, lse=again_lse)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("size", [-1, 1 << 29, 2**31 - 1, -(2**63), 2**62])
@pytest.mark.parametrize("side", ["block_row_sz", "block_col_sz"])
def test_sizes_of_blocks_that_nothing_holds_are_refused(side, size):
    """torch repeats its elements so often: it ended the process, or asked for the memory."""
    sizes = {"block_row_sz": torch.tensor([[3, 9, 4]]), "block_col_sz": torch.tensor([[10, 1, 9, 12]])}
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE)
    for where in (slice(0, 1), slice(None)):
        wrong = sizes | {side: sizes[side].clone()}
        wrong[side][:, where] = size
        with pytest.raises(ValueError, match="block_row_sz and block_col_sz must hold sizes from 0"):
            wrapper.plan(torch.ones(1, 3, 4), **wrong, num_qo_heads=2, num_kv_heads=1, head_dim=64)
    wrapper.plan(torch.ones(1, 3, 4), **sizes, num_qo_heads=2, num_kv_heads=1, head_dim=64)


def test_forward_chooses_its_own_options_and_keeps_the_blocks():
    q, k, v = tensors(16, 32, (4, 2, 2))
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    blocks = (torch.tensor([0, 1, 3]).int(), torch.tensor([1, 0, 1]).int())
    shape = (16, 32, 8, 16, 4, 2, 64)
    wrapper.plan(*blocks, *shape, causal=True, sm_scale=0.5, **BF16)
    out = wrapper.forward(q, k, v, sm_scale=0.2, logits_soft_cap=3.0)
    wrapper.plan(*blocks, *shape, causal=True, sm_scale=0.2, logits_soft_cap=3.0, **BF16)
    assert torch.equal(out, wrapper.run(q, k, v))
    wrapper.plan(*blocks, *shape, causal=True, **BF16)
    assert torch.equal(wrapper.forward(q, k, v), wrapper.run(q, k, v)) and not torch.equal(wrapper.run(q, k, v), out)
    variable = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE)
    sizes = {"block_row_sz": torch.tensor([[3, 9, 4]] * 2), "block_col_sz": torch.tensor([[10, 1, 9, 12]] * 2)}
    by_head = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_data_type": torch.bfloat16}
    with pytest.raises(RuntimeError, match="plan must run first"):
        variable.forward(*by_head)
    variable.plan(torch.ones(2, 3, 4), **sizes, **heads, sm_scale=0.5)
    out = variable.forward(*by_head, sm_scale=0.2)
    variable.plan(torch.ones(2, 3, 4), **sizes, **heads, sm_scale=0.2)
    assert torch.equal(out, variable.run(*by_head))


def test_what_is_refused():
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    q, k, v = tensors(16, 32, (4, 2, 2))
    with pytest.raises(RuntimeError, match="plan must run first"):
        wrapper.run(q, k, v)
    blocks = (torch.tensor([0, 1, 3]).int(), torch.tensor([1, 0, 1]).int())
    with pytest.raises(ValueError, match="N must be a multiple of C=16, got 30"):
        wrapper.plan(*blocks, 16, 30, 8, 16, 4, 2, 64)
    with pytest.raises(ValueError, match=r"indptr must be \[ceil\(M / R\) \+ 1 = 5\], got \[3\]"):
        wrapper.plan(*blocks, 16, 32, 4, 16, 4, 2, 64)
    with pytest.raises(NotImplementedError, match="block_mask"):
        wrapper.plan(*blocks, 16, 32, 8, 16, 4, 2, 64, block_mask=torch.ones(4, 2, 2))
    wrapper.plan(*blocks, 16, 32, 8, 16, 4, 2, 64, **BF16)
    with pytest.raises(ValueError, match="k must have N=32 rows as planned, got 16"):
        wrapper.run(q, k[:16], v[:16])
    with pytest.raises(NotImplementedError, match="backend=vsa_sm100_blk64"):
        flashinfer.BlockSparseAttentionWrapper(WORKSPACE, backend="vsa_sm100_blk64")
    with pytest.raises(ValueError, match=r"block_mask_map must be \[num_kv_heads=2, 3, 4\]"):
        flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE).plan(
            torch.ones(2, 3, 3), torch.ones(2, 3), torch.ones(2, 4), 6, 2, 64
        )
