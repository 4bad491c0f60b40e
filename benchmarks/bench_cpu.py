"""CPU attention: attnops against `torch_native`, PyTorch's SDPA and the machine's own read bandwidth, in one run.

    python benchmarks/bench_cpu.py [--rounds 7] [--only decode,prefill,mla] [--write] [--processor-time]

Implementations of a cell are timed alternately, round by round, so that what disturbs the machine disturbs all of them;
the median counts. `gbs` and `tflops` count what the cell needs: each K and V byte once, visible products only.
With `--processor-time` a time is that of the process's threads, over their number: for a machine that others use, too.
Set OMP_WAIT_POLICY=passive then, or threads that wait count as ones that work. Threads that take turns on a processor
read memory faster than threads that run at a time, so the sweep, and shares of it, are of no use there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attnops import ops
from attnops.backends import get_backend_class
from attnops.layers import RadixAttention
from attnops.metadata import FmhaPlan, MlaDecodePlan, XqaDecodePlan
from attnops.pools import MHATokenToKVPool
from attnops.reference import mla_attention, paged_attention, ragged_attention
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from records import Record, cpu_name, write
from torch import Tensor

HEADS, KV_HEADS, DIM = 32, 8, 128
BF16 = torch.bfloat16


@dataclass
class Cell:
    """One problem and its implementations, the first of which is attnops."""

    case: str
    params: dict
    runs: dict[str, Callable[[], Tensor]]
    expected: Callable[[], Tensor]  # in float64
    gigabytes: float = 0.0
    teraflops: float = 0.0


def shuffled_pages(batch: int, length: int, page_size: int) -> tuple[Tensor, int]:
    """Page table int32 ``[B, pages]`` over pages in random order, and how many there are."""
    pages = -(-length // page_size)
    order = torch.randperm(batch * pages, dtype=torch.int32)
    return order.view(batch, pages).contiguous(), batch * pages


def native_decode(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, q: Tensor) -> Callable[[], Tensor]:
    """The torch_native backend behind a RadixAttention layer, over the same pages."""
    batch, page_size = q.shape[0], k.shape[1]
    max_seqlen = table.shape[1] * page_size
    spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=BF16, page_size=page_size)
    backend = get_backend_class("torch_native")(spec, Limits(max_batch_size=batch, max_seqlen=max_seqlen))
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0)
    pool = MHATokenToKVPool(k.shape[0] * page_size, page_size, BF16, KV_HEADS, DIM, 1)
    pool.get_kv_buffer(0)[0][: k.shape[0]].copy_(k)
    pool.get_kv_buffer(0)[1][: v.shape[0]].copy_(v)
    slots = table.repeat_interleave(page_size, 1) * page_size + torch.arange(page_size).repeat(table.shape[1])
    step = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(batch),
        cache_seqlens=lengths,
        num_tokens=batch,
        req_to_token=slots.to(torch.int32),
        max_cache_seqlen=max_seqlen,
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(step)
    return lambda: layer(q.flatten(1), None, None, step, save_kv_cache=False).view(batch, 1, HEADS, DIM)


def gathered_sdpa(k: Tensor, v: Tensor, table: Tensor, q: Tensor) -> Callable[[], Tensor]:
    """What one writes without a paged kernel: gather the pages, then SDPA. Equal lengths only."""
    index = table.long()

    def run() -> Tensor:
        keys, values = (pages[index].flatten(1, 2).transpose(1, 2) for pages in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)

    return run


def decode_cell(batch: int, length: int, page_size: int, kv_dtype: torch.dtype = BF16) -> Cell:
    table, num_pages = shuffled_pages(batch, length, page_size)
    k, v = (torch.randn(num_pages, page_size, KV_HEADS, DIM).to(kv_dtype) for _ in range(2))
    q = torch.randn(batch, 1, HEADS, DIM, dtype=BF16)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    plan = XqaDecodePlan.allocate(batch, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)

    def run() -> Tensor:
        ops.xqa_decode_plan(plan, lengths)
        return ops.xqa_decode(q, k, v, table, lengths, plan)[0]

    runs = {"attnops": run}
    if kv_dtype is BF16:
        runs["torch_native"] = native_decode(k, v, table, lengths, q)
        runs["torch gather + SDPA"] = gathered_sdpa(k, v, table, q)
    params = {"batch": batch, "seqlen": length, "heads": [HEADS, KV_HEADS], "d": DIM, "page": page_size}
    params["kv_dtype"] = str(kv_dtype).removeprefix("torch.")
    tokens = batch * length * KV_HEADS * DIM
    gigabytes, teraflops = 2 * tokens * k.element_size() / 1e9, 4 * tokens * HEADS / KV_HEADS / 1e12
    return Cell("cpu_decode", params, runs, lambda: paged_attention(q, k, v, table, lengths)[0], gigabytes, teraflops)


def prefill_cell(batch: int, length: int) -> Cell:
    tokens = batch * length
    q = torch.randn(tokens, HEADS, DIM, dtype=BF16)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, dtype=BF16) for _ in range(2))
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32) * length
    plan = FmhaPlan.allocate(tokens, batch, causal=True)

    def run() -> Tensor:
        ops.fmha_plan(plan, cu_seqlens, cu_seqlens_k=cu_seqlens)
        return ops.fmha_varlen(q, k, v, cu_seqlens, cu_seqlens, plan, causal=True)[0]

    def sdpa() -> Tensor:
        dense = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    params = {"batch": batch, "seqlen": length, "heads": [HEADS, KV_HEADS], "d": DIM, "causal": True}
    flops = 4 * batch * HEADS * DIM * length * (length + 1) / 2
    runs = {"attnops": run, "torch SDPA": sdpa}
    expected = lambda: ragged_attention(q, k, v, cu_seqlens, cu_seqlens)[0]  # noqa: E731
    return Cell("cpu_prefill", params, runs, expected, teraflops=flops / 1e12)


def mla_cell(batch: int, length: int, heads: int) -> Cell:
    table, num_pages = shuffled_pages(batch, length, 64)
    latents = torch.randn(num_pages, 64, 576, dtype=BF16)
    q = torch.randn(batch, 1, heads, 576, dtype=BF16)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    plan = MlaDecodePlan.allocate(batch, num_q_heads=heads)
    scale = 192**-0.5

    def run() -> Tensor:
        ops.mla_decode_plan(plan, lengths)
        return ops.mla_decode(q, latents, table, lengths, plan, softmax_scale=scale)[0]

    def torch_products() -> Tensor:
        rows = latents[table.long()].flatten(1, 2)
        weights = torch.softmax((q[:, 0] @ rows.transpose(1, 2)).float() * scale, -1).to(BF16)
        return (weights @ rows[..., :512]).unsqueeze(1)

    params = {"batch": batch, "seqlen": length, "heads": heads, "d": [576, 512], "page": 64}
    tokens = batch * length
    runs = {"attnops": run, "torch gather + products": torch_products}
    expected = lambda: mla_attention(q, latents, table, lengths, softmax_scale=scale)[0]  # noqa: E731
    gigabytes, teraflops = tokens * 576 * 2 / 1e9, tokens * heads * 2 * (576 + 512) / 1e12
    return Cell("cpu_mla_decode", params, runs, expected, gigabytes, teraflops)


def cells(groups: set[str]) -> Iterator[Cell]:
    if "decode" in groups:
        for batch, length, page in ((16, 4096, 64), (16, 4096, 16), (16, 4096, 1), (1, 4096, 64), (64, 512, 64)):
            yield decode_cell(batch, length, page)
        yield decode_cell(16, 4096, 64, torch.float8_e4m3fn)
    if "prefill" in groups:
        yield from (prefill_cell(batch, length) for batch, length in ((1, 2048), (1, 512), (8, 256)))
    if "mla" in groups:
        yield from (mla_cell(batch, length, heads) for batch, length, heads in ((4, 2048, 128), (16, 4096, 16)))


def read_sweep() -> Callable[[], object]:
    """A read-only pass over 1 GiB by the same threads: the ceiling of everything that is bound by memory."""
    data = torch.ones(2**28, dtype=torch.float32)
    return lambda: data.sum()


def processor_time() -> float:
    return time.process_time() / torch.get_num_threads()


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def measure(
    cell: Cell, rounds: int, sweep: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[Record]:
    runs: dict[str, Callable[[], object]] = {**cell.runs, "read sweep": sweep}
    expected = cell.expected()
    errors = {name: ((run().double() - expected).norm() / expected.norm()).item() for name, run in cell.runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, clock))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ceiling = 2**30 / 1e9 / medians["read sweep"]
    print(f"\n{cell.case} {cell.params}   read sweep {ceiling:.1f} GB/s")
    records = []
    for name in cell.runs:
        seconds = medians[name]
        gbs = cell.gigabytes / seconds if cell.gigabytes else None
        tflops = cell.teraflops / seconds
        ratio = seconds / medians["attnops"]
        share = f", {gbs / ceiling:4.0%} of the sweep" if gbs else ""
        spread = f"{min(times[name]) * 1e3:.1f} to {max(times[name]) * 1e3:.1f}"
        print(f"  {name:24} {seconds * 1e3:9.2f} ms ({spread})  {tflops * 1e3:7.1f} GFLOP/s{share}  x{ratio:.2f}")
        note = f"spread {spread} ms; read sweep {ceiling:.2f} GB/s"
        note += "; processor time" if clock is processor_time else ""
        record = Record(cell.case, name, cell.params, seconds * 1e3, gbs=gbs, tflops=tflops, note=note)
        record.rel_err = errors[name]
        record.device = f"{cpu_name()}, kernels for {torch.ops.attnops.cpu_isa()}"
        record.version = torch.__version__ if name.startswith("torch") else ""
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="decode,prefill,mla")
    parser.add_argument("--write", action="store_true", help="replace these cases in results/cpu-<group>.jsonl")
    parser.add_argument("--processor-time", action="store_true", help="of the threads, where others use the machine")
    parser.add_argument("--name", default="cpu", help="prefix of the result files, for another machine")
    arguments = parser.parse_args()
    clock = processor_time if arguments.processor_time else time.perf_counter
    torch.manual_seed(0)
    sweep = read_sweep()
    for group in arguments.only.split(","):
        records = [record for cell in cells({group}) for record in measure(cell, arguments.rounds, sweep, clock)]
        if arguments.write:
            print("written:", write(records, f"{arguments.name}-{group}").name)


if __name__ == "__main__":
    main()
