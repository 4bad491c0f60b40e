"""The sparse indexer on a GPU: keys and queries in FP8, logits, selection, and a layer's calls of all of them.

Beside them, where they are found: DeepGEMM's logits, `fast_topk_v2` of sgl_kernel, torch.topk. Each contender is a
captured graph of calls, and all replay in turns. A time is the median of a call. DeepGEMM compiles when it is first
called, so its kernels must have been built before where no compiler is. A peer that fails is named and left out.

    python benchmarks/bench_indexer.py [--parts topk,logits,fused,prefill,keys,layer] [--sustained] [--write]
    python benchmarks/bench_indexer.py --dry    small cells, once each, on a CPU too
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from attnops.ops.indexer import SCRATCH_BYTES
from bench_sparse_mla import DEVICE, Call, finished, first_line, in_turns
from records import RESULTS, Record, version_of, write
from torch import Tensor

HEADS, DIM, PAGE, K = 64, 128, 64, 2048
FP8 = torch.float8_e4m3fn
DECODE = [(64, 65536), (64, 16384), (64, 4096), (1, 65536)]
PREFILL = [(8192, 8192), (8192, 65536)]
TOPK = [*DECODE, (8192, 65536), (8192, 8192)]
PROMPT = (1, 65536, 4096)  # of `index_topk`: requests, keys, query tokens
STORED, LAYER = (1, 64, 8192), [(1, 65536), (64, 65536)]
CALLS, ROUNDS = 20, 21


def lengths_of(count: int, length: int) -> torch.Tensor:
    return torch.full((count,), length, dtype=torch.int32, device=DEVICE)


def causal_lengths(rows: int, keys: int) -> torch.Tensor:
    """Of the last `rows` queries of a prompt."""
    return torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=DEVICE)


def random_fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(FP8)


class PagedKeys:
    """A batch's index keys in shuffled pages, and its queries."""

    def __init__(self, batch: int, length: int) -> None:
        pages = batch * length // PAGE
        self.pages = torch.empty(pages, PAGE, DIM + 4, dtype=torch.uint8, device=DEVICE)
        flat = self.pages.view(pages, -1)
        for first in range(0, pages, 4096):
            part = flat[first : first + 4096]
            part[:, : PAGE * DIM] = random_fp8(len(part), PAGE * DIM).view(torch.uint8)
            part[:, PAGE * DIM :] = torch.rand(len(part), PAGE, device=DEVICE).view(torch.uint8)
        self.table = torch.randperm(pages, device=DEVICE).int().view(batch, -1)
        self.q, self.weights = random_fp8(batch, 1, HEADS, DIM), torch.randn(batch, HEADS, device=DEVICE)
        self.lengths = lengths_of(batch, length)


Digest = Callable[[object], Tensor]


def in_rows(lengths: Tensor) -> Digest:
    """Of logits: what rows see, the rest as 0."""

    def digest(logits: object) -> Tensor:
        assert isinstance(logits, Tensor)
        seen = torch.arange(logits.shape[1], device=logits.device) < lengths.view(-1, 1)
        return torch.where(seen, logits, torch.zeros_like(logits))

    return digest


def selected(logits: Tensor) -> Digest:
    """Of selected positions: the sum of their logits by row, whatever their order."""

    def digest(chosen: object) -> Tensor:
        assert isinstance(chosen, Tensor)
        values = logits.gather(1, chosen.clamp(min=0).long())
        return torch.where(chosen >= 0, values, torch.zeros_like(values)).double().sum(1)

    return digest


def difference(got: Tensor, ours: Tensor) -> float:
    columns = min(got.shape[-1], ours.shape[-1])
    got, ours = got[..., :columns].double(), ours[..., :columns].double()
    return ((got - ours).norm() / ours.norm().clamp(min=1e-30)).item()


class Peers:
    """Who is there to be measured beside."""

    def __init__(self) -> None:
        self.deep_gemm = self._found("DeepGEMM", "deep_gemm")
        sgl_kernel = self._found("fast_topk", "sgl_kernel")
        self.fast_topk = getattr(sgl_kernel, "fast_topk_v2", None)
        if sgl_kernel is not None and self.fast_topk is None:
            print("no fast_topk: sgl_kernel has no fast_topk_v2", flush=True)

    @staticmethod
    def _found(peer: str, module: str):  # type: ignore[no-untyped-def]
        try:
            return importlib.import_module(module)
        except Exception as error:  # also a library that does not load
            print(f"no {peer}: {first_line(error)}", flush=True)
            return None

    def topk(self, logits: Tensor, lengths: Tensor, k: int) -> dict[str, Call]:
        """`fast_topk_v2` takes k 2048 alone; torch.topk sees columns that a row does not, and so full rows alone."""
        calls: dict[str, Call] = {}
        if self.fast_topk is not None and k == 2048:
            calls["fast_topk"] = partial(self.fast_topk, logits, lengths, k)
        if logits.shape[0] <= 64 and bool((lengths == logits.shape[1]).all()) and k <= logits.shape[1]:
            calls["torch.topk"] = lambda: torch.topk(logits, k, dim=1)[1]
        return calls

    def paged_logits(self, q: Tensor, pages: Tensor, table: Tensor, weights: Tensor, lengths: Tensor, n: int) -> dict:
        """DeepGEMM's: pages of 64 and 32 or 64 heads; its schedule is made before. `lengths`: ``[B, S_q]``.

        Versions from 0.2 of sgl-deep-gemm on have one name for FP8 and FP4, and clean nothing.
        """
        if self.deep_gemm is None or pages.shape[1] != 64 or q.shape[2] not in (32, 64):
            return {}
        metadata = self.deep_gemm.get_paged_mqa_logits_metadata
        try:
            schedule = finished(
                lambda: metadata(lengths, 64, torch.cuda.get_device_properties(0).multi_processor_count)
            )
        except Exception as error:
            print(f"DeepGEMM makes no schedule of {list(lengths.shape)}: {first_line(error)}", flush=True)
            return {}
        given = (q, pages.unsqueeze(2), weights, lengths, table, schedule, n)
        if hasattr(self.deep_gemm, "fp8_paged_mqa_logits"):
            return {"DeepGEMM": lambda: self.deep_gemm.fp8_paged_mqa_logits(*given, clean_logits=False)}
        return {"DeepGEMM": lambda: self.deep_gemm.fp8_fp4_paged_mqa_logits(*given)}

    def ragged_logits(self, q: Tensor, k: Tensor, scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> dict:
        """DeepGEMM's, of 32 or 64 heads. `start` is 0 everywhere: newer versions write a row from its start on."""
        if self.deep_gemm is None or q.shape[1] not in (32, 64):
            return {}
        given = (q, (k, scale), weights, start, end)
        if hasattr(self.deep_gemm, "fp8_mqa_logits"):
            return {"DeepGEMM": lambda: self.deep_gemm.fp8_mqa_logits(*given, clean_logits=False)}
        return {"DeepGEMM": lambda: self.deep_gemm.fp8_fp4_mqa_logits(*given, k.shape[0])}


class IndexerBench:
    def __init__(self, sustained: bool) -> None:
        self.sustained, self.records, self.peers = sustained, [], Peers()

    def cell(
        self,
        case: str,
        params: dict,
        contenders: dict[str, Call],
        calls: int,
        num_bytes: int = 0,
        digest: Digest | None = None,
    ) -> None:
        """Times `calls` calls of each contender in turns, and notes how far a peer's answer is from ours."""
        notes = {}
        for name, call in list(contenders.items()):
            try:
                answer = finished(call)
                if name == "attnops" and digest is not None:
                    ours = digest(answer).clone()
                elif digest is not None:
                    notes[name] = f"differs from ours by {difference(digest(answer), ours):.1e}"
            except Exception as error:  # a peer that refuses the cell is named, and the others are timed
                if name == "attnops":
                    raise
                print(f"{case} {name} refused {params}: {first_line(error)}", flush=True)
                del contenders[name]
        timed = {name: [call] * calls for name, call in contenders.items()}
        for state, times in in_turns(timed, self.sustained, ROUNDS).items():
            line = []
            for name, ms in times.items():
                gbs = num_bytes / ms / 1e6 if num_bytes else None
                record = Record(case, name, params, ms=ms, gbs=gbs, state=state, version=version_of(name))
                record.note = notes.get(name, "")
                self.records.append(record)
                rate = f" {gbs:.0f} GB/s" if gbs else ""
                line.append(f"{name} {ms * 1e3:.2f} us{rate} {record.note}".rstrip())
            print(f"{case} {state} {params}: {', '.join(line)}", flush=True)

    def topk(self) -> None:
        for rows, keys in TOPK:
            logits = torch.randn(rows, keys, device=DEVICE)
            lengths = causal_lengths(rows, keys) if rows > 64 else lengths_of(rows, keys)
            out = torch.empty(rows, K, dtype=torch.int32, device=DEVICE)
            ours = {"attnops": partial(ops.topk_select, logits, lengths, K, indices=out)}
            contenders = ours | self.peers.topk(logits, lengths, K)
            params = {"rows": rows, "keys": keys, "k": K}
            self.cell("topk_select", params, contenders, CALLS if rows <= 64 else 3, digest=selected(logits))

    def logits(self) -> None:
        for batch, length in DECODE:
            keys = PagedKeys(batch, length)
            out = torch.empty(batch, length, device=DEVICE)
            given = (keys.q, keys.pages, keys.table, keys.weights, keys.lengths[:, None])
            contenders = {"attnops": partial(ops.index_logits_paged, *given, logits=out)}
            contenders |= self.peers.paged_logits(*given, length)
            params, size = {"batch_size": batch, "keys": length}, batch * length * (DIM + 8)
            self.cell("index_logits_paged", params, contenders, CALLS, size, in_rows(keys.lengths))

    def fused(self) -> None:
        """`index_topk`, over a flat scratch as it allocates one.

        Beside it DeepGEMM's logits and fast_topk, one after the other: they end with positions, ours with slots.
        """
        for batch, length, tokens in [(*cell, 1) for cell in DECODE] + [PROMPT]:
            keys = PagedKeys(batch, length)
            q = random_fp8(batch, tokens, HEADS, DIM)
            weights = torch.randn(batch * tokens, HEADS, device=DEVICE)
            ends = keys.lengths[:, None] - torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device=DEVICE)
            chosen = torch.empty(batch * tokens, K, dtype=torch.int32, device=DEVICE)
            scratch = torch.empty(SCRATCH_BYTES // 4, device=DEVICE)
            given = (q, keys.pages, keys.table, weights, ends)
            contenders: dict[str, Call] = {
                "attnops": partial(ops.index_topk, *given, K, indices=chosen, scratch=scratch)
            }
            theirs = self.peers.paged_logits(*given, length) if tokens == 1 else {}
            if theirs and self.peers.fast_topk is not None:
                select, seen = self.peers.fast_topk, ends.flatten()
                contenders["DeepGEMM, fast_topk"] = lambda f=theirs["DeepGEMM"], s=select, n=seen: s(f(), n, K)
            params = {"batch_size": batch, "keys": length, "tokens": tokens, "k": K}
            self.cell("index_topk", params, contenders, CALLS if tokens == 1 else 1)

    def prefill(self) -> None:
        for rows, count in PREFILL:
            q, weights = random_fp8(rows, HEADS, DIM), torch.randn(rows, HEADS, device=DEVICE)
            k, scale = random_fp8(count, DIM), torch.rand(count, device=DEVICE)
            start, end = lengths_of(rows, 0), causal_lengths(rows, count)
            out = torch.empty(rows, count, device=DEVICE)
            given = (q, k, scale, weights, start, end)
            ours, theirs = partial(ops.index_logits, *given, logits=out), self.peers.ragged_logits(*given)
            params = {"rows": rows, "keys": count, "heads": HEADS}
            self.cell("index_logits", params, {"attnops": ours, **theirs}, 3, digest=in_rows(end))
            chosen = torch.empty(rows, K, dtype=torch.int32, device=DEVICE)
            select = partial(ops.topk_select, out, end, K, indices=chosen)
            contenders: dict[str, Call] = {"attnops": lambda c=ours, s=select: (c(), s())[1]}
            if theirs and self.peers.fast_topk is not None:
                contenders["DeepGEMM, fast_topk"] = lambda f=theirs["DeepGEMM"], n=end: self.peers.fast_topk(f(), n, K)
            self.cell("logits and selection", params, contenders, 3, digest=selected(out))

    def keys(self) -> None:
        for tokens in STORED:
            pages = torch.zeros(max(STORED) // PAGE + 1, PAGE, DIM + 4, dtype=torch.uint8, device=DEVICE)
            k = torch.randn(tokens, DIM, device=DEVICE).bfloat16()
            q, weights = (
                torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16(),
                torch.randn(tokens, HEADS, device=DEVICE),
            )
            store = partial(ops.store_index_k, pages, k, torch.arange(tokens, device=DEVICE))
            self.cell("store_index_k", {"tokens": tokens}, {"attnops": store}, CALLS)
            out, folded = torch.empty_like(q, dtype=FP8), torch.empty_like(weights)
            quantize = partial(ops.quantize_index_q, q, weights, scale=0.01, q_fp8=out, weights_out=folded)
            self.cell("quantize_index_q", {"tokens": tokens, "heads": HEADS}, {"attnops": quantize}, CALLS)

    def layer(self) -> None:
        """What a layer does before attention: store, quantize, logits, selection."""
        for batch, length in LAYER:
            keys = PagedKeys(batch, length)
            k, q = (torch.randn(batch, *shape, device=DEVICE).bfloat16() for shape in ((DIM,), (HEADS, DIM)))
            slots = (keys.table[:, -1].long() + 1) * PAGE - 1
            logits, chosen = (
                torch.empty(batch, length, device=DEVICE),
                torch.empty(batch, K, dtype=torch.int32, device=DEVICE),
            )
            folded = torch.empty_like(keys.weights)

            def call(keys=keys, k=k, q=q, slots=slots, logits=logits, chosen=chosen, folded=folded) -> None:
                ops.store_index_k(keys.pages, k, slots)
                ops.quantize_index_q(q, keys.weights, scale=0.01, q_fp8=keys.q.squeeze(1), weights_out=folded)
                ops.index_logits_paged(keys.q, keys.pages, keys.table, folded, keys.lengths[:, None], logits=logits)
                ops.topk_select(logits, keys.lengths, K, page_table=keys.table, page_size=PAGE, indices=chosen)

            self.cell("a layer's indexer", {"batch_size": batch, "keys": length}, {"attnops": call}, 10)


SMALL = {
    "K": 64,
    "DECODE": [(2, 512), (1, 1024)],
    "PREFILL": [(70, 128)],
    "TOPK": [(2, 512), (70, 512)],
    "PROMPT": (1, 512, 16),
    "STORED": (1, 64),
    "LAYER": [(2, 512)],
    "CALLS": 2,
    "ROUNDS": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small cells, a round each")
    parser.add_argument("--sustained", action="store_true", help="also the second half of 0.7 s without a pause")
    parser.add_argument("--parts", default="topk,logits,fused,prefill,keys,layer", help="what to measure")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.dry:
        globals().update(SMALL)
    bench = IndexerBench(options.sustained)
    for part in options.parts.split(","):
        getattr(bench, part)()
        torch.cuda.empty_cache()
        if options.write and not options.dry:
            write(bench.records, "h200-indexer", Path(options.out))


if __name__ == "__main__":
    main()
