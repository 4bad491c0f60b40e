"""With `AttentionSpec.deterministic`, a request's output has the same bits whatever else is in its batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import get_backend_class, registered_names
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from steps import Model, Step, make_step

GQA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "deterministic": True}
MODELS = [
    Model("gqa", AttentionSpec(**GQA)),
    Model("window_sinks_fp32", AttentionSpec(**GQA, sliding_window_size=70, has_sinks=True, dtype=torch.float32)),
    Model("fp8_cap", AttentionSpec(**GQA, kv_dtype=torch.float8_e4m3fn, logit_cap=5.0)),
    Model("mla", AttentionSpec.mla(16, page_size=64, deterministic=True)),
    Model("mla_page128", AttentionSpec.mla(16, page_size=128, deterministic=True)),
    Model("mla_many_heads", AttentionSpec.mla(80, page_size=64, deterministic=True)),
]
CAPABILITIES = {name: get_backend_class(name).capability for name in registered_names()}
BACKENDS = [name for name, one in CAPABILITIES.items() if one.deterministic and "cpu" in one.devices]
LIMITS = Limits(max_batch_size=8, max_seqlen=2500, max_num_tokens=2500, max_tokens_per_request=4)

STEPS = {
    "decode": (ForwardMode.DECODE, [2300, 64, 130, 0], [1] * 4, True),
    "verify": (ForwardMode.TARGET_VERIFY, [1023, 64, 130, 0], [4] * 4, True),
    "extend": (ForwardMode.EXTEND, [130, 0, 1000, 64], [70, 33, 1, 64], False),
}


def cases(*shapes: str) -> list:
    """(backend, model, shape) wherever the capability says that it works."""
    return [
        pytest.param(name, model, shape, id=f"{name}-{model.name}-{shape}")
        for name in BACKENDS
        for model in MODELS
        for shape in shapes
        if not get_backend_class(name).capability.reasons_against(model.spec)
    ]


def mode_of(name: str, mode: ForwardMode) -> ForwardMode:
    """A backend that only decodes has another ragged mode than EXTEND."""
    return mode if mode in get_backend_class(name).capability.modes else ForwardMode.DRAFT_EXTEND


def run(name: str, step: Step) -> torch.Tensor:
    backend = get_backend_class(name)(step.model.spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    return step.run(backend)


def alone(step: Step, request: int, new_lens: list[int]) -> Step:
    """The step with one of its requests, over the same cache."""
    begin = sum(new_lens[:request])
    rows = slice(begin, begin + new_lens[request])
    batch = step.batch
    lens = None if batch.extend_seq_lens is None else batch.extend_seq_lens[request : request + 1]
    single: AttentionBatch = dataclasses.replace(
        batch,
        req_pool_indices=batch.req_pool_indices[request : request + 1],
        cache_seqlens=batch.cache_seqlens[request : request + 1],
        num_tokens=new_lens[request],
        max_seqlen_q=0,
        out_cache_loc=batch.out_cache_loc[rows],
        extend_seq_lens=lens,
    )
    parts = {name: getattr(step, name)[rows] for name in ("q", "k", "v", "expected")}
    return dataclasses.replace(step, batch=single, num_real=new_lens[request], **parts)


@pytest.mark.parametrize(("name", "model", "shape"), cases(*STEPS))
def test_a_request_alone_gives_the_bits_that_it_gives_in_a_batch(name, model, shape):
    mode, prefix, new, uniform = STEPS[shape]
    step = make_step(model, mode_of(name, mode), prefix, new, uniform=uniform, max_context=LIMITS.max_seqlen)
    together = run(name, step)
    assert torch.equal(run(name, step), together), "and on every run"
    begin = 0
    for request, count in enumerate(new):
        assert torch.equal(run(name, alone(step, request, new)), together[begin : begin + count]), request
        begin += count


@pytest.mark.parametrize(("name", "model", "shape"), cases("extend"))
def test_a_prefix_from_the_cache_gives_the_bits_of_one_just_computed(name, model, shape):
    """200 tokens at once, or 137 of them found in the cache: the last 63 rows are the same."""
    whole = make_step(model, mode_of(name, STEPS[shape][0]), [0], [200], max_context=LIMITS.max_seqlen)
    expected = run(name, whole)[137:]
    batch = dataclasses.replace(
        whole.batch,
        num_tokens=63,
        max_seqlen_q=0,
        out_cache_loc=whole.batch.out_cache_loc[137:],
        extend_seq_lens=torch.tensor([63], dtype=torch.int32),
    )
    rest = {part: getattr(whole, part)[137:] for part in ("q", "k", "v", "expected")}
    cached = dataclasses.replace(whole, batch=batch, num_real=63, **rest)
    assert torch.equal(run(name, cached), expected)
