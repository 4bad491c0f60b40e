"""Runs the gpu tests in many processes, file by file, and comes to a summary whatever a test does.

    python tools/gpu_tests.py                                   all of them
    python tools/gpu_tests.py --jobs 12 --seconds 300           what begins within so long
    python tools/gpu_tests.py tests/fmha tests/xqa_decode       some
    python tools/gpu_tests.py --times times.json                files that took longest first; writes what they took
    python tools/gpu_tests.py --seconds 150 --state state.json  in calls of 150 s: each goes on where the last was cut

A process of pytest-xdist collects every test of the tree before it runs one. Here a process collects one file, runs at
most `--most` of its tests, for at most `--piece-seconds`, and says how many are left: those are a further piece of
work. A test that stands still, or kills its process, is a failure of its own; those behind it go on in another process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SANITIZER = re.compile(r"^.*(runtime error:|(Address|Thread)Sanitizer:).*$", re.MULTILINE)  # what it says first
DEAD_CONTEXT = re.compile(r"CUDA error|illegal memory access|misaligned address|cudaError|CUDA_ERROR")


@dataclass
class Piece:
    """Tests [begin, end) of a file; without an end as many as a process runs, and the others are to follow."""

    path: str
    begin: int = 0
    end: int | None = None


@dataclass
class Process:
    """A piece that runs.

    Attributes:
        test, since: Which of its tests runs, from when.
        done: How many have ended.
        end: Of its tests, once it has counted them.
    """

    piece: Piece
    pid: int
    words: Any  # what it prints
    buffer: bytes = b""
    test: str = ""
    since: float = field(default_factory=time.monotonic)
    in_test: bool = False
    done: int = 0
    end: int = 0
    over: bool = False  # nothing more is heard of it


class Reporter:
    """A plugin of pytest: chooses a piece's tests, and tells of each when it begins and ends."""

    def __init__(self, pipe: int, piece: Piece, options: argparse.Namespace) -> None:
        self.pipe, self.piece, self.most, self.known = pipe, piece, options.most, options.known
        self.end = time.monotonic() + options.piece_seconds

    def tell(self, **what: Any) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    def pytest_collection_finish(self, session) -> None:
        items, begin = [item for item in session.items if item.nodeid not in self.known], self.piece.begin
        end = min(begin + self.most, len(items)) if self.piece.end is None else self.piece.end
        self.tell(tests=len(items), last=end)
        session.items[:] = items[begin:end]

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.tell(end=f"{report.nodeid} (collecting)", outcome="failed", seconds=0.0, text=str(report.longrepr))

    def pytest_runtest_teardown(self, item, nextitem) -> None:
        if nextitem is not None and time.monotonic() > self.end:
            item.session.shouldstop = "the tests behind this one are for another process"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(begin=nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        passed = report.outcome == "passed"
        if passed and report.when == "call":
            self.tell(part=report.nodeid, outcome="passed", seconds=report.duration)
        elif not passed:
            outcome = "skipped" if report.skipped else "failed"
            text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
            self.tell(part=report.nodeid, outcome=outcome, seconds=report.duration, text=text[-3000:])
            if report.failed and DEAD_CONTEXT.search(text):
                self.tell(dead=True)
        if report.when == "teardown":
            self.tell(end=report.nodeid)


def _child(piece: Piece, options: argparse.Namespace, pipe: int, words: int) -> None:
    """Runs a piece in this process, which was made for it."""
    import pytest

    os.dup2(words, 1)
    os.dup2(words, 2)
    arguments = [piece.path, "-m", options.marks, "-p", "no:cacheprovider", "--import-mode=importlib", "--tb=short"]
    arguments += ["-k", options.k] if options.k else []
    arguments += ["-s"] if options.s else []
    if pytest.main(arguments, plugins=[Reporter(pipe, piece, options)]) in (3, 4):  # pytest itself has failed
        raise RuntimeError("pytest did not run")


def _start(piece: Piece, options: argparse.Namespace) -> tuple[Process, int]:
    """(the process, what to read its messages from)."""
    read, write = os.pipe()
    words = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            _child(piece, options, write, words.fileno())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    return Process(piece, pid, words, test=f"{piece.path} (collecting)"), read


class Run:
    """All pieces, and what became of their tests."""

    def __init__(self, pieces: list[Piece], options: argparse.Namespace) -> None:
        self.waiting, self.options, self.begin = pieces, options, time.monotonic()
        self.outcomes: dict[str, str] = {}
        self.failures: list[str] = []
        self.seconds: Counter[str] = Counter()
        self.tests: dict[str, int] = {}  # of each file whose tests were counted
        self.ended: Counter[str] = Counter()  # of them
        self.running: dict[int, Process] = {}  # by what their messages are read from
        self.stopped = ""
        self.selector = selectors.DefaultSelector()

    def work(self) -> None:
        while self.waiting or self.running:
            if not self.stopped and time.monotonic() - self.begin > self.options.seconds:
                self.stopped = f"the {self.options.seconds:.0f} s are over"
            if self.stopped:
                self._stop()
                return
            while self.waiting and len(self.running) < self.options.jobs:
                process, read = _start(self.waiting.pop(0), self.options)
                self.running[read] = process
                self.selector.register(read, selectors.EVENT_READ)
            for key, _ in self.selector.select(1.0):
                self._read(key.fd)
            for process in list(self.running.values()):
                most = self.options.test_seconds * (1 if process.in_test else 3)
                if time.monotonic() - process.since > most and not process.over:
                    os.kill(process.pid, signal.SIGABRT)  # it prints where it stands
                    time.sleep(1.0)
                    os.kill(process.pid, signal.SIGKILL)
                    self._lost(process, f"stands still for {most:.0f} s")

    def _stop(self) -> None:
        for process in self.running.values():
            os.kill(process.pid, signal.SIGKILL)
            print(f"CUT {process.test} after {time.monotonic() - process.since:.0f} s", flush=True)
        for process in self.running.values():
            os.waitpid(process.pid, 0)

    def _read(self, read: int) -> None:
        process = self.running[read]
        data = os.read(read, 1 << 16)
        if not data:
            self._ended(read)
            return
        *lines, process.buffer = (process.buffer + data).split(b"\n")
        for line in lines:
            self._hear(process, json.loads(line))

    def _hear(self, process: Process, said: dict[str, Any]) -> None:
        piece = process.piece
        if "tests" in said:
            self.tests[piece.path], process.end = said["tests"], said["last"]
            if piece.end is None and process.end < said["tests"]:
                self.waiting.insert(0, Piece(piece.path, process.end))
        elif "begin" in said:
            process.test, process.since, process.in_test = said["begin"], time.monotonic(), True
        elif "outcome" in said:
            name = said.get("part") or said["end"]
            self.seconds[piece.path] += said["seconds"]
            if self.outcomes.get(name) != "failed":
                self.outcomes[name] = said["outcome"]
            if said["outcome"] == "failed":
                self._failed(name, said["text"])
        elif "end" in said:
            process.done += 1
            self.ended[piece.path] += 1
            process.test, process.since, process.in_test = f"{said['end']} (behind it)", time.monotonic(), False
        elif "dead" in said:  # a GPU's context does not outlive a fault of a kernel
            os.kill(process.pid, signal.SIGKILL)
            self._count_lost(process)
            self._go_on(process)

    def _failed(self, name: str, text: str) -> None:
        self.failures.append(name)
        print(f"FAILED {name}\n" + "\n".join(f"    {line}" for line in text.splitlines()[-14:]), flush=True)

    def _lost(self, process: Process, how: str) -> None:
        """A test that has not ended, and will not."""
        process.words.seek(0)
        words = process.words.read().decode(errors="replace")
        report = SANITIZER.search(words)
        *_, last = words.split("Current thread")  # faulthandler's: the newest frames come first
        last = "\n".join(last.splitlines()[:9]) if last is not words else words[-1500:]
        last = "\n".join(words[report.start() :].splitlines()[:12]) if report else last
        self.outcomes[process.test] = "failed"
        self._failed(process.test, f"{last}\n{how}")
        self._count_lost(process)
        self._go_on(process)

    def _count_lost(self, process: Process) -> None:
        """A test that began ends here."""
        process.done += process.in_test
        self.ended[process.piece.path] += process.in_test

    def _go_on(self, process: Process) -> None:
        """The rest of a piece whose process is no more."""
        process.over = True
        at = process.piece.begin + process.done
        if process.done and at < process.end:
            self.waiting.insert(0, Piece(process.piece.path, at, process.end))

    def _ended(self, read: int) -> None:
        process = self.running.pop(read)
        self.selector.unregister(read)
        os.close(read)
        _, status = os.waitpid(process.pid, 0)
        if not process.over and status != 0:
            code = os.waitstatus_to_exitcode(status)
            self._lost(process, f"ends its process ({code})")
        elif not process.over:
            self._go_on(process)
        process.words.close()

    def report(self) -> str:
        counts = Counter(self.outcomes.values())
        missing = {path: n - self.ended[path] for path, n in self.tests.items() if n > self.ended[path]}
        files = {piece.path for piece in self.waiting if piece.path not in self.tests}
        files |= {p.piece.path for p in self.running.values() if p.piece.path not in self.tests}
        lines = [f"NOT REACHED {count} of {self.tests[path]} tests of {path}" for path, count in missing.items()]
        lines += [f"NOT REACHED {path}" for path in sorted(files)]
        lines += [f"FAILED {name}" for name in self.failures]
        summary = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        summary += f", {sum(missing.values())} and {len(files)} files not reached" if missing or files else ""
        summary += f" in {time.monotonic() - self.begin:.0f} s by {self.options.jobs} processes"
        lines.append(f"{summary} ({self.stopped})" if self.stopped else summary)
        return "\n".join(lines)

    @property
    def complete(self) -> bool:
        return not self.stopped and not self.failures


def files_of(paths: list[str], times: dict[str, float]) -> list[Piece]:
    """Files that name the marker, those first that took longest; of those without a time, the largest."""
    found: set[Path] = set()
    for path in paths:
        found |= {ROOT / path} if path.endswith(".py") else set((ROOT / path).rglob("test_*.py"))
    sizes = {os.path.relpath(path, ROOT): path.stat().st_size for path in found}
    order = sorted(sizes, key=lambda path: (times.get(path, sys.maxsize), sizes[path]), reverse=True)
    return [Piece(path) for path in order]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests"], help="files and folders of tests")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="processes at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="all end then")
    parser.add_argument("--test-seconds", type=float, default=120, help="that one test may take")
    parser.add_argument("--most", type=int, default=200, help="tests of one process")
    parser.add_argument("--piece-seconds", type=float, default=20, help="that a process begins tests for")
    parser.add_argument("--times", help="a file of JSON, seconds by file of tests: read, and written")
    parser.add_argument("--state", type=Path, help="a file of JSON: tests that passed before are left out; written")
    parser.add_argument("--marks", default="gpu", help="the expression of pytest's -m")
    parser.add_argument(
        "-s", action="store_true", help="pytest's -s: a tool's last words are not lost with the process"
    )
    parser.add_argument("-k", default="", help="that of its -k")
    return parser


def main() -> None:
    options = _parser().parse_args()
    os.chdir(ROOT)
    for name, value in {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}.items():
        os.environ.setdefault(name, value)  # the processes are as many as the cores
    import pytest  # noqa: F401 (what the processes need is imported once, before they are made)
    import torch  # noqa: F401 (no context of a GPU is made here: a process could not use it)

    # What the processes leave out: outcomes of calls before this one, by test.
    before = json.loads(options.state.read_text()) if options.state and options.state.exists() else {}
    options.known = {name: outcome for name, outcome in before.items() if outcome != "failed"}
    times_file = Path(options.times) if options.times else None
    times = json.loads(times_file.read_text()) if times_file and times_file.exists() else {}
    pieces = files_of(options.paths, times)
    if options.marks == "gpu":
        pieces = [piece for piece in pieces if re.search(r"\bgpu\b", (ROOT / piece.path).read_text())]
    run = Run(pieces, options)

    def stop(number: int, frame: object) -> None:
        run.stopped = "it was told to end"

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    run.work()
    if times_file:
        times_file.write_text(json.dumps({path: round(s, 1) for path, s in run.seconds.most_common()}, indent=1))
    if options.state:
        options.state.write_text(json.dumps(before | run.outcomes, indent=0))
    if options.known:
        print(f"{len(options.known)} tests ended well in calls before this one")
    print(run.report())
    sys.exit(not run.complete)


if __name__ == "__main__":
    main()
