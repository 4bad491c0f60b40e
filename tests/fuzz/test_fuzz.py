"""The search itself: a fixed seed in every run of the tests, and what a run does with a case that kills its process."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

from . import cases
from .cases import run_case
from .draw import Draw, Failure
from .expected import CUTTING, RARE, cannot_run_here
from .judge import check_attention
from .models import draw_world
from .mutants import MUTANTS, callers_of, living
from .oracle import Answer
from .runner import Run

SEED, CASES = 20, 1600
FIXED = 22  # a seed whose first cases hit everything: another one takes twice as many


def test_a_fixed_seed():
    """What these cases happen not to hit, further ones do: a new family draws all cases anew."""
    run = Run(FIXED, jobs=2)
    for count in (CASES, 2 * CASES, 3 * CASES):
        run.work(count, None)
        if run.failures or not run.never_hit():
            break
    assert not run.failures, run.report()
    assert not run.never_hit(), run.report()
    assert run.counted >= CASES


@pytest.mark.parametrize(
    ("size", "off", "right"), [(3e-5, 0, True), (3e-5, 40, False), (3.0, 0, True), (3.0, 4, False)]
)
def test_outputs_below_half_precisions_normal_numbers(size, off, right):
    """They are off by what fp16 has there, and no more."""
    expected = size * torch.randn(51, 8, 192, generator=torch.Generator().manual_seed(1)).double() / 192**0.5
    out = (expected * (1 + off / 1000)).half()
    answer = Answer(expected, torch.zeros(51, 8).double(), expected.norm(dim=-1), torch.zeros(51, 8).double())
    with contextlib.nullcontext() if right else pytest.raises(Failure, match="out differs"):
        check_attention(Draw(1, 1), out, None, answer)


def test_all_backends_of_a_world_verify_alike():
    """A hybrid that verified by the other of its two would round otherwise."""
    worlds = [world for world in (draw_world(Draw(SEED, index)) for index in range(80)) if world.partner]
    assert worlds
    for world in worlds:
        assert len({world.build().speculative_attention_mode for _ in range(8)}) == 1


def test_rows_that_a_processor_lacks_instructions_for_need_no_hit(monkeypatch):
    for isa, lacking in (("avx2", {"avx512", "avx512bf16", "amx"}), ("avx512", {"avx512bf16", "amx"}), ("amx", set())):
        monkeypatch.setattr(torch.ops.attnops, "cpu_isa", lambda isa=isa: isa)
        rows = {row: f"row cpu xqa_decode {row}_bfloat16" for row in ("scalar", "avx2", "avx512", "avx512bf16", "amx")}
        assert {row for row, name in rows.items() if cannot_run_here(name)} == lacking
    assert cannot_run_here("row cpu xqa_decode scalar_float32", "cuda")  # a run on a GPU calls it by chance
    assert not cannot_run_here("row cuda xqa_decode bf16_hd64", "cuda")
    assert not cannot_run_here("row cuda xqa_decode bf16_hd64") and not cannot_run_here("op merge_state")


def test_every_row_that_cuts_prompts_is_to_be_hit():
    """A row is counted as cutting where bits differ from whole prompts, and not before thousands of cases."""
    rows = []
    for op, folder in (("delta_prefill", "delta_rule"), ("ssd_prefill", "ssd")):
        table = (Path(__file__).parents[2] / "csrc" / folder / "impls.cpp").read_text()
        rows += [f"{op} {row}" for row in re.findall(r'{"(sm90_\w+)"', table)]
    assert sorted(CUTTING) == sorted(rows)
    run = Run(SEED)
    for counted in (1000, 5000):
        run.counted = counted
        assert any(name.startswith(RARE) for name in run.never_hit()) == (counted == 5000)


@pytest.mark.parametrize(("times", "status"), [(0, "ok"), (2, "ok"), (3, "failed")])
def test_a_case_that_finds_no_memory_is_run_again(times, status, monkeypatch):
    """Another process may hold it for a moment. Each run draws the same case."""
    drawn = []

    def needs_memory(draw: Draw) -> None:
        drawn.append(draw.number(0, 1 << 30))
        if len(drawn) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    monkeypatch.setattr(cases, "FAMILIES", {"one": (1, needs_memory)})
    monkeypatch.setattr(cases, "PAUSES", (0, 0))
    assert run_case(SEED, 0).status == status
    assert len(drawn) == min(times, 2) + 1
    assert len(set(drawn)) == 1


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    """Within 300 cases of the families that call the op: how often a run draws these is no part of it."""
    families = tuple(sorted(callers_of(name)))
    with living(name):
        for index in range(300):
            if run_case(SEED, index, only=families).status == "failed":
                return
    pytest.fail(f"{name} survives 300 cases")
