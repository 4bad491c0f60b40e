"""SGLang's own attention kit, `sglang.test.kits.attention_unittest`, with attnops registered as a backend."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import sys
import types

KIT = "sglang.test.kits.attention_unittest"
RUNNERS = {
    "decode": "cuda_graph_decode_runner",
    "verify": "speculative_target_verify_runner",
    "draft": "speculative_draft_runner",
    "draft_extend": "speculative_draft_extend_runner",
    "split_op": "split_op_runner",
}
HEAD_DIM = 64  # the kit's own default, 16, is less than attnops serves
DENSE = {"head_dim": HEAD_DIM, "hidden_size": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def kit() -> types.SimpleNamespace:
    """The kit's modules. Without torchvision, which SGLang imports and attention does not use, a stand-in."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        importlib.import_module("transformers.modeling_utils")  # looks for torchvision first, and finds none
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
            module = types.ModuleType(name)
            module.__getattr__ = stand_in
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules.setdefault(name, module)
        processors = types.SimpleNamespace(register=lambda *args, **options: None)
        importlib.import_module("transformers").AutoImageProcessor = processors  # its own demands torchvision
    try:
        import datasets  # noqa: F401
    except ImportError:  # of SGLang's benchmarks, which the kit's helpers import
        benchmarks = types.ModuleType("sglang.benchmark.serving")
        benchmarks.__getattr__ = stand_in
        sys.modules.setdefault(benchmarks.__name__, benchmarks)
    from attnops.plugins.sglang import register
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention

    assert register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    if "attnops" not in dense_attention._SWA_DECODE_EXTEND_WINDOW:  # keys [p - w, p], as the kit asks of new backends
        dense_attention._SWA_DECODE_EXTEND_WINDOW |= {"attnops"}
    return types.SimpleNamespace(dense=dense_attention, mla=mla_attention)


def runner(name: str) -> types.ModuleType:
    """The kit's module for a mode of SGLang's runners, by its name in `RUNNERS`."""
    return importlib.import_module(f"{KIT}.runner_modes.{RUNNERS[name]}")


def dense_cases() -> list:
    """Every dense and window case."""
    dense = kit().dense
    windows = [
        case
        for make in (dense.make_swa_no_prefix_input_config_cases, dense.make_swa_prefix_input_config_cases)
        for case in make("attnops")
    ]
    return [*dense.make_dense_cases("attnops"), *windows]


def mla_cases() -> list:
    return list(kit().mla.make_mla_cases("attnops"))


def ragged_case(module: types.ModuleType, kind: str, mode: str, page_size: int, tokens: int, lens=(14, 15, 16)):
    """A case of `module`, dense or MLA, with as many new tokens for each request.

    Graph runners of the kit store prefixes a second time, at places that its own layout may have given to another
    request. With these lengths it has not.
    """
    shape = {"backend": "attnops", "page_size": page_size, "prefix_lens": lens, "extend_lens": (tokens,) * len(lens)}
    mode = getattr(module.ForwardMode, mode)
    if kind == "mla":
        return module.MLAAttentionCase("ragged", forward_mode=mode, num_heads=4, **shape)
    return module.DenseAttentionCase("ragged", forward_mode=mode, num_heads=4, num_kv_heads=2, **shape)


def only_request(batch, request: int, tokens: int):
    """One request of a batch whose requests have `tokens` new tokens each."""
    alone, rows, this = copy.copy(batch), slice(request * tokens, (request + 1) * tokens), slice(request, request + 1)
    alone.batch_size = 1
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(alone, name, getattr(batch, name)[rows])
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens"):
        if getattr(batch, name) is not None:
            setattr(alone, name, getattr(batch, name)[this])
    if batch.extend_num_tokens is not None:
        alone.extend_num_tokens = tokens
    return alone
