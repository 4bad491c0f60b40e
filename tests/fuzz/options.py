"""What calls of attention have in common: the rules of a case, and the queries and keys that they leave unread."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import torch
from torch import Tensor

from .draw import Draw
from .memory import FP8, FP8_KINDS
from .oracle import Rules

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")


def set_isa(draw: Draw) -> None:
    """The instruction set of the case's CPU kernels; the best ones more often."""
    if draw.device != "cpu":
        return
    asked = draw.pick(["amx", "amx", "avx512_bf16", "avx512", "avx2", "avx2", "scalar"])
    os.environ["ATTNOPS_CPU_ISA"] = asked
    draw.note(isa=asked)
    draw.saw(f"isa {torch.ops.attnops.cpu_isa()}")


def set_arch(draw: Draw) -> None:
    """On a GPU, its own kernels or those of every architecture."""
    if draw.device == "cpu":
        return
    asked = draw.pick(["", "", "80"])
    os.environ["ATTNOPS_CUDA_ARCH"] = asked
    draw.note(arch=asked or "own")


def draw_window(draw: Draw, longest: int) -> int:
    """Off, on a tile's edge, anything up to the longest request, or the largest that there is."""
    if draw.chance(0.6):
        return -1
    if draw.chance(0.05):
        return (1 << 31) - 1 - (1 << 16)
    if draw.chance(0.3):
        return max(draw.pick([1, 64, 128, 256]) + draw.number(-2, 1), 0)
    return draw.number(0, max(longest, 1))


def draw_tree(draw: Draw, lengths_q: list[int], widest: int) -> Tensor:
    """bool ``[T, widest]``: trees, or any bits; some tokens are blind even to themselves."""
    rows, blind = [torch.zeros(0, widest, dtype=torch.bool)], draw.chance(0.4)
    for count in lengths_q:
        if draw.chance(0.5):
            seen = draw.normal(count, widest) > 0
        else:
            seen = torch.zeros(count, widest, dtype=torch.bool)
            for token in range(count):
                if token:
                    seen[token] = seen[draw.number(0, token - 1)]
                seen[token, token] = True
        seen[:, count:] = False
        if blind:
            for token in range(count):
                if draw.chance(0.4):
                    seen[:, token] = False
        rows.append(seen)
    draw.saw("mode tree", *(["mode tree with blind tokens"] if blind else []))
    draw.note(tree="blind" if blind else "seeing")
    return torch.cat(rows)


def widened(draw: Draw, rules: Rules, seqlen: int) -> Rules:
    """The rules with a tree over more keys than the new tokens', as a draft loop has it; or as they are."""
    if rules.tree is None or not draw.chance(0.4):
        return rules
    keys = seqlen + draw.number(1, 40)
    tree = draw.normal(len(rules.tree), keys) > draw.pick([-1.0, 0.0, 1.0])
    draw.saw("mode tree over more keys")
    draw.note(tree_keys=keys)
    return replace(rules, tree=tree, tree_keys=keys, window_left=-1)


def pack(draw: Draw, seen: Tensor) -> Tensor:
    """uint8 ``[T, ceil(S_q / 8)]`` or more, little-endian; bits behind the last token are set."""
    width = -(-seen.shape[1] // 8) + draw.number(0, 1)
    bits = torch.ones(len(seen), 8 * width, dtype=torch.int64)
    bits[:, : seen.shape[1]] = seen
    weights = 1 << torch.arange(8)
    return (bits.view(len(seen), width, 8) * weights).sum(-1).to(torch.uint8)


def draw_rules(
    draw: Draw,
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int,
    dim: int,
    *,
    right: bool = False,
    widest: int = 0,
) -> Rules:
    """Rules of a call.

    Args:
        right: The op knows a window on the right, too.
        widest: Query tokens of a request for which there is room in a tree mask; 0: as many as there are.
    """
    widest = widest or max(lengths_q, default=0)
    longest = max(lengths_k, default=0)
    scale = dim**-0.5 * (1.0 if draw.chance(0.6) else draw.random.uniform(0.05, 2.5))
    if draw.chance(0.04):
        scale = draw.pick([0.0, -scale])
    tree = draw_tree(draw, lengths_q, widest) if draw.chance(0.3 if right else 0.2) and widest <= 128 else None
    causal = tree is not None or draw.chance(0.6 if right else 0.75)
    ends = right and draw.chance(0.2 if causal and tree is None else 0.6)  # the causal rule ends before any window
    rules = Rules(
        scale=scale,
        causal=causal,
        window_left=draw_window(draw, longest),
        window_right=draw.number(0, max(longest, 1)) if ends else -1,
        cap=0.0 if draw.chance(0.75) else draw.random.uniform(0.5, 30.0),
        sinks=2 * draw.normal(heads) if draw.chance(0.3) else None,
        tree=tree,
    )
    if rules.sinks is not None and draw.chance(0.1):
        rules.sinks[draw.number(0, heads - 1)] = -math.inf
    draw.note(scale=round(scale, 4), causal=rules.causal, window=(rules.window_left, rules.window_right))
    draw.note(cap=round(rules.cap, 2), sinks=rules.sinks is not None)
    draw.saw("mode causal" if rules.causal else "mode all keys")
    draw.saw(*(["mode window"] if rules.window_left >= 0 else []), *(["mode sinks"] if rules.sinks is not None else []))
    draw.saw(*(["mode soft cap"] if rules.cap else []), *(["mode window right"] if rules.window_right >= 0 else []))
    return rules


def draw_hidden(draw: Draw, lengths_q: list[int], lengths_k: list[int]) -> Tensor:
    """int ``[T, 2]``, whose bounds never fall within a request: of items behind a prefix, or any."""
    bounds: list[tuple[int, int]] = []
    for count, keys in zip(lengths_q, lengths_k):
        if draw.chance(0.5):
            prefix, item = draw.number(0, keys), 0
            for position in range(keys - count, keys):
                item = position + 1 if position < prefix or draw.chance(0.2) else item
                bounds.append((prefix, max(item, prefix)))
        else:
            begins, ends = (sorted(draw.number(0, keys) for _ in range(count)) for _ in range(2))
            bounds += zip(begins, ends)
    draw.saw("mode hidden keys")
    draw.note(hidden=True)
    return torch.tensor(bounds, dtype=torch.int64).view(-1, 2)


def call_options(draw: Draw, rules: Rules) -> dict[str, object]:
    """The keyword arguments of an op for these rules, but for trees."""
    sinks = None if rules.sinks is None else rules.sinks.to(draw.device, non_blocking=True)
    options = {"softmax_scale": rules.scale, "causal": rules.causal, "window_left": rules.window_left}
    options |= {"logit_cap": rules.cap, "sinks": sinks}
    return options | ({"tree_keys": rules.tree_keys} if rules.tree_keys else {})


def draw_scales(draw: Draw, kv_heads: int, dtype: torch.dtype = FP8) -> Tensor | None:
    """float32 of a cache, none, one, or one per head: of FP8 small and nearly always there, else any and seldom."""
    is_fp8 = dtype in FP8_KINDS
    if draw.chance(0.15 if is_fp8 else 0.9):
        return None
    values = torch.tensor([draw.random.random() for _ in range(kv_heads if draw.chance(0.5) else 1)])
    draw.saw("mode scales of fp8" if is_fp8 else "mode scales of plain keys")
    return 0.01 + 0.04 * values if is_fp8 else 3 * values - 1


def stored(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """float32 ``[N, H, D]`` as the cache holds it."""
    if dtype not in FP8_KINDS:  # the scale is then only what the op multiplies by
        return values.to(dtype)
    scaled = values if scale is None else values / scale.view(1, -1, 1)
    most = torch.finfo(dtype).max
    return scaled.clamp(-most, most).to(dtype)


def real(rows: Tensor, scale: Tensor | None) -> Tensor:
    """float64 of stored rows ``[N, H, D]``."""
    values = rows.float().double()
    return values if scale is None else values * scale.double().view(1, -1, 1)


def new_report(draw: Draw) -> Tensor | None:
    """The checked mode's buffer, or none."""
    if draw.chance(0.7):
        return None
    draw.saw("mode checked")
    draw.note(checked=True)
    return torch.zeros(8, dtype=torch.int32, device=draw.device)
