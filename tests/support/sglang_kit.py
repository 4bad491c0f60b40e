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


def window_pool(windowed: bool, **options):
    """What the kit makes an `MHATokenToKVPool` for, as an `SWAKVPool` with its one layer in the window's pool or not.

    Pages of the window's pool are in another order, slot 0 included, and both pools are full of NaN.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layers = {"swa_attention_layer_ids": [0 if windowed else 1], "full_attention_layer_ids": [1 if windowed else 0]}
    assert options.pop("layer_num") == 1
    size, page_size = options.pop("size"), options["page_size"]
    pool = SWAKVPool(size, size, **options, **layers)
    pages = (size + page_size) // page_size
    order = torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(pages)),
        ]
    )
    slots = (order[:, None] * page_size + torch.arange(page_size)).flatten()
    pool.register_mapping(torch.cat([slots, torch.tensor([-1])]).to(pool.device))
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.fill_(float("nan"))
    store = pool.set_kv_buffer

    def set_kv_buffer(layer, loc, *rows):
        store(layer, KVWriteLoc(loc, pool.translate_loc_from_full_to_swa(loc)), *rows)

    pool.set_kv_buffer = set_kv_buffer  # the kit has slots of the full pool alone
    return pool


def forget_what_left_windows(pool, req_to_token, lens, new_tokens: int, window: int) -> int:
    """As SGLang's allocator does for requests of `lens` tokens, the last `new_tokens` of them new.

    Pages that no window of a new token reaches are no longer mapped. Returns how many tokens that were.
    """
    count, page_size = 0, pool.page_size
    for request, length in enumerate(lens):
        out = max(length - new_tokens - window, 0) // page_size * page_size
        pool.full_to_swa_index_mapping[req_to_token[request, :out].long()] = 0
        count += out
    return count


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


def give_branches_pages(runner, batch, topk: int, draft_steps: int) -> None:
    """Slots as SGLang has them for `topk` branches over pages of several tokens: each branch begins with a copy of the
    prefix's partial page. `batch` is a draft's of `runner`, whose requests have their tokens side by side."""
    import torch
    from sglang.srt.speculative.eagle_worker_common import duplicate_prefix_tail_to_draft_branches

    table, page_size = runner.req_to_token_pool.req_to_token, runner.page_size
    width, on = table.shape[1], {"device": table.device}
    table[: batch.batch_size] = page_size + torch.arange(batch.batch_size * width, **on).view(-1, width)
    lens = batch.seq_lens.long()
    tail = lens % page_size
    pages = (tail + draft_steps + page_size - 1) // page_size
    branch, step = torch.arange(topk, **on).view(1, -1, 1), torch.arange(draft_steps, **on)
    cells = lens.view(-1, 1, 1) + branch * (pages * page_size).view(-1, 1, 1) + step
    rows = table[batch.req_pool_indices.long()]
    batch.out_cache_loc = rows.gather(1, cells.flatten(1)).flatten().long()
    pool = runner.token_to_kv_pool
    pool.use_native_move_kv_cache = True
    duplicate_prefix_tail_to_draft_branches(pool, rows, lens - tail, tail, pages, topk, page_size)


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
