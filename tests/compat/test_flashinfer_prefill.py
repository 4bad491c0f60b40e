"""FlashInfer's prefill wrappers against the reference: masks of every kind, windows, caps, rotary, FP8, graphs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, paged_problem, ragged_problem

BF16 = torch.bfloat16
BOUND = MAX_RELATIVE_ERROR[BF16]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)
LENGTHS, NEW = [130, 5, 64, 0, 40], [40, 5, 1, 0, 0]
HEADS = (8, 2, 64)
PACKED = {False: lambda mask: mask.reshape(-1), True: lambda mask: reference.pack_tree_mask(mask.reshape(1, -1))[0]}


def check(out, lse, expected, bound=BOUND):
    assert relative_error(out, expected[0]) <= bound
    if lse is not None:
        assert_lse_close(lse * math.log(2), expected[1])


def planned(problem, page_size=16, wrapper=None, **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE) if wrapper is None else wrapper
    indptr, indices, last = csr(problem, page_size)
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, last, *HEADS, page_size, **{"q_data_type": BF16, **options})
    return wrapper


def random_masks(q_lens, k_lens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(q, k, generator=generator) < 0.4 for q, k in zip(q_lens, k_lens)]


def masked_expected(problem_q, keys, masks, bounds, scale, cap=0.0, window=-1):
    """Row by row in float64, over the keys that a mask lets it see."""
    outs, lses = [], []
    for b, mask in enumerate(masks):
        k, v = keys[b]
        visible = mask.clone()
        if window >= 0:
            visible &= reference.visibility(*mask.shape, causal=False, window_left=window)
        q = problem_q[bounds[b] : bounds[b + 1]].double().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qhgd,khd->hgqk", q, k.double()) * scale
        scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        outs.append(torch.einsum("hgqk,khd->qhgd", weights, v.double()).flatten(1, 2))
        lses.append(scores.logsumexp(-1).flatten(0, 1).T)
    return torch.cat(outs), torch.cat(lses)


def keys_of(problem):
    """Each request's K and V, out of its pages."""
    size, found = problem.k_pages.shape[1], []
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        token = torch.arange(length)
        page = problem.page_table[b, token // size].long()
        found.append((problem.k_pages[page, token % size], problem.v_pages[page, token % size]))
    return found


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"causal": True}, {}),
        ({}, {"causal": False}),
        ({"causal": True, "window_left": 20, "logits_soft_cap": 3.0}, {"window_left": 20, "logit_cap": 3.0}),
        ({"window_left": 20, "sm_scale": 0.2}, {"causal": False, "window_left": 20, "softmax_scale": 0.2}),
    ],
)
def test_paged(theirs, ours, layout, page_size):
    problem = paged_problem(LENGTHS, NEW, page_size=page_size, layout=layout.lower())
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    planned(problem, page_size, wrapper, **theirs)
    pages = (problem.k_pages, problem.v_pages)
    cache = pages if layout == "NHD" else tuple(x.transpose(1, 2) for x in pages)
    sinks = torch.randn(8)
    given = torch.full((46, 8), math.nan)
    out, lse = wrapper.run(problem.q, cache, sinks=sinks, lse=given, return_lse=True)
    assert lse is given
    check(out, lse, problem.expected(**ours, sinks=sinks))
    destination = torch.full_like(out, math.nan)
    assert wrapper.run(problem.q, cache, sinks=sinks, out=destination) is destination
    assert torch.equal(destination, out)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_left": 9, "logits_soft_cap": 2.0}])
def test_a_custom_mask_over_prefix_and_new_tokens(options, packed):
    problem = paged_problem(LENGTHS, NEW)
    masks = random_masks(NEW, LENGTHS)
    flat = torch.cat([PACKED[packed](mask) for mask in masks])
    wrapper = planned(problem, **{"packed_custom_mask" if packed else "custom_mask": flat}, **options)
    out, lse = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), return_lse=True)
    bounds = problem.cu_seqlens_q.tolist()
    cap, window = options.get("logits_soft_cap", 0.0), options.get("window_left", -1)
    expected = masked_expected(problem.q, keys_of(problem), masks, bounds, 64**-0.5, cap, window)
    check(out, lse, expected)
    with pytest.raises(ValueError, match=r"custom_mask must be .* got"):
        planned(problem, custom_mask=torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("packed", [False, True])
def test_a_custom_mask_over_ragged_keys_fewer_than_queries_too(packed):
    q_lens, k_lens = [30, 7, 1], [12, 7, 50]
    problem = ragged_problem(q_lens, k_lens)
    masks = random_masks(q_lens, k_lens)
    flat = torch.cat([PACKED[packed](mask) for mask in masks])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    name = "packed_custom_mask" if packed else "custom_mask"
    wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *HEADS, q_data_type=BF16, **{name: flat})
    out, lse = wrapper.run_return_lse(problem.q, problem.k, problem.v)
    ends = problem.cu_seqlens_k.tolist()
    keys = [(problem.k[a:b], problem.v[a:b]) for a, b in itertools.pairwise(ends)]
    check(out[:38], lse[:38], masked_expected(problem.q, keys, masks, problem.cu_seqlens_q.tolist(), 64**-0.5))
    assert (out[38:] == 0).all() and (lse[38:] == -math.inf).all(), "rows behind the last request"


@pytest.mark.parametrize(("causal", "layout"), [(True, "NHD"), (False, "HND")])
def test_ragged_with_two_head_dims(causal, layout):
    q_lens = [40, 1, 0, 66]
    problem = ragged_problem(q_lens, q_lens, head_dim=192, head_dim_v=128)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, 8, 2, 192, 128, causal=causal, q_data_type="bfloat16")
    k, v = (problem.k, problem.v) if layout == "NHD" else (x.transpose(0, 1) for x in (problem.k, problem.v))
    out, lse = wrapper.run(problem.q, k, v, q_scale=0.5, k_scale=2.0, v_scale=3.0, return_lse=True)
    expected = problem.expected(causal=causal)
    check(out, lse, (3 * expected[0], expected[1]))


def test_rotary_embeddings_on_load():
    problem = paged_problem(LENGTHS, NEW, dtype=torch.float32)
    wrapper = planned(problem, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=500.0, q_data_type="float32")
    out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages))
    bounds = problem.cu_seqlens_q.tolist()
    q, k, v = problem.q, *(torch.cat(x) for x in zip(*keys_of(problem)))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0, "q_data_type": "float32"}
    ragged.plan(problem.cu_seqlens_q, torch.tensor(ends, dtype=torch.int32), *HEADS, **options)
    assert relative_error(ragged.run(q, k, v), out.double()) < 1e-6

    def turned(x, first):
        angle = (torch.arange(x.shape[0]) + first).double().unsqueeze(1) / 500.0 ** (torch.arange(0, 64, 2) / 64)
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        a, b = x.double().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    parts = []
    for b, (new, length) in enumerate(zip(NEW, LENGTHS)):
        rows, keys = q[bounds[b] : bounds[b + 1]], slice(ends[b], ends[b + 1])
        parts.append(reference.attention(turned(rows, length - new), turned(k[keys], 0), v[keys])[0])
    assert relative_error(out, torch.cat(parts)) < 1e-5


def test_fp8_with_scales_per_head():
    q_lens = [40, 1, 20]
    problem = ragged_problem(q_lens, q_lens, padding=0)
    q, k, v = (x.to(FP8) for x in (problem.q, problem.k, problem.v))
    scales = [torch.rand(n) + 0.5 for n in (8, 2, 2)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    options = {"causal": True, "q_data_type": FP8, "o_data_type": BF16}
    wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *HEADS, **options)
    out = wrapper.run(q, k, v, *scales)
    exact = [x.double() * scale.double().view(-1, 1) for x, scale in zip((q, k, v), scales)]
    expected = reference.ragged_attention(*exact, problem.cu_seqlens_q, problem.cu_seqlens_k)
    assert out.dtype == BF16
    check(out, None, expected, 2 * BOUND)  # queries are rounded once more, with their scales
    single = flashinfer.single_prefill_with_kv_cache
    one = single(q[:40], k[:40], v[:40], *scales, o_dtype=BF16, causal=True)
    assert torch.equal(one, out[:40])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_single_request(layout):
    problem = ragged_problem([30], [75], padding=0)
    k, v = (problem.k, problem.v) if layout == "NHD" else (x.transpose(0, 1) for x in (problem.k, problem.v))
    call = flashinfer.single_prefill_with_kv_cache_return_lse
    out, lse = call(problem.q, k, v, causal=True, kv_layout=layout, window_left=20, logits_soft_cap=3.0)
    check(out, lse, problem.expected(window_left=20, logit_cap=3.0))
    mask = random_masks([30], [75])[0]
    out, lse = call(problem.q, k, v, custom_mask=mask, kv_layout=layout)
    check(out, lse, masked_expected(problem.q, [(problem.k, problem.v)], [mask], [0, 30], 64**-0.5))
    assert torch.equal(
        flashinfer.single_prefill_with_kv_cache(
            problem.q, k, v, packed_custom_mask=PACKED[True](mask), kv_layout=layout
        ),
        out,
    )


def test_graph_buffers_keep_their_addresses_and_the_wrappers_follow_new_plans():
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 60, 3)]
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        WORKSPACE, "NHD", True, *(torch.zeros_like(buffers[0]),) * 2
    )
    assert paged.is_cuda_graph_enabled and ragged.is_cuda_graph_enabled
    seen = set()
    for lengths, new in (([130, 5, 64], [10, 5, 15]), ([3, 200, 30], [1, 20, 9])):
        problem = paged_problem(lengths, new)
        planned(problem, wrapper=paged, causal=True)
        out = paged.run(problem.q, (problem.k_pages, problem.v_pages))
        check(out, None, problem.expected())
        tiles = next(iter(paged._prefill._plans.values())).tile_order
        seen.add((paged._lens.data_ptr(), paged._indices.data_ptr(), tiles.data_ptr()))
        other = ragged_problem(new, new)
        ragged.plan(other.cu_seqlens_q, other.cu_seqlens_q, *HEADS, causal=True, q_data_type=BF16)
        check(ragged.run(other.q, other.k, other.v), None, other.expected())
    assert len(seen) == 1
    with pytest.raises(ValueError, match="use_cuda_graph fixes whether there is a custom mask"):
        planned(problem, wrapper=paged, custom_mask=torch.ones(1, dtype=torch.bool))
    bare = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    with pytest.raises(ValueError, match="a custom mask with use_cuda_graph needs custom_mask_buf and mask_indptr_buf"):
        planned(problem, wrapper=bare, custom_mask=torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="three paged_kv buffers"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)


@pytest.mark.parametrize("masked", [False, True])
def test_a_scaled_output(masked):
    """real = stored x scale, and what is too large for FP8 saturates."""
    problem = ragged_problem([10, 3], [30, 5], padding=0)
    masks = random_masks([10, 3], [30, 5])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    mask = torch.cat([mask.flatten() for mask in masks]) if masked else None
    options = {"q_data_type": BF16, "o_data_type": FP8, "custom_mask": mask}
    wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *HEADS, **options)
    exact = wrapper.run(problem.q, problem.k, problem.v, out=torch.empty_like(problem.q, dtype=torch.float32))
    out = wrapper.run(problem.q, problem.k, problem.v, o_scale=0.05)
    assert out.dtype == FP8
    assert relative_error(out.float() * 0.05, exact.double()) <= 0.03
    assert wrapper.run(problem.q, problem.k, problem.v, o_scale=1e-9).float().abs().max() == 448
    with pytest.raises(ValueError, match="o_scale must be a finite positive value, got 0"):
        wrapper.run(problem.q, problem.k, problem.v, o_scale=0)


def masks_in_a_graph(kind: str):
    """A wrapper with `use_cuda_graph`, and its `plan` of prompts of these lengths over pages or ragged."""
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 99, 3)]
    masks = torch.zeros(999, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)
    if kind == "pages":
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, *masks)
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers[:2], *masks)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["pages", "ragged"])
def test_masks_of_new_tokens_in_a_graph(kind, packed):
    """Also of requests with fewer keys than queries; the second plan has fewer queries than the first."""
    wrapper = masks_in_a_graph(kind)
    for counts, lengths in (([10, 3, 12], [70, 2, 64]), ([1, 0, 9], [30, 5, 9])):
        masks = random_masks(counts, lengths)
        for mask, count, length in zip(masks, counts, lengths):
            mask[:, : max(length - count, 0)] = True
        given = torch.cat([PACKED[True](mask) if packed else mask.flatten() for mask in masks])
        given = torch.cat([given, given[:3]])  # a longer one is taken
        named = {"packed_custom_mask" if packed else "custom_mask": given}
        bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
        if kind == "pages":
            problem = paged_problem(lengths, counts)
            planned(problem, wrapper=wrapper, **named)
            out, lse = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), return_lse=True)
            ends = torch.tensor(lengths).cumsum(0).tolist()
            keys = [(problem.k_exact[e - n : e], problem.v_exact[e - n : e]) for e, n in zip(ends, lengths)]
        else:
            problem = ragged_problem(counts, lengths)
            wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *HEADS, q_data_type=BF16, **named)
            out, lse = wrapper.run(problem.q, problem.k, problem.v, return_lse=True)
            ends = problem.cu_seqlens_k.tolist()
            keys = [(problem.k[a:b], problem.v[a:b]) for a, b in itertools.pairwise(ends)]
        used = bounds[-1]
        check(out[:used], lse[:used], masked_expected(problem.q, keys, masks, bounds, 64**-0.5))
    masks[0][0, 4] = False
    named = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    plan = lambda **options: (  # noqa: E731
        planned(problem, wrapper=wrapper, **options)
        if kind == "pages"
        else wrapper.plan(problem.cu_seqlens_q, problem.cu_seqlens_k, *HEADS, q_data_type=BF16, **options)
    )
    with pytest.raises(NotImplementedError, match="with use_cuda_graph a custom mask that hides keys ahead"):
        plan(**named)
    with pytest.raises(ValueError, match="fixes whether there is a custom mask"):
        plan(causal=True)
    with pytest.raises(ValueError, match=r"custom_mask must be torch.bool of \d+ elements"):
        plan(custom_mask=torch.ones(5, dtype=torch.bool))
    args = ((problem.k_pages, problem.v_pages),) if kind == "pages" else (problem.k, problem.v)
    with pytest.raises(NotImplementedError, match="window_left=3 with a custom mask and use_cuda_graph"):
        wrapper.forward(problem.q, *args, window_left=3)
    more = [40, 1, 1]
    with pytest.raises(ValueError, match="42 queries of at most 40 a request; use_cuda_graph fixes 25 and 16"):
        problem = paged_problem(more, more) if kind == "pages" else ragged_problem(more, more)
        plan(custom_mask=torch.ones(1602, dtype=torch.bool))


def test_forward_takes_its_own_options():
    problem = paged_problem(LENGTHS, NEW)
    wrapper = planned(problem, causal=True, window_left=3)
    cache = (problem.k_pages, problem.v_pages)
    check(wrapper.forward(problem.q, cache), None, problem.expected(causal=False))
    check(wrapper.forward(problem.q, cache, True, sm_scale=0.3), None, problem.expected(softmax_scale=0.3))
    other = ragged_problem([9, 30], [9, 30])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.begin_forward(other.cu_seqlens_q, other.cu_seqlens_k, *HEADS, q_data_type=BF16)
    check(ragged.forward(other.q, other.k, other.v, True), None, other.expected())


def test_calls_that_do_not_fit_the_plan():
    problem = paged_problem(LENGTHS, NEW)
    cache = (problem.k_pages, problem.v_pages)
    with pytest.raises(RuntimeError, match="plan must run first"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).run(problem.q, cache)
    wrapper = planned(problem)
    with pytest.raises(ValueError, match=r"q's dtype is torch\.float16, planned was torch\.bfloat16"):
        wrapper.run(problem.q.half(), cache)
    with pytest.raises(ValueError, match=r"the number of heads is \(4, 2\), planned was \(8, 2\)"):
        wrapper.run(problem.q[:, :4], cache)
    with pytest.raises(NotImplementedError, match="1 more positional arguments"):
        wrapper.run(problem.q, cache, torch.ones(8))
