"""Store and attend in one call: the bits of the two ops, the errors of both, and layers that change after binding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.layers import RadixAttention
from attnops.ops.layer_call import BOUND_BYTES, mla_layer, repeatable, xqa_layer
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from layer_calls import DIM, HEADS, MLA_CACHES, B, Mla, Xqa

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_xqa_layer_is_store_and_decode(device, fp8):
    case = Xqa(device, fp8=fp8)
    pages = [page.clone() for page in case.pages]
    got = case.call(case.bind()).clone()
    written = [page.clone() for page in case.pages]
    for page, old in zip(case.pages, pages):
        bits(page).copy_(bits(old))
    expected = case.expected()
    assert torch.equal(got, expected)
    for page, stored, old in zip(case.pages, written, pages):
        assert torch.equal(bits(page), bits(stored)) and not torch.equal(bits(page), bits(old))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_strided_and_nothing_need_be_stored(device):
    case = Xqa(device)
    bound, expected = case.bind(), case.expected()
    wide = torch.randn(B * 2, HEADS + 1, DIM + 8, device=device).to(torch.bfloat16)
    wide[:, :HEADS, :DIM] = case.q.view(-1, HEADS, DIM)
    out = torch.zeros_like(wide)
    case.call(bound, k=None, v=None, slots=None, q=wide[:, :HEADS, :DIM], out=out[:, :HEADS, :DIM])
    assert torch.equal(out[:, :HEADS, :DIM].flatten(1), expected)
    assert not out[:, HEADS:].any() and not out[..., DIM:].any(), "wrote outside its rows"


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_and_masks_are_those_of_the_call(device):
    case = Xqa(device)
    bound = case.bind()
    case.seqlens = case.seqlens - 1
    ops.xqa_decode_plan(case.plan, case.seqlens)
    mask = torch.tensor([[[1], [2]]] * B, dtype=torch.uint8, device=device)
    got = case.call(bound, tree_mask=mask).clone()
    assert torch.equal(got, case.expected(tree_mask=mask))


@pytest.mark.parametrize("make", [Xqa, lambda device: Mla(device, "bf16", apart=False)], ids=["xqa", "mla"])
def test_binding_does_not_ask_torchs_default_device(make):
    case = make("cpu")
    with torch.device("meta"):  # as a program that says torch.set_default_device("cuda")
        bound = case.bind()
    assert bound.device.type == "cpu" and case.call(bound).isfinite().all()


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("cache", MLA_CACHES)
@pytest.mark.parametrize("device", DEVICES)
def test_mla_layer_is_store_and_decode(device, cache, apart):
    case = Mla(device, cache, apart)
    before = case.pages.clone()
    out = case.call(case.bind())
    stored = case.pages.clone()
    bits(case.pages).copy_(bits(before))
    expected = case.expected()
    assert torch.equal(bits(stored), bits(case.pages)) and not torch.equal(bits(before), bits(case.pages))
    assert torch.equal(out.view_as(expected), expected)


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("cache", MLA_CACHES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_mla_layer_gives_the_bits_of_the_op(device, cache, apart):
    case, asked = Mla(device, cache, apart), []

    def op(*arguments: object) -> None:
        asked.append(arguments)
        mla_layer(*arguments)

    call = repeatable(op, case.bind())
    with torch.no_grad():
        call(*case.arguments().values())
        before = case.pages.clone()
        case.renew()
        out = torch.zeros_like(case.out)
        call(*case.arguments(out=out).values())
    stored = case.pages.clone()
    bits(case.pages).copy_(bits(before))
    assert torch.equal(out, case.call(case.bind(), out=torch.zeros_like(out)))
    assert torch.equal(bits(stored), bits(case.pages)) and not torch.equal(bits(before), bits(case.pages))
    assert len(asked) == 1


ERRORS = [
    (
        {"q": lambda c: c.q[:, :-1]},
        r"q must have shape \[num_tokens, 512\] or \[num_tokens, 8, 64\], got \[6, 511\]",
    ),
    ({"q": lambda c: c.q[:5]}, r"q\.shape\[0\] \(num_tokens\) must be 6 \(batch_size \* seqlen_q.*got 5"),
    ({"q": lambda c: c.q.half()}, "q must have dtype bfloat16, got float16"),
    ({"out": lambda c: c.out.float()}, "out must have dtype bfloat16, got float32"),
    ({"k": lambda c: c.k[:, :1]}, r"k must have shape \[num_tokens, 128\] or \[num_tokens, 2, 64\]"),
    ({"k": lambda c: c.k.half()}, "k must have dtype bfloat16 as the bound pages, got float16"),
    ({"v": lambda c: None}, "v must be given with k"),
    ({"v": lambda c: c.v[:5]}, r"v\.shape\[0\] \(num_tokens\) must be 6 as in k, got 5"),
    ({"slots": lambda c: None}, "out_cache_loc must be given"),
    ({"slots": lambda c: c.slots[:4]}, r"out_cache_loc\.shape\[0\] \(num_tokens\) must be 6 .*got 4"),
    ({"seqlens": lambda c: c.seqlens[:2]}, r"cache_seqlens\.shape\[0\] \(batch_size\) must be 3 .*got 2"),
    ({"seqlens": lambda c: c.seqlens.long()}, "cache_seqlens must have dtype int32, got int64"),
    ({"sinks": lambda c: c.sinks[:7]}, r"sinks\.shape\[0\] \(num_q_heads\) must be 8 .*got 7"),
    ({"k_scale": lambda c: torch.ones(1)}, "k_scale must be absent: the bound pages are not FP8"),
    (
        {"tree_mask": lambda c: torch.zeros(B, 3, 1, dtype=torch.uint8)},
        r"tree_mask\.shape\[1\] \(seqlen_q\) must be 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
@pytest.mark.parametrize("repeats", [False, True], ids=["op", "repeatable"])
def test_errors_name_the_argument(change, message, repeats):
    case = Xqa("cpu")
    bound = case.bind()
    call = repeatable(xqa_layer, bound) if repeats else lambda *tensors: xqa_layer(*tensors, bound)
    changes = {name: make(case) for name, make in change.items()}
    with torch.no_grad():
        call(*case.arguments().values())
        with pytest.raises(RuntimeError, match=f"attnops::xqa_layer: {message}"):
            call(*case.arguments(**changes).values())


@pytest.mark.parametrize("calls", [0, 3], ids=["op", "repeatable"])
@pytest.mark.parametrize("kind", ["xqa", "mla"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_without_memory_is_refused(device, kind, calls):
    """A meta tensor brought a call that does nothing: a step's rows were not stored, and out stayed what it was."""
    case = Xqa(device) if kind == "xqa" else Mla(device, "bf16", apart=True)
    call = repeatable(xqa_layer if kind == "xqa" else mla_layer, case.bind())
    with torch.no_grad():
        for _ in range(calls):
            call(*case.arguments().values())
        for name, tensor in case.arguments().items():
            if tensor is not None:
                with pytest.raises(RuntimeError, match=r"attnops::(xqa|mla)_layer: \w+ must be on .* as q, got "):
                    call(*case.arguments(**{name: tensor.to("meta")}).values())


def test_bound_bytes_are_those_of_a_bind_op():
    case = Xqa("cpu")
    with pytest.raises(RuntimeError, match="attnops::xqa_layer: bound must have been written by xqa_layer_bind"):
        case.call(torch.zeros(BOUND_BYTES, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"attnops::xqa_layer: bound\.shape\[0\] \(bytes\) must be 2048"):
        case.call(torch.zeros(8, dtype=torch.uint8))


def test_binding_checks_what_the_op_checks():
    case = Xqa("cpu")
    case.table = case.table.long()
    with pytest.raises(RuntimeError, match="attnops::xqa_decode: page_table must have dtype int32, got int64"):
        case.bind()


# ---- layers of a backend


def decode(layer: RadixAttention, backend, pool: MHATokenToKVPool) -> torch.Tensor:
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(2),
        cache_seqlens=torch.tensor([9, 20], dtype=torch.int32),
        num_tokens=2,
        req_to_token=torch.arange(64, dtype=torch.int32).view(2, 32),
        out_cache_loc=torch.tensor([8, 51]),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads * 32, generator=generator) for heads in (4, 2, 2))
    return layer(q, k, v, batch)


def random_pool(seed: int) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(64, 16, torch.float32, 2, 32, 1)
    for pages in (*pool.k_buffer, *pool.v_buffer):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


@pytest.mark.parametrize(
    "change",
    ["nothing", "scaling", "logit_cap", "sinks", "sinks in place", "buffer", "pool", "pages", "all pages", "layer"],
)
def test_a_layer_that_changes_is_bound_again(change):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32, has_sinks=True)
    spec = dataclasses.replace(spec, logit_cap=2.0)
    limits = Limits(max_batch_size=2, max_seqlen=32)

    def fresh() -> tuple:
        layer = RadixAttention(4, 32, 0.2, 2, 0, sinks=torch.zeros(4))
        return layer, get_backend_class("trtllm_mha")(spec, limits), random_pool(0)

    def changed(layer, pool):
        if change == "scaling":
            layer.scaling = 0.7
        if change == "logit_cap":
            layer.logit_cap = 1.0
        if change == "sinks":
            layer.sinks = torch.full((4,), 3.0)
        if change == "sinks in place":
            layer.sinks.data = torch.full((4,), 3.0)
        if change == "buffer":
            layer.register_buffer("sinks", None)
        if change == "pool":
            pool = random_pool(1)
        if change == "pages":
            pool.v_buffer[0] = random_pool(1).v_buffer[0]
        if change == "all pages":
            pool.k_buffer = random_pool(1).k_buffer
        if change == "layer":
            layer = RadixAttention(4, 32, 0.9, 2, 0, sinks=torch.zeros(4))
        return layer, pool

    layer, backend, pool = fresh()
    before = decode(layer, backend, pool)
    layer, pool = changed(layer, pool)
    after = decode(layer, backend, pool)
    layer, other_backend, pool = fresh()
    layer, pool = changed(layer, pool)
    assert torch.equal(after, decode(layer, other_backend, pool)), "as if it had never been bound before"
    assert torch.equal(before, after) == (change == "nothing")
