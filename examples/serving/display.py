"""What the user sees while requests are served: live lines on a terminal, plain lines in a log."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Mapping

from models import decode
from tqdm import tqdm

from .engine import Engine
from .request import Request
from .scheduler import Step

WIDTH = 100
LOG_INTERVAL = 5.0  # seconds between progress lines in a log


class Display:
    """Follows an engine: one line per running request with the end of its text, a bar over all, each finished text.

    Args:
        requests: All that will be served.
        titles: By request id.
        shown: By request id, characters of the prompt's end that are printed with the continuation.
        live: Terminal lines that are overwritten; by default when the output is a terminal.
        quiet: No texts and no progress.
    """

    def __init__(
        self,
        requests: list[Request],
        titles: Mapping[int, str],
        shown: Mapping[int, int],
        live: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self._requests = requests
        self._titles = titles
        self._shown = shown
        self._quiet = quiet
        self._live = (sys.stdout.isatty() if live is None else live) and not quiet
        self._done: set[int] = set()
        self._lines: dict[int, tqdm] = {}
        self._last_log = time.perf_counter()
        self._bar = tqdm(
            total=sum(request.max_new_tokens for request in requests),
            unit=" bytes",
            disable=not self._live,
            file=sys.stdout,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} bytes [{elapsed}, {rate_fmt}]{postfix}",
        )

    def __call__(self, engine: Engine, step: Step) -> None:
        """After every step of the engine."""
        if self._quiet:
            return
        scheduler = engine.scheduler
        finished = [share.request for share in step.shares if share.request.finish_reason]
        if self._live:
            for share in step.shares:
                self._follow(share.request)
            self._bar.n = sum(len(request.output) for request in self._requests)
            self._bar.set_postfix_str(f"{scheduler.pages_in_use} pages, {len(scheduler.waiting)} waiting")
        elif time.perf_counter() - self._last_log > LOG_INTERVAL:
            self._last_log = time.perf_counter()
            written = sum(len(request.output) for request in self._requests)
            print(
                f"  step {engine.clock:4d}: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
                f"{len(self._done)} done, {written} bytes written, {scheduler.pages_in_use} pages in use",
                flush=True,
            )
        for request in finished:
            self._finish(request)

    def close(self) -> None:
        """Takes the live lines away."""
        for line in self._lines.values():
            line.close()
        self._bar.leave = False
        self._bar.close()

    def _follow(self, request: Request) -> None:
        """The request's own line: prefill progress, or the end of its text."""
        if request.id not in self._lines:
            position = 1 + max((-line.pos for line in self._lines.values()), default=0)
            self._lines[request.id] = tqdm(position=position, bar_format="{desc}", leave=False, file=sys.stdout)
        if request.computed < len(request.prompt):
            text = f"prefill {request.computed}/{len(request.prompt)}"
        else:
            room = min(60, shutil.get_terminal_size().columns - 28)
            text = decode(request.output)[-max(room, 1) :].replace("\n", " ")
        self._lines[request.id].set_description_str(f"  {request.id:2d} {self._titles[request.id]:<20} {text}")

    def _finish(self, request: Request) -> None:
        self._done.add(request.id)
        if request.id in self._lines:
            self._lines.pop(request.id).close()
        seconds = request.finished_at - request.admitted_at
        head = (
            f"  [{request.id}] {self._titles[request.id]}: prompt of {len(request.prompt)} bytes, {request.reused} of "
            f"them from the prefix cache; wrote {len(request.output)} in {seconds:.1f} s"
        )
        again = f"; preempted {request.preemptions}x" if request.preemptions else ""
        tqdm.write(f"{head}{again}\n{self._text(request)}\n", file=sys.stdout)

    def _text(self, request: Request) -> str:
        prompt = decode(request.prompt)[-self._shown[request.id] :]
        cut = "..." if request.finish_reason == "length" else ""
        text = " ".join((prompt + "| " + decode(request.output) + cut).split())
        return textwrap.fill(text, WIDTH, initial_indent="      ", subsequent_indent="      ")
