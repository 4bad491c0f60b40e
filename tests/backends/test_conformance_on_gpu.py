"""The conformance suite on a GPU: every backend that runs there, and 200 replays of each that is captured.

Backends that compile at run time take seconds for every combination. So they take turns: a mode for every second
feature and page size, or one page size. With CONFORMANCE_ALL=1 `triton` takes every mode, and `flex_attention` every
mode of one page size. Of the others it takes turns: its kernel sees gathered keys, and no page. Replays are then of
every feature that a captured step may have.
"""

from __future__ import annotations

import os

import pytest
import torch
from attnops.backends import detect_machine, get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from conformance import FEATURES, MODES, PAGE_SIZES, spec_of
from gpu_steps import SHAPES, check_replay, on_gpu
from sparse_lists import answer, with_lists
from steps import LIMITS, Model, make_step

pytestmark = pytest.mark.gpu

REPLAYS = 200
ALL = os.environ.get("CONFORMANCE_ALL") == "1"
USUAL = ("plain", "fp32", "window", "cap", "sinks", "e4m3", "e5m2", "deterministic", "mla", "mla_e4m3", "mla_rows")
USUAL += ("mla_lists", "mla_lists_rows")
REPLAYED = (*USUAL, *(name for name in FEATURES if name not in (*USUAL, "encoder"))) if ALL else USUAL
NAMES = [name for name in registered_names() if "cuda" in get_backend_class(name).capability.devices]
CAPTURED = [name for name in NAMES if get_backend_class(name).capability.cuda_graph]


def reasons_here(name, spec, modes=()):
    capability = get_backend_class(name).capability
    return capability.machine_reasons(detect_machine("cuda"), spec) + capability.reasons_against(spec, modes)


def modes_of(name, spec, feature, page_size):
    modes = [ForwardMode.EXTEND] if spec.attn_type is AttentionType.ENCODER_ONLY else list(MODES)
    turn = list(FEATURES).index(feature) + PAGE_SIZES.index(page_size)
    if name == "triton" and not ALL:
        modes = [modes[turn // 2 % len(modes)]] if turn % 2 == 0 else []
    if name == "flex_attention" and not (ALL and page_size == 16):
        modes = [modes[turn % len(modes)]] if ALL or page_size == 16 else []
    return [mode for mode in modes if not reasons_here(name, spec, [mode])]


def right(name, spec, mode, **more):
    prefix, new, options = MODES[mode]
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        prefix = [0, 0]
    step = make_step(Model("one", spec, scale=0.1), mode, prefix, new, **options, **more)
    if spec.sparse_topk:
        step = with_lists(step)
    seqlens, extends = step.batch.cache_seqlens, step.batch.extend_seq_lens
    step = on_gpu(step)
    step.batch.cache_seqlens_cpu, step.batch.extend_seq_lens_cpu = seqlens, extends
    backend = get_backend_class(name)(spec, LIMITS, device="cuda")
    backend.init_forward_metadata(step.batch)
    error = relative_error(step.run(backend).cpu(), answer(step))
    assert error <= MAX_RELATIVE_ERROR[spec.dtype], f"{mode.name}: relative error {error:.3g}"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_a_gpu(name, feature, page_size):
    spec = spec_of(feature, page_size)
    modes = modes_of(name, spec, feature, page_size)
    if not modes:
        pytest.skip(f"not here: {'; '.join(reasons_here(name, spec)) or 'another combination has the turn'}")
    for mode in modes:
        right(name, spec, mode)
        tree = mode is ForwardMode.TARGET_VERIFY and get_backend_class(name).capability.tree_mask
        if tree and feature != "bidirectional":
            right(name, spec, mode, tree=True)


def test_short_queries_of_many_heads_in_flex_attention():
    """160 rows of a KV head: more than the tile of torch's kernel for short queries, which then has no choice. It takes
    that kernel where it knows the heads, as here: they are as many as a head is wide."""
    spec = AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=64, page_size=16)
    step = on_gpu(make_step(Model("one", spec, scale=0.1), ForwardMode.EXTEND, [5], [20]))
    backend = get_backend_class("flex_attention")(spec, LIMITS, device="cuda")
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend).cpu(), step.expected) <= MAX_RELATIVE_ERROR[spec.dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("feature", REPLAYED)
@pytest.mark.parametrize("name", CAPTURED)
def test_200_replays_equal_eager_bit_for_bit(name, feature, shape):
    capability = get_backend_class(name).capability
    sizes = sorted(capability.page_sizes or {1, 16, 64})
    page_size = sizes[(list(REPLAYED).index(feature) + list(SHAPES).index(shape)) % len(sizes)]
    spec = spec_of(feature, page_size)
    mode = SHAPES[shape][0]
    reasons = reasons_here(name, spec, [mode])
    if shape == "tree" and (not capability.tree_mask or feature == "bidirectional"):
        reasons.append("no tree masks")
    if reasons:
        pytest.skip(f"not here: {'; '.join(reasons)}")
    check_replay(name, Model("one", spec, scale=0.1), shape, REPLAYS)


def test_the_gpu_is_the_one_that_the_suite_is_for():
    assert torch.cuda.is_available() and detect_machine("cuda").device in ("cuda", "hip")
