"""What the contract's table does not reach: a hybrid's steps, MLA in parts, encoders in buckets, the checked mode, and
that the tape would catch a backend that plans outside its graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attnops import reference, report
from attnops.backends import HybridAttnBackend, get_backend_class, registered_names, select_backend
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
MODEL = Model("gqa", SPEC)
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
BACKENDS = [name for name in registered_names() if "cpu" in get_backend_class(name).capability.devices]


def serving(spec: AttentionSpec, *modes: ForwardMode) -> list[str]:
    """Backends that serve a model on the CPU."""
    return [name for name in BACKENDS if not get_backend_class(name).capability.reasons_against(spec, modes)]


def hybrid(mode: str = "prefill") -> HybridAttnBackend:
    prefill, decode = (get_backend_class(name)(SPEC, LIMITS) for name in ("torch_native", "intel_amx"))
    return HybridAttnBackend(prefill, decode, mode)


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_hybrid_gives_the_bits_of_the_backend_that_it_chose(mode, speculative):
    uniform = mode is not ForwardMode.EXTEND
    new = [1, 1] if mode is ForwardMode.DECODE else [4, 4]
    both, single = (make_step(MODEL, mode, [30, 7], new, uniform=uniform) for _ in range(2))
    backend = hybrid(speculative)
    backend.init_forward_metadata(both.batch)
    chosen = get_backend_class(backend.select(mode).name)(SPEC, LIMITS)
    chosen.init_forward_metadata(single.batch)
    assert torch.equal(both.run(backend), single.run(chosen))


class PlansOutside(get_backend_class("intel_amx")):
    """What a backend must not do: its device work runs before the graph, with the lengths of that moment."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch): ...


def test_the_tape_catches_a_backend_that_plans_outside_its_graph():
    static = make_step(MODEL, ForwardMode.DECODE, [3, 2], [1, 1], seed=1, uniform=True)
    other = make_step(MODEL, ForwardMode.DECODE, [150, 64], [1, 1], seed=2, uniform=True)
    backend = PlansOutside(SPEC, LIMITS)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    tape = GraphTape()
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    static.overwrite(other)
    try:
        tape.replay()
    except RuntimeError:  # the CPU's op may notice that its plan is stale
        return
    assert not relative_error(out, other.expected) <= 0.1, "stale tables lead to wrong pages, or to NaN"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("heads", [8, 100])
@pytest.mark.parametrize("mode", [DECODE, EXTEND, ForwardMode.DRAFT_EXTEND])
def test_mla_takes_latent_and_rotary_parts_apart(name, heads, mode):
    page_size = 128 if name == "cutlass_mla" else 64
    model = Model("mla", AttentionSpec.mla(heads, page_size=page_size), scale=0.1)
    if name not in serving(model.spec, mode):
        pytest.skip("not served")
    uniform = mode is DECODE
    step = make_step(model, mode, [70, 0, 5], [1, 1, 1] if uniform else [3, 17, 1], uniform=uniform)
    backend = get_backend_class(name)(model.spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    together = step.run(backend)
    q, k = step.q, step.k.squeeze(1)
    apart = backend.forward(
        q[..., :512], k[:, :512], None, step.layer, step.batch, q_rope=q[..., 512:], k_rope=k[:, 512:]
    )
    assert torch.equal(apart.view_as(together), together)
    assert relative_error(together, step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


ENCODER = AttentionSpec(
    num_q_heads=4, num_kv_heads=4, head_dim=32, dtype=torch.float32, attn_type=AttentionType.ENCODER_ONLY
)


@pytest.mark.parametrize("name", serving(ENCODER))
def test_an_encoders_bucket_may_hold_nan_behind_its_tokens(name):
    spec = ENCODER
    step = make_step(Model("encoder", spec), ForwardMode.EXTEND, [0, 0], [7, 12], num_tokens=32)
    backend = get_backend_class(name)(spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend)[:19], step.expected[:19]) <= MAX_RELATIVE_ERROR[torch.float32]


@pytest.mark.parametrize("name", serving(SPEC))
def test_indices_may_be_of_either_width(name):
    mode = EXTEND if name in serving(SPEC, EXTEND) else ForwardMode.DRAFT_EXTEND
    wide, narrow = (make_step(MODEL, mode, [30, 0], [3, 9]) for _ in range(2))
    narrow.batch.req_pool_indices = narrow.batch.req_pool_indices.to(torch.int32)
    narrow.batch.out_cache_loc = narrow.batch.out_cache_loc.to(torch.int32)
    results = []
    for step in (wide, narrow):
        backend = get_backend_class(name)(SPEC, LIMITS)
        backend.init_forward_metadata(step.batch)
        results.append(step.run(backend))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", serving(SPEC))
def test_layers_with_and_without_a_window_share_a_step(name):
    """Gemma's pattern: one step's metadata serves both kinds of layer."""
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, sliding_window_size=20)
    windowed, full = Model("windowed", spec), Model("full", SPEC)
    backend = get_backend_class(name)(spec, LIMITS)
    ragged = EXTEND if name in serving(SPEC, EXTEND) else ForwardMode.DRAFT_EXTEND
    for mode, new, uniform in ((DECODE, [1, 1], True), (ragged, [9, 40], False)):
        steps = [make_step(model, mode, [100, 3], new, uniform=uniform) for model in (windowed, full)]
        backend.init_forward_metadata(steps[0].batch)
        for step in steps:
            step.batch = steps[0].batch  # same lengths and tables
        assert relative_error(steps[0].run(backend), steps[0].expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
        assert relative_error(steps[1].run(backend), steps[1].expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


def test_a_window_that_the_backend_was_not_built_for_is_named():
    step = make_step(MODEL, ForwardMode.DECODE, [3], [1], uniform=True)
    backend = get_backend_class("intel_amx")(SPEC, LIMITS)
    backend.init_forward_metadata(step.batch)
    layer = RadixAttention(8, 64, 0.2, 2, 1, sliding_window_size=7)
    with pytest.raises(ValueError, match="layer 1 has sliding_window_size 7, the backend was built for -1"):
        backend.forward(step.q, step.k, step.v, layer, step.batch)


@pytest.mark.parametrize("name", serving(SPEC))
def test_the_checked_mode_names_what_only_the_device_can_see(name, monkeypatch):
    step = make_step(MODEL, ForwardMode.DECODE, [9, 30], [1, 1], uniform=True)
    plain = get_backend_class(name)(SPEC, LIMITS)
    plain.raise_on_fault()
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    backend = get_backend_class(name)(SPEC, LIMITS)
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    backend.raise_on_fault()
    step.batch.req_pool_indices[1] = 1000
    backend.init_forward_metadata(step.batch)
    with pytest.raises(RuntimeError, match=r"attnops::build_page_table: request row 1000 at request 1.*\[0, 16\)"):
        backend.raise_on_fault()
    backend.raise_on_fault()  # said once


@pytest.mark.parametrize("name", serving(SPEC))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q[:, :3], r"q must have shape \[num_tokens, 512\] or \[num_tokens, 8, 64\].*got \[2, 3, 64\]"),
        (lambda q: q[..., :5], r"q must have shape .*got \[2, 8, 5\]"),
        (lambda q: q[:1], r"q\.shape\[0\] .*must be 2 .*got 1"),
    ],
)
def test_queries_of_another_shape_are_named(name, change, message):
    step = make_step(MODEL, ForwardMode.DECODE, [9, 30], [1, 1], uniform=True)
    backend = get_backend_class(name)(SPEC, LIMITS)
    backend.init_forward_metadata(step.batch)
    out = torch.empty(2, SPEC.num_q_heads * SPEC.v_head_dim, dtype=SPEC.dtype)
    with pytest.raises((RuntimeError, ValueError), match=message):
        backend.forward(change(step.q), step.k, step.v, step.layer, step.batch, out=out)


def test_the_words_of_the_checked_mode_are_those_of_the_header():
    header = (Path(__file__).parents[2] / "csrc/core/report.h").read_text()
    ops = re.findall(r"k(\w+) = \d+,", header.split("enum class ReportOp")[1].split("};")[0])
    assert [re.sub(r"(?<!^)(?=[A-Z])", "_", op).lower() for op in ops] == list(report.OPS[: len(ops)])
    kinds = re.findall(r"k(\w+) = \d+,", header.split("enum class ReportKind")[1].split("};")[0])
    # Families have headers of their own, whose numbers go on where the last ones end.
    more = "".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "csrc").rglob("*.h")))
    found: dict[str, list[int]] = {"Op": [], "Kind": []}
    for kind, names in re.findall(r"constexpr Report(Op|Kind) ([^;]+);", re.sub("//.*", "", more)):
        found[kind] += [int(number) for number in re.findall(r"kReport\w+\{(\d+)\}", names)]
    assert sorted(found["Op"]) == list(range(12, len(report.OPS)))
    assert sorted(found["Kind"]) == list(range(len(kinds), len(report.KINDS)))
    assert f"kReportSize = {report.SIZE}," in header


def test_more_steps_than_are_kept_make_no_difference(monkeypatch):
    """Views of shapes that were dropped are made again at the same addresses."""
    monkeypatch.setattr("attnops.graph_buffers.MAX_CACHED_STEPS", 2)
    monkeypatch.setattr("attnops.backends.intel_amx.MAX_CACHED_STEPS", 2)
    backend = get_backend_class("intel_amx")(SPEC, LIMITS)
    addresses = []
    for count in (1, 2, 3, 4, 1):
        step = make_step(MODEL, ForwardMode.DECODE, [5] * count, [1] * count, uniform=True)
        backend.init_forward_metadata(step.batch)
        addresses.append(backend._prepared.views.paged.page_table.data_ptr())
        assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    assert len(set(addresses)) == 1


def test_a_pool_above_two_to_the_31_elements_is_addressed_in_full():
    """The last page of a pool of 2^31 elements and more: only what is touched takes memory."""
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=256, page_size=64)
    tokens = 2**31 // (8 * 256) + 4096
    pool = MHATokenToKVPool(tokens, 64, torch.bfloat16, 8, 256, 1)
    assert pool.k_buffer[0].numel() > 2**31
    limits = Limits(max_batch_size=1, max_seqlen=64, max_num_tokens=64)
    backend = get_backend_class("intel_amx")(spec, limits)
    step = make_step(Model("huge", spec), ForwardMode.EXTEND, [0], [60])
    step.batch.token_to_kv_pool = pool
    step.batch.out_cache_loc = torch.arange(pool.size - 64, pool.size - 4)
    step.batch.req_to_token = torch.arange(pool.size - 64, pool.size, dtype=torch.int32).view(1, 64)
    step.batch.req_pool_indices = torch.tensor([0])
    step.layer.layer_id = 0
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("pool", [False, True])
def test_a_decoder_asked_for_everything_serves_a_prompt_and_its_next_token(pool):
    """Prefill by the backend that selection adds, decode by the one asked for, over what prefill has stored."""
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, sliding_window_size=20)
    model, lengths = Model("windowed", spec, swa_pool=pool), [70, 9]
    backend = select_backend(spec, LIMITS, "cpu", attention_backend="trtllm_mha")
    step = make_step(model, DECODE, lengths, [1, 1], uniform=True, seed=1)
    prompt = make_step(model, EXTEND, [0, 0], lengths, seed=2)
    for name in ("token_to_kv_pool", "req_to_token", "req_pool_indices"):
        setattr(prompt.batch, name, getattr(step.batch, name))
    rows = step.batch.req_to_token[step.batch.req_pool_indices].long()
    prompt.batch.out_cache_loc = torch.cat([row[:length] for row, length in zip(rows, lengths)])
    backend.init_forward_metadata(prompt.batch)
    assert relative_error(prompt.run(backend), prompt.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    backend.init_forward_metadata(step.batch)
    out = step.run(backend)
    for request, (k, v) in enumerate(zip(prompt.k.split(lengths), prompt.v.split(lengths))):
        new = slice(request, request + 1)
        keys, values = torch.cat([k, step.k[new]]), torch.cat([v, step.v[new]])
        expected, _ = reference.attention(step.q[new], keys, values, softmax_scale=model.scale, window_left=20)
        assert relative_error(out[new], expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
@pytest.mark.parametrize("name", serving(SPEC, EXTEND, DECODE))
def test_rows_that_do_not_belong_together_are_named(name, mode):
    backend, new = get_backend_class(name)(SPEC, LIMITS), [1, 1] if mode is DECODE else [3, 4]
    step = make_step(MODEL, mode, [20, 9], new)
    backend.init_forward_metadata(step.batch)
    with pytest.raises((ValueError, RuntimeError), match=r"attnops.*: v must be given with k"):
        backend.forward(step.q, step.k, None, step.layer, step.batch)
    for dtype in (torch.int16, torch.bool):
        with pytest.raises((ValueError, RuntimeError), match=r"attnops.*\bq must (have dtype|be of a floating point)"):
            backend.forward(step.q.to(dtype), None, None, step.layer, step.batch)
