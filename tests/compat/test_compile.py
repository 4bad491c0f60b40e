"""Functions of `attnops.compat` that read nothing on the host trace whole: `torch.compile(fullgraph=True)`."""

from __future__ import annotations

import pytest
import torch
from attnops.compat import flash_attn, flash_attn_interface, flash_mla, flashinfer, sgl_kernel
from right_calls import compat_calls
from torch import Tensor

# Plans keep Python state, and some read on the host, as the peers' do: they run between compiled steps.
READ_ON_THE_HOST = (
    "BatchMLAPagedAttentionWrapper",
    "BatchDecodeMlaWithPagedKVCacheWrapper",  # bounds of its own, on the CPU
    "VariableBlockSparseAttentionWrapper",
)
CALLED = sorted(
    name
    for name in compat_calls()
    if not name.endswith(("Wrapper", ".plan", ".begin_forward", "_plan", "_size", "_metadata", "BatchAttention"))
)


def tensors_of(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, (tuple, list)) else []


def written(given: dict) -> list[Tensor]:
    """What a call may have written, but for scratch."""
    return [tensor for name, value in given.items() if "workspace" not in name for tensor in tensors_of(value)]


def call_of(name: str):
    torch.manual_seed(0)
    return compat_calls()[name]


def check_that_it_traces(make, bits: bool = True) -> None:
    """`make` gives a function and its arguments, new tensors at every call. Without `bits` another kernel may serve."""
    torch._dynamo.reset()
    function, given = make()
    eager = tensors_of(function(**given)) + written(given)
    function, given = make()
    compiled = torch.compile(lambda **options: function(**options), fullgraph=True, backend="eager")
    traced = tensors_of(compiled(**given)) + written(given)
    assert len(eager) == len(traced)
    for ours, expected in zip(traced, eager):
        both = [tensor.float().nan_to_num(9.0) for tensor in (ours, expected)]
        assert torch.equal(*both) if bits else torch.allclose(*both, 1e-2, 1e-2)


@pytest.mark.parametrize("name", CALLED)
def test_traces_whole(name):
    check_that_it_traces(lambda: call_of(name))


def forms() -> dict:
    """Calls with arguments that cost an op before, and functions that share a name with another library's."""
    torch.manual_seed(0)
    calls = compat_calls()
    cache, ragged, dense = (
        calls[name][1] for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func")
    )
    mla, rows = calls["flash_mla_with_kvcache"][1], calls["flash_mla_sparse_fwd"][1]
    int32 = {"dtype": torch.int32}
    batch = cache["cache_seqlens"].shape[0]
    pads, scales = torch.ones(3, **int32), {"bmm1_scale": torch.full((1,), 0.1), "bmm2_scale": torch.ones(1)}
    new = {name: torch.randn(batch, 1, 2, 64).bfloat16() for name in "kv"}
    rotary = {name: torch.randn(64, 16) for name in ("rotary_cos", "rotary_sin")}
    third = cache | {"sinks": None}
    second = {("block_table" if name == "page_table" else name): value for name, value in third.items()}
    second.pop("sinks")
    lists = {"indices": torch.zeros(3, 1, 8, **int32), "block_table": None, "cache_seqlens": None}
    some = torch.ones(2, ragged["q"].shape[1], 1, **int32)
    sparse = {"block_count": some, "block_offset": 0 * some[..., None], "column_count": some}
    sparse |= {"column_index": some[..., None], "causal": True}
    slashes = {"q_seqlens": pads[:1] * 9, "kv_seqlens": pads[:1] * 9, "context_size": 9}
    slashes |= {"vertical_indexes": torch.ones(1, 2, 1, **int32), "slash_indexes": torch.ones(1, 2, 2, **int32)}
    slashes |= {"block_size_M": 4, "block_size_N": 4, "causal": True}
    prefill = calls["trtllm_fmha_v2_prefill"][1]
    chunks = {"mask_mode": "chunked", "chunked_attention_size": 3}
    decode = calls["trtllm_batch_decode_with_kv_cache"][1]
    tokens = [torch.randn(150, heads, 16) for heads in (2, 2, 4)]
    prompts = dict(zip("qkv", tokens)) | {"g": torch.rand(150, 4), "cu_seqlens": torch.tensor([0, 70, 150])}
    prompts |= {"state_checkpoints": torch.zeros(2, 4, 16, 16), "checkpoint_cu_starts": torch.tensor([0, 1, 2])}
    prompts |= {"checkpoint_every_n_tokens": 64, "output_final_state": True, "state_indices": torch.tensor([2, 0])}
    prompts |= {"initial_state": torch.zeros(3, 4, 16, 16), "output_state": torch.zeros(3, 4, 16, 16)}
    wrappers = {
        f"{name}.run_return_lse": (run.__self__.run_return_lse, given)
        for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
                     "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper")
        for run, given in [calls[f"{name}.run"]]
    }  # fmt: skip
    return wrappers | {
        "attention_chunk": (flash_attn_interface.flash_attn_with_kvcache, third | {"attention_chunk": 8}),
        "window_size as a tensor": (
            flash_attn_interface.flash_attn_with_kvcache,
            third | {"window_size": torch.tensor([5, 0])},
        ),
        "ragged window_size as a tensor": (
            flash_attn_interface.flash_attn_varlen_func,
            ragged | {"window_size": torch.tensor([5, 1])},
        ),
        "cache_leftpad": (flash_attn_interface.flash_attn_with_kvcache, third | {"cache_leftpad": pads}),
        "rotary and append": (flash_attn_interface.flash_attn_with_kvcache, third | new | rotary),
        "num_splits": (flash_attn_interface.flash_attn_with_kvcache, third | {"num_splits": 2}),
        "ragged attention_chunk": (flash_attn_interface.flash_attn_varlen_func, ragged | {"attention_chunk": 2}),
        "seqused": (
            flash_attn_interface.flash_attn_varlen_func,
            ragged | {name: torch.tensor([3, 4], **int32) for name in ("seqused_q", "seqused_k")},
        ),
        "FlashAttention-3 dense": (flash_attn_interface.flash_attn_func, dense),
        "FlashAttention-2 cache": (flash_attn.flash_attn_with_kvcache, second),
        "FlashAttention-2 ragged": (flash_attn.flash_attn_varlen_func, ragged),
        "alibi_slopes": (flash_attn.flash_attn_with_kvcache, second | {"alibi_slopes": torch.linspace(0.1, 1, 8)}),
        "sgl_kernel ragged": (sgl_kernel.flash_attn.flash_attn_varlen_func, ragged),
        "sgl_kernel cache": (sgl_kernel.flash_attn.flash_attn_with_kvcache, third),
        "sgl_kernel MLA": (sgl_kernel.flash_mla.flash_mla_with_kvcache, mla),
        "sgl_kernel rows": (sgl_kernel.flash_mla.flash_mla_sparse_fwd, rows),
        "lists of blocks and keys": (sgl_kernel.sparse_flash_attn.sparse_attn_varlen_func, ragged | sparse),
        "vertical and slash": (sgl_kernel.sparse_flash_attn.convert_vertical_slash_indexes, slashes),
        "sgl_kernel.merge_state": (sgl_kernel.merge_state, calls["merge_state_v2"][1]),
        "lists of rows": (
            flash_mla.flash_mla_with_kvcache,
            mla | lists | {"k_cache": mla["k_cache"].nan_to_num(), "is_fp8_kvcache": False},
        ),
        "prompts of the delta rule": (flashinfer.chunk_gated_delta_rule, prompts),
        "chunks of prefill": (flashinfer.trtllm_fmha_v2_prefill, prefill | chunks),
        "scales on the device": (
            flashinfer.trtllm_batch_decode_with_kv_cache,
            decode | scales | {"sinks": torch.zeros(8)},
        ),
    }  # fmt: skip


PLANS = sorted(
    name
    for name in compat_calls()
    if name.endswith((".plan", ".begin_forward", "decode_plan")) and not name.startswith(READ_ON_THE_HOST)
)


@pytest.mark.parametrize("name", PLANS)
def test_plans_trace_whole(name):
    """Those that read nothing on the host."""
    torch._dynamo.reset()
    function, given = call_of(name)
    torch.compile(lambda: function(**given), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("name", sorted(forms()))
def test_forms_trace_whole(name):
    check_that_it_traces(lambda: forms()[name], bits="window_size" not in name)
