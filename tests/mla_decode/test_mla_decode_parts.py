"""attnops::mla_decode where parts of a plan have many tiles or few: each may take a schedule of its own."""

import dataclasses

import pytest
import torch
from attnops import ops
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, decode, plan_for
from problems import HUGE_INDEX, mla_problem

pytestmark = pytest.mark.gpu
MANY = 48  # tiles of a part, from which on it takes the ring
DTYPES = [torch.float16, torch.bfloat16]
# Lengths, and parts of the plan. A work costs two tiles besides its own, so parts of short works have fewer.
BATCHES = {
    "a long work ends in a part of short ones": ([3840, *[64] * 14], 4),
    "a long work begins in a part of short ones": ([*[64] * 14, 3840], 4),
    "more works than lanes": ([*[70] * 80, 6400], 6),
    "empty requests between": ([0, 3200, 0, *[1] * 13, 0, 2000], 4),
    "one long and idle parts": ([6400, 0, 0], 132),
    "all short": ([68, 34, 22], 132),
    "all long": ([4000, 4096, 3333, 4097], 4),
}


def tiles_of_parts(problem, plan) -> list[int]:
    """Tiles that each part of a balanced plan has, of requests whose blocks are one work."""
    tiles = [max(-(-n // 64), 1) for n in problem.cache_seqlens.tolist()]
    first = [0]
    for count in tiles:
        first.append(first[-1] + count)
    found = []
    for begin_work, begin_tile, end_work, end_tile, *_ in plan.tile_scheduler_metadata.tolist():
        found.append(first[end_work] + end_tile - first[begin_work] - begin_tile)
    return found


def wide(problem, columns: int = 2048):
    """The same problem with a page table as wide as an engine's, whose spare columns hold no page."""
    spare = torch.full((problem.batch_size, columns), HUGE_INDEX, dtype=torch.int32, device=problem.q.device)
    return dataclasses.replace(problem, page_table=torch.cat([problem.page_table, spare], 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATCHES)
def test_parts_of_many_and_of_few_tiles(name, dtype):
    lengths, num_sm_parts = BATCHES[name]
    problem = mla_problem(lengths, num_q_heads=128, dtype=dtype)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    problem = wide(problem.to("cuda"))
    plan = plan_for(problem, num_sm_parts=num_sm_parts)
    tiles = tiles_of_parts(problem, plan)
    if name.startswith("a long work"):
        assert min(tiles) < MANY <= max(tiles), tiles
    first = decode(problem, plan=plan)
    assert_attention_close(first[0].cpu(), expected_out, dtype)
    assert_lse_close(first[1].cpu(), expected_lse, atol=1e-4)
    for _ in range(5):
        again = decode(problem, plan=plan)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("scale", [0.5, 4.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_rise_on_the_way(dtype, scale):
    """In parts of many tiles, and where a work's parts have many and few."""
    for lengths, num_sm_parts in (
        ([2053, 1, 0, 3000, 1920, 64], 2),
        BATCHES["a long work ends in a part of short ones"],
    ):
        problem = mla_problem(lengths, num_q_heads=128, dtype=dtype)
        out, lse = decode(wide(problem.to("cuda")), softmax_scale=scale, num_sm_parts=num_sm_parts)
        expected_out, expected_lse = problem.expected(softmax_scale=scale)
        assert_attention_close(out.cpu(), expected_out, dtype)
        assert_lse_close(lse.cpu(), expected_lse, atol=1e-4 if scale < 1 else 2e-3 * scale)


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_page_sizes(dtype, page_size):
    problem = mla_problem([2053, 1, 0, 3000, 1920, 64], num_q_heads=128, page_size=page_size, dtype=dtype)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    for num_sm_parts in (2, 4, 6):
        out, lse = decode(wide(problem.to("cuda")), num_sm_parts=num_sm_parts)
        assert_attention_close(out.cpu(), expected_out, dtype)
        assert_lse_close(lse.cpu(), expected_lse, atol=1e-4)


@pytest.mark.parametrize("heads, tokens", [(64, 3), (70, 1), (64, 5), (40, 4)])
def test_blocks_of_several_tokens(heads, tokens):
    problem = mla_problem([3840, *[64] * 14], tokens, num_q_heads=heads)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    problem = wide(problem.to("cuda"))
    for num_sm_parts in (6, 10, 132):
        out, lse = decode(problem, num_sm_parts=num_sm_parts)
        assert_attention_close(out.cpu(), expected_out, torch.bfloat16)
        assert_lse_close(lse.cpu(), expected_lse, atol=1e-4)


@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_replays_follow_the_lengths(page_size):
    """A captured call whose parts go from few tiles to many and back."""
    problem = mla_problem([3840, *[640] * 3], num_q_heads=128, page_size=page_size)
    problem = wide(problem.to("cuda"))
    plan = plan_for(problem, num_sm_parts=4)
    lengths = [problem.cache_seqlens.tolist(), [60, 640, 1, 0], [3840, 1, 1, 1], [0, 0, 0, 5], [3840, 640, 640, 640]]
    q = problem.q_by_request
    out, lse = q.new_empty(*q.shape[:-1], 512), torch.empty(q.shape[:-1], device="cuda")

    def call():
        ops.mla_decode_plan(plan, problem.cache_seqlens)
        tensors = (q, problem.kv_pages, problem.page_table, problem.cache_seqlens, plan)
        ops.mla_decode(*tensors, softmax_scale=SCALE, out=out, lse=lse)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for now in lengths * 3:
        problem.cache_seqlens.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone(), lse.clone()
        call()
        assert torch.equal(out, replayed[0]) and torch.equal(lse, replayed[1])
        assert_lengths(problem, now, out)


def assert_lengths(problem, lengths, out):
    """Against float64, by request."""
    for request, length in enumerate(lengths):
        if length == 0:
            assert not out[request].any()
            continue
        token, page_size = torch.arange(length), problem.kv_pages.shape[1]
        page, row = token // page_size, token % page_size
        keys = problem.kv_pages.double()[problem.page_table[request].long()[page.cuda()], row.cuda()]
        scores = torch.einsum("qhd,kd->qhk", problem.q_by_request[request].double(), keys) * SCALE
        expected = scores.softmax(-1) @ keys[:, :512]
        assert_attention_close(out[request].cpu(), expected.cpu(), torch.bfloat16)
