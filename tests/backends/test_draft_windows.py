"""Branches in one request beside windows and sinks: one layer of every kind, held to float64 over pages of NaN.

What a window never reaches is NaN, too, and so is every draft that is still to come.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import MultiStepDraftBackend, get_backend_class
from attnops.backends.draft_windows import lie_in_a_row, spread, tokens_of
from attnops.graphs import CudaGraphs
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, SWAKVPool
from attnops.types import AttentionSpec, AttentionType, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, close, named, run_eagerly
from graph_tape import GraphTape

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GPU = pytest.mark.gpu


def check(name, kind, page_size, topk, draft_steps, *, device="cpu", lengths=None, **options):
    """A loop's steps beside float64: short requests, and those whose windows begin anywhere in their prefixes."""
    dtype = options.pop("dtype", torch.float32 if device == "cpu" else BF16)
    seed = page_size + topk
    loop = Loop(name, page_size, topk, draft_steps, kind, seed, device=device, dtype=dtype, **options)
    assert loop.backend.has_trees
    lengths, rows = lengths or [0, 5, page_size, 75], [3, 1, 5, 2]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out, expected = run_eagerly(loop, loop.batch(lengths, rows), *inputs), loop.expected(prefixes, *inputs)
    if options.get("kv_dtype"):
        assert relative_error(out, expected) <= MAX_RELATIVE_ERROR[BF16]
    else:
        assert close(out, expected)
    return loop


@pytest.mark.parametrize("name", ["torch_native", "flex_attention", "intel_amx", "trtllm_mha", "fa3"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 64, 1000])
def test_windows_leave_branches_the_same_prefix(name, page_size, window, monkeypatch):
    """Also those that are shorter than a loop, where they leave no prefix and not all drafts."""
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    check(name, "mha", page_size, 3, 5, window=window)
    check(name, "window", page_size, 4, 3, window=window)


@pytest.mark.parametrize("name, kind", [("intel_amx", "mha"), ("trtllm_mha", "mha"), ("fa3", "two dims")])
@pytest.mark.parametrize("window", [0, 1, 2, 7])
def test_drafts_may_end_the_last_row_of_slots(name, kind, window, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    check(name, kind, 1, 3, 5, window=window, lengths=[0, 5, 160 - 3 * 5, 75])


@pytest.mark.parametrize("name", ["intel_amx", "fa3"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window, sinks", [(0, False), (1, True), (7, False), (7, True), (64, True), (-1, True)])
def test_two_head_dims_with_windows_and_sinks(name, page_size, window, sinks, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    check(name, "two dims", page_size, 3, 5, window=window, sinks=sinks)


@pytest.mark.parametrize("name", ["intel_amx", "trtllm_mha", "fa3"])
@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("kind", ["mha", "window"])
def test_sinks_beside_windows(name, kind, window):
    check(name, kind, 16, 3, 5, window=window, sinks=True)


@pytest.mark.parametrize(
    "name, kind", [("intel_amx", "mha"), ("trtllm_mha", "window"), ("fa3", "two dims"), ("intel_amx", "two dims")]
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_eight_bits_and_of_other_layouts(name, kind, page_size, layout):
    check(name, kind, page_size, 3, 4, window=7, sinks=True, kv_dtype=E4M3, layout=layout)
    check(name, kind, page_size, 3, 4, window=7, layout=layout)


@pytest.mark.parametrize("name, page_size", [("intel_amx", 16), ("flashmla", 64), ("cutlass_mla", 128), ("fa3", 3)])
@pytest.mark.parametrize("window", [1, 7, 64])
def test_latents_with_windows(name, page_size, window):
    dtype = torch.float32 if name == "intel_amx" else BF16
    check(name, "mla", page_size, 3, 4, window=window, dtype=dtype, lengths=[0, 5, page_size, 90])


REPLAYS = [("intel_amx", "window", {}), ("trtllm_mha", "window", {}), ("trtllm_mha", "mha", {"window": 2})]
REPLAYS += [("fa3", "two dims", {"window": 7, "sinks": True}), ("intel_amx", "two dims", {"sinks": True})]
REPLAYS += [("fa3", "window", {"window": 30, "layout": "HND"}), ("torch_native", "window", {})]


@pytest.mark.parametrize("name, kind, more", REPLAYS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_graph_holds_the_loop(name, kind, more, page_size):
    sizes = range(1, REQUESTS + 1) if name == "torch_native" else [2, REQUESTS]
    check_replays(name, page_size, 3, kind=kind, turns=40, recorder=GraphTape, sizes=sizes, **more)


def test_pages_of_any_size_give_the_bits_of_page_1():
    """A window's table is one of tokens, whatever the pages."""
    outs = []
    for page_size in (1, 3, 16, 64):
        loop = Loop("trtllm_mha", page_size, 4, 4, "window", seed=7, deterministic=True, window=30)
        loop.generator.manual_seed(3)
        lengths, rows = [0, 17, 90, 33], [3, 1, 5, 2]
        loop.fill(lengths, rows)
        outs.append(run_eagerly(loop, loop.batch(lengths, rows), *loop.inputs(4)))
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize("kind, window", [("mha", 1), ("window", 7), ("mla", 7), ("two dims", 7)])
@pytest.mark.parametrize("name", ["triton"])
def test_windows_in_tritons_interpreter(name, kind, window):
    check(name, kind, 16, 2, 3, window=window, sinks=kind != "mla")


ON_GPU = [("trtllm_mha", "mha", 1), ("trtllm_mha", "window", 7), ("trtllm_mha", "window", 64), ("fa3", "window", 7)]
ON_GPU += [("fa3", "two dims", window) for window in (-1, 1, 7, 64)]
ON_GPU += [("triton", "window", 7), ("triton", "two dims", 7)]


@GPU
@pytest.mark.parametrize("name, kind, window", ON_GPU)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_windows_and_sinks_on_a_gpu(name, kind, window, page_size, kv_dtype, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    for layout in ("NHD", "HND"):
        check(name, kind, page_size, 3, 5, device="cuda", window=window, sinks=True, kv_dtype=kv_dtype, layout=layout)


@GPU
@pytest.mark.parametrize("name, page_size", [("flashmla", 64), ("trtllm_mla", 32), ("cutlass_mla", 128), ("fa3", 3)])
@pytest.mark.parametrize("window", [1, 7, 64])
def test_latents_with_windows_on_a_gpu(name, page_size, window):
    check(name, "mla", page_size, 3, 4, device="cuda", window=window, lengths=[0, 5, page_size, 90])


@GPU
@pytest.mark.parametrize("name, kind, more", [case for case in REPLAYS if case[0] in ("trtllm_mha", "fa3")])
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_graph_holds_the_loop_on_a_gpu(name, kind, more, page_size):
    options = {"kind": kind, "sizes": range(1, REQUESTS + 1), "device": "cuda", "dtype": BF16, **more}
    check_replays(name, page_size, 3, turns=40, recorder=CudaGraphs("cuda"), **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_as_pages_of_one_token(layout, page_size):
    pool = MHATokenToKVPool(4 * page_size, page_size, torch.float32, 2, 8, 1, layout=layout)
    pages = pool.get_kv_buffer(0)[0]
    pages.copy_(torch.arange(pages.numel()).view(pages.shape))
    slots = torch.randperm(4 * page_size)
    expected = pages.flatten(0, 1)[slots]
    assert torch.equal(tokens_of(pages)[spread(slots, pages)].squeeze(1), expected)
    assert lie_in_a_row(pages) is (layout == "NHD" or page_size == 1)
    assert tokens_of(pages).data_ptr() == pages.data_ptr()
    odd = torch.zeros(4, 2 * 2 * 8 + 1)[:, :-1].unflatten(1, (2, 2, 8))
    with pytest.raises(NotImplementedError, match="a page's stride 33 must be a multiple of a token's, 16"):
        tokens_of(odd)


def test_what_a_windows_step_needs_is_named():
    loop = Loop("trtllm_mha", 16, 2, 3, "window")
    batch = loop.batch([4, 9], [1, 2])
    loop.backend.init_forward_metadata(batch)
    step = loop.backend.step(1)
    assert step.draft_step == 1
    unknown = dataclasses.replace(step, draft_step=None)
    for name in ("trtllm_mha", "intel_amx", "fa3"):
        limits = Limits(max_batch_size=2, max_seqlen=160, max_tokens_per_request=2)
        backend = get_backend_class(name)(loop.spec, limits)
        with pytest.raises(ValueError, match="draft_steps needs draft_step beside a window, got None"):
            backend.init_forward_metadata(unknown)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"draft_step must be below draft_steps 3 and not negative, got {wrong}"):
            dataclasses.replace(step, draft_step=wrong)
    # A layer with a window whose pages are not in the pool's part for windows.
    pool = SWAKVPool(len(loop.pool.slot_map), len(loop.pool.slot_map), 16, torch.float32, 2, 64, [0], [1])
    pool.slot_map.copy_(loop.pool.slot_map)
    full = dataclasses.replace(batch, token_to_kv_pool=pool)
    loop.backend.init_forward_metadata(full)
    rows = [torch.ones(4, heads * 64) for heads in (4, 2, 2)]
    with pytest.raises(NotImplementedError, match="layer 0 has a window and pages outside the window pool"):
        loop.layer(*rows, loop.backend.step(0))


@pytest.mark.parametrize(
    "options",
    [{"attention_chunk_size": 16}, {"sliding_window_size": 1, "attn_type": AttentionType.DECODER_BIDIRECTIONAL}],
)
def test_chunks_and_windows_on_both_sides_take_branches_for_requests(options):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16, **options)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    loop = MultiStepDraftBackend(get_backend_class("fa3"), spec, limits, topk=2, draft_steps=3)
    assert not loop.has_trees


@pytest.mark.parametrize("name", ["trtllm_mha", "intel_amx", "fa3", "torch_native"])
def test_a_step_has_layers_of_both_kinds(name):
    """One reads the window pool through tables of tokens, the other whole prefixes through pages."""
    loop = Loop(name, 16, 3, 4, "window", 5)
    whole = Loop("torch_native", 16, 3, 4, "mha", 5)
    lengths, rows = [0, 5, 40, 75], [3, 1, 5, 2]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    expected = loop.expected(prefixes, *inputs)
    windowed, batch = loop.layer, loop.batch(lengths, rows)
    full = RadixAttention(4, 64, windowed.scaling, 2, 1)
    for (k, v), length, row in zip(prefixes, lengths, rows):
        loop.pool.set_kv_buffer(full, loop.table[row, :length].long(), k, v)
    loop.backend.init_forward_metadata(batch)
    outs = []
    for loop.layer in (windowed, full):
        outs.append(loop.model(None, None, batch, **named(inputs)))
    assert close(outs[0], expected)
    assert close(outs[1], whole.expected(prefixes, *inputs))


def test_sinks_may_be_parameters_that_want_gradients():
    loop = Loop("fa3", 16, 3, 4, "two dims", sinks=True)
    lengths, rows = [0, 40], [3, 1]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(2)
    sinks = torch.nn.Parameter(loop.layer.sinks.clone())
    del loop.layer.sinks
    loop.layer.register_parameter("sinks", sinks)
    assert loop.layer.sinks.requires_grad and torch.is_grad_enabled()
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs).detach())
