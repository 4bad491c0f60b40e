"""The CUDA kernels of linear prefill and drafts on a software model of a CTA: `tests/linear`, without a GPU.

Built by tests/cpp/cuda_model/build.sh, whose result ATTNOPS_CUDA_MODEL names. Not modelled: the order of memory (a copy
is over when it is asked for, a product when it is issued), and what a GPU's exponentials round.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.ops import linear_prefill

MODEL = os.environ.get("ATTNOPS_CUDA_MODEL")
pytestmark = pytest.mark.skipif(MODEL is None, reason="ATTNOPS_CUDA_MODEL names no model")
sys.path.append(str(Path(__file__).parent.parent / "linear"))
import test_conv_drafts  # noqa: E402
import test_draft_step  # noqa: E402
import test_prefill  # noqa: E402
import test_verify  # noqa: E402

OPS = ["delta_prefill", "ssd_prefill", "delta_plan", "delta_verify", "ssd_verify", "delta_commit", "delta_conv_decode"]
OPS += ["delta_draft_step", "ssd_draft_step"]


@pytest.fixture(autouse=True, scope="module")
def model():
    if MODEL is None:
        return
    library = torch.library.Library("attnops_model", "DEF")
    for op in [*OPS, "causal_conv1d_update"]:
        schema = str(getattr(torch.ops.attnops, op).default._schema).removeprefix("attnops::")
        library.define(schema)
    torch.ops.load_library(MODEL)
    yield library


class Namespace:
    """`torch.ops.attnops`, with the model's ops in it."""

    def __getattr__(self, name):
        return getattr(torch.ops.attnops_model if name in OPS else attnops, name)


attnops = torch.ops.attnops


@pytest.fixture(autouse=True)
def modelled(model, monkeypatch):
    monkeypatch.setattr(torch.ops, "attnops", Namespace(), raising=False)
    monkeypatch.setattr(ops, "ssd_commit", ops.delta_commit)

    def scratch(v, slots, key_dim, delta, channels, cut):
        if v.dtype != torch.bfloat16:
            return None
        size = linear_prefill._scratch_size(
            v.shape[0], slots.shape[0], v.shape[1], key_dim, delta, channels, v.shape[2] * cut
        )
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN, whatever is read of it

    monkeypatch.setattr(linear_prefill, "_scratch", scratch)


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("seed", range(16))
def test_prefill_equals_float64(seed, kind):
    case = test_prefill.Case(seed, "cpu", kind, io=torch.bfloat16 if seed % 4 else None)
    out, states = case.run()
    expected, after = case.expected()
    assert out.isfinite().all() and states.isfinite().all()
    assert test_prefill.relative(out, expected) < test_prefill.OUT[case.io]
    for slot in range(len(after)):
        if torch.equal(after[slot], case.before[slot].double()):
            assert torch.equal(states[slot], case.before[slot])
        else:
            bound = max(test_prefill.STATE[case.kept_as], test_prefill.STATE[case.io])
            assert test_prefill.relative(states[slot], after[slot]) < bound


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("seed", range(8))
def test_cut_prompts_equal_float64(seed, kind):
    """Segments of four chunks and more, with checkpoints inside them, requests of one segment and of none."""
    r = random.Random(seed)
    lengths = r.choice([[1100], [0, 700, 1, 520], [300, 64, 0, 0, 1000], [512, 512]])
    dims = r.choice([(128, 128), (64, 64), (128, 64), (72, 24), (64, 200)])
    case = test_prefill.Case(seed, "cpu", kind, torch.bfloat16, lengths, dims).remember()
    whole, after_whole = case.run()
    case.cut = True
    out, states = case.run()
    if max(lengths) >= 1000 and case.kept_as == torch.float32:  # in three segments
        assert not torch.equal(out, whole) or not torch.equal(states, after_whole)
    expected, after = case.expected()
    assert out.isfinite().all() and states.isfinite().all()
    assert test_prefill.relative(out, expected) < test_prefill.OUT[case.io]
    bound = max(test_prefill.STATE[case.kept_as], test_prefill.STATE[case.io])
    for slot in range(len(after)):
        if torch.equal(after[slot], case.before[slot].double()):
            assert torch.equal(states[slot], case.before[slot])
        else:
            assert test_prefill.relative(states[slot], after[slot]) < bound


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
def test_chunks_and_other_requests_change_no_bit(kind, io):
    test_prefill.test_chunks_and_other_requests_change_no_bit(kind, io, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-2000.0, -float("inf"), -30.0, 0.0])
def test_any_decay_stays_finite(gate, dtype):
    test_prefill.test_any_decay_stays_finite(gate, dtype, "cpu")


def test_plans_take_the_longest_first(monkeypatch):
    monkeypatch.setattr(ops, "ssd_plan", ops.delta_plan)
    test_prefill.test_plans_take_the_longest_first("cpu")


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("seed", range(16))
def test_rings_give_what_decoding_the_accepted_drafts_gives(seed, kind, monkeypatch):
    test_verify.test_rings_give_what_decoding_the_accepted_drafts_gives(seed, kind, "cpu", monkeypatch)


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("seed", range(8))
def test_rings_of_keys_of_128_elements(seed, kind):
    test_verify.test_rings_of_keys_of_128_elements(seed, kind, "cpu")


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("drafts", range(1, 9))
def test_a_step_in_one_launch(drafts, kept, kind):
    test_draft_step.test_a_step_in_one_launch(drafts, kept, kind, "cpu")


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_full_ring_is_folded_and_begins_anew(tree, kind):
    test_draft_step.test_a_full_ring_is_folded_and_begins_anew(tree, kind, "cpu")


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_padding_touches_nothing(kind):
    test_draft_step.test_padding_touches_nothing(kind, "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_a_convolution_in_front_equals_the_two_ops(seed):
    """The CPU's ops one behind the other; a slot outside the pool is padding, and touches nothing."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    groups, width, batch, io = r.choice([1, 2, 3]), 4, 4, torch.bfloat16
    heads, keys, rows = groups * r.choice([1, 2]), r.choice([64, 128, 16, 100]), r.choice([64, 128, 7, 30])
    channels, slots = 2 * groups * keys + heads * rows, [5, -1, 0, r.choice([7, 2**31 - 1])]
    per_channel = [keys] if seed % 2 else []
    x, weight, bias = normal(batch, channels).to(io), normal(channels, width).to(io), normal(channels).to(io)
    a, b = normal(batch, heads, *per_channel).to(io), normal(batch, heads).to(io)
    gates = {"A_log": 0.5 * normal(heads), "dt_bias": normal(heads, *per_channel), "lower_bound": r.choice([0.0, -5.0])}
    gates["qk_l2norm"], silu, bias = r.random() < 0.7, r.random() < 0.7, bias if r.random() < 0.6 else None
    states, conv = 0.1 * normal(7, heads, rows, keys), normal(7, channels, width - 1).to(io)
    twins = [states.clone(), conv.clone()]
    given = {"states": states, "conv_states": conv, "num_k_heads": groups, "silu": silu}
    indices = torch.tensor(slots, dtype=torch.int32)
    out = ops.delta_conv_decode(x, weight, bias, a, b, state_indices=indices, **given, **gates)
    indices[3] = -1
    mixed = ops.causal_conv1d_update(x, weight, bias, conv_states=twins[1], state_indices=indices, silu=silu)
    q, k, v = mixed.split([groups * keys, groups * keys, heads * rows], 1)
    q, k, v = q.unflatten(1, (groups, keys)), k.unflatten(1, (groups, keys)), v.unflatten(1, (heads, rows))
    expected = ops.delta_decode(q, k, v, a, b, states=twins[0], state_indices=indices, **gates)
    assert torch.equal(conv, twins[1]) and not out[1].any() and not out[3].any()
    assert test_verify.relative(out[::2], expected[::2]) < 6e-3
    assert test_verify.relative(states[[0, 5]], twins[0][[0, 5]]) < 6e-3
    rest = [1, 2, 3, 4, 6]
    assert torch.equal(states[rest], twins[0][rest])


@pytest.mark.parametrize("seed", range(40))
def test_convolutions_of_drafts_equal_the_cpu(seed):
    """Drafts alone: the model has no other form of the op. Slots outside the pool are padding."""
    case, twin = (test_conv_drafts.Drafts(seed, "cpu") for _ in range(2))
    slots = [2**31 - 1 if seed % 3 == 0 and slot < 0 else slot for slot in case.slots]
    out, indices = torch.full_like(case.x, float("nan")), torch.tensor(slots, dtype=torch.int32)
    given = (out, case.states, case.x, case.weight, case.bias, indices, case.silu, None, case.windows, case.tree_mask)
    torch.ops.attnops_model.causal_conv1d_update(*given)
    assert test_verify.relative(out, twin.run()) < test_conv_drafts.BOUND[case.io]
    assert torch.equal(case.windows, twin.windows) and torch.equal(case.states, twin.states)
