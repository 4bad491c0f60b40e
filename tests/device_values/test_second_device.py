"""Nothing assumes device 0: ops, plans, bound layers and backends on cuda:1 while cuda:0 is the current device."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.ops.layer_call import mla_layer, repeatable, xqa_layer
from attnops.types import AttentionSpec, device_of
from gpu_steps import SHAPES, step_of
from layer_calls import Mla, Xqa
from mla_calls import plan_for
from problems import mla_problem, paged_problem
from right_calls import ops_calls, states
from steps import LIMITS, Model
from torch import Tensor
from xqa_decoding import make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
DEVICES = ["cuda:0", "cuda:1"]
LENGTHS = [1000, 70, 333]


@pytest.fixture(autouse=True)
def on_the_first_device():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0, "a call leaves the current device as it was"


def same(on_each: list[Tensor]) -> None:
    first, second = on_each
    assert (first.device.index, second.device.index) == (0, 1)
    assert torch.equal(first.cpu(), second.cpu()) and first.isfinite().all()


@pytest.mark.parametrize("lengths", [LENGTHS, [17, 5, 40]], ids=["long", "short"])
def test_decode_ops(lengths):
    gqa, mla = paged_problem(lengths), mla_problem(lengths, num_q_heads=16)
    xqa_out, mla_out = [], []
    for device in DEVICES:
        problem = gqa.to(device)
        pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
        xqa_out.append(ops.xqa_decode(problem.q, *pages, make_plan(problem, num_sm_parts=8))[0])
        problem = mla.to(device)
        latents = (problem.kv_pages, problem.page_table, problem.cache_seqlens, plan_for(problem))
        mla_out.append(ops.mla_decode(problem.q_by_request, *latents, softmax_scale=0.07)[0])
    same(xqa_out)
    same(mla_out)


@pytest.mark.parametrize("name", ["build_page_table", "build_cu_seqlens", "translate_slots"])
def test_tables(name):
    function, given = ops_calls()[name]
    same([function(**{k: v.to(d) if isinstance(v, Tensor) else v for k, v in given.items()}) for d in DEVICES])


def test_stores_and_merges():
    (out_a, lse_a), (out_b, lse_b) = states(), states()
    same([ops.merge_state(*(t.to(device) for t in (out_a, lse_a, out_b, lse_b)))[0] for device in DEVICES])
    for name, pages in (("store_kv", "k_pages"), ("store_mla_kv", "kv_pages")):
        function, given = ops_calls()[name]
        stored = []
        for device in DEVICES:
            here = {key: value.to(device) for key, value in given.items()}
            here |= {key: torch.zeros_like(value) for key, value in here.items() if key.endswith("pages")}
            function(**here)
            stored.append(here[pages])
        same(stored)


@pytest.mark.parametrize("kind", ["xqa", "mla"])
def test_bound_layers(kind):
    outs = []
    for device in DEVICES:
        torch.manual_seed(0)
        case = Xqa(device) if kind == "xqa" else Mla(device, "bf16", apart=False)
        call = repeatable(xqa_layer if kind == "xqa" else mla_layer, case.bind())
        with torch.no_grad():
            for _ in range(20):
                case.out.zero_()
                call(*case.arguments().values())
        outs.append(case.out)
    same(outs)


@pytest.mark.parametrize("shape", ["decode", "tree", "draft_extend_ragged"])
def test_backends(shape):
    assert shape in SHAPES
    model = Model("gqa", AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16))
    outs = []
    for index, device in enumerate(DEVICES):
        with torch.cuda.device(index):
            step = step_of(model, shape, 1)
        backend = get_backend_class("trtllm_mha")(model.spec, LIMITS, device)
        backend.init_forward_metadata(step.batch)
        outs.append(step.run(backend))
    same(outs)


def test_cuda_is_the_current_device():
    assert device_of("cuda") == torch.device("cuda:0")
    with torch.cuda.device(1):
        assert device_of("cuda") == torch.device("cuda:1")
