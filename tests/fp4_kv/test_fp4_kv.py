"""store_kv_fp4 and fp4_decode, against nearest codes by search and float64 attention over what they stand for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attnops import ops, reference
from attnops.backends import get_backend_class
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MHATokenToKVPoolFP4, MLATokenToKVPoolFP4
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import assert_attention_close, assert_lse_close
from conformance import spec_of
from draft_trees import attention_over
from fp4_problems import E4M3, FP4, LENGTHS, pools, problem, real
from gpu_steps import SHAPES
from steps import LIMITS, Model, make_step

VALUES = torch.tensor([*reference.FP4_VALUES, *(-value for value in reference.FP4_VALUES)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_rows_are_stored_as_their_nearest_codes(dtype, scaled):
    """A scale brings the largest value of a block near 6; no code is nearer than the one that is stored."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(40, 3, 48, generator=generator) * torch.logspace(-3, 2, 40).view(-1, 1, 1)
    rows[3, :, :16] = 0.0
    rows[5, 1, 16:32] = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -2.5, -5, 0.2, 1]
    )
    rows = rows.to(dtype)
    scale = torch.tensor([0.37]) if scaled else None
    (k_pages, k_scales), (v_pages, v_scales) = pools(16, 3, 3, 48), pools(16, 3, 3, 48)
    slots = torch.randperm(48, generator=generator)[:40]
    slots[7] = -1
    ops.store_kv_fp4(
        k_pages, v_pages, k_scales, v_scales, rows, rows.flip(0), slots, k_scale=scale, v_scale=scale
    )  # fmt: skip
    stored = slots >= 0
    for pages, scales, given in ((k_pages, k_scales, rows), (v_pages, v_scales, rows.flip(0))):
        codes = pages.view(torch.uint8).flatten(0, 1)[slots[stored]]
        of_blocks = scales.view(torch.uint8).flatten(0, 1)[slots[stored]].view(E4M3)
        given = given[stored].double().unflatten(-1, (3, 16))
        tensor_scale = 1.0 if scale is None else scale.double()
        asked = (given.abs().amax(-1) / tensor_scale / 6).clamp(max=448)
        assert ((of_blocks.double() - asked).abs() <= asked / 16 + 2**-10).all()  # e4m3 rounds to 1 / 16 at most
        grid = VALUES * of_blocks.double().unsqueeze(-1).unsqueeze(-1) * tensor_scale
        nearest = (given.unsqueeze(-1) - grid).abs().amin(-1)
        got = real(codes, of_blocks, scale).unflatten(-1, (3, 16))
        assert ((given - got).abs() <= nearest * (1 + 1e-6) + 1e-12).all()
        packed, expected_scales = reference.quantize_fp4(given.flatten(-2).to(dtype), scale)
        assert torch.equal(codes, packed)
        assert torch.equal(of_blocks.view(torch.uint8), expected_scales.view(torch.uint8))
    untouched = torch.ones(48, dtype=torch.bool).index_fill(0, slots[stored], False)
    assert (k_scales.view(torch.uint8).flatten(0, 1)[untouched] == 0x7F).all()


def test_nan_stays_nan_and_infinity_saturates():
    rows = torch.full((2, 1, 32), 6.0)
    rows[0, 0, 3], rows[1, 0, 20] = math.nan, -math.inf
    pages, scales = pools(1, 2, 1, 32)
    ops.store_kv_fp4(pages, None, scales, None, rows, None, torch.arange(2))
    got = real(pages, scales)[0, :, 0]
    assert got[0, :16].isnan().all() and (got[0, 16:] == 6).all()
    assert got[1, 20] == -6 * 448 and (got[1, :16] == 6).all()


def visible(seqlen_q, length, window):
    return reference.visibility(seqlen_q, length, window_left=window)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 2, 64), (3, 1, 48), (8, 8, 128)])
@pytest.mark.parametrize("seqlen_q, window", [(1, -1), (1, 9), (4, -1), (3, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_equals_float64_attention(page_size, heads, kv_heads, dim, seqlen_q, window, dtype):
    q, k, v, table, lengths, scales, keys = problem(page_size, heads, kv_heads, dim, seqlen_q, dtype, seed=page_size)
    sinks, cap = torch.linspace(-2, 2, heads), 4.0 if window < 0 else 0.0
    options = {"softmax_scale": 0.2, "window_left": window, "logit_cap": cap, "sinks": sinks}
    options |= {"k_scale": scales[0], "v_scale": scales[1]}
    csr = dict.fromkeys(["kv_indptr"])
    cells = table
    if page_size == 3:
        counts = [-(-length // 3) for length in lengths.tolist()]
        cells = torch.cat([table[b, :count] for b, count in enumerate(counts)])
        csr = {"kv_indptr": torch.tensor([0, *counts]).cumsum(0).int()}
    out, lse = ops.fp4_decode(q, k[0], v[0], k[1], v[1], cells, lengths, return_lse=True, **options, **csr)
    for b, (k_real, v_real) in enumerate(keys):
        seen = visible(seqlen_q, len(k_real), window)
        expected, expected_lse = attention_over(q[b], k_real, v_real, seen, scale=0.2, cap=cap, sinks=sinks)
        assert_attention_close(out[b], expected, dtype)
        assert_lse_close(lse[b], expected_lse)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_latents(page_size, seqlen_q):
    """MLA: a value is the first 512 of its key."""
    q, k, _, table, lengths, scales, keys = problem(page_size, 16, 1, 576, seqlen_q, torch.bfloat16, mla=True)
    out = ops.fp4_decode(q, k[0], None, k[1], None, table, lengths, softmax_scale=0.05, k_scale=scales[0])
    assert out.shape == (len(LENGTHS), seqlen_q, 16, 512)
    for b, (k_real, v_real) in enumerate(keys):
        expected, _ = attention_over(q[b], k_real, v_real, visible(seqlen_q, len(k_real), -1), scale=0.05)
        assert_attention_close(out[b], expected, torch.bfloat16)


def test_a_length_of_zero_gives_zeros():
    q, k, v, table, lengths, _, _ = problem(16, 4, 2, 64, 1, torch.float32)
    lengths.zero_()
    out, lse = ops.fp4_decode(q, k[0], v[0], k[1], v[1], table, lengths, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


def test_values_are_near_those_that_were_given():
    """Four bits with a scale for 16 normal values: a relative error of a tenth."""
    rows = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(1))
    pages, scales = pools(64, 1, 2, 128)
    ops.store_kv_fp4(pages, None, scales, None, rows, None, torch.arange(64))
    got = real(pages, scales)[:, 0]
    assert 0.05 < (got - rows).norm() / rows.norm() < 0.12


def test_errors_name_what_is_wrong(monkeypatch):
    q, k, v, table, lengths, _, _ = problem(16, 4, 2, 64, 1, torch.float32)
    right = [q, k[0], v[0], k[1], v[1], table, lengths]

    def fails(match, place=None, other=None, **options):
        given = list(right)
        if place is not None:
            given[place] = other
        with pytest.raises(RuntimeError, match=match):
            ops.fp4_decode(*given, **options)

    fails(
        r"fp4_decode: k_pages.shape\[3\] \(head_dim / 2\) must be 32 as in two values a byte, got 31", 1, k[0][..., :31]
    )
    fails(r"k_block_scales must have dtype float8_e4m3fn, got uint8", 3, k[1].view(torch.uint8))
    fails(r"v_block_scales must be given with v_pages, got None", 4, None)
    fails(r"k_pages must have a head_dim that is a multiple of 16 .*, got 40", 0, q[..., :40])
    fails(r"num_q_heads\) must be a multiple of 2 \(num_kv_heads\), got 3", 0, q[:, :, :3])
    fails(r"window_left must be in \[-1, .*\], got -2", window_left=-2)
    fails(r"logit_cap", logit_cap=math.nan)
    outside = table.index_fill(0, torch.tensor([1]), 99)
    fails(r"page_table, request 1, page 0 must be in \[0, 25\) .*, got 99", 5, outside)
    wide = lengths.clone()
    wide[2] = 10**6
    fails(r"cache_seqlens", 6, wide)
    rows = torch.zeros(2, 2, 64)
    with pytest.raises(RuntimeError, match=r"store_kv_fp4: .*out_cache_loc.* 10000"):
        ops.store_kv_fp4(k[0], v[0], k[1], v[1], rows, rows, torch.tensor([0, 10_000]))
    with pytest.raises(RuntimeError, match="v must be given with v_pages and only with them"):
        ops.store_kv_fp4(k[0], v[0], k[1], v[1], rows, None, torch.tensor([0, 1]))
    report = torch.zeros(8, dtype=torch.int32)
    ops.fp4_decode(*right[:5], outside, lengths, report=report)
    assert report[0] > 0 and report[3] == 1 and report[5] == 99


def test_pools_move_their_rows_and_say_what_they_hold():
    """move_kv takes codes and scales; half a byte and a sixteenth a value."""
    pool = MHATokenToKVPoolFP4(64, 4, 2, 64, 3)
    assert pool.nbytes() == 3 * 2 * 64 * 2 * (32 + 4)
    layer = RadixAttention(4, 64, 0.1, 2, 1)
    pool.set_kv_buffer(layer, torch.arange(64), torch.randn(64, 2, 64), torch.randn(64, 2, 64))
    before = [buffer.view(torch.uint8).flatten(0, 1).clone() for buffer in pool.all_buffers()[0]]
    ops.move_kv(torch.tensor([[0, 3, -1]], dtype=torch.int32), torch.tensor([8, 9, 10, 11]), pool.all_buffers()[0])
    for old, buffer in zip(before, pool.all_buffers()[0], strict=True):
        new = buffer.view(torch.uint8).flatten(0, 1)
        old[9] = old[11]
        assert torch.equal(new, old)
    latents = MLATokenToKVPoolFP4(64, 4, 2)
    assert latents.nbytes() == 2 * 64 * (288 + 36)
    with pytest.raises(ValueError, match="FP4 latents hold no K and V to view"):
        latents.get_kv_buffer(0)
    with pytest.raises(ValueError, match="make an MHATokenToKVPoolFP4"):
        MHATokenToKVPool(64, 4, FP4, 2, 64, 1)
    with pytest.raises(ValueError, match=r"head_dim of an FP4 pool must be a multiple of 16 .*, got 40"):
        MHATokenToKVPoolFP4(64, 4, 2, 40, 1)


def test_the_cpus_backend_decodes_codes_as_they_are_and_is_not_batch_invariant(monkeypatch):
    calls = []
    monkeypatch.setattr(ops, "fp4_decode", lambda *given, **more: calls.append(more))
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float32, kv_dtype=FP4)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    backend = get_backend_class("intel_amx")(spec, limits)
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(2),
        cache_seqlens=torch.tensor([3, 9], dtype=torch.int32),
        num_tokens=2,
        req_to_token=torch.arange(128, dtype=torch.int32).view(2, 64),
        out_cache_loc=torch.tensor([2, 72]),
        token_to_kv_pool=MHATokenToKVPoolFP4(128, 4, 2, 64, 1),
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    RadixAttention(4, 64, 0.1, 2, 0)(torch.zeros(2, 256), torch.ones(2, 128), torch.ones(2, 128), batch)
    assert len(calls) == 1 and calls[0]["softmax_scale"] == 0.1
    with pytest.raises(NotImplementedError, match="intel_amx is not batch-invariant over an FP4 cache"):
        get_backend_class("intel_amx")(dataclasses.replace(spec, deterministic=True), limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_has_its_value_and_sign(dtype):
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.ones(32).to(torch.float8_e4m3fn)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten().long()
    got, expected = reference.dequantize_fp4(codes, scales, dtype=dtype), VALUES.to(dtype)[both]
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("name", ["torch_native", "trtllm_mha", "flashmla", "fa3"])
@pytest.mark.parametrize("shape", ["decode", "tree", "draft_extend_ragged"])
def test_a_step_finds_another_steps_codes_and_scales(name, shape):
    """What a replay on a GPU does (`gpu_steps.check_replay`), without a graph: new contents at the same addresses."""
    spec = spec_of("mla_fp4" if name == "flashmla" else "fp4", 64)
    mode, *lengths, options = SHAPES[shape]
    static, other = (make_step(Model("one", spec, scale=0.1), mode, *lengths[i], seed=i, **options) for i in (0, 1))
    backend = get_backend_class(name)(spec, LIMITS)

    def run(step):
        backend.init_forward_metadata(step.batch)
        return step.run(backend).clone()

    before = run(static)
    static.overwrite(other)
    after = run(static)
    assert not torch.equal(before, after) and torch.equal(after, run(other))
