"""MLA prefill without absorbed queries: the answer of absorbed attention, whatever fits the workspace."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import HybridAttnBackend, get_backend_class, mla_prefill
from attnops.layers import UpProjection
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

HEADS, NOPE, ROPE, LATENT = 4, 32, 64, 512
E4M3 = torch.float8_e4m3fn
BACKENDS = ["fa3", "intel_amx"]
CACHES = {"bf16": None, "e4m3": E4M3, "rows": torch.uint8}
LENGTHS = ([0, 65, 100, 3], [33, 1, 20, 7])
EXTEND = ForwardMode.EXTEND


def spec_of(cache=None, v_dim: int = 48, **options) -> AttentionSpec:
    return AttentionSpec.mla(HEADS, page_size=16, kv_dtype=cache, up_head_dims=(NOPE + ROPE, v_dim), **options)


class Case:
    """A step, and the same attention by heads: unabsorbed queries, and what the absorbed answer projects to."""

    def __init__(self, spec: AttentionSpec, lengths=LENGTHS, mode=EXTEND, scale=0.1, **options) -> None:
        self.step = make_step(Model("mla", spec, scale=scale), mode, *lengths, seed=3, **options)
        generator = torch.Generator().manual_seed(5)
        v_dim = spec.up_head_dims[1]
        self.k_up = torch.randn(HEADS, NOPE, LATENT, generator=generator) * LATENT**-0.5
        self.v_up = torch.randn(HEADS, v_dim, LATENT, generator=generator) * LATENT**-0.5
        self.sizes: list[int] = []
        layer, rows = self.step.layer, self.step.q.shape[0]
        layer.up_projection = UpProjection(self.project, NOPE + ROPE, v_dim)
        # Queries of heads; absorbed they are what the reference has to be asked with.
        nope = torch.randn(rows, HEADS, NOPE, generator=generator).to(spec.dtype)
        rope = self.step.q[..., LATENT:]
        self.q = torch.cat([nope, rope], -1)
        absorbed = torch.einsum("thn,hnc->thc", nope.float(), self.k_up)
        self.absorbed = torch.cat([absorbed, rope.float()], -1)

    def project(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(latent.shape[0])
        both = torch.einsum("nc,hdc->nhd", latent.float(), torch.cat([self.k_up, self.v_up], 1)).to(latent.dtype)
        return both[..., :NOPE], both[..., NOPE:]

    def expected(self) -> torch.Tensor:
        """By torch_native's absorbed attention in float32."""
        spec = dataclasses.replace(self.step.model.spec, up_head_dims=None)
        backend = get_backend_class("torch_native")(spec, LIMITS)
        backend.init_forward_metadata(self.step.batch)
        step = dataclasses.replace(self.step, q=self.absorbed.to(spec.dtype))
        out = step.run(backend).float()
        return torch.einsum("thc,hdc->thd", out, self.v_up)

    def run(self, backend) -> torch.Tensor:
        step = self.step
        return backend.forward(self.q, step.k, None, step.layer, step.batch).view(self.q.shape[0], HEADS, -1)


def backend_of(name: str, spec: AttentionSpec):
    return get_backend_class(name)(spec, LIMITS)


# What the host says, the workspace's rows, and in how many pieces of which sizes keys are then made.
KNOWN = {
    "nothing known, all in one": ({}, 4096, [4 * 192]),
    "bound, all in one": ({"max_cache_seqlen": 120}, 4096, [4 * 120]),
    "prefix, all in one": ({"max_prefix_tokens": 168}, 4096, [168 + 61]),
    "prefix, chunks": ({"max_prefix_tokens": 170}, 64, [61, 64, 64, 42]),
    "bound, chunks": ({"max_cache_seqlen": 120}, 100, [61, 100, 100, 100, 100, 80]),
    "chunks of a request's part": ({"max_prefix_tokens": 168}, 7, [61] + [7] * 24),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("known", KNOWN)
def test_every_way_gives_the_answer_of_absorbed_attention(name, cache, known, monkeypatch):
    options, rows, sizes = KNOWN[known]
    spec = spec_of(CACHES[cache])
    case = Case(spec)
    expected = case.expected()
    case.sizes.clear()
    backend = backend_of(name, spec)
    monkeypatch.setattr(backend._mla, "rows", rows)
    for field, value in options.items():
        setattr(case.step.batch, field, value)
    backend.init_forward_metadata(case.step.batch)
    out = case.run(backend)
    assert case.sizes == sizes
    # The reference rounds its latent result once more than we do.
    assert relative_error(out, expected) <= 2 * MAX_RELATIVE_ERROR[spec.dtype]
    assert torch.equal(case.run(backend), out), "a layer's second call, and every layer of a step"


@pytest.mark.parametrize("name", BACKENDS)
def test_prompts_without_a_prefix_look_at_no_cache(name):
    spec = spec_of()
    case = Case(spec, ([0, 0], [40, 70]))
    case.step.batch.max_prefix_tokens = 0
    backend = backend_of(name, spec)
    backend.init_forward_metadata(case.step.batch)
    out = case.run(backend)
    assert case.sizes == [110]
    assert relative_error(out, case.expected()) <= 2 * MAX_RELATIVE_ERROR[spec.dtype]


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_tokens_are_zeros_and_change_nothing(name, monkeypatch):
    spec = spec_of()
    plain, padded = Case(spec), Case(spec, num_tokens=64)
    padded.q[:61] = plain.q
    backend = backend_of(name, spec)
    monkeypatch.setattr(backend._mla, "rows", 50)
    for case in (plain, padded):
        case.step.batch.max_cache_seqlen = 120
    backend.init_forward_metadata(padded.step.batch)
    out = padded.run(backend)
    assert relative_error(out[:61], plain.expected()) <= 2 * MAX_RELATIVE_ERROR[spec.dtype]
    assert torch.equal(out[61:], torch.zeros_like(out[61:]))


def test_the_workspace_bounds_every_piece_of_the_prefix(monkeypatch):
    monkeypatch.setattr(mla_prefill, "WORKSPACE_BYTES", 100_000)
    spec = spec_of()
    case = Case(spec)
    backend = backend_of("fa3", spec)
    row = HEADS * (NOPE + ROPE + NOPE + 48) + 576
    assert backend._mla.rows == max(mla_prefill.LEAST_ROWS, 100_000 // (2 * row))
    backend.init_forward_metadata(case.step.batch)
    case.run(backend)
    assert max(case.sizes) <= max(backend._mla.rows, case.q.shape[0])


def test_long_extends_come_unabsorbed_and_short_ones_absorbed():
    spec = AttentionSpec.mla(16, page_size=16, up_head_dims=(192, 128))
    backend = backend_of("fa3", spec)
    decode = get_backend_class("flashmla")(AttentionSpec.mla(16, up_head_dims=(192, 128)), LIMITS)
    prefill = get_backend_class("fa3")(decode.spec, LIMITS)
    hybrid = HybridAttnBackend(prefill, decode, "decode")
    model = Model("mla", spec)
    for new, absorbed in (([171], False), ([170], True), ([100, 80], True)):
        step = make_step(model, EXTEND, [3] * len(new), new)
        for one in (backend, hybrid):
            assert one.takes_absorbed(step.batch) == absorbed
            step.batch.attn_backend = one
            assert step.layer.takes_absorbed(step.batch), "a layer that cannot project"
            step.layer.up_projection = UpProjection(lambda latent: None)
            assert step.layer.takes_absorbed(step.batch) == absorbed
            step.layer.up_projection = None
    uniform = make_step(model, ForwardMode.TARGET_VERIFY, [3], [5], uniform=True)
    assert backend.takes_absorbed(uniform.batch) and hybrid.takes_absorbed(uniform.batch)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"deterministic": True}, "batch-invariant"), ({"has_sinks": True}, "sinks")],
)
def test_models_that_parts_cannot_serve_say_so(options, words):
    spec = spec_of(**options)
    case = Case(spec)
    backend = backend_of("fa3", spec)
    backend.init_forward_metadata(case.step.batch)
    assert backend.takes_absorbed(case.step.batch)
    with pytest.raises(ValueError, match=f"{words}.* must come absorbed"):
        case.run(backend)


def test_other_mistakes_are_named():
    spec = spec_of()
    case = Case(spec, ([3, 5], [4, 4]), ForwardMode.TARGET_VERIFY, uniform=True)
    backend = backend_of("fa3", spec)
    backend.init_forward_metadata(case.step.batch)
    with pytest.raises(ValueError, match="a uniform step must come absorbed"):
        case.run(backend)
    case = Case(spec_of(v_dim=40))
    backend.init_forward_metadata(case.step.batch)
    with pytest.raises(ValueError, match=r"projects to \(96, 40\), the backend was built for up_head_dims \(96, 48\)"):
        case.run(backend)
    without = get_backend_class("fa3")(dataclasses.replace(spec, up_head_dims=None), LIMITS)
    without.init_forward_metadata(case.step.batch)
    with pytest.raises(ValueError, match=r"need AttentionSpec\.up_head_dims"):
        case.run(without)
    with pytest.raises(ValueError, match="up_head_dims belongs to MLA"):
        AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, up_head_dims=(192, 128))


def test_a_captured_step_serves_other_lengths_of_its_shape(monkeypatch):
    spec = spec_of()
    static, other = Case(spec), Case(spec, ([100, 0, 3, 65], [1, 33, 20, 7]))
    expected = other.expected()
    backend = backend_of("fa3", spec)
    monkeypatch.setattr(backend._mla, "rows", 90)
    for case in (static, other):
        case.step.batch.max_cache_seqlen = 130
    backend.init_forward_metadata_out_graph(static.step.batch, in_capture=True)
    tape = GraphTape()
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.step.batch)
        out = static.run(backend)
    static.step.overwrite(other.step)
    static.q.copy_(other.q)
    backend.init_forward_metadata_out_graph(static.step.batch)
    tape.replay()
    assert relative_error(out, expected) <= 2 * MAX_RELATIVE_ERROR[spec.dtype]
