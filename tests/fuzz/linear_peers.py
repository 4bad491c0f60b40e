"""Right calls of FlashInfer's names for linear attention in `attnops.compat`, against recurrences in float64."""

from __future__ import annotations

import torch
from attnops.compat import flashinfer
from linear_reference import delta_gates, delta_step, ssd_step
from torch import Tensor

from .draw import Draw, Failure
from .linear import FLOATS, OUT, compare, doubles, draw_slots, index_tensor, on_device
from .memory import strided
from .options import set_arch

BUFFER = 7.0  # what cells of a buffer hold before a call
_SPARE = 2


class _States:
    """A pool, the slots that a call reads and writes, and its buffer of states after each token."""

    def __init__(self, draw: Draw, batch: int, shape: tuple[int, ...], kept: torch.dtype, tokens: int) -> None:
        count = batch + _SPARE
        self.before = draw.normal(count, *shape).to(kept)
        self.slots = draw_slots(draw, batch, count)
        free = [slot for slot in draw.permutation(count).tolist() if slot not in self.slots]  # nobody else reads these
        self.moves = draw.chance(0.4)
        self.targets = list(self.slots)
        for row, slot in enumerate(self.slots):
            if self.moves and slot >= 0 and free and draw.chance(0.6):
                self.targets[row] = free.pop()
        self.pool = self.before.to(draw.device, copy=True)
        self.buffer = None
        if tokens > 1 and draw.chance(0.6):
            self.buffer = torch.full((batch, tokens + draw.number(0, 1), *shape), BUFFER, device=draw.device)
        draw.note(slots=self.slots, targets=self.targets, buffer=self.buffer is not None)

    def start(self) -> Tensor:
        """float64, a row for each request."""
        return self.before[[max(slot, 0) for slot in self.slots]].double()

    def check(self, steps: list[Tensor], updates: bool) -> None:
        """The pool's slots and the buffer's cells hold the states after the steps, and nothing else was written."""
        kept = OUT[self.before.dtype]
        written = {}
        for row, (slot, target) in enumerate(zip(self.slots, self.targets)):
            if slot >= 0 and updates:
                written[target] = steps[-1][row]
            if self.buffer is None:
                continue
            for t, step in enumerate(steps if slot >= 0 else []):
                compare(f"state after token {t}", self.buffer[row, t], step[row], max(kept, 1e-4))
            rest = self.buffer[row, len(steps) if slot >= 0 else 0 :]
            if bool((rest != BUFFER).any()):
                raise Failure("a cell of the buffer that no token has was written")
        for slot in range(len(self.before)):
            if slot in written:
                compare(f"slot {slot}", self.pool[slot], written[slot], kept)
            elif not torch.equal(self.pool[slot].cpu(), self.before[slot]):
                raise Failure(f"slot {slot}, which no request names, has changed")


def _extents(draw: Draw) -> tuple[int, int, int, int, int, int]:
    """(requests, tokens of each, heads of keys, of values, dims of keys, of values)."""
    groups = draw.pick([1, 2])
    dims = draw.pick([16, 64, 128]), draw.pick([16, 64, 128])
    return draw.pick([1, 2, 5]), draw.pick([1, 1, 2, 4]), groups, groups * draw.pick([1, 2]), *dims


def _delta(draw: Draw) -> None:
    """`gated_delta_rule_decode_pretranspose` and `gated_delta_rule_mtp`."""
    io, kept = draw.pick(FLOATS), draw.pick([torch.float32, torch.bfloat16])
    batch, count, groups, heads, keys, rows = _extents(draw)
    mtp = draw.chance(0.5)
    name = "gated_delta_rule_mtp" if mtp else "gated_delta_rule_decode_pretranspose"
    draw.saw(f"compat {name}")
    draw.note(compat=name, io=io, states=kept, B=batch, T=count, G=groups, H=heads, K=keys, V=rows)
    q, k = (draw.normal(batch, count, groups, keys).to(io) for _ in range(2))
    v = draw.normal(batch, count, heads, rows).to(io)
    a, b = (draw.normal(batch, count, heads).to(io) for _ in range(2))
    rate, bias, normalize = draw.normal(heads), draw.normal(heads), draw.chance(0.7)
    scale = draw.pick([None, 0.3])
    state = _States(draw, batch, (heads, rows, keys), kept, count)
    given = {"q": strided(draw, q), "k": strided(draw, k), "v": strided(draw, v)}
    given |= {"a": on_device(draw, a), "b": on_device(draw, b), "A_log": on_device(draw, rate)}
    given |= {"dt_bias": on_device(draw, bias), "scale": scale, "use_qk_l2norm": normalize}
    given |= {"initial_state": state.pool, "initial_state_indices": index_tensor(draw, state.slots)}
    if state.moves:
        given["output_state_indices"] = index_tensor(draw, state.targets)
    if state.buffer is not None:
        given["intermediate_states_buffer"] = state.buffer
    updates = draw.chance(0.6) if mtp or count > 1 else True
    if mtp:
        out, pool = flashinfer.gated_delta_rule_mtp(disable_state_update=not updates, **given)
    else:
        out, pool = flashinfer.gated_delta_rule_decode_pretranspose(
            state=None, disable_state_update=not updates, **given
        )
    if pool is not state.pool:
        raise Failure("what is returned is not the pool")
    wide, S, steps = doubles(q, k, v), state.start(), []
    g, beta = (
        x.unflatten(0, (batch, count)) for x in delta_gates(*doubles(a.flatten(0, 1), b.flatten(0, 1), rate, bias), 0.0)
    )
    expected = torch.zeros(batch, count, heads, rows, dtype=torch.float64)
    for t in range(count):
        S, expected[:, t] = delta_step(
            S, *(x[:, t] for x in (*wide, g, beta)), keys**-0.5 if scale is None else scale, normalize
        )
        steps.append(S)
    expected[[slot < 0 for slot in state.slots]] = 0
    compare("out", out, expected, OUT[io])
    state.check(steps, updates)


def _mamba(draw: Draw) -> None:
    """`selective_state_update`."""
    io, kept = draw.pick(FLOATS), draw.pick([torch.float32, torch.bfloat16])
    batch, count, groups, heads, size, rows = _extents(draw)
    draw.saw("compat selective_state_update")
    draw.note(compat="selective_state_update", io=io, states=kept, B=batch, T=count, G=groups, H=heads, N=size, P=rows)
    x, dt = draw.normal(batch, count, heads, rows).to(io), draw.normal(batch, count, heads).to(io)
    B, C = (draw.normal(batch, count, groups, size).to(io) for _ in range(2))
    z = draw.normal(batch, count, heads, rows).to(io) if draw.chance(0.5) else None
    A, D, bias = -draw.normal(heads).abs(), draw.normal(heads), draw.normal(heads)
    state = _States(draw, batch, (heads, rows, size), kept, count)
    flat = count == 1 and state.buffer is None and draw.chance(0.7)

    def tokens(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return strided(draw, tensor[:, 0] if flat else tensor)

    given = {"x": tokens(x), "B": tokens(B), "C": tokens(C), "z": tokens(z), "state": state.pool}
    given["dt"] = on_device(draw, dt[:, 0] if flat else dt).unsqueeze(-1).expand(given["x"].shape)
    given["A"] = on_device(draw, A)[:, None, None].expand(heads, rows, size)
    given |= {name: on_device(draw, t)[:, None].expand(heads, rows) for name, t in (("D", D), ("dt_bias", bias))}
    given["state_batch_indices"] = index_tensor(draw, [-1 if slot < 0 else slot for slot in state.slots])
    if state.moves:
        given["dst_state_batch_indices"] = index_tensor(draw, state.targets)
    if state.buffer is not None:
        given |= {"intermediate_states_buffer": state.buffer, "cache_steps": count}
    updates = draw.chance(0.7)
    out = flashinfer.selective_state_update(dt_softplus=True, disable_state_update=not updates, **given)
    S, steps, expected = state.start(), [], torch.zeros(batch, count, heads, rows, dtype=torch.float64)
    for t in range(count):
        now = [None if w is None else w[:, t].double() for w in (x, dt, B, C, z)]
        S, expected[:, t] = ssd_step(
            S, now[0], now[1], A.double(), now[2], now[3], D.double(), bias.double(), now[4], 1.0, True
        )
        steps.append(S)
    expected[[slot < 0 for slot in state.slots]] = 0
    compare("out", out.view(expected.shape), expected, OUT[io])
    state.check(steps, updates)


def _prompts(draw: Draw) -> None:
    """`chunk_gated_delta_rule`, with checkpoints."""
    set_arch(draw)
    io = draw.pick(FLOATS)
    counts = [draw.pick([0, 1, 63, 64, 65, draw.number(1, 200)]) for _ in range(draw.pick([1, 2, 3]))]
    groups, keys, rows = draw.pick([1, 2]), draw.pick([16, 64, 128]), draw.pick([16, 64, 128])
    heads = groups * draw.pick([1, 2])
    draw.saw("compat chunk_gated_delta_rule")
    draw.note(compat="chunk_gated_delta_rule", io=io, counts=counts, G=groups, H=heads, K=keys, V=rows)
    total, bounds = sum(counts), torch.tensor([0, *counts]).cumsum(0)
    q, k = (draw.normal(total, groups, keys).to(io) for _ in range(2))
    v = draw.normal(total, heads, rows).to(io)
    decay = draw.normal(total, heads).sigmoid() if draw.chance(0.8) else None
    beta = draw.normal(total, heads).sigmoid() if draw.chance(0.8) else None
    first = draw.normal(len(counts), heads, rows, keys) if draw.chance(0.6) else None
    every = draw.pick([0, 64, 128])
    starts = torch.tensor([0, *(count // every if every else 0 for count in counts)]).cumsum(0)
    kept = torch.full((int(starts[-1]), heads, rows, keys), BUFFER, device=draw.device)
    options = {"state_checkpoints": kept, "checkpoint_cu_starts": index_tensor(draw, starts.tolist())} if every else {}
    out, final = flashinfer.chunk_gated_delta_rule(
        strided(draw, q),
        strided(draw, k),
        strided(draw, v),
        on_device(draw, decay),
        on_device(draw, beta),
        initial_state=on_device(draw, first),
        output_final_state=True,
        cu_seqlens=index_tensor(draw, bounds.tolist()),
        use_qk_l2norm_in_kernel=True,
        checkpoint_every_n_tokens=every,
        **options,
    )
    ones = torch.ones(total, heads, dtype=torch.float64)
    wide = (
        *doubles(q, k, v),
        ones * 0 if decay is None else decay.double().log(),
        ones if beta is None else beta.double(),
    )
    expected, cells = torch.zeros(total, heads, rows, dtype=torch.float64), []
    for i, count in enumerate(counts):
        S = torch.zeros(1, heads, rows, keys, dtype=torch.float64) if first is None else first[i : i + 1].double()
        for j in range(count):
            t = int(bounds[i]) + j
            S, expected[t] = delta_step(S, *(w[t : t + 1] for w in wide), keys**-0.5, True)
            if every and (j + 1) % every == 0:
                cells.append(S[0])
        compare(f"state of request {i}", final[i], S[0], OUT[io])
    compare("out", out, expected, OUT[io])
    for cell, state in enumerate(cells):
        compare(f"checkpoint {cell}", kept[cell], state, OUT[io])


def right(draw: Draw) -> None:
    """A call by one of the names."""
    draw.pick([_delta, _delta, _mamba, _prompts])(draw)
