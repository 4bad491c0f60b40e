"""Multi-item scoring: each item sees the prefix and itself, beside float64 over masks of the rule."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits, MultiItemScoringParams
from checks import MAX_RELATIVE_ERROR, relative_error

NAMES = ["torch_native", "intel_amx", "fa3", "flex_attention"]
HEADS, KV_HEADS, SCALE = 4, 2, 0.15
CONTEXT = 400


def draw_prompt(rng):
    """(tokens of the prefix, place of each token behind it)."""
    places = []
    for _ in range(rng.choice([0, 1, 3, 9])):
        places += range(rng.choice([1, 2, 5, 30]))
    return rng.choice([0, 1, 16, 77]), places[: CONTEXT - 80]


def expected_of(q, k, v, prefix, places, cached):
    """float64 of one prompt's new tokens, by the rule as it is written."""
    total = prefix + len(places)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for i in range(total):
        for j in range(i + 1):
            place = places[i - prefix] if i >= prefix else 0
            seen[i, j] = i < prefix or j < prefix or i - place < j
    group = HEADS // KV_HEADS
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    weights = scores.masked_fill(~seen[cached:], -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def run(name, page_size, seed, *, device="cpu", dtype=torch.float32, dims=(64, 64), padding=0):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompts = [draw_prompt(rng) for _ in range(4)]
    cached = [rng.choice([0, prefix // 2, prefix]) for prefix, _ in prompts]
    lengths = [prefix + len(places) for prefix, places in prompts]
    new = [length - count for length, count in zip(lengths, cached)]
    context = -(-CONTEXT // page_size) * page_size
    pool = MHATokenToKVPool(4 * context, page_size, dtype, KV_HEADS, dims[0], 1, device=device, v_head_dim=dims[1])
    for pages in pool.all_buffers()[0]:
        pages.fill_(math.nan)
    order = torch.randperm(4 * context // page_size, generator=generator).view(4, -1, 1)
    table = (order * page_size + torch.arange(page_size)).flatten(1).int()
    layer = RadixAttention(HEADS, dims[0], SCALE, KV_HEADS, 0, v_head_dim=dims[1])

    def draw(heads, dim):
        return [torch.randn(length, heads, dim, generator=generator).to(dtype) for length in lengths]

    q, k, v = draw(HEADS, dims[0]), draw(KV_HEADS, dims[0]), draw(KV_HEADS, dims[1])
    for row, count in enumerate(cached):
        slots = table[row, :count].long().to(device)
        pool.set_kv_buffer(layer, slots, k[row][:count].to(device), v[row][:count].to(device))
    widest = max(len(places) for _, places in prompts)
    flat = [place for _, places in prompts for place in places + [0] * (widest - len(places))]
    items = MultiItemScoringParams(
        prefix_len_ptr=torch.tensor([prefix for prefix, _ in prompts], device=device),
        token_pos_in_items_ptr=torch.tensor(flat, dtype=torch.int32, device=device),
        token_pos_in_items_len=widest,
    )
    spec = AttentionSpec(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, page_size=page_size
    )
    limits = Limits(max_batch_size=5, max_seqlen=CONTEXT, max_num_tokens=1700)
    backend = get_backend_class(name)(spec, limits, device)
    loc = torch.cat([table[row, count:length].long() for row, (count, length) in enumerate(zip(cached, lengths))])
    loc = torch.cat([loc, torch.full((padding,), -1)])
    batch = AttentionBatch(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.arange(4, device=device),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_tokens=sum(new) + padding,
        req_to_token=table.to(device),
        out_cache_loc=loc.to(device),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=device),
        max_seqlen_q=max(max(new), 1 + (sum(new) + padding) // 4),
        token_to_kv_pool=pool,
        attn_backend=backend,
        multi_item=items,
    )

    def flat_rows(parts):
        rows = torch.cat([part[count:] for part, count in zip(parts, cached)])
        return torch.cat([rows, torch.zeros(padding, *rows.shape[1:], dtype=dtype)]).to(device)

    backend.init_forward_metadata(batch)
    out = layer(*(flat_rows(parts) for parts in (q, k, v)), batch)
    backend.raise_on_fault()
    expected = [
        expected_of(q[b][count:], k[b], v[b], prefix, places, count)
        for b, ((prefix, places), count) in enumerate(zip(prompts, cached))
    ]
    got = out.unflatten(-1, (HEADS, dims[1]))[: sum(new)]
    assert relative_error(got.cpu(), torch.cat(expected)) <= MAX_RELATIVE_ERROR[dtype]
    return backend, batch, layer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_items_see_the_prefix_and_themselves(name, page_size, seed, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    run(name, page_size, seed, padding=seed % 2 * 7)


@pytest.mark.parametrize("name", ["torch_native", "intel_amx"])
def test_values_of_another_head_dim(name):
    run(name, 16, 5, dims=(64, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa3", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(name, page_size, dtype):
    for seed in range(4):
        run(name, page_size, seed, device="cuda", dtype=dtype, padding=seed % 2 * 7)


def test_errors_name_what_is_wrong():
    backend, batch, _ = run("intel_amx", 16, 1)
    with pytest.raises(ValueError, match="multi_item belongs to EXTEND, the batch is DECODE"):
        dataclasses.replace(batch, forward_mode=ForwardMode.DECODE)
    with pytest.raises(ValueError, match=r"token_pos_in_items_ptr must have shape \(8,\), got \(7,\)"):
        MultiItemScoringParams(
            prefix_len_ptr=torch.zeros(2), token_pos_in_items_ptr=torch.zeros(7), token_pos_in_items_len=4
        )
    with pytest.raises(ValueError, match=r"prefix_len_ptr must have 4 elements \(batch_size\), got 1"):
        one = MultiItemScoringParams(
            prefix_len_ptr=torch.zeros(1), token_pos_in_items_ptr=torch.zeros(3), token_pos_in_items_len=3
        )
        dataclasses.replace(batch, multi_item=one)
    for options in ({"sliding_window_size": 9}, {"attention_chunk_size": 64}):
        spec = dataclasses.replace(backend.spec, **options)
        other = get_backend_class("intel_amx")(spec, backend.limits)
        with pytest.raises(NotImplementedError, match="multi-item scoring knows no windows or chunks"):
            other._fmha.plan(None, batch)
