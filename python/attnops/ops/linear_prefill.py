"""Linear attention: ragged prompts through a recurrence, from states in slots of a pool to states in slots of it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake

_PANEL = 64 * 128  # bytes of 64 tokens by 64 columns
_FACTORS = 5 * 64 * 4  # bytes of a chunk's factors: csrc/core/linear_chunk.h
_MOST_CUT_HEADS, _MOST_SEGMENT_HEADS, _LEAST_SEGMENT_CHUNKS = 64, 192, 4  # the same file


def _scratch_size(
    num_tokens: int, batch_size: int, num_heads: int, key_dim: int, delta: bool, channels: bool, cut_rows: int
) -> int:
    """Of whole chunks, and behind them the states at the ends of segments, of `cut_rows` rows; 0: none is cut."""
    panels = 1 if key_dim <= 64 else 2 if key_dim <= 128 else 4
    of_chunk = (2 if delta else 1) * _PANEL + _FACTORS + (3 * panels * _PANEL if channels else 0)
    chunks = num_tokens // 64 + 2 * batch_size
    size = chunks * num_heads * of_chunk
    if cut_rows and panels <= 2 and 0 < batch_size * num_heads <= _MOST_CUT_HEADS:
        room, keys = min(chunks // _LEAST_SEGMENT_CHUNKS + batch_size, _MOST_SEGMENT_HEADS // num_heads), 64 * panels
        size += room * num_heads * (cut_rows + (keys if delta else 0)) * keys * 4
    return size


def delta_prefill_scratch_size(
    num_tokens: int,
    batch_size: int,
    num_v_heads: int,
    key_dim: int,
    *,
    gate_per_channel: bool = False,
    cut_prompts: bool = False,
    value_dim: int = 256,
) -> int:
    """Bytes that `delta_prefill` needs on CUDA for tokens of bf16; `value_dim` counts beside `cut_prompts` alone."""
    cut_rows = value_dim if cut_prompts else 0
    return _scratch_size(num_tokens, batch_size, num_v_heads, key_dim, True, gate_per_channel, cut_rows)


def ssd_prefill_scratch_size(
    num_tokens: int,
    batch_size: int,
    num_heads: int,
    state_dim: int,
    *,
    cut_prompts: bool = False,
    head_dim: int = 256,
) -> int:
    """Bytes that `ssd_prefill` needs on CUDA for tokens of bf16; `head_dim` counts beside `cut_prompts` alone."""
    return _scratch_size(num_tokens, batch_size, num_heads, state_dim, False, False, head_dim if cut_prompts else 0)


def _scratch(v: Tensor, state_indices: Tensor, key_dim: int, delta: bool, channels: bool, cut: bool) -> Tensor | None:
    if v.device.type != "cuda" or v.dtype != torch.bfloat16:
        return None
    cut_rows = v.shape[2] if cut else 0
    size = _scratch_size(v.shape[0], state_indices.shape[0], v.shape[1], key_dim, delta, channels, cut_rows)
    return v.new_empty(size, dtype=torch.uint8)


@names_its_arguments
def delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    states: Tensor,
    cu_seqlens: Tensor,
    prefix_lens: Tensor,
    state_indices: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    plan: Tensor | None = None,
    scratch: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float = 0.0,
    qk_l2norm: bool = True,
    out: Tensor | None = None,
    report: Tensor | None = None,
    cut_prompts: bool = False,
) -> Tensor:
    """Ragged requests through the gated delta rule: `delta_decode`, token by token, in one call.

    A request's tokens count from its prefix. A prompt resumed at a multiple of 64 tokens gives the bits of the whole,
    unless prompts may be cut.

    Args:
        q, k: ``[T, H, K]``, one dtype (bf16, fp16, fp32), last dim dense.
        v: ``[T, HV, V]``. K and V at most 256.
        a: ``[T, HV]``, or ``[T, HV, K]`` for a gate per channel.
        b: ``[T, HV]``. a and b are of q's dtype, or float32 both. Without `A_log` they are g and beta.
        states: ``[num_slots, HV, V, K]`` float32, bf16 or fp16, last dim dense; updated in place.
        cu_seqlens: int32 ``[B + 1]``, rising. Tokens of no request give 0.
        prefix_lens: int32 ``[B]``: tokens that the state has seen already. 0: the state starts at zero, whatever its
            slot holds.
        state_indices: int32 ``[B]``: slots, each at most once; below 0: padding, nothing is touched and out is 0.
        checkpoint_slots: int32 ``[B, M]``, last dim dense. Cell j: where the state goes that has seen
            ``64 (prefix_lens // 64 + 1 + j)`` tokens, if the request gets so far; below 0: nowhere. No other slot of
            the call.
        plan: int32 ``[B]``, by `delta_plan`: the long requests first. Without one they run as they come.
        scratch: uint8 ``[delta_prefill_scratch_size(...)]``, on CUDA for bf16 tokens; allocated when omitted.
        A_log, dt_bias, scale, lower_bound, qk_l2norm: as in `delta_decode`.
        out: ``[T, HV, V]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode: slots outside the pool or shared, bounds that fall, bad plans.
        cut_prompts: Parts of a prompt may run at the same time where heads are too few for the GPU. How many is
            decided by the extents of the call. So bits depend on these, and on where a prompt is resumed. A CPU cuts
            none: its bits are the same.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also what `report` would be told of.

    Source: arXiv 2412.06464, equation 10 and section 3.3; arXiv 2510.26692, section 3.
    """
    out = v.new_empty(v.shape) if out is None else out
    scratch = _scratch(v, state_indices, q.shape[-1], True, a.dim() == 3, cut_prompts) if scratch is None else scratch
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.attnops.delta_prefill(
        out,
        states,
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        cu_seqlens,
        prefix_lens,
        state_indices,
        checkpoint_slots,
        plan,
        scratch,
        scale,
        lower_bound,
        qk_l2norm,
        report,
        cut_prompts,
    )
    return out


@names_its_arguments
def ssd_prefill(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    states: Tensor,
    cu_seqlens: Tensor,
    prefix_lens: Tensor,
    state_indices: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    plan: Tensor | None = None,
    scratch: Tensor | None = None,
    scale: float = 1.0,
    dt_softplus: bool = False,
    out: Tensor | None = None,
    report: Tensor | None = None,
    cut_prompts: bool = False,
) -> Tensor:
    """Ragged requests through a state space with a scalar decay: `ssd_decode`, token by token, in one call.

    Args:
        x: ``[T, H, P]`` (bf16, fp16, fp32), last dim dense.
        z: In x's shape.
        dt: ``[T, H]`` of x's dtype or float32; None: 1.
        A: float32 ``[H]``.
        B, C: ``[T, G, N]``: a group serves ``H / G`` heads. P and N at most 256.
        states: ``[num_slots, H, P, N]`` float32, bf16 or fp16, last dim dense; updated in place.
        cu_seqlens, prefix_lens, state_indices, checkpoint_slots, report, cut_prompts: as in `delta_prefill`.
        plan: int32 ``[B]``, by `ssd_plan`.
        scratch: uint8 ``[ssd_prefill_scratch_size(...)]``, as in `delta_prefill`.
        D, dt_bias, scale, dt_softplus: as in `ssd_decode`.
        out: ``[T, H, P]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also what `report` would be told of.

    Source: arXiv 2405.21060, section 6; arXiv 2401.04658 for Lightning.
    """
    out = x.new_empty(x.shape) if out is None else out
    scratch = _scratch(x, state_indices, B.shape[-1], False, False, cut_prompts) if scratch is None else scratch
    torch.ops.attnops.ssd_prefill(
        out,
        states,
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        z,
        cu_seqlens,
        prefix_lens,
        state_indices,
        checkpoint_slots,
        plan,
        scratch,
        scale,
        dt_softplus,
        report,
        cut_prompts,
    )
    return out


@names_its_arguments
def delta_plan(cu_seqlens: Tensor, *, plan: Tensor | None = None) -> Tensor:
    """The order in which `delta_prefill` takes its requests: those of the most tokens first.

    Args:
        cu_seqlens: int32 ``[B + 1]``.
        plan: int32 ``[B]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    plan = cu_seqlens.new_empty(max(cu_seqlens.shape[0] - 1, 0)) if plan is None else plan
    torch.ops.attnops.delta_plan(plan, cu_seqlens)
    return plan


@names_its_arguments
def ssd_plan(cu_seqlens: Tensor, *, plan: Tensor | None = None) -> Tensor:
    """`delta_plan`, for `ssd_prefill`.

    Args:
        cu_seqlens: int32 ``[B + 1]``.
        plan: int32 ``[B]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    plan = cu_seqlens.new_empty(max(cu_seqlens.shape[0] - 1, 0)) if plan is None else plan
    torch.ops.attnops.ssd_plan(plan, cu_seqlens)
    return plan


for _op in ("delta_prefill", "ssd_prefill", "delta_plan", "ssd_plan"):
    register_fake(_op)
