"""Runs one test file of a peer over `attnops.compat`; `peers.py` starts it, and reads the lines that it writes.

All that takes long to import is imported here, once, and every file's process is a fork of the one that did.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import math
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

with contextlib.suppress(ImportError):
    importlib.import_module("triton")
for _name in ("torch.utils.flop_counter", "torch._dynamo"):  # they look for triton, and must not find a shim
    importlib.import_module(_name)
for _name in ("flash_attn", "flash_attn_interface", "flash_mla", "flashinfer", "sgl_kernel"):
    importlib.import_module(f"attnops.compat.{_name}")

HOPPER = (9, 0)
MOST_KEPT = 1 << 30
CASES_IN_TURN = 3  # of a function, one after another, of a share
MADE_UP = {
    "triton": {"jit": lambda function: function},
    "cudnn": {"backend_version": lambda: 92000},
    "scipy": {"sparse": peer_shims.SparseMatrices},
    "tvm_ffi": {"use_torch_stream": lambda context: context},
}
TOLD = ("serves more", "refused", "absent", "wrong", "error")  # with the case: its name is a number
OURS = ("attnops.compat", "attnops::")
# Tests that cannot say anything of attention here, and why.
LEFT_OUT = {
    "test_flash_attn_race_condition": "takes gradients",
    "test_bf16q_fp8kv_transform_mode_mapping": "asks for a function inside of the peer",
    "test_bf16q_fp8kv_transform_mode_rejects_invalid_value": "asks for a function inside of the peer",
    "test_cudnn_paged_prefill_cu_seqlens_direct_matches_legacy": "counts calls inside of the peer",
    "test_flash3_bw_compatibility": "asks for the peer's torch ops",
    "test_convert_vertical_slash_indexes_mergehead": "expects values of memory that nothing wrote",
}


def classify(error: BaseException) -> tuple[str, str]:
    """An outcome and its reason."""
    chain, text = error, str(error).strip()
    while chain is not None:
        if isinstance(chain, peer_shims.Absent):
            return "absent", str(chain)
        if isinstance(chain, (peer_shims.NeedsGpu, TimeoutError)):
            return "not run", type(chain).__name__
        if isinstance(chain, torch.cuda.OutOfMemoryError | MemoryError):
            return "not run", "memory"
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
    if re.search("allocate memory|out of memory|compiled without CUDA|none is available", text):
        return "not run", "memory, or no GPU"
    if "no kernel fits" in text:
        return "refused", re.sub(r"\d+", "n", text.split("\n")[-1])[:160]
    if "DID NOT RAISE" in text:
        return "serves more", first
    if isinstance(error, AssertionError) or type(error).__name__ == "Failed":
        return "wrong", " ".join(text.split())[:400] or "AssertionError"
    if text.startswith(OURS):
        return "refused", f"{type(error).__name__}: {first}"
    return "error", f"{type(error).__name__}: {first}"


class Runner:
    """A pytest plugin: draws parameters, limits time, writes a line before and after every test."""

    def __init__(self, options: dict) -> None:
        self.options, self.done = options, set(options["done"])
        self.out = Path(options["out"])
        self.reported: dict[str, tuple[str, str]] = {}
        self.calls: list = []
        self.of_call: dict[int, list[int]] = {}
        self.of_case: dict[str, list[int]] = {}
        self.place: dict[int, int] = {}
        self.rank = {case: i for i, case in enumerate(options["cases"])}
        self.started = 0.0
        self.ended: set[str] = set()

    def write(self, **line) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def drawn(self, count: int) -> dict[int, list[int]]:
        """Indices of so many of a function's cases for each seed, seed after seed, and whose they are."""
        seeds: dict[int, list[int]] = {}
        for seed in self.options["seeds"]:
            for i in random.Random(seed).sample(range(count), min(self.options["draws"], count)):
                seeds.setdefault(i, []).append(seed)
        mine = list(seeds)[self.options["shard"] :: self.options["shards"]]
        return {i: seeds[i] for i in mine}

    def limit(self, times: float = 1) -> float:
        """Seconds of a test, a few at least, and hardly more than the run has."""
        most = self.options["timeout"] * times
        return most if not self.options["deadline"] else min(most, max(self.options["deadline"] - time.time() + 5, 5))

    def is_late(self) -> bool:
        return bool(self.options["deadline"]) and time.time() > self.options["deadline"]

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc):
        """Makes the drawn cases alone. All of some functions are hundreds of thousands."""
        asked: list[tuple[Any, list, dict]] = []
        parametrize = metafunc.parametrize

        def ask(argnames, argvalues, indirect=False, ids=None, scope=None, *, _param_mark=None) -> None:
            asked.append((argnames, list(argvalues), {"indirect": indirect, "ids": ids, "scope": scope}))

        metafunc.parametrize = ask
        result = yield
        metafunc.parametrize = parametrize
        if not asked:
            return result
        axes, made = [], []
        for names, values, options in asked:  # each alone, for the names of its values
            metafunc._calls = []
            parametrize(names, values, **options)
            axes.append(list(metafunc._calls))
        drawn = self.drawn(math.prod(map(len, axes)))
        for place, i in enumerate(drawn or [0]):  # without one it would be a test without arguments
            metafunc._calls = []
            for at, axis, (names, values, options) in zip(_places(i, axes), axes, asked, strict=True):
                one = [values[at]] if values else []
                parametrize(names, one, **options | ({"ids": [axis[at].id]} if values else {}))
            made += metafunc._calls
            self.of_call |= {id(call): drawn.get(i) for call in metafunc._calls}
            self.place |= dict.fromkeys(map(id, metafunc._calls), place)
        metafunc._calls = made
        self.calls.append(made)  # alive, for the sake of their ids
        return result

    def pytest_collection_modifyitems(self, items) -> None:
        kept = []
        chosen = {item.function.__name__ for item in items} & set(self.options["functions"])
        for item in items:
            if chosen and item.function.__name__ not in chosen:
                continue
            call = getattr(item, "callspec", None)
            seeds = self.drawn(1).get(0) if call is None else self.of_call.get(id(call))
            if seeds and self.asked(item.nodeid):
                self.of_case[item.nodeid] = seeds
                kept.append(item)
        items[:] = sorted(kept, key=self.turn)

    def asked(self, test: str) -> bool:
        wanted = not self.rank or test in self.rank or test.partition("[")[0] in self.rank
        return wanted and test not in self.done

    def turn(self, item) -> tuple[int, int]:
        """A run that is cut has whole seeds; with `breadth` the last seed has cases of every function."""
        if self.options["in_order"]:
            return self.rank.get(item.nodeid, self.rank.get(item.nodeid.partition("[")[0], 0)), 0
        seed = self.options["seeds"].index(self.of_case[item.nodeid][0])
        place = self.place.get(id(getattr(item, "callspec", None)), 0)
        return seed, place // CASES_IN_TURN if self.options["breadth"] else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.write(test=item.nodeid, outcome="started", seeds=self.of_case[item.nodeid])
        self.started = time.time()
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        try:
            with time_limit(self.limit(4 if "compile" in item.nodeid else 1)):
                return (yield)
        finally:  # of the next file, too, where a process runs several: the peers' conftest does it
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:
                torch.set_default_device(device)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item) -> None:
        if self.is_late():
            item.session.shouldstop = "time"
            raise TimeoutError
        if "nvfp4" in item.function.__name__:
            pytest.skip("asks for NVFP4")
        if item.function.__name__ in LEFT_OUT:
            pytest.skip(LEFT_OUT[item.function.__name__])

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
            self.write_outcome(item.nodeid, outcome, reason)
        return report

    def write_outcome(self, test: str, outcome: str, reason: str) -> None:
        self.ended.add(test)
        seconds = round(time.time() - self.started, 2)
        self.write(test=test, outcome=outcome, reason=reason, seeds=self.of_case[test], seconds=seconds)

    def pytest_sessionfinish(self, session) -> None:
        for item in session.items:
            if item.nodeid not in self.ended:
                self.write(test=item.nodeid, outcome="not run", reason="time", seeds=self.of_case[item.nodeid])

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="absent", reason=f"import: {str(report.longrepr)[-160:]}")


def _places(index: int, axes: list[list]) -> list[int]:
    """Where in each axis a case of their product stands, the last axis running fastest."""
    places = []
    for axis in reversed(axes):
        index, at = divmod(index, max(len(axis), 1))
        places.append(at)
    return places[::-1]


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
        for i, seeds in runner.drawn(len(cases)).items():
            of_case, case = f"{path.name}::{test.__name__}[{name}-{i}]", cases[i]
            if not runner.asked(of_case):
                continue
            if runner.is_late():
                runner.write(test=of_case, outcome="not run", reason="time", seeds=seeds)
                continue
            runner.of_case[of_case], runner.started = seeds, time.time()
            runner.write(test=of_case, outcome="started", seeds=runner.of_case[of_case])
            outcome: tuple[str, str] = ("passed", "")
            try:
                with time_limit(runner.limit()), contextlib.redirect_stdout(io.StringIO()) as said:
                    result = test(case)
                if getattr(result, "is_correct", result) is False:
                    raise AssertionError(" ".join(said.getvalue().split("\n")[2:])[:150])
            except BaseException as error:  # an outcome, whatever it is
                outcome = classify(error)
            runner.write_outcome(of_case, outcome[0], f"{outcome[1]} {case if outcome[0] in TOLD else ''}"[:500])


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


def probe(device: str) -> None:
    """Ends with an error where a fork cannot reach the device."""
    torch.zeros(1, device=device)


def run(options: dict) -> None:
    """All of a shard of a file, in a process of its own."""
    for stream, name in ((1, os.devnull), (2, options["errors"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    directory, paths = Path(options["directory"]), [Path(file) for file in options["files"]]
    sys.argv = [str(paths[0])]
    sys.path[:0] = [*dict.fromkeys(str(path.parent) for path in paths), str(directory)]
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
            for path in paths:
                flash_mla_cases(path, runner)
        else:
            quiet = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(directory), "-W", "ignore"]
            pytest.main([*quiet, "--no-header", "--tb=no", *map(str, paths)], plugins=[runner])
    runner.write(test="", outcome="finished")
