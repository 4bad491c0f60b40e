"""A decode step of attention in SGLang on a GPU: the backend attnops beside `triton`, by SGLang's layers and pools.

A step is what SGLang's graph runner does: metadata out of the graph, then a graph of metadata and 8 `RadixAttention`
layers. Each side has a runner of SGLang's attention kit. Layers store their new rows, or, with `--no-store`, only
attend. SGLang's own store is compiled by nvcc at first use; where that is missing, it is two indexed copies.

    PYTHONPATH=python python benchmarks/bench_sglang_step.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import records
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

CELLS = {
    "1 x 32768": [32768],
    "64 x 8192": [8192] * 64,
    "ragged 64": sorted(random.Random(0).randint(256, 8192) for _ in range(64)),
}
LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 32, 8, 128


class Side:
    """A backend of SGLang over a runner and a pool of its own, and a step of one batch."""

    def __init__(self, name: str, lengths: list[int], page_size: int, store: bool, device: str) -> None:
        import sglang_kit

        dense = sglang_kit.kit().dense
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        self.store, size, longest = store, len(lengths), -(-max(lengths) // page_size) * page_size
        heads = {"num_heads": NUM_Q_HEADS, "num_kv_heads": NUM_KV_HEADS}
        case = dense.DenseAttentionCase(
            name="step", backend=name, forward_mode=ForwardMode.DECODE, page_size=page_size, prefix_lens=(1,), **heads
        )
        config = dense.TinyModelConfig(
            **heads, head_dim=HEAD_DIM, hidden_size=NUM_Q_HEADS * HEAD_DIM, context_len=longest
        )
        options = {"dtype": torch.bfloat16, "device": device, "head_dim": HEAD_DIM}
        runner = dense.MockModelRunner(
            case=case,
            model_config=config,
            max_context_len=16,
            disable_cuda_graph=False,
            runner_batch_size=size,
            **options,
        )
        slots = size * longest + page_size
        runner.req_to_token_pool.req_to_token = torch.zeros(size + 1, longest, dtype=torch.int32, device=device)
        table = runner.req_to_token_pool.req_to_token
        starts = torch.randperm(size * longest // page_size, generator=torch.Generator().manual_seed(0)) + 1
        pages = (starts.int() * page_size)[:, None] + torch.arange(page_size, dtype=torch.int32)
        table[:size] = pages.view(size, longest).to(device)
        runner.token_to_kv_pool = MHATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device=device,
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        runner.init_kv_index_translator()  # Triton reads slots through it: of this table, not of the one it replaces
        generator = torch.Generator(device).manual_seed(1)
        for layer in range(LAYERS):
            for rows in runner.token_to_kv_pool.get_kv_buffer(layer):
                rows.copy_(torch.randn(rows.shape, generator=generator, device=device, dtype=rows.dtype))
        self.backend = dense.ATTENTION_BACKENDS[name](runner)
        self.backend.init_cuda_graph_state(max_bs=size, max_num_tokens=size)
        self.layers = [
            RadixAttention(NUM_Q_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS, layer_id=i) for i in range(LAYERS)
        ]
        lens = torch.tensor(lengths, dtype=torch.int32)
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=torch.zeros(size, dtype=torch.int64, device=device),
            req_pool_indices=torch.arange(size, dtype=torch.int32, device=device),
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            out_cache_loc=table[torch.arange(size), lens.long() - 1].long(),
            seq_lens_sum=sum(lengths),
            positions=lens.long().to(device) - 1,
        )
        runner.kv_index_translator.bind_own_plan(self.batch)
        self.rows = [
            torch.randn(size, n * HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)
            for n in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        self.outs: list[torch.Tensor] = []

    def inside(self) -> None:
        """What the graph holds."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata_in_graph(self.batch)
            self.outs = [layer(*self.rows, self.batch, save_kv_cache=self.store) for layer in self.layers]

    def step(self) -> Callable[[], None]:
        """A captured step, to replay."""
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.inside()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.inside()

        def run() -> None:
            self.backend.init_forward_metadata_out_graph(self.batch)
            graph.replay()

        return run


def measure(cell: str, page_size: int, store: bool, options: Any) -> tuple[dict[str, float], float]:
    """Median microseconds of a step by side, and the relative difference of both results."""
    sides = {name: Side(name, CELLS[cell], page_size, store, "cuda") for name in ("attnops", "triton")}
    steps = {name: side.step() for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step()
            begin.record()
            for _ in range(options.steps):
                step()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / options.steps * 1e3)
    ours, theirs = (torch.stack(side.outs).float() for side in sides.values())
    error = ((ours - theirs).norm() / theirs.norm()).item()
    return {name: statistics.median(values) for name, values in times.items()}, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--page-sizes", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--no-store", action="store_true", help="layers only attend")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="results/h200-sglang.jsonl")
    options = parser.parse_args()
    kept = []
    with torch.inference_mode():
        for page_size in options.page_sizes:
            for cell in options.cells:
                times, error = measure(cell, page_size, not options.no_store, options)
                shown = "  ".join(f"{name} {us:9.1f} us" for name, us in times.items())
                ratio = times["triton"] / times["attnops"]
                print(f"{cell:<12} page {page_size:<3} {shown}  {ratio:.3f}x  apart {error:.1e}", flush=True)
                shape = {"step": cell, "page_size": page_size, "layers": LAYERS, "heads": [NUM_Q_HEADS, NUM_KV_HEADS]}
                note = "metadata, and layers in a graph" + (", without stores" if options.no_store else "")
                for name, us in times.items():
                    peer, release = ("attnops", "") if name == "attnops" else ("SGLang triton", version("sglang"))
                    kept.append(records.Record("SGLang step", peer, shape, us / 1e3, release, rel_err=error, note=note))
                torch.cuda.empty_cache()
    if options.write:
        print(records.write(kept, "h200-sglang"))


if __name__ == "__main__":
    main()
