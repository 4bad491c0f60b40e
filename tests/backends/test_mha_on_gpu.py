"""trtllm_mha on a GPU: decode, verify and draft extend, eager and captured, over every kind of cache and window."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec
from checks import MAX_RELATIVE_ERROR, relative_error
from gpu_steps import SHAPES, check_replay, eager, step_of
from steps import LIMITS, Model

pytestmark = pytest.mark.gpu

NAME = "trtllm_mha"
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def gqa(**options) -> AttentionSpec:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    return AttentionSpec(**{**shape, **options})


MODELS = [
    Model("bf16", gqa(num_q_heads=32, num_kv_heads=8)),
    Model("odd_heads_page1", gqa(num_q_heads=7, num_kv_heads=7, head_dim=64, page_size=1)),
    Model("page3_hnd", gqa(num_q_heads=5, num_kv_heads=1, page_size=3, dtype=FP16), layout="HND"),
    Model("fp32", gqa(num_q_heads=3, num_kv_heads=3, head_dim=32, dtype=FP32)),
    Model("window_cap", gqa(sliding_window_size=20, logit_cap=3.0, head_dim=256)),
    Model("window_pool", gqa(sliding_window_size=20), swa_pool=True, options={"drop_window": True}),
    Model("sinks_window", gqa(has_sinks=True, sliding_window_size=33, page_size=64, head_dim=64)),
    Model("fp8", gqa(kv_dtype=E4M3, page_size=64)),
    Model("fp8_window_pool", gqa(kv_dtype=E4M3, sliding_window_size=20), swa_pool=True, options={"drop_window": True}),
    Model(
        "fp8_scale_per_head",
        gqa(kv_dtype=E4M3, dtype=FP16),
        layout="HND",
        options={"k_scale": [0.02, 0.5], "v_scale": [1.0, 0.01]},
    ),
    Model("deterministic", gqa(deterministic=True)),
]
models = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


@models
@pytest.mark.parametrize("shape", SHAPES)
def test_eager_equals_the_reference(model, shape):
    step = step_of(model, shape, 1)
    error = relative_error(eager(NAME, step).cpu(), step.expected)
    assert error <= MAX_RELATIVE_ERROR[model.spec.dtype]


@models
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "draft_extend_ragged"])
def test_replay_with_other_requests_equals_eager_bit_for_bit(model, shape):
    check_replay(NAME, model, shape)


@models
def test_the_checked_mode_names_a_planted_index(model, monkeypatch):
    """A page that is not in the pool, where the step's own table leads; and nothing in a right step."""
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    step = step_of(model, "decode", 1)
    backend = get_backend_class(NAME)(model.spec, LIMITS, device="cuda")
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    backend.raise_on_fault()
    if step.batch.token_to_kv_pool.slot_map is None:
        row, size = step.batch.req_pool_indices[1].item(), model.spec.page_size
        first = 64 // size * size  # of the newest token's page
        step.batch.req_to_token[row, first : first + size] = 10**6 * size + torch.arange(size, device="cuda")
        expected = "attnops::xqa_decode: page index 1000000 at request 1"
    else:
        step.batch.req_pool_indices[1] = 1000
        expected = "attnops::build_page_table: request row 1000 at request 1"
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    with pytest.raises(RuntimeError, match=expected):
        backend.raise_on_fault()
