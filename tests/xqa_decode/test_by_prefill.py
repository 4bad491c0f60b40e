"""Decode of many rows and works by prefill's kernels, or by its own where those do not serve a call."""

import dataclasses
import sys

import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.info import kernel_counts
from attnops.metadata import FmhaPlan, XqaDecodePlan, plan_parts
from attnops.metadata.plan_parts import suits_prefill
from attnops.plan_buffers import DecodePlans
from attnops.types import AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from gpu_steps import on_gpu
from steps import LIMITS, Model, make_step

HEADS = {"num_q_heads": 16, "num_kv_heads": 2, "head_dim": 128}
BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(device, lengths, seqlen_q=12, page_size=16, window_left=-1):
    batch, pages = len(lengths), max(1, -(-max(lengths) // page_size))
    generator = torch.Generator().manual_seed(5)
    shape = (batch * pages, page_size, HEADS["num_kv_heads"], HEADS["head_dim"])
    k, v = (torch.randn(shape, generator=generator).to(device, BF16) for _ in range(2))
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).to(device, torch.int32)
    q = torch.randn(batch, seqlen_q, HEADS["num_q_heads"], HEADS["head_dim"], generator=generator).to(device, BF16)
    own = XqaDecodePlan.allocate(batch, seqlen_q=seqlen_q, window_left=window_left, device=device, **HEADS)
    prefill = FmhaPlan.allocate(batch * seqlen_q, batch, window_left=window_left, device=device, **HEADS)
    begins = torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen_q
    both = dataclasses.replace(own, prefill=prefill, cu_seqlens_q=begins)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    ops.xqa_decode_plan(both, seqlens)
    return (q, k, v, table, seqlens), own, both


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("flat", [False, True])
def test_same_results(device, window_left, flat):
    (q, *rest), own, both = problem(device, [70, 300, 0, 5, 64], window_left=window_left)
    q = q.flatten(0, 1) if flat else q
    sinks = torch.linspace(-1, 1, HEADS["num_q_heads"], device=device)
    more = {"window_left": window_left, "sinks": sinks, "return_lse": True, "sinks_in_lse": True}
    out, lse = ops.xqa_decode(q, *rest, both, **more)
    expected, expected_lse = ops.xqa_decode(q, *rest, own, **more)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-3)


def _not_called(*_, **__):
    raise AssertionError("prefill's kernels were asked")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["cap", "full", "strided", "tree", "report", None])
def test_calls_that_prefill_does_not_serve(device, case, monkeypatch):
    (q, *rest), own, both = problem(device, [70, 300, 0, 15, 64])
    report = torch.zeros(8, dtype=torch.int32, device=device)
    tree = torch.full((*q.shape[:2], 2), 255, dtype=torch.uint8, device=device)
    more = {"cap": {"logit_cap": 9.0}, "full": {"causal": False}, "tree": {"tree_mask": tree}}
    more |= {"report": {"report": report}}
    if case == "strided":
        q = torch.cat([q, q], dim=1)[:, : q.shape[1]]
    monkeypatch.setattr(sys.modules["attnops.ops.xqa_decode"], "attend_pages", _not_called)
    if case is None:
        with pytest.raises(AssertionError, match="prefill's kernels"):
            ops.xqa_decode(q, *rest, both)
        return
    options = more.get(case, {})
    assert torch.equal(ops.xqa_decode(q, *rest, both, **options)[0], ops.xqa_decode(q, *rest, own, **options)[0])


@pytest.mark.gpu
def test_rule():
    cuda, sms = torch.device("cuda"), torch.cuda.get_device_properties(0).multi_processor_count
    many = {"rows": 96, "head_dim": 128, "page_size": 16, "dtype": BF16, "kv_dtype": BF16}
    on_sm90 = torch.cuda.get_device_capability()[0] == 9
    assert suits_prefill(cuda, sms, 2, **many) == on_sm90
    assert suits_prefill(cuda, sms, 1, **many | {"rows": 256}) == on_sm90
    others = [(sms - 1, {}), (sms // 2 - 1, {"rows": 256}), (sms, {"fixed_split_tokens": -4}), (sms, {"page_size": 24})]
    others += [(sms, {"rows": n}) for n in (64, 129, 192)] + [(sms, {"head_dim": n}) for n in (64, 100, 192)]
    for batch, change in others:
        assert not suits_prefill(cuda, batch, 2, **many | change), change
    assert not suits_prefill(cuda, sms, 2, **many | {"kv_dtype": torch.float8_e4m3fn})


def test_never_on_a_cpu():
    many = {"rows": 96, "head_dim": 128, "page_size": 16, "dtype": BF16, "kv_dtype": BF16}
    assert not suits_prefill(torch.device("cpu"), 4096, 8, **many)


@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [-1, 50])
def test_plans_of_a_backend(window_left):
    """One buffer serves batches of both kinds, in a graph, too."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    spec = AttentionSpec(**HEADS, v_head_dim=128, dtype=BF16, page_size=16, sliding_window_size=window_left)
    plans = DecodePlans(spec, Limits(max_batch_size=512, max_seqlen=4096), 512, 12, torch.device("cuda"))
    few, many = plans.views(8)[window_left], plans.views(300)[window_left]
    assert few.prefill is None and many.prefill is not None
    assert many.cu_seqlens_q.tolist() == list(range(0, 301 * 12, 12))
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 90, (300,), generator=generator).tolist()
    (q, *rest), own, _ = problem("cuda", lengths, window_left=window_left)
    out = torch.empty_like(q)

    def step():
        ops.xqa_decode_plan(many, rest[-1])
        ops.xqa_decode(q, *rest, many, window_left=window_left, out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for longest in (90, 1, 12, 40):
        new = torch.randint(0, longest, (300,), generator=generator).to("cuda", torch.int32)
        rest[-1].copy_(new)
        ops.xqa_decode_plan(own, rest[-1])
        out.fill_(torch.nan)
        graph.replay()
        expected, _ = ops.xqa_decode(q, *rest, own, window_left=window_left)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_the_kernels_are_prefills():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    spec = AttentionSpec(**HEADS, v_head_dim=128, dtype=BF16, page_size=16, sliding_window_size=-1)
    plans = DecodePlans(spec, Limits(max_batch_size=256, max_seqlen=4096), 256, 12, torch.device("cuda"))
    plan = plans.views(150)[-1]
    (q, *rest), _, _ = problem("cuda", [100] * 150)
    ops.xqa_decode_plan(plan, rest[-1])
    before = kernel_counts()
    ops.xqa_decode(q, *rest, plan)
    asked = [row for row, count in kernel_counts().items() if count != before.get(row, 0)]
    assert any("fmha_paged" in row for row in asked) and not any("xqa_decode" in row for row in asked), asked


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["trtllm_mha", "fa3"])
@pytest.mark.parametrize("feature", [{}, {"sliding_window_size": 40}, {"has_sinks": True}, {"logit_cap": 20.0}])
def test_layers_of_a_backend(name, feature, monkeypatch):
    """The first call of a layer, and those that are bound: they store and attend by the same kernels."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(plan_parts, "XQA_PREFILL_WORKS_PER_SM", 0)  # few requests will do
    spec = AttentionSpec(num_q_heads=40, num_kv_heads=2, head_dim=128, page_size=16, dtype=BF16, **feature)
    step = on_gpu(
        make_step(Model("one", spec, scale=0.1), ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3, uniform=True)
    )
    backend = get_backend_class(name)(spec, LIMITS, device="cuda")
    for _ in range(3):
        before = kernel_counts()
        backend.init_forward_metadata(step.batch)
        assert relative_error(step.run(backend).cpu(), step.expected) <= MAX_RELATIVE_ERROR[BF16]
        asked = [row for row, count in kernel_counts().items() if count != before.get(row, 0)]
        by_prefill = "logit_cap" not in feature
        assert any("fmha_paged" in row for row in asked) == by_prefill, asked
