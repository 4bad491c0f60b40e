"""Decode of many rows that goes by `fmha_paged`, or by its own kernels where that does not serve a call."""

import dataclasses
import sys

import pytest
import torch
from attnops import ops
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import XqaDecodePlan
from attnops.metadata.plan_parts import suits_prefill
from attnops.plan_buffers import DecodePlans
from attnops.types import AttentionSpec, Limits

HEADS = {"num_q_heads": 24, "num_kv_heads": 2, "head_dim": 64}
BF16 = torch.bfloat16


def problem(device, lengths, seqlen_q=12, page_size=16, window_left=-1):
    batch, pages = len(lengths), -(-max(lengths) // page_size)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ["cap", "full", "strided", "tree"])
def test_calls_that_prefill_does_not_serve(device, case, monkeypatch):
    (q, *rest), own, both = problem(device, [70, 300, 0, 5, 64])
    tree = torch.full((*q.shape[:2], 2), 255, dtype=torch.uint8, device=device)
    more = {"cap": {"logit_cap": 9.0}, "full": {"causal": False}, "tree": {"tree_mask": tree}}.get(case, {})
    if case == "strided":
        q = torch.cat([q, q], dim=1)[:, : q.shape[1]]
    monkeypatch.setattr(sys.modules["attnops.ops.xqa_decode"], "fmha_paged", None)
    assert torch.equal(ops.xqa_decode(q, *rest, both, **more)[0], ops.xqa_decode(q, *rest, own, **more)[0])


@pytest.mark.gpu
def test_rule():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    many = {"rows": 129, "head_dim": 64, "dtype": BF16, "kv_dtype": BF16}
    on_sm90 = torch.cuda.get_device_capability()[0] == 9
    assert suits_prefill(torch.device("cuda"), sms, 2, **many) == on_sm90
    for batch, change in (
        (sms - 1, {}),
        (sms, {"rows": 128}),
        (sms, {"fixed_split_tokens": -4}),
        (sms, {"head_dim": 20}),
    ):
        assert not suits_prefill(torch.device("cuda"), batch, 2, **{**many, **change})
    assert not suits_prefill(torch.device("cuda"), sms, 2, **{**many, "kv_dtype": torch.float8_e4m3fn})


@pytest.mark.gpu
def test_plans_of_a_backend():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    spec = AttentionSpec(**HEADS, v_head_dim=64, dtype=BF16, page_size=16, sliding_window_size=-1)
    plans = DecodePlans(spec, Limits(max_batch_size=512, max_seqlen=4096), 512, 12, torch.device("cuda"))
    few, many = plans.views(8)[-1], plans.views(300)[-1]
    assert few.prefill is None and many.prefill is not None
    assert many.cu_seqlens_q.tolist() == list(range(0, 301 * 12, 12))
    lengths = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    (q, *rest), own, _ = problem("cuda", lengths)
    ops.xqa_decode_plan(many, rest[-1])
    ops.xqa_decode_plan(own, rest[-1])
    torch.testing.assert_close(
        ops.xqa_decode(q, *rest, many)[0], ops.xqa_decode(q, *rest, own)[0], atol=2e-2, rtol=2e-2
    )
