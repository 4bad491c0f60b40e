"""FlashAttention's caches against float64: appends, rotary embeddings, left padding, chunks, descales, ALiBi, MLA."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat import _cache_tables, _chunks, _device_windows
from attnops.compat import flash_attn_interface as fa3
from attnops.compat.sgl_kernel import flash_attn as sgl
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention, hidden_keys
from problems import FP8, mla_problem, paged_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]


def turned(x, positions, cos, sin, interleaved):
    """Rotated by complex numbers: x [S, H, D], positions [S], cos and sin [limit, R / 2]."""
    width = 2 * cos.shape[1]
    a, b = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else x[..., :width].chunk(2, -1)
    pairs = torch.complex(a.double(), b.double()) * torch.complex(cos.double(), sin.double())[positions][:, None]
    parts = [pairs.real, pairs.imag]
    front = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([front, x[..., width:].double()], -1)


MASKS = [(True, (-1, -1)), (False, (-1, -1)), (False, (17, 5)), (True, (9, 3))]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(
    ("seqlen_q", "chunk", "pad"),
    [(1, 0, True), (5, 0, True), (1, 13, False), (33, 21, True), (33, 32, False), (33, 1, False), (33, 500, False)],
)
def test_left_padding_and_chunks(monkeypatch, seqlen_q, chunk, pad, causal, window, paged):
    if chunk == 1:
        monkeypatch.setattr(_chunks, "MOST_REQUESTS", 50)  # more chunks than one plan takes
    lengths, pads = [130, 61, 64, 40], [33, 61, 0, 7] if pad else [0] * 4
    page_size = 16 if paged else 144
    problem = paged_problem(lengths, seqlen_q, page_size=page_size)
    rows = None if paged else problem.page_table[:, 0].contiguous()
    out, lse = fa3.flash_attn_with_kvcache(
        problem.q_by_request,
        problem.k_pages,
        problem.v_pages,
        cache_seqlens=problem.cache_seqlens,
        page_table=problem.page_table if paged else None,
        cache_batch_idx=rows,
        cache_leftpad=torch.tensor(pads).int() if pad else None,
        attention_chunk=chunk,
        causal=causal,
        window_size=torch.tensor(window),
        return_softmax_lse=True,
    )
    begin = 0
    for b, (length, skipped) in enumerate(zip(lengths, pads)):
        keys = slice(begin + skipped, begin + length)
        begin += length
        hidden = hidden_keys(seqlen_q, length - skipped, causal, window, chunk)
        k, v = problem.k_exact[keys], problem.v_exact[keys]
        expected = attention(problem.q_by_request[b], k, v, hidden, 0.125)
        assert relative_error(out[b], expected[0]) <= BOUND if length > skipped else not out[b].any()
        assert_lse_close(lse[b].T, expected[1])


def test_chunks_of_no_request_and_of_no_token():
    pages, options = torch.randn(2, 16, 2, 64).bfloat16(), {"attention_chunk": 5, "causal": True}
    q, none = torch.randn(0, 3, 4, 64).bfloat16(), torch.zeros(0, dtype=torch.int32)
    table = none.view(0, 1)
    out = fa3.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=none, page_table=table, **options)
    assert out.shape == q.shape
    bounds = {name: torch.zeros(3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    k = pages[0, :0]
    assert fa3.flash_attn_varlen_func(q[:, 0], k, k, **bounds, max_seqlen_q=0, max_seqlen_k=0, **options).shape[0] == 0


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_appends_turn_queries_and_new_keys(causal, window, interleaved, ragged):
    """Also with rows of a page table chosen by `cache_batch_idx`, and with offsets of their own."""
    cached, new, seqlens_q = [30, 64, 0, 7], [3, 1, 3, 2] if ragged else [3] * 4, [3, 2, 1, 3] if ragged else [3] * 4
    before = paged_problem(cached, 1, page_size=4, spare_pages=8)
    table = before.page_table.clone()
    used = set(table[table < 2**30].tolist())
    free = [page for page in range(before.k_pages.shape[0]) if page not in used]
    table = torch.nn.functional.pad(table, (0, 2), value=2**30)
    for b, (length, more) in enumerate(zip(cached, new)):
        for cell in range(-(-length // 4), -(-(length + more) // 4)):
            table[b, cell] = free.pop()
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    q, k, v = draw(sum(seqlens_q), 8, 64), draw(sum(new), 2, 64), draw(sum(new), 2, 64)
    angle = torch.rand(200, 16, generator=generator) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    starts = torch.tensor([5, 9, 0, 100]).int() if ragged else None
    order = torch.tensor([2, 0, 3, 1])
    options = {"cu_seqlens_q": torch.tensor([0, *seqlens_q]).cumsum(0).int(), "max_seqlen_q": 3} if ragged else {}
    options |= {"cu_seqlens_k_new": torch.tensor([0, *new]).cumsum(0).int()} if ragged else {}
    shaped = (q, k, v) if ragged else (q.view(4, 3, 8, 64), k.view(4, 3, 2, 64), v.view(4, 3, 2, 64))
    out = fa3.flash_attn_with_kvcache(
        shaped[0],
        before.k_pages,
        before.v_pages,
        *shaped[1:],
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        rotary_seqlens=starts,
        cache_seqlens=before.cache_seqlens,
        cache_batch_idx=order.argsort().int(),
        page_table=table[order],
        causal=causal,
        window_size=window,
        **options,
    ).reshape(-1, 8, 64)
    masked = causal or window != (-1, -1)
    at_q = at_k = at_old = 0
    for b, (length, more, count) in enumerate(zip(cached, new, seqlens_q)):
        first = length if starts is None else starts[b].item()
        own_q, own_k = q[at_q : at_q + count], k[at_k : at_k + more]
        steps = torch.arange(count) if masked else torch.zeros(count, dtype=torch.long)
        own_q = turned(own_q, first + steps, cos, sin, interleaved).bfloat16()
        own_k = turned(own_k, first + torch.arange(more), cos, sin, interleaved).bfloat16()
        keys = torch.cat([before.k_exact[at_old : at_old + length], own_k.float()])
        values = torch.cat([before.v_exact[at_old : at_old + length], v[at_k : at_k + more].float()])
        hidden = hidden_keys(count, length + more, causal, window)
        expected = attention(own_q, keys, values, hidden, 0.125)[0]
        assert relative_error(out[at_q : at_q + count], expected) <= BOUND
        at_q, at_k, at_old = at_q + count, at_k + more, at_old + length
        position = torch.arange(length, length + more)
        cell = table[b, position // 4].long()
        torch.testing.assert_close(before.k_pages[cell, position % 4].float(), own_k.float(), rtol=1e-2, atol=1e-2)
        assert torch.equal(before.v_pages[cell, position % 4], v[at_k - more : at_k])


def test_new_rows_without_room_or_request_are_not_stored():
    problem = paged_problem([14, 3], page_size=16)
    table = problem.page_table[:, :1].contiguous()
    rows = torch.full((2, 4, 2, 64), 5.0).bfloat16()
    pools = problem.k_pages.clone(), problem.v_pages.clone()
    lens = {"cache_seqlens": problem.cache_seqlens, "page_table": table}
    with pytest.raises(RuntimeError, match=r"cache_seqlens\[0\] must be below 17"):  # as long as it would be
        fa3.flash_attn_with_kvcache(problem.q_by_request, *pools, rows, rows, **lens, causal=True)
    written = (pools[0] == 5).all(-1).all(-1)
    assert written[table[0, 0]].tolist() == [False] * 14 + [True] * 2
    assert written[table[1, 0]].tolist() == [False] * 3 + [True] * 4 + [False] * 9
    assert written.sum() == 6


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_descales_of_every_request_and_float8_queries(seqlen_q):
    problem = paged_problem([130, 50, 33], seqlen_q, kv_dtype=FP8, scales="none")
    generator = torch.Generator().manual_seed(1)
    q_scale, k_scale, v_scale = (0.01 + 0.05 * torch.rand(3, 2, generator=generator) for _ in range(3))
    q = (problem.q_by_request * 8).to(FP8)
    for contiguous in (True, False):
        scales = [s if contiguous else s[:1].expand(3, 2) for s in (q_scale * 40, k_scale * 4, v_scale)]
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
        out = fa3.flash_attn_with_kvcache(
            q,
            problem.k_pages,
            problem.v_pages,
            cache_seqlens=problem.cache_seqlens,
            page_table=problem.page_table,
            causal=True,
            **named,
        )
        assert out.dtype == torch.bfloat16
        for b, length in enumerate(problem.cache_seqlens.tolist()):
            token = torch.arange(length)
            cells = problem.page_table[b, token // 16].long(), token % 16
            k, v = (pages.float()[cells] for pages in (problem.k_pages, problem.v_pages))
            own_q = q[b].float() * scales[0][b].repeat_interleave(4).unsqueeze(1)
            k, v = k * scales[1][b].unsqueeze(1), v * scales[2][b].unsqueeze(1)
            expected = attention(own_q, k, v, hidden_keys(seqlen_q, length, True, (-1, -1)), 0.125)[0]
            assert relative_error(out[b], expected) <= BOUND


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("counts", "causal"), [(1, False), (3, True), ([2, 1, 3], True)])
def test_qv_is_mla(counts, causal, joined):
    problem = mla_problem([130, 5, 64], counts, page_size=32)
    ragged = isinstance(counts, list)
    options = {"cu_seqlens_q": problem.cu_seqlens_q, "max_seqlen_q": 3} if ragged else {}
    q = problem.q if ragged else problem.q_by_request
    pages = problem.kv_pages.unsqueeze(2)
    caches = [pages[..., 512:], pages[..., :512]]
    out, lse = fa3.flash_attn_with_kvcache(
        q[..., 512:],
        *(caches if joined else [cache.clone() for cache in caches]),
        qv=q[..., :512],
        cache_seqlens=problem.cache_seqlens,
        page_table=problem.page_table,
        causal=causal,
        softmax_scale=0.1,
        return_softmax_lse=True,
        **options,
    )
    expected = problem.expected(softmax_scale=0.1, causal=causal)
    assert relative_error(out.reshape(-1, 16, 512), expected[0]) <= BOUND
    assert_lse_close(lse.transpose(-1, -2).reshape(-1, 16), expected[1])


@pytest.mark.parametrize(("dim_v", "kv_heads"), [(256, 2), (512, 2), (96, 1), (512, 1)])
@pytest.mark.parametrize(
    ("seqlen_q", "chunk", "causal", "window"),
    [(1, 0, True, (-1, -1)), (20, 0, True, (-1, -1)), (3, 7, True, (-1, -1)), (20, 0, False, (9, 4))],
)
def test_qv_of_any_heads_adds_its_products_with_values(seqlen_q, chunk, causal, window, dim_v, kv_heads):
    generator = torch.Generator().manual_seed(3)
    q, qv = (torch.randn(2, seqlen_q, 4, n, generator=generator).bfloat16() for n in (64, dim_v))
    k, v = (torch.randn(2, 40, kv_heads, n, generator=generator).bfloat16() for n in (64, dim_v))
    lens = torch.tensor([40, 23], dtype=torch.int32)
    masks = {"causal": causal, "window_size": window, "attention_chunk": chunk}
    out, lse = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lens, return_softmax_lse=True, **masks)
    for b, length in enumerate(lens.tolist()):
        keys = torch.cat([k[b, :length], v[b, :length]], -1)
        hidden = hidden_keys(seqlen_q, length, causal, window, chunk)
        scale = (64 + dim_v) ** -0.5
        expected = attention(torch.cat([q[b], qv[b]], -1), keys, v[b, :length], hidden, scale)
        assert relative_error(out[b], expected[0]) <= BOUND
        assert_lse_close(lse[b].T, expected[1])


@pytest.mark.parametrize("which", ["all", "q_descale", "k_descale", "v_descale", "shared"])
@pytest.mark.parametrize("counts", [2, [2, 1, 3]])
@pytest.mark.parametrize(("dim", "dim_v", "kv_heads"), [(64, 512, 1), (64, 96, 2)])
def test_descales_with_qv(dim, dim_v, kv_heads, counts, which):
    """Of every request, over FP8 caches; with float8 queries, too."""
    lengths, most = [40, 23, 31], 3 if isinstance(counts, list) else 2
    counts = counts if isinstance(counts, list) else [counts] * 3
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: (2 * torch.randn(*shape, generator=generator)).to(FP8)  # noqa: E731
    q, qv = (draw(sum(counts), 4, n) for n in (dim, dim_v))
    k, v = (draw(3, 40, kv_heads, n) for n in (dim, dim_v))
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: 0.1 + torch.rand(3, kv_heads, generator=generator) for name in names}
    if which == "shared":
        scales = {name: scale[:1].expand(3, kv_heads) for name, scale in scales.items()}
    elif which != "all":
        scales = {which: scales[which]}
    ragged = most == 3
    bounds = {"cu_seqlens_q": torch.tensor([0, *counts]).cumsum(0).int(), "max_seqlen_q": most} if ragged else {}
    shaped = [x if ragged else x.view(torch.uint8).unflatten(0, (3, 2)).view(FP8) for x in (q, qv)]
    lens = torch.tensor(lengths, dtype=torch.int32)
    out, lse = fa3.flash_attn_with_kvcache(
        shaped[0], k, v, qv=shaped[1], cache_seqlens=lens, causal=True, return_softmax_lse=True, **scales, **bounds
    )
    out, lse = out.reshape(-1, 4, dim_v), lse.transpose(-1, -2).reshape(-1, 4)
    of_q, of_k, of_v = (scales.get(name, torch.ones(3, kv_heads)) for name in names)
    begin = 0
    for b, (length, count) in enumerate(zip(lengths, counts)):
        rows = slice(begin, begin + count)
        begin += count
        keys, values = k[b, :length].float() * of_k[b][:, None], v[b, :length].float() * of_v[b][:, None]
        queries = torch.cat([q[rows], qv[rows]], -1).float() * of_q[b].repeat_interleave(4 // kv_heads)[:, None]
        scale = (dim + dim_v) ** -0.5
        hidden = hidden_keys(count, length, True, (-1, -1))
        expected = attention(queries, torch.cat([keys, values], -1), values, hidden, scale)
        assert relative_error(out[rows], expected[0]) <= 2 * BOUND  # scores are large: rounded queries show
        assert_lse_close(lse[rows], expected[1], 0.05)


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (9, -1)), (False, (9, 3)), (False, (-1, 2)), (False, (5, -1)), (False, (-1, -1))]
)
@pytest.mark.parametrize("form", ["cache", "rotary", "ragged", "chunks", "parts", "qv", "e5m2", "varlen"])
def test_a_window_that_the_host_may_not_read(monkeypatch, form, causal, window):
    """As on a GPU: the same results as with two numbers."""
    generator = torch.Generator().manual_seed(6)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    q, k, v = draw(2, 6, 4, 64), draw(2, 40, 2, 64), draw(2, 40, 2, 64)
    options = {"causal": causal, "cache_seqlens": torch.tensor([33, 4], dtype=torch.int32)}
    if form == "rotary":
        angles = torch.rand(64, 16, generator=generator)
        options |= {"k": draw(2, 6, 2, 64), "v": draw(2, 6, 2, 64), "rotary_cos": angles.cos()}
        options |= {"rotary_sin": angles.sin()}
    elif form == "ragged":
        q = q.flatten(0, 1)
        options |= {"cu_seqlens_q": torch.tensor([0, 7, 11], dtype=torch.int32), "max_seqlen_q": 7}
    elif form == "chunks":
        options["attention_chunk"] = 7
    elif form == "parts":
        monkeypatch.setattr(_device_windows, "_MOST_CELLS", 100)
    elif form == "qv":
        options["qv"] = draw(2, 6, 4, 64)
    elif form == "e5m2":
        k, v = k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)

    def call(given):
        if form == "varlen":
            bounds = torch.tensor([0, 7, 12], dtype=torch.int32), torch.tensor([0, 33, 37], dtype=torch.int32)
            flat = q.flatten(0, 1), k.flatten(0, 1)[:37], v.flatten(0, 1)[:37]
            return fa3.flash_attn_varlen_func(
                *flat, *bounds, 7, 33, causal=causal, window_size=given, return_attn_probs=True
            )
        caches = k.clone(), v.clone()
        return fa3.flash_attn_with_kvcache(q, *caches, window_size=given, return_softmax_lse=True, **options)

    expected, expected_lse = call(window)
    monkeypatch.setattr(_cache_tables, "host_may_read", lambda window: False)
    out, lse = call(torch.tensor(window))
    assert relative_error(out, expected.double()) <= BOUND
    assert_lse_close(lse, expected_lse)
    assert not torch.equal(call(torch.tensor([1, 1]))[0], out), "the window is read"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_on_a_gpu_is_read_by_a_graph(causal):
    generator = torch.Generator("cuda").manual_seed(6)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    q, k, v = draw(2, 6, 4, 64), draw(2, 40, 2, 64), draw(2, 40, 2, 64)
    lens = torch.tensor([33, 4], dtype=torch.int32, device="cuda")
    window = torch.tensor([9, 3], device="cuda")
    call = lambda given: fa3.flash_attn_with_kvcache(  # noqa: E731
        q, k, v, cache_seqlens=lens, causal=causal, window_size=given
    )
    call(window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(window)
    for sides in ((9, 3), (2, 0), (-1, 5)):
        window.copy_(torch.tensor(sides))
        graph.replay()
        assert relative_error(out, call(sides).double()) <= BOUND


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_do_not_depend_on_the_batch(splits):
    problem = paged_problem([1500, 64, 700])
    shared = {"num_splits": splits, "scheduler_metadata": torch.zeros(3), "pack_gqa": True, "sm_margin": 4, "ver": 3}
    cache = {"cache_seqlens": problem.cache_seqlens, "page_table": problem.page_table}
    together = fa3.flash_attn_with_kvcache(problem.q_by_request, problem.k_pages, problem.v_pages, **cache, **shared)
    one = {name: value[:1] for name, value in cache.items()}
    alone = fa3.flash_attn_with_kvcache(problem.q_by_request[:1], problem.k_pages, problem.v_pages, **one, **shared)
    assert torch.equal(alone[0], together[0])
    assert relative_error(together.flatten(0, 1), problem.expected()[0]) <= BOUND


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (9,)])
def test_combine(shape, dtype):
    generator = torch.Generator().manual_seed(2)
    outs = torch.randn(4, *shape[:-1], 3, shape[-1], 64, generator=generator).transpose(-2, -3)
    lses = torch.randn(4, *shape, 3, generator=generator) * 3
    lses[2:, ..., 1] = -math.inf
    lses[:, 0] = -math.inf
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=dtype)
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0).unsqueeze(-1)
    expected = (weights * outs.double()).sum(0)
    assert out.dtype == (dtype or torch.float32) and out.shape == expected.shape and lse.shape == expected.shape[:-1]
    assert relative_error(out, expected) <= (1e-3 if dtype else 1e-5)
    assert_lse_close(lse, torch.logsumexp(lses.double(), 0))
    given = torch.empty_like(out)
    assert fa3.flash_attn_combine(outs, lses, given)[0] is given


@pytest.mark.parametrize("chunk", [0, 11])
@pytest.mark.parametrize("used", ["q", "k", "both"])
def test_tokens_in_use(used, chunk):
    problem = ragged_problem([33, 4, 64], [40, 5, 64])
    used_q = torch.tensor([20, 4, 0]).int() if used != "k" else None
    used_k = torch.tensor([31, 2, 64]).int() if used != "q" else None
    out, lse = sgl.flash_attn_varlen_func(
        problem.q,
        problem.k,
        problem.v,
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        64,
        64,
        seqused_q=used_q,
        seqused_k=used_k,
        attention_chunk=chunk,
        causal=True,
        return_softmax_lse=True,
    )
    assert out.shape == problem.q.shape
    for b in range(3):
        begin, end = problem.cu_seqlens_q[b].item(), problem.cu_seqlens_q[b + 1].item()
        first, last = problem.cu_seqlens_k[b].item(), problem.cu_seqlens_k[b + 1].item()
        count = end - begin if used_q is None else used_q[b].item()
        length = last - first if used_k is None else used_k[b].item()
        q, k, v = problem.q[begin : begin + count], problem.k[first : first + length], problem.v[first : first + length]
        expected = attention(q, k, v, hidden_keys(count, length, True, (-1, -1), chunk), 0.125)
        if count:
            assert relative_error(out[begin : begin + count], expected[0]) <= BOUND
        assert_lse_close(lse[:, begin : begin + count].T, expected[1])
        assert not out[begin + count : end].any(), "rows that are not in use are zeros"


@pytest.mark.parametrize("chunk", [0, 11])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_values_of_another_head_dim(seqlen_q, chunk):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, n, h, 96, generator=generator).bfloat16() for n, h in ((seqlen_q, 4), (40, 2)))
    v = torch.randn(2, 40, 2, 64, generator=generator).bfloat16()
    given = torch.empty(2, seqlen_q, 4, 64, dtype=torch.bfloat16)
    out = fa3.flash_attn_with_kvcache(q, k, v, causal=True, attention_chunk=chunk, out=given)
    assert out.data_ptr() == given.data_ptr()
    for b in range(2):
        expected = attention(q[b], k[b], v[b], hidden_keys(seqlen_q, 40, True, (-1, -1), chunk), 96**-0.5)[0]
        assert relative_error(out[b], expected) <= BOUND
