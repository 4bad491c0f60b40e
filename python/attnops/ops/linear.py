"""Linear attention: one token per request through a recurrence, short convolutions, and the states of both.

States live in slots of a pool. A row whose slot is below 0 is padding: nothing is touched, and its output is 0.
`linear_prefill` has the ops for prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def delta_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    states: Tensor,
    state_indices: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out_state_indices: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float = 0.0,
    qk_l2norm: bool = True,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """One token per request through the gated delta rule: GDN, or KDA where `a` has a value per key channel.

    Per head: ``S = e^g S; u = beta (v - S k); S += u k^T; out = scale S q``, in float32, with
    ``g = -exp(A_log) softplus(a + dt_bias)``, or ``lower_bound sigmoid(exp(A_log) (a + dt_bias))``, and
    ``beta = sigmoid(b)``. Value head h uses key head ``h // (HV / H)``.

    Args:
        q, k: ``[B, H, K]``, one dtype (bf16, fp16, fp32), last dim dense.
        v: ``[B, HV, V]``. K and V at most 256.
        a: ``[B, HV]``, or ``[B, HV, K]`` for a gate per channel.
        b: ``[B, HV]``. a and b are of q's dtype, or float32 both. Without `A_log` they are g and beta.
        states: ``[num_slots, HV, V, K]`` float32, bf16 or fp16, last dim dense; updated in place.
        state_indices: int32 ``[B]``: slots, each at most once; below 0: padding.
        A_log: float32 ``[HV]``.
        dt_bias: float32 ``[HV]``, or ``[HV, K]`` for a gate per channel.
        out_state_indices: int32 ``[B]``: where the new states go instead; below 0: nowhere. No slot that another row
            reads or writes.
        scale: Of q; ``K ** -0.5`` by default.
        lower_bound: Below 0: the bounded gate. 0: the one by softplus.
        qk_l2norm: Divide q and k by ``sqrt(sum x^2 + 1e-6)``.
        out: ``[B, HV, V]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode: slots outside the pool, or shared.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.

    Source: arXiv 2412.06464, equation 10; arXiv 2510.26692, section 3.
    """
    out = v.new_empty(v.shape) if out is None else out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.attnops.delta_decode(
        out,
        states,
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state_indices,
        out_state_indices,
        scale,
        lower_bound,
        qk_l2norm,
        report,
    )
    return out


@names_its_arguments
def delta_conv_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    num_k_heads: int,
    states: Tensor,
    conv_states: Tensor,
    state_indices: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    silu: bool = True,
    scale: float | None = None,
    lower_bound: float = 0.0,
    qk_l2norm: bool = True,
    mixed: Tensor | None = None,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` of one token per request, then `delta_decode` of its output: bit for bit the two.

    On the CPU no thread waits between them, and what is convolved stays in its core's cache. CUDA takes two launches,
    of which the second asks for its states while the first one runs. On Hopper one launch does both for at most 2^17
    elements of states. It takes tokens and gates of bf16, a width of 4, keys of at most 128 and few values a key.

    Args:
        x: ``[B, C]`` (bf16, fp16, fp32), last dim dense: q of ``num_k_heads`` heads, then k, then v, side by side, so
            C is ``2 H K + HV V``.
        weight, bias, conv_states, silu: as in `causal_conv1d`.
        a, b, A_log, dt_bias, lower_bound, qk_l2norm: as in `delta_decode`.
        states: ``[num_slots, HV, V, K]``, as in `delta_decode`; `conv_states` has as many slots.
        state_indices: int32 ``[B]``: the slots of both pools, each at most once; below 0: padding.
        scale: Of q; ``K ** -0.5`` by default.
        mixed: In x's shape, contiguous: room for what is convolved, on CUDA. Allocated when omitted.
        out: ``[B, HV, V]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.

    Source: arXiv 2412.06464 for the delta rule, 2510.26692 for a gate per channel.
    """
    _, heads, rows, keys = states.shape
    out = x.new_empty(x.shape[0], heads, rows) if out is None else out
    scale = keys**-0.5 if scale is None else scale
    mixed = x.new_empty(x.shape) if mixed is None and x.is_cuda else mixed
    torch.ops.attnops.delta_conv_decode(
        out,
        states,
        conv_states,
        x,
        weight,
        bias,
        a,
        b,
        A_log,
        dt_bias,
        state_indices,
        num_k_heads,
        silu,
        scale,
        lower_bound,
        qk_l2norm,
        mixed,
        report,
    )
    return out


@names_its_arguments
def ssd_decode(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    states: Tensor,
    state_indices: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    out_state_indices: Tensor | None = None,
    scale: float = 1.0,
    dt_softplus: bool = False,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """One token per request through a state space with a scalar decay: Mamba2, or Lightning without `dt`.

    Per head: ``S = e^(dt A) S + dt x B^T; y = scale S C + D x``, in float32, and ``out = y silu(z)`` where z is given.

    Args:
        x: ``[B, H, P]`` (bf16, fp16, fp32), last dim dense.
        z: In x's shape.
        dt: ``[B, H]`` of x's dtype, or float32; None: 1.
        A: float32 ``[H]``, below 0: for Lightning the negative slope.
        B, C: ``[B, G, N]``: keys and queries, a group serves ``H / G`` heads. P and N at most 256.
        states: ``[num_slots, H, P, N]`` float32, bf16 or fp16, last dim dense; updated in place.
        state_indices, out_state_indices, report: as in `delta_decode`.
        D: float32 ``[H]``.
        dt_bias: float32 ``[H]``, added to dt.
        dt_softplus: dt is ``softplus(dt + dt_bias)``.
        scale: Of C.
        out: ``[B, H, P]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.

    Source: arXiv 2405.21060, equation 16; arXiv 2401.04658 for Lightning.
    """
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.attnops.ssd_decode(
        out, states, x, dt, A, B, C, D, dt_bias, z, state_indices, out_state_indices, scale, dt_softplus, report
    )
    return out


@names_its_arguments
def ssd_conv_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dt: Tensor | None,
    A: Tensor,
    *,
    num_groups: int,
    states: Tensor,
    conv_states: Tensor,
    state_indices: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    silu: bool = True,
    scale: float = 1.0,
    dt_softplus: bool = False,
    mixed: Tensor | None = None,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` of one token per request, then `ssd_decode` of its output: bit for bit the two.

    On the CPU no thread waits between them, and what is convolved stays in its core's cache. CUDA takes two launches,
    of which the second asks for its states while the first one runs.

    Args:
        x: ``[B, H P + 2 G N]`` (bf16, fp16, fp32), last dim dense: x of H heads, then B of G = `num_groups` groups,
            then C, side by side.
        weight, bias, conv_states, silu: as in `causal_conv1d`.
        dt, A, D, dt_bias, z, scale, dt_softplus: as in `ssd_decode`.
        states: ``[num_slots, H, P, N]``, as in `ssd_decode`; `conv_states` has as many slots.
        state_indices: int32 ``[B]``: the slots of both pools, each at most once; below 0: padding.
        mixed: In x's shape, contiguous: room for what is convolved, on CUDA. Allocated when omitted.
        out: ``[B, H, P]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.

    Source: arXiv 2405.21060, equation 16, for the state space.
    """
    _, heads, rows, _ = states.shape
    out = x.new_empty(x.shape[0], heads, rows) if out is None else out
    mixed = x.new_empty(x.shape) if mixed is None and x.is_cuda else mixed
    torch.ops.attnops.ssd_conv_decode(
        out,
        states,
        conv_states,
        x,
        weight,
        bias,
        dt,
        A,
        D,
        dt_bias,
        z,
        state_indices,
        num_groups,
        silu,
        scale,
        dt_softplus,
        mixed,
        report,
    )
    return out


@names_its_arguments
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None = None,
    silu: bool = True,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """A depthwise convolution over the tokens of each request.

    ``out[t] = act(bias + sum_j weight[:, j] x[t - W + 1 + j])`` for each channel, in float32.

    The inputs before a request's first token are its state; the last ``W - 1`` inputs become the new one. A request
    without tokens keeps its state.

    Args:
        x: ``[T, C]`` (bf16, fp16, fp32), last dim dense. Tokens of no request give 0.
        weight: ``[C, W]`` of x's dtype, W from 2 to 4.
        bias: ``[C]``.
        conv_states: ``[num_slots, C, W - 1]`` of x's dtype, the newest input at the end; updated in place.
        cu_seqlens: int32 ``[B + 1]``, rising.
        state_indices: int32 ``[B]``, as in `delta_decode`.
        has_initial_state: uint8 ``[B]``; 0: the inputs before are zeros. None: all have one.
        silu: Apply ``y * sigmoid(y)``.
        out: ``[T, C]``, not x itself; allocated when omitted.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot, or bounds that fall.

    Source: the short convolution of Mamba, arXiv 2312.00752, section 3.4.
    """
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.attnops.causal_conv1d(
        out, conv_states, x, weight, bias, cu_seqlens, state_indices, has_initial_state, silu, report
    )
    return out


@names_its_arguments
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    state_indices: Tensor,
    silu: bool = True,
    windows: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d` of the same number of tokens for each request: one when decoding.

    With `windows` the tokens are drafts, and the states are only read. A draft's inputs are its own and those of its
    nearest ancestors, and what is missing behind the root comes from the state. Once drafts are accepted, the last
    one's window is the request's state: ``copy_states(..., source=windows)``.

    Args:
        x: ``[B * T, C]``, the tokens of a request side by side; B is ``state_indices.shape[0]``.
        weight, bias, conv_states, state_indices, silu, report: as in `causal_conv1d`.
        windows: ``[B, T, C, W - 1]`` of x's dtype, written: the state that each draft would leave. T is at most 16.
            Padding's are not touched.
        tree_mask: uint8 ``[B, T, ceil(T / 8)]``, bits packed from the low end: the drafts before a draft that it
            descends from. None: a chain. Only with `windows`.
        out: ``[B * T, C]``, not x itself; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.
    """
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.attnops.causal_conv1d_update(
        out, conv_states, x, weight, bias, state_indices, silu, report, windows, tree_mask
    )
    return out


@names_its_arguments
def copy_states(
    states: Tensor, src: Tensor, dst: Tensor, *, source: Tensor | None = None, report: Tensor | None = None
) -> None:
    """Copy slots of a pool of states, all layers at once: ``states[:, dst[i]] = states[:, src[i]]``.

    Args:
        states: ``[num_layers, num_slots, ...]`` (bf16, fp16, fp32), each slot without gaps.
        src, dst: int32 ``[n]``; a pair with a slot below 0 does nothing. No slot of `dst` twice, nor in another pair's
            `src`.
        source: The pool of `src`'s slots: as `states`, with any number of slots, and no memory in common. None:
            `states`.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or shared.
    """
    torch.ops.attnops.copy_states(states, src, dst, report, source)


@names_its_arguments
def clear_states(states: Tensor, slots: Tensor, *, report: Tensor | None = None) -> None:
    """Set slots of a pool of states to zero, all layers at once.

    Args:
        states: ``[num_layers, num_slots, ...]`` (bf16, fp16, fp32), each slot without gaps.
        slots: int32 ``[n]``; those below 0 are skipped.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pool, or twice.
    """
    torch.ops.attnops.clear_states(states, slots, report)


for _op in (
    "delta_decode",
    "delta_conv_decode",
    "ssd_decode",
    "ssd_conv_decode",
    "causal_conv1d",
    "causal_conv1d_update",
    "copy_states",
    "clear_states",
):
    register_fake(_op)
