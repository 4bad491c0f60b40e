"""One rank of vLLM's decode context parallelism on attnops, over gloo: its heads of what one rank would give.

Arguments: rank, world size, a file for the rendezvous. vLLM's group is stood in for by one with what is asked of it.
"""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed
from attnops import distributed, ops
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8, relative_error
from problems import FP8, paged_problem
from vllm.distributed import parallel_state
from vllm_classes import BATCHES, BLOCK, common_metadata, configuration, made_builder, new_tokens

HEADS, HEAD_DIM = 8, 64


def check(batch: str, options: dict, kv_dtype: torch.dtype, interleave: int, rank: int, world_size: int) -> None:
    from attnops.plugins.vllm.backend import AttnopsBackend

    lengths, counts = BATCHES[batch]
    problem = paged_problem(lengths, counts, num_q_heads=HEADS, num_kv_heads=1, page_size=BLOCK, kv_dtype=kv_dtype)
    rows, _ = new_tokens(problem, counts)
    # Page p of a rank holds its share of the tokens of a page of all ranks; so tables are the same on every rank.
    pages = problem.page_table.shape[1]
    problem.page_table.copy_(torch.randperm(len(lengths) * pages).view(len(lengths), pages))
    request = torch.repeat_interleave(torch.arange(len(lengths)), problem.cache_seqlens)
    position = torch.cat([torch.arange(n) for n in lengths])
    size = BLOCK * world_size
    shared = problem.page_table[request, position // size].long() * size + position % size
    slots = ops.context_parallel_slots(shared, rank, world_size, interleave)
    cache = torch.full((problem.page_table.numel(), BLOCK, 1, 2 * HEAD_DIM), torch.nan).to(kv_dtype)
    name = "auto" if kv_dtype == torch.bfloat16 else "fp8"
    sinks = torch.randn(HEADS) if options.get("sinks") else None
    heads, _ = distributed.heads_of_rank(HEADS, 1, rank, world_size)
    mine = slice(heads.start, heads.stop)
    given = (len(heads), HEAD_DIM, HEAD_DIM**-0.5, 1, None, None, name, options.get("logit_cap"))
    impl = AttnopsBackend.get_impl_cls()(*given, sinks=None if sinks is None else sinks[mine])
    assert (impl.dcp_world_size, impl.dcp_rank) == (world_size, rank) and impl.need_to_return_lse_for_decode
    one = torch.ones(1)
    scales = (one, one) if kv_dtype == torch.bfloat16 else (problem.k_scale, problem.v_scale)
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    view = cache.transpose(1, 2)
    old = torch.ones(len(position), dtype=torch.bool)
    old[rows] = False
    k, v = problem.k_exact.bfloat16(), problem.v_exact.bfloat16()
    impl.do_kv_cache_update(layer, k[old], v[old], view, slots[old])

    whole = configuration((len(heads), 1), HEAD_DIM, name, world_size, interleave)
    builder = made_builder(impl, whole, "cpu")
    step = builder.build(0, common_metadata(problem, counts, slots[rows], "cpu"))
    out = torch.full((len(rows), len(heads), HEAD_DIM), 7.0).bfloat16()
    impl.forward(layer, problem.q[:, mine], k[rows], v[rows], view, step, out)
    expected, _ = problem.expected_unquantized(
        softmax_scale=HEAD_DIM**-0.5, causal=True, logit_cap=options.get("logit_cap", 0.0), sinks=sinks
    )
    bound = 1.5 * MAX_RELATIVE_ERROR[torch.bfloat16] if kv_dtype == torch.bfloat16 else MAX_RELATIVE_ERROR_FP8
    error = relative_error(out, expected[:, mine])
    assert error <= bound, f"{batch} {options} {kv_dtype} {interleave}: {error:.3g}"


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x)
    return torch.cat(parts, dim)


def main(rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    parallel_state._DCP = SimpleNamespace(
        world_size=world_size, rank_in_group=rank, device_group=torch.distributed.group.WORLD, all_gather=gathered
    )
    done = 0
    options = ({}, {"logit_cap": 5.0}, {"sinks": True})
    for case in itertools.product(BATCHES, options, (torch.bfloat16, FP8), (1, 16)):
        torch.manual_seed(done)  # every rank makes the same problem
        check(*case, rank, world_size)
        done += 1
    torch.distributed.barrier()
    print(f"{done} cases equal one rank", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
