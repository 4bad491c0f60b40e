"""The split-KV plan of `ops.sparse_mla_decode`: a work is a query token and a block of 64 heads."""

from __future__ import annotations

import dataclasses

import torch

from attnops.metadata.plan import (
    MLA_HEAD_DIM_V,
    MLA_MAX_HEADS,
    MLA_ROWS_PER_WORK,
    TILE_TOKENS,
    SplitKvPlan,
    allocate_tensors,
    num_partials_of,
)
from attnops.metadata.plan_checks import check_shared
from attnops.metadata.plan_parts import mla_num_sm_parts
from attnops.types import check_range

MAX_TOPK = 1 << 24  # csrc/sparse_mla/checks.h


@dataclasses.dataclass(frozen=True)
class SparseMlaPlan(SplitKvPlan):
    """Plan of `ops.sparse_mla_decode` for one geometry."""

    topk: int
    extra_topk: int

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        return {
            "batch_size": self.batch_size,
            "seqlen_q": self.seqlen_q,
            "num_q_heads": self.num_q_heads,
            "topk": self.topk,
            "extra_topk": self.extra_topk,
        }

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        *,
        num_q_heads: int,
        topk: int,
        extra_topk: int = 0,
        seqlen_q: int = 1,
        fixed_split_tokens: int = 0,
        num_sm_parts: int | None = None,
        device: torch.device | str = "cpu",
    ) -> SparseMlaPlan:
        """Allocate a plan and its scratch.

        Args:
            batch_size, seqlen_q, num_q_heads: Requests, query tokens of each, and heads.
            topk, extra_topk: Columns of `indices` and of `extra_indices`; 0: no such list.
            fixed_split_tokens: 0: keys are divided evenly. A positive multiple of 64 is batch-invariant: lists are cut
                every so many keys.
            num_sm_parts: Shares; when None as of `MlaDecodePlan`.

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        device = torch.device(device)
        kind = cls.__name__
        check_shared(kind, batch_size, seqlen_q, -1, num_sm_parts, None)
        check_range(kind, "num_q_heads", num_q_heads, 1, MLA_MAX_HEADS)
        check_range(kind, "topk", topk, 0, MAX_TOPK)
        check_range(kind, "extra_topk", extra_topk, 0, MAX_TOPK)
        tokens, blocks = batch_size * seqlen_q, -(-num_q_heads // MLA_ROWS_PER_WORK)
        num_sm_parts = num_sm_parts or mla_num_sm_parts(device, blocks)
        most_keys = -(-topk // TILE_TOKENS) * TILE_TOKENS + extra_topk
        num_partials = num_partials_of(kind, tokens * blocks, num_sm_parts, fixed_split_tokens, most_keys)
        return cls(
            batch_size=batch_size,
            seqlen_q=seqlen_q,
            num_q_heads=num_q_heads,
            window_left=-1,
            fixed_split_tokens=fixed_split_tokens,
            topk=topk,
            extra_topk=extra_topk,
            **allocate_tensors(
                tokens, MLA_ROWS_PER_WORK, MLA_HEAD_DIM_V, num_sm_parts, num_partials, tokens * blocks, device
            ),
        )
