"""attnops' Triton kernels beside SGLang's, in one process: decode, MLA decode, extend, and the price of fixed splits.

    python benchmarks/bench_triton.py [--write]

SGLang's kernels are looked for as `sglang.kernels.ops.attention` (0.5.23); without them only ours are measured. Each
cell is captured in a CUDA graph and replayed in turns; the median of the rounds counts. SGLang's decode is given every
number of splits from 1 to 8 that is a power of two, and its best one counts.
"""

from __future__ import annotations

import argparse
import statistics

import records
import torch
import triton

BF16 = torch.bfloat16
PAGE = 64
DECODE_NAMES = ("num_q_heads", "num_kv_heads", "head_dim", "batch", "seqlen")
EXTEND_NAMES = ("num_q_heads", "num_kv_heads", "head_dim", "batch", "cached", "new")
DECODE = [  # by DECODE_NAMES
    *((32, 8, 128, b, n) for b, n in ((1, 1024), (1, 16384), (16, 4096), (64, 1024), (64, 8192))),
    *((8, 1, 128, b, n) for b, n in ((64, 1024), (16, 8192))),
    *((32, 32, 128, b, n) for b, n in ((16, 2048), (64, 1024))),
]
MLA = [(heads, 1, 576, b, n) for heads in (16, 128) for b, n in ((1, 8192), (16, 4096), (64, 2048))]
EXTEND = [  # by EXTEND_NAMES
    (32, 8, 128, 1, 0, 4096),
    (32, 8, 128, 4, 0, 2048),
    (32, 8, 128, 8, 4096, 512),
    (32, 8, 128, 32, 2048, 16),
    (8, 1, 128, 4, 1024, 1024),
]


DEVICE = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def graph_of(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return graph


REPEATS = 10


def times_of(calls, rounds=7):
    """Microseconds of each call, taken in turns."""
    graphs = {name: graph_of(call) for name, call in calls.items()}
    taken = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / REPEATS)
    return {name: statistics.median(values) for name, values in taken.items()}


def cache(requests, tokens, kv_heads, head_dim):
    """Pages of random keys (and values where they are apart), a table, and token indices for SGLang."""
    per = -(-tokens // PAGE)
    pages = torch.randperm(requests * per, device="cuda", dtype=torch.int32).view(requests, per)
    k = torch.randn(requests * per, PAGE, kv_heads, head_dim, dtype=BF16, device="cuda")
    v = k[..., :512] if head_dim == 576 else torch.randn_like(k)
    slots = (pages.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)[:, :tokens]
    return k, v, pages, slots


def peer():
    try:
        from sglang.kernels.ops.attention import decode_attention, extend_attention
    except ImportError as error:
        print(f"SGLang's Triton kernels: not found ({error})")
        return None, None
    return decode_attention.decode_attention_fwd, extend_attention.extend_attention_fwd


def bench_decode(cell, theirs):
    from attnops import triton_kernels as tk

    heads, kv_heads, dim, requests, tokens = cell
    k, v, table, slots = cache(requests, tokens, kv_heads, dim)
    dim_v = v.shape[-1]
    q = torch.randn(requests, heads, dim, dtype=BF16, device="cuda")
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    outs = {}

    def ours(fixed, tile):
        out = outs.setdefault(f"fixed={fixed}", q.new_empty(requests, heads, dim_v))
        splits = torch.empty(requests, dtype=torch.int32, device="cuda")
        partial = torch.empty(requests, heads, 8, dim_v, device="cuda")
        lse_partial = torch.empty(requests, heads, 8, device="cuda")

        def call():
            tk.triton_decode_plan(splits, lengths, 1, kv_heads, 8, tile, fixed, -1)
            tk.triton_decode(
                out, None, partial, lse_partial, q, None, k, v, table, lengths, splits, 1, 0.1, True, -1, 0.0, None,
                None, None, None, tile,
            )  # fmt: skip

        return call

    calls = {"attnops": ours(False, 128), "attnops deterministic": ours(True, 256)}
    if theirs is not None:
        indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
        indices = slots.flatten().to(torch.int64)
        k_flat, v_flat, mla = k.flatten(0, 1), v.flatten(0, 1), dim == 576
        for splits in (1, 2, 4, 8):
            out = outs.setdefault(f"sglang {splits}", q.new_empty(requests, heads, dim_v))
            logits = torch.empty(requests, heads, splits, dim_v, device="cuda")
            lse = torch.empty(requests, heads, splits, device="cuda")
            counts = torch.full((requests,), splits, dtype=torch.int32, device="cuda")

            def call(out=out, logits=logits, lse=lse, counts=counts, splits=splits):
                theirs(q, k_flat, v_flat, out, indptr, indices, logits, lse, counts, splits, 0.1, 1.0, 1.0, has_mla=mla)

            calls[f"sglang {splits}"] = call
    return times_of(calls), outs


def bench_extend(cell, theirs):
    from attnops import triton_kernels as tk

    heads, kv_heads, dim, requests, cached, new = cell
    tokens = cached + new
    k, v, table, slots = cache(requests, tokens, kv_heads, dim)
    q = torch.randn(requests * new, heads, dim, dtype=BF16, device="cuda")
    at = slots[:, cached:].flatten()
    k_new, v_new = k.flatten(0, 1)[at].contiguous(), v.flatten(0, 1)[at].contiguous()
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    bounds = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * new
    names = ("fixed=False", "fixed=True") if theirs is None else ("fixed=False", "fixed=True", "sglang")
    outs = {name: torch.empty_like(q) for name in names}
    hint = 1 << (new - 1).bit_length()

    def two_stages():
        tk.triton_extend(
            outs["fixed=False"], None, q, None, k_new, v_new, k, v, table, lengths, bounds, hint, 0.1, True, -1, 0.0,
            None,
        )  # fmt: skip

    def one_stage():
        tk.triton_unified_extend(
            outs["fixed=True"], None, q, None, k, v, table, lengths, bounds, hint, 0.1, True, -1, 0.0, None, None,
            None,
        )  # fmt: skip

    calls = {"attnops": two_stages, "attnops deterministic": one_stage}
    if theirs is not None:
        indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * cached
        indices = slots[:, :cached].flatten().to(torch.int64)
        k_flat, v_flat = k.flatten(0, 1), v.flatten(0, 1)

        def call():
            theirs(
                q, k_new, v_new, outs["sglang"], k_flat, v_flat, bounds, indptr, indices, None, True, None, new, 1.0,
                1.0, 0.1,
            )  # fmt: skip

        calls["sglang"] = call
    return times_of(calls), outs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="results/h200-triton.jsonl")
    options = parser.parse_args()
    decode, extend = peer()
    rows, ratios = [], []
    for case, cells, bench, theirs in (
        ("triton_decode", DECODE, bench_decode, decode),
        ("triton_mla_decode", MLA, bench_decode, decode),
        ("triton_extend", EXTEND, bench_extend, extend),
    ):
        for cell in cells:
            try:
                times, outs = bench(cell, theirs)
            except Exception as error:
                print(f"{case} {cell}: {type(error).__name__}: {str(error)[:300]}")
                continue
            best = min((value for name, value in times.items() if name.startswith("sglang")), default=None)
            reference = outs["fixed=False"].float()
            spread = max(float((o.float() - reference).norm() / reference.norm()) for o in outs.values())
            shown = ", ".join(f"{name} {value:.1f}" for name, value in times.items())
            ratio = best / times["attnops"] if best else float("nan")
            ratios.append((case, ratio, times["attnops deterministic"] / times["attnops"]))
            print(f"{case} {cell}: {shown} us; {ratio:.3f}x; outputs differ by {spread:.2g}", flush=True)
            for name, value in times.items():
                params = dict(zip(EXTEND_NAMES if case == "triton_extend" else DECODE_NAMES, cell))
                known = records.version_of(name)
                rows.append(records.Record(case, name, params, value / 1e3, version=known, device=DEVICE))
    for case in dict.fromkeys(name for name, *_ in ratios):
        values = [(ratio, price) for name, ratio, price in ratios if name == case]
        means = [statistics.geometric_mean(column) for column in zip(*values)]
        print(f"{case}: geometric mean {means[0]:.3f}x SGLang; deterministic costs {100 * (means[1] - 1):.0f} %")
    if options.write:
        print(records.write(rows, "h200-triton"))


if __name__ == "__main__":
    main()
