"""Of MLA: how a model makes keys and values of its latents, for prefill whose queries are not absorbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class UpProjection:
    """What a layer with absorbed queries can also be: attention over keys and values of its own.

    Args:
        project: From latents ``[n, 512]`` to ``(k_nope [n, num_heads, head_dim - 64], v [n, num_heads, v_head_dim])``,
            in the latents' dtype. Rows do not depend on each other, and rows of NaN are legal: nobody sees theirs.
        head_dim: Of q and k, the rotary 64 included (DeepSeek: 192).
        v_head_dim: Of v and the output (DeepSeek: 128).
    """

    project: Callable[[Tensor], tuple[Tensor, Tensor]]
    head_dim: int = 192
    v_head_dim: int = 128
