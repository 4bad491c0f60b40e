"""A model whose attention is `attnops.RadixAttention` over a paged cache."""

from __future__ import annotations

import torch
from attnops.backends import Selection, detect_machine, select, select_backend
from attnops.graphs import MemoryReport
from attnops.pools import KVCache, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from attnops.types import AttentionBatch, AttentionSpec, Limits
from models import GqaModel, MlaModel
from torch import Tensor

from .graphs import make_graphs
from .model import PagedModel
from .scheduler import Step


class ModelRunner:
    """Computes steps: what a scheduler planned goes in, logits come out.

    Args:
        model: One of the example models, on the device and in the dtype that it is to run in.
        pool_tokens: Token slots of the cache.
        max_requests, chunk: Most requests and tokens per step.
        backend: Name of an attention backend; "auto": the best that this machine has.
        graphs, compiler: As of `make_graphs`.
        drafts: Tokens of a request in a verify step. lookahead: Cells behind a request's text that drafts need.
    """

    def __init__(
        self,
        model: GqaModel | MlaModel,
        *,
        page_size: int,
        pool_tokens: int,
        max_requests: int,
        chunk: int,
        backend: str = "auto",
        graphs: str = "off",
        compiler: str = "eager",
        drafts: int = 1,
        lookahead: int = 0,
    ) -> None:
        self.model = model
        weight = model.embedding.weight
        self.device = weight.device
        self.spec = attention_spec(model, page_size, weight.dtype)
        context = model.config.max_context
        self.chunk = chunk
        limits = Limits(
            max_batch_size=max_requests,
            max_seqlen=context + lookahead,
            max_num_tokens=max(chunk, max_requests * drafts),
            max_tokens_per_request=drafts,
        )
        wanted = None if backend == "auto" else backend
        self.selection: Selection = select(self.spec, detect_machine(self.device), attention_backend=wanted)
        self.backend = select_backend(self.spec, limits, self.device, attention_backend=wanted)
        self.rows = ReqToTokenPool(max_requests, context + lookahead, self.device)
        self.pool = make_pool(model, pool_tokens, page_size, weight.dtype, self.device)
        self.paged_model = PagedModel(model, self.spec)
        self.graphs = make_graphs(
            graphs, self.paged_model, self.backend, self.rows, self.pool, chunk=chunk, compiler=compiler
        )

    def capture(self, progress: bool = True) -> MemoryReport | None:
        """Once, before the first step: what the graphs take; None: there are none."""
        return None if self.graphs is None else self.graphs.capture(progress)

    @torch.no_grad()
    def run(self, step: Step) -> Tensor:
        """Logits after the last token of each share: float32 ``[len(step.shares), vocab_size]``, host."""
        ids, batch = self.batch_of(step)
        if self.graphs is not None and self.graphs.can_replay(batch):
            logits = self.graphs.replay(ids, batch)
        else:
            self.backend.init_forward_metadata(batch)
            logits = self.paged_model(ids, batch.positions, batch)
        lengths = torch.tensor([share.num_tokens for share in step.shares])
        return logits[self._put(lengths.cumsum(0) - 1)].cpu()

    def batch_of(self, step: Step) -> tuple[Tensor, AttentionBatch]:
        """A step's token ids, and what the backend gets."""
        shares = step.shares
        token_ids = [token for share in shares for token in share.request.tokens[share.begin : share.end]]
        positions = torch.cat([torch.arange(share.begin, share.end) for share in shares])
        lengths = torch.tensor([share.num_tokens for share in shares], dtype=torch.int32)
        batch = AttentionBatch(
            forward_mode=step.forward_mode,
            req_pool_indices=self._put(torch.tensor([share.request.row for share in shares])),
            cache_seqlens=self._put(torch.tensor([share.end for share in shares], dtype=torch.int32)),
            num_tokens=step.num_tokens,
            req_to_token=self.rows.req_to_token,
            out_cache_loc=self._put(torch.cat([share.slots for share in shares])),
            extend_seq_lens=self._put(lengths),
            max_seqlen_q=max(share.num_tokens for share in shares),
            max_cache_seqlen=max(share.end for share in shares),
            positions=self._put(positions),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )
        return self._put(torch.tensor(token_ids)), batch

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def attention_spec(model: GqaModel | MlaModel, page_size: int, dtype: torch.dtype) -> AttentionSpec:
    """What the choice of a backend depends on."""
    config = model.config
    if isinstance(model, MlaModel):
        return AttentionSpec.mla(config.num_heads, dtype=dtype, page_size=page_size)
    return AttentionSpec(
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        page_size=page_size,
    )


def make_pool(
    model: GqaModel | MlaModel, tokens: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The model's paged cache."""
    config = model.config
    if isinstance(model, MlaModel):
        return MLATokenToKVPool(tokens, page_size, dtype, config.num_layers, device)
    return MHATokenToKVPool(tokens, page_size, dtype, config.num_kv_heads, config.head_dim, config.num_layers, device)
