"""Compiles the Triton ops for a GPU that is not here: ``python triton_compile.py <compute capability> <shared bytes>``.

Prints a line per kernel: its name and the shared memory of a block. Run apart, without Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import problems
import torch
from attnops.triton_kernels.core import checks, launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class AbsentDevice:
    """What a compilation asks of a driver."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def main(arch: int, shared_bytes: int) -> None:
    driver.set_active(AbsentDevice(arch))
    checks.RUNS_ON_CPU = True  # nothing runs at all
    launch._precision = lambda q: "ieee" if q.dtype == torch.float32 else "tf32"
    launch.shared_bytes = lambda device: shared_bytes
    compile_only = partial(JITFunction.run, warmup=True)

    def run(self, *args, grid, warmup, **options):
        kernel = compile_only(self, *args, grid=grid, **options)
        print(self.__name__, kernel.metadata.shared, flush=True)
        return kernel

    JITFunction.run = run
    import triton_calls as calls

    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64}
    calls.decode(problems.paged_problem([3, 40], **shape), softmax_scale=0.1)
    calls.unified(problems.paged_problem([90, 40], [90, 40], **shape), softmax_scale=0.1)
    tree = problems.random_tree_mask([5, 5]).unflatten(0, (2, 5)).contiguous()
    options = {"tree_mask": tree, "window_left": 9, "logit_cap": 3.0, "sinks": torch.zeros(8)}
    fp8 = problems.paged_problem([30, 40], 5, kv_dtype=problems.FP8, scales="head")
    calls.decode(fp8, softmax_scale=0.1, **options)
    calls.decode(problems.mla_problem([30, 40], num_q_heads=128), softmax_scale=0.1)
    calls.unified(problems.mla_problem([30, 40], [30, 8]), softmax_scale=0.1)
    ones = problems.paged_problem([3, 40], num_q_heads=1, num_kv_heads=1, head_dim=32, page_size=64)
    column = ones.page_table[:, :1].contiguous()  # Triton takes integers of 1, such as its stride, for constants
    calls.decode(dataclasses.replace(ones, page_table=column), softmax_scale=0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
