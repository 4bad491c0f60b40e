"""Backends of linear layers: states in slots of a pool, found by the step's requests.

A step is decode, one token for each request, or ragged: prompts, their continuations, and single tokens among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.linear_checkpoints import CheckpointInputs, Checkpoints
from attnops.backends.linear_drafts import ConvolvedDrafts
from attnops.backends.linear_rates import DecayRates
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.pools import HybridReqToTokenPool, MambaState
from attnops.report import first_fault, is_checked, new_report
from attnops.types import AttentionBatch, Limits, device_of

if TYPE_CHECKING:
    from attnops.layers.radix_linear_attention import RadixLinearAttention


@dataclass(frozen=True)
class ForwardMetadata:
    """What the ops of a step share, at addresses that stay; what it holds is written inside the graph.

    Attributes:
        mamba_cache_indices: int32 ``[B]``: slots of the requests' states; -1: padding.
        query_start_loc: int32 ``[B + 1]``: bounds of each request's tokens; None: one token each.
        prefix_lens: int32 ``[B]``: tokens before the new ones.
        has_initial_state: uint8 ``[B]``: 0 where there are none.
        plan: int32 ``[B]``: requests in the order of their work.
        drafts: Tokens of a request that the step verifies, or that extend a draft model; 0: states take all tokens.
        tree_mask: Of the drafts, packed; None: a chain.
        checkpoints: What prompts leave behind on their way; None: nothing.
    """

    mamba_cache_indices: Tensor
    query_start_loc: Tensor | None
    prefix_lens: Tensor
    has_initial_state: Tensor
    plan: Tensor
    drafts: int = 0
    tree_mask: Tensor | None = None
    checkpoints: Checkpoints | None = None


class LinearAttnBackend(ABC):
    """Serves the linear layers of a model, in the three methods of every backend.

    DECODE, EXTEND, MIXED and TARGET_VERIFY steps. A step that verifies drafts reads the states and keeps its updates in
    the pool's rings. Then `update_mamba_state_after_mtp_verify` says which of them count.

    A ragged DRAFT_EXTEND is a prompt of the accepted tokens. Other steps of draft models have tokens that may be
    rejected: DRAFT_EXTEND of `tokens_per_request` each, and draft loops. A linear layer refuses these; models whose
    layers all attend run them.

    Args:
        pool: Rows and states of the requests.
        limits: The largest step to come.
        layers: `layer_id` of the linear layers, in the order of their states in the pool.
        deterministic: A request's output has the same bits whatever else is in its batch, and wherever its prompt is
            resumed at a multiple of 64 tokens. Else prompts of few heads may be cut. `HybridLinearAttnBackend` asks
            for it where the spec of its other backend does.
    """

    name: ClassVar[str] = ""
    has_rates: ClassVar[bool] = False  # layers decay by -exp(A_log)

    def __init__(
        self, pool: HybridReqToTokenPool, limits: Limits, layers: Sequence[int], deterministic: bool = False
    ) -> None:
        states = pool.mamba_pool
        if len(set(layers)) != len(layers) or len(layers) != states.num_layers:
            raise ValueError(
                f"attnops: layers must name the {states.num_layers} linear layers of MambaPool, got {list(layers)}"
            )
        self.pool, self.limits, self.device = pool, limits, device_of(states.device)
        self.deterministic = deterministic
        self._places = {layer: place for place, layer in enumerate(layers)}
        size = limits.max_batch_size
        zeros = lambda extent, dtype: torch.zeros(extent, dtype=dtype, device=self.device)  # noqa: E731
        self._wide_indices = zeros(size, torch.int64)
        self._indices, self._prefix, self._plan = (zeros(size, torch.int32) for _ in range(3))
        self._has_initial, self._bounds = zeros(size, torch.bool), zeros(size + 1, torch.int32)
        conv = states.states.conv  # what is convolved of a token per request, of one layer after the other
        self._convolved = None if conv is None else conv.new_empty(size, conv.shape[2])
        self.report = new_report(self.device) if is_checked() else None
        self._drafts = ConvolvedDrafts(states, limits) if states.speculative_num_draft_tokens else None
        self._kept = CheckpointInputs(pool, limits) if pool.max_checkpoints else None
        temporal = states.states.temporal if self.has_rates else None
        self._rates = None if temporal is None else DecayRates(temporal.shape[0], temporal.shape[2], self.device)
        self._prepared: PreparedStep[ForwardMetadata] = PreparedStep()
        self._refused: str | None = None  # why the last step has no linear layers

    @property
    def layers(self) -> list[int]:
        """`layer_id` of the linear layers."""
        return list(self._places)

    @property
    def fault_report(self) -> Tensor | None:
        """The buffer of the checked mode; None outside it."""
        return self.report

    def raise_on_fault(self) -> None:
        """As of `AttentionBackend`."""
        if self.report is not None and (fault := first_fault(self.report)):
            self.report.zero_()
            raise RuntimeError(fault)

    def init_forward_metadata(self, batch: AttentionBatch) -> None:
        """Everything that an eager step needs before its layers."""
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        """Host work before a step.

        Raises:
            NotImplementedError: the step verifies more drafts than the pool has rings for.
        """
        self.limits.check(batch)
        self._refused = self._refusal(batch)
        if self._refused:
            return  # a draft model's layers attend, as a rule: the others say it
        if self._rates is not None:
            self._rates.begin()
        size, drafts = batch.batch_size, self._drafts_of(batch)
        metadata = ForwardMetadata(
            mamba_cache_indices=self._indices[:size],
            query_start_loc=None if batch.is_uniform else self._bounds[: size + 1],
            prefix_lens=self._prefix[:size],
            has_initial_state=self._has_initial[:size].view(torch.uint8),
            plan=self._plan[:size],
            drafts=drafts,
            tree_mask=batch.tree_mask if drafts else None,
            checkpoints=None if batch.is_uniform or self._kept is None else self._kept.of(size),
        )
        self._prepared.begin(batch, metadata)

    def _refusal(self, batch: AttentionBatch) -> str | None:
        """Why a state cannot take the step's tokens, which may be rejected; None: it can."""
        if batch.draft_steps:
            return (
                f"attnops: {self.name} does not serve a draft loop (draft_steps): its tokens would overwrite the "
                "states. Give the draft model layers that attend, as those of MTP and EAGLE are"
            )
        most = 0 if self._drafts is None else self._drafts.most
        if _extends_by_drafts(batch) and not 0 < batch.tokens_per_request <= most:
            return (
                f"attnops: {self.name} serves DRAFT_EXTEND of at most {most} tokens_per_request "
                f"(speculative_num_draft_tokens of MambaPool), got {batch.tokens_per_request}. Some of them may be "
                "rejected: give extend_seq_lens and the accepted tokens alone"
            )
        return None

    def _drafts_of(self, batch: AttentionBatch) -> int:
        """Tokens of each request that the states do not take yet, as some may be rejected."""
        if _extends_by_drafts(batch):
            return batch.tokens_per_request  # `_refusal` has judged it
        if not batch.forward_mode.is_target_verify():
            return 0
        most = 0 if self._drafts is None else self._drafts.most
        if not 0 < batch.tokens_per_request <= most:
            raise NotImplementedError(
                f"attnops: {self.name} verifies at most {most} tokens of a request (speculative_num_draft_tokens of "
                f"MambaPool, max_tokens_per_request of Limits), got {batch.tokens_per_request}"
            )
        return batch.tokens_per_request

    @in_one_thread
    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        """Device work before a step's layers."""
        if self._refused:
            return
        step, size = self._prepared.plan(batch), batch.batch_size
        if batch.num_tokens == 0:
            return
        wide = self._wide_indices[:size]
        mapping = self.pool.req_index_to_mamba_index_mapping
        ops.translate_slots(batch.req_pool_indices, mapping, out=wide, report=self.report)
        if batch.is_uniform and batch.out_cache_loc is not None:
            # A graph's padding has the row of some request, whose state is not its own. Its tokens are not stored.
            stored = batch.out_cache_loc.view(size, -1).amax(1) >= 0
            wide = torch.where(stored, wide, -1)
        elif batch.forward_mode.is_draft_extend() and batch.extend_seq_lens is not None:
            wide = torch.where(batch.extend_seq_lens > 0, wide, -1)  # padding has no token, and some request's row
        step.mamba_cache_indices.copy_(wide)
        if self._rates is not None:
            self._rates.compute()
        if step.drafts:
            return
        self.pool.mamba_pool.fold(step.mamba_cache_indices)
        if step.query_start_loc is None:
            return
        assert batch.extend_seq_lens is not None
        ops.build_cu_seqlens(batch.extend_seq_lens, cu_seqlens=step.query_start_loc)
        torch.sub(batch.cache_seqlens, batch.extend_seq_lens, out=step.prefix_lens)
        torch.gt(step.prefix_lens, 0, out=self._has_initial[:size])
        ops.delta_plan(step.query_start_loc, plan=step.plan)
        if step.checkpoints is not None and self._kept is not None:
            rows = (batch.req_pool_indices, step.mamba_cache_indices)
            self._kept.fill(step.checkpoints, *rows, step.prefix_lens, batch.extend_seq_lens)

    @in_one_thread
    def update_mamba_state_after_mtp_verify(self, accepted_path: Tensor, accepted_len: Tensor) -> None:
        """States of all layers after the accepted drafts of the step that has just run. Device work.

        It follows each step that verifies, and each DRAFT_EXTEND of `tokens_per_request` each.

        Args:
            accepted_path: int32 ``[B, tokens_per_request]``: the accepted tokens of each request, rising. Requests that
                pad a captured step may be left out.
            accepted_len: int32 ``[B]``: how many of them count. 0 rolls all of them back.

        Raises:
            ValueError: the last step verified nothing, or `accepted_path` has another shape.
        """
        step, pool = self._prepared.views, self.pool.mamba_pool
        if step is None or not step.drafts or self._drafts is None:
            raise ValueError(f"attnops: {self.name} has verified nothing: the last step was of another mode")
        size = accepted_path.shape[0]
        if accepted_path.shape[1:] != (step.drafts,) or size > len(step.mamba_cache_indices):
            raise ValueError(
                f"attnops: accepted_path must be [{len(step.mamba_cache_indices)}, {step.drafts}] or of fewer "
                f"requests, got {list(accepted_path.shape)}"
            )
        slots = step.mamba_cache_indices[:size]
        # As many columns as any step's: a ring must have room for those.
        path = torch.nn.functional.pad(accepted_path, (0, self._drafts.most - step.drafts))
        for place in range(pool.num_layers if pool.states.temporal is not None else 0):
            rings = pool.layer_rings(place)
            assert rings is not None and pool.states.temporal is not None
            options = {**rings._asdict(), "state_indices": slots, "report": self.report}
            ops.delta_commit(pool.states.temporal[place], path, accepted_len, **options)
        if pool.states.conv is not None:
            self._drafts.commit(pool.states.conv, slots, accepted_path, accepted_len, self.report)

    @in_one_thread
    def forward(
        self,
        layer: RadixLinearAttention,
        batch: AttentionBatch,
        mixed_qkv: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        z: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One layer of the step; arguments as of `RadixLinearAttention.forward`, and ``out``, where it goes."""
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], layer.out_width) if out is None else out
        if batch.forward_mode.is_idle() or batch.num_tokens == 0:
            return out.zero_()
        if self._refused:
            raise NotImplementedError(self._refused)
        step = self._prepared.of(batch)
        if mixed_qkv.shape[0] != batch.num_tokens:
            raise ValueError(
                f"attnops: mixed_qkv.shape[0] must be {batch.num_tokens} (num_tokens of the step), "
                f"got {mixed_qkv.shape[0]}"
            )
        if layer.layer_id not in self._places:
            raise ValueError(
                f"attnops: layer_id must be one of {sorted(self._places)}, the linear layers, got {layer.layer_id}"
            )
        place = self._places[layer.layer_id]
        states = self.pool.mamba_pool.layer(place)
        where = self._where(step, place, states)
        one_token = step.query_start_loc is None and not step.drafts and batch.num_tokens == batch.batch_size
        if one_token and states.conv is not None and layer.conv_weights is not None and where:
            options = {**where, "conv_states": states.conv, "out": out}
            options["mixed"] = self._rows_like(mixed_qkv) if mixed_qkv.is_cuda else None
            if self.decode_mixed(layer, mixed_qkv, a, b, z, options):
                return out
        mixed = self._convolve(layer, place, mixed_qkv, states, step)
        self.attend(layer, mixed, a, b, z, where, step, out)
        return out

    def decode_mixed(
        self,
        layer: RadixLinearAttention,
        mixed_qkv: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        z: Tensor | None,
        options: dict[str, Any],
    ) -> bool:
        """Convolution and recurrence of a token per request in one op, where the rule has one: whether.

        Args:
            options: What `where` of `attend` has, ``conv_states``, ``mixed`` and ``out``.
        """
        return False

    def _rows_like(self, x: Tensor) -> Tensor | None:
        """The backend's own rows for what is convolved of x; None: they do not fit, and the op says what is wrong."""
        rows = None if self._convolved is None else self._convolved[: len(x)]
        return rows if rows is not None and rows.shape == x.shape and rows.dtype == x.dtype else None

    def _convolve(
        self, layer: RadixLinearAttention, place: int, x: Tensor, states: MambaState, step: ForwardMetadata
    ) -> Tensor:
        if layer.conv_weights is None:
            return x
        if states.conv is None:
            raise ValueError(f"attnops: layer {layer.layer_id} has a convolution, its MambaPool has no conv_shape")
        weight, conv_states = layer.conv_weights, states.conv
        options: dict[str, Any] = {
            "conv_states": conv_states,
            "state_indices": step.mamba_cache_indices,
            "report": self.report,
        }
        options["silu"] = layer.activation == "silu"
        if step.drafts:
            assert self._drafts is not None
            windows = self._drafts.of(place, len(step.mamba_cache_indices), step.drafts)
            return ops.causal_conv1d_update(x, weight, layer.bias, windows=windows, tree_mask=step.tree_mask, **options)
        if step.query_start_loc is None:
            return ops.causal_conv1d_update(x, weight, layer.bias, out=self._rows_like(x), **options)
        options |= {"cu_seqlens": step.query_start_loc, "has_initial_state": step.has_initial_state}
        if step.checkpoints is not None:  # before the states are overwritten
            where = (step.query_start_loc, step.mamba_cache_indices, step.prefix_lens)
            step.checkpoints.keep_inputs(x, weight, conv_states, *where)
        return ops.causal_conv1d(x, weight, layer.bias, **options)

    def _where(self, step: ForwardMetadata, place: int, states: MambaState) -> dict[str, Any]:
        """What the forms of a recurrence are told of the states."""
        if states.temporal is None:
            return {}
        given: dict[str, Any] = {
            "states": states.temporal,
            "state_indices": step.mamba_cache_indices,
            "report": self.report,
        }
        if step.drafts:
            rings = self.pool.mamba_pool.layer_rings(place)
            assert rings is not None
            return given | rings._asdict() | {"tree_mask": step.tree_mask}
        if step.query_start_loc is None:
            return given
        given |= {"cu_seqlens": step.query_start_loc, "prefix_lens": step.prefix_lens, "plan": step.plan}
        given["cut_prompts"] = not self.deterministic
        return given if step.checkpoints is None else given | {"checkpoint_slots": step.checkpoints.cells}

    @abstractmethod
    def attend(
        self,
        layer: RadixLinearAttention,
        mixed: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        z: Tensor | None,
        where: dict[str, Any],
        step: ForwardMetadata,
        out: Tensor,
    ) -> None:
        """What follows the convolution: writes ``out``. `where`: what the op is told of the states."""

    def _rate(self, layer: RadixLinearAttention) -> Tensor:
        """float32 ``[num_v_heads]``: ``-exp(A_log)`` of a layer that has one, in a pool with temporal_shape."""
        assert self._rates is not None and layer.A_log is not None
        return self._rates.of(self._places[layer.layer_id], layer.A_log)

    def _op(self, family: str, step: ForwardMetadata, where: dict[str, Any]) -> Callable[..., Tensor]:
        """The op of a recurrence for the step."""
        if not where:
            raise ValueError(f"attnops: {self.name} needs a MambaPool with temporal_shape")
        form = "verify" if step.drafts else "decode" if step.query_start_loc is None else "prefill"
        op: Callable[..., Tensor] = getattr(ops, f"{family}_{form}")
        return op


def _extends_by_drafts(batch: AttentionBatch) -> bool:
    """A draft model's step of as many tokens of each request, of which some may be rejected."""
    return batch.forward_mode.is_draft_extend() and batch.is_uniform


class _DeltaRule(LinearAttnBackend):
    """The gated delta rule, whose gates differ."""

    gate_dims: ClassVar[int]

    def decode_mixed(self, layer, mixed_qkv, a, b, z, options) -> bool:  # type: ignore[no-untyped-def]
        if a is None or b is None or z is not None or a.dim() != self.gate_dims:
            return False  # `attend` says why
        given = {**options, **self._options(layer, options["out"]), "silu": layer.activation == "silu"}
        ops.delta_conv_decode(mixed_qkv, layer.conv_weights, layer.bias, a, b, num_k_heads=layer.num_k_heads, **given)
        return True

    def _options(self, layer: RadixLinearAttention, out: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "scale": layer.scaling}
        given |= {"lower_bound": layer.lower_bound, "qk_l2norm": layer.qk_l2norm}
        return given | {"out": out.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))}

    def attend(self, layer, mixed, a, b, z, where, step, out) -> None:  # type: ignore[no-untyped-def]
        if a is None or b is None or z is not None or a.dim() != self.gate_dims:
            gate = "[num_tokens, num_v_heads]" if self.gate_dims == 2 else "[num_tokens, num_v_heads, head_k_dim]"
            raise ValueError(f"attnops: {self.name} takes a of shape {gate}, b and no z")
        widths = [layer.num_k_heads * layer.head_k_dim] * 2 + [layer.out_width]
        q, k, v = _split(layer, mixed, widths)
        q, k = (x.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)) for x in (q, k))
        v = v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
        self._op("delta", step, where)(q, k, v, a, b, **self._options(layer, out), **where)


class GDNAttnBackend(_DeltaRule):
    """Gated delta networks: Qwen3-Next, Qwen3.5."""

    name, gate_dims = "gdn", 2


class KDAAttnBackend(_DeltaRule):
    """Kimi delta attention: a gate per key channel."""

    name, gate_dims = "kda", 3


class Mamba2AttnBackend(LinearAttnBackend):
    """Mamba2: Nemotron-H, Falcon-H1, Bamba. `mixed_qkv` is x, B and C; `a` is dt."""

    name, has_rates = "mamba2", True

    def decode_mixed(self, layer, mixed_qkv, a, b, z, options) -> bool:  # type: ignore[no-untyped-def]
        if a is None or b is not None or layer.A_log is None:
            return False  # `attend` says why
        given = {**options, **self._options(layer, z, options["out"]), "silu": layer.activation == "silu"}
        rate, groups = self._rate(layer), layer.num_k_heads
        ops.ssd_conv_decode(mixed_qkv, layer.conv_weights, layer.bias, a, rate, num_groups=groups, **given)
        return True

    def _options(self, layer: RadixLinearAttention, z: Tensor | None, out: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"D": layer.D, "dt_bias": layer.dt_bias, "z": z, "dt_softplus": True}
        given |= {"scale": layer.scaling or 1.0}
        return given | {"out": out.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))}

    def attend(self, layer, mixed, a, b, z, where, step, out) -> None:  # type: ignore[no-untyped-def]
        if a is None or b is not None or layer.A_log is None:
            raise ValueError("attnops: mamba2 takes dt as a, a layer with A_log, and no b")
        groups, heads = (layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim)
        x, B, C = _split(layer, mixed, [layer.out_width, groups[0] * groups[1], groups[0] * groups[1]])
        rows = (x.unflatten(-1, heads), a, self._rate(layer), B.unflatten(-1, groups), C.unflatten(-1, groups))
        self._op("ssd", step, where)(*rows, **self._options(layer, z, out), **where)


class LightningAttentionBackend(LinearAttnBackend):
    """Lightning attention: MiniMax-01, Ling. The decay of a head is constant."""

    name, has_rates = "lightning", True

    def attend(self, layer, mixed, a, b, z, where, step, out) -> None:  # type: ignore[no-untyped-def]
        if a is not None or b is not None or z is not None or layer.A_log is None:
            raise ValueError("attnops: lightning takes a layer with A_log, and neither a, b nor z")
        keys = layer.num_k_heads * layer.head_k_dim
        q, k, v = _split(layer, mixed, [keys, keys, layer.out_width])
        q, k = (x.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)) for x in (q, k))
        heads = (layer.num_v_heads, layer.head_v_dim)
        op = self._op("ssd", step, where)
        options: dict[str, Any] = {"scale": layer.scaling or 1.0, "out": out.unflatten(-1, heads)}
        op(v.unflatten(-1, heads), None, self._rate(layer), k, q, **options, **where)


class ShortConvAttnBackend(LinearAttnBackend):
    """Short convolutions alone: LFM2."""

    name = "short_conv"

    def attend(self, layer, mixed, a, b, z, where, step, out) -> None:  # type: ignore[no-untyped-def]
        if layer.conv_weights is None or any(x is not None for x in (a, b, z)):
            raise ValueError("attnops: short_conv takes a layer with conv_weights, and neither a, b nor z")
        _split(layer, mixed, [layer.out_width])
        out.copy_(mixed)


def _split(layer: RadixLinearAttention, mixed: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    if mixed.shape[-1] != sum(widths):
        raise ValueError(
            f"attnops: mixed_qkv.shape[1] must be {sum(widths)} ({' + '.join(map(str, widths))}) for layer "
            f"{layer.layer_id}, got {mixed.shape[-1]}"
        )
    return mixed.split(widths, dim=-1)
