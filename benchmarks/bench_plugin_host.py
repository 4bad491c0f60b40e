"""Host microseconds of one layer's decode through a plug-in, beside `RadixAttention`'s, in turns, on the CPU or a GPU.

    PYTHONPATH=python .venv-vllm/bin/python benchmarks/bench_plugin_host.py

A batch of four with short contexts: most of a call is what comes before the kernels. Time is this thread's own. A layer
stores its new rows and attends. What else is measured is compared with a `RadixAttention` that is bound, as it is by
default on a GPU. transformers' function only attends, over a contiguous cache, and plans in every call.
Engines that are not installed are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from attnops.backends import get_backend_class, select_backend
from attnops.layers import RadixAttention
from attnops.plugins import unsupported
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

HEADS, KV_HEADS, DIM, PAGE, BATCH = 8, 2, 64, 16, 4
HEAD_COUNTS = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
SPEC = AttentionSpec(**HEAD_COUNTS, page_size=PAGE, dtype=torch.bfloat16)
LIMITS = Limits(max_batch_size=BATCH, max_seqlen=PAGE)
DEVICE = "cpu"
BOUND = "trtllm_mha"  # whose layers are bound on every device


def rows() -> list[torch.Tensor]:
    return [torch.randn(BATCH, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]


def decode_batch(pool: MHATokenToKVPool | None = None, name: str | None = None) -> AttentionBatch:
    """A planned decode step of the backend `name`, or `select_backend`'s choice."""
    backend = get_backend_class(name)(SPEC, LIMITS, DEVICE) if name else select_backend(SPEC, LIMITS, DEVICE)
    if pool is None:
        pool = MHATokenToKVPool(BATCH * PAGE, PAGE, torch.bfloat16, KV_HEADS, DIM, 1, DEVICE)
    slots = torch.arange(BATCH * PAGE).view(BATCH, PAGE).int()
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(BATCH),
        cache_seqlens=torch.full((BATCH,), 3, dtype=torch.int32),
        num_tokens=BATCH,
        req_to_token=slots,
        out_cache_loc=slots[:, 2].long().contiguous(),
        positions=torch.full((BATCH,), 2),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    return batch


def radix_attention(name: str | None = None) -> Callable[[], object]:
    """attnops' own layer, as a model calls it."""
    batch, layer = decode_batch(name=name), RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    q, k, v = (x.flatten(1) for x in rows())
    return lambda: layer(q, k, v, batch)


def sglang() -> Callable[[], object]:
    """The adapter over a step that it has taken in, and a pool as SGLang's: SGLang's own layer calls it so."""
    from attnops.plugins.sglang.backend import AttnopsAttnBackend
    from attnops.plugins.sglang.views import MHAPoolView

    class Layer:
        layer_id, logit_cap, scaling, is_cross_attention = 0, 0.0, DIM**-0.5, False
        tp_q_head_num, tp_k_head_num, qk_head_dim, v_head_dim = HEADS, KV_HEADS, DIM, DIM
        sliding_window_size, k_scale, v_scale = -1, None, None
        attn_type = SimpleNamespace(value="decoder")

    k, v = (torch.zeros((BATCH + 1) * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    pool = SimpleNamespace(
        dtype=torch.bfloat16,
        start_layer=0,
        device=DEVICE,
        get_key_buffer=lambda layer_id: k,
        get_value_buffer=lambda layer_id: v,
        get_kv_buffer=lambda layer_id: (k, v),
    )
    adapter, layer, step = object.__new__(AttnopsAttnBackend), Layer(), SimpleNamespace()
    adapter._pool = MHAPoolView(pool, PAGE)
    adapter._batch = decode_batch(adapter._pool)
    adapter._backend, adapter._layers, adapter._step = adapter._batch.attn_backend, {}, step
    new = [x.flatten(1) for x in rows()]
    return lambda: adapter.forward_decode(*new, layer, step)


def vllm() -> Callable[[], object]:
    from attnops.plugins.vllm.backend import AttnopsImpl, AttnopsMetadata
    from attnops.plugins.vllm.plans import DecodePlanner

    impl = AttnopsImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")
    lens, table = torch.full((BATCH,), 3, dtype=torch.int32), torch.arange(BATCH, dtype=torch.int32).view(BATCH, 1)
    slots = torch.arange(BATCH) * PAGE + 2
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()), _k_scale_float=1.0, _v_scale_float=1.0)
    cache = torch.zeros(BATCH, KV_HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16)
    q, k, v = rows()
    out = torch.empty_like(q)
    metadata = AttnopsMetadata(
        num_actual_tokens=BATCH,
        num_decodes=BATCH,
        num_decode_tokens=BATCH,
        decode=DecodePlanner(SPEC, {-1}, LIMITS, q.device).plan(lens, 1),
        prompts={},
        cu_seqlens_q=None,
        seq_lens=lens,
        block_table=table,
        slot_mapping=slots,
        causal=True,
    )

    return lambda: impl.forward(layer, q, k, v, cache, metadata, out)


def cached_rows() -> list[torch.Tensor]:
    """A query token, and keys and values as transformers' caches have them."""
    shapes = ((HEADS, 1), (KV_HEADS, 3), (KV_HEADS, 3))
    return [torch.randn(BATCH, heads, tokens, DIM).bfloat16() for heads, tokens in shapes]


def transformers() -> Callable[[], object]:
    from attnops.plugins.transformers.masks import attention_forward

    module = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS, training=False, layer_idx=0)
    q, k, v = cached_rows()
    return lambda: attention_forward(module, q, k, v, None, scaling=DIM**-0.5)


def sdpa() -> Callable[[], object]:
    """transformers' own function for the same, to compare."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS, training=False)
    q, k, v = cached_rows()
    return lambda: sdpa_attention_forward(module, q, k, v, None, scaling=DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--count", type=int, default=40, help="calls of a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    global DEVICE
    DEVICE = options.device
    torch.set_default_device(DEVICE)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    made: dict[str, Callable[[], object]] = {"RadixAttention": radix_attention(BOUND)}
    if DEVICE == "cpu":
        made["RadixAttention, not bound"] = radix_attention()
    if not unsupported("sglang"):
        made["SGLang: AttnopsAttnBackend"] = sglang()
    if not unsupported("vllm"):
        made["vLLM: AttnopsImpl"] = vllm()
    if not unsupported("transformers"):
        made |= {"transformers: attnops": transformers(), "transformers: its sdpa": sdpa()}
    torch.set_default_device(None)  # no engine has one: with it, every function of torch takes microseconds more
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, call in made.items():
            begin = time.thread_time()
            for _ in range(options.count):
                call()
            taken[name].append((time.thread_time() - begin) / options.count * 1e6)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    base = statistics.quantiles(taken["RadixAttention"], n=4)[0]
    for name, values in taken.items():
        best = statistics.quantiles(values, n=4)[0]
        print(f"{name:26} {best:6.1f} us  {best - base:+6.1f}")


if __name__ == "__main__":
    main()
