"""attnops::mla_decode in CUDA graphs, in every kernel.

One graph with its plan serves every length up to the table's, bit for bit as eager, and batch-invariant plans give a
request the bits under replay that it has alone.
"""

import math

import pytest
import torch
from attnops import ops
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, decode, plan_for
from problems import FP8, mla_problem

pytestmark = pytest.mark.gpu
KV_DTYPES = [None, FP8, torch.uint8]  # None: q's dtype
PARTS = 11
STEPS = [[700, 64, 1300, 5], [1, 64, 3, 0], [0, 0, 1299, 0], [650, 1, 0, 5], [700, 63, 1300, 5]]
# Many rows, few parts and a wide table take the ring; in batch-invariant plans long cuts do.
RING_PARTS, RING_CUT = 2, 1024
RING_STEPS = [[4100, 3000, 64, 5], [1, 0, 64, 5], [4100, 1, 0, 0], [130, 3000, 63, 1], [0] * 4, [4099, 2999, 64, 5]]


class Captured:
    """A graph of three steps in a row, each planned and attended, over memory that replays refill."""

    def __init__(self, problem, plan):
        self.problem, self.plan = problem, plan
        q = problem.q_by_request
        self.out = q.new_full((*q.shape[:-1], 512), math.nan)
        self.lse = torch.full(q.shape[:-1], math.nan, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.step()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(3):  # steps that follow one another without a gap
                    self.step()

    def step(self) -> None:
        problem, plan = self.problem, self.plan
        ops.mla_decode_plan(plan, problem.cache_seqlens)
        call = (problem.kv_pages, problem.page_table, problem.cache_seqlens, plan)
        destinations = {"out": self.out, "lse": self.lse}
        ops.mla_decode(problem.q_by_request, *call, softmax_scale=SCALE, kv_scale=problem.kv_scale, **destinations)

    def replay(self, lengths):
        """(out, lse) by token for other lengths, each at most the problem's."""
        self.problem.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.graph.replay()
        return self.out.flatten(0, 1), self.lse.flatten(0, 1)


def check(problem, plan, steps):
    """Replays with other lengths equal eager calls of the same plan bit for bit, and the last of them the reference."""
    captured = Captured(problem, plan)
    for lengths in steps:
        out, lse = captured.replay(lengths)
        ops.mla_decode_plan(plan, problem.cache_seqlens)
        eager_out, eager_lse = decode(problem, plan=plan)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse), lengths
    captured.replay(steps[0])
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    assert_attention_close(captured.out.flatten(0, 1).cpu(), expected_out, problem.q.dtype)
    assert_lse_close(captured.lse.flatten(0, 1).cpu(), expected_lse, atol=1e-2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("fixed", [0, 128])
@pytest.mark.parametrize("heads, seqlen_q", [(5, 1), (16, 1), (16, 2), (16, 4), (16, 5), (64, 1), (128, 1), (128, 2)])
def test_one_graph_serves_every_length(heads, seqlen_q, fixed, kv_dtype):
    problem = mla_problem(STEPS[0], seqlen_q, num_q_heads=heads, kv_dtype=kv_dtype).to("cuda")
    check(problem, plan_for(problem, num_sm_parts=PARTS, fixed=fixed), STEPS)


@pytest.mark.parametrize("fixed", [0, RING_CUT])
@pytest.mark.parametrize("heads, seqlen_q", [(64, 2), (128, 1), (128, 2)])
def test_one_graph_serves_every_length_in_the_ring(heads, seqlen_q, fixed):
    problem = mla_problem(RING_STEPS[0], seqlen_q, num_q_heads=heads).to("cuda")
    check(problem, plan_for(problem, num_sm_parts=RING_PARTS, fixed=fixed, max_seqlen_k=1 << 13), RING_STEPS)


@pytest.mark.parametrize("kv_dtype, cut", [(None, 128), (None, RING_CUT), (FP8, 128), (torch.uint8, 128)])
@pytest.mark.parametrize("heads", [16, 128])
def test_batch_invariant_bits_under_replay(heads, kv_dtype, cut):
    """A request's rows are those of a call with nobody beside it, whatever the others' lengths."""
    lengths = [3000, 640, 1300, 5]
    problem = mla_problem(lengths, num_q_heads=heads, kv_dtype=kv_dtype).to("cuda")
    captured = Captured(problem, plan_for(problem, num_sm_parts=PARTS, fixed=cut))
    alone = type(problem)(
        **{
            **vars(problem),
            "q": problem.q[:1],
            "page_table": problem.page_table[:1],
            "cache_seqlens": problem.cache_seqlens[:1].clone(),
        }
    )
    alone_out, alone_lse = decode(alone, fixed=cut, num_sm_parts=5)
    for others in (lengths[1:], [0, 0, 0], [1, 1299, 3]):
        out, lse = captured.replay([3000, *others])
        assert torch.equal(out[:1], alone_out) and torch.equal(lse[:1], alone_lse), others
