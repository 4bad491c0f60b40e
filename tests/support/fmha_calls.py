"""Plan and run the fmha ops on a problem of `problems.py`, and compare with float64."""

from __future__ import annotations

import dataclasses
import random

import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from checks import MAX_RELATIVE_ERROR, assert_attention_close, assert_lse_close
from problems import PagedProblem, RaggedProblem, paged_problem
from torch import Tensor


def plan_of(problem: RaggedProblem | PagedProblem, *, causal=True, window_left=-1, tile_q=64, spare=0) -> FmhaPlan:
    """A filled plan; `spare`: more tokens than needed, so that the order ends with (-1, -1)."""
    batch = problem.cu_seqlens_q.numel() - 1
    plan = FmhaPlan.allocate(
        problem.q.shape[0] + spare,
        batch,
        causal=causal,
        window_left=window_left,
        tile_q=tile_q,
        device=problem.q.device,
    )
    return filled(plan, problem)


def filled(plan: FmhaPlan, problem: RaggedProblem | PagedProblem) -> FmhaPlan:
    """The plan, made for the problem's lengths."""
    if isinstance(problem, PagedProblem):
        ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    else:
        ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
    return plan


def split_plan(
    problem: RaggedProblem | PagedProblem, *, causal: bool = True, window_left: int = -1, split_keys: bool = True
) -> FmhaPlan:
    """A plan on a GPU that may cut tiles, not filled. Its scratch holds NaN."""
    heads = {
        "num_q_heads": problem.q.shape[1],
        "num_kv_heads": getattr(problem, "k_pages", problem.__dict__.get("k")).shape[-2],
    }
    head_dim = max(problem.q.shape[-1], getattr(problem, "v_pages", problem.__dict__.get("v")).shape[-1])
    batch = problem.cu_seqlens_q.numel() - 1
    plan = FmhaPlan.allocate(
        *(problem.q.shape[0], batch),
        **heads,
        head_dim=head_dim,
        causal=causal,
        window_left=window_left,
        split_keys=split_keys,
        device="cuda",
    )
    if plan.partial is not None:
        plan.partial.fill_(float("nan"))
    return plan


def run(
    problem: RaggedProblem | PagedProblem, *, csr=False, tile_q=64, spare=0, plan=None, **options
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fmha_varlen` or `fmha_paged`; a filled plan is made if none is given."""
    options = {"k_scale": problem.k_scale, "v_scale": problem.v_scale, "return_lse": True, **options}
    causal, window_left = options.get("causal", True), options.get("window_left", -1)
    plan = plan or plan_of(problem, causal=causal, window_left=window_left, tile_q=tile_q, spare=spare)
    if isinstance(problem, PagedProblem):
        return ops.fmha_paged(
            problem.q,
            problem.k_pages,
            problem.v_pages,
            problem.kv_indices if csr else problem.page_table,
            problem.cache_seqlens,
            problem.cu_seqlens_q,
            plan,
            kv_indptr=problem.kv_indptr if csr else None,
            **options,
        )
    return ops.fmha_varlen(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan, **options)


def assert_right(
    problem: RaggedProblem | PagedProblem, bound: float | None = None, lse_atol: float = 1e-4, **options
) -> None:
    """out and lse of `run` against the reference on the stored values."""
    out, lse = run(problem, **options)
    reference_options = {k: v for k, v in options.items() if k not in {"csr", "tile_q", "spare", "plan", "out"}}
    expected_out, expected_lse = problem.expected(
        **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in reference_options.items()}
    )
    assert_attention_close(out.cpu(), expected_out, problem.q.dtype, bound)
    assert_lse_close(lse.cpu(), expected_lse, lse_atol)


def assert_same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left, right), f"{(left != right).sum().item()} of {left.numel()} elements differ"


__all__ = ["MAX_RELATIVE_ERROR", "assert_right", "assert_same_bits", "filled", "plan_of", "run", "split_plan"]


def drawn_pages(
    r: random.Random, dims: list[tuple[int, int]], page_sizes: list[int], new: list[int], seed: int
) -> PagedProblem:
    """NaN lies behind each request's keys, and in pages that nobody has. `dims`: of keys and of values, in turns."""
    head_dim, head_dim_v = dims[seed % len(dims)]
    kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 2, 4, 5, 8])
    problem = paged_problem(
        [n + r.choice([0, 1, 23, 96, 700, 1500]) for n in new],
        new,
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=max(head_dim, head_dim_v),
        page_size=r.choice(page_sizes),
        dtype=r.choice([torch.bfloat16, torch.float16]),
        layout=r.choice(["nhd", "hnd"]),
        seed=seed,
    )
    narrow = {name: getattr(problem, name)[..., :head_dim] for name in ("q", "k_pages", "k_exact")}
    narrow |= {name: getattr(problem, name)[..., :head_dim_v] for name in ("v_pages", "v_exact")}
    return dataclasses.replace(problem, **narrow)


def ragged_twin(problem: PagedProblem) -> RaggedProblem:
    """The same keys and values, without pages."""
    return RaggedProblem(
        q=problem.q,
        k=problem.k_exact.to(problem.q.dtype).contiguous(),
        v=problem.v_exact.to(problem.q.dtype).contiguous(),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=torch.nn.functional.pad(problem.cache_seqlens.cumsum(0), (1, 0)).to(torch.int32),
        k_scale=None,
        v_scale=None,
    )
