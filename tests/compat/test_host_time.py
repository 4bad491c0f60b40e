"""What the host does in a call of a decode step: a torch op is a microsecond, a question to the driver two."""

from __future__ import annotations

import types

import pytest
import torch
from attnops.compat import flash_attn_interface, flash_mla, flashinfer
from attnops.metadata import plan_parts
from attnops.metadata.plan_parts import mla_num_sm_parts, xqa_num_sm_parts
from op_calls import OpCalls

BATCH, PAGE = 4, 16
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


def calls() -> dict:
    bf16 = {"dtype": torch.bfloat16}
    q, k = torch.randn(BATCH, 2, 64, **bf16), torch.randn(BATCH, PAGE, 1, 64, **bf16)
    mla_q, latents = torch.randn(BATCH, 1, 1, 576, **bf16), torch.randn(BATCH, 64, 576, **bf16)
    lens, tables = torch.ones(BATCH, dtype=torch.int32), torch.arange(BATCH, dtype=torch.int32).view(BATCH, 1)
    indptr, cells = torch.arange(BATCH + 1, dtype=torch.int32), tables.flatten()
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    planned = (indptr, cells, lens, 2, 1, 64, PAGE)
    decode.plan(*planned, q_data_type=torch.bfloat16)
    mla = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    mla_planned = (indptr, indptr, cells, lens, 1, 512, 64, 64, False, 0.1, torch.bfloat16, torch.bfloat16)
    mla.plan(*mla_planned)
    parts = (mla_q[:, 0, :, :512], mla_q[:, 0, :, 512:], latents[..., :512], latents[..., 512:])
    paged = {"workspace_buffer": WORKSPACE, "block_tables": tables, "seq_lens": lens, "max_seq_len": 64}
    ranks = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    schedule = flash_mla.get_mla_metadata()[0]
    return {
        "plan": lambda: decode.plan(*planned, q_data_type=torch.bfloat16),
        "run": lambda: decode.run(q, (k, k)),
        "plan of MLA": lambda: mla.plan(*mla_planned),
        "run of MLA": lambda: mla.run(*parts),
        "trtllm": lambda: flashinfer.trtllm_batch_decode_with_kv_cache(q, (k, k), kv_layout="NHD", **paged),
        "trtllm of MLA": lambda: flashinfer.trtllm_batch_decode_with_kv_cache_mla(mla_q, latents, **ranks, **paged),
        "FlashAttention": lambda: flash_attn_interface.flash_attn_with_kvcache(
            q.unsqueeze(1), k, k, cache_seqlens=lens, page_table=tables, causal=True
        ),
        "FlashMLA": lambda: flash_mla.flash_mla_with_kvcache(mla_q, latents[:, :, None], tables, lens, 512, schedule),
    }


@pytest.mark.parametrize(
    ("name", "most"),
    [("plan", 11), ("run", 4), ("plan of MLA", 4), ("run of MLA", 6), ("trtllm", 10), ("trtllm of MLA", 8),
     ("FlashAttention", 9), ("FlashMLA", 15)],
)  # fmt: skip
def test_calls_ask_torch_for_no_more(name, most):
    """As many as before the calls had more arguments, or fewer."""
    call = calls()[name]
    call()
    with OpCalls() as asked:
        call()
    assert asked.count.total() <= most, asked.count


def test_a_gpu_is_asked_once(monkeypatch):
    """What it is; calls that plan for themselves would pay it each."""
    asked = []
    gpu = types.SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(plan_parts, "_GPUS", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or gpu)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert [xqa_num_sm_parts(device, BATCH, 1) for device in (first, first, second, first)] == [264] * 4
    assert mla_num_sm_parts(first, 1) == 132
    assert asked == [first, second]
    xqa_num_sm_parts(torch.device("cuda"), BATCH, 1)  # whichever is current
    assert len(asked) == 3
