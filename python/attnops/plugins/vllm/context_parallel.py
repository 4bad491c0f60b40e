"""Decode context parallelism of the backend ATTNOPS: the ranks of a group share each sequence's keys.

vLLM stores a token on the rank that holds it; its slots and block tables are already a rank's own. Queries of all heads
are gathered. Decodes see what their rank holds, the new tokens with it. Requests with prompts see what was stored
before, and then their own new tokens, which every rank has whole. `attnops.distributed.combine` joins the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from attnops import distributed, ops


class OwnLengths:
    """How many keys a rank holds, at addresses that never change: captured steps read them there.

    Args:
        world_size, rank: In the group.
        most_rows: Decode tokens of the largest batch.
    """

    def __init__(self, config: VllmConfig, world_size: int, rank: int, most_rows: int, device: torch.device) -> None:
        self._place = (rank, world_size, config.parallel_config.cp_kv_cache_interleave_size)
        self._rows = torch.zeros(most_rows, dtype=torch.int32, device=device)

    def of_decodes(self, seq_lens: Tensor, tokens: int) -> Tensor:
        """``[B * tokens]``: what each of a request's last `tokens` tokens sees."""
        rows = self._rows[: seq_lens.shape[0] * tokens]
        return ops.context_parallel_seqlens(seq_lens, *self._place, tokens_per_request=tokens, local_seqlens=rows)

    def of_contexts(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        """``[B]``: what was stored before the step."""
        return ops.context_parallel_seqlens(seq_lens - cu_seqlens_q.diff(), *self._place)


def _group() -> Any:
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group()


def decode(
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    block_table: Tensor,
    own_lens: Tensor,
    plan: Any,
    out: Tensor,
    sinks: Tensor | None,
    **options: Any,
) -> None:
    """Uniform requests: every token is one of its own, with `own_lens` keys."""
    group = _group()
    tokens = query.shape[0] // max(block_table.shape[0], 1)
    if tokens > 1:
        block_table = block_table.repeat_interleave(tokens, 0, output_size=query.shape[0])
    q = group.all_gather(query.contiguous(), dim=1)
    every, lse = ops.xqa_decode(q, *pages, block_table, own_lens, plan, causal=False, return_lse=True, **options)
    assert lse is not None
    out.copy_(distributed.combine(every, lse, group.device_group, sinks=sinks)[0])


def prompts(
    new: tuple[Tensor, Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    plans: tuple[Any, Any],
    out: Tensor,
    sinks: Tensor | None,
    **options: Any,
) -> None:
    """Ragged requests: what was stored before, and the new tokens.

    Args:
        new: The step's query, key and value of these requests.
        plans: Of both parts.
    """
    group, (query, key, value) = _group(), new
    q = group.all_gather(query.contiguous(), dim=1)
    every, every_lse = ops.fmha_paged(
        q, *pages, block_table, context_lens, cu_seqlens_q, plans[0], causal=False, return_lse=True, **options
    )
    assert every_lse is not None
    stored, stored_lse = distributed.combine(every, every_lse, group.device_group)
    unscaled = {name: option for name, option in options.items() if name not in ("k_scale", "v_scale")}
    fresh, fresh_lse = ops.fmha_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_q, plans[1], causal=True, return_lse=True, **unscaled
    )
    assert fresh_lse is not None
    merged, lse = ops.merge_state(stored, stored_lse, fresh, fresh_lse)
    if sinks is not None:
        merged = merged * torch.sigmoid(lse - sinks).unsqueeze(-1).to(merged.dtype)
    out.copy_(merged)
