"""Hands cases to processes, counts what they hit, and starts a process again where a case has killed it."""

from __future__ import annotations

import collections
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASE_SECONDS = float(os.environ.get("CASE_SECONDS", "120"))  # a case that takes longer hangs
START_SECONDS = 300.0
TELL_SECONDS = 20.0  # between two calls of `on_progress`
STOP_SECONDS = 10.0  # for the cases that run when a run is told to end
# Of a run, for a later one.
KEPT = ("counted", "started", "crashes", "elapsed", "failures", "seen", "refused", "seconds")


class _Child:
    """A process, and what it said before it died."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        if self.answer(START_SECONDS) != "ready":
            raise RuntimeError(f"a process of the fuzzer does not start: {self.last_words()}")

    def answer(self, seconds: float) -> str:
        """A line without its end; empty when the process has died or was killed for its silence."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.process.kill()
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, index: int) -> str:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{index}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.answer(CASE_SECONDS)

    def finish(self) -> str:
        """Ends it in peace; its last answer."""
        assert self.process.stdin
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            return ""
        last = self.answer(START_SECONDS)
        self.process.wait()
        return last

    def last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        frames = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
        if frames:  # faulthandler's: the thread that died, or of those that wait the last, which is the first one
            frames = [number for number in frames if lines[number].startswith("Current")] or frames
            return " / ".join(re.sub(r'File ".*/(.*)", line', r"\1", line) for line in lines[frames[-1] + 1 :][:6])
        return " / ".join(lines[-3:])[:400]


class Run:
    """Cases of one seed.

    Attributes:
        counted: Cases that reached a kernel, or the error that they were made for.
        failures: A line each, which reproduces it.
        seen: How often each op, mode, backend and row was hit.
    """

    def __init__(
        self, seed: int, device: str = "cpu", jobs: int = 1, only: tuple[str, ...] = (), prefix: list[str] | None = None
    ) -> None:
        self.seed, self.device, self.jobs, self.only = seed, device, jobs, only
        self.prefix = prefix or []
        self.counted, self.started, self.crashes, self.elapsed = 0, 0, 0, 0.0
        self.failures: list[str] = []
        self.seen: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()  # by family
        self.on_failure: Callable[[str], None] = lambda line: None  # hears of each at once
        self.on_progress: Callable[[], None] = lambda: None  # from time to time
        self.stopped = False  # when set, no further case begins
        self._children: set[_Child] = set()
        self._lock = threading.Lock()

    def work(self, cases: int | None, seconds: float | None, most_failures: int = 20) -> None:
        """Runs cases 0, 1, 2, ... until enough of them count, the time is over, or enough have failed."""
        begin, before = time.monotonic(), self.elapsed

        def enough() -> bool:
            late = seconds is not None and time.monotonic() - begin >= seconds
            return self.stopped or late or (cases is not None and self.counted >= cases) or len(self.failures) >= most

        most = most_failures + len(self.failures)
        threads = [threading.Thread(target=self._serve, args=(enough,), daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        tell = begin + TELL_SECONDS
        for thread in threads:
            while thread.is_alive() and not self.stopped:
                thread.join(0.5)
                if time.monotonic() > tell:
                    tell += TELL_SECONDS
                    self.elapsed = before + time.monotonic() - begin
                    self.on_progress()
        if self.stopped:
            self._end(threads)
        self.elapsed = before + time.monotonic() - begin

    def _end(self, threads: list[threading.Thread]) -> None:
        """Lets the cases that run come to their ends, for some seconds."""
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        for child in list(self._children):
            child.process.kill()

    def _start(self) -> _Child:
        command = [*self.prefix, sys.executable, "-m", "tests.fuzz", "--serve", "--seed", str(self.seed)]
        command += ["--device", self.device, "--only", ",".join(self.only)]
        child = _Child(command, dict(os.environ))
        self._children.add(child)
        return child

    def _finish(self, child: _Child) -> None:
        self._children.discard(child)
        self._count_rows(child.finish())

    def _serve(self, enough: Callable[[], bool]) -> None:
        try:
            self._run_cases(enough)
        except Exception as error:  # a thread that ends in silence would look like a clean run
            self._failed(f"the fuzzer itself: {type(error).__name__}: {error}")

    def _run_cases(self, enough: Callable[[], bool]) -> None:
        child = self._start()
        while not enough():
            with self._lock:
                index, self.started = self.started, self.started + 1
            answer = child.ask(index)
            if not answer:
                if self.stopped:
                    return
                self._crashed(index, child)
                child = self._start()
                continue
            result = json.loads(answer)
            self._count(index, result)
            if result["fatal"]:
                self._finish(child)
                child = self._start()
        self._finish(child)

    def _crashed(self, index: int, child: _Child) -> None:
        code = child.process.wait()
        self._children.discard(child)
        how = "hangs" if code == -9 else f"ends the process ({code})"
        with self._lock:
            self.crashes += 1
            self._failed(f"{self.line_of(index)}  # {how}: {child.last_words()}")

    def _count(self, index: int, result: dict) -> None:
        with self._lock:
            self.seconds[result["family"]] += result["seconds"]
            if result["status"] == "void":
                return
            if result["status"] == "refused":
                self.refused[result["message"]] += 1
                return
            self.counted += 1
            self.seen.update(result["seen"])
            self.seen[f"family {result['family']}"] += 1
            if result["status"] == "failed":
                self._failed(f"{self.line_of(index)}  # {result['family']}: {result['message']}")

    def _failed(self, line: str) -> None:
        self.failures.append(line)
        self.on_failure(line)

    def _count_rows(self, answer: str) -> None:
        if answer:
            with self._lock:
                for name in json.loads(answer)["seen"]:
                    row, _, count = name.rpartition(" ")
                    self.seen[row] += int(count)

    def save(self, path: Path) -> None:
        """What a later run of the same seed goes on from."""
        with self._lock:
            kept = {key: vars(self)[key] for key in ("seed", "device", "only", *KEPT)}
            path.write_text(json.dumps(kept))

    def load(self, path: Path) -> None:
        kept = json.loads(path.read_text())
        if (kept["seed"], kept["device"], tuple(kept["only"])) != (self.seed, self.device, self.only):
            raise ValueError(f"{path} is of seed {kept['seed']} on {kept['device']}, families {kept['only']}")
        for key in KEPT:
            setattr(self, key, type(getattr(self, key))(kept[key]))

    def line_of(self, index: int) -> str:
        only = f" --only {','.join(self.only)}" if self.only else ""
        device = "" if self.device == "cpu" else f" --device {self.device}"
        return f"python -m tests.fuzz --seed {self.seed}{device}{only} --case {index}"

    def never_hit(self) -> list[str]:
        """What the run should have hit and did not: rows of kernel tables, and what `expected` lists."""
        from .expected import RARE, cannot_run_here, expected  # imports the package, which a parent needs nowhere else

        wanted = set() if self.only else expected(self.device)
        if self.counted < 5000:  # a short run has some five wrong calls of each function, and may have none
            wanted = {name for name in wanted if not name.startswith(RARE)}
        missed = (name for name in wanted | set(self.seen) if not self.seen[name])
        return sorted(name for name in missed if not cannot_run_here(name, self.device))

    def summary(self) -> str:
        rate = self.counted / max(self.elapsed, 1e-9)
        return (
            f"seed {self.seed} on {self.device}: {self.counted} cases counted of {self.started}, "
            f"{len(self.failures)} failed ({self.crashes} of them crashes), {self.elapsed:.1f} s, {rate:.0f} cases/s"
        )

    def report(self) -> str:
        lines = [f"{name}: {count}" for name, count in sorted(self.seen.items())]
        lines += [f"seconds of {name}: {seconds:.1f}" for name, seconds in self.seconds.most_common()]
        lines += [f"refused: {count} x {reason}" for reason, count in self.refused.items()]
        lines += [f"FAILED {failure}" for failure in self.failures]
        missed = self.never_hit()
        lines += [f"NEVER HIT {name}" for name in missed]
        if any(name.startswith("op ") for name in missed) and not self.only:
            lines.append("A new op needs cases that call it: FAMILIES of tests/fuzz/cases.py")
        return "\n".join([*lines, self.summary()])
