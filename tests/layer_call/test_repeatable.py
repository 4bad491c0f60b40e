"""Calls that repeat what the op has checked: when they do, that they give the op's bits, and when the op is asked."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref

import pytest
import torch
from attnops.ops import layer_call
from attnops.ops.layer_call import mla_layer, repeatable, xqa_layer
from layer_calls import DIM, HEADS, KV_HEADS, B, Mla, Xqa
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 2 * B
CALLS = 20


class Counted:
    """A bound layer's call that counts how often the op is asked."""

    def __init__(self, case: Xqa) -> None:
        self.case, self.asked, self.bound = case, 0, case.bind()
        self.call = repeatable(self._op, self.bound)

    def _op(self, *arguments: object) -> None:
        self.asked += 1
        xqa_layer(*arguments)

    def __call__(self, **changes: object) -> torch.Tensor:
        arguments = self.case.arguments(**changes)
        self.call(*arguments.values())
        return arguments["out"]


@pytest.fixture(autouse=True)
def as_in_serving():
    with torch.no_grad():
        yield


def fresh_tensors(case: Xqa) -> dict[str, torch.Tensor]:
    """The same looks at other addresses, with other values."""
    random = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float32).to(case.q)
    q, k, v = random.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    tensors = {"q": q.contiguous(), "k": k.contiguous().view_as(case.k), "v": v.contiguous()}
    return {**tensors, "sinks": torch.randn_like(case.sinks), "seqlens": case.seqlens - 1}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_call_gives_the_bits_of_the_op_without_asking_it(device, fp8):
    case = Xqa(device, fp8=fp8)
    counted, pages = Counted(case), [page.clone() for page in case.pages]
    counted()
    used = []  # so that addresses are new; from the sixth call on they are those of three calls before
    for i in range(CALLS):
        tensors = {**fresh_tensors(case), "out": torch.zeros_like(case.out)}
        if i >= 6:
            tensors = {name: used[i - 3][name].copy_(tensor) for name, tensor in tensors.items()}
        used.append(tensors)
        if fp8:
            tensors |= {"k_scale": case.k_scale * 2, "v_scale": case.v_scale * 3}
        got, stored = counted(**tensors), [page.clone() for page in case.pages]
        for page, old in zip(case.pages, pages):
            page.view(torch.uint8).copy_(old.view(torch.uint8))
        expected = case.call(case.bind(), **{**tensors, "out": torch.zeros_like(case.out)}).clone()
        assert torch.equal(got, expected) and got.any()
        for page, own in zip(case.pages, stored):
            assert torch.equal(page.view(torch.uint8), own.view(torch.uint8))
    assert counted.asked == 1


@pytest.mark.parametrize("name", ["out", "q", "k", "v", "slots", "seqlens", "sinks"])
def test_a_tensor_whose_storage_was_freed_is_refused_by_name(name):
    """Also where the same tensor served the call before: its shape is still there, its address is null."""
    case = Xqa("cpu")
    counted = Counted(case)
    tensor = case.arguments()[name].clone()
    counted(**{name: tensor})
    tensor.untyped_storage().resize_(0)
    argument = {"slots": "out_cache_loc", "seqlens": "cache_seqlens"}.get(name, name)
    with pytest.raises(RuntimeError, match=f"attnops::xqa_layer: {argument} must have memory"):
        counted(**{name: tensor})
    assert torch.equal(counted(), case.expected())


def strided(case: Xqa) -> torch.Tensor:
    return torch.zeros(TOKENS, HEADS * DIM + 64, device=case.device, dtype=case.q.dtype)[:, : HEADS * DIM]


def misaligned(case: Xqa) -> torch.Tensor:
    flat = torch.zeros(case.q.numel() + 8, device=case.device, dtype=case.q.dtype)
    return flat[8:].view_as(case.q)


OTHER_LOOKS = {
    "shape": lambda c: {"q": c.q.view(TOKENS, HEADS, DIM)},
    "strides": lambda c: {"q": strided(c)},
    "alignment": lambda c: {"q": misaligned(c)},
    "dtype": lambda c: {"slots": c.slots.int()},
    "nothing stored": lambda c: {"k": None, "v": None, "slots": None},
    "no sinks": lambda c: {"sinks": None},
    "a tree": lambda c: {"tree_mask": torch.full((B, 2, 1), 3, dtype=torch.uint8, device=c.device)},
    "a subclass": lambda c: {"q": c.q.as_subclass(type("Named", (torch.Tensor,), {}))},
}


@pytest.mark.parametrize("look", OTHER_LOOKS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_that_looks_otherwise_is_checked_by_the_op(device, look):
    case = Xqa(device)
    counted = Counted(case)
    counted(), counted()
    changes = OTHER_LOOKS[look](case)
    got = counted(**changes).clone()
    assert counted.asked == 2
    assert torch.equal(got, case.call(case.bind(), **changes))
    counted(**changes)
    assert counted.asked == (3 if look == "a subclass" else 2), "now it has been checked"
    asked = counted.asked
    counted()
    assert counted.asked == asked + 1, "and the first look is checked anew"


def test_a_call_after_another_with_the_same_bytes_is_checked():
    case = Xqa("cpu")
    counted, expected = Counted(case), case.call(case.bind()).clone()
    counted()
    case.call(counted.bound, k=None, v=None, slots=None, sinks=None)
    assert torch.equal(counted(), expected) and counted.asked == 2


def test_what_a_repeated_call_finds_wrong_is_what_the_op_finds_wrong():
    case = Xqa("cpu")
    counted = Counted(case)
    counted()
    case.plan.tile_scheduler_metadata.zero_()
    with pytest.raises(RuntimeError, match=r"attnops::xqa_decode: .* are not the plan of these cache_seqlens"):
        counted()
    assert counted.asked == 1
    with pytest.raises(RuntimeError, match=r"attnops::xqa_decode: .* are not the plan of these cache_seqlens"):
        case.call(counted.bound)


class SeesOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WATCHERS = {
    "dispatch mode": SeesOps,
    "function mode": SeesFunctions,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_whoever_watches_ops_sees_the_op(watcher):
    counted = Counted(Xqa("cpu"))
    expected = counted().clone()
    with WATCHERS[watcher]():
        assert torch.equal(counted(), expected)
        assert torch.equal(counted(), expected)
    assert counted.asked == 3


def test_a_tracer_gets_the_op():
    """Tensors of a tracer are no plain ones, and what it records is the op."""
    from torch.fx.experimental.proxy_tensor import make_fx

    case = Xqa("cpu")
    counted = Counted(case)
    expected = counted().clone()

    def call(q: torch.Tensor) -> torch.Tensor:
        return counted(q=q)

    traced = make_fx(call)(case.q)
    assert [node.target for node in traced.graph.nodes if "xqa_layer" in str(node.target)] == [xqa_layer]
    assert torch.equal(traced(case.q), expected)


def test_a_batched_tensor_goes_to_the_op():
    case = Xqa("cpu")
    counted = Counted(case)
    counted()
    with pytest.raises(RuntimeError):  # the op has no batching rule: that is for torch to say
        torch.vmap(lambda q: counted(q=q))(case.q.expand(2, -1, -1))
    assert counted.asked == 2


def test_a_number_of_tensors_that_no_op_takes():
    with pytest.raises(TypeError, match="a layer's call takes 10 tensors or None, got 2"):
        repeatable(xqa_layer, Xqa("cpu").bind())(None, None)


def test_without_the_exchange_every_call_is_the_ops(monkeypatch):
    """As under a torch that has none."""
    monkeypatch.setattr(layer_call, "_REPEATS", False)
    case = Xqa("cpu")
    counted, expected = Counted(case), case.call(case.bind()).clone()
    assert torch.equal(counted(), expected) and torch.equal(counted(), expected)
    assert counted.asked == 2


@pytest.mark.gpu
def test_a_repeated_call_is_recorded_by_a_graph():
    case = Xqa("cuda")
    counted = Counted(case)
    counted()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        counted()
    assert counted.asked == 1
    case.q.copy_(torch.randn_like(case.q))
    case.out.zero_()
    graph.replay()
    assert torch.equal(case.out.clone(), case.call(case.bind()))


@pytest.mark.gpu
def test_a_repeated_call_runs_on_the_current_stream_and_waits_for_nothing():
    case = Xqa("cuda")
    counted = Counted(case)
    expected = counted().clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            for _ in range(CALLS):
                out = counted(out=torch.zeros_like(case.out))
            assert not stream.query(), "behind the sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(out, expected) and counted.asked == 1


@pytest.fixture
def often_repeated():
    """A call that has been repeated often, and what it must give."""
    case = Xqa("cuda")
    counted = Counted(case)
    for _ in range(CALLS):
        counted()
    return case, counted, case.call(case.bind(), out=torch.zeros_like(case.out))


@pytest.mark.gpu
def test_a_repeated_call_may_be_recorded_and_goes_on(often_repeated):
    case, counted, expected = often_repeated
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        counted()
    for run in (graph.replay, counted, graph.replay):
        case.out.zero_()
        run()
        assert torch.equal(case.out, expected)
    assert counted.asked == 1


@pytest.mark.gpu
def test_a_repeated_call_runs_on_any_stream(often_repeated):
    case, counted, expected = often_repeated
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            out = counted(out=torch.zeros_like(case.out))
        stream.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_streams_of_one_call_do_not_wait_for_one_another(often_repeated):
    case, counted, expected = often_repeated
    blocked, free = torch.cuda.current_stream(), torch.cuda.Stream()
    outs = torch.zeros(2, *case.out.shape, dtype=case.out.dtype, device="cuda").unbind()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    counted(out=outs[0])
    with torch.cuda.stream(free):
        counted(out=outs[1])
    free.synchronize()
    assert not blocked.query(), "behind the sleep"
    torch.cuda.synchronize()
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected)


@pytest.mark.gpu
def test_threads_may_share_a_call(often_repeated):
    case, counted, expected = often_repeated

    def repeat(_):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            outs = [counted(out=torch.zeros_like(case.out)) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(out, expected) for out in outs)

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


@pytest.mark.gpu
def test_a_call_may_go_while_its_kernels_wait(often_repeated):
    case, counted, expected = often_repeated
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    out = counted(out=torch.zeros_like(case.out))
    counted.call = counted.bound = None
    assert not torch.cuda.current_stream().query(), "behind the sleep"
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", [Xqa, Mla])
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_keeps_what_it_reads(kind, device):
    """Pages, table, plan: whoever has the call need not have them."""
    case = kind(device) if kind is Xqa else kind(device, "bf16", apart=False)
    bound = case.bind()
    plan = case.plan
    read = [*(case.pages if isinstance(case.pages, list) else [case.pages]), case.table]
    read += [plan.tile_scheduler_metadata, plan.num_splits, plan.out_partial, plan.lse_partial, plan.semaphores]
    tensors = [weakref.ref(tensor) for tensor in read]
    call = repeatable(xqa_layer if kind is Xqa else mla_layer, bound)
    arguments = case.arguments()
    call(*arguments.values())
    expected = arguments["out"].clone()
    del case, plan, read, bound
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    arguments["out"].zero_()
    call(*arguments.values())
    assert torch.equal(arguments["out"], expected)
    del call
    gc.collect()
    assert all(tensor() is None for tensor in tensors), "and no longer than the call"


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_a_bound_tensor_at_an_odd_address_is_refused(offset):
    case = Xqa("cpu")
    bytes_ = torch.zeros(layer_call.BOUND_BYTES + 16, dtype=torch.uint8)
    odd = bytes_[offset : offset + layer_call.BOUND_BYTES].copy_(case.bind())
    with pytest.raises(RuntimeError, match="attnops::xqa_layer: bound must start on a 16-byte boundary"):
        case.call(odd)


def test_the_ops_that_bind_are_private():
    assert not hasattr(torch.ops.attnops, "xqa_layer_bind") and hasattr(torch.ops.attnops, "_xqa_layer_bind")
    assert not hasattr(torch.ops.attnops, "mla_layer_bind") and hasattr(torch.ops.attnops, "_mla_layer_bind")
