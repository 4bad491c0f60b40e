"""What vLLM's model runner brings to a backend's builder, made by hand: vLLM's Python files are enough."""

from __future__ import annotations

from types import SimpleNamespace

import torch

BLOCK, CONTEXT, MOST = 16, 512, 8
BATCHES = {  # lengths, and how many of each request's tokens are new
    "decode": ([40, 1, 130], [1, 1, 1]),
    "verification": ([40, 4, 130], [4, 4, 4]),
    "decodes beside prompts": ([40, 130, 37, 90], [1, 1, 37, 20]),
    "prompts": ([20, 70], [20, 33]),
}


def configuration(
    heads: tuple[int, int], head_dim: int, cache_dtype: str, ranks: int = 1, interleave: int = 1
) -> SimpleNamespace:
    """What builders read of vLLM's configuration."""
    from vllm.config import CUDAGraphMode

    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=CONTEXT,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: heads[0],
        get_num_kv_heads=lambda parallel: heads[1],
        get_head_size=lambda: head_dim,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        static_forward_context={},
    )
    return SimpleNamespace(
        model_config=model,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=interleave
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST, max_num_batched_tokens=256),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=BLOCK),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False),
        kv_transfer_config=None,
    )


def new_tokens(problem, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each request's last tokens: the rows among all tokens', and their slots."""
    rows, slots, begin = [], [], 0
    for request, (length, new) in enumerate(zip(problem.cache_seqlens.tolist(), counts, strict=True)):
        places = torch.arange(length - new, length)
        rows.append(begin + places)
        slots.append(problem.page_table[request][places // BLOCK].long() * BLOCK + places % BLOCK)
        begin += length
    return torch.cat(rows), torch.cat(slots)


def common_metadata(problem, counts: list[int], slots: torch.Tensor, device: str):
    """What the runner hands to `build`."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=problem.cache_seqlens.to(device),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(problem.cache_seqlens.max()),
        block_table_tensor=problem.page_table.to(device),
        slot_mapping=slots.to(device),
        causal=True,
    )


def made_builder(impl, whole: SimpleNamespace, device: str):
    """The backend's builder of one layer."""
    from attnops.plugins.vllm.backend import AttnopsBackend
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = impl
    whole.compilation_config.static_forward_context["layer"] = layer
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=impl.num_kv_heads, head_size=impl.head_size, dtype=torch.bfloat16
    )
    return AttnopsBackend.get_builder_cls()(spec, ["layer"], whole, torch.device(device))
