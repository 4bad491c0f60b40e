"""Sparse MLA on a GPU: decode and prefill over lists of rows, alternately with FlashMLA and FA3 where they are found.

    python benchmarks/bench_sparse_mla.py [--parts decode,v4,bf16,prefill,layer,invariant] [--sustained] [--write]
    python benchmarks/bench_sparse_mla.py --dry    small cells, once each, on a CPU too

Lists are 2048 of 16384 rows a request, at random, ascending. Each contender is a captured graph of calls over some sets
of queries and lists; plans and schedules are made before. Contenders replay in turns. A time is the median of a call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attnops import ops, reference
from attnops.metadata import SparseMlaPlan
from attnops.ops.sparse_mla import sparse_mla_prefill_scratch_size
from attnops.plan_buffers import MLA_INVARIANT_SPLIT_TOKENS
from records import RESULTS, Record, version_of, write
from torch import Tensor

TOPK, CONTEXT, REQUESTS, PAGE = 2048, 16384, 64, 64
SCALE, SETS, ROUNDS, SUSTAINED_SECONDS = 0.04, 3, 21, 0.7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# (heads, requests, query tokens)
DECODE = [(128, 64, 1), (128, 128, 1), (128, 64, 2), (64, 16, 1), (64, 64, 1), (64, 128, 1)]
DECODE += [(16, 64, 1), (16, 128, 1), (8, 64, 1), (8, 128, 1), (16, 1, 1), (64, 1, 1), (128, 1, 1)]
# (heads, requests, width of the window, of the compressed entries' list)
V4 = [(64, 64, 128, 512), (128, 128, 128, 1024), (64, 16, 128, 8192), (16, 64, 128, 512), (64, 1, 128, 512)]
# (kind of rows, heads, rows of the pool)
PREFILL = [("bf16", 128, 8192), ("bf16", 64, 8192), ("bf16", 128, 32768), ("bf16", 64, 32768), ("bf16", 16, 8192)]
PREFILL += [("fp8", 128, 8192), ("fp8", 64, 8192), ("fp8", 16, 8192)]
# (heads, requests, keys)
LAYER = [(16, 1, 65536), (16, 64, 65536)]
# What batch-invariant plans cost: (kind of rows, heads, requests)
INVARIANT = [("fp8", 128, 64), ("fp8", 64, 16), ("fp8", 16, 64), ("fp8", 128, 1), ("bf16", 64, 64), ("bf16", 16, 1)]
V4_ROWS, PREFILL_TOKENS = 2**18, 4096
Call = Callable[[], object]


class Calls:
    """What stands for a graph of calls on a CPU."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def finished(call: Call) -> Any:
    """What a first call returns. An error of its kernels is raised here, not in whatever runs next."""
    answer = call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return answer


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph | Calls:
    if DEVICE == "cpu":
        return Calls(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph | Calls) -> float:
    if DEVICE == "cpu":
        since = time.perf_counter()
        graph.replay()
        return 1e3 * (time.perf_counter() - since)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turns(
    contenders: dict[str, list[Call]], sustained: bool, rounds: int | None = None
) -> dict[str, dict[str, float]]:
    """Milliseconds of a call by state and contender."""
    graphs = {}
    for name, calls in contenders.items():
        try:
            graphs[name] = captured(calls)
        except Exception as error:  # a peer that cannot be captured is named, and the others are timed
            if name.startswith("attnops"):
                raise
            print(f"{name} is not captured: {first_line(error)}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS if rounds is None else rounds):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph) / len(contenders[name]))
    result = {"burst": {name: statistics.median(values) for name, values in times.items()}}
    if sustained:
        result["sustained"] = {}
        for name, graph in graphs.items():
            time.sleep(0.2)
            values, until = [], time.monotonic() + SUSTAINED_SECONDS
            while time.monotonic() < until:
                values.append(milliseconds(graph) / len(contenders[name]))
            result["sustained"][name] = statistics.median(values[len(values) // 2 :])
        time.sleep(0.2)
    return result


def paged_rows(kind: str, rows: int) -> Tensor:
    """``[P, 64, row]``: "fp8", 656 bytes; "v4", 584 bytes; "bf16", 576 values."""
    pages = rows // PAGE
    if kind == "bf16":
        return torch.randn(pages, PAGE, 576, device=DEVICE, dtype=BF16) * 0.3
    if kind == "fp8":
        part = reference.pack_mla_fp8_rows(torch.randn(4096, 576, device=DEVICE) * 0.3)
        return part.repeat(rows // len(part), 1).view(pages, PAGE, 656)
    pool = torch.zeros(pages, -(-PAGE * 584 // 576) * 576, device=DEVICE, dtype=torch.uint8)
    data = pool[:, : PAGE * 576].view(pages, PAGE, 576)
    for first in range(0, pages, 1024):
        some = data[first : first + 1024]
        some[..., :448] = torch.randn(*some.shape[:2], 448, device=DEVICE).to(FP8).view(torch.uint8)
        some[..., 448:] = (torch.randn(*some.shape[:2], 64, device=DEVICE) * 0.3).to(BF16).view(torch.uint8)
    pool[:, PAGE * 576 : PAGE * 584] = torch.randint(123, 127, (pages, PAGE * 8), device=DEVICE, dtype=torch.uint8)
    return pool[:, : PAGE * 584].view(pages, PAGE, 584)


def lists_of(batch: int, tokens: int, width: int, rows: int, pool_rows: int) -> Tensor:
    """int32 ``[batch, tokens, width]``, ascending rows of each request, which has `rows` of the pool."""
    chosen = torch.cat(
        [torch.rand(min(256, batch * tokens - i), rows, device=DEVICE).topk(width)[1].sort()[0].int()
         for i in range(0, batch * tokens, 256)]
    )  # fmt: skip
    first = torch.arange(batch, device=DEVICE, dtype=torch.int32) % (pool_rows // rows) * rows
    return chosen.view(batch, tokens, width) + first.view(batch, 1, 1)


def relative_error(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact.double()).norm() / exact.double().norm()).item()


class SparseBench:
    def __init__(self, sustained: bool) -> None:
        self.sustained = sustained
        self.records: list[Record] = []
        self.peers: set[str] = set()
        for peer, module in (("FlashMLA", "sgl_kernel.flash_mla"), ("FA3", "sgl_kernel.flash_attn")):
            try:
                __import__(module)
                self.peers.add(peer)
            except Exception as error:  # also a library that does not load
                print(f"no {peer}: {first_line(error)}", flush=True)

    def cell(self, case: str, params: dict, contenders: dict[str, list[Call]], work: float = 0.0) -> None:
        """Times the contenders' calls and notes how far the first call of each is from ours. `work`: operations."""
        ours, notes = None, {}
        for name, calls in list(contenders.items()):
            try:
                result = finished(calls[0])
                first = (result[0] if isinstance(result, (tuple, list)) else result).clone()
                if name == "attnops":
                    ours = first
                elif ours is not None:
                    theirs = first.view(-1, first.shape[-2], 512)[:, : params.get("heads", 0)]
                    notes[name] = f"differs from ours by {relative_error(theirs, ours.view_as(theirs)):.1e}"
            except Exception as error:  # a peer that refuses the cell is named, and the others are timed
                print(f"{case} {name} refused {params}: {first_line(error)}", flush=True)
                del contenders[name]
        for state, times in in_turns(contenders, self.sustained).items():
            line = []
            for name, ms in times.items():
                tflops = work / ms / 1e9 if work else None
                note = notes.get(name, "")
                self.records.append(
                    Record(case, name, params, ms=ms, tflops=tflops, state=state, note=note, version=version_of(name))
                )
                line.append(f"{name} {ms * 1e3:.1f} us" + (f" {tflops:.0f} TFLOP/s" if work else "") + f" {note}")
            print(f"{case} {state} {params}: " + ", ".join(line), flush=True)

    def decode(self) -> None:
        pool = paged_rows("fp8", REQUESTS * CONTEXT)
        for heads, batch, tokens in DECODE:
            ours, theirs = [], []
            for _ in range(SETS):
                q = torch.randn(batch, tokens, heads, 576, device=DEVICE, dtype=BF16) * 0.2
                indices = lists_of(batch, tokens, TOPK, CONTEXT, REQUESTS * CONTEXT)
                ours.append(self.our_decode(q, pool, indices))
                theirs.append(self.flash_mla(q, pool, indices))
            params = {"heads": heads, "batch_size": batch, "tokens": tokens, "k": TOPK, "rows": "656 bytes"}
            contenders = {"attnops": ours, **({"FlashMLA": theirs} if "FlashMLA" in self.peers else {})}
            self.cell("sparse_mla_decode", params, contenders, 2.0 * batch * tokens * heads * TOPK * 1088)

    def v4(self) -> None:
        rows = V4_ROWS
        pool, extra_pool = paged_rows("v4", rows), paged_rows("v4", 2 * rows)
        for heads, batch, width, extra in V4:
            ours, theirs = [], []
            sinks = torch.randn(heads, device=DEVICE)
            for _ in range(SETS):
                q = torch.randn(batch, 1, heads, 512, device=DEVICE, dtype=BF16) * 0.2
                window = lists_of(batch, 1, width, 2048, rows)
                entries = lists_of(batch, 1, extra, CONTEXT, 2 * rows)
                more = {"extra_kv_pages": extra_pool, "extra_indices": entries, "sinks": sinks}
                ours.append(self.our_decode(q, pool, window, **more))
                theirs.append(self.flash_mla(q, pool, window, sinks, extra_pool, entries))
            params = {"heads": heads, "batch_size": batch, "k": width, "extra_k": extra, "rows": "584 bytes"}
            contenders = {"attnops": ours, **({"FlashMLA": theirs} if "FlashMLA" in self.peers else {})}
            self.cell("sparse_mla_decode, V4", params, contenders, 2.0 * batch * heads * (width + extra) * 1024)

    def bf16(self) -> None:
        pool = paged_rows("bf16", REQUESTS * CONTEXT // 2)
        for heads in (64, 128):
            ours, theirs = [], []
            for _ in range(SETS):
                q = torch.randn(REQUESTS, 1, heads, 576, device=DEVICE, dtype=BF16) * 0.2
                indices = lists_of(REQUESTS, 1, TOPK, CONTEXT // 2, REQUESTS * CONTEXT // 2)
                ours.append(self.our_decode(q, pool, indices))
                theirs.append(self.fa3(q, pool, indices))
            params = {"heads": heads, "batch_size": REQUESTS, "k": TOPK, "rows": "576 bf16"}
            contenders = {"attnops": ours, **({"FA3, page 1": theirs} if "FA3" in self.peers else {})}
            self.cell("sparse_mla_decode, bf16", params, contenders, 2.0 * REQUESTS * heads * TOPK * 1088)

    def prefill(self) -> None:
        for kind, heads, rows in PREFILL:
            self.prefill_cell(kind, heads, rows)

    def prefill_cell(self, kind: str, heads: int, rows: int, tokens: int | None = None) -> None:
        tokens = PREFILL_TOKENS if tokens is None else tokens
        pool = paged_rows(kind, rows)
        q = torch.randn(tokens, heads, 576, device=DEVICE, dtype=BF16) * 0.2
        indices = lists_of(1, tokens, TOPK, rows, rows).view(tokens, TOPK)
        out = q.new_empty(tokens, heads, 512)
        options = {"softmax_scale": SCALE, "out": out, "scratch": lent(q, pool, TOPK)}
        contenders: dict[str, list[Call]] = {"attnops": [lambda: ops.sparse_mla_prefill(q, pool, indices, **options)]}
        if "FlashMLA" in self.peers:
            from sgl_kernel.flash_mla import flash_mla_sparse_fwd

            wide = padded(q, 1)
            kv = pool.view(-1, 1, 576) if kind == "bf16" else dequantized(pool)
            name = "FlashMLA" if kind == "bf16" else "FlashMLA, bf16 rows"
            contenders[name] = [lambda: flash_mla_sparse_fwd(wide, kv, indices.unsqueeze(1), SCALE)]
        params = {"heads": heads, "tokens": tokens, "keys": rows, "k": TOPK, "rows": kind}
        self.cell("sparse_mla_prefill", params, contenders, 2.0 * tokens * heads * TOPK * 1088)

    def layer(self) -> None:
        for heads, batch, keys in LAYER:
            self.layer_cell(heads, batch, keys)

    def layer_cell(self, heads: int, batch: int, keys: int) -> None:
        """Store, quantize, logits, selection and attention of a layer, rows of 656 bytes."""
        pages = batch * keys // PAGE
        pool, index_pages = (
            paged_rows("fp8", batch * keys),
            torch.zeros(pages, PAGE, 132, device=DEVICE, dtype=torch.uint8),
        )
        for first in range(0, pages, 4096):
            flat = index_pages.view(pages, -1)[first : first + 4096]
            flat[:, : PAGE * 128] = torch.randn(len(flat), PAGE * 128, device=DEVICE).to(FP8).view(torch.uint8)
            flat[:, PAGE * 128 :] = torch.rand(len(flat), PAGE, device=DEVICE).view(torch.uint8)
        table = torch.randperm(pages, device=DEVICE).int().view(batch, -1)
        lengths = torch.full((batch,), keys, device=DEVICE, dtype=torch.int32)
        slots = (table[:, -1].long() + 1) * PAGE - 1
        k, latent = (torch.randn(batch, size, device=DEVICE, dtype=BF16) for size in (128, 576))
        index_q = torch.randn(batch, 64, 128, device=DEVICE, dtype=BF16)
        weights = torch.randn(batch, 64, device=DEVICE)
        q_fp8, folded = torch.empty_like(index_q, dtype=FP8), torch.empty_like(weights)
        logits = torch.empty(batch, keys, device=DEVICE)
        chosen = torch.empty(batch, TOPK, device=DEVICE, dtype=torch.int32)
        q = torch.randn(batch, 1, heads, 576, device=DEVICE, dtype=BF16) * 0.2
        attend = self.our_decode(q, pool, chosen.view(batch, 1, TOPK))

        def call() -> object:
            ops.store_index_k(index_pages, k, slots)
            ops.store_mla_kv(pool, latent, slots)
            ops.quantize_index_q(index_q, weights, scale=0.01, q_fp8=q_fp8, weights_out=folded)
            ops.index_logits_paged(q_fp8[:, None], index_pages, table, folded, lengths[:, None], logits=logits)
            ops.topk_select(logits, lengths, TOPK, page_table=table, page_size=PAGE, indices=chosen)
            return attend()

        self.cell("a layer", {"heads": heads, "batch_size": batch, "keys": keys}, {"attnops": [call] * 5})

    def invariant(self) -> None:
        """Plans of equal pieces, whose bits no other request changes, beside balanced ones."""
        for kind, heads, batch in INVARIANT:
            rows = REQUESTS * CONTEXT // (1 if kind == "fp8" else 2)
            pool, calls = paged_rows(kind, rows), {"attnops": [], "attnops, batch-invariant": []}
            for _ in range(SETS):
                q = torch.randn(batch, 1, heads, 576, device=DEVICE, dtype=BF16) * 0.2
                indices = lists_of(batch, 1, TOPK, CONTEXT // 2, rows)
                for name, made in calls.items():
                    fixed = MLA_INVARIANT_SPLIT_TOKENS if name != "attnops" else 0
                    made.append(self.our_decode(q, pool, indices, fixed))
            params = {"heads": heads, "batch_size": batch, "k": TOPK, "rows": kind}
            self.cell("sparse_mla_decode, batch-invariant", params, calls, 2.0 * batch * heads * TOPK * 1088)

    def our_decode(self, q: Tensor, pool: Tensor, indices: Tensor, fixed: int = 0, **more: Any) -> Call:
        batch, tokens, heads, _ = q.shape
        extra = more["extra_indices"].shape[-1] if more else 0
        shape = {"num_q_heads": heads, "topk": indices.shape[-1], "extra_topk": extra, "seqlen_q": tokens}
        plan = SparseMlaPlan.allocate(batch, **shape, fixed_split_tokens=fixed, device=DEVICE)
        ops.sparse_mla_plan(plan)
        out = q.new_empty(batch, tokens, heads, 512)
        return lambda: ops.sparse_mla_decode(q, pool, indices, plan, softmax_scale=SCALE, out=out, **more)

    def flash_mla(
        self,
        q: Tensor,
        pool: Tensor,
        indices: Tensor,
        sinks: Tensor | None = None,
        *extra: Tensor,
        lengths: Tensor | None = None,
    ) -> Call:
        """Their call, which makes its schedule when it first runs. Heads are padded to 64.

        `lengths`: ``[B, S_q]`` of the last list, of which a request's longest is given.
        """
        if "FlashMLA" not in self.peers:
            return lambda: None
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        schedule, _ = get_mla_metadata()
        wide = padded(q, 2)
        options: dict = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "indices": indices}
        if extra:
            assert sinks is not None
            sinks = padded(sinks, 0)
            entries, lists = extra
            options |= {"attn_sink": sinks, "extra_k_cache": by_head(entries), "extra_indices_in_kvcache": lists}
        if lengths is not None:
            options["extra_topk_length" if extra else "topk_length"] = lengths.amax(1)
        return lambda: flash_mla_with_kvcache(wide, by_head(pool), None, None, 512, schedule, **options)

    def fa3(self, q: Tensor, pool: Tensor, indices: Tensor) -> Call:
        """The list as a table of pages of one row."""
        if "FA3" not in self.peers:
            return lambda: None
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        rows = pool.view(-1, 1, 1, 576)
        q_nope, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
        lengths = torch.full((len(q),), TOPK, device=DEVICE, dtype=torch.int32)
        options: dict = {"qv": q_nope, "cache_seqlens": lengths, "page_table": indices.view(len(q), -1)}
        options |= {"softmax_scale": SCALE, "causal": True, "num_splits": 0}
        return lambda: flash_attn_with_kvcache(q_pe, rows[..., 512:], rows[..., :512], **options)


def by_head(pool: Tensor) -> Tensor:
    return pool.view(FP8).unsqueeze(2)


def dequantized(pool: Tensor) -> Tensor:
    """Rows of 656 bytes as bf16 ``[rows, 1, 576]``, for peers that read no others."""
    return reference.unpack_mla_fp8_rows(pool.view(-1, 656)).to(BF16).unsqueeze(1)


def lent(q: Tensor, pool: Tensor, topk: int) -> Tensor | None:
    """Scratch of a prefill over rows of 656 bytes, where it is of use."""
    if pool.dtype != torch.uint8:
        return None
    size = sparse_mla_prefill_scratch_size(q.shape[0], q.shape[1], topk, pool.shape[0] * pool.shape[1])
    return q.new_empty(size, dtype=torch.uint8) if size > 0 else None


def padded(x: Tensor, dim: int) -> Tensor:
    """With 64 or 128 heads in `dim`, the new ones zero."""
    heads = x.shape[dim]
    to = 64 if heads <= 64 else 128
    if heads == to:
        return x
    shape = list(x.shape)
    shape[dim] = to
    wide = x.new_zeros(shape)
    wide.narrow(dim, 0, heads).copy_(x)
    return wide


SMALL = {
    "TOPK": 64,
    "CONTEXT": 4096,
    "REQUESTS": 2,
    "SETS": 1,
    "ROUNDS": 1,
    "SUSTAINED_SECONDS": 0.01,
    "DECODE": [(4, 2, 1), (4, 1, 2)],
    "V4": [(4, 2, 32, 64)],
    "PREFILL": [("bf16", 4, 4096), ("fp8", 4, 4096)],
    "LAYER": [(4, 1, 4096)],
    "INVARIANT": [("fp8", 4, 2), ("bf16", 4, 1)],
    "V4_ROWS": 4096,
    "PREFILL_TOKENS": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="decode,v4,bf16,prefill,layer,invariant", help="what to measure")
    parser.add_argument("--sustained", action="store_true", help="also the second half of 0.7 s without a pause")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="small cells, a round each")
    options = parser.parse_args()
    if options.dry:
        globals().update(SMALL)
    bench = SparseBench(options.sustained)
    for part in options.parts.split(","):
        getattr(bench, part)()
        torch.cuda.empty_cache()
        if options.write and not options.dry:
            write(bench.records, "h200-sparse_mla", Path(options.out))


if __name__ == "__main__":
    main()
