"""`attnops.distributed` over gloo: several ranks give what one rank gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attnops import distributed

PROGRAM = Path(__file__).parents[1] / "support" / "context_parallel_ranks.py"


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_give_what_one_rank_gives(world_size, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(tmp_path / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0 and "32 cases equal one rank" in text, text


@pytest.mark.parametrize("num_q_heads,num_kv_heads,world_size", [(32, 8, 4), (32, 8, 8), (32, 4, 16), (7, 7, 1)])
def test_heads_of_all_ranks_are_all_heads(num_q_heads, num_kv_heads, world_size):
    q_heads, kv_heads = [], set()
    for rank in range(world_size):
        q, kv = distributed.heads_of_rank(num_q_heads, num_kv_heads, rank, world_size)
        group = num_q_heads // num_kv_heads
        assert {head // group for head in q} == set(kv), "a rank holds the KV heads that its queries need"
        q_heads += q
        kv_heads |= set(kv)
    assert q_heads == list(range(num_q_heads)) and kv_heads == set(range(num_kv_heads))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_q_heads must be a multiple of world_size"):
        distributed.heads_of_rank(30, 6, 0, 4)
    with pytest.raises(ValueError, match=r"num_kv_heads \(6\) must divide by world_size \(4\)"):
        distributed.heads_of_rank(24, 6, 0, 4)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 3\]"):
        distributed.heads_of_rank(32, 8, 4, 4)


def test_combine_names_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    out, lse = torch.zeros(2, 8, 32), torch.zeros(2, 8)
    for call, text in [
        (lambda: distributed.combine(out, lse, how="ring"), "how must be"),
        (lambda: distributed.combine(out, lse[:, :7]), r"lse \[T, H\], got"),
        (lambda: distributed.combine(out[:, :6], lse[:, :6]), "multiple of 4"),
        (lambda: distributed.combine(out, lse.double()), "lse must be float32"),
        (lambda: distributed.combine(out.double(), lse), "out must be float32"),
        (lambda: distributed.combine(out, lse, sinks=torch.zeros(8)), r"sinks must be \[2\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
