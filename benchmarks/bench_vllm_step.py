"""A step of vLLM on a GPU, of attention alone: ATTNOPS beside TRITON_ATTN, in one run, in turns.

Each side is vLLM's own classes, driven as its model runner drives them: the builder makes a step's metadata from one
`CommonAttentionMetadata`. Then a graph of all layers is replayed, or, where prompts are in the batch, the layers run
eagerly. Each layer stores its new rows and attends. Pages hold the same values, block tables are as wide as the
context, and both results are compared before a time counts. A time is the median over turns of build and layers.

vLLM's Python files are enough, its compiled modules are not asked for. So its FLASH_ATTN cannot take part.

    PYTHONPATH=python python benchmarks/bench_vllm_step.py
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace

import records
import torch
from torch import Tensor

# Lengths of the requests that decode, then (length, new tokens) of those that bring prompts.
CELLS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "1 x 32768": ([32768], []),
    "64 x 8192": ([8192] * 64, []),
    "ragged 64": (sorted(random.Random(0).randint(256, 16384) for _ in range(64)), []),
    "8 x 1024": ([1024] * 8, []),
    "32 x 4096 and 2048 of 4096": ([4096] * 32, [(4096, 2048)]),
}
CONTEXT, BLOCK, MOST_REQUESTS = 131072, 16, 256
SIDES = {
    "ATTNOPS": ("attnops.plugins.vllm.backend", "AttnopsBackend"),
    "TRITON_ATTN": ("vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),
}


def config(options: argparse.Namespace) -> SimpleNamespace:
    """What builders read of vLLM's configuration."""
    from vllm.config import CUDAGraphMode

    sizes = [1, 2, 4, 8, 16, 32, 64, 128, MOST_REQUESTS]
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=CONTEXT,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: options.heads[0],
        get_num_kv_heads=lambda parallel: options.heads[1],
        get_head_size=lambda: options.head_dim,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        static_forward_context={},
    )
    return SimpleNamespace(
        model_config=model,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=8192),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        speculative_config=None,
        kv_transfer_config=None,
    )


class Side:
    """A backend of vLLM over shared caches: its builder, its layers, and their graph."""

    def __init__(self, name: str, options: argparse.Namespace, batch: SimpleNamespace, caches: list[Tensor]) -> None:
        import importlib

        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        module, cls = SIDES[name]
        backend = getattr(importlib.import_module(module), cls)
        q_heads, kv_heads = options.heads
        self.batch, self.caches = batch, caches
        self.impls = [
            backend.get_impl_cls()(q_heads, options.head_dim, options.head_dim**-0.5, kv_heads, None, None, "auto")
            for _ in caches
        ]
        whole, names = config(options), [f"layers.{i}" for i in range(len(caches))]
        for layer_name, impl in zip(names, self.impls, strict=True):
            layer = Attention.__new__(Attention)
            torch.nn.Module.__init__(layer)
            layer.impl = impl
            whole.compilation_config.static_forward_context[layer_name] = layer
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=kv_heads, head_size=options.head_dim, dtype=torch.bfloat16
        )
        self.builder = backend.get_builder_cls()(spec, names, whole, batch.lens.device)
        ones = torch.ones((), device=batch.lens.device)
        self.layer = SimpleNamespace(
            _k_scale=ones, _v_scale=ones, _q_scale=ones, _k_scale_float=1.0, _v_scale_float=1.0
        )
        self.out = [torch.empty_like(batch.q) for _ in caches]
        self.graph: torch.cuda.CUDAGraph | None = None

    def build(self) -> object:
        return self.builder.build(0, self.batch.common)

    def layers(self, metadata: object) -> None:
        b = self.batch
        for impl, cache, out in zip(self.impls, self.caches, self.out, strict=True):
            impl.do_kv_cache_update(self.layer, b.k, b.v, cache, b.slots)
            impl.forward(self.layer, b.q, b.k, b.v, cache, metadata, out)

    def capture(self) -> None:
        self.layers(self.build())
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        metadata = self.builder.build_for_cudagraph_capture(self.batch.common)
        self.batch.lens.copy_(self.batch.lens_cpu)  # TRITON_ATTN writes ones for its capture
        with torch.cuda.graph(self.graph):
            self.layers(metadata)

    def step(self) -> None:
        metadata = self.build()
        if self.graph is None:
            self.layers(metadata)
        else:
            self.graph.replay()


def problem(decodes: list[int], prompts: list[tuple[int, int]], options: argparse.Namespace) -> SimpleNamespace:
    """The tensors that vLLM's runner brings to a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(0)
    lengths = decodes + [length for length, _ in prompts]
    new_tokens = [1] * len(decodes) + [new for _, new in prompts]
    device, size, tokens = "cuda", len(lengths), sum(new_tokens)
    lens_cpu = torch.tensor(lengths, dtype=torch.int32)
    blocks = -(-max(lengths) // BLOCK)
    table = torch.zeros(size, CONTEXT // BLOCK, dtype=torch.int32)
    table[:, :blocks] = torch.randperm(size * blocks).to(torch.int32).view(size, blocks)
    places = [torch.arange(length - new, length) for length, new in zip(lengths, new_tokens, strict=True)]
    slots = torch.cat([row[at // BLOCK].long() * BLOCK + at % BLOCK for row, at in zip(table, places, strict=True)])
    q, k, v = (
        torch.randn(tokens, heads, options.head_dim, device=device).bfloat16()
        for heads in (options.heads[0], options.heads[1], options.heads[1])
    )
    starts = torch.tensor([0, *new_tokens]).cumsum(0).int()
    lens, table, slots = lens_cpu.to(device), table.to(device), slots.to(device)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=size,
        num_actual_tokens=tokens,
        max_query_len=max(new_tokens),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
    )
    return SimpleNamespace(
        lens=lens, lens_cpu=lens_cpu, slots=slots, q=q, k=k, v=v, common=common, blocks=size * blocks
    )


def measure(cell: str, options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Microseconds of each side, and how far the two results are apart."""
    decodes, prompts = CELLS[cell]
    batch = problem(decodes, prompts, options)
    shape = (batch.blocks, BLOCK, options.heads[1], 2 * options.head_dim)
    first = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    # Logically [blocks, heads, tokens, 2 D], in memory tokens first: vLLM's default on a GPU.
    caches = [cache.transpose(1, 2) for cache in (first, *(first.clone() for _ in range(options.layers - 1)))]
    sides = {name: Side(name, options, batch, caches) for name in SIDES}
    results = []
    for side in sides.values():
        if not prompts:
            side.capture()
        side.step()
        torch.cuda.synchronize()
        results.append(side.out[-1].float())
    error = float((results[0] - results[1]).norm() / results[1].norm())
    assert error < 2e-2, f"{cell}: the two sides differ by {error:.3g}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, side in sides.items():
            times[name].append(microseconds(side.step, options.steps))
    return {name: statistics.median(values) for name, values in times.items()}, error


def microseconds(step: Callable[[], None], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8, help="each with a cache of its own")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="results/h200-vllm.jsonl")
    options = parser.parse_args()
    options.heads = tuple(options.heads)
    kept = []
    with torch.inference_mode():
        for cell in CELLS:
            times, error = measure(cell, options)
            shown = "  ".join(f"{name} {us:9.1f} us" for name, us in times.items())
            print(
                f"{cell:<28} {options.layers} layers  {shown}  {times['TRITON_ATTN'] / times['ATTNOPS']:.2f}x",
                flush=True,
            )
            shape = {"step": cell, "layers": options.layers, "heads": options.heads, "head_dim": options.head_dim}
            note = f"blocks of {BLOCK}, context {CONTEXT}, " + (
                "layers eager" if CELLS[cell][1] else "layers in a graph"
            )
            for name, us in times.items():
                ours = name == "ATTNOPS"
                peer, release = ("attnops", "") if ours else (f"vLLM {name}", version("vllm"))
                kept.append(records.Record("vLLM step", peer, shape, us / 1e3, release, rel_err=error, note=note))
            torch.cuda.empty_cache()
    if options.write:
        print(records.write(kept, "h200-vllm"))


if __name__ == "__main__":
    main()
