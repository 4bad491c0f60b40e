"""Runs one test file of a peer over `attnops.compat`; `peers.py` starts it, and reads the lines that it writes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import traceback
from pathlib import Path

import peer_shims
import pytest
import torch

HOPPER = (9, 0)
MOST_KEPT = 2 << 30
OURS = ("attnops.compat", "attnops::")


def classify(error: BaseException) -> tuple[str, str]:
    """An outcome and its reason."""
    chain, text = error, str(error).strip()
    while chain is not None:
        if isinstance(chain, peer_shims.Absent):
            return "absent", str(chain)
        if isinstance(chain, (peer_shims.NeedsGpu, TimeoutError)):
            return "not run", type(chain).__name__
        chain = chain.__cause__ or chain.__context__
    first = re.sub(r"\d+", "n", text.split("\n")[0])[:160]
    if isinstance(error, NotImplementedError) and text.startswith(OURS):
        return "refused", first
    if "Could not run 'attnops::" in text:
        return "refused", "no CUDA kernel: " + re.search(r"attnops::\w+", text)[0]
    if type(error).__name__ == "XFailed":
        return "skipped", "the peer expects it to fail"
    if re.search("allocate memory|compiled without CUDA", text):
        return "not run", "memory, or no GPU"
    if "no kernel fits" in text:
        return "refused", re.sub(r"\d+", "n", text.split("\n")[-1])[:160]
    if "DID NOT RAISE" in text:
        return "serves more", first
    if isinstance(error, AssertionError) or type(error).__name__ == "Failed":
        return "wrong", first or "AssertionError"
    if text.startswith(OURS):
        return "refused", f"{type(error).__name__}: {first}"
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return "not run", "memory"
    return "error", f"{type(error).__name__}: {first}"


class Runner:
    """A pytest plugin: draws parameters, limits time, writes a line before and after every test."""

    def __init__(self, options: dict) -> None:
        self.options, self.done = options, set(options["done"])
        self.out = Path(options["out"])
        self.reported: dict[str, tuple[str, str]] = {}

    def write(self, **line) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def drawn(self, names: list) -> list[int]:
        """Indices of so many of a function's cases for each seed."""
        chosen: set[int] = set()
        for seed in self.options["seeds"]:
            chosen |= set(random.Random(seed).sample(range(len(names)), min(self.options["draws"], len(names))))
        return sorted(chosen)

    def pytest_collection_modifyitems(self, items) -> None:
        functions: dict[str, list] = {}
        for item in items:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = [cases[i] for cases in functions.values() for i in self.drawn(cases)]
        items[:] = [item for item in kept if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.write(test=item.nodeid, outcome="started")
        with time_limit(self.options["timeout"]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
            self.reported[item.nodeid] = ("skipped", str(call.excinfo.value)[:160])
        elif call.excinfo is not None and item.nodeid not in self.reported:
            self.reported[item.nodeid] = classify(call.excinfo.value)
            if self.options["verbose"]:
                self.write(test=item.nodeid, trace="".join(traceback.format_exception(call.excinfo.value))[-3000:])
        if call.when == "teardown":
            if self.options["device"] == "cuda" and torch.cuda.memory_reserved() > MOST_KEPT:
                torch.cuda.empty_cache()  # other files run beside this one
            outcome, reason = self.reported.get(item.nodeid, ("passed", ""))
            self.write(test=item.nodeid, outcome=outcome, reason=reason)
        return report

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="absent", reason=f"import: {str(report.longrepr)[-160:]}")


@contextlib.contextmanager
def time_limit(seconds: float):
    def stop(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def flash_mla_cases(path: Path, runner: Runner, dtype: str) -> None:
    """A script with a function of one case and a list of cases in its `main`."""
    module = importlib.import_module(path.stem)
    cases: list = []
    test, module.test_flash_mla = module.test_flash_mla, cases.append
    module.main({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    for i in runner.drawn(cases):
        name, case = f"{path.name}::test_flash_mla[{dtype}-{i}]", cases[i]
        if name in runner.done:
            continue
        case.test_performance = False
        runner.write(test=name, outcome="started")
        outcome: tuple[str, str] = ("passed", "")
        try:
            with time_limit(runner.options["timeout"]), contextlib.redirect_stdout(None):
                test(case)
        except BaseException as error:  # an outcome, whatever it is
            outcome = classify(error)
        runner.write(test=name, outcome=outcome[0], reason=f"{outcome[1]} {case if outcome[1] else ''}"[:300])


def main() -> None:
    options = json.loads(sys.argv[1])
    directory, path = Path(options["directory"]), Path(options["file"])
    sys.path[:0] = [str(path.parent), str(directory)]
    for name in ("torch.utils.flop_counter", "torch._dynamo"):  # they look for triton, and must not find a shim
        importlib.import_module(name)
    if options["device"] == "cpu":
        mode = peer_shims.cuda_is_cpu(HOPPER)
        os.environ.setdefault("FLASH_ATTENTION_DISABLE_BACKWARD", "TRUE")
    else:
        mode = contextlib.nullcontext()
    os.environ["FLASH_ATTENTION_DISABLE_BACKWARD"] = "TRUE"
    for name in ("triton", "tvm_ffi", "cudnn", "nvidia", "scipy", "sgl_kernel"):
        try:
            importlib.import_module(name)
        except ImportError:
            peer_shims.Shim(name, {"jit": lambda function: function} if name == "triton" else None)
    kind = options["kind"]
    if kind == "flashinfer":
        peer_shims.flashinfer(HOPPER)
    elif kind == "flash_attention":
        peer_shims.flash_attention(directory)
    elif kind == "flash_mla":
        peer_shims.flash_mla()
    else:
        peer_shims.sgl_kernel()
    runner = Runner(options)
    torch.set_grad_enabled(False)
    with mode:
        if kind == "flash_mla":
            for dtype in ("bf16", "fp16"):
                flash_mla_cases(path, runner, dtype)
        else:
            quiet = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(directory), "-W", "ignore"]
            pytest.main([*quiet, "--no-header", "--tb=no", str(path)], plugins=[runner])
    runner.write(test="", outcome="finished")


if __name__ == "__main__":
    main()
