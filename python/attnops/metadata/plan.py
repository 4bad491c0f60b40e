"""Split-KV plans of the decode ops: where the shares of a batch are written, and the scratch of the splits.

A plan is allocated once for a geometry. `ops.xqa_decode_plan` or `ops.mla_decode_plan` fills it on the device at every
step, from the lengths alone. Every layer of that step uses it. Its tensors never move, so a CUDA
graph may hold both calls.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.metadata.plan_checks import MAX_CUTS, MAX_LEAST_CUT, check_shared, cuts_of_rule
from attnops.metadata.plan_parts import XQA_SMALL_BLOCK, mla_num_sm_parts, xqa_num_sm_parts
from attnops.types import check_dtype, check_range

if TYPE_CHECKING:
    from attnops.metadata.fmha_plan import FmhaPlan  # whose plans may have one of these

TILE_TOKENS = 64  # KV tokens per tile of every plan: csrc/*/plan.h
MLA_ROWS_PER_WORK = 64  # query rows (token, head) per block of a work: csrc/mla_decode/plan.h
MLA_HEAD_DIM_V = 512
MLA_MAX_HEADS = 1 << 14  # csrc/mla_decode/checks.h
MAX_HEAD_DIM = 256  # of xqa_decode: csrc/xqa_decode/params.h

XQA_MAX_SPLITS = (1 << 15) - 1  # of a request and KV head: csrc/xqa_decode/plan.h

# Hopper takes short calls in clusters of CTAs (csrc/xqa_decode/sm90/cluster*); where a work has several, their results
# meet over more semaphores than works: at most so many.
XQA_CLUSTER_SEMAPHORES = 256

_ENTRY_SIZE = 8  # int32 per row: csrc/scheduler/split_kv_entry.h


def num_partials_of(
    kind: str, num_blocks: int, num_sm_parts: int, fixed_split_tokens: int, max_seqlen_k: int | None
) -> int:
    """Rows of `out_partial`: docs/architecture.md, "Split-KV plans"."""
    most_cuts = MAX_CUTS if kind == "XqaDecodePlan" else 0
    check_range(f"{kind}.allocate", "fixed_split_tokens", fixed_split_tokens, -most_cuts * (1 + MAX_LEAST_CUT))
    if fixed_split_tokens > 0 and fixed_split_tokens % TILE_TOKENS:
        or_cuts = f", -1 to -{most_cuts} (at most so many cuts), a `cut_rule`" if most_cuts else ""
        raise ValueError(
            f"{kind}.allocate: fixed_split_tokens must be 0 (balanced){or_cuts} or a positive multiple of "
            f"{TILE_TOKENS} (tokens of a cut), got {fixed_split_tokens}"
        )
    if not fixed_split_tokens:
        return 2 * num_sm_parts
    if fixed_split_tokens < 0:
        return num_blocks * cuts_of_rule(fixed_split_tokens)[0]
    if max_seqlen_k is None:
        raise ValueError(
            f"{kind}.allocate: fixed_split_tokens={fixed_split_tokens} needs max_seqlen_k, which bounds the splits"
        )
    tiles = -(-max_seqlen_k // TILE_TOKENS)
    cuts = max(-(-tiles // (fixed_split_tokens // TILE_TOKENS)), 1)
    return num_blocks * cuts


@dataclasses.dataclass(frozen=True)
class SplitKvPlan:
    """What the plans of decode ops have alike."""

    batch_size: int
    seqlen_q: int
    num_q_heads: int
    window_left: int
    fixed_split_tokens: int
    tile_scheduler_metadata: Tensor  # int32 [num_sm_parts, 8]; a row is a SplitKvEntry
    num_splits: Tensor  # int32 [B + 1]: cuts before a request, or the order in which works begin
    out_partial: Tensor  # float32 [num_partials, rows per work, D_v]
    lse_partial: Tensor  # float32 [num_partials, rows per work]
    semaphores: Tensor  # int32 [works, or their blocks of rows] or more, zero between calls

    @property
    def num_sm_parts(self) -> int:
        return self.tile_scheduler_metadata.shape[0]


def allocate_tensors(
    batch_size: int,
    rows: int,
    head_dim_v: int,
    num_sm_parts: int,
    num_partials: int,
    num_semaphores: int,
    device: torch.device,
) -> dict[str, Any]:
    return {
        "tile_scheduler_metadata": torch.zeros(num_sm_parts, _ENTRY_SIZE, dtype=torch.int32, device=device),
        "num_splits": torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
        "out_partial": torch.empty(num_partials, rows, head_dim_v, dtype=torch.float32, device=device),
        "lse_partial": torch.empty(num_partials, rows, dtype=torch.float32, device=device),
        "semaphores": torch.zeros(num_semaphores, dtype=torch.int32, device=device),
    }


@dataclasses.dataclass(frozen=True)
class XqaDecodePlan(SplitKvPlan):
    """Plan of `ops.xqa_decode` for one geometry; works are (request, KV head).

    Attributes:
        prefill, cu_seqlens_q: Where `fmha_paged`'s kernels are faster (`suits_prefill`): their plan, and int32
            ``[B + 1]``, where each request's tokens begin. Calls that they do not serve go by the rest of the plan.
        kv_bytes: Of an element of the pages: shares of FP8 works are planned by other costs.
    """

    num_kv_heads: int
    head_dim: int
    prefill: FmhaPlan | None = None
    cu_seqlens_q: Tensor | None = None
    kv_bytes: int = 2

    @property
    def rows(self) -> int:
        """Query rows (token, head) of a request and KV head."""
        return self.seqlen_q * (self.num_q_heads // self.num_kv_heads)

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        return {
            "batch_size": self.batch_size,
            "seqlen_q": self.seqlen_q,
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "window_left": self.window_left,
        }

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        seqlen_q: int = 1,
        window_left: int = -1,
        fixed_split_tokens: int = 0,
        max_seqlen_k: int | None = None,
        num_sm_parts: int | None = None,
        kv_dtype: torch.dtype | None = None,
        page_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> XqaDecodePlan:
        """Allocate a plan and its scratch.

        Args:
            batch_size, seqlen_q: Requests, and query tokens of each.
            num_q_heads, num_kv_heads, head_dim: Of the attention; `num_q_heads` is a multiple of `num_kv_heads`.
            window_left: Of the calls that use the plan: tiles outside every window are not planned.
            fixed_split_tokens: 0: KV tiles are divided evenly. Anything else is batch-invariant: a request is cut
                without regard to the rest of the batch. A positive multiple of 64 is the number of tokens of a cut. -n
                means at most n cuts of even length, -(n + 1024 m) also that a cut has 64 m tokens at least
                (`cut_rule`). `xqa_invariant_cuts` is a good choice.
            max_seqlen_k: Bound of every `cache_seqlens`; needed with a positive `fixed_split_tokens`, else unused.
            num_sm_parts: Shares; when None `xqa_num_sm_parts`: on CUDA at most SM count times `XQA_PARTS_PER_SM`, else
                the number of threads.
            kv_dtype: Of the pages, where it is known: FP8 works cost more, and batch-invariant plans have more shares.
            page_size: Tokens of a page, where it is known: sizes below 8 or no power of two may get fewer shares.

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        device = torch.device(device)
        kind = cls.__name__
        check_shared(kind, batch_size, seqlen_q, window_left, num_sm_parts, max_seqlen_k)
        check_range(f"{kind}.allocate", "num_q_heads", num_q_heads, 1)
        check_range(f"{kind}.allocate", "num_kv_heads", num_kv_heads, 1)
        check_range(f"{kind}.allocate", "head_dim", head_dim, 1, MAX_HEAD_DIM)
        if kv_dtype is not None:
            check_dtype(f"{kind}.allocate", "kv_dtype", kv_dtype)
        if page_size is not None:
            check_range(f"{kind}.allocate", "page_size", page_size, 1)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"{kind}.allocate: num_q_heads must be a positive multiple of num_kv_heads, "
                f"got {num_q_heads} and {num_kv_heads}"
            )
        num_sm_parts = num_sm_parts or xqa_num_sm_parts(
            device,
            batch_size,
            num_kv_heads,
            rows=seqlen_q * (num_q_heads // num_kv_heads),
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            page_size=page_size,
            fixed_split_tokens=fixed_split_tokens,
        )
        num_partials = num_partials_of(kind, batch_size * num_kv_heads, num_sm_parts, fixed_split_tokens, max_seqlen_k)
        if fixed_split_tokens > 0 and (max_seqlen_k or 0) > fixed_split_tokens * XQA_MAX_SPLITS:
            raise ValueError(
                f"{kind}.allocate: fixed_split_tokens must make at most {XQA_MAX_SPLITS} cuts of "
                f"max_seqlen_k={max_seqlen_k} tokens, got {fixed_split_tokens}"
            )
        rows = seqlen_q * (num_q_heads // num_kv_heads)
        num_semaphores = batch_size * num_kv_heads * -(-rows // XQA_SMALL_BLOCK)
        if device.type == "cuda":
            num_semaphores = max(num_semaphores, XQA_CLUSTER_SEMAPHORES)
        return cls(
            batch_size=batch_size,
            seqlen_q=seqlen_q,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window_left=window_left,
            fixed_split_tokens=fixed_split_tokens,
            kv_bytes=2 if kv_dtype is None else kv_dtype.itemsize,
            **allocate_tensors(batch_size, rows, head_dim, num_sm_parts, num_partials, num_semaphores, device),
        )


@dataclasses.dataclass(frozen=True)
class MlaDecodePlan(SplitKvPlan):
    """Plan of `ops.mla_decode` for one geometry; works are (request, some blocks of 64 query rows)."""

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        return {
            "batch_size": self.batch_size,
            "seqlen_q": self.seqlen_q,
            "num_q_heads": self.num_q_heads,
            "window_left": self.window_left,
        }

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        *,
        num_q_heads: int,
        seqlen_q: int = 1,
        window_left: int = -1,
        fixed_split_tokens: int = 0,
        max_seqlen_k: int | None = None,
        num_sm_parts: int | None = None,
        device: torch.device | str = "cpu",
    ) -> MlaDecodePlan:
        """Allocate a plan and its scratch; the arguments are those of `XqaDecodePlan.allocate`, but for -n cuts.

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        device = torch.device(device)
        kind = cls.__name__
        check_shared(kind, batch_size, seqlen_q, window_left, num_sm_parts, max_seqlen_k)
        check_range(f"{kind}.allocate", "num_q_heads", num_q_heads, 1, MLA_MAX_HEADS)
        blocks = -(-seqlen_q * num_q_heads // MLA_ROWS_PER_WORK)
        num_sm_parts = num_sm_parts or mla_num_sm_parts(device, blocks)
        num_partials = num_partials_of(kind, batch_size * blocks, num_sm_parts, fixed_split_tokens, max_seqlen_k)
        return cls(
            batch_size=batch_size,
            seqlen_q=seqlen_q,
            num_q_heads=num_q_heads,
            window_left=window_left,
            fixed_split_tokens=fixed_split_tokens,
            **allocate_tensors(
                batch_size, MLA_ROWS_PER_WORK, MLA_HEAD_DIM_V, num_sm_parts, num_partials, batch_size * blocks, device
            ),
        )
