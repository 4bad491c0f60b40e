"""Two-batch overlap: halves of a step are views, and give the bits of the whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import TboAttnBackend, get_backend_class
from attnops.graphs import GraphRunner
from attnops.graphs.static_inputs import StaticInput
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

GQA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": torch.float32}
WHOLE = Model("gqa", AttentionSpec(**GQA, deterministic=True))
STEPS = {
    "decode": (ForwardMode.DECODE, [60, 0, 33, 16, 5], [1] * 5, True),
    "verify": (ForwardMode.TARGET_VERIFY, [60, 0, 33], [4] * 3, True),
    "extend": (ForwardMode.EXTEND, [60, 0, 33, 7], [3, 40, 1, 20], False),
    "one decode": (ForwardMode.DECODE, [60], [1], True),
    "one extend": (ForwardMode.EXTEND, [60], [9], False),
    "a long first": (ForwardMode.EXTEND, [0, 9, 3], [90, 2, 1], False),
}


def make(name, model=WHOLE):
    return TboAttnBackend(
        *(lambda parts: (parts[0], parts[1:]))([get_backend_class(name)(model.spec, LIMITS) for _ in range(3)])
    )


def draw(shape, seed=0, model=WHOLE):
    mode, prefixes, new, uniform = STEPS[shape]
    step = make_step(model, mode, prefixes, new, uniform=uniform, seed=seed, tree=mode is ForwardMode.TARGET_VERIFY)
    if not uniform:
        step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
    return step


def by_halves(step, backend):
    """The layer over each half, side by side."""
    first, second = backend.children_of(step.batch)
    outs, at = [], 0
    for half in (first, second):
        rows = slice(at, at + half.num_tokens)
        at += half.num_tokens
        if half.batch_size:
            outs.append(step.layer(step.q[rows], step.k[rows], step.v[rows], half))
    return torch.cat(outs)


@pytest.mark.parametrize("name", ["intel_amx", "fa3", "trtllm_mha"])
@pytest.mark.parametrize("shape", STEPS)
def test_halves_have_the_bits_of_the_whole(name, shape):
    step, backend = draw(shape), make(name)
    if step.batch.forward_mode not in backend.primary.capability.modes:
        pytest.skip("for prefill")
    step.batch.attn_backend = backend
    backend.init_forward_metadata(step.batch)
    halves = by_halves(step, backend)
    whole = step.layer(step.q, step.k, step.v, step.batch)
    assert torch.equal(halves, whole)
    bound = 1e-5 * step.expected.norm()
    assert (halves.double().flatten() - step.expected.flatten()).norm() <= bound


@pytest.mark.parametrize("shape", STEPS)
def test_halves_in_torch_are_within_bounds(shape):
    """Its products have other bits in another batch, so it takes no deterministic model."""
    with pytest.raises(NotImplementedError, match="is not batch-invariant"):
        make("torch_native")
    model = Model("gqa", AttentionSpec(**GQA))
    step, backend = draw(shape, model=model), make("torch_native", model)
    step.batch.attn_backend = backend
    backend.init_forward_metadata(step.batch)
    halves = by_halves(step, backend)
    assert (halves.double().flatten() - step.expected.flatten()).norm() <= 1e-5 * step.expected.norm()


CUTS = [
    ("decode", [2, 3], [2, 3]),
    ("verify", [1, 2], [4, 8]),
    ("extend", [2, 2], [43, 21]),
    ("one decode", [0, 1], [0, 1]),
    ("one extend", [0, 1], [0, 9]),
    ("a long first", [1, 2], [90, 3]),
]


@pytest.mark.parametrize("shape, requests, tokens", CUTS)
def test_where_a_step_is_cut(shape, requests, tokens):
    step, backend = draw(shape), make("intel_amx")
    halves = backend.children_of(step.batch)
    assert [half.batch_size for half in halves] == requests and [half.num_tokens for half in halves] == tokens
    assert backend.children_of(step.batch) is halves
    assert halves[1].cache_seqlens.data_ptr() == step.batch.cache_seqlens[requests[0] :].data_ptr(), "views"


def test_graphs_hold_both_halves():
    """Replays of padded batches, with other requests, bit for bit."""
    step, backend = draw("decode"), make("intel_amx")
    base = step.batch

    def model(input_ids, positions, batch, *, q, k, v):
        del input_ids, positions
        first, second = backend.children_of(batch)
        cut = first.num_tokens
        rows = ((slice(0, cut), first), (slice(cut, None), second))
        return torch.cat([step.layer(q[part], k[part], v[part], half) for part, half in rows if half.batch_size])

    inputs = {"q": StaticInput((8, 64)), "k": StaticInput((2, 64)), "v": StaticInput((2, 64))}
    table, pool = base.req_to_token, base.token_to_kv_pool
    options = {"sizes": [1, 5], "inputs": inputs, "layers": {1: step.layer}, "recorder": GraphTape}
    options["padding_row"] = int(base.req_pool_indices[0])  # the other rows lead anywhere
    runner = GraphRunner(model, backend, table, pool, **options)
    runner.capture(progress=False)
    eager = get_backend_class("intel_amx")(WHOLE.spec, LIMITS)
    q, k, v = (x.unflatten(-1, (-1, 64)) if x.dim() == 2 else x for x in (step.q, step.k, step.v))
    for turn, chosen in enumerate(([0, 1, 2, 3, 4], [3], [4, 1], [2, 0, 3], [1, 2, 3, 4, 0])):
        rows = torch.tensor(chosen)
        batch = dataclasses.replace(
            base,
            req_pool_indices=base.req_pool_indices[rows],
            cache_seqlens=base.cache_seqlens[rows],
            out_cache_loc=base.out_cache_loc[rows],
            num_tokens=len(chosen),
            positions=torch.zeros(len(chosen), dtype=torch.int64),
            attn_backend=eager,
        )
        given = {"q": q[rows], "k": k[rows], "v": v[rows]}
        got = runner.replay(torch.zeros(len(chosen), dtype=torch.int64), batch, **given)
        eager.init_forward_metadata(batch)
        assert torch.equal(got, step.layer(*given.values(), batch)), f"turn {turn}"


def test_idle_steps_and_errors():
    backend = make("intel_amx")
    step = draw("extend")
    none = torch.zeros(0, dtype=torch.int32)
    idle = AttentionBatch(
        forward_mode=ForwardMode.IDLE,
        req_pool_indices=none,
        cache_seqlens=none,
        num_tokens=2,
        req_to_token=step.batch.req_to_token,
        out_cache_loc=torch.full((2,), -1),
        token_to_kv_pool=step.batch.token_to_kv_pool,
    )
    backend.init_forward_metadata(idle)
    assert not backend.forward(torch.ones(2, 512), None, None, step.layer, idle).any()
    step.batch.extend_seq_lens_cpu = None
    with pytest.raises(ValueError, match="cuts a ragged batch by its tokens; give it extend_seq_lens_cpu"):
        backend.init_forward_metadata(step.batch)
    one = get_backend_class("intel_amx")(WHOLE.spec, LIMITS)
    with pytest.raises(ValueError, match="needs 2 children, got 1"):
        TboAttnBackend(one, [one])
    other = get_backend_class("intel_amx")(AttentionSpec(**GQA), LIMITS)
    with pytest.raises(ValueError, match="must be built for one model and one device"):
        TboAttnBackend(one, [one, other])
