"""flash-linear-attention's functions over whole prompts, forward alone: gated delta rule and Kimi delta attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnops import ops
from attnops.compat._convert import refuse
from attnops.compat._errors import names_the_peers

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule"]


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
    v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """States are ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with `v_first`; the op has the latter."""
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
    final = states if v_first else states.transpose(-1, -2).contiguous()
    return out.unflatten(0, (batch, tokens)), final if output_final_state else None


_WORDS = {"states": "initial_state", "a": "g", "b": "beta"}


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
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
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
        cu_seqlens: ``[N + 1]``: B is 1, and sequences are ragged.

    Returns:
        ``[B, T, HV, V]``, and the final states, float32, or None.
    """
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first)
    return _run("chunk_gated_delta_rule", q, k, v, g, beta, *options)


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
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`, with gates per head (`g`), per key channel (`gk`, ``[B, T, HV, K]``), both or none.

    Args:
        gv: Not honoured: gates of values.
        beta: None: ones.
    """
    if gv is not None:
        raise refuse(
            "fused_recurrent_gated_delta_rule", "gv=", "gates of heads (g) and of key channels (gk) are served"
        )
    ones = torch.ones(v.shape[:3], device=v.device)
    beta = ones if beta is None else beta
    gate = torch.zeros_like(ones) if g is None else g.float()
    gate = gate if gk is None else gk.float() + gate.unsqueeze(-1)
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _run("fused_recurrent_gated_delta_rule", q, k, v, gate, beta, *options)


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
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention over whole sequences: `chunk_gated_delta_rule` with g per key channel, ``[B, T, HV, K]``.

    Args:
        use_gate_in_kernel: g is raw: ``-exp(A_log) softplus(g + dt_bias)``, or with `lower_bound`
            ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``.
        A_log: ``[HV]``.
        dt_bias: ``[HV * K]``.
        use_beta_sigmoid_in_kernel: beta is raw.
        safe_gate: Chooses a kernel there; the gate is what `lower_bound` says.
    """
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("attnops.compat: chunk_kda: A_log must be given with use_gate_in_kernel")
        rate = A_log.float().flatten().exp().unsqueeze(-1)
        raw = g.float() if dt_bias is None else g.float() + dt_bias.float().view(g.shape[2:])
        g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    elif lower_bound is not None or A_log is not None or dt_bias is not None:
        raise refuse("chunk_kda", "A_log=, dt_bias= and lower_bound=", "they belong to use_gate_in_kernel=True")
    beta = beta.float().sigmoid() if use_beta_sigmoid_in_kernel else beta
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first)
    return _run("chunk_kda", q, k, v, g, beta, *options)
