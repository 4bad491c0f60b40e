"""Sequences and heads over several ranks: which part is a rank's own, and one result of all ranks' parts.

Decode context parallelism deals the tokens of each sequence out over the ranks of a group. Each rank attends over the
keys that it holds, with the queries of all heads of the group. `combine` then gives each rank its own heads. Lengths
and
slots of a rank: `attnops.ops.context_parallel_seqlens` and `context_parallel_slots`. Nothing reads a device value on
the host, so a step with NCCL's collectives can be captured.
"""

from __future__ import annotations

import math

import torch
import torch.distributed
from torch import Tensor

from attnops import ops

# Their names in newer versions of torch, which warns of the others.
_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
_reduce_scatter = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)

HOW = ("reduce_scatter", "all_to_all")


def heads_of_rank(num_q_heads: int, num_kv_heads: int, rank: int, world_size: int) -> tuple[range, range]:
    """Query and KV heads of a rank under tensor parallelism. Ranks that outnumber KV heads hold copies of them.

    Raises:
        ValueError: the heads do not divide over the ranks, nor the ranks over the KV heads.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"attnops.distributed: rank must be in [0, {world_size - 1}] (world_size), got {rank}")
    if num_q_heads % world_size or num_q_heads % num_kv_heads:
        raise ValueError(
            f"attnops.distributed: num_q_heads must be a multiple of world_size ({world_size}) and of num_kv_heads "
            f"({num_kv_heads}), got {num_q_heads}"
        )
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ValueError(
            f"attnops.distributed: num_kv_heads ({num_kv_heads}) must divide by world_size ({world_size}), or the "
            "other way round"
        )
    each, kv_each = num_q_heads // world_size, max(num_kv_heads // world_size, 1)
    first_kv = rank * num_kv_heads // world_size
    return range(rank * each, (rank + 1) * each), range(first_kv, first_kv + kv_each)


def combine(
    out: Tensor,
    lse: Tensor,
    group: torch.distributed.ProcessGroup | None = None,
    how: str = "all_to_all",
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all ranks' keys, for the heads of this rank, of every rank's attention over its own.

    Args:
        out: ``[T, H, D]`` (float32, float16, bfloat16), every head of the group; rank r gets the heads from
            ``r * H / world_size`` on.
        lse: ``[T, H]`` float32, natural log; -inf: the rank holds no key of that row, where `out` may hold anything.
        group: None: the default group.
        how: "all_to_all": one exchange of out and lse in a row, then `ops.merge_states`. "reduce_scatter": lse is
            gathered, out scaled and summed in float32 while it is scattered. Both round once.
        sinks: float32 ``[H / world_size]`` of this rank's heads: a logit with no value, counted once for all ranks; so
            the ranks' own calls have none. The returned lse leaves it out.

    Returns:
        ``(out, lse)``: ``[T, H / world_size, D]`` and ``[T, H / world_size]``; zeros and -inf where no rank has a key.

    Raises:
        ValueError: naming the argument whose shape, dtype or value does not fit.
    """
    world_size = torch.distributed.get_world_size(group)
    _check(out, lse, how, sinks, world_size)
    if world_size == 1:
        seen = lse > -math.inf
        merged, total = torch.where(seen.unsqueeze(-1), out, 0), lse
    elif how == "all_to_all":
        merged, total = _exchange(out, lse, world_size, group)
    else:
        merged, total = _sum(out, lse, world_size, group)
    if sinks is not None:
        kept = torch.exp(total - torch.logaddexp(total, sinks.to(total.dtype)))  # 0 where no rank has a key
        merged = (merged * kept.unsqueeze(-1)).to(out.dtype)
    return merged, total


def _check(out: Tensor, lse: Tensor, how: str, sinks: Tensor | None, world_size: int) -> None:
    name = "attnops.distributed.combine"
    if how not in HOW:
        raise ValueError(f"{name}: how must be {' or '.join(HOW)}, got {how!r}")
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ValueError(f"{name}: out must be [T, H, D] and lse [T, H], got {list(out.shape)} and {list(lse.shape)}")
    if out.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: out must be float32, float16 or bfloat16, got {out.dtype}")
    if lse.dtype != torch.float32:
        raise ValueError(f"{name}: lse must be float32, got {lse.dtype}")
    if out.shape[1] % world_size:
        raise ValueError(f"{name}: out.shape[1] (H) must be a multiple of {world_size} (ranks), got {out.shape[1]}")
    if sinks is not None and tuple(sinks.shape) != (out.shape[1] // world_size,):
        raise ValueError(
            f"{name}: sinks must be [{out.shape[1] // world_size}] (heads of a rank), got {list(sinks.shape)}"
        )


def _by_rank(tensor: Tensor, world_size: int) -> Tensor:
    """``[world_size, T, H / world_size, ...]``, contiguous, of ``[T, H, ...]``."""
    return tensor.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()


def _exchange(
    out: Tensor, lse: Tensor, world_size: int, group: torch.distributed.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """A row of out and its lse travel side by side, as bytes."""
    head_dim, bytes_of_row = out.shape[2], out.shape[2] * out.itemsize
    rows = out.contiguous().view(torch.uint8)
    packed = torch.cat([rows, lse.contiguous().unsqueeze(-1).view(torch.uint8)], dim=-1)
    sent = _by_rank(packed, world_size)
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    outs = received[..., :bytes_of_row].contiguous().view(out.dtype).unflatten(-1, (head_dim,))
    lses = received[..., bytes_of_row:].contiguous().view(torch.float32).squeeze(-1)
    return ops.merge_states(outs, lses)


def _sum(
    out: Tensor, lse: Tensor, world_size: int, group: torch.distributed.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    lses = lse.new_empty(world_size * lse.shape[0], lse.shape[1])
    _all_gather(lses, lse.contiguous(), group=group)
    total = torch.logsumexp(lses.unflatten(0, (world_size, -1)), dim=0)
    seen = (lse > -math.inf).unsqueeze(-1)
    share = torch.exp(lse - total).unsqueeze(-1)
    scaled = torch.where(seen, out.float() * share, 0)  # selected, not multiplied: unseen rows may hold anything
    rank = torch.distributed.get_rank(group)
    merged = scaled.new_empty(out.shape[0], out.shape[1] // world_size, out.shape[2])
    _reduce_scatter(merged.unsqueeze(0), _by_rank(scaled, world_size), group=group)
    each = out.shape[1] // world_size
    return merged.to(out.dtype), total[:, rank * each : (rank + 1) * each].contiguous()
