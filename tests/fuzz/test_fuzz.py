"""The search itself: a fixed seed in every run of the tests, and what a run does with a case that kills its process."""

from __future__ import annotations

import pytest

from .cases import family_of, run_case
from .draw import Draw
from .mutants import MUTANTS, callers_of, living
from .runner import Run

SEED, CASES = 20, 1600


def test_a_fixed_seed():
    run = Run(SEED, jobs=2)
    run.work(CASES, None)
    assert not run.failures, run.report()
    assert not run.never_hit(), run.report()
    assert run.counted >= CASES


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    """Within 300 cases of the seed that the right ops pass; those that do not call the op are not run."""
    families = callers_of(name)
    with living(name):
        for index in range(300):
            if family_of(Draw(SEED, index)) in families and run_case(SEED, index).status == "failed":
                return
    pytest.fail(f"{name} survives 300 cases")
