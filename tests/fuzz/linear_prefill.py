"""Right calls of the prefill ops of linear attention, against recurrences in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from attnops import ops
from linear_reference import delta_gates, delta_tokens, ssd_tokens
from torch import Tensor

from .draw import Draw, Failure
from .linear import FLOATS, OUT, compare, doubles, draw_slots, index_tensor, on_device
from .memory import Guarded, strided
from .options import set_arch, set_isa

CELLS = 3  # of checkpoints
CHUNK, AT_ONCE = 64, 16  # tokens: states are kept at multiples of the former; the judge takes the latter
CHUNKS_BF16 = 6e-3  # what products of bf16 make of a state

Rule = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # the state behind some tokens, and their rows of out


@dataclass
class Extents:
    """Of a call.

    Args:
        counts, prefix: Tokens of each request, and those before them.
        keys, rows: Dims of a key and of a value.
        whole_chunks: What the GPU's kernels of chunks take: bf16 on 16-byte boundaries.
        before, behind: Tokens of no request.
        decay: What the heads' rates are multiplied by.
        repeats: How many tokens in a row have one key.
    """

    io: torch.dtype
    kept: torch.dtype
    counts: list[int]
    prefix: list[int]
    groups: int
    heads: int
    keys: int
    rows: int
    delta: bool
    whole_chunks: bool
    before: int = 0
    behind: int = 0
    decay: Tensor | float = 1.0
    repeats: int = 1
    bounds: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = torch.tensor([self.before, *self.counts]).cumsum(0).tolist()

    @property
    def total(self) -> int:
        return self.bounds[-1] + self.behind

    @property
    def noise(self) -> float:
        """Roundings of bf16, in parts of the usual: in a chunk, what tokens of one key write nearly cancels."""
        return 3.0 if self.delta and self.repeats > 2 else 1.0


def _keys(draw: Draw, of: Extents) -> Tensor:
    k = draw.normal(of.total, of.groups, of.keys).to(of.io)
    return k[torch.arange(of.total) // of.repeats * of.repeats]


def _given_as(draw: Draw, of: Extents, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else strided(draw, tensor, odd=not of.whole_chunks) for tensor in tensors]


def _delta(draw: Draw, of: Extents, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[..., Tensor], Rule, bool]:
    draw.saw("op delta_prefill")
    channels = draw.chance(0.5)
    bound = draw.pick([0.0, -5.0]) if float(torch.as_tensor(of.decay).min()) >= 1 else 0.0  # a bounded one is strong
    gate = draw.pick([of.io, torch.float32])
    a = 2 * draw.normal(*(of.total, of.heads, of.keys) if channels else (of.total, of.heads)).to(gate)
    b, rate = draw.normal(of.total, of.heads).to(gate), draw.normal(of.heads)
    rate += torch.as_tensor(of.decay).log()
    bias = draw.normal(*a.shape[1:]) if draw.chance(0.6) else None
    draw.note(channels=channels, bound=bound)
    options = {"A_log": on_device(draw, rate), "dt_bias": on_device(draw, bias), "lower_bound": bound}
    call = partial(ops.delta_prefill, *_given_as(draw, of, q, k, v, a, b), **options, scale=0.3)
    wide = [*doubles(q, k, v), *delta_gates(*doubles(a, b, rate, bias), bound)]
    return call, lambda S, some: delta_tokens(S, *(x[some] for x in wide), 0.3, True), channels


def _ssd(draw: Draw, of: Extents, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[..., Tensor], Rule, bool]:
    draw.saw("op ssd_prefill")
    dt = draw.normal(of.total, of.heads).to(draw.pick([of.io, torch.float32])) if draw.chance(0.7) else None
    z = draw.normal(of.total, of.heads, of.rows).to(of.io) if draw.chance(0.4) else None
    skip = draw.normal(of.heads) if draw.chance(0.5) else None
    slope, softplus = -draw.normal(of.heads).abs() * of.decay, dt is not None
    x, dts, B, C, zs = _given_as(draw, of, v, dt, k, q, z)
    options = {"D": on_device(draw, skip), "z": zs, "dt_softplus": softplus}
    call = partial(ops.ssd_prefill, x, dts, slope.to(draw.device, non_blocking=True), B, C, **options)
    wide = doubles(v, dt, k, q, z)

    def rule(S: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        x, d, B, C, gate = (None if w is None else w[some] for w in wide)
        return ssd_tokens(S, x, d, slope.double(), B, C, *doubles(skip, None), gate, 1.0, softplus)

    return call, rule, False


class _Answer:
    """out, and states by their slots, in float64."""

    def __init__(self, of: Extents, before: Tensor, slots: list[int], cells: list[list[int]], rule: Rule) -> None:
        self.out = torch.zeros(of.total, of.heads, of.rows, dtype=torch.float64)
        self.states: dict[int, Tensor] = {}
        for i, (slot, count, prefix) in enumerate(zip(slots, of.counts, of.prefix)):
            if slot < 0 or not count:
                continue
            S, done = before[slot].double() * (prefix > 0), 0
            while done < count:
                end = min(count, (prefix + done) // AT_ONCE * AT_ONCE + AT_ONCE - prefix)
                some = slice(of.bounds[i] + done, of.bounds[i] + end)
                S, self.out[some] = rule(S, some)
                done, seen = end, prefix + end
                cell = seen // CHUNK - prefix // CHUNK - 1
                if seen % CHUNK == 0 and cell < len(cells[i]) and cells[i][cell] >= 0:
                    self.states[cells[i][cell]] = S
            self.states[slot] = S


class Prompts:
    """Prompts for a call, and what float64 makes of them.

    Args:
        slots: Of the requests, of `num_slots`.
        cells: Slots of their checkpoints, a row for each request.
    """

    def __init__(self, draw: Draw, of: Extents, slots: list[int], cells: list[list[int]], num_slots: int) -> None:
        self.draw, self.of = draw, of
        draw.note(delta=of.delta, io=of.io, states=of.kept, counts=of.counts, prefix=of.prefix, slots=slots)
        draw.note(G=of.groups, H=of.heads, K=of.keys, V=of.rows, decay=of.decay, repeats=of.repeats)
        self.before = draw.normal(num_slots, of.heads, of.rows, of.keys).to(of.kept)
        self.given = {"state_indices": index_tensor(draw, slots), "prefix_lens": index_tensor(draw, of.prefix)}
        self.given["cu_seqlens"] = index_tensor(draw, of.bounds)
        width = max(map(len, cells), default=0)
        if width:
            self.given["checkpoint_slots"] = index_tensor(draw, cells).view(len(cells), width)
        if draw.chance(0.5):
            self.given["plan"] = (ops.delta_plan if of.delta else ops.ssd_plan)(self.given["cu_seqlens"])
        q, k = draw.normal(of.total, of.groups, of.keys).to(of.io), _keys(draw, of)
        v = draw.normal(of.total, of.heads, of.rows).to(of.io)
        self.call, rule, self.channels = (_delta if of.delta else _ssd)(draw, of, q, k, v)
        self.answer = _Answer(of, self.before, slots, cells, rule)

    def run(self, **options: object) -> tuple[Guarded, Tensor]:
        of, draw = self.of, self.draw
        states = strided(draw, self.before)
        out = Guarded(draw, (of.total, of.heads, of.rows), of.io, odd=not of.whole_chunks)
        self.call(**self.given, states=states, out=out.view, **options)
        return out, states

    def check(self, out: Guarded, states: Tensor) -> None:
        of, answer = self.of, self.answer
        compare("out", out.view, answer.out, of.noise * OUT[of.io])
        untouched = [slot for slot in range(len(self.before)) if slot not in answer.states]
        chunks = CHUNKS_BF16 if of.io == torch.bfloat16 else 0.0
        bound = max(OUT[of.kept], chunks if self.draw.device == "cpu" else OUT[of.io])
        for slot, state in answer.states.items():
            compare(f"slot {slot}", states[slot], state, of.noise * bound)
        if not torch.equal(states.cpu()[untouched], self.before[untouched]):
            raise Failure("a slot that no request names has changed")
        out.check("out")


def right_prompts(draw: Draw) -> None:
    """`delta_prefill`, `ssd_prefill` and their plans."""
    kept = draw.pick(FLOATS)
    batch, groups = draw.pick([0, 1, 2, 5]), draw.pick([1, 2])
    heads = groups * draw.pick([1, 2, 3])
    if draw.chance(0.04):  # more blocks of rows than a GPU has SMs, where its kernel chooses by the longest request
        batch, heads = 24, groups * 3
    set_isa(draw)
    set_arch(draw)
    if whole_chunks := draw.chance(0.5):
        io, keys, rows = torch.bfloat16, draw.pick([40, 64, 64, 128, 128, 256]), draw.pick([16, 64, 72, 128, 256])
    else:
        io = draw.pick(FLOATS)
        keys, rows = draw.pick([1, 16, 64, 100, 128, 128, 200, 256]), draw.pick([1, 16, 64, 100, 128, 256])
    counts, prefix = [draw.length(150) for _ in range(batch)], [draw.pick([0, 0, 64, 7, 640]) for _ in range(batch)]
    of = Extents(io, kept, counts, prefix, groups, heads, keys, rows, draw.chance(0.6), whole_chunks)
    of.behind = draw.pick([0, 3])
    num_slots = batch * (1 + CELLS) + 2
    slots = draw_slots(draw, batch * (1 + CELLS), num_slots)
    cells = [slots[batch + CELLS * i :][:CELLS] for i in range(batch)] if draw.chance(0.7) else []
    prompts = Prompts(draw, of, slots[:batch], cells or [[]] * batch, num_slots)
    prompts.check(*prompts.run(cut_prompts=draw.chance(0.3)))  # too short to be cut
