"""Engines with attnops beside their own attention, in one run, in turns.

Without a name: a decode step of attention in vLLM on the CPU, ATTNOPS beside vLLM's own backend. Each side is its
engine's own implementation class over its own metadata, as a step of one layer has it: metadata or plan, store of the
new rows, attention. The pages hold the same values; both results are compared before a time counts. A time is the
median over turns of the mean of some calls. A sweep over memory takes a turn, too: the ceiling of what the cores read.

    PYTHONPATH=python .venv-vllm/bin/python benchmarks/bench_engines.py [--write] [--name cpu-amx]

With a name first, an engine on a GPU; further arguments are those of that benchmark:

    PYTHONPATH=python python benchmarks/bench_engines.py vllm-step --model mla
    PYTHONPATH=python python benchmarks/bench_engines.py nano-vllm CHECKOUT --shape 8B
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import records
import torch

CELLS = {"16 x 4096": [4096] * 16, "1 x 16384": [16384], "ragged 16": [100 + 523 * i for i in range(16)]}
ON_A_GPU = {
    "vllm": "bench_vllm_engine",
    "vllm-step": "bench_vllm_step",
    "sglang": "bench_sglang_step",
    "transformers": "bench_transformers_batch",
    "nano-vllm": "bench_nano_vllm",
    "host": "bench_plugin_host",
}
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 128
PEERS = {"ATTNOPS": "attnops", "CPU_ATTN": "vLLM CPU_ATTN"}
SWEEP_BYTES = 2**30


def problem(lengths: list[int], dtype: torch.dtype) -> SimpleNamespace:
    """The tensors that vLLM brings to a decode step."""
    torch.manual_seed(0)
    lens = torch.tensor(lengths, dtype=torch.int32)
    blocks = -(-max(lengths) // BLOCK)
    table = torch.randperm(len(lengths) * blocks).to(torch.int32).view(len(lengths), blocks)
    last = lens.long() - 1
    slots = table.gather(1, (last // BLOCK)[:, None])[:, 0].long() * BLOCK + last % BLOCK
    rows = [torch.randn(len(lengths), heads, HEAD_DIM).to(dtype) for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()), _k_scale_float=1.0, _v_scale_float=1.0)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    keys = torch.randn(2, table.numel() * BLOCK, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    return SimpleNamespace(
        lens=lens, table=table, slots=slots, q=rows[0], k=rows[1], v=rows[2], layer=layer, starts=starts, keys=keys
    )


def implementation(cls: type) -> object:
    return cls(NUM_Q_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS, None, None, "auto")


def ours(p: SimpleNamespace) -> Callable[[], torch.Tensor]:
    from attnops.plugins.vllm.backend import AttnopsImpl, AttnopsMetadata
    from attnops.plugins.vllm.plans import DecodePlanner
    from attnops.types import AttentionSpec, Limits

    impl, dtype, size = implementation(AttnopsImpl), p.q.dtype, p.lens.shape[0]
    heads = {"num_q_heads": NUM_Q_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    spec = AttentionSpec(**heads, dtype=dtype, page_size=BLOCK)
    planner = DecodePlanner(spec, {-1}, Limits(max_batch_size=size, max_seqlen=p.table.shape[1] * BLOCK), p.q.device)
    cache = torch.empty(p.table.numel(), NUM_KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype)  # as ours prefers it on a CPU
    cache.copy_(p.keys.unflatten(1, (-1, BLOCK)).permute(1, 3, 2, 0, 4).flatten(3))
    out = torch.empty_like(p.q)

    def step() -> torch.Tensor:
        metadata = AttnopsMetadata(
            num_actual_tokens=size,
            num_decodes=size,
            num_decode_tokens=size,
            decode=planner.plan(p.lens, 1),
            prompts={},
            cu_seqlens_q=None,
            seq_lens=p.lens,
            block_table=p.table,
            slot_mapping=p.slots,
            causal=True,
        )
        return impl.forward(p.layer, p.q, p.k, p.v, cache, metadata, out)

    return step


def theirs(p: SimpleNamespace) -> Callable[[], torch.Tensor]:
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    impl, dtype, size = implementation(cpu_attn.CPUAttentionBackendImpl), p.q.dtype, p.lens.shape[0]
    p.layer.isa = cpu_attn._get_attn_isa(dtype, BLOCK, HEAD_DIM)
    cache = torch.empty(p.table.numel(), NUM_KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype)
    slots = torch.arange(p.keys.shape[1])
    impl.do_kv_cache_update(p.layer, p.keys[0], p.keys[1], cache, slots)
    out = torch.empty_like(p.q)

    def step() -> torch.Tensor:
        scheduler = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=size,
            num_heads=NUM_Q_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            seq_lens=p.lens,
            dtype=dtype,
            query_start_loc=p.starts,
            causal=True,
            sliding_window_size=-1,
            isa=p.layer.isa,
            enable_kv_split=cpu_attn.envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        metadata = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=size,
            max_query_len=1,
            query_start_loc=p.starts,
            max_seq_len=int(p.lens.max()),
            seq_lens=p.lens,
            block_table=p.table,
            slot_mapping=p.slots,
            scheduler_metadata=scheduler,
        )
        impl.do_kv_cache_update(p.layer, p.k, p.v, cache, p.slots)
        return impl.forward(p.layer, p.q, p.k, p.v, cache, metadata, out)

    return step


def mean_ms(step: Callable[[], torch.Tensor], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls * 1e3


def read_sweep() -> Callable[[], torch.Tensor]:
    """A pass over memory that only reads, by the same threads."""
    data = torch.ones(SWEEP_BYTES // 4, dtype=torch.float32)
    return lambda: data.sum()


def rows(
    name: str, dtype: str, turns: dict[str, list[float]], error: float, gbs: float, how: str
) -> list[records.Record]:
    """A record of each side.

    Args:
        turns: What each side took, in milliseconds.
        gbs: What the cores read in the same turns, GB/s.
        how: The times were taken.
    """
    shape = {"heads": [NUM_Q_HEADS, NUM_KV_HEADS], "head_dim": HEAD_DIM, "block": BLOCK, "dtype": dtype}
    size = 2 * sum(CELLS[name]) * NUM_KV_HEADS * HEAD_DIM * getattr(torch, dtype).itemsize
    found = []
    for side, taken in turns.items():
        ms = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4)
        record = records.Record(f"vLLM step, {dtype}", PEERS[side], {"step": name, **shape}, ms, rel_err=error)
        record.note = f"quartiles {low:.2f} to {high:.2f} ms; {how}; read sweep {gbs:.2f} GB/s"
        record.version, record.gbs = version_of(side), size / ms / 1e6
        record.device = f"{records.cpu_name()}, kernels for {torch.ops.attnops.cpu_isa()}"
        found.append(record)
    return found


def version_of(side: str) -> str:
    return records.version_of("attnops") if side == "ATTNOPS" else importlib.import_module("vllm").__version__


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ON_A_GPU:
        module = importlib.import_module(ON_A_GPU[sys.argv.pop(1)])
        sys.argv[0] = module.__file__
        module.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="results/NAME-vllm.jsonl")
    parser.add_argument("--name", default="cpu", help="prefix of the result file, for another machine")
    options = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config

    # Its backend asks the configuration for the model's dtype, and for nothing else here.
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=getattr(torch, options.dtype))
    shape = f"{NUM_Q_HEADS}/{NUM_KV_HEADS} heads of {HEAD_DIM}"
    load = os.getloadavg()[0]
    print(f"one layer, {shape}, {options.dtype}, {torch.get_num_threads()} threads, load {load:.1f}")
    sweep, kept = read_sweep(), []
    with set_current_vllm_config(config), torch.inference_mode():
        for name, lengths in CELLS.items():
            p = problem(lengths, config.model_config.dtype)
            steps = {"ATTNOPS": ours(p), "CPU_ATTN": theirs(p)}
            results = [step().float().clone() for step in steps.values()]
            error = float((results[0] - results[1]).norm() / results[1].norm())
            assert error < 2e-2, f"{name}: the two differ by {error:.3g}"
            turns, sweeps = {side: [] for side in steps}, []
            for _ in range(options.turns):
                for side, step in steps.items():
                    turns[side].append(mean_ms(step, options.calls))
                sweeps.append(mean_ms(sweep, 1))
            medians = {side: statistics.median(times) for side, times in turns.items()}
            ratio = medians["CPU_ATTN"] / medians["ATTNOPS"]
            print(f"{name:<10} " + "  ".join(f"{side} {ms:8.3f} ms" for side, ms in medians.items()), f" {ratio:.2f}x")
            gbs = SWEEP_BYTES / statistics.median(sweeps) / 1e6
            how = f"{options.turns} turns of {options.calls} calls, load {load:.1f} before"
            kept += rows(name, options.dtype, turns, error, gbs, how)
    if options.write:
        print(records.write(kept, f"{options.name}-vllm"))


if __name__ == "__main__":
    main()
