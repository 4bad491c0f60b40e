"""Host microseconds of a call through `attnops.compat`: of this tree and of others, in turns, on the CPU or a GPU.

    python benchmarks/bench_compat_host.py python ../before/python      # folders that hold `attnops`, built

Each folder gets a process. They take turns for every call, so that what else runs on the machine strikes all alike.
Give each folder twice (`A B A B`): two processes of one tree show what processes differ by, and `taskset` keeps all on
one core. Problems are small: on a CPU most of a call is what comes before the kernel; with `--empty` it is all but all
of it. A call that a tree lacks is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def calls(device: str, empty: bool, dim: int = 64, mla_heads: int = 1) -> dict:
    """By name: a call without arguments, made of what every version of `attnops.compat` has.

    `dim` is the head dim of GQA.
    """
    import torch
    from attnops.compat import flash_attn_interface as fa3
    from attnops.compat import flash_mla, flashinfer, sgl_kernel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"device": device, "dtype": torch.bfloat16}
    tables = torch.arange(4, dtype=torch.int32, device=device).view(4, 1)
    lens = torch.tensor([0] * 4 if empty else [1, 2, 1, 3], dtype=torch.int32, device=device)
    q, k = torch.randn(4, 2, dim, **shape), torch.randn(4, 16, 1, dim, **shape)
    mla_q, latents = torch.randn(4, 1, mla_heads, 576, **shape), torch.randn(4, 64, 576, **shape)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    indptr, last = torch.arange(5, dtype=torch.int32, device=device), lens
    page = {"indptr": indptr, "indices": tables.flatten(), "last_page_len": last}
    heads = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": dim, "page_size": 16}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    wrapper.plan(**page, **heads, q_data_type=torch.bfloat16)
    mla_wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    types = {"sm_scale": 0.1, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "causal": False}
    mla_shape = {"num_heads": mla_heads, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 64}
    bounds = indptr.cpu()
    mla_plan = {"qo_indptr": bounds, "kv_indptr": indptr, "kv_indices": tables.flatten(), "kv_len_arr": lens}
    mla_wrapper.plan(**mla_plan, **mla_shape, **types)
    parts = (mla_q[:, 0, :, :512], mla_q[:, 0, :, 512:], latents[..., :512], latents[..., 512:])
    metadata, splits = flash_mla.get_mla_metadata(lens, mla_heads, 1)
    of_mla = (mla_q, latents.unsqueeze(2), tables, lens, 512)
    out, lse = torch.randn(4, 2, dim, device=device), torch.randn(4, 2, device=device)
    tabled = {"workspace_buffer": workspace, "block_tables": tables, "seq_lens": lens}
    ranks = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    sized = {"num_kv_heads": 1, "page_size": 16}
    written = torch.empty_like(q).unsqueeze(1)
    schedule, list_schedule = (flash_mla.get_mla_metadata()[0] for _ in range(2))
    rows = torch.zeros(4, 64, 1, 656, dtype=torch.uint8, device=device)
    lists = torch.full((4, 1, 64), -1, dtype=torch.int32, device=device)
    lists[..., : 0 if empty else 1] = 0
    of_lists = {"is_fp8_kvcache": True, "indices": lists}
    ragged = {"cu_seqlens_q": indptr, "cu_seqlens_k": indptr * (not empty), "max_seqlen_q": 1, "max_seqlen_k": 1}
    return {
        "wrapper.plan": lambda: wrapper.plan(**page, **heads, q_data_type=torch.bfloat16),
        "wrapper.run": lambda: wrapper.run(q, (k, k)),
        "MLA wrapper.plan": lambda: mla_wrapper.plan(**mla_plan, **mla_shape, **types),
        "MLA wrapper.run": lambda: mla_wrapper.run(*parts),
        "trtllm_batch_decode": lambda: flashinfer.trtllm_batch_decode_with_kv_cache(
            q, (k, k), max_seq_len=16, bmm1_scale=0.1, kv_layout="NHD", **tabled
        ),
        "trtllm_batch_decode_mla": lambda: flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            mla_q, latents, max_seq_len=64, bmm1_scale=0.1, **ranks, **tabled
        ),
        "xqa": lambda: flashinfer.xqa(
            q.unsqueeze(1), k, k, tables, lens.unsqueeze(1), written, workspace, workspace, **sized
        ),
        "flashinfer.merge_state": lambda: flashinfer.merge_state(out, lse, out, lse),
        "FA3 cache": lambda: fa3.flash_attn_with_kvcache(
            q.unsqueeze(1), k, k, cache_seqlens=lens, page_table=tables, causal=True
        ),
        "FA3 ragged": lambda: fa3.flash_attn_varlen_func(q, k[:4, 0], k[:4, 0], causal=True, **ragged),
        "get_mla_metadata": lambda: flash_mla.get_mla_metadata(lens, mla_heads, 1),
        "FlashMLA": lambda: flash_mla.flash_mla_with_kvcache(*of_mla, metadata, splits),
        "FlashMLA, schedule object": lambda: flash_mla.flash_mla_with_kvcache(*of_mla, schedule),
        "FlashMLA, lists of rows": lambda: flash_mla.flash_mla_with_kvcache(
            mla_q, rows, None, None, 512, list_schedule, None, **of_lists
        ),
        "merge_state_v2": lambda: sgl_kernel.merge_state_v2(out, lse, out, lse),
    }


def serve(device: str, empty: bool, dim: int, mla_heads: int) -> None:
    """Times the calls whose names come in, a line each."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time  # of this thread alone, where others run
    made = calls(device, empty, dim, mla_heads)
    for name in list(made):
        try:
            made[name]()
        except NotImplementedError as error:  # no kernel in this build
            print(f"{name}: {str(error)[:80]}", file=sys.stderr, flush=True)
            del made[name]
    print(json.dumps(sorted(made)), flush=True)
    for line in sys.stdin:
        name, count = json.loads(line)
        call = made[name]
        wait()
        begin = clock()
        for _ in range(count):
            call()
        print((clock() - begin) / count * 1e6, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", help="folders that hold attnops; the first is the one to judge")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--empty", action="store_true", help="requests without keys: kernels have nothing to do")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--mla-heads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--count", type=int, default=60, help="calls of a round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.device, options.empty, options.dim, options.mla_heads)
        return
    servers = []
    for tree in options.trees:
        command = [sys.executable, __file__, tree, "--serve", "--device", options.device]
        command += ["--empty"] * options.empty + ["--dim", str(options.dim), "--mla-heads", str(options.mla_heads)]
        environment = os.environ | {"PYTHONPATH": os.path.abspath(tree), "OMP_NUM_THREADS": "1"}
        servers.append(
            subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        )
    names = [json.loads(server.stdout.readline()) for server in servers]  # type: ignore[union-attr]
    print(
        f"| call, us on {options.device} | "
        + " | ".join(options.trees)
        + " | first - last |\n"
        + "|---" * (len(servers) + 2)
        + "|"
    )
    for name in names[0]:
        if not all(name in theirs for theirs in names):
            continue
        taken: list[list[float]] = [[] for _ in servers]
        for _ in range(options.rounds):
            for server, mine in zip(servers, taken, strict=True):
                assert server.stdin is not None and server.stdout is not None
                server.stdin.write(json.dumps([name, options.count]) + "\n")
                mine.append(float(server.stdout.readline()))
        cells = " | ".join(f"{statistics.quantiles(mine, n=4)[0]:.1f}" for mine in taken)
        firsts = [mine for tree, mine in zip(options.trees, taken, strict=True) if tree == options.trees[0]]
        lasts = [mine for tree, mine in zip(options.trees, taken, strict=True) if tree == options.trees[-1]]
        turns = [statistics.mean(a) - statistics.mean(b) for a, b in zip(zip(*firsts), zip(*lasts), strict=True)]
        print(f"| {name} | {cells} | {statistics.median(turns):+.2f} |", flush=True)
    for server in servers:
        server.stdin.close()  # type: ignore[union-attr]
        server.wait()


if __name__ == "__main__":
    main()
