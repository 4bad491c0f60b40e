"""Every backend that a CPU can run, in every mode that it declares, on every model that it does not reject.

Eager equals the float64 reference; a captured step, replayed with other lengths, tables and requests, equals a fresh
eager step bit for bit. Shapes come from the capabilities, so a new backend or mode is tested without being asked for.
"""

from __future__ import annotations

import pytest
import torch
from attnops.backends import HybridAttnBackend, detect_machine, get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def gqa(**options) -> AttentionSpec:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return AttentionSpec(**{**shape, **options})


MODELS = [
    Model("gqa_bf16", gqa()),
    Model("mha_odd_heads_page1_fp32", gqa(num_q_heads=3, num_kv_heads=3, head_dim=32, page_size=1, dtype=FP32)),
    Model("mqa_page3_fp16_hnd", gqa(num_q_heads=5, num_kv_heads=1, page_size=3, dtype=FP16), layout="HND"),
    Model("window_cap", gqa(sliding_window_size=20, logit_cap=3.0)),
    Model("window_zero", gqa(sliding_window_size=0, head_dim=32)),
    Model("window_pool", gqa(sliding_window_size=20), swa_pool=True, options={"drop_window": True}),
    Model("sinks_window", gqa(has_sinks=True, sliding_window_size=33, page_size=64, head_dim=128)),
    Model("fp8_cache", gqa(kv_dtype=E4M3, head_dim=128)),
    Model(
        "fp8_cache_scale_per_head",
        gqa(kv_dtype=E4M3, dtype=FP16),
        layout="HND",
        options={"k_scale": [0.02, 0.5], "v_scale": [1.0, 0.01]},
    ),
    Model("local_chunks", gqa(attention_chunk_size=32, has_sinks=True)),
    Model("local_chunks_page1_fp16", gqa(attention_chunk_size=7, page_size=1, dtype=FP16, logit_cap=3.0)),
    Model("local_chunks_fp8", gqa(attention_chunk_size=16, kv_dtype=E4M3), layout="HND"),
    Model("two_head_dims", gqa(num_q_heads=6, num_kv_heads=3, head_dim=192, v_head_dim=128, page_size=16)),
    Model("two_head_dims_window", gqa(head_dim=40, v_head_dim=72, sliding_window_size=20, dtype=FP16, page_size=5)),
    Model("mla", AttentionSpec.mla(16, page_size=64), scale=0.1),
    Model("mla_odd_page7_fp32", AttentionSpec.mla(3, page_size=7, dtype=FP32), scale=0.1),
    Model("mla_fp8", AttentionSpec.mla(8, page_size=16, kv_dtype=E4M3), scale=0.1),
    Model(
        "mla_fp8_products", AttentionSpec.mla(8, page_size=64, kv_dtype=E4M3, fp8_products=True), scale=0.1
    ),  # no CPU kernel has need of it
    Model("mla_page32", AttentionSpec.mla(5, page_size=32, dtype=FP16), scale=0.1),
    Model("mla_page128", AttentionSpec.mla(16, page_size=128), scale=0.1),
    Model("mla_656", AttentionSpec.mla(8, page_size=64, kv_dtype=torch.uint8), scale=0.1),
    Model("bidirectional", gqa(attn_type=AttentionType.DECODER_BIDIRECTIONAL)),
    Model("vision_72", gqa(num_q_heads=4, num_kv_heads=4, head_dim=72, attn_type=AttentionType.ENCODER_ONLY)),
    Model("vision_80", gqa(num_q_heads=2, num_kv_heads=1, head_dim=80, attn_type=AttentionType.ENCODER_ONLY)),
    Model(
        "encoder", gqa(num_q_heads=12, num_kv_heads=12, head_dim=32, dtype=FP32, attn_type=AttentionType.ENCODER_ONLY)
    ),
]

# Two steps of one shape per mode: (prefix lengths, new lengths) of the captured one, then of the replayed one.
SHAPES = {
    "decode": (ForwardMode.DECODE, ([0, 1, 0, 2], [1] * 4), ([63, 64, 150, 17], [1] * 4), {"uniform": True}),
    "extend": (ForwardMode.EXTEND, ([0, 0, 0], [4, 30, 20]), ([0, 65, 100], [33, 1, 20]), {}),
    "mixed": (ForwardMode.MIXED, ([3, 1, 0], [1, 1, 12]), ([90, 33, 16], [1, 12, 1]), {}),
    "verify": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True}),
    "verify_tree": (
        ForwardMode.TARGET_VERIFY,
        ([0, 1, 2], [5] * 3),
        ([59, 100, 0], [5] * 3),
        {"uniform": True, "tree": True},
    ),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [3] * 3), ([62, 7, 130], [3] * 3), {"uniform": True}),
    "draft_extend_ragged": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [1, 3, 2]), ([62, 7, 130], [3, 2, 1]), {}),
}


def backends() -> list[str]:
    """Those that run here, but those of models that are none of `MODELS`: tests/backends/test_dsv4.py."""
    here = detect_machine("cpu")
    kinds = {name: get_backend_class(name).capability for name in registered_names()}
    return [name for name, kind in kinds.items() if not (kind.machine_reasons(here) or kind.compressed)]


def serves(name: str, model: Model, *modes: ForwardMode) -> bool:
    return not get_backend_class(name).capability.reasons_against(model.spec, modes)


def model_of(name: str) -> Model:
    """The first model that a backend serves, for tests that need any."""
    return next(model for model in MODELS if serves(name, model))


def ragged_mode(name: str) -> ForwardMode:
    """EXTEND; of a backend that only decodes, the ragged mode that it has."""
    extends = ForwardMode.EXTEND in get_backend_class(name).capability.modes
    return ForwardMode.EXTEND if extends else ForwardMode.DRAFT_EXTEND


def cases() -> list:
    """(backend, model, shape) wherever the capability says that it works.

    Of triton, whose interpreter takes a second for a step, an eighth: each model and each shape is among them.
    """
    found = []
    for name in backends():
        capability = get_backend_class(name).capability
        for row, model in enumerate(MODELS):
            for column, (shape, (mode, *_)) in enumerate(SHAPES.items()):
                encoder = model.spec.attn_type is AttentionType.ENCODER_ONLY
                causal = model.spec.attn_type is AttentionType.DECODER
                local = model.spec.attention_chunk_size > 0
                if shape == "verify_tree" and not (capability.tree_mask and causal and not local):
                    continue
                if encoder and shape != "extend":
                    continue
                if name == "triton" and (row + column) % 8 and not encoder:
                    continue
                if not capability.reasons_against(model.spec, [mode]):
                    found.append(pytest.param(name, model, shape, id=f"{name}-{model.name}-{shape}"))
    return found


def captured(name: str) -> bool:
    return get_backend_class(name).capability.cuda_graph


def step_of(model: Model, shape: str, which: int, **more):
    mode, *lengths, options = SHAPES[shape]
    prefix, new = lengths[which]
    if model.spec.attn_type is AttentionType.ENCODER_ONLY:
        prefix = [0] * len(new)
    return make_step(model, mode, prefix, new, seed=which, **options, **more)


def build(name: str, model: Model):
    return get_backend_class(name)(model.spec, LIMITS)


def eager(name: str, step) -> torch.Tensor:
    backend = build(name, step.model)
    backend.init_forward_metadata(step.batch)
    return step.run(backend)


@pytest.mark.parametrize(("name", "model", "shape"), cases())
def test_eager_equals_the_reference(name, model, shape):
    step = step_of(model, shape, 1)
    out = eager(name, step)
    assert out.dtype == model.spec.dtype
    # An FP8 cache is compared with its own dequantized values, so the bound is that of q's dtype.
    error = relative_error(out, step.expected)
    assert error <= MAX_RELATIVE_ERROR[model.spec.dtype], f"relative error {error:.3g}"


@pytest.mark.parametrize(("name", "model", "shape"), [c for c in cases() if captured(c.values[0])])
def test_replay_with_other_requests_equals_fresh_eager_bit_for_bit(name, model, shape):
    static, other = step_of(model, shape, 0), step_of(model, shape, 1)
    expected = eager(name, step_of(model, shape, 1))
    backend = build(name, model)
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    tape = GraphTape()
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    # Steps of other shapes between capture and replay must not disturb what the graph reads.
    between = step_of(model, shape, 1)
    backend.init_forward_metadata(between.batch)
    between.run(backend)
    for _ in range(2):
        static.overwrite(other)
        backend.init_forward_metadata_out_graph(static.batch)
        tape.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("name", "model", "shape"), cases())
def test_the_checked_mode_finds_nothing_in_a_right_step_and_changes_no_bit(name, model, shape, monkeypatch):
    expected = eager(name, step_of(model, shape, 1))
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    backend = build(name, model)
    assert backend.fault_report is not None
    step = step_of(model, shape, 1)
    backend.init_forward_metadata(step.batch)
    assert torch.equal(step.run(backend), expected)
    backend.raise_on_fault()


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("mla", [False, True])
def test_padding_tokens_of_a_bucket_change_nothing(name, mla):
    mode = ragged_mode(name)
    model = next((m for m in MODELS if m.spec.is_mla == mla and serves(name, m, mode)), None)
    if model is None:
        pytest.skip("not served")
    lengths = ([0, 65, 100], [33, 1, 20])
    plain = make_step(model, mode, *lengths, seed=1)
    bucket = make_step(model, mode, *lengths, seed=1, num_tokens=64)
    out = eager(name, bucket)
    assert relative_error(out[:54], plain.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


@pytest.mark.parametrize("name", backends())
def test_padding_rows_of_a_graph_change_no_other_row(name):
    """A graph of 4 serves 2 requests: the rest hold the fill value, slot -1 and request row 0."""
    model = model_of(name)
    backend = build(name, model)
    step = make_step(model, ForwardMode.DECODE, [63, 150, 10, 20], [1] * 4, uniform=True, seed=3)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    assert fill > 0
    step.batch.cache_seqlens[2:] = fill
    step.batch.out_cache_loc[2:] = -1
    backend.init_forward_metadata(step.batch)
    out = step.run(backend)
    assert relative_error(out[:2], step.expected[:2]) <= MAX_RELATIVE_ERROR[model.spec.dtype]


@pytest.mark.parametrize("name", backends())
def test_new_rows_are_stored_unless_they_are_there(name):
    model = model_of(name)
    step = make_step(model, ragged_mode(name), [5, 20], [7, 2])
    backend = build(name, model)
    backend.init_forward_metadata(step.batch)
    first = step.run(backend)
    step.k.fill_(float("nan"))
    step.v.fill_(float("nan"))
    again = step.run(backend, save_kv_cache=False)
    if name == "triton":  # it reads new rows from k and v while it stores them, in other steps than from pages
        assert relative_error(again, step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]
    else:
        assert torch.equal(again, first)


@pytest.mark.parametrize("name", backends())
def test_idle_and_empty_steps(name):
    model = model_of(name)
    backend = build(name, model)
    step = make_step(model, ragged_mode(name), [], [])
    for mode in (ForwardMode.IDLE, ragged_mode(name)):
        step.batch.forward_mode = mode
        backend.init_forward_metadata(step.batch)
        assert step.run(backend).shape == (0, model.spec.num_q_heads, model.spec.v_head_dim)
    step.batch.forward_mode = ForwardMode.IDLE
    # Padding of a rank that only joins collectives.
    rows = torch.full((3, model.spec.num_q_heads * model.spec.head_dim), float("nan"), dtype=model.spec.dtype)
    out = backend.forward(rows, rows, rows, step.layer, step.batch)
    assert torch.equal(out, torch.zeros(3, model.spec.num_q_heads * model.spec.v_head_dim, dtype=model.spec.dtype))


@pytest.mark.parametrize("name", backends())
def test_an_out_of_the_callers_is_written(name):
    model = model_of(name)
    step = make_step(model, ForwardMode.DECODE, [9, 30], [1, 1], uniform=True)
    backend = build(name, model)
    backend.init_forward_metadata(step.batch)
    out = torch.full((2, model.spec.num_q_heads * model.spec.v_head_dim), float("nan"), dtype=model.spec.dtype)
    v = None if model.spec.is_mla else step.v
    result = backend.forward(step.q, step.k, v, step.layer, step.batch, out=out)
    assert result is out
    assert relative_error(out.view_as(step.expected), step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


@pytest.mark.parametrize("name", backends())
def test_forward_decode_and_forward_extend_make_their_out_and_return_it(name):
    model = model_of(name)
    for hybrid in (False, True):
        backend = build(name, model)
        backend = HybridAttnBackend(backend, backend) if hybrid else backend
        for mode, uniform in ((ForwardMode.DECODE, True), (ragged_mode(name), False)):
            step = make_step(model, mode, [9, 30], [1, 1], uniform=uniform)
            backend.init_forward_metadata(step.batch)
            decodes = mode is ForwardMode.DECODE
            serve, refuse = (backend.forward_decode, backend.forward_extend)[:: 1 if decodes else -1]
            v = None if model.spec.is_mla else step.v
            made = serve(step.q, step.k, v, step.layer, step.batch)
            assert relative_error(made.view_as(step.expected), step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]
            given = torch.full_like(made, float("nan"))
            assert serve(step.q, step.k, v, step.layer, step.batch, out=given) is given
            assert torch.equal(given, made)
            with pytest.raises(ValueError, match=r"forward_(decode|extend) takes"):
                refuse(step.q, step.k, v, step.layer, step.batch)


@pytest.mark.parametrize("name", backends())
def test_a_batch_above_the_limits_names_the_limit(name):
    model = model_of(name)
    backend = build(name, model)
    step = make_step(model, ForwardMode.DECODE, [1] * 9, [1] * 9, uniform=True)
    with pytest.raises(ValueError, match=r"the batch has 9, above max_batch_size = 8"):
        backend.init_forward_metadata(step.batch)
    step = make_step(model, ForwardMode.TARGET_VERIFY, [1], [6], uniform=True)
    with pytest.raises(ValueError, match=r"6 tokens per request, above max_tokens_per_request = 5"):
        backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match="max_batch_size = 8"):
        backend.init_cuda_graph_state(9, 9)


@pytest.mark.parametrize("name", backends())
def test_a_layer_before_its_metadata_says_so(name):
    model = model_of(name)
    step = make_step(model, ForwardMode.DECODE, [1], [1], uniform=True)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        step.run(build(name, model))


@pytest.mark.parametrize("name", backends())
def test_a_layer_with_a_stale_plan_says_what_to_do(name):
    model = model_of(name)
    backend = build(name, model)
    first, second = step_of(model, "decode", 0), step_of(model, "decode", 1)
    backend.init_forward_metadata(first.batch)
    first.run(backend)
    with pytest.raises(RuntimeError, match=r"plan is stale: it was made for DECODE of 4 .*Call init_forward_metadata"):
        second.run(backend)
    with pytest.raises(RuntimeError, match=r"init_forward_metadata_out_graph.* must run before"):
        backend.init_forward_metadata_in_graph(second.batch)
    backend.init_forward_metadata_out_graph(second.batch)
    with pytest.raises(RuntimeError, match="plan is stale: only init_forward_metadata_out_graph has run"):
        second.run(backend)
    backend.init_forward_metadata_in_graph(second.batch)
    assert relative_error(second.run(backend), second.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


def views_of(backend):
    """The step's views: a backend holds them itself, or in what it composes."""
    return backend._prepared.views if hasattr(backend, "_prepared") else backend._steps.prepared.views


@pytest.mark.parametrize("name", backends())
def test_the_views_of_one_shape_are_the_same_for_ever(name):
    model = model_of(name)
    backend = build(name, model)
    first = step_of(model, "decode", 0)
    backend.init_forward_metadata(first.batch)
    views = views_of(backend)
    assert views is not None
    backend.init_forward_metadata(step_of(model, "draft_extend_ragged", 0).batch)
    assert views_of(backend) is not views
    backend.init_forward_metadata(step_of(model, "decode", 1).batch)
    assert views_of(backend) is views


def test_ragged_steps_of_bidirectional_windows_are_refused_where_only_decode_runs():
    """Rows before a block's first token would look further back than any token's window."""
    window = gqa(sliding_window_size=20, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
    step = step_of(Model("bidirectional_window", window), "draft_extend_ragged", 0)
    with pytest.raises(NotImplementedError, match="serves no ragged DRAFT_EXTEND of bidirectional"):
        eager("trtllm_mha", step)


def bidirectional_backends() -> list[str]:
    spec = gqa(sliding_window_size=2, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
    served = {
        name: get_backend_class(name).capability.reasons_against(spec, [ForwardMode.TARGET_VERIFY])
        for name in backends()
    }
    return [name for name, reasons in served.items() if not reasons]


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("name", bidirectional_backends())
def test_a_bidirectional_window_ends_on_the_right_too(name, tokens):
    """Tokens of a step stand behind one another: those that a window does not reach are not seen, or it is refused."""
    window = gqa(sliding_window_size=2, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
    step = make_step(
        Model("bidirectional_window", window), ForwardMode.TARGET_VERIFY, [30, 0, 17], [tokens] * 3, uniform=True
    )
    if name == "trtllm_mha" and tokens > 3:
        with pytest.raises(NotImplementedError, match="serves no TARGET_VERIFY of 4 tokens of bidirectional attention"):
            eager(name, step)
        return
    assert relative_error(eager(name, step), step.expected) < MAX_RELATIVE_ERROR[torch.bfloat16]
