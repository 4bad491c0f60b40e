"""flash-linear-attention's functions over whole prompts, forward alone: gated delta rule and Kimi delta attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnops import ops
from attnops.compat._convert import refuse, require_default
from attnops.compat._errors import names_the_peers

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule"]


def _gate(
    name: str, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """The log of the decay of a raw gate, float32 ``[B, T, HV]`` or ``[B, T, HV, K]``."""
    if g is None or (A_log is None and lower_bound is None):
        missing = "g" if g is None else "A_log"
        raise ValueError(f"attnops.compat: {name}: {missing} must be given with use_gate_in_kernel=True")
    for label, given, count in (("A_log", A_log, g.shape[2]), ("dt_bias", dt_bias, g.shape[2:].numel())):
        if given is not None and given.numel() != count:
            raise ValueError(
                f"attnops.compat: {name}: {label} must have {count} numbers for g {list(g.shape)}, "
                f"got {list(given.shape)}"
            )
    raw = g.float() if dt_bias is None else g.float() + dt_bias.float().view(g.shape[2:])
    rate = 1.0 if A_log is None else A_log.float().exp().view(-1, *[1] * (g.dim() - 3))
    return -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)


def _no_gate(name: str, **given: Tensor | float | None) -> None:
    """Raises for arguments of a raw gate where there is none."""
    names = [label for label, value in given.items() if value is not None]
    if names:
        raise refuse(name, f"{names[0]}= alone", "it belongs to use_gate_in_kernel=True")


def _beta(name: str, beta: Tensor, sigmoid: bool, twice: bool) -> Tensor:
    if twice and not sigmoid:
        raise ValueError(
            f"attnops.compat: {name}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False"
        )
    beta = beta.float().sigmoid() if sigmoid else beta
    return 2 * beta if twice else beta


def _v_first(name: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Of the option and its older name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(f"attnops.compat: {name}: transpose_state_layout is state_v_first's older name: give one")
    return transpose_state_layout


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    v_first: bool,
    step: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """States are ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with `v_first`; the op has the latter.

    Args:
        step: One token of each sequence is a decode step. Then q, k and v may have a dtype each; the result has v's.
    """
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
    else:
        if batch != 1:
            raise ValueError(f"attnops.compat: {name}: q.shape[0] must be 1 with cu_seqlens, got {batch}")
        bounds = cu_seqlens.to(torch.int32)
    count = bounds.shape[0] - 1
    shape = (count, v.shape[2], v.shape[3], k.shape[3])
    if initial_state is None:
        states = torch.zeros(shape, device=q.device)
    else:
        given = initial_state if v_first else initial_state.transpose(-1, -2)
        if tuple(given.shape) != shape:
            raise ValueError(
                f"attnops.compat: {name}: initial_state must have a state for each of {count} sequences, "
                f"got shape {list(initial_state.shape)}"
            )
        states = given.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    indices = torch.arange(count, dtype=torch.int32, device=q.device)
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g.float(), beta.float()))
    if step and tokens == 1 and cu_seqlens is None:
        dtype = v.dtype
        if not q.dtype == k.dtype == dtype:
            q, k, v = q.float(), k.float(), v.float()
        out = ops.delta_decode(q, k, v, g, beta, states=states, state_indices=indices, scale=scale, qk_l2norm=l2norm)
        return out.to(dtype).unflatten(0, (batch, tokens)), _final(states, v_first) if output_final_state else None
    out = ops.delta_prefill(
        q,
        k,
        v,
        g,
        beta,
        states=states,
        cu_seqlens=bounds,
        prefix_lens=torch.full_like(indices, 0 if initial_state is None else 64),
        state_indices=indices,
        plan=ops.delta_plan(bounds),
        scale=scale,
        qk_l2norm=l2norm,
    )
    return out.unflatten(0, (batch, tokens)), _final(states, v_first) if output_final_state else None


def _final(states: Tensor, v_first: bool) -> Tensor:
    return states if v_first else states.transpose(-1, -2).contiguous()


_WORDS = {"states": "initial_state", "a": "g", "b": "beta"}
_CP = "each device takes whole sequences; give heads to devices instead"
_STATES = "attnops.ops.delta_prefill keeps states at multiples of 64 tokens (checkpoint_slots=)"


@names_the_peers("chunk_gated_delta_rule", **_WORDS)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences: `attnops.ops.delta_prefill`.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g, beta: ``[B, T, HV]``, the log of the decay, and beta itself.
        scale: Of q; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with `state_v_first`; not written.
        output_final_state: Return the states after the last tokens.
        use_qk_l2norm_in_kernel: Divide q and k by their l2 norms.
        use_beta_sigmoid_in_kernel: beta is raw: its sigmoid counts.
        allow_neg_eigval: Twice that sigmoid counts.
        cu_seqlens: ``[N + 1]``: B is 1, and sequences are ragged.
        use_gate_in_kernel: g is raw: ``-exp(A_log) softplus(g + dt_bias)``.
        A_log, dt_bias: ``[HV]``; the second may be None.
        cp_context: Not honoured: sequences cut over devices.
        transpose_state_layout: The older name of `state_v_first`.
        cu_seqlens_cpu, chunk_indices, chunk_size: Ignored. They spare that library work, or choose a kernel.

    Returns:
        ``[B, T, HV, V]``, and the final states, float32, or None.

    Raises:
        NotImplementedError: `cp_context`; `A_log` or `dt_bias` without `use_gate_in_kernel`.
        ValueError: `use_gate_in_kernel` without `A_log`, `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`, or
            states or gates of another shape.
    """
    name = "chunk_gated_delta_rule"
    require_default(name, {"cp_context": _CP}, {}, {"cp_context": cp_context})
    if use_gate_in_kernel:
        g = _gate(name, g, A_log, dt_bias)
    else:
        _no_gate(name, A_log=A_log, dt_bias=dt_bias)
    beta = _beta(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    v_first = _v_first(name, state_v_first, transpose_state_layout)
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, v_first)
    return _run(name, q, k, v, g, beta, *options)


@names_the_peers("fused_recurrent_gated_delta_rule", **_WORDS)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`, with gates per head (`g`), per key channel (`gk`, ``[B, T, HV, K]``), both or none.

    One token of each sequence is `attnops.ops.delta_decode`, of float32 throughout.

    Args:
        gk: The log of the decay, never raw.
        gv: Not honoured: gates of values.
        beta: None: ones.
        cu_seqlens: By name alone: its place differs between versions of that library, and so does all that follows.
        use_gate_in_kernel, A_log, dt_bias: g is raw, as there.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, transpose_state_layout: As there.

    Raises:
        NotImplementedError, ValueError: As there.
    """
    name = "fused_recurrent_gated_delta_rule"
    if gv is not None:
        raise refuse(name, "gv=", "gates of heads (g) and of key channels (gk) are served")
    ones = torch.ones(v.shape[:3], device=v.device)
    if use_gate_in_kernel:
        g = _gate(name, g, A_log, dt_bias)
    else:
        _no_gate(name, A_log=A_log, dt_bias=dt_bias)
    beta = _beta(name, ones if beta is None else beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    gate = torch.zeros_like(ones) if g is None else g.float()
    gate = gate if gk is None else gk.float() + gate.unsqueeze(-1)
    v_first = _v_first(name, state_v_first, transpose_state_layout)
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, v_first)
    return _run(name, q, k, v, gate, beta, *options, step=True)


@names_the_peers("chunk_kda", **_WORDS)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    *,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention over whole sequences: `chunk_gated_delta_rule` with g per key channel, ``[B, T, HV, K]``.

    Args:
        use_gate_in_kernel: g is raw: ``-exp(A_log) softplus(g + dt_bias)``, or with `lower_bound`
            ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``.
        A_log: ``[HV]``. With `lower_bound` it may be None, a factor of 1.
        dt_bias: ``[HV * K]``.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta is raw, as there.
        safe_gate: Chooses a kernel there; the gate is what `lower_bound` says, and a raw one must have it.
        return_intermediate_states, cp_context: Not honoured.
        disable_recompute: Of a backward pass, which there is not here.
        state_v_first, transpose_state_layout, cu_seqlens, cu_seqlens_cpu, chunk_size: As there.

    Raises:
        NotImplementedError, ValueError: As there.
    """
    name = "chunk_kda"
    advice = {"return_intermediate_states": _STATES, "cp_context": _CP}
    given = {"return_intermediate_states": return_intermediate_states, "cp_context": cp_context}
    require_default(name, advice, {"return_intermediate_states": False}, given)
    if use_gate_in_kernel:
        if safe_gate and lower_bound is None:
            raise ValueError(f"attnops.compat: {name}: lower_bound must be given with safe_gate=True")
        g = _gate(name, g, A_log, dt_bias, lower_bound)
    else:
        _no_gate(name, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    beta = _beta(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    v_first = _v_first(name, state_v_first, transpose_state_layout)
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, v_first)
    return _run(name, q, k, v, g, beta, *options)
