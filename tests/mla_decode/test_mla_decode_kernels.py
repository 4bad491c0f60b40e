"""Every kernel of attnops::mla_decode on a GPU, by problems small enough for compute-sanitizer's racecheck.

Which kernel serves a call follows from the rows of q, the cache's dtype and pages, and what the call asks for.
"""

import dataclasses
import math

import pytest
import torch
from attnops import ops
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, assert_equals_reference, decode, plan_for
from problems import FP8, HUGE_INDEX, mla_problem, random_tree_mask

pytestmark = pytest.mark.gpu
ROW = torch.uint8  # 656 bytes a token
GATHERED = {"page_size": 5}  # pages that no box of the copy engine fits
TREE = {"tree": True, "seqlen_q": 3, "num_q_heads": 24}  # 72 rows
FEW_TREE = {"tree": True, "seqlen_q": 4, "num_q_heads": 8}  # 32 rows

KERNELS = {
    "ring": {"num_q_heads": 72, "num_sm_parts": 2, "lengths": [3100, 64, 0, 321, 1]},
    "ring, cut works": {"num_q_heads": 128, "num_sm_parts": 4, "lengths": [6300, 64, 0, 321, 1]},
    "ring, short parts": {"num_q_heads": 128, "table_width": 64},
    "ring, many works without keys": {
        "num_q_heads": 128,
        "num_sm_parts": 2,
        "table_width": 64,
        "lengths": [0, 0, 70, 0, 0, 0, 130, 0, 5, 0, 0],
    },
    "ring, equal pieces": {"num_q_heads": 72, "num_sm_parts": 8, "table_width": 128, "lengths": [640, 640]},
    "ring, tree": {**TREE, "num_sm_parts": 2, "lengths": [3100, 64, 5, 321]},
    "ring, tree, cut works": {**TREE, "seqlen_q": 16, "num_q_heads": 16, "num_sm_parts": 4, "lengths": [6300, 64, 321]},
    "many rows": {"num_q_heads": 72},
    "many rows, pages of 16": {"num_q_heads": 72, "page_size": 16},
    "many rows, gathered": {"num_q_heads": 72, **GATHERED},
    "many rows, works without keys": {"num_q_heads": 72, "num_sm_parts": 2, "lengths": [0, 70, 0, 0, 40, 0]},
    "many rows, gathered, works without keys": {
        **GATHERED,
        "num_q_heads": 48,
        "num_sm_parts": 1,
        "lengths": [9, 0, 70],
    },
    "many rows, many works without keys": {
        "num_q_heads": 72,
        "num_sm_parts": 4,
        "lengths": [0, 0, 70, 0, 0, 0, 450, 0, 5, 0, 0],
    },
    "many rows, pages of 32, works without keys": {
        "num_q_heads": 24,
        "seqlen_q": 3,
        "page_size": 32,
        "num_sm_parts": 2,
        "lengths": [70, 0, 0, 450, 0, 3, 0],
    },
    "many rows, gathered, many works without keys": {
        **GATHERED,
        "num_q_heads": 48,
        "num_sm_parts": 2,
        "lengths": [0, 0, 70, 0, 0, 0, 450, 0, 5, 0, 0],
    },
    "many rows, equal pieces": {"num_q_heads": 48, "num_sm_parts": 5, "lengths": [450, 450]},
    "many rows, a piece a part": {"num_q_heads": 48, "num_sm_parts": 8, "lengths": [1300, 600, 0, 260]},
    "many rows, whole works": {"num_q_heads": 48, "lengths": [250, 130, 0, 200, 64]},
    "many rows, tree": TREE,
    "many rows, gathered, tree": {**TREE, **GATHERED},
    "16 rows": {"num_q_heads": 16},
    "16 rows, gathered": {"num_q_heads": 16, **GATHERED},
    "16 rows, a piece a part": {"num_q_heads": 16, "num_sm_parts": 8, "lengths": [1300, 600, 0, 260]},
    "32 rows, tree": FEW_TREE,
    "48 rows": {"num_q_heads": 48},
    "e4m3, 16 rows": {"num_q_heads": 16, "kv_dtype": FP8},
    "e4m3, 16 rows, gathered": {"num_q_heads": 16, "kv_dtype": FP8, **GATHERED},
    "e4m3, 32 rows, tree": {**FEW_TREE, "kv_dtype": FP8},
    "e4m3, 48 rows": {"num_q_heads": 48, "kv_dtype": FP8},
    "e4m3, 39 rows, gathered, tree": {"tree": True, "seqlen_q": 3, "num_q_heads": 13, **GATHERED, "kv_dtype": FP8},
    "e4m3, 72 rows": {"num_q_heads": 72, "kv_dtype": FP8},
    "e4m3, 72 rows, works without keys": {
        "num_q_heads": 72,
        "kv_dtype": FP8,
        "num_sm_parts": 4,
        "lengths": [0, 0, 70, 0, 0, 0, 450, 0, 5, 0, 0],
    },
    "e4m3, 40 rows, equal pieces": {"num_q_heads": 40, "num_sm_parts": 5, "lengths": [450, 450], "kv_dtype": FP8},
    "e4m3, 72 rows, gathered, tree": {**TREE, **GATHERED, "kv_dtype": FP8},
    "e4m3, rounded": {"num_q_heads": 72, "kv_dtype": FP8, "fp8_products": True},
    "e4m3, rounded, gathered, tree": {**TREE, **GATHERED, "kv_dtype": FP8, "fp8_products": True},
    "e4m3, rounded, works without keys": {
        "num_q_heads": 72,
        "kv_dtype": FP8,
        "fp8_products": True,
        "num_sm_parts": 4,
        "lengths": [0, 0, 70, 0, 0, 0, 450, 0, 5, 0, 0],
    },
    "656 bytes, 16 rows": {"num_q_heads": 16, "kv_dtype": ROW},
    "656 bytes, 32 rows, tree": {**FEW_TREE, "kv_dtype": ROW},
    "656 bytes, 72 rows": {"num_q_heads": 72, "kv_dtype": ROW},
    "656 bytes, 72 rows, gathered, tree": {**TREE, **GATHERED, "kv_dtype": ROW},
}
MODES = {"balanced": 0, "batch-invariant": 128}  # a fixed split, in tokens; the ring leaves such calls to others


def case(kernel, fixed):
    """The problem, on the GPU, and what `decode` is told of it besides."""
    told = dict(KERNELS[kernel])
    call = {"fixed": fixed, "num_sm_parts": told.pop("num_sm_parts", 6)}
    call |= {"fp8_products": True} if told.pop("fp8_products", False) else {}
    tree = told.pop("tree", False)
    # Works that end inside a tile and at its end, that parts share, and one of a single key, or without any.
    lengths = told.pop("lengths", [600, 64, 5, 321] if tree else [600, 64, 0, 321, 1])
    width = told.pop("table_width", 0)  # which the host takes for the lengths when it chooses the ring
    problem = mla_problem(lengths, dtype=torch.bfloat16, **told).to("cuda")
    if width:
        spare = torch.full((len(lengths), width), HUGE_INDEX, dtype=torch.int32, device="cuda")
        problem = dataclasses.replace(problem, page_table=torch.cat([problem.page_table, spare], 1))
    if tree:
        tokens = told["seqlen_q"]
        call["tree_mask"] = random_tree_mask([tokens] * len(lengths)).view(len(lengths), tokens, -1).to("cuda")
    return problem, call


@pytest.mark.parametrize("fixed", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel, fixed):
    problem, call = case(kernel, fixed)
    assert_right(problem, call, *decode(problem, **call))


def assert_right(problem, call, out, lse):
    mask = {"tree_mask": call["tree_mask"].flatten(0, 1).cpu()} if "tree_mask" in call else {}
    if "fp8_products" not in call:
        return assert_equals_reference(problem, out, lse, **mask)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE, **mask)
    assert_attention_close(out.cpu(), expected_out, torch.bfloat16, 6e-2)  # q and probabilities, 2.6 % each on average
    assert_lse_close(lse.cpu(), expected_lse, atol=0.3)


@pytest.mark.parametrize("fixed", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_out_start_anywhere(kernel, fixed):
    """On every element, where nothing but 2 bytes at a time can be written."""
    problem, call = case(kernel, fixed)
    plan = plan_for(problem, fixed=call.pop("fixed"), num_sm_parts=call.pop("num_sm_parts"))
    q = problem.q_by_request
    whole = q.new_full((q[..., 0].numel() * 513 + 1,), math.nan)
    out = whole[1:].view(*q.shape[:-1], 513)[..., :512]
    tensors = (q, problem.kv_pages, problem.page_table, problem.cache_seqlens, plan)
    scales = {"kv_scale": problem.kv_scale, "softmax_scale": SCALE}
    _, lse = ops.mla_decode(*tensors, out=out, return_lse=True, **scales, **call)
    assert_right(problem, call, out.flatten(0, 1), lse.flatten(0, 1))
    assert whole[0].isnan() and whole[1:].view(-1, 513)[:, 512].isnan().all()


@pytest.mark.parametrize("fixed", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_repeats_and_replays_have_the_same_bits(kernel, fixed):
    """Calls one behind the other, by a graph too: what a race would change moves from one to the next."""
    problem, call = case(kernel, fixed)
    plan = plan_for(problem, fixed=fixed, num_sm_parts=call.pop("num_sm_parts"))
    del call["fixed"]
    q = problem.q_by_request
    results = [(q.new_empty(*q.shape[:-1], 512), torch.empty(q.shape[:-1], device="cuda")) for _ in range(8)]

    def calls():
        for out, lse in results:
            ops.mla_decode(
                q,
                problem.kv_pages,
                problem.page_table,
                problem.cache_seqlens,
                plan,
                kv_scale=problem.kv_scale,
                softmax_scale=SCALE,
                out=out,
                lse=lse,
                **call,
            )

    def assert_all_equal():
        for out, lse in results:
            assert torch.equal(out.flatten(0, 1), expected_out) and torch.equal(lse.flatten(0, 1), expected_lse)
            out.fill_(math.nan)
            lse.fill_(math.nan)

    expected_out, expected_lse = decode(problem, plan=plan, **call)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(8):
            calls()
            stream.synchronize()
            assert_all_equal()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        for _ in range(8):
            graph.replay()
            stream.synchronize()
            assert_all_equal()
