"""The draft head: one layer that guesses the target's next hidden state from this one and the token that follows it.

It shares the target's embedding and output projection. What it predicts goes back in as the next hidden state, so a
few cheap steps make a draft of a few tokens (EAGLE: Li et al., 2024).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .config import GqaConfig
from .gqa import GqaAttend, GqaAttention, GqaModel
from .layers import Block, RMSNorm


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The layer's shape; everything else is the target's."""

    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 160

    def layer(self, target: GqaConfig) -> GqaConfig:
        """As the config of a model of one layer."""
        return dataclasses.replace(target, num_layers=1, **dataclasses.asdict(self))


class DraftHead(nn.Module):
    """Called with tokens, the target's (or its own) hidden states before them, positions and `GqaAttend`.

    Row t holds token t + 1 and hidden state t; the result stands for hidden state t + 1.
    """

    def __init__(self, target: GqaModel, config: DraftConfig | None = None) -> None:
        super().__init__()
        self.draft_config = config or DraftConfig()
        self.config = self.draft_config.layer(target.config)
        self.shared: dict[str, Any] = {"embedding": target.embedding, "output": target.output}  # not parameters here
        d_model = self.config.d_model
        self.token_norm = RMSNorm(d_model, self.config.norm_eps)
        self.fuse = nn.Linear(2 * d_model, d_model, bias=False)
        self.block = Block(self.config, GqaAttention(self.config, 0), 0.0)
        self.final_norm = RMSNorm(d_model, self.config.norm_eps)

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: GqaAttend) -> Tensor:
        """Hidden states ``[n, d_model]``. token_ids, positions: int64 ``[n]``; hidden: ``[n, d_model]``."""
        tokens = self.token_norm(self.shared["embedding"](token_ids))
        x = self.fuse(torch.cat([tokens, hidden], -1))
        return self.final_norm(hidden + self.block(x, positions, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the next token, float32 ``[n, vocab_size]``."""
        return self.shared["output"](hidden).float()


def save_draft(head: DraftHead, path: Path | str) -> None:
    """Weights in bfloat16, the shape in the metadata."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, str(path), metadata={"draft": json.dumps(dataclasses.asdict(head.draft_config))})


def load_draft(path: Path | str, target: GqaModel) -> DraftHead:
    """The head in `path`, in the target's dtype and on its device."""
    with safe_open(str(path), framework="pt") as file:
        head = DraftHead(target, DraftConfig(**json.loads(file.metadata()["draft"])))
        head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    weight = target.embedding.weight
    return head.to(weight.device, weight.dtype).eval()
