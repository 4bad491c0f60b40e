"""Draft loops over any backend: branches of any page size, captured whole, idle ranks."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import MultiStepDraftBackend, get_backend_class
from attnops.types import AttentionBatch, ForwardMode, Limits
from draft_loops import REQUESTS, Loop, check_replays, close, run_eagerly
from graph_tape import GraphTape

NAMES = ["torch_native", "intel_amx", "trtllm_mha", "flex_attention"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("topk, draft_steps", [(1, 5), (4, 3), (3, 2)])
def test_branches_see_the_prefix_and_their_own_drafts(name, page_size, topk, draft_steps, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    loop = Loop(name, page_size, topk, draft_steps, seed=page_size + topk)
    rows = loop.rng.sample(range(1, REQUESTS + 1), 4)
    lengths = [0, page_size, *loop.draw_lengths(2)]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize(
    "kind, names", [("mla", ["torch_native", "intel_amx"]), ("window", ["torch_native", "intel_amx"])]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_latents_and_windows(kind, names, page_size):
    for name in names:
        loop = Loop(name, page_size, 3, 4, kind)
        lengths, rows = [0, 5, 40, 33], [3, 1, 5, 2]
        prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
        out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
        assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("page_size, topk", [(1, 4), (16, 4), (16, 1)])
def test_one_graph_holds_the_loop(name, page_size, topk):
    """Replays with other lengths, requests and numbers of them, bit for bit as eager ones."""
    # Products of torch have other bits in a padded batch.
    sizes = range(1, REQUESTS + 1) if name == "torch_native" else [2, REQUESTS]
    check_replays(name, page_size, topk, turns=50, recorder=GraphTape, sizes=sizes)


def test_idle_ranks_stay_idle():
    loop = Loop("torch_native", 1, 2, 3)
    none = torch.zeros(0, dtype=torch.int32)
    batch = AttentionBatch(forward_mode=ForwardMode.IDLE, req_pool_indices=none, cache_seqlens=none, num_tokens=3)
    loop.backend.init_forward_metadata(batch)
    step = loop.backend.step(0)
    assert step.forward_mode.is_idle() and step.num_tokens == 6
    assert not loop.layer(*(torch.ones(6, heads * 64) for heads in (4, 2, 2)), step).any()


def test_errors_name_what_is_wrong():
    loop = Loop("torch_native", 1, 2, 3)
    with pytest.raises(RuntimeError, match="init_forward_metadata must run before a draft loop's steps"):
        loop.backend.step(0)
    batch = loop.batch([4], [1])
    loop.backend.init_forward_metadata(batch)
    with pytest.raises(RuntimeError, match=r"runs with step\(s\)"):
        loop.layer(torch.ones(1, 256), torch.ones(1, 128), torch.ones(1, 128), batch)
    batch.out_cache_loc = None
    with pytest.raises(ValueError, match="needs req_to_token, out_cache_loc and token_to_kv_pool"):
        loop.backend.init_forward_metadata(batch)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    for topk, steps in ((0, 3), (2, 1)):
        with pytest.raises(ValueError, match="a draft loop needs topk >= 1 and draft_steps >= 2"):
            MultiStepDraftBackend(get_backend_class("torch_native"), loop.spec, limits, topk=topk, draft_steps=steps)
