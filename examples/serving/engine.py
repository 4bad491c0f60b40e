"""The serving loop: arrivals, steps, sampling, and what they cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

from attnops.pools import PagedTokenToKVPoolAllocator
from attnops.types import ForwardMode
from models import END_OF_TEXT, sample

from .request import Request
from .runner import ModelRunner
from .scheduler import Scheduler, Step


@dataclasses.dataclass
class Stats:
    """Counts and times of a run. A step that holds prompt tokens counts as prefill with all that it computes.

    Attributes:
        prefill_tokens, prefill_rode_along, prefill_seconds: Prompt tokens computed, decode tokens in the same steps.
        decode_tokens, decode_seconds: Of steps in which every request brings one token.
        prefill_model_seconds, decode_model_seconds: Of each step, what the model took, up to logits on the host;
            sampling and scheduling are not in it.
        peak_pages, peak_request_pages: In use at most; of these, held by running requests at most.
    """

    steps: int = 0
    mixed_steps: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_rode_along: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    peak_pages: int = 0
    peak_request_pages: int = 0
    most_running: int = 0
    prefill_model_seconds: list[float] = dataclasses.field(default_factory=list)
    decode_model_seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, step: Step, seconds: float, model_seconds: float) -> None:
        self.steps += 1
        self.most_running = max(self.most_running, len(step.shares))
        if step.forward_mode is ForwardMode.DECODE:
            self.decode_steps += 1
            self.decode_tokens += step.num_tokens
            self.decode_seconds += seconds
            self.decode_model_seconds.append(model_seconds)
            return
        riding = sum(share.begin >= len(share.request.prompt) for share in step.shares)
        self.prefill_steps += 1
        self.mixed_steps += step.forward_mode is ForwardMode.MIXED
        self.prefill_tokens += step.num_tokens - riding
        self.prefill_rode_along += riding
        self.prefill_seconds += seconds
        self.prefill_model_seconds.append(model_seconds)


class Engine:
    """Serves requests as they arrive, until all are done.

    Args:
        chunk: Most tokens per step.
        use_cache: Share prefixes between requests.
        keep_logits: Keep what every token was chosen from (`Request.choices`).
    """

    lookahead = 0  # cells of a decoding request for drafts

    def __init__(self, runner: ModelRunner, chunk: int, use_cache: bool = True, keep_logits: bool = True) -> None:
        self.runner = runner
        self.allocator = PagedTokenToKVPoolAllocator(runner.pool.size, runner.pool.page_size)
        self.scheduler = Scheduler(self.allocator, runner.rows, chunk, use_cache, self.lookahead)
        self.keep_logits = keep_logits
        self.stats = Stats()
        self.clock = 0

    def serve(self, requests: Iterable[Request], after_step: Callable[[Engine, Step], None] | None = None) -> None:
        """Runs all requests to their end.

        Args:
            after_step: Called after every step, with its tokens appended: for a display.
        """
        coming = sorted(requests, key=lambda request: request.arrival)
        while coming or self.scheduler.has_work:
            while coming and coming[0].arrival <= self.clock:
                self.scheduler.submit(coming.pop(0))
            step = self.scheduler.schedule()
            self.clock += 1
            if step is None:
                continue  # nobody is here yet
            self._run(step)
            if after_step is not None:
                after_step(self, step)

    def _run(self, step: Step) -> None:
        begin = time.perf_counter()
        stats, scheduler = self.stats, self.scheduler
        stats.peak_pages = max(stats.peak_pages, scheduler.pages_in_use)
        stats.peak_request_pages = max(stats.peak_request_pages, scheduler.pages_of_requests)
        before = time.perf_counter()
        logits = self.runner.run(step)
        model_seconds = time.perf_counter() - before
        scheduler.commit(step)
        for share, row in zip(step.shares, logits):
            request = share.request
            if request.pending:
                continue  # its prompt goes on in the next step
            if self.keep_logits:
                request.choices.append(row)
            request.append(sample(row, request.temperature, request.generator, request.top_p), END_OF_TEXT)
            if request.finish_reason:
                scheduler.finish(request)
        stats.add(step, time.perf_counter() - begin, model_seconds)
