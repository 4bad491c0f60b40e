"""Context parallelism of prefill: a rank brings the queries of some of a step's tokens, which see all the keys.

In sequence, the tokens make ``2 * world_size`` chunks. Rank r has chunks r and ``2 * world_size - 1 - r``, so that each
has an early one and a late one. Round-robin, token i is on rank ``i % world_size``. Both are rows of the step. What a
row sees goes with it: lengths, requests and ranges of keys are taken as queries are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPLIT_MODES = ("in-seq-split", "round-robin-split")  # SGLang's names


@dataclass(frozen=True)
class QueryRows:
    """The rows of a step that one rank has, known on the host from the number of tokens alone.

    Args:
        num_tokens: Of the step, on all ranks.
        ranges: Rows of the step, in the rank's order.
    """

    num_tokens: int
    ranges: tuple[range, ...]

    @classmethod
    def of_rank(cls, num_tokens: int, rank: int, world_size: int, mode: str = "in-seq-split") -> QueryRows:
        """The rows of `rank`; no two ranks share one, and together they have all.

        Raises:
            ValueError: `rank` is not below `world_size`, `num_tokens` is negative, or nobody knows the mode.
        """
        check_split(rank, world_size, mode)
        if num_tokens < 0:
            raise ValueError(f"attnops: num_tokens must not be negative, got {num_tokens}")
        if mode == "round-robin-split":
            return cls(num_tokens, (range(rank, num_tokens, world_size),))
        chunks = 2 * world_size
        bounds = [num_tokens * chunk // chunks for chunk in range(chunks + 1)]
        return cls(num_tokens, tuple(range(bounds[at], bounds[at + 1]) for at in (rank, chunks - 1 - rank)))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def take(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """The rank's rows of ``[num_tokens, ...]``, into `out` where it is given. Its shape is known on the host.

        Raises:
            ValueError: `values` has another number of rows.
        """
        if values.shape[0] != self.num_tokens:
            raise ValueError(f"attnops: values.shape[0] must be {self.num_tokens} (num_tokens), got {values.shape[0]}")
        return torch.cat([_rows(values, one) for one in self.ranges], out=out)

    @staticmethod
    def join(parts: Sequence[Tensor], num_tokens: int, mode: str = "in-seq-split") -> Tensor:
        """``[num_tokens, ...]`` of what each rank has of its rows. Rows behind these are padding and dropped.

        Raises:
            ValueError: a part has fewer rows than its rank.
        """
        out = parts[0].new_empty(num_tokens, *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            rows, at = QueryRows.of_rank(num_tokens, rank, len(parts), mode), 0
            if part.shape[0] < len(rows):
                raise ValueError(
                    f"attnops: parts[{rank}].shape[0] must be {len(rows)} or more (rows of the rank), "
                    f"got {part.shape[0]}"
                )
            for one in rows.ranges:
                _rows(out, one).copy_(part[at : at + len(one)])
                at += len(one)
        return out


def check_split(rank: int, world_size: int, mode: str) -> None:
    """Raises ValueError, naming what is wrong."""
    if mode not in SPLIT_MODES:
        raise ValueError(f"attnops: mode must be one of {', '.join(SPLIT_MODES)}, got {mode!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"attnops: rank must be in [0, world_size), got rank {rank} of world_size {world_size}")


def _rows(values: Tensor, rows: range) -> Tensor:
    return values[rows.start : rows.stop : rows.step]
