"""The search itself: a fixed seed in every run of the tests, and what a run does with a case that kills its process."""

from __future__ import annotations

from .runner import Run

CASES = 1500


def test_a_fixed_seed():
    run = Run(seed=20, jobs=2)
    run.work(CASES, None)
    assert not run.failures, run.report()
    assert not run.never_hit(), run.report()
    assert run.counted >= CASES
