"""Right calls of `sparse_mla_decode` and `sparse_mla_prefill`, and lists that are wrong by value."""

from __future__ import annotations

from dataclasses import replace

import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from attnops.ops.sparse_mla import _scratch_size
from attnops.report import first_fault, new_report
from sparse_calls import KINDS, SCALE, Lists, SparseProblem, lse_tolerance, sparse_problem

from .draw import Draw, Failure
from .memory import Guarded
from .options import set_isa

HEADS = [1, 2, 3, 8, 16, 16, 17, 40, 64, 65, 128]
FEW_KEYS = 8  # of a list whose keys `rounded_keys` rounds
OUT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def _draw_problem(draw: Draw, second: bool) -> SparseProblem:
    on_gpu = draw.device != "cpu"
    options = {
        "kind": draw.pick(KINDS),
        "dtype": draw.pick([torch.bfloat16, torch.bfloat16, torch.float16, *([] if on_gpu else [torch.float32])]),
        "shape": (draw.pick([0, 1, 1, 2, 3, 5]), draw.pick([1, 1, 1, 2, 3])),
        "heads": draw.pick(HEADS),
        "topk": draw.pick([0, 1, 5, 31, 64, 64, 65, 200, 512 if on_gpu else 128]),
        "page_size": draw.pick([1, 2, 3, 16, 64, 64, 256]),
        "extra_topk": draw.pick([0, 1, 63, 64, 130]) if second else 0,
        "extra_page_size": draw.pick([1, 2, 5, 64]),
        "lengths": draw.chance(0.5),
        "holes": draw.chance(0.5),
        "sinks": draw.chance(0.5),
        "seed": draw.number(0, 1 << 30),
    }
    if on_gpu and draw.chance(0.1):  # several tokens a CTA
        options |= {
            "shape": (draw.pick([140, 300]), 1),
            "heads": draw.pick([16, 40, 64]),
            "topk": draw.pick([5, 64, 130]),
        }
    draw.note(**options)
    draw.saw(f"sparse rows {options['kind']}")
    return sparse_problem(**options, device=draw.device)


def _in_bf16(lists: Lists | None) -> Lists | None:
    return None if lists is None else replace(lists, values=lists.values.float().bfloat16().double())


def _answer(problem: SparseProblem, rounded_keys: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits): with `rounded_keys`, of tokens with few keys those over keys rounded to bfloat16."""
    exact = problem.expected()
    if not rounded_keys:
        return exact
    lists = [one for one in (problem.selected, problem.extra) if one is not None]
    rounded = replace(problem, selected=_in_bf16(problem.selected), extra=_in_bf16(problem.extra)).expected()
    counts = [sum(len(one.rows_of(token)) for one in lists) for token in range(len(exact[0]))]
    few = torch.tensor(counts, dtype=torch.int64) <= FEW_KEYS
    out, lse, most = (torch.where(few.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(exact, rounded))
    return out, lse, most


def _judge(
    draw: Draw,
    problem: SparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    most: torch.Tensor | None = None,
    rounded_keys: bool = False,
) -> None:
    expected, expected_lse, expected_most = _answer(problem, rounded_keys)
    got, got_lse = out.detach().cpu().double(), lse.detach().cpu().double()
    if not bool(got.isfinite().all()):
        raise Failure("out is not finite")
    empty = expected_lse == -torch.inf
    if bool(got[empty].ne(0).any()) or bool(got_lse[empty].ne(-torch.inf).any()):
        raise Failure("a token without keys is not 0, or its lse not -inf")
    if bool(empty.all()):
        return
    error = float((got - expected).norm() / expected.norm())
    # Kernels of 16 bit round the values of a row of bytes once more, and few keys do not average that out.
    looser = 2 if problem.selected.kv_pages.dtype == torch.uint8 and problem.q.dtype != torch.float32 else 1
    # Of a longer list a kernel may round tiles of few keys: of two lists, all of nine to sixteen keys.
    looser *= 2 if rounded_keys and problem.extra is not None else 1
    if error > looser * OUT[problem.q.dtype]:
        raise Failure(f"out differs: relative error {error:.3g}")
    worst = float((got_lse - expected_lse)[~empty].abs().max())
    if worst > looser * lse_tolerance(problem):
        raise Failure(f"lse differs by {worst:.3g}")
    if most is None:
        return
    worst = float((most.detach().cpu().double() - expected_most)[~empty].abs().max())
    if not worst <= 3 * looser * lse_tolerance(problem):
        raise Failure(f"max_logits differ by {worst:.3g}")


def right_decode(draw: Draw) -> None:
    """`ops.sparse_mla_decode`: balanced and batch-invariant plans, one list or two."""
    draw.saw("op sparse_mla_decode")
    set_isa(draw)
    problem = _draw_problem(draw, draw.chance(0.4))
    lists, extra = problem.selected, problem.extra
    batch, seqlen_q, heads, width = problem.q.shape
    plan = SparseMlaPlan.allocate(
        batch,
        num_q_heads=heads,
        topk=lists.indices.shape[-1],
        extra_topk=0 if extra is None else extra.indices.shape[-1],
        seqlen_q=seqlen_q,
        fixed_split_tokens=draw.pick([0, 0, 64, 128]),
        num_sm_parts=draw.pick([None, 1, 2, 3, 7]),
        device=draw.device,
    )
    plan.out_partial.fill_(torch.nan)
    plan.lse_partial.fill_(torch.nan)
    draw.note(fixed=plan.fixed_split_tokens, parts=plan.num_sm_parts)
    lengths = {"topk_length": lists.lengths, "extra_topk_length": None if extra is None else extra.lengths}
    ops.sparse_mla_plan(plan, **lengths)
    apart = width == 576 and draw.chance(0.3)
    second = {} if extra is None else {"extra_kv_pages": extra.kv_pages, "extra_indices": extra.indices}
    out = Guarded(draw, (batch, seqlen_q, heads, 512), problem.q.dtype, dense=True)
    lse = Guarded(draw, (batch, seqlen_q, heads), torch.float32, dense=True)
    given = {
        "q": problem.q[..., :512] if apart else problem.q,
        "q_pe": problem.q[..., 512:] if apart else None,
        "kv_pages": lists.kv_pages,
        "indices": lists.indices,
        "plan": plan,
        "softmax_scale": SCALE,
        "sinks": problem.sinks,
        "out": out.view,
        "lse": lse.view,
    }
    rounded = draw.chance(0.25)
    draw.note(rounded_keys=rounded)
    if rounded:
        draw.saw("mode rounded keys")
    ops.sparse_mla_decode(**given, **lengths, **second, rounded_keys=rounded)
    of_rows = rounded and lists.kv_pages.shape[-1] == 656
    _judge(draw, problem, out.view.flatten(0, 1), lse.view.flatten(0, 1), rounded_keys=of_rows)
    out.check("out")
    lse.check("lse")
    if plan.semaphores.any():
        raise Failure("semaphores are not zero after the call")


def right_prefill(draw: Draw) -> None:
    """`ops.sparse_mla_prefill`, over pages and ragged rows."""
    draw.saw("op sparse_mla_prefill")
    set_isa(draw)
    problem = _draw_problem(draw, draw.chance(0.3))
    q, lists, extra = problem.q.flatten(0, 1), problem.selected, problem.extra
    kv = lists.kv_pages
    if kv.shape[1] == 1 and kv.shape[-1] != 584:
        kv = kv.squeeze(1)
    out = Guarded(draw, (*q.shape[:2], 512), q.dtype, dense=True)
    lse, most = (Guarded(draw, tuple(q.shape[:2]), torch.float32, dense=True) for _ in range(2))
    with_most = draw.chance(0.5)
    if extra is None and draw.chance(0.6):
        sizes = [n for n in (1, 2, 3, 4, 8) if len(q) % n == 0 and (draw.device == "cpu" or n * q.shape[1] <= 64)]
        if sizes and (draw.device == "cpu" or (q.dtype != torch.float32 and kv.dtype == q.dtype)):
            return _prefill_together(draw, problem, kv, draw.pick(sizes))
    scratch = _scratch(draw, q, kv, lists.indices.flatten(0, 1)) if draw.chance(0.5) else None
    ops.sparse_mla_prefill(
        q,
        kv,
        lists.indices.flatten(0, 1),
        softmax_scale=SCALE,
        topk_length=None if lists.lengths is None else lists.lengths.flatten(),
        sinks=problem.sinks,
        out=out.view,
        lse=lse.view,
        max_logits=most.view if with_most else None,
        extra_kv=None if extra is None else extra.kv_pages,
        extra_indices=None if extra is None else extra.indices.flatten(0, 1),
        extra_topk_length=None if extra is None or extra.lengths is None else extra.lengths.flatten(),
        scratch=None if scratch is None else scratch.view,
    )
    if scratch is not None:
        scratch.check("scratch")
    _judge(draw, problem, out.view, lse.view, most.view if with_most else None)
    out.check("out")
    lse.check("lse")
    most.check("max_logits")


def _scratch(draw: Draw, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> Guarded:
    """For all listed rows, or for a few, where the pool's are attended to. NaN in each byte: none is read unwritten."""
    draw.saw("mode scratch")
    rows = len(kv) if kv.dim() == 2 else len(kv) * kv.shape[1]
    size = _scratch_size(indices.numel(), rows, draw.pick([1, 3, 1 << 17])) if len(q) and rows else draw.number(0, 9)
    scratch = Guarded(draw, (max(size, 0),), torch.uint8, dense=True)
    scratch.view.fill_(0xFF)
    return scratch


def _prefill_together(draw: Draw, problem: SparseProblem, kv: torch.Tensor, together: int) -> None:
    """The same where neighbouring tokens share lists."""
    draw.saw("op share_lists")
    draw.note(together=together)
    q, lists = problem.q.flatten(0, 1), problem.selected
    lengths = None if lists.lengths is None else lists.lengths.flatten()
    shared, masks, shared_length = ops.share_lists(lists.indices.flatten(0, 1), together, topk_length=lengths)
    wide = q.reshape(len(q) // together, together * q.shape[1], q.shape[2])
    out, lse = ops.sparse_mla_prefill(
        wide,
        kv,
        shared,
        softmax_scale=SCALE,
        topk_length=shared_length,
        sinks=None if problem.sinks is None else problem.sinks.repeat(together),
        return_lse=True,
        head_masks=masks,
        head_groups=together,
    )
    assert lse is not None
    _judge(draw, problem, out.view(*q.shape[:2], 512), lse.view(q.shape[:2]))


def hostile_lists(draw: Draw) -> None:
    """An index past the pool: an error on the CPU, or a report and no key."""
    draw.saw("hostile row index")
    problem = sparse_problem(draw.pick(KINDS), topk=draw.pick([5, 70]), seed=draw.number(0, 1000), device=draw.device)
    lists = problem.selected
    lists.indices[1, 0, 3] = draw.pick([len(lists.values), 10**6, 2**31 - 1])
    report = new_report(draw.device)
    q, indices = problem.q.flatten(0, 1), lists.indices.flatten(0, 1)

    def call(**options: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ops.sparse_mla_prefill(q, lists.kv_pages, indices, softmax_scale=SCALE, return_lse=True, **options)

    if draw.device == "cpu" and draw.chance(0.5):
        try:
            call()
        except RuntimeError as error:
            if "attnops::sparse_mla_prefill: indices, token 1, position 3" not in str(error):
                raise
            return
        raise Failure("an index past the pool is accepted")
    _judge(draw, problem, *call(report=report))
    if "row index" not in (first_fault(report) or ""):
        raise Failure("an index past the pool is not reported")
