"""Extents of 0 are legal everywhere: requests, tokens, table columns, pages, slots."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan, MlaDecodePlan, XqaDecodePlan
from attnops.ops.layer_call import bind_mla_layer, bind_xqa_layer, mla_layer, repeatable, xqa_layer
from right_calls import moved, ops_calls

CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def int32(*shape: int, device: str) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32, device=device)


def lengths_of(batch: int, device: str, length: int = 0) -> torch.Tensor:
    return torch.full((batch,), length, dtype=torch.int32, device=device)


# requests, table columns, pages, fixed splits; lengths are 0, so no request needs a page
EMPTY = [(b, columns, pages, fixed) for b in (0, 1, 3) for columns in (0, 2) for pages in (0, 4) for fixed in (0, 64)]


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])  # kernels of their own, whose hosts count clusters
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_xqa_decode(device, csr, seqlen_q, dim, kv_dtype):
    dtype = torch.float16 if kv_dtype == torch.float16 else torch.bfloat16
    for batch, columns, pages, fixed in EMPTY:
        heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": dim, "seqlen_q": seqlen_q}
        plan = XqaDecodePlan.allocate(batch, **heads, fixed_split_tokens=fixed, max_seqlen_k=64, device=device)
        seqlens = lengths_of(batch, device)
        ops.xqa_decode_plan(plan, seqlens)
        table = int32(0, device=device) if csr else int32(batch, columns, device=device)
        pool = torch.full((pages, PAGE, KV_HEADS, dim), float("nan"), device=device).to(kv_dtype)
        q = torch.randn(batch, seqlen_q, HEADS, dim, device=device).to(dtype)
        indptr = int32(batch + 1, device=device) if csr else None
        for report in (None, int32(8, device=device)):
            out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:-1], 7.0, device=device)
            ops.xqa_decode(q, pool, pool, table, seqlens, plan, kv_indptr=indptr, out=out, lse=lse, report=report)
            assert not out.any() and (lse == -torch.inf).all(), (batch, columns, pages, fixed)
            assert report is None or not report.any()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_mla_decode(device, csr, seqlen_q, kv_dtype):
    for heads in (5, 128):
        for batch, columns, pages, fixed in EMPTY:
            options = {"fixed_split_tokens": fixed, "max_seqlen_k": 64, "device": device}
            plan = MlaDecodePlan.allocate(batch, num_q_heads=heads, seqlen_q=seqlen_q, **options)
            seqlens = lengths_of(batch, device)
            ops.mla_decode_plan(plan, seqlens)
            table = int32(0, device=device) if csr else int32(batch, columns, device=device)
            row = 656 if kv_dtype == torch.uint8 else 576
            pool = torch.zeros(pages, 64, row, device=device).to(kv_dtype)
            q = torch.randn(batch, seqlen_q, heads, 576, device=device).bfloat16()
            indptr = int32(batch + 1, device=device) if csr else None
            out = torch.full((batch, seqlen_q, heads, 512), 7.0, dtype=torch.bfloat16, device=device)
            lse = torch.full((batch, seqlen_q, heads), 7.0, device=device)
            options = {"softmax_scale": 0.1, "kv_indptr": indptr}
            ops.mla_decode(q, pool, table, seqlens, plan, out=out, lse=lse, **options)
            assert not out.any() and (lse == -torch.inf).all(), (heads, batch, columns, pages, fixed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_fmha(device, dtype):
    for batch in (0, 1, 3):
        for tokens_of_each in (0, 2):
            total = batch * tokens_of_each
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens_of_each
            q = torch.randn(total, HEADS, DIM, device=device).to(dtype)
            plan = FmhaPlan.allocate(total, batch, device=device)
            no_keys = int32(batch + 1, device=device)
            ops.fmha_plan(plan, bounds, no_keys)
            keys = torch.zeros(0, KV_HEADS, DIM, device=device, dtype=dtype)
            out, lse = ops.fmha_varlen(q, keys, keys, bounds, no_keys, plan, return_lse=True)
            assert not out.any() and (lse == -torch.inf).all()
            for columns, pages in ((0, 0), (2, 0), (0, 4)):
                seqlens = lengths_of(batch, device)
                ops.fmha_plan(plan, bounds, cache_seqlens=seqlens)
                pool = torch.full((pages, PAGE, KV_HEADS, DIM), float("nan"), device=device, dtype=dtype)
                table = int32(batch, columns, device=device)
                out, lse = ops.fmha_paged(q, pool, pool, table, seqlens, bounds, plan, return_lse=True)
                assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_tables_and_slots(device):
    for batch in (0, 1, 3):
        for requests, context in ((0, 8), (4, 0), (4, 8)):
            slots, seqlens = int32(requests, context, device=device), lengths_of(batch, device)
            rows = torch.zeros(batch, dtype=torch.int64, device=device)
            for slot_map in (None, int32(0, device=device), int32(9, device=device)):
                if requests == 0 and batch:
                    continue  # a request needs a row
                options = {"slot_map": slot_map}
                table = ops.build_page_table(slots, rows, seqlens, 4, **options)
                assert table.shape[0] == batch
                ops.build_page_table(slots, rows, seqlens, 4, page_table=int32(batch, 0, device=device), **options)
                indptr, _, last = ops.build_kv_indices(slots, rows, seqlens, 4, **options)
                assert indptr.tolist() == [0] * (batch + 1) and last.tolist() == [0] * batch
                empty = int32(0, device=device)
                ops.build_kv_indices(slots, rows, seqlens, 4, kv_indices=empty, **options)
        assert ops.build_cu_seqlens(lengths_of(batch, device)).tolist() == [0] * (batch + 1)
    nothing, one = (torch.zeros(n, dtype=torch.int64, device=device) for n in (0, 1))
    assert ops.translate_slots(nothing, int32(0, device=device)).numel() == 0
    assert ops.translate_slots(nothing - 1, int32(5, device=device)).numel() == 0
    ops.translate_slots(one - 1, int32(0, device=device))


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_lengths_above_tables_without_columns(device):
    """Clamped to none, whatever a length says."""
    slots, rows = int32(4, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    seqlens = lengths_of(3, device, length=7)
    ops.build_page_table(slots, rows, seqlens, 4, page_table=int32(3, 0, device=device))
    ops.build_page_table(slots[:, :0], rows, seqlens, 4)
    indptr, _, last = ops.build_kv_indices(slots[:, :0], rows, seqlens, 4)
    assert indptr.tolist() == [0] * 4 and last.tolist() == [0] * 3


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_stores_and_merges(device):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for pages, tokens in ((0, 0), (2, 0)):
            pool = torch.zeros(pages, PAGE, KV_HEADS, DIM, device=device).to(dtype)
            rows = torch.zeros(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
            slots = torch.zeros(tokens, dtype=torch.int64, device=device)
            ops.store_kv(pool, pool.clone(), rows, rows, slots)
            latents = torch.zeros(pages, 64, 576, device=device).to(dtype)
            ops.store_mla_kv(latents, torch.zeros(tokens, 576, dtype=torch.bfloat16, device=device), slots)
    for tokens, heads in ((0, 4), (3, 0), (0, 0)):
        out, lse = torch.zeros(tokens, heads, DIM, device=device), torch.zeros(tokens, heads, device=device)
        assert ops.merge_state(out, lse, out, lse)[0].shape == out.shape
        for states in (0, 1, 2):
            got, got_lse = ops.merge_states(out.expand(states, -1, -1, -1), lse.expand(states, -1, -1).contiguous())
            assert got.shape == out.shape and got_lse.shape == lse.shape
    out, lse = ops.merge_states(torch.zeros(0, 3, 2, DIM, device=device), torch.zeros(0, 3, 2, device=device))
    assert not out.any() and (lse == -torch.inf).all(), "a merge of no state is the empty state"


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_bound_layers_of_no_request(device):
    options = {"softmax_scale": 0.2, "causal": True, "window_left": -1, "logit_cap": 0.0, "report": None}
    seqlens, table, slots = (int32(*shape, device=device) for shape in ((0,), (0, 2), (0,)))
    heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    plan = XqaDecodePlan.allocate(0, **heads, device=device)
    ops.xqa_decode_plan(plan, seqlens)
    pool = torch.zeros(2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
    rows = torch.zeros(0, 1, HEADS, DIM, dtype=torch.bfloat16, device=device)
    bound = bind_xqa_layer(rows, rows, pool, pool, table, seqlens, plan, **options)
    call, flat, new = repeatable(xqa_layer, bound), rows.view(0, HEADS * DIM), pool.new_zeros(0, KV_HEADS, DIM)
    with torch.no_grad():
        for _ in range(3):
            call(flat.clone(), flat, new, new, slots, seqlens, None, None, None, None)
    plan = MlaDecodePlan.allocate(0, num_q_heads=16, device=device)
    ops.mla_decode_plan(plan, seqlens)
    latents = torch.zeros(2, 64, 576, dtype=torch.bfloat16, device=device)
    out, q = latents.new_zeros(0, 1, 16, 512), latents.new_zeros(0, 1, 16, 576)
    bound = bind_mla_layer(out, q, None, latents, table, seqlens, plan, **options)
    call = repeatable(mla_layer, bound)
    with torch.no_grad():
        for _ in range(3):
            call(
                out.view(0, 16 * 512), q.view(0, 16 * 576), None, q.view(0, 576), None, slots, seqlens, None, None, None
            )


# Requests have no bounds or plan of their own in the right call of these: the tests above and those of their folders.
WITH_A_PLAN = {"xqa_decode", "mla_decode", "fmha_varlen", "sparse_mla_decode"}
WITH_A_PLAN |= {f"{op}_plan" for op in ("xqa_decode", "mla_decode", "fmha", "sparse_mla", "delta", "ssd")}


def emptied(given: dict, size: int, axes: tuple[int, ...], only: str = "") -> dict:
    """A call's arguments with 0 for `size` in these axes of all tensors, or of one; bounds of no request are one 0."""
    spoilt = dict(given)
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or (only and name != only):
            continue
        shape = [0 if extent == size and axis in axes else extent for axis, extent in enumerate(value.shape)]
        if ("cu_seqlens" in name or "indptr" in name) and value.shape == (size + 1,):
            shape = [1]
        if shape != list(value.shape):
            spoilt[name] = torch.zeros(shape, dtype=torch.uint8).to(value.dtype)
    return spoilt


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize("name", sorted(ops_calls()))
def test_any_extent_of_any_op_may_be_zero(name, device):
    """A right call with each extent made 0, in all tensors and in one: it is right, or an error with a name."""
    tensors = {key: value for key, value in ops_calls()[name][1].items() if isinstance(value, torch.Tensor)}
    sizes = sorted({size for tensor in tensors.values() for size in tensor.shape if size})
    axes = [(0,), (1,), (2,), (3,), (0, 1, 2, 3)]
    ways = [(size, of, "") for size in sizes for of in axes]
    ways += [(size, (axis,), key) for key, tensor in tensors.items() for axis, size in enumerate(tensor.shape)]
    right = unserved = 0
    for size, of, only in ways:
        function, given = ops_calls()[name]
        given = {key: moved(value, device) for key, value in emptied(given, size, of, only).items()}
        try:
            function(**given)
        except (RuntimeError, ValueError) as error:
            message = str(error)
            unserved += device == "cuda" and "no kernel" in message
            assert f"attnops::{name}" in message or (device == "cuda" and "no kernel" in message), (size, of, only)
        else:
            right += 1
        if device == "cuda":
            torch.cuda.synchronize()
    assert right or unserved or name in WITH_A_PLAN
