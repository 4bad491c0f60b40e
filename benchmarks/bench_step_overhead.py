"""What a decode step costs besides its kernels: host microseconds per call, per layer and per step, and in graphs.

One Llama-like model runs its decode step eagerly, compiled and replayed, with attention by attnops, by PyTorch's SDPA
over a contiguous cache, and by FlashAttention-3 and FlashInfer where they are installed. Three figures each:

  host      from the call to its return, the device idle before: what the host spends to submit a step
  step      the same until the device has finished
  kernels   the sum of the step's kernel times, as CUPTI reports them: what a step would take without any gap

    python benchmarks/bench_step_overhead.py --write     # all of it, to benchmarks/results/<device>-step_overhead.jsonl
    python benchmarks/bench_step_overhead.py --groups call,step
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attnops import ops
from attnops.graphs import GraphRunner
from attnops.layers import collect_layers, forward_context
from attnops.metadata import XqaDecodePlan
from attnops.ops.layer_call import bind_xqa_layer, repeatable, xqa_layer
from attnops.types import AttentionBatch
from records import Record, version_of, write
from step_model import BF16, DEVICE, DIM, HEADS, KV_HEADS, PAGE_SIZE, Setup
from torch import Tensor, nn

# ---- the peers


class SdpaAttention(nn.Module):
    """Over a contiguous cache ``[B, context, heads, dim]``, with a mask for the lengths."""

    def __init__(self, setup: Setup, mask: Tensor) -> None:
        super().__init__()
        shape = (setup.batch_size, setup.context, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, dtype=BF16, device=DEVICE) for _ in range(2))
        self.row, self.position, self.mask = setup.batch.req_pool_indices, setup.batch.positions, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch | None) -> Tensor:
        self.k[self.row, self.position] = k
        self.v[self.row, self.position] = v
        keys, values = self.k.transpose(1, 2), self.v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, attn_mask=self.mask, enable_gqa=True)
        return out.flatten(1)


def sdpa(setup: Setup) -> Callable[[int], nn.Module]:
    key = torch.arange(setup.context, device=DEVICE)
    mask = (key < setup.batch.cache_seqlens.unsqueeze(1)).view(setup.batch_size, 1, 1, -1)
    return lambda i: SdpaAttention(setup, mask)


class PeerAttention(nn.Module):
    """A peer's call in the place of a layer: stores the new rows and attends."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor, tuple], Tensor], pages: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.call, self.pages = call, pages

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch | None) -> Tensor:
        return self.call(q, k, v, self.pages).flatten(1)


def store_by_index(setup: Setup, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor]) -> None:
    """New rows into pages by two copies by index, as SGLang stores them."""
    for page, rows in zip(pages, (k, v), strict=True):
        page.view(-1, KV_HEADS, DIM)[setup.batch.out_cache_loc] = rows


class FlashInfer:
    """Its decode wrapper, planned before each step as its users do. New rows by its own op, or else by index."""

    def __init__(self, setup: Setup) -> None:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        self.setup = setup
        size, pages = setup.batch_size, setup.context // PAGE_SIZE
        self.request = torch.arange(size, dtype=torch.int32, device=DEVICE)
        self.position = setup.batch.positions.int()
        self.indptr = torch.arange(size + 1, dtype=torch.int32, device=DEVICE) * pages
        self.indices = setup.page_table.flatten()
        self.last_page_len = torch.full((size,), (setup.length - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=DEVICE)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",  # "auto" would compile another one where only these are installed
            paged_kv_indptr_buffer=torch.empty_like(self.indptr),
            paged_kv_indices_buffer=torch.empty_like(self.indices),
            paged_kv_last_page_len_buffer=torch.empty_like(self.last_page_len),
        )
        try:
            row = torch.zeros(size, KV_HEADS, DIM, dtype=BF16, device=DEVICE)
            self._append(row, row, setup.pool.get_kv_buffer(0))
            self.store, self.note = self._append, "new rows by its append_paged_kv_cache"
        except Exception:  # it compiles that op at first use, which an installation may forbid
            self.store, self.note = functools.partial(store_by_index, setup), "new rows by copies by index"

    def plan(self) -> None:
        bounds = (self.indptr, self.indices, self.last_page_len)
        self.wrapper.plan(*bounds, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=BF16, kv_data_type=BF16)

    def attend(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        return self.wrapper.run(q, pages)

    def store_and_attend(self, q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        self.store(k, v, pages)
        return self.wrapper.run(q, pages)

    def _append(self, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor]) -> None:
        from flashinfer.page import append_paged_kv_cache

        where = (self.request, self.position, pages, self.indices, self.indptr, self.last_page_len)
        append_paged_kv_cache(k, v, *where)


class FlashAttention3:
    """Its decode call after copies by index; metadata once a step, on the device."""

    note = "new rows by copies by index"

    def __init__(self, setup: Setup) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        self.setup, self.run, self.get_metadata = setup, flash_attn_with_kvcache, get_scheduler_metadata

    def plan(self) -> None:
        setup = self.setup
        self.metadata = self.get_metadata(
            batch_size=setup.batch_size,
            max_seqlen_q=1,
            max_seqlen_k=setup.context,
            num_heads=HEADS,
            num_heads_k=KV_HEADS,
            headdim=DIM,
            cache_seqlens=setup.batch.cache_seqlens,
            qkv_dtype=BF16,
            page_size=PAGE_SIZE,
            causal=True,
            num_splits=0,
        )

    def attend(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        step, options = self.setup, {"causal": True, "scheduler_metadata": self.metadata}
        seqlens = step.batch.cache_seqlens
        out = self.run(q.unsqueeze(1), *pages, cache_seqlens=seqlens, page_table=step.page_table, **options)
        return out.squeeze(1)

    def store_and_attend(self, q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        store_by_index(self.setup, k, v, pages)
        return self.attend(q, pages)


PEERS = {"FA3": FlashAttention3, "FlashInfer": FlashInfer}


def each_peer(measure: Callable[[str], None]) -> None:
    for name in PEERS:
        try:
            measure(name)
        except Exception as problem:  # absent, or built for other shapes: say so and go on
            print(f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0][:150]}", flush=True)


# ---- measuring


def submit_us(run: Callable[[], object], repeats: int = 40, calls: int = 1) -> float:
    """Host microseconds of a call, the device idle before; median."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def step_us(run: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of a step among others like it, by events; median."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events))


def kernels_us(run: Callable[[], object], repeats: int = 5) -> tuple[float, int]:
    """Sum of a step's kernel times and their number, by CUPTI: medians over steps are the kernels' own means."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / repeats, len(kernels) // repeats


def record_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


class Bench:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, case: str, peer: str, params: dict, us: float, note: str = "") -> None:
        version = version_of(peer)
        self.records.append(
            Record(case=case, peer=peer, params=params, ms=round(us / 1e3, 6), version=version, note=note)
        )
        print(f"{case:18s} {peer:34s} {us:10.2f} us  {note}", flush=True)

    # -- one call

    def calls(self) -> None:
        """Host time of one layer's attention, outside any model."""
        setup = Setup(2, 4, 256)
        batch, pool = setup.batch, setup.pool
        q = torch.randn(4, HEADS * DIM, dtype=BF16, device=DEVICE)
        k, v = (torch.randn(4, KV_HEADS * DIM, dtype=BF16, device=DEVICE) for _ in range(2))
        layer, layer_without_store = (block.attention for block in setup.model.blocks)  # a layer does one or the other
        params = {"batch": 4, "s_k": 256, "h_q": HEADS, "h_kv": KV_HEADS, "d": DIM}
        setup.backend.init_forward_metadata(batch)
        plan = XqaDecodePlan.allocate(4, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, device=DEVICE)
        ops.xqa_decode_plan(plan, batch.cache_seqlens)
        table = setup.page_table
        rows, out = q.view(4, 1, HEADS, DIM), torch.empty(4, 1, HEADS, DIM, dtype=BF16, device=DEVICE)
        pages = pool.get_kv_buffer(0)

        def decode() -> object:
            return ops.xqa_decode(rows, *pages, table, batch.cache_seqlens, plan, out=out)

        runs: list[tuple[str, Callable[[], object], str]] = []

        def measure(name: str, run: Callable[[], object], note: str = "") -> None:
            for _ in range(10):  # calls that are repeated become graphs of their own
                run()
            runs.append((name, run, note))

        empty = torch.zeros(8, device=DEVICE)
        measure("torch add_", lambda: empty.add_(1), "one kernel: the floor of this host")
        measure("torch new_empty", lambda: q.new_empty(4, HEADS * DIM))
        measure("attnops layer, store and attend", lambda: layer(q, k, v, batch), "RadixAttention to kernels")
        others = itertools.cycle([[t.clone() for t in (q, k, v)] for _ in range(2)])
        kept = collections.deque(maxlen=2)  # outputs, so that the next ones lie elsewhere

        def at_other_addresses() -> None:
            kept.append(layer(*next(others), batch))

        measure(
            "attnops layer, other addresses", at_other_addresses, "store and attend; q, k, v and out move every time"
        )
        measure("attnops layer, attend", lambda: layer_without_store(q, None, None, batch))
        measure("attnops xqa_decode", decode, "the op with its Python wrapper")
        op, tensors = torch.ops.attnops.xqa_decode.default, (table, None, batch.cache_seqlens)
        scratch = (plan.tile_scheduler_metadata, plan.num_splits, plan.out_partial, plan.lse_partial, plan.semaphores)
        arguments = (out, None, rows, *pages, *tensors, *scratch, DIM**-0.5)
        measure("attnops xqa_decode, the op", lambda: op(*arguments), "torch.ops.attnops.xqa_decode")
        options = {"softmax_scale": DIM**-0.5, "causal": True, "window_left": -1, "logit_cap": 0.0, "report": None}
        bound = bind_xqa_layer(out, rows, *pages, table, batch.cache_seqlens, plan, **options)
        call, rest = repeatable(xqa_layer, bound), (q, None, None, None, batch.cache_seqlens, *[None] * 4)
        own = torch.empty_like(q)
        measure("attnops xqa_layer, repeated", lambda: call(own, *rest), "ops.layer_call.repeatable")
        measure(
            "attnops metadata", lambda: setup.backend.init_forward_metadata(batch), "page table and plan, once a step"
        )
        heads = rows.transpose(1, 2)
        keys, values = (torch.randn(4, KV_HEADS, 256, DIM, dtype=BF16, device=DEVICE) for _ in range(2))
        measure("SDPA", lambda: F.scaled_dot_product_attention(heads, keys, values, enable_gqa=True))
        q3, k3, v3 = q.view(4, HEADS, DIM), k.view(4, KV_HEADS, DIM), v.view(4, KV_HEADS, DIM)

        def measure_peer(name: str) -> None:
            peer = PEERS[name](setup)
            peer.plan()
            measure(f"{name}, store and attend", lambda: peer.store_and_attend(q3, k3, v3, pages), peer.note)
            measure(f"{name}, attend", lambda: peer.attend(q3, pages))
            measure(f"{name} plan", peer.plan)

        each_peer(measure_peer)
        # In turns: a virtual machine's host has slow moments, which would otherwise be one contender's.
        times = [[submit_us(run, repeats=12, calls=50) for _, run, _ in runs] for _ in range(5)]
        for (name, _, note), column in zip(runs, zip(*times, strict=True), strict=True):
            spread = f"turns {min(column):.1f} to {max(column):.1f}"
            self.add("call", name, params, statistics.median(column), joined(note, spread))

    # -- a step

    def steps(self, setup: Setup, compiled: bool) -> None:
        model, batch, ids = setup.model, setup.batch, setup.input_ids
        layers = collect_layers(model)

        def eager() -> Tensor:
            setup.backend.init_forward_metadata(batch)
            return model(ids, batch.positions, batch)

        self._host_and_step("eager", "attnops", setup, eager)
        runner = GraphRunner(model, setup.backend, setup.req_to_token, setup.pool, sizes=[setup.batch_size])
        runner.capture(progress=False)
        self._host_and_step("replayed", "attnops", setup, lambda: runner.replay(ids, batch), kernels=True)
        if compiled:
            fast = torch.compile(model, fullgraph=True, dynamic=False)

            def step() -> Tensor:
                setup.backend.init_forward_metadata(batch)
                with forward_context(batch, layers):
                    return fast(ids, batch.positions)

            self._host_and_step("compiled", "attnops", setup, step)
        with setup.attention(sdpa(setup)):

            def plain() -> Tensor:
                return model(ids, batch.positions, batch)

            self._host_and_step("eager", "SDPA", setup, plain)
            graph = record_graph(plain)
            self._host_and_step("replayed", "SDPA", setup, graph.replay, kernels=True)
            del graph

        def measure_peer(name: str) -> None:
            peer = PEERS[name](setup)
            peer.plan()
            with setup.attention(lambda i: PeerAttention(peer.store_and_attend, setup.pool.get_kv_buffer(i))):

                def planned() -> Tensor:
                    peer.plan()
                    return model(ids, batch.positions, batch)

                self._host_and_step("eager", name, setup, planned, peer.note)
                # FlashInfer plans outside the graph, into the buffers that it was given; FA3's metadata is device work.
                inside = name != "FlashInfer"
                graph = record_graph(planned if inside else lambda: model(ids, batch.positions, batch))

                def replay() -> None:
                    if not inside:
                        peer.plan()
                    graph.replay()

                self._host_and_step("replayed", name, setup, replay, peer.note, kernels=True)

        each_peer(measure_peer)

    def _host_and_step(
        self, how: str, peer: str, setup: Setup, run: Callable[[], object], note: str = "", kernels: bool = False
    ) -> None:
        host = submit_us(run, 15)
        self.add(f"{how} host", peer, setup.params, host, joined(f"{host / setup.layers:.2f} us a layer", note))
        step, sums = step_us(run), ""
        if kernels:
            total, count = kernels_us(run)
            sums = f"{count} kernels of {total:.1f} us together: {step / total:.3f}x" if total else "no CUPTI"
        self.add(f"{how} step", peer, setup.params, step, joined(sums, note))

    # -- capture

    def capture(self, setup: Setup) -> None:
        sizes = sorted({max(1, setup.batch_size * i // 20) for i in range(1, 21)})
        runner = GraphRunner(setup.model, setup.backend, setup.req_to_token, setup.pool, sizes=sizes)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = runner.capture(progress=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        note = f"{len(sizes)} sizes, {report.total / 2**20:.0f} MiB"
        self.add("capture", "attnops", {**setup.params, "sizes": len(sizes)}, seconds * 1e6, note)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="call,step,compiled,capture")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compiled-layers", type=int, default=8, help="of the model that inductor compiles")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--name", default="h200-step_overhead")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    groups, bench = arguments.groups.split(","), Bench()

    def save() -> None:
        """After each group: what is measured is kept, whatever happens next."""
        if arguments.write:
            print(write(bench.records, arguments.name))

    if "call" in groups:
        bench.calls()
        save()
    if "step" in groups or "capture" in groups:
        setup = Setup(arguments.layers, arguments.batch, arguments.length)
        if "capture" in groups:
            bench.capture(setup)
        if "step" in groups:
            bench.steps(setup, compiled=False)
        save()
        del setup
    if "compiled" in groups:
        bench.steps(Setup(arguments.compiled_layers, arguments.batch, arguments.length), compiled=True)
        save()


if __name__ == "__main__":
    main()
