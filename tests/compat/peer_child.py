"""Runs one test file of a peer over `attnops.compat`; `peers.py` starts it, and reads the lines that it writes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import random
import re
import signal
import sys
import time
import traceback
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_shims
import pytest
import torch

HOPPER = (9, 0)
MOST_KEPT = 2 << 30
MADE_UP = {"triton": {"jit": lambda function: function}, "cudnn": {"backend_version": lambda: 92000}}
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
    if "'_OpNamespace'" in text:
        return "absent", first
    if type(error).__name__ == "XFailed":
        return "skipped", "the peer expects it to fail"
    if re.search("allocate memory|compiled without CUDA|none is available", text):
        return "not run", "memory, or no GPU"
    if "no kernel fits" in text:
        return "refused", re.sub(r"\d+", "n", text.split("\n")[-1])[:160]
    if "DID NOT RAISE" in text:
        return "serves more", first
    if isinstance(error, AssertionError) or type(error).__name__ == "Failed":
        return "wrong", " ".join(text.split())[:400] or "AssertionError"
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
        return sorted(chosen)[self.options["shard"] :: self.options["shards"]]

    def in_time(self) -> None:
        if self.options["deadline"] and time.time() > self.options["deadline"]:
            raise TimeoutError

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

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.in_time()

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


def _without_main(path: Path) -> tuple[types.ModuleType, Any]:
    """A script as a module, and its part for ``__main__``, which has not run."""
    tree = ast.parse(path.read_text(), str(path))
    at_end = ast.Module([node for node in tree.body if isinstance(node, ast.If)], [])
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    module = types.ModuleType(path.stem)
    module.__file__, sys.modules[path.stem] = str(path), module
    exec(compile(tree, str(path), "exec"), vars(module))
    return module, compile(at_end, str(path), "exec")


def flash_mla_cases(path: Path, runner: Runner) -> None:
    """FlashMLA's scripts: a function of one case, and a list of cases that they make."""
    module, at_end = _without_main(path)
    for name, cases in _flash_mla_lists(path.stem, module, at_end):
        test = module.run_test if path.stem.endswith("prefill") else module.test_flash_mla
        for i in runner.drawn(cases):
            of_case, case = f"{path.name}::{test.__name__}[{name}-{i}]", cases[i]
            if of_case in runner.done:
                continue
            runner.write(test=of_case, outcome="started")
            outcome: tuple[str, str] = ("passed", "")
            try:
                runner.in_time()
                with time_limit(runner.options["timeout"]), contextlib.redirect_stdout(io.StringIO()) as said:
                    result = test(case)
                if getattr(result, "is_correct", result) is False:
                    raise AssertionError(" ".join(said.getvalue().split("\n")[2:])[:150])
            except BaseException as error:  # an outcome, whatever it is
                outcome = classify(error)
            runner.write(test=of_case, outcome=outcome[0], reason=f"{outcome[1]} {case if outcome[1] else ''}"[:500])


def _flash_mla_lists(stem: str, module: types.ModuleType, at_end: Any) -> Iterator[tuple[str, list]]:
    """A dtype and its cases, without their timing. Defaults of torch stay as the script sets them."""
    cases: list = []
    os.environ["NO_COOLDOWN"] = "1"
    if stem.endswith("dense_decoding"):
        test = module.test_flash_mla
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            cases = []
            module.test_flash_mla = cases.append
            module.main(dtype)
            module.test_flash_mla = test
            for case in cases:
                case.test_performance = False
            yield name, cases
        return
    if stem.endswith("prefill"):
        test, module.run_test = module.run_test, lambda case: cases.append(case) or True
        vars(module)["__name__"] = "__main__"
        exec(at_end, vars(module))
        module.run_test = test
    else:
        test, result = module.test_flash_mla, module.Result(True, *[0.0] * 6)
        module.test_flash_mla = lambda case: cases.append(case) or result
        module.rich = unittest.mock.MagicMock()
        module.main()
        module.test_flash_mla = test
    for case in cases:
        case.num_runs = 0
    yield "bf16", cases


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
    for name in ("triton", "tvm_ffi", "cudnn", "nvidia", "scipy", "rich", "sgl_kernel"):
        try:
            importlib.import_module(name)
        except ImportError:
            peer_shims.Shim(name, MADE_UP.get(name))
    kind = options["kind"]
    if kind == "flashinfer":
        peer_shims.flashinfer(HOPPER)
        found = [str(Path(__file__).parent / "peer_modules"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(found)  # of scripts that tests start
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
            flash_mla_cases(path, runner)
        else:
            quiet = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(directory), "-W", "ignore"]
            pytest.main([*quiet, "--no-header", "--tb=no", str(path)], plugins=[runner])
    runner.write(test="", outcome="finished")


if __name__ == "__main__":
    main()
