"""Tensor and decode context parallelism of two ranks over NCCL, in graphs whose lengths change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "support" / "nccl_ranks.py"
WORLD_SIZE, REPLAYS = 2, 1000


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD_SIZE, reason="needs two GPUs")
def test_replays_of_two_ranks_are_those_of_eager_calls(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), str(tmp_path / "rendezvous"), str(REPLAYS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, texts, strict=True):
        print(text)
        assert rank.returncode == 0 and "12 cases are equal" in text, text
