"""FlashInfer's functions of linear attention: gated delta rule and selective state update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import refuse, require_default
from attnops.compat._errors import names_the_peers

_CHUNK = 64
_WORDS = {"states": "state", "state_indices": "initial_state_indices", "out": "output"}
_POOL_WORDS = {**_WORDS, "states": "initial_state"}


def _check_backend(function: str, backend: str, *known: str) -> None:
    if backend not in ("auto", "flashinfer", *known):
        raise ValueError(f"attnops.compat: {function}: backend must be 'auto' or one of FlashInfer's, got {backend!r}")


def _all_slots(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _take(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 copies of slots of a pool, a row each, and the rows' indices: below 0 where the slot is."""
    rows = pool.index_select(0, slots.clamp(min=0)).float()
    own = _all_slots(slots.shape[0], slots.device)
    return rows, torch.where(slots < 0, -1, own)


def _put(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """``pool[slots[i]] = rows[i]`` where the slot is not below 0. Nothing is read on the host.

    Padding writes what another row writes, or, if there is none, what is there.
    """
    if slots.shape[0] == 0:
        return
    real = slots >= 0
    one = real.to(torch.uint8).argmax().view(1)
    to = torch.where(real, slots, slots.index_select(0, one).clamp(min=0)).long()
    shape = (-1,) + (1,) * (rows.dim() - 1)
    given = torch.where(real.view(shape), rows.to(pool.dtype), rows.index_select(0, one).to(pool.dtype))
    pool.index_copy_(0, to, torch.where(real.any(), given, pool.index_select(0, to)))


def _keep(buffer: Tensor, step: int, own: Tensor, rows: Tensor) -> None:
    """Row i of the states after a step, in cell `step` of row i of a buffer, where i is no padding."""
    cell = buffer[: own.shape[0], step]
    real = (own >= 0).view((-1,) + (1,) * (rows.dim() - 1))
    cell.copy_(torch.where(real, rows.to(cell.dtype), cell))


def _delta_steps(
    tokens: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    l2norm: bool,
    rows: Tensor,
    own: Tensor,
    out: Tensor,
    each: Callable[[int], None],
) -> None:
    """Tokens ``[B, T, ...]`` one after another."""
    rate, bias = A_log.float(), dt_bias.float()
    for t in range(out.shape[1]):
        q, k, v, a, b = (x[:, t] for x in tokens)
        ops.delta_decode(
            q,
            k,
            v,
            a,
            b,
            states=rows,
            state_indices=own,
            A_log=rate,
            dt_bias=bias,
            scale=scale,
            qk_l2norm=l2norm,
            out=out[:, t],
        )
        each(t)


@names_the_peers("gated_delta_rule_decode_pretranspose", **_WORDS)
def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Tokens of each request through the gated delta rule: `attnops.ops.delta_decode`.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        a, b: ``[B, T, HV]``.
        A_log, dt_bias: ``[HV]``.
        state: ``[B, HV, V, K]``, updated in place; None with `initial_state`.
        initial_state: A pool ``[N, HV, V, K]``.
        initial_state_indices, output_state_indices: ``[B]``, slots that are
            read and written. Below 0: nothing is touched, and the output is 0, whatever the states' type.
        intermediate_states_buffer: ``[B, >= T, HV, V, K]``: the states after each token, where T is above 1.
        disable_state_update: States are only read, where T is above 1.

    Returns:
        ``[B, T, HV, V]``, and the state or the pool.
    """
    name = "gated_delta_rule_decode_pretranspose"
    _check_backend(name, backend, "cake_gdn", "rubin")
    batch, count = q.shape[:2]
    if count == 1 and (intermediate_states_buffer is not None or disable_state_update):
        raise refuse(name, "intermediate_states_buffer= and disable_state_update=", "they need more than one token")
    if (initial_state is None) == (state is None) or (initial_state is None) != (initial_state_indices is None):
        raise ValueError(
            f"attnops.compat: {name}: give state alone, or initial_state with initial_state_indices, and state None"
        )
    if output_state_indices is not None and initial_state is None:
        raise ValueError(f"attnops.compat: {name}: output_state_indices needs initial_state")
    pool = state if initial_state is None else initial_state
    assert pool is not None
    slots = _all_slots(batch, q.device) if initial_state_indices is None else initial_state_indices.to(torch.int32)
    targets = slots if output_state_indices is None else output_state_indices.to(torch.int32)
    out = v.new_empty(v.shape) if output is None else output
    if count == 1:
        ops.delta_decode(
            *(x[:, 0] for x in (q, k, v, a, b)),
            states=pool,
            state_indices=slots,
            A_log=A_log.float(),
            dt_bias=dt_bias.float(),
            out_state_indices=None if output_state_indices is None else targets,
            scale=scale,
            qk_l2norm=use_qk_l2norm,
            out=out[:, 0],
        )
        return out, pool
    rows, own = _take(pool, slots)

    def keep(t: int) -> None:
        if intermediate_states_buffer is not None:
            _keep(intermediate_states_buffer, t, own, rows)

    _delta_steps((q, k, v, a, b), A_log, dt_bias, scale, use_qk_l2norm, rows, own, out, keep)
    if not disable_state_update:
        _put(pool, torch.where(own < 0, -1, targets), rows)
    return out, pool


@names_the_peers("gated_delta_rule_decode", **_WORDS)
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule_decode_pretranspose` of one token. `state` is ``[B, HV, K, V]``: it is turned, and back."""
    _check_backend("gated_delta_rule_decode", backend, "cake_gdn")
    turned = state.transpose(-1, -2).contiguous()
    options = (scale, output, use_qk_l2norm)
    out, _ = gated_delta_rule_decode_pretranspose(q, k, v, turned, A_log, a, dt_bias, b, *options)
    state.copy_(turned.transpose(-1, -2))
    return out, state


@names_the_peers("gated_delta_rule_mtp", **_POOL_WORDS)
def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts of each request through the gated delta rule, with their states if asked for.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        a, b: ``[B, T, HV]``.
        initial_state: A pool ``[N, HV, V, K]``.
        initial_state_indices: ``[B]``; below 0: nothing is touched, output 0.
        intermediate_states_buffer: ``[B, >= T, HV, V, K]``: the states after each token.
        ssm_state_indices: ``[B, T]``: slots of the pool for these states instead.
        disable_state_update: Leave the pool's own slots as they are. None: yes.
        output_state_indices: ``[B]``: where the last states go; below 0: nowhere.
        cache_replayssm: Not honoured: `attnops.ops.delta_verify` has rings of its own.

    Returns:
        ``[B, T, HV, V]``, and the pool.
    """
    name = "gated_delta_rule_mtp"
    if cache_replayssm or any(x is not None for x in (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)):
        raise refuse(name, "cache_replayssm=", "attnops.ops.delta_verify and delta_commit keep rings of drafts")
    if intermediate_states_buffer is not None and ssm_state_indices is not None:
        raise ValueError(f"attnops.compat: {name}: give intermediate_states_buffer or ssm_state_indices, not both")
    slots = initial_state_indices.to(torch.int32)
    targets = slots if output_state_indices is None else output_state_indices.to(torch.int32)
    out = v.new_empty(v.shape) if output is None else output
    rows, own = _take(initial_state, slots)

    def keep(t: int) -> None:
        if intermediate_states_buffer is not None:
            _keep(intermediate_states_buffer, t, own, rows)
        if ssm_state_indices is not None:
            _put(initial_state, torch.where(own < 0, -1, ssm_state_indices[:, t].to(torch.int32)), rows)

    _delta_steps((q, k, v, a, b), A_log, dt_bias, scale, use_qk_l2norm, rows, own, out, keep)
    if disable_state_update is False:
        _put(initial_state, torch.where(own < 0, -1, targets), rows)
    return out, initial_state


@names_the_peers("chunk_gated_delta_rule", **{**_POOL_WORDS, "a": "g", "b": "beta"})
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prompts through the gated delta rule: `attnops.ops.delta_prefill`.

    Args:
        q: ``[T, HQ, D]``.
        k: ``[T, H, D]``.
        v: ``[T, HV, D]``. Where HQ is above HV, keys and values are repeated.
        g: ``[T, max(HQ, HV)]``: the decay itself, not its log; None: 1.
        beta: In g's shape; None: 1.
        initial_state: A state ``[heads, V, K]`` for each sequence, or with `state_indices` a pool of them.
        output_final_state: Return the final states, too, in `output_state` if it is given.
        output_state: For final states: in order, or with `state_indices` a pool, which may be `initial_state`.
        state_checkpoints: For states after every `checkpoint_every_n_tokens` tokens, a multiple of 64.
        checkpoint_cu_starts: ``[N + 1]``: where each sequence's begin.
        use_cp, backend, max_seqlen: Choose among kernels there; ignored.

    Returns:
        ``[T, max(HQ, HV), D]``, and with `output_final_state` the final states.
    """
    name = "chunk_gated_delta_rule"
    _check_backend(name, backend, "cake_gdn", "cudnn")
    if cu_seqlens is None:
        raise ValueError(f"attnops.compat: {name}: cu_seqlens must be given")
    if checkpoint_every_n_tokens % _CHUNK != 0:
        raise ValueError(
            f"attnops.compat: {name}: checkpoint_every_n_tokens must be a multiple of {_CHUNK}, "
            f"got {checkpoint_every_n_tokens}"
        )
    if checkpoint_every_n_tokens and (state_checkpoints is None or checkpoint_cu_starts is None):
        raise ValueError(
            f"attnops.compat: {name}: checkpoint_every_n_tokens needs state_checkpoints and checkpoint_cu_starts"
        )
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(f"attnops.compat: {name}: state_indices needs output_state, a pool")
    heads = max(q.shape[1], v.shape[1])
    if v.shape[1] < heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    bounds = cu_seqlens.to(torch.int32)
    count, tokens = bounds.shape[0] - 1, q.shape[0]
    every, own = checkpoint_every_n_tokens, _all_slots(count, q.device)
    kept = state_checkpoints if every and state_checkpoints is not None else None
    rows = torch.zeros(count + (0 if kept is None else kept.shape[0]), heads, v.shape[2], k.shape[2], device=q.device)
    slots = own if state_indices is None else state_indices.to(torch.int32)
    if initial_state is not None:
        rows[:count] = _take(initial_state, slots)[0]
    cells = None
    if kept is not None and checkpoint_cu_starts is not None:
        seen = _CHUNK * torch.arange(1, tokens // _CHUNK + 1, device=q.device)
        starts = checkpoint_cu_starts.long()
        cell = starts[:-1, None] + seen // every - 1
        real = (seen % every == 0) & (cell < starts[1:, None])
        cells = torch.where(real, cell + count, -1).to(torch.int32)
    gates = torch.ones(tokens, heads, device=q.device) if g is None else g.float()
    out = ops.delta_prefill(
        q,
        k,
        v,
        gates.log(),
        torch.ones_like(gates) if beta is None else beta.float(),
        states=rows,
        cu_seqlens=bounds,
        prefix_lens=torch.full_like(own, 0 if initial_state is None else _CHUNK),
        state_indices=own,
        checkpoint_slots=cells,
        plan=ops.delta_plan(bounds),
        scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
        out=output,
    )
    if kept is not None:
        kept.copy_(rows[count:])
    if output_state is not None and output_final_state:
        _put(output_state, slots, rows[:count])
    if not output_final_state:
        return out
    return out, rows[:count] if output_state is None else output_state


def _of_heads(name: str, argument: str, x: Tensor, dims: int) -> Tensor:
    """The first element of the last `dims` dims, along which a tensor must be expanded: one number a head."""
    for dim in range(1, dims + 1):
        if x.shape[-dim] > 1 and x.stride(-dim) != 0:
            raise refuse(name, f"{argument} of several numbers a head", "expand one number along the other dimensions")
    for _ in range(dims):
        x = x[..., 0]
    return x


@names_the_peers("selective_state_update", states="state", state_indices="state_batch_indices")
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Tokens of each request through Mamba2's recurrence: `attnops.ops.ssd_decode`.

    Args:
        state: ``[N, H, P, S]``, or ``[N, P, S]`` of one head; updated in place.
        x: ``[B, H, P]``, ``[B, P]`` of one head, or ``[B, T, H, P]``.
        z: As x.
        dt: As x, one number a head, expanded; so are A ``[H, P, S]``, D and dt_bias ``[H, P]``.
        B, C: ``[B, G, S]``, ``[B, S]`` of one group, or ``[B, T, G, S]``.
        state_batch_indices: ``[B]``: slots; `pad_slot_id`: nothing is touched, and the output is 0.
        dst_state_batch_indices: ``[B]``: where the new states go.
        disable_state_update: States are only read.
        intermediate_states_buffer: ``[N, >= T, H, P, S]``: the states after each token, of row
            ``intermediate_state_indices[i]`` or i.
        state_scale, intermediate_state_scales, rand_seed, cu_seqlens, num_accepted_tokens: Not honoured.
        algorithm, backend: Choose among kernels there; ignored.

    Returns:
        As x.
    """
    name = "selective_state_update"
    require_default(
        name,
        {
            "state_scale": "states are float32, bf16 or fp16",
            "intermediate_state_scales": "states are float32, bf16 or fp16",
            "rand_seed": "states are rounded to nearest",
            "cu_seqlens": "give tokens as [B, T, H, P], or attnops.ops.ssd_prefill ragged ones",
            "num_accepted_tokens": "attnops.ops.ssd_verify and ssd_commit keep rings of drafts",
        },
        {},
        {
            "state_scale": state_scale,
            "intermediate_state_scales": intermediate_state_scales,
            "rand_seed": rand_seed,
            "cu_seqlens": cu_seqlens,
            "num_accepted_tokens": num_accepted_tokens,
        },
    )
    shape = x.shape
    pool = state.unsqueeze(1) if state.dim() == 3 else state
    many, one_head = x.dim() == 4, x.dim() == 2

    def lifted(t: Tensor, no_heads: bool) -> Tensor:
        """``[B, T, heads, ...]``."""
        t = t.unsqueeze(1) if no_heads else t
        return t if many else t.unsqueeze(1)

    x, dt = lifted(x, one_head), lifted(dt, one_head)
    B, C = lifted(B, B.dim() == 2), lifted(C, C.dim() == 2)
    gates = None if z is None else lifted(z, one_head)
    rate = _of_heads(name, "A", A if A.dim() == 3 else A.unsqueeze(0), 2).float()
    skip = _of_heads(name, "D", D if D.dim() == 2 else D.unsqueeze(0), 1).float()
    bias = None
    if dt_bias is not None:
        bias = _of_heads(name, "dt_bias", dt_bias if dt_bias.dim() == 2 else dt_bias.unsqueeze(0), 1).float()
    steps = _of_heads(name, "dt", dt, 1)
    batch, count = x.shape[:2]
    slots = _all_slots(batch, x.device)
    if state_batch_indices is not None:
        slots = torch.where(state_batch_indices == pad_slot_id, -1, state_batch_indices).to(torch.int32)
    targets = None if dst_state_batch_indices is None else dst_state_batch_indices.to(torch.int32)
    if disable_state_update:
        targets = torch.full_like(slots, -1)
    result = x.new_empty(x.shape)

    def step(t: int, states: Tensor, own: Tensor, to: Tensor | None) -> None:
        ops.ssd_decode(
            x[:, t],
            steps[:, t],
            rate,
            B[:, t],
            C[:, t],
            states=states,
            state_indices=own,
            D=skip,
            dt_bias=bias,
            z=None if gates is None else gates[:, t],
            out_state_indices=to,
            dt_softplus=dt_softplus,
            out=result[:, t],
        )

    if count == 1 and intermediate_states_buffer is None:
        step(0, pool, slots, targets)
    else:
        rows, own = _take(pool, slots)
        cells = own if intermediate_state_indices is None else intermediate_state_indices.to(torch.int32)
        for t in range(count):
            step(t, rows, own, None)
            if intermediate_states_buffer is not None:
                _put(intermediate_states_buffer[:, t], torch.where(own < 0, -1, cells), rows)
        _put(pool, torch.where(own < 0, -1, slots if targets is None else targets), rows)
    result = result.view(shape)
    return result if out is None else out.copy_(result)
