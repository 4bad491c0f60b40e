"""hidden_keys of both fmha ops: queries that do not see a stretch of keys, beside float64 over masks."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops, reference
from attnops.metadata import FmhaPlan
from checks import assert_attention_close, assert_lse_close
from draft_trees import attention_over
from fmha_calls import plan_of
from problems import paged_problem, ragged_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Queries and keys of requests: none, one, a few, and many tiles.
LENGTHS = [(0, 5), (1, 700), (40, 40), (130, 600), (257, 1030), (33, 900)]


def draw_stretches(rng: random.Random, count: int, keys: int) -> list[tuple[int, int]]:
    """Bounds that never fall: as of items behind a prefix, or any."""
    if rng.random() < 0.5:
        prefix, bounds, item = rng.randrange(keys + 1), [], 0
        for i in range(count):
            position = keys - count + i
            item = position + 1 if position < prefix or rng.random() < 0.1 else item
            bounds.append((prefix, item if position >= prefix else prefix))
        return bounds
    begins, ends = (sorted(rng.randrange(keys + 1) for _ in range(count)) for _ in range(2))
    return list(zip(begins, ends))


def seen_of(bounds: list[tuple[int, int]], keys: int, causal: bool, window: int) -> torch.Tensor:
    position = torch.arange(keys - len(bounds), keys).view(-1, 1)
    key = torch.arange(keys).view(1, -1)
    hidden = torch.tensor(bounds, dtype=torch.int64).view(-1, 2)
    seen = (key < hidden[:, :1]) | (key >= hidden[:, 1:])
    seen &= (key <= position) if causal else (key >= 0)
    return seen & (key >= position - window) if window >= 0 else seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ["", "80"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 2, 64), (4, 2, 256), (6, 1, 40)], ids=str)
@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, None), (FP16, None), (BF16, FP8), (FP32, None)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
def test_hidden_keys(device, arch, heads, dtype, kv_dtype, page_size, monkeypatch):
    if device == "cpu" and (arch or heads[0] > 8):
        pytest.skip("a GPU's kernels, or the same code as with fewer heads")
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", arch)
    (q_heads, kv_heads, dim), seed = heads, page_size + heads[0]
    rng = random.Random(seed)
    lengths_q, lengths_k = [q for q, _ in LENGTHS], [k for _, k in LENGTHS]
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "seed": seed}
    shape |= {"dtype": dtype, "kv_dtype": kv_dtype}
    for causal, window in ((True, -1), (True, 200), (False, -1)):
        bounds = [draw_stretches(rng, q, k) for q, k in LENGTHS]
        flat = [pair for request in bounds for pair in request]
        if page_size:
            problem = paged_problem(lengths_k, lengths_q, page_size=page_size, **shape)
        else:
            problem = ragged_problem(lengths_q, lengths_k, **shape)
            flat += [(-5, 1 << 30)] * (problem.q.shape[0] - len(flat))  # of padding
        hidden = torch.tensor(flat, dtype=torch.int32)
        on_device = problem.to(device)
        plan = plan_of(on_device, causal=causal, window_left=window, tile_q=[4, 32, 128][seed % 3])
        options = {"hidden_keys": hidden.to(device), "causal": causal, "window_left": window, "return_lse": True}
        options |= {"k_scale": on_device.k_scale, "v_scale": on_device.v_scale, "softmax_scale": 0.15}
        if page_size:
            call = (on_device.k_pages, on_device.v_pages, on_device.page_table, on_device.cache_seqlens)
            out, lse = ops.fmha_paged(on_device.q, *call, on_device.cu_seqlens_q, plan, **options)
        else:
            call = (on_device.k, on_device.v, on_device.cu_seqlens_q, on_device.cu_seqlens_k)
            out, lse = ops.fmha_varlen(on_device.q, *call, plan, **options)
        first_q = first_k = 0
        for b, (count, keys) in enumerate(LENGTHS):
            stored = []
            for name, scale in (("k", problem.k_scale), ("v", problem.v_scale)):
                if page_size:
                    rows = reference.gather_tokens(getattr(problem, f"{name}_pages"), problem.page_table, b, keys)
                else:
                    rows = getattr(problem, name)[first_k : first_k + keys]
                stored.append(rows.double() * (1.0 if scale is None else scale.double().view(-1, 1)))
            rows = slice(first_q, first_q + count)
            seen = seen_of(bounds[b], keys, causal, window)
            expected, expected_lse = attention_over(problem.q[rows], *stored, seen, scale=0.15)
            assert_attention_close(out[rows].cpu(), expected.nan_to_num(0.0), dtype)
            assert_lse_close(lse[rows].cpu(), expected_lse, 1e-3)
            first_q, first_k = first_q + count, first_k + keys
        assert (out[first_q:] == 0).all() and (lse[first_q:] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 64])
def test_tiles_that_are_cut(device, page_size):
    """One long request, whose tiles a GPU cuts into pieces."""
    problem = paged_problem([9000], [64], page_size=page_size, num_q_heads=8, num_kv_heads=2, head_dim=128)
    bounds = [(3000, 8936 + i // 10 * 10) for i in range(64)]
    on_device = problem.to(device)
    plan = FmhaPlan.allocate(64, 1, num_q_heads=8, num_kv_heads=2, head_dim=128, device=device)
    ops.fmha_plan(plan, on_device.cu_seqlens_q, cache_seqlens=on_device.cache_seqlens)
    hidden = torch.tensor(bounds, dtype=torch.int32, device=device)
    call = (on_device.k_pages, on_device.v_pages, on_device.page_table, on_device.cache_seqlens)
    out, lse = ops.fmha_paged(
        on_device.q, *call, on_device.cu_seqlens_q, plan, softmax_scale=0.1, hidden_keys=hidden, return_lse=True
    )
    pools = (problem.k_pages, problem.v_pages)
    k, v = (reference.gather_tokens(pages, problem.page_table, 0, 9000).double() for pages in pools)
    expected, expected_lse = attention_over(problem.q, k, v, seen_of(bounds, 9000, True, -1), scale=0.1)
    assert_attention_close(out.cpu(), expected, BF16)
    assert_lse_close(lse.cpu(), expected_lse, 1e-3)


def test_errors_name_what_is_wrong():
    problem = ragged_problem([4], padding=0)
    call = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan_of(problem))
    for wrong, message in (
        (torch.zeros(4, 2), "hidden_keys must have dtype int32, got float32"),
        (torch.zeros(3, 2, dtype=torch.int32), r"hidden_keys\.shape\[0\] \(num_q_tokens\) must be 4 as in q, got 3"),
        (torch.zeros(4, 3, dtype=torch.int32), r"hidden_keys\.shape\[1\] \(begin, end\) must be 2 .*, got 3"),
        (torch.zeros(2, 4, dtype=torch.int32).T, "hidden_keys must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=f"attnops::fmha_varlen: {message}"):
            ops.fmha_varlen(*call, hidden_keys=wrong)
