"""Right calls of the sparse indexer's ops: `right_calls` joins them."""

from __future__ import annotations

from typing import Any

import torch


def indexer_arguments() -> dict[str, dict[str, Any]]:
    """Three rows of two requests, pages of four tokens."""
    lengths = torch.tensor([40, 37, 5], dtype=torch.int32)
    pages = torch.zeros(5, 4, 132, dtype=torch.uint8)
    return {
        "store_index_k": {"index_pages": pages, "k": torch.randn(3, 128), "out_cache_loc": torch.tensor([3, 9, 19])},
        "quantize_index_q": {"q": torch.randn(3, 2, 128), "weights": torch.randn(3, 2), "scale": 0.1},
        "gather_index_k": {"k": torch.zeros(7, 128, dtype=torch.uint8), "k_scale": torch.zeros(7), "index_pages": pages}
        | {"page_table": torch.tensor([[0, 2], [1, 4]]).int(), "cu_seqlens_k": torch.tensor([0, 5, 7]).int()},
        "index_logits_paged": {"q": torch.zeros(2, 1, 3, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)}
        | {"index_pages": pages, "page_table": torch.tensor([[0, 2], [1, 4]]).int(), "weights": torch.randn(2, 3)}
        | {"cache_seqlens": torch.tensor([[8], [3]]).int(), "logits": torch.zeros(2, 8)},
        "index_logits": {"q": torch.zeros(2, 3, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)}
        | {"k": torch.zeros(9, 128, dtype=torch.uint8), "k_scale": torch.zeros(9), "weights": torch.randn(2, 3)}
        | {"k_start": torch.tensor([0, 2]).int(), "k_end": torch.tensor([5, 9]).int(), "logits": torch.zeros(2, 9)},
        "topk_select": {"logits": torch.randn(3, 40), "lengths": lengths, "k": 8}
        | {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "page_size": 16}
        | {"row_to_request": torch.tensor([0, 0, 1], dtype=torch.int32), "row_starts": torch.tensor([0, 1, 2]).int()}
        | {"positions": torch.zeros(3, 8, dtype=torch.int32)},
    }
