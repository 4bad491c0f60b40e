"""The first call of an op of linear attention in this process, and the second: `linear_first_call.py OP DEVICE`.

Tensors are made before. What is timed is the op alone, until the device has finished: kernels are loaded, none is
compiled. Prints one JSON object of milliseconds.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import torch
from attnops import ops

BATCH, H, HV, DIM = 4, 16, 32, 128


def call_of(op: str, device: str) -> partial:
    """The op over a step of four requests, or of prompts of 64 tokens."""
    count = {"delta_prefill": 64 * BATCH, "ssd_prefill": 64 * BATCH, "delta_verify": 4 * BATCH}.get(op, BATCH)
    make = lambda *shape: torch.randn(*shape, device=device).to(torch.bfloat16)  # noqa: E731
    zeros = lambda *shape: torch.zeros(*shape, device=device)  # noqa: E731
    q, k, v = make(count, H, DIM), make(count, H, DIM), make(count, HV, DIM)
    a, b, rate = make(count, HV), make(count, HV), -torch.ones(HV, device=device)
    slots = torch.arange(BATCH, dtype=torch.int32, device=device)
    given = {"states": zeros(BATCH, HV, DIM, DIM), "state_indices": slots, "out": torch.empty_like(v)}
    if op.endswith("prefill"):
        bounds = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * 64
        given |= {"cu_seqlens": bounds, "prefix_lens": torch.zeros_like(slots)}
    if op == "delta_verify":
        given |= {"ring_u": zeros(BATCH, HV, 12, DIM), "ring_k": zeros(BATCH, H, 12, DIM)}
        given |= {"ring_decay": zeros(BATCH, HV, 12), "ring_len": torch.zeros_like(slots)}
    function = getattr(ops, op)
    if op.startswith("ssd"):
        return partial(function, v, a, rate, k, q, dt_softplus=True, **given)
    given |= {"A_log": rate, "dt_bias": rate}
    if op == "delta_conv_decode":
        channels = 2 * H * DIM + HV * DIM
        given |= {"conv_states": make(BATCH, channels, 3), "num_k_heads": H}
        return partial(function, make(BATCH, channels), make(channels, 4), None, a, b, **given)
    return partial(function, q, k, v, a, b, **given)


def main() -> None:
    op, device = sys.argv[1:]
    call, times = call_of(op, device), []
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(2):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    print(json.dumps({"first": times[0], "second": times[1]}))


if __name__ == "__main__":
    main()
