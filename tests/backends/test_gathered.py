"""How far loops over gathered keys run: to the least that the host was told, and in eager steps to the longest request,
as soon as the device has said it. Nobody waits for that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import gathered, get_backend_class
from attnops.backends.longest import LongestRequest
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from gpu_steps import on_gpu
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

MODEL = Model("gqa", AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16))
LONG = dataclasses.replace(LIMITS, max_seqlen=2048)
EXTEND, VERIFY = ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY

# What the host says, the columns of its table, and the chunks of 256 keys that a layer then walks.
KNOWN = {
    "nothing": ({}, 2048, 8),
    "a narrow table": ({}, 700, 3),
    "the longest request": ({"max_cache_seqlen": 120}, 2048, 1),
    "the prefixes": ({"max_prefix_tokens": 168}, 2048, 1),
    "loose prefixes": ({"max_prefix_tokens": 800}, 2048, 4),
    "prefixes and the newest": ({"max_prefix_tokens": 480, "max_seqlen_q": 33}, 2048, 3),
    "the least counts": ({"max_cache_seqlen": 513, "max_prefix_tokens": 168}, 2048, 1),
}


@pytest.fixture
def chunks(monkeypatch) -> list[int]:
    """Keys of each chunk that is gathered from now on."""
    taken: list[int] = []
    taker = gathered._taker

    def counted(*arguments):
        take = taker(*arguments)
        return lambda cells, valid: taken.append(cells.shape[1]) or take(cells, valid)

    monkeypatch.setattr(gathered, "_taker", counted)
    return taken


def step_of(prefix=(0, 65, 100, 3), new=(33, 1, 20, 7), columns=2048, **options):
    step = make_step(MODEL, EXTEND, list(prefix), list(new), max_context=columns)
    for name, value in options.items():
        setattr(step.batch, name, value)
    return step


def prepared(step, name="torch_native", device="cpu", in_capture=False):
    backend = get_backend_class(name)(MODEL.spec, LONG, device)
    backend.init_forward_metadata_out_graph(step.batch, in_capture)
    backend.init_forward_metadata_in_graph(step.batch)
    return backend


def assert_right(out, step):
    assert relative_error(out.cpu(), step.expected.cpu()) <= MAX_RELATIVE_ERROR[MODEL.spec.dtype]


@pytest.mark.parametrize("known", KNOWN)
def test_a_captured_step_ends_where_the_host_was_told_that_keys_end(known, chunks):
    options, columns, count = KNOWN[known]
    step = step_of(columns=columns, **options)
    assert_right(step.run(prepared(step, in_capture=True)), step)
    assert len(chunks) == count


@pytest.mark.parametrize(("prefix", "count"), [(100, 1), (236, 1), (237, 2), (700, 3)])
def test_an_eager_step_ends_with_its_longest_request(prefix, count, chunks):
    step = step_of([0, 65, prefix, 3])
    out = step.run(prepared(step))
    assert_right(out, step)
    assert len(chunks) == count
    assert torch.equal(step.run(prepared(step, in_capture=True)), out), "chunks that nobody sees change no bit"
    assert len(chunks) == count + 8


def test_chunks_are_walked_until_the_answer_is_there(chunks, monkeypatch):
    """As on a GPU that is behind: two questions come too early. The next layer has the answer."""
    step = step_of()
    backend = prepared(step)
    expected = step.run(backend)
    known = LongestRequest.keys
    early = iter([None, None])
    monkeypatch.setattr(LongestRequest, "keys", lambda self: next(early, known(self)))
    for count in (2, 1):
        chunks.clear()
        assert torch.equal(step.run(backend), expected)
        assert len(chunks) == count


def test_no_request_has_a_key(chunks):
    step = make_step(MODEL, ForwardMode.DECODE, [4, 4], [1, 1], uniform=True)
    step.batch.cache_seqlens.zero_()
    assert not step.run(prepared(step)).any()
    assert chunks == []


def test_all_keys_at_once_are_as_many_as_the_host_was_told(chunks):
    """Their number chooses the kernel of flex_attention, so it is no matter of when a GPU answers."""
    step = step_of(max_cache_seqlen=600)
    assert_right(step.run(prepared(step, "flex_attention")), step)
    assert len(chunks) == 3


def test_a_new_step_asks_anew(chunks):
    backend = prepared(step_of())
    longer = step_of([0, 65, 700, 3])
    backend.init_forward_metadata(longer.batch)
    assert_right(longer.run(backend), longer)
    assert len(chunks) == 3


def test_a_tape_holds_no_length(chunks):
    step, longer = step_of(), step_of([9, 0, 300, 50])
    backend = prepared(step, in_capture=True)
    tape = GraphTape()
    with tape.capture():
        backend.init_forward_metadata_in_graph(step.batch)
        out = step.run(backend)
    assert len(chunks) == 8
    step.overwrite(longer)
    backend.init_forward_metadata_out_graph(step.batch)
    tape.replay()
    assert_right(out, longer)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(chunks):
    step = on_gpu(step_of([0, 65, 300, 3]))
    backend = prepared(step, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.init_forward_metadata(step.batch)
        out = step.run(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(out, step)
    assert 2 <= len(chunks) <= 8
    torch.cuda.synchronize()
    chunks.clear()
    assert torch.equal(step.run(backend), out)
    assert len(chunks) == 2, "the answer is there now"


@pytest.mark.gpu
def test_a_graph_on_a_gpu_walks_all_keys(chunks):
    step = on_gpu(step_of())
    backend = prepared(step, device="cuda")
    expected = step.run(backend)  # what happens once must not happen in a capture
    torch.cuda.synchronize()
    chunks.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(step.batch)
        out = step.run(backend)
    assert len(chunks) == 8
    graph.replay()
    assert torch.equal(out, expected)


def test_drafts_of_every_branch_are_keys():
    """A draft step's lengths count the cells of all drafts, which stand behind the prefix."""
    batch = make_step(MODEL, VERIFY, [100, 30], [4, 4], uniform=True).batch
    batch.max_prefix_tokens = 130
    assert gathered.most_keys(batch, LIMITS) == 134
    batch.draft_steps = 3
    assert gathered.most_keys(batch, LIMITS) == 142
