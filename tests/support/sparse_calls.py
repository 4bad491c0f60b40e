"""Calls of sparse_mla_decode and sparse_mla_prefill, in memory full of NaN, and their answers in float64."""

from __future__ import annotations

import dataclasses
import math

import torch
from attnops import ops, reference
from attnops.metadata import SparseMlaPlan
from checks import assert_attention_close, assert_lse_close
from torch import Tensor

SCALE = 0.07
KINDS = ["own", "shared", "bytes", "shared_bytes"]  # rows of 576 and 512 values, of 656 and 584 bytes
# Powers of two, of scales of rows of 656 bytes in turns and of the latent part of queries: fp16 does not hold all.
SCALES = [([0, -30, 12], -12), ([-20], 20), ([20], -20), ([0, 0, 0, 0, 0, 0, -12], 0), ([9, 10], -10)]
NO_KEY = [-1, -1, -7, -(1 << 31)]


def width_of(kind: str) -> int:
    return 512 if kind.startswith("shared") else 576


def shared_bytes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 ``[N, 512]`` as rows of 584: (576 bytes of data, 8 of scales, the float64 values that these are)."""
    groups = values[:, :448].reshape(-1, 7, 64)
    exponent = torch.frexp(groups.abs().amax(-1).clamp_min(1e-20) / 448)[1].float()
    scale = torch.exp2(exponent)
    stored = (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    rope = values[:, 448:].bfloat16()
    data = torch.cat([stored.reshape(-1, 448).view(torch.uint8), rope.contiguous().view(torch.uint8)], 1)
    scales = torch.cat([(exponent + 127).to(torch.uint8), torch.zeros(len(values), 1, dtype=torch.uint8)], 1)
    exact = torch.cat([(stored.double() * scale.double().unsqueeze(-1)).reshape(-1, 448), rope.double()], 1)
    return data, scales, exact


def make_pool(
    kind: str, dtype: torch.dtype, num_pages: int, page_size: int, used: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(pool, float64 values ``[rows, D]``). Rows that are not `used` hold NaN, as does what lies between pages."""
    rows, width = num_pages * page_size, width_of(kind)
    values = torch.randn(rows, width, generator=generator)
    if kind == "shared_bytes":
        data, scales, exact = shared_bytes(values)
        gap = 64 if page_size % 4 == 0 else 56  # pages of 2, 6, .. do not start on 16-byte boundaries
        pool = torch.full((num_pages, page_size * 584 + gap), 0x7F, dtype=torch.uint8)
        data[~used], scales[~used] = 0x7F, 0xFF
        pool[:, : page_size * 576] = data.view(num_pages, -1)
        pool[:, page_size * 576 : page_size * 584] = scales.view(num_pages, -1)
        return pool[:, : page_size * 584].view(num_pages, page_size, 584), exact
    if kind == "bytes":
        stored = reference.pack_mla_fp8_rows(values)
        exact = reference.unpack_mla_fp8_rows(stored)
        stored[~used] = 0x7F
        pool = torch.full((num_pages, page_size + 1, 656), 0x7F, dtype=torch.uint8)
    else:
        stored = values.to(dtype)
        exact = stored.double()
        stored[~used] = math.nan
        pool = torch.full((num_pages, page_size + 1, width), math.nan, dtype=dtype)
    pool[:, :page_size] = stored.view(num_pages, page_size, -1)
    return pool[:, :page_size], exact


def moved(view: Tensor, device: str) -> Tensor:
    """A view on another device, with what lies around it."""
    whole = view.new_empty(0).set_(view.untyped_storage())
    return whole.to(device).as_strided(view.shape, view.stride(), view.storage_offset())


@dataclasses.dataclass
class Lists:
    """A pool and the lists into it."""

    kv_pages: Tensor
    values: Tensor  # float64 [rows, D]
    indices: Tensor  # int32 [B, S_q, topk]
    lengths: Tensor | None  # int32 [B, S_q]

    def rows_of(self, token: int) -> Tensor:
        """The keys of a token, as row numbers."""
        row = self.indices.flatten(0, 1)[token].cpu().long()
        if self.lengths is not None:
            row = row[: max(int(self.lengths.flatten()[token]), 0)]
        return row[(row >= 0) & (row < len(self.values))]


@dataclasses.dataclass
class SparseProblem:
    q: Tensor  # [B, S_q, H_q, D]
    selected: Lists
    extra: Lists | None
    sinks: Tensor | None

    def to(self, device: str) -> SparseProblem:
        def move(lists: Lists | None) -> Lists | None:
            if lists is None:
                return None
            lengths = None if lists.lengths is None else lists.lengths.to(device)
            return Lists(moved(lists.kv_pages, device), lists.values, lists.indices.to(device), lengths)

        sinks = None if self.sinks is None else self.sinks.to(device)
        return SparseProblem(self.q.to(device), move(self.selected), move(self.extra), sinks)

    def expected(self, scale: float = SCALE) -> tuple[Tensor, Tensor, Tensor]:
        """float64 (out [T, H, 512], lse [T, H], max_logits [T, H])."""
        q = self.q.flatten(0, 1).double().cpu()
        out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
        most = lse.clone()
        for token in range(len(q)):
            keys = [lists.values[lists.rows_of(token)] for lists in (self.selected, self.extra) if lists is not None]
            keys = torch.cat(keys)
            if not len(keys):
                continue
            scores = scale * q[token] @ keys.T
            lse[token], most[token] = scores.logsumexp(-1), scores.amax(-1)
            out[token] = (scores - lse[token].unsqueeze(-1)).exp() @ keys[:, :512]
            if self.sinks is not None:
                out[token] *= torch.sigmoid(lse[token] - self.sinks.double().cpu()).unsqueeze(-1)
        return out, lse, most


def draw_lists(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    topk: int,
    page_size: int,
    generator: torch.Generator,
    lengths: bool,
    holes: bool,
) -> Lists:
    def integers(high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(high, size, generator=generator)

    num_pages = max(topk // page_size, 3)
    rows = num_pages * page_size
    indices = integers(rows, (*shape, topk)).int()  # some twice
    if holes:
        no_key = torch.tensor(NO_KEY, dtype=torch.int32)[integers(len(NO_KEY), (*shape, topk))]
        indices = torch.where(integers(5, (*shape, topk)) == 0, no_key, indices)
    some = None
    if lengths:
        some = integers(topk + 1, shape).int()
        some.view(-1)[:1] = topk
        some.view(-1)[1:2] = 0
        some.view(-1)[2:3] = -3
    lists = Lists(torch.empty(0), torch.empty(rows, 0), indices, some)
    used = torch.zeros(rows, dtype=torch.bool)
    for token in range(shape[0] * shape[1]):
        used[lists.rows_of(token)] = True
    lists.kv_pages, lists.values = make_pool(kind, dtype, num_pages, page_size, used, generator)
    return lists


def sparse_problem(
    kind: str = "own",
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, int] = (3, 1),
    heads: int = 5,
    topk: int = 100,
    page_size: int = 7,
    extra_topk: int = 0,
    extra_page_size: int = 3,
    lengths: bool = False,
    holes: bool = False,
    sinks: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> SparseProblem:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*shape, heads, width_of(kind), generator=generator).to(dtype)
    options = {"generator": generator, "lengths": lengths, "holes": holes}
    selected = draw_lists(kind, dtype, shape, topk, page_size, **options)
    extra = draw_lists(kind, dtype, shape, extra_topk, extra_page_size, **options) if extra_topk else None
    logits = torch.randn(heads, generator=generator) + 3 if sinks else None
    return SparseProblem(q, selected, extra, logits).to(device)


def rescale(problem: SparseProblem, exponents: list[int], query: int) -> None:
    """Scales of rows of 656 bytes times powers of two, in turns, and the latent part of the queries times another."""
    lists = problem.selected
    pool, rows = lists.kv_pages, torch.arange(len(lists.values)) % len(exponents)
    powers = torch.exp2(torch.tensor(exponents, dtype=torch.float64))[rows].unsqueeze(-1)
    scales = pool[..., 512:528].contiguous().view(torch.float32)
    scales *= powers.float().to(pool.device).view(*scales.shape[:-1], 1)
    pool[..., 512:528] = scales.view(torch.uint8)
    lists.values[:, :512] *= powers
    problem.q[..., :512] *= 2.0**query


def plan_of(problem: SparseProblem, *, fixed: int = 0, num_sm_parts: int | None = 6) -> SparseMlaPlan:
    """A plan, run, whose scratch is full of NaN."""
    batch, seqlen_q, heads, _ = problem.q.shape
    plan = SparseMlaPlan.allocate(
        batch,
        num_q_heads=heads,
        topk=problem.selected.indices.shape[-1],
        extra_topk=0 if problem.extra is None else problem.extra.indices.shape[-1],
        seqlen_q=seqlen_q,
        fixed_split_tokens=fixed,
        num_sm_parts=num_sm_parts,
        device=problem.q.device,
    )
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    extra_lengths = None if problem.extra is None else problem.extra.lengths
    ops.sparse_mla_plan(plan, topk_length=problem.selected.lengths, extra_topk_length=extra_lengths)
    return plan


def decode(
    problem: SparseProblem, plan: SparseMlaPlan | None = None, apart: bool = False, **options
) -> tuple[Tensor, Tensor]:
    """(out [T, H, 512], lse [T, H])."""
    q = problem.q
    plan = plan_of(problem) if plan is None else plan
    out = q.new_full((*q.shape[:-1], 512), math.nan)
    lse = torch.full(q.shape[:-1], math.nan, device=q.device)
    if problem.extra is not None:
        options |= {
            "extra_kv_pages": problem.extra.kv_pages,
            "extra_indices": problem.extra.indices,
            "extra_topk_length": problem.extra.lengths,
        }
    ops.sparse_mla_decode(
        q[..., :512] if apart else q,
        problem.selected.kv_pages,
        problem.selected.indices,
        plan,
        softmax_scale=SCALE,
        q_pe=q[..., 512:] if apart else None,
        topk_length=problem.selected.lengths,
        sinks=problem.sinks,
        out=out,
        lse=lse,
        **options,
    )
    assert not plan.semaphores.any(), "the semaphores must be zero after a call"
    return out.flatten(0, 1), lse.flatten(0, 1)


def prefill(
    problem: SparseProblem, apart: bool = False, with_most: bool = True, **options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out [T, H, 512], lse [T, H], max_logits [T, H] or None). On CUDA, of FP8 rows the portable kernel gives them."""
    q = problem.q.flatten(0, 1)
    out = q.new_full((*q.shape[:-1], 512), math.nan)
    lse, most = (torch.full(q.shape[:-1], math.nan, device=q.device) for _ in range(2))
    most = most if with_most else None
    lengths = problem.selected.lengths
    if problem.extra is not None:
        extra_lengths = problem.extra.lengths
        options |= {
            "extra_kv": problem.extra.kv_pages,
            "extra_indices": problem.extra.indices.flatten(0, 1),
            "extra_topk_length": None if extra_lengths is None else extra_lengths.flatten(),
        }
    ops.sparse_mla_prefill(
        q[..., :512] if apart else q,
        problem.selected.kv_pages,
        problem.selected.indices.flatten(0, 1),
        softmax_scale=SCALE,
        q_pe=q[..., 512:] if apart else None,
        topk_length=None if lengths is None else lengths.flatten(),
        sinks=problem.sinks,
        out=out,
        lse=lse,
        max_logits=most,
        **options,
    )
    return out, lse, most


def lse_tolerance(problem: SparseProblem) -> float:
    """On a GPU as if kernels rounded a row's e4m3 times its scale to bf16 (mla_calls.py), or worked in 16 bit."""
    if problem.selected.kv_pages.dtype != torch.uint8 or not problem.q.is_cuda:
        return 1e-4
    return {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}.get(problem.q.dtype, 1e-4)


def assert_right(problem: SparseProblem, out: Tensor, lse: Tensor, most: Tensor | None = None) -> None:
    expected_out, expected_lse, expected_most = problem.expected()
    assert_attention_close(out.cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse, atol=lse_tolerance(problem))
    empty = expected_lse == -math.inf
    assert out.cpu()[empty].eq(0).all(), "a token without keys must be 0"
    if most is not None:
        assert_lse_close(most.cpu(), expected_most, atol=3 * lse_tolerance(problem))
