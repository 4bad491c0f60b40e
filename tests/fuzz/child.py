"""The process that runs cases: it says which one it begins, so that whoever finds it dead knows what killed it."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import sys
import time

from .cases import Result, run_case
from .runner import CASE_SECONDS


def serve(seed: int, device: str, only: tuple[str, ...]) -> None:
    """Reads numbers of cases, a line each; answers with a line of JSON each. Ends with its input, or when it must."""
    faulthandler.enable()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool each of many processes would be too much
    import torch
    import torch._dynamo  # with all that it imports, which is no garbage: captures look through all objects

    gc.collect()
    gc.freeze()
    torch.set_num_threads(int(os.environ.get("FUZZ_THREADS", "2")))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    answers.write("ready\n")
    for line in sys.stdin:
        faulthandler.dump_traceback_later(0.9 * CASE_SECONDS)  # where it stands: this process is killed soon
        begin = time.monotonic()
        result = run_case(seed, int(line), device, only)
        result.seconds = time.monotonic() - begin
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(dataclasses.asdict(result)) + "\n")
        if result.fatal:
            break
    answers.write(json.dumps(dataclasses.asdict(rows_hit())) + "\n")


def rows_hit() -> Result:
    """How often each row of each table of kernels ran in this process, as things seen."""
    from attnops.info import kernel_counts

    return Result("rows", "", seen=[f"row {row} {count}" for row, count in kernel_counts().items()])
