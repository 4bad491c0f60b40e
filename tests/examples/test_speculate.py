"""examples/speculate.py: greedy text is that of plain decoding, byte for byte, and drafts are worth their steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import models  # noqa: E402
import speculate  # noqa: E402
from models.draft import load_draft  # noqa: E402
from prompts import PROMPTS  # noqa: E402

WEIGHTS = EXAMPLES / "weights"
NEW = 32


@pytest.fixture(scope="module")
def target():
    return models.load_model(WEIGHTS / "gqa.safetensors", torch.float32)


@pytest.fixture(scope="module")
def prompts():
    return [models.encode(PROMPTS[i].text)[-size:] for i, size in ((0, 150), (3, 64), (5, 17), (7, 1))]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [list(models.generate(target, prompt, NEW)) for prompt in prompts]


def run(target, prompts, topk, page_size, backend, head=None, **options):
    options = {"draft_steps": 4, "num_tokens": 5 if topk == 1 else 12} | options
    one = speculate.Speculator(
        target,
        head or load_draft(WEIGHTS / "gqa_draft.safetensors", target),
        topk=topk,
        page_size=page_size,
        max_requests=len(prompts),
        max_tokens=200,
        backend=backend,
        **options,
    )
    return one.run(prompts, NEW), one


CASES = [("intel_amx", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]
CASES += [(name, page, 4) for name, page in (("torch_native", 16), ("torch_native", 1), ("flex_attention", 3))]


@pytest.mark.parametrize("backend, page_size, topk", CASES)
def test_the_text_is_that_of_plain_decoding(target, prompts, plain, backend, page_size, topk):
    answers, _ = run(target, prompts, topk, page_size, backend)
    assert answers == plain


@pytest.mark.parametrize("topk, draft_steps, num_tokens", [(1, 1, 2), (3, 1, 4), (4, 3, 2), (2, 5, 40)])
def test_loops_and_trees_of_other_sizes(target, prompts, plain, topk, draft_steps, num_tokens):
    answers, _ = run(target, prompts, topk, 16, "intel_amx", draft_steps=draft_steps, num_tokens=num_tokens)
    assert answers == plain


def test_a_head_that_knows_nothing_changes_no_byte(target, prompts, plain):
    torch.manual_seed(1)
    answers, one = run(target, prompts, 4, 16, "intel_amx", models.draft.DraftHead(target).eval())
    assert answers == plain
    assert one.mean_accepted() < 1.5


def test_trees_accept_more_than_chains_and_chains_two_bytes(target):
    prompts = [models.encode(prompt.text) for prompt in PROMPTS[:6]]
    accepted = {}
    for topk in (1, 4):
        _, one = run(target, [prompt[-150:] for prompt in prompts], topk, 16, "intel_amx", draft_steps=5)
        accepted[topk] = one.mean_accepted()
        assert sum(one.depths.values()) > 30
    assert accepted[1] >= 2.0
    assert accepted[4] > accepted[1] + 0.2


def test_the_head_is_small():
    assert (WEIGHTS / "gqa_draft.safetensors").stat().st_size < 1_000_000
