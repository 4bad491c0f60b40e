"""Serves random requests on the CPU for a long time, and says what has leaked or was written otherwise than alone.

    python tools/soak.py                 ten minutes
    python tools/soak.py --seconds 30 --seed 3

Requests arrive at random, share openings, are cancelled, and want more pages than there are, so that the prefix cache
is evicted and requests start over. Waves of them go through eager steps and through both runners of captured steps, on
the tests' tape. After each wave no page has a holder that it should not have; at the end all pages are free and memory
has not grown. Every text equals that of a server which has nothing else to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import models  # noqa: E402
import torch  # noqa: E402
from graph_tape import GraphTape  # noqa: E402
from serving import Engine, ModelRunner, Request, Step, graphs  # noqa: E402

PAGE_SIZE, POOL_TOKENS, ROWS, CHUNK = 4, 180, 8, 24
WARM_WAVES = 6  # until allocators and caches have their size
MODES = ("off", "full", "segments")
OPENINGS = [[(7 * i + 3 * j) % 250 + 1 for j in range(40)] for i in range(4)]
Asked = tuple[tuple[int, ...], int, int]  # prompt, tokens wanted, seed


class SoakFailed(Exception):
    """Something leaked, or a text is not the one of an unloaded server."""


@dataclasses.dataclass
class Figures:
    """What a soak has done."""

    seconds: float = 0.0
    waves: int = 0
    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    preempted: int = 0
    evicted_pages: int = 0
    reused_tokens: int = 0
    replays: int = 0
    grown_bytes: int = 0

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        return ", ".join(f"{name} {round(value, 1)}" for name, value in values.items())


def resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_model(kind: str) -> torch.nn.Module:
    """Small, float32, with random weights large enough that its choices are far apart."""
    small = {"d_model": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 64, "max_context": 256}
    torch.manual_seed(0)
    config = models.MlaConfig(**small) if kind == "mla" else models.GqaConfig(num_kv_heads=2, head_dim=32, **small)
    model = models.build_model(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5
    return model.eval().requires_grad_(False)


class Soak:
    """One model served for a while.

    Args:
        kind: "gqa" or "mla".
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.random, self.model, self.figures = random.Random(f"{kind}:{seed}"), make_model(kind), Figures()
        self.runners = {mode: self._runner(mode) for mode in MODES}
        self.unloaded = self._runner("off", pool_tokens=2048, chunk=256)
        self.texts: dict[Asked, list[int]] = {}
        for mode, runner in self.runners.items():
            if mode != "off":
                runner.capture(progress=False)
                runner.graphs.replay = self._counted(runner.graphs.replay)

    def _runner(self, mode: str, pool_tokens: int = POOL_TOKENS, chunk: int = CHUNK) -> ModelRunner:
        kinds = {name: getattr(graphs, name) for name in ("GraphRunner", "SegmentRunner")}
        try:
            for name, kind in kinds.items():
                setattr(graphs, name, functools.partial(kind, recorder=GraphTape))
            limits = {"page_size": PAGE_SIZE, "pool_tokens": pool_tokens, "max_requests": ROWS, "chunk": chunk}
            return ModelRunner(self.model, graphs=mode, **limits)
        finally:
            for name, kind in kinds.items():
                setattr(graphs, name, kind)

    def _counted(self, replay):
        def call(*args, **options):
            self.figures.replays += 1
            return replay(*args, **options)

        return call

    def run(self, seconds: float) -> Figures:
        """Waves of requests until the time is over.

        Raises:
            SoakFailed: naming what has leaked, or whose text differs.
        """
        begin, figures, settled = time.monotonic(), self.figures, 0
        while time.monotonic() - begin < seconds or figures.waves < len(MODES):
            self.wave(MODES[figures.waves % len(MODES)])
            figures.waves += 1
            if figures.waves <= WARM_WAVES:
                settled = resident_bytes()
            figures.grown_bytes = resident_bytes() - settled
        figures.seconds = time.monotonic() - begin
        if figures.grown_bytes > 64 << 20:
            raise SoakFailed(f"memory has grown by {figures.grown_bytes >> 20} MiB in {figures.waves} waves")
        return figures

    def wave(self, mode: str) -> None:
        """Requests that arrive over time in one engine, until all are done; then every page must be accounted for."""
        engine = Engine(self.runners[mode], CHUNK, keep_logits=False)
        count = self.random.randint(6, 30)
        requests = [self._request(i) for i in range(count)]
        engine.serve(requests, self._cancel_some(requests))
        figures, scheduler = self.figures, engine.scheduler
        figures.requests += count
        figures.tokens += sum(len(request.output) for request in requests)
        figures.preempted += scheduler.preemptions
        figures.evicted_pages += scheduler.cache.evicted_pages
        figures.reused_tokens += sum(request.reused for request in requests)
        self._check_pages(engine)
        for request in requests:
            self._check_text(request)

    def _request(self, number: int) -> Request:
        choose = self.random
        opening = choose.choice([[], *OPENINGS])[: choose.randint(1, 40)]
        own = [choose.randint(1, 250) for _ in range(choose.choice([1, 3, 8, 30]))]
        wanted, arrival, seed = choose.choice([1, 5, 20, 60]), choose.randint(0, 60), choose.randint(0, 3)
        return Request(number, opening + own, wanted, arrival, temperature=0.8, top_p=0.9, seed=seed)

    def _cancel_some(self, requests: list[Request]):
        """After some steps a client goes, whether its request waits, prefills or decodes."""

        def after_step(engine: Engine, step: Step) -> None:
            if self.random.random() < 0.04:
                present = [*engine.scheduler.running, *engine.scheduler.waiting]
                if present:
                    engine.scheduler.cancel(self.random.choice(present))
                    self.figures.cancelled += 1

        return after_step

    def _check_pages(self, engine: Engine) -> None:
        scheduler, allocator = engine.scheduler, engine.allocator
        if scheduler.running or scheduler.waiting or scheduler.rows.available_size() != ROWS:
            raise SoakFailed(f"{ROWS - scheduler.rows.available_size()} rows are in use after all requests have ended")
        if scheduler.pages_of_requests:
            raise SoakFailed(f"{scheduler.pages_of_requests} pages are held by requests that have ended")
        held = {allocator.holders(page) for page in range(allocator.num_pages)}
        if not held <= {0, 1}:
            raise SoakFailed(f"pages have {max(held)} holders, where only the prefix cache holds any")
        scheduler.cache.evict(allocator.num_pages)
        if allocator.available_pages != allocator.num_pages:
            raise SoakFailed(f"{allocator.num_pages - allocator.available_pages} pages are lost")

    def _check_text(self, request: Request) -> None:
        asked = (tuple(request.prompt), request.max_new_tokens, request.seed)
        if asked not in self.texts:
            alone = Request(0, list(asked[0]), asked[1], 0, temperature=0.8, top_p=0.9, seed=asked[2])
            Engine(self.unloaded, 256, use_cache=False, keep_logits=False).serve([alone])
            if len(self.texts) > 500:
                self.texts.clear()
            self.texts[asked] = alone.output
        expected = self.texts[asked]
        if request.finish_reason == "cancelled":
            expected = expected[: len(request.output)]
        if request.output != expected:
            raise SoakFailed(f"request {asked}: {request.output}, alone {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="of both models together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for kind in ("gqa", "mla"):
        print(f"{kind}: {Soak(kind, options.seed).run(options.seconds / 2)}", flush=True)


if __name__ == "__main__":
    main()
