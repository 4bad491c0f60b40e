"""A layer that repeats a call of FlashInfer does what the first one did: stores, results, and what is refused.

The stand-in for the package gets a module between `run` and its kernels, as the package has, and a version.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import types
import weakref

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.compat import flashinfer as stand_in
from attnops.layers import RadixAttention
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

BF16 = torch.bfloat16
KINDS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper")
SIZES = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
MODELS = [
    Model("gqa", AttentionSpec(**SIZES)),
    Model("window_cap", AttentionSpec(**SIZES, sliding_window_size=20, logit_cap=3.0)),
    Model("window_pool", AttentionSpec(**SIZES, sliding_window_size=20), swa_pool=True),
    Model("mla", AttentionSpec.mla(16, page_size=64), scale=0.1),
]
STEPS = {
    "decode": (ForwardMode.DECODE, [63, 64, 150, 17], [1] * 4),
    "verify": (ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3),
}


class Counted:
    """How often `run` of the package and the module below it were called."""

    def __init__(self, monkeypatch) -> None:
        self.runs = self.launches = 0
        counted = self

        class Module:
            def launch(self, original, wrapper, options, *tensors):
                counted.launches += 1
                *inputs, out = tensors
                pages = inputs if len(inputs) == 4 else (inputs[0], tuple(inputs[1:]))
                original(wrapper, *pages, out=out, **options)

        def planned(original):
            def run(wrapper, *arguments, **options):
                wrapper._cached_module = Module()
                return original(wrapper, *arguments, **options)

            return run

        def running(original):
            def run(wrapper, q, *pages, out, **options):
                counted.runs += 1
                pages = pages[0] if len(pages) == 1 else pages
                launch = wrapper._cached_module.launch
                launch(original, wrapper, options, q, *pages, out)
                return out

            return run

        for kind in KINDS:
            cls = getattr(stand_in, kind)
            monkeypatch.setattr(cls, "plan", planned(cls.plan))
            monkeypatch.setattr(cls, "run", running(cls.run))
        fast = stand_in.fast_decode_plan
        monkeypatch.setattr(stand_in, "fast_decode_plan", planned(fast))
        monkeypatch.setattr(stand_in, "__version__", "0.7.2.post1", raising=False)


@pytest.fixture
def package(flashinfer_stand_in, monkeypatch):
    return Counted(monkeypatch)


def build(spec, version="0.7.2.post1"):
    stand_in.__version__ = version
    return get_backend_class("flashinfer")(spec, LIMITS, "cpu", workspace_size=1 << 20)


def step_of(model, shape="decode", seed=0):
    mode, prefix, new = STEPS[shape]
    step = make_step(model, mode, prefix, new, uniform=True, seed=seed)
    step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
    return step


@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_later_layers_repeat_the_first_ones_call(model, shape, package):
    backend = build(model.spec)
    for seed in range(2):  # the second step is planned anew, and its first layer runs
        step = step_of(model, shape, seed)
        backend.init_forward_metadata(step.batch)
        package.runs = package.launches = 0
        outs = [step.run(backend) for _ in range(3)]
        assert (package.runs, package.launches) == (1, 3)
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert relative_error(outs[2], step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


def test_a_repeated_call_takes_its_own_queries_rows_pages_and_output(package):
    model = MODELS[0]
    backend, step = build(model.spec), step_of(model)
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    loc = step.batch.out_cache_loc
    for shape in ((4, 8, 64), (4, 512)):
        q = torch.randn(shape, dtype=BF16)
        k, v = (torch.randn(4, 128, dtype=BF16) for _ in "kv")
        out = torch.full((4, 512), float("nan"), dtype=BF16)
        package.runs = 0
        assert backend.forward(q, k, v, step.layer, step.batch, out=out) is out
        assert package.runs == 0
        pages = step.batch.token_to_kv_pool.get_kv_buffer(step.layer.layer_id)
        for stored, rows in zip(pages, (k, v)):
            assert torch.equal(stored.flatten(0, 1)[loc], rows.view(4, 2, 64))
        slow = build(model.spec, "0")
        slow.init_forward_metadata(step.batch)
        assert torch.equal(out, slow.forward(q, None, None, step.layer, step.batch))


def test_unknown_versions_and_logged_calls_are_not_repeated(package, monkeypatch):
    step = step_of(MODELS[0])
    unknown = build(MODELS[0].spec, "0.7.3")
    monkeypatch.setitem(sys.modules, "flashinfer.api_logging", types.SimpleNamespace(_API_LOG_LEVEL=1))
    logged = build(MODELS[0].spec)
    for backend in (unknown, logged):
        backend.init_forward_metadata(step.batch)
        package.runs = 0
        for _ in range(3):
            step.run(backend)
        assert package.runs == 3


def test_what_does_not_fit_is_refused_as_in_the_first_layer(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    layer, batch, q = step.layer, step.batch, step.q.flatten(1)
    with pytest.raises(ValueError, match=r"q\.shape\[0\] must be 4"):
        backend.forward(q[:3], None, None, layer, batch)
    with pytest.raises(ValueError, match="q must have shape"):
        backend.forward(q[:, :64], None, None, layer, batch)
    with pytest.raises(ValueError, match="v must be given with k"):
        backend.forward(q, step.k.flatten(1), None, layer, batch)
    with pytest.raises(ValueError, match="k must have shape"):
        backend.forward(q, step.k.flatten(1)[:, :64], step.v.flatten(1), layer, batch)
    with pytest.raises(ValueError, match="belong to MLA layers"):
        backend.forward(q, None, None, layer, batch, q_rope=q)
    with pytest.raises(ValueError, match="out must have shape"):
        backend.forward(q, None, None, layer, batch, out=q.new_empty(4, 64))
    package.runs = 0
    with pytest.raises(ValueError, match=r"planned was torch\.bfloat16"):  # the package's own refusal
        backend.forward(q.half(), None, None, layer, batch)
    assert package.runs == 1
    batch.multi_item = object()
    with pytest.raises(NotImplementedError, match="multi-item"):
        backend.forward(q, None, None, layer, batch)
    batch.multi_item = None
    batch.tree_mask = torch.ones(4, 1, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="tree_mask"):
        backend.forward(q, None, None, layer, batch)
    batch.tree_mask = None
    batch.cache_seqlens.add_(0)
    with pytest.raises(RuntimeError, match="stale"):
        backend.forward(q, None, None, layer, batch)


def test_a_layer_that_changed_is_bound_again(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    step.layer.scaling = 2 * step.layer.scaling
    package.runs = 0
    out = step.run(backend)
    assert package.runs == 1
    fresh = build(MODELS[0].spec, "0")
    fresh.init_forward_metadata(step.batch)
    assert torch.equal(out, step.run(fresh))


def test_nothing_of_a_layer_is_kept_alive(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    for _ in range(2):
        q = torch.randn(4, 512, dtype=BF16)
        kept = [weakref.ref(q), weakref.ref(backend.forward(q, None, None, step.layer, step.batch))]
        del q
        gc.collect()
        assert [ref() for ref in kept] == [None, None]


def test_a_layer_with_scales_does_not_repeat_one_without(package):
    spec = AttentionSpec(**{**SIZES, "head_dim": 128}, kv_dtype=torch.float8_e4m3fn)
    backend, step = build(spec), step_of(Model("fp8", spec))
    backend.init_forward_metadata(step.batch)
    sizes = (8, 128, step.layer.scaling, 2, step.layer.layer_id)
    plain = RadixAttention(*sizes)
    scaled = RadixAttention(*sizes, k_scale=torch.tensor([0.5]), v_scale=torch.tensor([2.0]))
    q, k, v = (torch.randn(4, heads * 128, dtype=BF16) for heads in (8, 2, 2))
    for layer in (plain, scaled):  # the first calls bind
        backend.forward(q, k, v, layer, step.batch)
    package.runs = 0
    outs = [backend.forward(q, k, v, layer, step.batch) for layer in (plain, scaled)]
    assert package.runs == 1
    slow = build(spec, "0")
    slow.init_forward_metadata(step.batch)
    for layer, out in zip((plain, scaled), outs):
        assert torch.equal(out, slow.forward(q, k, v, layer, step.batch))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_repeated_layer_stores_where_the_first_one_does(model, package):
    backend, step = build(model.spec), step_of(model)
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    step.k, step.v = torch.randn_like(step.k), torch.randn_like(step.v)
    package.runs, pool = 0, step.batch.token_to_kv_pool
    out = step.run(backend)
    assert package.runs == 0
    stored = [buffer.clone() for buffer in pool.all_buffers()[0]]
    slow = build(model.spec, "0")
    slow.init_forward_metadata(step.batch)
    assert torch.equal(step.run(slow), out)
    for mine, expected in zip(stored, pool.all_buffers()[0], strict=True):
        assert torch.equal(mine.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_an_idle_batch_needs_no_plan(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    idle = dataclasses.replace(step.batch, forward_mode=ForwardMode.IDLE)
    assert not backend.forward(step.q.flatten(1), None, None, step.layer, idle).any()


def test_new_tokens_of_a_ragged_step_stay_apart_behind_a_layer_over_pages(package):
    model = MODELS[0]
    step = make_step(model, ForwardMode.EXTEND, [0, 0, 0], [33, 1, 20])
    step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
    step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
    backend = build(model.spec)
    backend.init_forward_metadata(step.batch)
    q, k, v = (rows.flatten(1) for rows in (step.q, step.k, step.v))
    backend.forward(q, k, v, step.layer, step.batch)
    backend.forward(q, None, None, step.layer, step.batch)
    launches = package.launches
    backend.forward(q, k, v, step.layer, step.batch)
    assert launches == package.launches == 1


def test_a_pool_whose_buffers_were_replaced_is_bound_again(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    pool, layer = step.batch.token_to_kv_pool, step.layer.layer_id
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[layer] = buffers[layer].clone()
    pages = pool.get_kv_buffer(layer)
    for rows in pages:
        rows.flatten(0, 1)[step.batch.out_cache_loc] = 0
    step.run(backend)
    assert torch.equal(pages[0].flatten(0, 1)[step.batch.out_cache_loc], step.k)


def test_another_pool_of_the_batch_is_bound_again(package):
    backend, step = build(MODELS[0].spec), step_of(MODELS[0])
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    pool = copy.deepcopy(step.batch.token_to_kv_pool)
    step.batch.token_to_kv_pool, step.k = pool, torch.randn_like(step.k)
    step.run(backend)
    stored = pool.get_kv_buffer(step.layer.layer_id)[0].flatten(0, 1)
    assert torch.equal(stored[step.batch.out_cache_loc], step.k)
