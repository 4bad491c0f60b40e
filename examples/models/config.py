"""The shapes of the two example models."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What both kinds share. Tokens are bytes; byte 0 ends a text."""

    vocab_size: int = 256
    max_context: int = 2048
    d_model: int = 256
    num_layers: int = 5
    ffn_dim: int = 576
    num_heads: int = 8  # query heads
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class GqaConfig(ModelConfig):
    """Grouped-query attention: `num_heads` query heads share `num_kv_heads` K/V heads."""

    num_kv_heads: int = 2
    head_dim: int = 64

    kind: ClassVar[str] = "gqa"

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class MlaConfig(ModelConfig):
    """Multi-head latent attention: per token one latent of `kv_lora_rank` and one rotated key of `qk_rope_head_dim`
    (DeepSeek-V2, without the low-rank query). 512 and 64 are the sizes of the 576/512 decode kernels."""

    num_layers: int = 4
    ffn_dim: int = 384
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32

    kind: ClassVar[str] = "mla"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        # Of the expanded heads; the absorbed form computes the same scores and keeps the same scale.
        return self.qk_head_dim**-0.5


_KINDS: dict[str, type[ModelConfig]] = {"gqa": GqaConfig, "mla": MlaConfig}


def config_of_kind(kind: str) -> ModelConfig:
    """The default configuration of "gqa" or "mla"."""
    if kind not in _KINDS:
        raise ValueError(f"no model kind {kind!r}, there are {', '.join(_KINDS)}")
    return _KINDS[kind]()


def config_to_json(config: ModelConfig) -> str:
    return json.dumps({"kind": config.kind, **dataclasses.asdict(config)})


def config_from_json(text: str) -> ModelConfig:
    fields = json.loads(text)
    return _KINDS[fields.pop("kind")](**fields)
