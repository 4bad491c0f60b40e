"""Draft loops over FlashInfer's wrappers, on the CPU over the stand-in for the package: two stages beside float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.compat import flashinfer as stand_in
from attnops.types import Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, run_eagerly
from graph_tape import GraphTape

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("flashinfer_stand_in", "small_workspace")


@pytest.fixture
def small_workspace(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", str(1 << 20))


def check(kind, page_size, topk=3, draft_steps=4, **options):
    loop = Loop("flashinfer", page_size, topk, draft_steps, kind, page_size + topk, dtype=BF16, **options)
    assert loop.backend.needs_cpu_seq_lens
    lengths, rows = [0, 5, page_size, 75], [3, 1, 5, 2]
    for _ in range(2):  # the second loop plans the first one's wrappers anew
        prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
        out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
        assert relative_error(out, loop.expected(prefixes, *inputs)) <= MAX_RELATIVE_ERROR[BF16]
    return loop


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": E4M3}, {"layout": "HND"}, {"deterministic": True}], ids=str)
def test_branches_share_a_prefix(page_size, options):
    loop = check("mha", page_size, **options)
    assert loop.backend.has_trees
    stages = {key[0] for key in loop.backend.backends[0].wrappers._eager}
    assert stages == {"prefix", "drafts"}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 64, 1000])
def test_windows(page_size, window):
    assert check("mha", page_size, window=window).backend.has_trees
    check("window", page_size, topk=4, draft_steps=3, window=window)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_windows_over_pages_of_eight_bits(layout):
    check("window", 16, window=7, kv_dtype=E4M3, layout=layout)


@pytest.mark.parametrize("page_size", [1, 64])
def test_latents(page_size):
    assert check("mla", page_size).backend.has_trees


@pytest.mark.parametrize("kind", ["mha", "window", "mla"])
def test_branches_as_requests(kind):
    assert not check(kind, 16, trees=False).backend.has_trees


@pytest.mark.parametrize("kind, page_size", [("mha", 16), ("mha", 1), ("window", 16), ("mla", 64)])
def test_one_graph_holds_the_loop(kind, page_size):
    """Plans follow the lengths between replays."""
    options = {"kind": kind, "sizes": range(1, REQUESTS + 1), "dtype": BF16}
    check_replays("flashinfer", page_size, 3, turns=40, recorder=GraphTape, **options)


def test_a_graph_plans_the_drafts_once(monkeypatch):
    """Their number is the step's, whatever the prefixes."""
    wrapper, sizes = stand_in.BatchPrefillWithPagedKVCacheWrapper, []
    plan = wrapper.plan

    def spy(self, bounds_q, *args, **options):
        sizes.append(len(bounds_q) - 1)
        return plan(self, bounds_q, *args, **options)

    monkeypatch.setattr(wrapper, "plan", spy)
    options = {"kind": "mha", "sizes": [REQUESTS], "dtype": BF16}
    check_replays("flashinfer", 16, 3, turns=1, recorder=GraphTape, **options)
    # Requests of the plans, of a prefix and of its drafts: four steps before the capture, and before the replay.
    assert sizes[:12] == [REQUESTS, REQUESTS * 3] * 4 + [REQUESTS] * 4


def test_a_mask_may_name_any_drafts():
    """A beam's rows see drafts of other branches, each as many."""
    loop = Loop("flashinfer", 16, 3, 4, dtype=BF16)
    lengths, rows = [4, 40], [2, 5]
    batch = loop.batch(lengths, rows)
    loop.fill(lengths, rows)
    loop.backend.init_forward_metadata(batch)
    step = loop.backend.step(1)
    seen = torch.tensor([[0, 5], [4, 5], [4, 9]])  # cells of drafts, of each row
    bits = torch.zeros(3, 12, dtype=torch.bool).scatter_(1, seen, torch.ones(3, 2, dtype=torch.bool))
    mask = (bits.view(3, 12).long() << torch.arange(12)).sum(1)
    mask = torch.stack([mask & 255, mask >> 8], 1).to(torch.uint8).expand(2, -1, -1)
    outs = []
    for name in ("flashinfer", "torch_native"):
        limits = Limits(max_batch_size=2, max_seqlen=160, max_tokens_per_request=3)
        backend = get_backend_class(name)(loop.spec, limits, "cpu")
        beam = dataclasses.replace(step, tree_mask=mask, attn_backend=backend, cache_seqlens_cpu=step.cache_seqlens)
        for row, length in zip(rows, lengths):
            cells = loop.table[row, length : length + 12].long()
            loop.generator.manual_seed(row)
            loop.store(cells, loop.draw(12, 2, 64), loop.draw(12, 2, 64))
        loop.generator.manual_seed(9)
        backend.init_forward_metadata(beam)
        outs.append(loop.layer(loop.draw(6, 256), None, None, beam, save_kv_cache=False))
    assert relative_error(outs[0], outs[1].double()) <= MAX_RELATIVE_ERROR[BF16]


def test_what_it_needs_on_the_host_is_named():
    loop = Loop("flashinfer", 16, 2, 3, dtype=BF16)
    batch = loop.batch([4, 9], [1, 2])
    loop.backend.init_forward_metadata(batch)
    step, backend = loop.backend.step(0), loop.backend.backends[0]
    with pytest.raises(ValueError, match="plans on the host and needs draft_step in the batch, got None"):
        backend.init_forward_metadata(dataclasses.replace(step, draft_step=None))
    with pytest.raises(ValueError, match="plans on the host and needs cache_seqlens_cpu in the batch"):
        loop.backend.init_forward_metadata(dataclasses.replace(batch, cache_seqlens_cpu=None))
