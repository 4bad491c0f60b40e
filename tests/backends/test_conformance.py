"""Every backend, feature and page size, in every mode: right against float64, or refused with a reason.

What the machine here cannot run is held to the second half: refused with a reason, or served by its capability.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from attnops.backends import detect_machine, get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from conformance import FEATURES, MODES, PAGE_SIZES, matrix, spec_of
from sparse_lists import answer, with_lists
from steps import LIMITS, Model, make_step

HERE = detect_machine("cpu")


def right(name: str, spec: AttentionSpec, mode: ForwardMode, **more) -> None:
    prefix, new, options = MODES[mode]
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        prefix = [0, 0]
    step = make_step(Model("one", spec, scale=0.1), mode, prefix, new, **options, **more)
    if spec.sparse_topk:
        step = with_lists(step)
    backend = get_backend_class(name)(spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    error = relative_error(step.run(backend), answer(step))
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


def test_the_matrix_of_the_readme_is_that_of_this_suite():
    assert matrix() in (Path(__file__).parents[2] / "README.md").read_text(), (
        "README.md: paste what `PYTHONPATH=python python tests/support/conformance.py` prints"
    )
