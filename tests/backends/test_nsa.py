"""The backend for lists of rows: every mode, eager and captured, against float64 over the rows that the lists name."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import HybridAttnBackend, TboAttnBackend, get_backend_class, select_backend
from attnops.backends.nsa import REFUSED_IMPLS, SERVED_IMPLS
from attnops.layers import RadixAttention, forward_context
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape
from sparse_lists import MODELS, SHAPES, check, lists_of
from steps import LIMITS, Model, Step, make_step


def backend_for(model: Model, **options):
    return get_backend_class("nsa")(model.spec, LIMITS, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("apart", [False, True])
def test_every_mode_attends_to_the_listed_rows(model, shape, apart):
    mode, _, lengths, options = SHAPES[shape]
    step = make_step(model, mode, *lengths, **options)
    lists, backend = lists_of(step), backend_for(model)
    backend.init_forward_metadata(step.batch)
    q, k = step.q, step.k
    if apart:
        ropes = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
        out = backend.forward(q[..., :512], k[..., :512], None, step.layer, step.batch, topk_indices=lists, **ropes)
    else:
        out = backend.forward(q, k, None, step.layer, step.batch, topk_indices=lists)
    check(step, lists, out.view(-1, step.layer.num_heads, 512))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS[:3], ids=lambda model: model.name)
def test_a_replay_with_other_lists_and_lengths_equals_a_fresh_step(model, shape):
    mode, captured, replayed, options = SHAPES[shape]
    if not options:
        total = max(sum(captured[1]), sum(replayed[1]))
        options = {"num_tokens": total}
    static, other = make_step(model, mode, *captured, **options), make_step(model, mode, *replayed, seed=5, **options)
    lists, other_lists = lists_of(static), lists_of(other, seed=3)
    backend, tape = backend_for(model), GraphTape()
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend, topk_indices=lists)
    static.overwrite(other)
    lists.copy_(other_lists)
    backend.init_forward_metadata_out_graph(static.batch)
    tape.replay()
    check(other_of(static, other), lists, out)
    fresh = backend_for(model)
    fresh.init_forward_metadata(other.batch)
    again = other.run(fresh, topk_indices=other_lists)
    assert torch.equal(out[: other.num_real], again[: other.num_real])


def other_of(static: Step, other: Step) -> Step:
    """The answer's side of an overwritten step."""
    static.num_real = other.num_real
    return static


def test_a_layer_without_lists_attends_to_everything():
    step = make_step(MODELS[0], ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    backend = backend_for(MODELS[0])
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


def test_the_layer_passes_lists_on_and_a_compiled_one_does():
    step = make_step(MODELS[0], ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    lists, backend = lists_of(step), backend_for(MODELS[0])
    step.batch.attn_backend = backend
    backend.init_forward_metadata(step.batch)
    out = step.layer(step.q, step.k, None, step.batch, topk_indices=lists).view(-1, 8, 512)
    check(step, lists, out)
    compiled = torch.compile(
        lambda q, k, lists: step.layer(q, k, None, topk_indices=lists), backend="eager", fullgraph=True
    )
    with forward_context(step.batch, {step.layer.layer_id: step.layer}):
        assert torch.equal(compiled(step.q, step.k, lists).view(-1, 8, 512), out)
        assert torch.equal(step.layer(step.q, step.k, None, topk_indices=lists).view(-1, 8, 512), out)


def test_other_backends_refuse_lists():
    model = Model("dense", AttentionSpec.mla(8, page_size=16), scale=0.1)
    step = make_step(model, ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    step.batch.attn_backend = get_backend_class("fa3")(model.spec, LIMITS)
    step.batch.attn_backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match="backend fa3 attends to every key and takes no topk_indices; nsa takes them"):
        step.layer(step.q, step.k, None, step.batch, topk_indices=torch.zeros(2, 4, dtype=torch.int32))


def test_selection_takes_it_for_models_with_lists_and_under_both_names():
    spec = MODELS[0].spec
    assert select_backend(spec, LIMITS, device="cpu").name == "nsa"
    assert get_backend_class("dsa") is get_backend_class("nsa")
    with pytest.raises(NotImplementedError, match="attends to every key, not to lists of rows"):
        get_backend_class("fa3")(spec, LIMITS)


def test_names_of_kernels_are_served_or_refused_with_the_reason():
    for impl in SERVED_IMPLS:
        backend_for(MODELS[0], prefill_impl=impl, decode_impl=impl)
    for impl, reason in REFUSED_IMPLS.items():
        with pytest.raises(ValueError, match=f"decode_impl must be one of .*, got '{impl}': {reason}"):
            backend_for(MODELS[0], decode_impl=impl)


def test_wrong_lists_are_named():
    step = make_step(MODELS[0], ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    backend = backend_for(MODELS[0])
    backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match=r"topk_indices must be \[2, 24\], got \[2, 9\]"):
        step.run(backend, topk_indices=torch.zeros(2, 9, dtype=torch.int32))
    plain = Model("plain", AttentionSpec.mla(8, page_size=16))
    backend = backend_for(plain)
    backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match=r"topk_indices need AttentionSpec\.sparse_topk"):
        step.run(backend, topk_indices=lists_of(step))
    with pytest.raises(ValueError, match="sparse_topk belongs to MLA"):
        AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, sparse_topk=4)
    assert RadixAttention


@pytest.mark.parametrize("make", [HybridAttnBackend, lambda a, b: TboAttnBackend(a, [b, backend_for(MODELS[0])])])
def test_joined_backends_take_lists_where_their_parts_do(make):
    step = make_step(MODELS[0], ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    lists, backend = lists_of(step), make(backend_for(MODELS[0]), backend_for(MODELS[0]))
    step.batch.attn_backend = backend
    backend.init_forward_metadata(step.batch)
    check(step, lists, step.layer(step.q, step.k, None, step.batch, topk_indices=lists).view(-1, 8, 512))


def test_a_hybrid_with_a_part_that_takes_no_lists_refuses_them():
    spec = AttentionSpec.mla(8, page_size=16)
    parts = [get_backend_class(name)(spec, LIMITS) for name in ("fa3", "nsa")]
    backend = HybridAttnBackend(*parts)
    assert not backend.takes_lists
    step = make_step(Model("dense", spec, scale=0.1), ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    step.batch.attn_backend = backend
    backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match="backend hybrid attends to every key"):
        step.layer(step.q, step.k, None, step.batch, topk_indices=torch.zeros(2, 4, dtype=torch.int32))
