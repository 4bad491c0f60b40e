"""Backend flashinfer beside FlashInfer called by hand, in one process: a layer in a graph and eager, and host times.

    python benchmarks/bench_flashinfer.py [--write]

By hand: K and V are stored by the same op, from rows with heads apart, and attention is `run` of the same wrapper,
planned with the same lengths. Ours gets rows with heads side by side, as a model has them. Decode is captured and
replayed in turns, and runs eager, too, as an extend does; the median of the rounds counts. The bar is 3 %.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time

import records
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.backends.store import store_kv, store_mla
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

NAMES = ("num_q_heads", "num_kv_heads", "cache", "batch", "seqlen")
CELLS = [
    (heads, kv_heads, cache, batch, seqlen)
    for heads, kv_heads, cache in ((32, 8, "bf16"), (32, 32, "bf16"), (32, 8, "e4m3"), (16, 1, "mla"), (128, 1, "mla"))
    for batch, seqlen in ((1, 1024), (1, 32768), (16, 4096), (64, 1024), (64, 8192), (256, 512))
]
EXTEND_NAMES = ("num_q_heads", "num_kv_heads", "cache", "batch", "cached", "new")
EXTEND = [  # prompts, new tokens and prefixes apart (4096 new), all from pages
    (32, 8, "bf16", 1, 0, 8192),
    (32, 8, "bf16", 4, 0, 2048),
    (32, 8, "bf16", 8, 4096, 512),
    (32, 8, "bf16", 4, 8192, 512),
    (32, 8, "e4m3", 4, 8192, 512),
    (16, 1, "mla", 8, 8192, 128),
]
LAYERS, ROUNDS = 8, 9
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Problem:
    """A step of equal lengths, of decode or with `new` tokens of each request, and the layer that serves it."""

    def __init__(self, cell, page_size, device, new=1) -> None:
        heads, kv_heads, cache, batch, seqlen = cell
        pages = -(-seqlen // page_size)
        tokens = batch * pages * page_size
        options = {"page_size": page_size, "dtype": BF16}
        if cache == "mla":
            self.spec = AttentionSpec.mla(heads, **options)
            self.pool = MLATokenToKVPool(tokens, page_size, BF16, 1, device=device)
            self.layer = RadixAttention(heads, 576, 0.1, 1, 0, v_head_dim=512)
        else:
            kv_dtype = E4M3 if cache == "e4m3" else None
            sizes = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
            self.spec = AttentionSpec(**sizes, kv_dtype=kv_dtype, **options)
            self.pool = MHATokenToKVPool(tokens, page_size, kv_dtype or BF16, kv_heads, 128, 1, device=device)
            self.layer = RadixAttention(heads, 128, 0.1, kv_heads, 0)
        for buffer in self.pool.all_buffers()[0]:
            buffer.copy_(torch.randn(buffer.shape, dtype=BF16, device=device).to(buffer.dtype))
        order = torch.randperm(batch * pages, device=device).view(batch, pages, 1) * page_size
        table = (order + torch.arange(page_size, device=device)).flatten(1).int().contiguous()
        self.limits = Limits(max_batch_size=batch, max_seqlen=pages * page_size, max_num_tokens=batch * new)
        lengths, decodes = torch.full((batch,), seqlen, dtype=torch.int32), new == 1
        added = None if decodes else torch.full((batch,), new, dtype=torch.int32)
        self.batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            req_pool_indices=torch.arange(batch, device=device),
            cache_seqlens=lengths.to(device),
            num_tokens=batch * new,
            req_to_token=table,
            tokens_per_request=1 if decodes else 0,
            max_seqlen_q=new,
            out_cache_loc=table[:, seqlen - new : seqlen].flatten().long(),
            extend_seq_lens=None if decodes else added.to(device),
            token_to_kv_pool=self.pool,
            cache_seqlens_cpu=lengths,
            extend_seq_lens_cpu=added,
        )
        self.q = torch.randn(batch * new, heads * self.spec.head_dim, dtype=BF16, device=device)
        self.k, self.v = (
            torch.randn(batch * new, kv_heads * self.layer.head_dim, dtype=BF16, device=device) for _ in "kv"
        )

    def layer_by_backend(self, backend):
        outs = [self.q.new_empty(self.q.shape[0], self.layer.out_width(self.q)) for _ in range(LAYERS)]

        v = None if self.spec.is_mla else self.v

        def call():
            for out in outs:
                backend.forward(self.q, self.k, v, self.layer, self.batch, out=out)

        return call, outs[0]

    def extend_by_backend(self, backend):
        out = self.q.new_empty(self.q.shape[0], self.layer.out_width(self.q))
        v = None if self.spec.is_mla else self.v

        def call():
            backend.forward(self.q, self.k, v, self.layer, self.batch, out=out)

        return call, out

    def extend_by_hand(self, step, flashinfer):
        """Stores and attends as a user of the package does, by the wrappers that are planned for the step."""
        wrappers = {key[0]: wrapper for key, wrapper in step.planned.items()}
        heads, kv_heads, dim = self.spec.num_q_heads, self.layer.num_kv_heads, self.spec.head_dim
        q, k, v = self.q.view(-1, heads, dim), self.k.view(-1, kv_heads, dim), self.v.view(-1, kv_heads, dim)
        out = q.new_empty(q.shape[0], heads, self.spec.v_head_dim)
        layer, batch = self.layer, self.batch
        if self.spec.is_mla:
            latents = self.pool.get_latent_buffer(0)
            parts = (q[..., :512], q[..., 512:], latents[..., :512], latents[..., 512:])

            def call():
                store_mla(layer, batch, self.k, None, None)
                wrappers["mla"].run(*parts, out=out)

            return call, out
        pages = self.pool.get_kv_buffer(0)
        scales = {} if self.spec.cache_dtype == BF16 else {"k_scale": None, "v_scale": None}

        def call():
            store_kv(layer, batch, step.paged, self.k, self.v, None)
            if "ragged" not in wrappers:
                wrappers["extend"].run(q, pages, out=out, **scales)
                return
            if "prefix" not in wrappers:
                wrappers["ragged"].run(q, k, v, out=out)
                return
            cached = wrappers["prefix"].run(q, pages, return_lse=True)
            _, lse = wrappers["ragged"].run(q, k, v, out=out, return_lse=True)
            flashinfer.merge_state_in_place(out, lse, *cached)

        return call, out

    def layer_by_hand(self, wrapper):
        """What a user of the package writes for the same layer."""
        heads, latents = self.spec.num_q_heads, None
        q = self.q.view(-1, heads, self.spec.head_dim)
        outs = [q.new_empty(q.shape[0], heads, self.spec.v_head_dim) for _ in range(LAYERS)]
        if self.spec.is_mla:
            latents = self.pool.get_latent_buffer(0)
            parts = (q[..., :512], q[..., 512:], latents[..., :512], latents[..., 512:])
            k, v, pages = self.k, None, None
        else:
            pages = self.pool.get_kv_buffer(0)
            k, v = (rows.view(-1, self.layer.num_kv_heads, self.layer.head_dim) for rows in (self.k, self.v))
        loc = self.batch.out_cache_loc

        def call():
            for out in outs:
                if latents is not None:
                    ops.store_mla_kv(latents, k, loc)
                    wrapper.run(*parts, out=out)
                else:
                    ops.store_kv(*pages, k, v, loc)
                    wrapper.run(q, pages, out=out)

        return call, outs[0]


def graph_of(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def in_turns(calls):
    """Microseconds of a layer of each."""
    graphs = {name: graph_of(call) for name, call in calls.items()}
    taken = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / LAYERS)
    return {name: statistics.median(values) for name, values in taken.items()}


def eager_in_turns(calls, layers=LAYERS, repeats=1):
    """Microseconds of a layer of each, without a graph: of the host where the device waits for it."""
    taken = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - begin) * 1e6 / (layers * repeats))
    return {name: statistics.median(values) for name, values in taken.items()}


def host_time(call, device):
    """Microseconds of the host, best of some rounds: the device is idle before each."""
    best = float("inf")
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        best = min(best, (time.perf_counter() - begin) * 1e6)
    return best


def measure(cell, page_size, device):
    problem = Problem(cell, page_size, device)
    batch = problem.batch
    backend = get_backend_class("flashinfer")(problem.spec, problem.limits, device, workspace_size=384 << 20)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    ours, out = problem.layer_by_backend(backend)
    ours()
    graph = backend.wrappers.graph_of(batch)
    (wrapper,) = graph.wrappers.values()
    by_hand, expected = problem.layer_by_hand(wrapper)
    (plan,) = graph.plans.values()
    step = backend._prepared.of(batch)
    by_hand()
    error = float((out.view(expected.shape).float() - expected.float()).abs().max())
    calls = {"attnops": ours, "by hand": by_hand} if device == "cuda" else {}
    times = {"layer": in_turns(calls), "layer, eager": eager_in_turns(calls)} if calls else {}
    times["host, layer"] = {
        "attnops": host_time(ours, device) / LAYERS,
        "by hand": host_time(by_hand, device) / LAYERS,
    }
    times["host, plan"] = {
        "attnops": host_time(lambda: backend.init_forward_metadata_out_graph(batch), device),
        "by hand": host_time(lambda: plan(step), device),
    }
    return times, error


def measure_extend(cell, page_size, device):
    """Of a step with many new tokens, planned once; the layer stores them, as ours and by hand."""
    *model, batch, cached, new = cell
    problem = Problem((*model, batch, cached + new), page_size, device, new)
    backend = get_backend_class("flashinfer")(problem.spec, problem.limits, device, workspace_size=384 << 20)
    backend.init_forward_metadata(problem.batch)
    ours, out = problem.extend_by_backend(backend)
    ours()  # plans the wrappers
    step = backend._prepared.of(problem.batch)
    by_hand, expected = problem.extend_by_hand(step, backend.wrappers.flashinfer)
    by_hand()
    ours()
    error = float((out.view(expected.shape).float() - expected.float()).abs().max())
    calls = {"attnops": ours, "by hand": by_hand}
    if device != "cuda":
        return {}, error
    return {"extend": eager_in_turns(calls, 1, LAYERS)}, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="results/h200-flashinfer.jsonl")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="cuda", help="cpu: a dry run over whatever is imported as flashinfer")
    parser.add_argument("--cells", type=int, default=len(CELLS) + len(EXTEND), help="so many of them")
    options = parser.parse_args()
    ratios = {}
    version = getattr(importlib.import_module("flashinfer"), "__version__", "")
    rows = []
    cells = [*((cell, measure, NAMES) for cell in CELLS), *((cell, measure_extend, EXTEND_NAMES) for cell in EXTEND)]
    for cell, bench, names in cells[: options.cells]:
        times, error = bench(cell, options.page_size, options.device)
        for what, pair in times.items():
            if not pair:
                continue
            ratios.setdefault(what, []).append(pair["attnops"] / pair["by hand"])
            print(f"{what} {cell}: {pair['attnops']:.1f} us, by hand {pair['by hand']:.1f}; differ by {error:.2g}")
            for peer, value in pair.items():
                case, params = f"flashinfer {what}", dict(zip(names, cell))
                rows.append(records.Record(case, peer, params, value / 1e3, version=f"FlashInfer {version}"))
    for what, values in ratios.items():
        print(f"{what}: {statistics.geometric_mean(values):.3f}x the time by hand, worst {max(values):.3f}x")
    if options.write:
        print(records.write(rows, "h200-flashinfer"))


if __name__ == "__main__":
    main()
