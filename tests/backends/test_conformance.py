"""Every backend, feature and page size, in every mode: right against float64, or refused with a reason.

What the machine here cannot run is held to the second half: refused with a reason, or served by its capability.
"""

from __future__ import annotations

import pytest
import torch
from attnops.backends import detect_machine, get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, ROWS = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
PAGE_SIZES = (1, 3, 16, 64, 128)
HERE = detect_machine("cpu")

GQA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
FEATURES = {
    "plain": GQA,
    "fp16": {**GQA, "dtype": FP16},
    "fp32": {**GQA, "dtype": FP32},
    "odd_heads": {**GQA, "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 40},
    "window": {**GQA, "sliding_window_size": 17},
    "cap": {**GQA, "logit_cap": 4.0},
    "sinks": {**GQA, "has_sinks": True},
    "e4m3": {**GQA, "kv_dtype": E4M3},
    "e5m2": {**GQA, "kv_dtype": E5M2},
    "deterministic": {**GQA, "deterministic": True},
    "bidirectional": {**GQA, "attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "encoder": {**GQA, "attn_type": AttentionType.ENCODER_ONLY},
    "mla": {},
    "mla_window_cap": {"sliding_window_size": 17, "logit_cap": 4.0},
    "mla_e4m3": {"kv_dtype": E4M3},
    "mla_rows": {"kv_dtype": ROWS},
}
MODES = {
    ForwardMode.DECODE: ([9, 70], [1, 1], {"uniform": True}),
    ForwardMode.EXTEND: ([0, 70], [13, 5], {}),
    ForwardMode.MIXED: ([9, 40], [1, 6], {}),
    ForwardMode.TARGET_VERIFY: ([9, 70], [4, 4], {"uniform": True}),
    ForwardMode.DRAFT_EXTEND: ([9, 70], [3, 1], {}),
}


def spec_of(feature: str, page_size: int) -> AttentionSpec:
    options = {"page_size": page_size, **FEATURES[feature]}
    return AttentionSpec.mla(4, **options) if feature.startswith("mla") else AttentionSpec(**options)


def right(name: str, spec: AttentionSpec, mode: ForwardMode, **more) -> None:
    prefix, new, options = MODES[mode]
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        prefix = [0, 0]
    step = make_step(Model("one", spec, scale=0.1), mode, prefix, new, **options, **more)
    backend = get_backend_class(name)(spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    error = relative_error(step.run(backend), step.expected)
    assert error <= MAX_RELATIVE_ERROR[spec.dtype], f"{mode.name}: relative error {error:.3g}"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", registered_names())
def test_right_or_refused_with_a_reason(name, feature, page_size):
    cls, spec = get_backend_class(name), spec_of(feature, page_size)
    capability = cls.capability
    encoder = spec.attn_type is AttentionType.ENCODER_ONLY
    modes = [ForwardMode.EXTEND] if encoder else list(MODES)
    if name == "triton":  # its interpreter takes a second for a step: one mode, for every other page size
        turn = list(FEATURES).index(feature) + PAGE_SIZES.index(page_size)
        modes = [modes[turn // 2 % len(modes)]] if turn % 2 == 0 else []
    for mode in modes:
        reasons = capability.reasons_against(spec, [mode])
        if reasons:
            assert all(reason.strip() for reason in reasons)
        elif not capability.machine_reasons(HERE):
            right(name, spec, mode)
            if mode is ForwardMode.TARGET_VERIFY and capability.tree_mask and feature != "bidirectional":
                right(name, spec, mode, tree=True)
    if capability.reasons_against(spec):
        with pytest.raises(NotImplementedError, match="does not serve this model: "):
            cls(spec, LIMITS)


@pytest.mark.parametrize("name", registered_names())
def test_a_refused_page_size_names_those_that_would_work(name):
    capability = get_backend_class(name).capability
    if capability.page_sizes is None:
        pytest.skip("takes every page size")
    spec = spec_of("mla" if capability.head_dims is None else "plain", 7)
    (reason,) = capability.reasons_against(spec)
    assert reason == f"takes page_size {', '.join(map(str, sorted(capability.page_sizes)))}, got 7"
