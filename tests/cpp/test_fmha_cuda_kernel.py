"""The kernels of csrc/fmha/cuda on a software model of a CTA, against plain loops: random batches, without a GPU.

Built by tests/cpp/cuda_model/fmha/build.sh, whose result ATTNOPS_FMHA_MODEL names. Copies land when their thread waits
for them, and until then their place holds NaN. Not modelled: memory of other CTAs, and what a GPU's exponentials round.
"""

from __future__ import annotations

import os
import subprocess

import pytest

MODEL = os.environ.get("ATTNOPS_FMHA_MODEL")
pytestmark = pytest.mark.skipif(MODEL is None, reason="ATTNOPS_FMHA_MODEL names no model")


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_batches(first: int) -> None:
    run = subprocess.run([MODEL, str(first), "20"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]
