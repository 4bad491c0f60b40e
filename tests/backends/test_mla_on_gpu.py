"""The backends on mla_decode on a GPU: decode, verify and draft extend, eager and captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.types import AttentionSpec
from checks import MAX_RELATIVE_ERROR, relative_error
from gpu_steps import SHAPES, check_replay, eager, step_of
from steps import Model

pytestmark = pytest.mark.gpu

PAGE_SIZES = {"flashmla": [64], "cutlass_mla": [128], "trtllm_mla": [32, 64]}
CACHES = {"bf16": None, "e4m3": torch.float8_e4m3fn, "rows": torch.uint8}
BACKENDS = [(name, page_size) for name, page_sizes in PAGE_SIZES.items() for page_size in page_sizes]


def model_of(page_size: int, heads: int, cache: str) -> Model:
    return Model("mla", AttentionSpec.mla(heads, page_size=page_size, kv_dtype=CACHES[cache]), scale=0.1)


@pytest.mark.parametrize("name, page_size", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("cache", CACHES)
def test_eager_equals_the_reference(name, page_size, shape, heads, cache):
    step = step_of(model_of(page_size, heads, cache), shape, 1)
    assert relative_error(eager(name, step).cpu(), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("name, page_size", BACKENDS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "draft_extend_ragged"])
@pytest.mark.parametrize("cache", CACHES)
def test_replay_with_other_requests_equals_eager_bit_for_bit(name, page_size, shape, cache):
    check_replay(name, model_of(page_size, 16, cache), shape)


@pytest.mark.parametrize("name, page_size", BACKENDS)
def test_products_are_rounded_to_e4m3_only_when_the_model_allows_it(name, page_size):
    step = step_of(model_of(page_size, 128, "e4m3"), "decode", 1)
    spec = dataclasses.replace(step.model.spec, fp8_products=True)
    step = dataclasses.replace(step, model=dataclasses.replace(step.model, spec=spec))
    error = relative_error(eager(name, step).cpu(), step.expected)
    assert MAX_RELATIVE_ERROR[torch.bfloat16] < error <= 6e-2
