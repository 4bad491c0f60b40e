"""Right calls of the sparse indexer's ops: `right_calls` joins them."""

from __future__ import annotations

from typing import Any

import torch
from attnops.compat import deep_gemm, flashinfer, sgl_kernel


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
        "index_topk": {"q": torch.zeros(2, 1, 3, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)}
        | {"index_pages": pages, "page_table": torch.tensor([[0, 2], [1, 4]]).int(), "weights": torch.randn(2, 3)}
        | {"cache_seqlens": torch.tensor([[8], [3]]).int(), "k": 4, "positions": torch.zeros(2, 4, dtype=torch.int32)}
        | {"k_start": torch.tensor([[1], [0]]).int()},
        "index_logits": {"q": torch.zeros(2, 3, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)}
        | {"k": torch.zeros(9, 128, dtype=torch.uint8), "k_scale": torch.zeros(9), "weights": torch.randn(2, 3)}
        | {"k_start": torch.tensor([0, 2]).int(), "k_end": torch.tensor([5, 9]).int(), "logits": torch.zeros(2, 9)},
        "expand_rows": {"cache_seqlens": torch.tensor([9, 4]).int(), "cu_seqlens_q": torch.tensor([0, 2, 3]).int()}
        | {"num_rows": 4, "topk": 5, "rows": torch.zeros(4, dtype=torch.int32)},
        "topk_select": {"logits": torch.randn(3, 40), "lengths": lengths, "k": 8}
        | {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "page_size": 16}
        | {"row_to_request": torch.tensor([0, 0, 1], dtype=torch.int32), "row_starts": torch.tensor([0, 1, 2]).int()}
        | {"positions": torch.zeros(3, 8, dtype=torch.int32)},
    }


def indexer_peer_calls(device: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The peers' names of the same."""
    given = indexer_arguments()
    paged, ragged, select = given["index_logits_paged"], given["index_logits"], given["topk_select"]
    rows = {"lengths": select["lengths"], "row_starts": select["row_starts"]}
    slots = torch.arange(80, dtype=torch.int32).view(2, 40)
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    one = rows | {"score": select["logits"], "topk": 8}
    other = rows | {"input": select["logits"], "k": 8}
    calls = {
        "fast_topk_v2": (sgl_kernel.fast_topk_v2, one),
        "fast_topk_transform_fused": (
            sgl_kernel.fast_topk_transform_fused,
            one | {"page_table_size_1": slots, "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32)},
        ),
        "fast_topk_transform_ragged_fused": (
            sgl_kernel.fast_topk_transform_ragged_fused,
            one | {"topk_indices_offset": offsets},
        ),
        "top_k_page_table_transform": (
            flashinfer.top_k_page_table_transform,
            other | {"src_page_table": select["page_table"], "page_size": 16, "row_to_batch": select["row_to_request"]},
        ),
        "top_k_ragged_transform": (flashinfer.top_k_ragged_transform, other | {"offsets": offsets}),
        "fp8_mqa_logits": (
            deep_gemm.fp8_mqa_logits,
            {"q": ragged["q"], "kv": (ragged["k"].view(torch.float8_e4m3fn), ragged["k_scale"])}
            | {"weights": ragged["weights"]}
            | {"cu_seq_len_k_start": ragged["k_start"], "cu_seq_len_k_end": ragged["k_end"]},
        ),
        "get_paged_mqa_logits_metadata": (
            deep_gemm.get_paged_mqa_logits_metadata,
            {"context_lens": paged["cache_seqlens"], "block_kv": 4, "num_sms": 6},
        ),
        "fp8_paged_mqa_logits": (
            deep_gemm.fp8_paged_mqa_logits,
            {"q": paged["q"], "fused_kv_cache": paged["index_pages"].unsqueeze(2), "weights": paged["weights"]}
            | {"context_lens": paged["cache_seqlens"], "block_table": paged["page_table"], "max_context_len": 8}
            | {"schedule_meta": torch.zeros(7, 2, dtype=torch.int32), "clean_logits": True},
        ),
    }

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(part) for part in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: (function, {n: moved(v) for n, v in one.items()}) for name, (function, one) in calls.items()}
