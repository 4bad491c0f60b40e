"""Prompts of linear attention that are long enough to be cut: `cut_prompts`, beside whole ones and float64."""

from __future__ import annotations

import os

import torch
from attnops.info import kernel_counts
from attnops.ops.linear_prefill import delta_prefill_scratch_size, ssd_prefill_scratch_size
from torch import Tensor

from .draw import Draw, Failure
from .linear import OUT, compare, draw_slots
from .linear_prefill import CHUNK, Extents, Prompts
from .memory import Guarded
from .options import set_arch, set_isa

LEAST = {True: 23, False: 19}  # chunks of each request, of a delta rule or not: on an H200 fewer heads than 13 are cut
SLOW, STRONG = [2e-4, 2e-3], [1.0, 100.0]  # rates: a state that outlives segments, and one that forgets in a token
CELLS = 3  # of checkpoints that a request may write
NAN = 0xFF  # of each byte


def _rates(draw: Draw, heads: int) -> Tensor:
    kinds = draw.pick([SLOW, SLOW, SLOW, SLOW + STRONG, SLOW + STRONG, STRONG])
    return torch.tensor([draw.pick(kinds) for _ in range(heads)])


def _extents(draw: Draw) -> Extents:
    """One long prompt, alone or among others; tokens of no request fill the call up to what is cut."""
    delta, batch, groups = draw.chance(0.67), draw.pick([1, 1, 1, 2, 2, 3]), draw.pick([1, 2])
    heads, keys = groups * draw.pick([1, 2]), draw.pick([64, 64, 128, 128, 40, 72])
    rows = draw.pick([16, 64, 72, 128, 128])
    counts = [draw.number(1100, 3200), *(draw.length(700) for _ in range(batch - 1))]
    draw.random.shuffle(counts)
    prefix = [draw.pick([0, 0, 64, 7, 640]) for _ in counts]
    kept = draw.pick([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    of = Extents(torch.bfloat16, kept, counts, prefix, groups, heads, keys, rows, delta, True, before=draw.pick([0, 5]))
    of.decay, of.repeats = _rates(draw, heads), draw.pick([1, 1, 1, 2, 100])
    lacking = LEAST[delta] * CHUNK * batch - of.total
    of.behind = max(lacking, 0) + draw.number(0, 70) if draw.chance(0.9) else 0
    return of


def _cells(draw: Draw, of: Extents, slots: list[int]) -> list[list[int]]:
    """Checkpoints anywhere on the way."""
    width = max(of.counts) // CHUNK + 1
    rows = [[-1] * width for _ in of.counts]
    for i, row in enumerate(rows):
        for slot in slots[CELLS * i :][:CELLS]:
            row[draw.number(0, width - 1)] = slot
    return rows


def _scratch(draw: Draw, of: Extents, channels: bool) -> Guarded:
    """Not a byte more than the op asks for, and NaN in each: nothing is read that was not written."""
    extents = (of.total, len(of.counts), of.heads, of.keys)
    if of.delta:
        options = {"gate_per_channel": channels, "value_dim": of.rows}
        size = delta_prefill_scratch_size(*extents, cut_prompts=True, **options)
    else:
        size = ssd_prefill_scratch_size(*extents, cut_prompts=True, head_dim=of.rows)
    scratch = Guarded(draw, (size,), torch.uint8, dense=True)
    scratch.view.fill_(NAN)
    return scratch


def _check_parts(prompts: Prompts, out: Tensor) -> None:
    """Each head, and each chunk of each request: a short error is small beside the whole."""
    of, expected = prompts.of, prompts.answer.out
    bound = of.noise * OUT[of.io]
    for head in range(of.heads):
        compare(f"out of head {head}", out[:, head], expected[:, head], bound)
    usual = float(expected.norm()) / max(of.total / CHUNK, 1) ** 0.5  # of a chunk
    for i, (count, prefix) in enumerate(zip(of.counts, of.prefix)):
        for begin in range(-(prefix % CHUNK), count, CHUNK):
            some = slice(of.bounds[i] + max(begin, 0), of.bounds[i] + min(begin + CHUNK, count))
            name = f"out of request {i} from token {max(begin, 0)}"
            compare(name, out[some], expected[some], bound, 0.2 * bound * usual)


def right(draw: Draw) -> None:
    """A call with `cut_prompts` and one without: only a Hopper GPU may give other bits. A cut is counted by its row."""
    of = _extents(draw)
    set_isa(draw)
    if draw.chance(0.3):
        set_arch(draw)
    batch = len(of.counts)
    num_slots = batch * (1 + CELLS) + 2
    slots = draw_slots(draw, batch * (1 + CELLS), num_slots)
    longest = of.counts.index(max(of.counts))
    if slots[longest] < 0 and draw.chance(0.85):
        slots[longest] = min(set(range(num_slots)) - set(slots))
    prompts = Prompts(draw, of, slots[:batch], _cells(draw, of, slots[batch:]), num_slots)
    out, states = prompts.run()
    whole = out.view.clone(), states.clone()
    prompts.check(out, states)
    draw.saw("mode cut prompts")
    scratch = _scratch(draw, of, prompts.channels) if draw.chance(0.5) else None
    before = kernel_counts()
    out, states = prompts.run(cut_prompts=True, scratch=None if scratch is None else scratch.view)
    same = torch.equal(out.view, whole[0]) and torch.equal(states, whole[1])
    if draw.device == "cpu" or os.environ.get("ATTNOPS_CUDA_ARCH"):
        if not same:
            raise Failure("cut_prompts changes bits of kernels that cut nothing")
    elif not same:
        after = kernel_counts()
        draw.saw(*(f"cut {row}" for row, count in after.items() if count > before.get(row, 0) and "_prefill" in row))
        again, twin = prompts.run(cut_prompts=True)
        if not torch.equal(again.view, out.view) or not torch.equal(twin, states):
            raise Failure("the same call gives other bits")
    _check_parts(prompts, out.view.cpu())
    prompts.check(out, states)
    if scratch is not None:
        scratch.check("scratch")
