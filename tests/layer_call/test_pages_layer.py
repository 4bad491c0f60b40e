"""Calls that bring their own pages, bound to a plan and options: the bits of `ops.xqa_decode`, with tokens or heads
first, while a cache grows and moves."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan
from attnops.ops.layer_call import bind_xqa_pages_layer, repeatable, xqa_pages_layer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REQUESTS, HEADS, KV_HEADS, DIM = 3, 8, 2, 64


@pytest.fixture(autouse=True)
def as_in_serving():
    with torch.no_grad():
        yield


class Case:
    """Caches ``[B, H_kv, K, D]`` that are a page per request, and a bound call whose asked ops are counted."""

    def __init__(self, device: str, seqlen_q: int = 1, window_left: int = -1, heads_first: bool = True) -> None:
        self.device, self.seqlen_q, self.heads_first, self.asked = device, seqlen_q, heads_first, 0
        self.options = {"softmax_scale": 0.2, "causal": True, "window_left": window_left, "logit_cap": 3.0}
        heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "window_left": window_left}
        self.plan = XqaDecodePlan.allocate(REQUESTS, seqlen_q=seqlen_q, page_size=5, device=device, **heads)
        self.sinks = torch.randn(HEADS, device=device)
        self.table = torch.arange(REQUESTS, dtype=torch.int32, device=device).view(REQUESTS, 1)
        self.renew(37)
        given = (self.by_token(self.q), self.by_token(self.k), self.by_token(self.v), self.table, self.lens)
        self.bound = bind_xqa_pages_layer(self.out, *given, self.plan, heads_first=heads_first, **self.options)
        self.call = repeatable(self._op, self.bound)

    def _op(self, *arguments: object) -> None:
        self.asked += 1
        xqa_pages_layer(*arguments)

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2) if self.heads_first else tensor

    def renew(self, tokens: int) -> None:
        """Tensors of another layer, with caches of so many tokens."""

        def random(heads: int, tokens: int) -> torch.Tensor:
            drawn = torch.randn(REQUESTS, heads, tokens, DIM, device=self.device).bfloat16()
            return drawn if self.heads_first else drawn.transpose(1, 2)

        self.q, self.k, self.v = random(HEADS, self.seqlen_q), random(KV_HEADS, tokens), random(KV_HEADS, tokens)
        self.lens = torch.tensor([tokens, tokens - 3, 4], dtype=torch.int32, device=self.device)
        ops.xqa_decode_plan(self.plan, self.lens)
        self.out = self.q.new_full((REQUESTS, self.seqlen_q, HEADS, DIM), 7.0)

    def arguments(self, **changes: object) -> list[object]:
        given = {"out": self.out, "q": self.q, "k_pages": self.k, "v_pages": self.v, "page_table": self.table}
        given |= {"cache_seqlens": self.lens, "tree_mask": None, "sinks": self.sinks, "k_scale": None, "v_scale": None}
        assert changes.keys() <= given.keys()
        return list((given | changes).values())

    def expected(self) -> torch.Tensor:
        q, k, v = (self.by_token(tensor) for tensor in (self.q, self.k, self.v))
        return ops.xqa_decode(q, k, v, self.table, self.lens, self.plan, sinks=self.sinks, **self.options)[0]


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("seqlen_q", "window_left"), [(1, -1), (4, -1), (1, 9)])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_and_steps_of_a_growing_cache(device, seqlen_q, window_left, heads_first):
    """The first layer of a step asks the op, which checks the new shape; the others repeat it."""
    case, kept = Case(device, seqlen_q, window_left, heads_first), []
    repeats = case.call.__class__.__name__ != "function"
    for step, tokens in enumerate((37, 38, 64, 65, 38)):
        for _ in range(3):
            case.renew(tokens)
            kept.append(case.arguments())  # so that addresses are new
            case.call(*case.arguments())
            assert torch.equal(case.out, case.expected())
        assert case.asked == (step + 1 if repeats else 3 * step + 3)


@pytest.mark.parametrize("device", DEVICES)
def test_binding_keeps_no_page_alive(device):
    case = Case(device)
    pages = {case.k.data_ptr(), case.v.data_ptr()}
    kept = [tensor for group in case.bound.keeps if isinstance(group, tuple) for tensor in group]
    assert kept and not pages & {tensor.data_ptr() for tensor in kept}


ERRORS = [
    ({"q": lambda c: c.q[:2]}, r"q\.shape\[0\] \(batch_size\) must be 3 .*got 2"),
    ({"q": lambda c: c.q[:, :4]}, r"q\.shape\[1\] \(num_q_heads\) must be 8 .*got 4"),
    ({"q": lambda c: c.q.half()}, "q must have dtype bfloat16, got float16"),
    ({"out": lambda c: c.out[..., :32]}, r"out\.shape\[3\] \(head_dim\) must be 64 .*got 32"),
    ({"out": lambda c: c.out[:1].expand(3, -1, -1, -1)}, r"out\.stride\(0\) must not be 0: it is written"),
    ({"k_pages": lambda c: c.k.half()}, "k_pages must have dtype bfloat16, got float16"),
    ({"k_pages": lambda c: c.k[0]}, "k_pages must have 4 dimensions"),
    ({"v_pages": lambda c: c.v[:, :, 1:]}, r"v_pages\.shape\[2\] \(page_size\) must be 37 .*got 36"),
    ({"v_pages": lambda c: c.v[:, :1]}, r"v_pages\.shape\[1\] \(num_kv_heads\) must be 2 .*got 1"),
    ({"page_table": lambda c: c.table[:2]}, r"page_table\.shape\[0\] \(batch_size\) must be 3 .*got 2"),
    ({"page_table": lambda c: c.table.long()}, "page_table must have dtype int32, got int64"),
    ({"cache_seqlens": lambda c: c.lens[:2]}, r"cache_seqlens\.shape\[0\] \(batch_size\) must be 3 .*got 2"),
    ({"sinks": lambda c: c.sinks[:7]}, r"sinks\.shape\[0\] \(num_q_heads\) must be 8 .*got 7"),
    ({"k_scale": lambda c: torch.ones(1)}, "k_scale must be absent: the bound pages are not FP8"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
@pytest.mark.parametrize("repeats", [False, True], ids=["op", "repeatable"])
def test_errors_name_the_argument(change, message, repeats):
    case = Case("cpu")
    call = case.call if repeats else lambda *tensors: xqa_pages_layer(*tensors, case.bound)
    call(*case.arguments())
    with pytest.raises(RuntimeError, match=f"attnops::xqa_pages_layer: {message}"):
        call(*case.arguments(**{name: make(case) for name, make in change.items()}))


def test_a_plan_with_cuts_of_so_many_tokens_is_refused():
    """How many cuts that makes was checked against the pages that were bound."""
    case = Case("cpu")
    heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "max_seqlen_k": 128}
    plan = XqaDecodePlan.allocate(REQUESTS, fixed_split_tokens=64, **heads)
    given = (case.by_token(case.q), case.by_token(case.k), case.by_token(case.v), case.table, case.lens)
    bound = bind_xqa_pages_layer(case.out, *given, plan, heads_first=True, **case.options)
    with pytest.raises(RuntimeError, match="bound must have a plan with fixed_split_tokens 0, got "):
        xqa_pages_layer(*case.arguments(), bound)
