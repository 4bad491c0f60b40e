"""The attention layer of a model. It knows no kernel: the step's backend answers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnops.layers.forward_context import ForwardContext, get_forward_context, kv_order
from attnops.layers.up_projection import UpProjection
from attnops.types import AttentionBatch, AttentionType, LayerServer, check_range, v_head_dim_of


class RadixAttention(torch.nn.Module):
    """Attention over the paged cache, through whichever backend the batch carries.

    Args:
        num_heads: Query heads on this rank.
        head_dim: Of q and k (MLA, absorbed: 576).
        scaling: Multiplies q k^T before the softmax.
        num_kv_heads: On this rank.
        layer_id: The layer's place in the cache; unique among the layers of a model that share a cache.
        logit_cap: ``cap * tanh(s / cap)`` on scaled scores; 0.0: off.
        v_head_dim: Of v and the output; -1: as `head_dim` (MLA, absorbed: 512).
        sliding_window_size: A query sees this many keys before itself, and itself; -1 or None: all.
        is_cross_attention: Queries see all tokens of their request's encoder, and k and v are the encoder's
            (`EncoderDecoderBackend`).
        sinks: float32 ``[num_heads]``, a logit per head with no value.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, of an FP8 cache: value = stored x scale.
        attn_type: Causal through the cache, bidirectional through the cache, or an encoder without a cache.
        attention_chunk_size: As of `AttentionSpec`; 0: off.
        up_projection: MLA: lets a step's q come unabsorbed, as `takes_absorbed` says; the output is then that of v.

    Attributes:
        version: Grows with every change of an attribute: what a backend derived from an older version is out of date.

    Raises:
        TypeError, ValueError: naming the number that is out of its range, or cross attention with a window.
    """

    version = 0
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        *,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        up_projection: UpProjection | None = None,
        attention_chunk_size: int = 0,
    ) -> None:
        super().__init__()
        if is_cross_attention:
            if sliding_window_size is not None and sliding_window_size >= 0:
                raise ValueError("attnops: a layer with is_cross_attention has no window")
            attn_type = AttentionType.DECODER_BIDIRECTIONAL
        owner = type(self).__name__
        numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in numbers.items():
            check_range(owner, name, value, 1)
        check_range(owner, "layer_id", layer_id, 0)
        check_range(owner, "attention_chunk_size", attention_chunk_size, 0)
        if sliding_window_size is not None:
            check_range(owner, "sliding_window_size", sliding_window_size, -1)
        if num_heads % num_kv_heads:
            raise ValueError(f"{owner}: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        if not 0 <= float(logit_cap) < math.inf:
            raise ValueError(f"{owner}: logit_cap must be 0 (off) or positive, got {logit_cap}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim_of(owner, head_dim, v_head_dim)
        self.scaling = float(scaling)
        self.layer_id = layer_id
        self.logit_cap = float(logit_cap)
        self.sliding_window_size = -1 if sliding_window_size is None else sliding_window_size
        self.attn_type = attn_type
        self._is_cross_attention = bool(is_cross_attention)
        self.up_projection = up_projection
        self.attention_chunk_size = attention_chunk_size
        self._scale_floats: dict[str, tuple[int, float]] = {}
        for name, tensor in (("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)  # the model's own, loaded with its weights
            else:
                self.register_buffer(name, tensor, persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["version"] = self.version + 1

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        self.__dict__["version"] = self.version + 1

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.__dict__["version"] = self.version + 1

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        """Whether a step's q should come absorbed: short extends and decode; long ones are faster unabsorbed."""
        if self.up_projection is None:
            return True
        if batch.attn_backend is None:
            raise ValueError(_NO_BACKEND)
        return batch.attn_backend.takes_absorbed(batch)

    def out_width(self, q: Tensor) -> int:
        """Columns of the output that belongs to `q`."""
        return self.num_heads * (self.v_head_dim if self.is_absorbed(q) else self.up_projection.v_head_dim)  # type: ignore[union-attr]

    def is_absorbed(self, q: Tensor) -> bool:
        """False: `q` has the heads of `up_projection`, by its shape."""
        up = self.up_projection
        return up is None or q.shape[1:].numel() != self.num_heads * up.head_dim

    # Names of SGLang.

    @property
    def tp_q_head_num(self) -> int:
        return self.num_heads

    @property
    def tp_k_head_num(self) -> int:
        return self.num_kv_heads

    @property
    def tp_v_head_num(self) -> int:
        return self.num_kv_heads

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def is_cross_attention(self) -> bool:
        """The layer looks at the tokens of its request's encoder, not at its own."""
        return self._is_cross_attention

    @property
    def k_scale_float(self) -> float | None:
        """`k_scale` on the host; None where there is none: read once per `version`, which waits for the device.

        Raises:
            ValueError: there is a scale per KV head.
        """
        return self._scale_float("k_scale")

    @property
    def v_scale_float(self) -> float | None:
        """As `k_scale_float`, of `v_scale`."""
        return self._scale_float("v_scale")

    def _scale_float(self, name: str) -> float | None:
        scale = getattr(self, name)
        if scale is None:
            return None
        version, value = self._scale_floats.get(name, (-1, 0.0))
        if version != self.version:
            if scale.numel() != 1:
                raise ValueError(
                    f"attnops: {name} of layer {self.layer_id} has {scale.numel()} values, one per KV head"
                )
            value = float(scale)
            self._scale_floats[name] = (self.version, value)
        return value

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        forward_batch: AttentionBatch | None = None,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """Attend from the step's new tokens to all tokens of their requests, themselves included, or to listed rows.

        Args:
            q: ``[num_tokens, num_heads * head_dim]`` or ``[num_tokens, num_heads, head_dim]``. MLA: may be the latent
                512 dimensions alone, with the rotary 64 in `q_rope`; or, unabsorbed, ``up_projection.head_dim`` of
                which the rotary 64 are the last.
            k: ``[num_tokens, num_kv_heads * head_dim]`` or with heads apart. MLA: the new cache rows, or their latent
                part with the rotary part in `k_rope`. None: nothing new to store.
            v: As k, with `v_head_dim`. Not used by MLA.
            forward_batch: The step. May be omitted inside `forward_context`, and is not read by a compiled model.
            save_kv_cache: Store k and v at `out_cache_loc` first. False: they are there already.
            topk_indices: MLA: int32 ``[num_tokens, sparse_topk]``, slots of the rows that a token attends to, then
                negative ones. At most as many as there are tokens up to it, itself included. None: to all of these.

        Returns:
            ``[num_tokens, num_heads * v_head_dim]`` in q's dtype; unabsorbed, of the v_head_dim of `up_projection`.
        """
        if is_compiling():
            out = q.new_empty(q.shape[0], self.out_width(q))
            torch.ops.attnops.unified_attention_with_output(
                q, k, v, out, kv_order(q.device), self.layer_id, save_kv_cache, q_rope, k_rope, topk_indices
            )
            return out
        if forward_batch is None:
            # Without a compiler nobody needs to see one op here, and its dispatch would cost more than the rest.
            out = q.new_empty(q.shape[0], self.out_width(q))
            _attend(get_forward_context(), self, q, k, v, out, save_kv_cache, q_rope, k_rope, topk_indices)
            return out
        backend = forward_batch.attn_backend
        if backend is None:
            raise ValueError(_NO_BACKEND)
        if self._is_cross_attention:
            _check_serves_encoders(backend)
        if topk_indices is None:  # calls without a dictionary or names take less time, and there is one in every layer
            if q_rope is None and k_rope is None:
                return backend.forward(q, k, v, self, forward_batch, save_kv_cache)
            return backend.forward(q, k, v, self, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope)
        lists = lists_for(backend, topk_indices)
        return backend.forward(q, k, v, self, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, **lists)

    def extra_repr(self) -> str:
        return (
            f"layer_id={self.layer_id}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, v_head_dim={self.v_head_dim}, sliding_window_size={self.sliding_window_size}"
        )


def lists_for(backend: LayerServer, topk_indices: Tensor) -> dict[str, Tensor]:
    """The option of `forward` for a layer's lists of rows.

    Raises:
        ValueError: the backend takes none.
    """
    if not getattr(backend, "takes_lists", False):
        name = getattr(backend, "name", type(backend).__name__)
        raise ValueError(f"attnops: backend {name} attends to every key and takes no topk_indices; nsa takes them")
    return {"topk_indices": topk_indices}


_NO_BACKEND = "attnops: the batch has no attn_backend; set it, or give forward_context a backend"

_library = torch.library.Library("attnops", "FRAGMENT")
_library.define(
    "unified_attention_with_output(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor(b!) kv_order, "
    "int layer_id, bool save_kv_cache=True, Tensor? q_rope=None, Tensor? k_rope=None, Tensor? topk_indices=None) -> ()",
    # Which step runs is known to the host alone. Inductor, where it makes CUDA graphs by itself (mode
    # "reduce-overhead"), splits its graphs at ops with this tag.
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)


def _check_serves_encoders(backend: LayerServer) -> None:
    if not getattr(backend, "max_encoder_tokens", 0):
        raise NotImplementedError(
            "attnops: a layer with is_cross_attention needs an EncoderDecoderBackend, the step has "
            f"{getattr(backend, 'name', type(backend).__name__)}"
        )


def _first(tensor: Tensor | None, num_tokens: int) -> Tensor | None:
    return None if tensor is None else tensor[:num_tokens]


def _unified_attention_with_output(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    kv_order: Tensor,
    layer_id: int,
    save_kv_cache: bool = True,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> None:
    """The attention of layer `layer_id` in the running step: the point where a piecewise compiler splits.

    `query` may have more rows than the step has tokens (a bucket's padding): they are not read and give zeros.
    """
    context = get_forward_context()
    layer = context.layers.get(layer_id)
    if not isinstance(layer, RadixAttention):
        raise ValueError(
            f"attnops: the running step has no layer {layer_id}; give forward_context collect_layers(model)"
        )
    _attend(context, layer, query, key, value, output, save_kv_cache, q_rope, k_rope, topk_indices)


def _attend(
    context: ForwardContext,
    layer: RadixAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    save_kv_cache: bool,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    topk_indices: Tensor | None,
) -> None:
    """A layer of the running step, into `output`."""
    batch, backend, num_tokens = context.batch, context.backend, context.batch.num_tokens
    if backend is None:
        raise ValueError(_NO_BACKEND)
    if layer.is_cross_attention:
        _check_serves_encoders(backend)
    if query.shape[0] > num_tokens:
        output[num_tokens:].zero_()
        query, output = query[:num_tokens], output[:num_tokens]
        if not layer.is_cross_attention:  # whose keys are the encoder's
            key, value = _first(key, num_tokens), _first(value, num_tokens)
        q_rope, k_rope = _first(q_rope, num_tokens), _first(k_rope, num_tokens)
        topk_indices = _first(topk_indices, num_tokens)
    if topk_indices is None and q_rope is None and k_rope is None:
        backend.forward(query, key, value, layer, batch, save_kv_cache, out=output)
        return
    if topk_indices is None:
        backend.forward(query, key, value, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=output)
        return
    lists = lists_for(backend, topk_indices)
    backend.forward(query, key, value, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=output, **lists)


for _key in ("CPU", "CUDA"):
    _library.impl("unified_attention_with_output", _unified_attention_with_output, _key)


@torch.library.register_fake("attnops::unified_attention_with_output")
def _(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    kv_order: Tensor,
    layer_id: int,
    save_kv_cache: bool = True,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> None:
    return None
