"""Right calls of the sparse indexer's ops: `right_calls` joins them."""

from __future__ import annotations

from typing import Any

import torch


def indexer_arguments() -> dict[str, dict[str, Any]]:
    """Three rows of two requests."""
    lengths = torch.tensor([40, 37, 5], dtype=torch.int32)
    return {
        "topk_select": {"logits": torch.randn(3, 40), "lengths": lengths, "k": 8}
        | {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "page_size": 16}
        | {"row_to_request": torch.tensor([0, 0, 1], dtype=torch.int32), "row_starts": torch.tensor([0, 1, 2]).int()}
        | {"positions": torch.zeros(3, 8, dtype=torch.int32)},
    }
