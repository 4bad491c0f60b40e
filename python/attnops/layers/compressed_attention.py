"""The attention layer of DeepSeek-V4: a window of rows, and entries that pool 4 or 128 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnops.layers.forward_context import get_forward_context
from attnops.layers.radix_attention import RadixAttention
from attnops.types import COMPRESS_RATIOS, MLA_KV_LORA_RANK, AttentionBatch


class Compressor(torch.nn.Module):
    """Weights with which tokens are pooled; as of `ops.compress_kv`.

    Args:
        ape: float32 ``[ratio, width]``.
        norm_weight: float32 ``[D]``.
        cos_sin: float32 ``[max_positions, 64]``.
        eps, interleaved: As of the op.
        hadamard, ue8m0: Of index keys and queries.
    """

    ape: Tensor
    norm_weight: Tensor
    cos_sin: Tensor

    def __init__(
        self,
        ape: Tensor,
        norm_weight: Tensor,
        cos_sin: Tensor,
        eps: float = 1e-6,
        interleaved: bool = True,
        hadamard: bool = True,
        ue8m0: bool = True,
    ) -> None:
        super().__init__()
        for name, tensor in (("ape", ape), ("norm_weight", norm_weight), ("cos_sin", cos_sin)):
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)
        self.eps, self.interleaved, self.hadamard, self.ue8m0 = eps, interleaved, hadamard, ue8m0


class CompressedAttention(RadixAttention):
    """A layer of DeepSeek-V4, through backend `dsv4`.

    Rows and entries are key and value at once, of 512 values, the last 64 of which are rotated. So are those of the
    output: the model rotates them back by the query's position.

    Args:
        num_heads: Query heads on this rank.
        scaling: Multiplies q k^T before the softmax.
        layer_id: As of `RadixAttention`.
        compress_ratio: 0: the window alone. 4: also the `sparse_topk` entries that the indexer selects. 128: also all
            entries.
        sliding_window_size: As of `RadixAttention`: 127 is a window of 128 tokens.
        sinks: float32 ``[num_heads]``, a logit per head with no value.
        compressor: Of entries; belongs to ratios 4 and 128.
        index_compressor: Of index keys; belongs to ratio 4.

    Raises:
        ValueError: naming the argument that does not fit.
    """

    def __init__(
        self,
        num_heads: int,
        scaling: float,
        layer_id: int,
        compress_ratio: int,
        *,
        sliding_window_size: int = 127,
        sinks: Tensor | None = None,
        compressor: Compressor | None = None,
        index_compressor: Compressor | None = None,
    ) -> None:
        dims: dict[str, Any] = {"v_head_dim": MLA_KV_LORA_RANK, "sliding_window_size": sliding_window_size}
        super().__init__(num_heads, MLA_KV_LORA_RANK, scaling, 1, layer_id, sinks=sinks, **dims)
        if compress_ratio not in COMPRESS_RATIOS:
            raise ValueError(f"attnops: compress_ratio must be 0, 4 or 128, got {compress_ratio}")
        for name, given, belongs in (
            ("compressor", compressor, compress_ratio > 0),
            ("index_compressor", index_compressor, compress_ratio == 4),
        ):
            if (given is not None) != belongs:
                verb = "needs" if belongs else "takes no"
                raise ValueError(f"attnops: a layer of compress_ratio {compress_ratio} {verb} {name}")
        self.compress_ratio = compress_ratio
        self.compressor, self.index_compressor = compressor, index_compressor

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor | None,
        v: None = None,
        forward_batch: AttentionBatch | None = None,
        save_kv_cache: bool = True,
        *,
        kv_score: Tensor | None = None,
        index_kv_score: Tensor | None = None,
        index_q: Tensor | None = None,
        index_weights: Tensor | None = None,
    ) -> Tensor:
        """Store the step's rows, pool its tokens, and attend to the window and the entries.

        Args:
            q: ``[num_tokens, num_heads * 512]`` or ``[num_tokens, num_heads, 512]``, rotated.
            k: ``[num_tokens, 512]`` or ``[num_tokens, 1, 512]``, normalized and rotated. None: nothing to store.
            forward_batch: The step; may be omitted inside `forward_context`.
            save_kv_cache: False: rows, entries and states are there already.
            kv_score: ``[num_tokens, 2 * width]`` in the pool's `state_dtype`, of ratios 4 and 128: as of
                `ops.compress_kv`, which needs 2048 columns of ratio 4, and 1024 of ratio 128.
            index_kv_score: Of ratio 4, the same for index keys.
            index_q: ``[num_tokens, index heads, index_head_dim]``, of ratio 4: rotated, not yet quantized.
            index_weights: ``[num_tokens, index heads]``: weights of the heads, without any scale.

        Returns:
            ``[num_tokens, num_heads * 512]`` in q's dtype.

        Raises:
            NotImplementedError: inside `torch.compile`, or of a backend other than `dsv4`.
            ValueError: naming the argument that is missing, or does not fit.
        """
        if is_compiling():
            raise NotImplementedError("attnops: CompressedAttention runs outside torch.compile: split the graph there")
        if forward_batch is None:
            context = get_forward_context()
            batch, backend = context.batch, context.backend
        else:
            batch, backend = forward_batch, forward_batch.attn_backend
        if not getattr(backend, "takes_compressed", False):
            name = getattr(backend, "name", type(backend).__name__)
            raise NotImplementedError(f"attnops: a CompressedAttention layer needs backend dsv4, the step has {name}")
        assert backend is not None
        given: dict[str, Any] = {"kv_score": kv_score, "index_kv_score": index_kv_score}
        given |= {"index_q": index_q, "index_weights": index_weights}
        return backend.forward(q, k, None, self, batch, save_kv_cache, **given)
