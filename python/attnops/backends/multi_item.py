"""Multi-item scoring: a prompt's items see its prefix and themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.types import AttentionBatch


def hidden_keys_of(batch: AttentionBatch, cu_seqlens_q: Tensor) -> Tensor:
    """int32 ``[T, 2]``: the keys between the prefix and its own item that each query of the step does not see.

    A delimiter does not see itself, and is no key of its item. Device work; nothing is read on the host.

    Args:
        batch: With `multi_item`.
        cu_seqlens_q: int32 ``[B + 1]``, where each request's queries begin.
    """
    params = batch.multi_item
    assert params is not None and batch.extend_seq_lens is not None, (
        "AttentionBatch has checked them"
    )
    lengths, begins = batch.cache_seqlens.long(), cu_seqlens_q.long()
    token = torch.arange(batch.num_tokens, device=batch.device)
    request = (torch.searchsorted(begins, token, right=True) - 1).clamp(max=batch.batch_size - 1)
    position = (lengths - batch.extend_seq_lens.long() - begins[:-1])[request] + token
    prefix = params.prefix_len_ptr.long().clamp(min=0).minimum(lengths)[request]
    behind = position - prefix
    own = position + 1 - params.places(request, behind.clamp(min=0))
    return torch.stack([prefix, torch.where(behind >= 0, own, prefix)], 1).int()
