"""Every way to run a model's steps on a GPU, over every backend with kernels there, gives what eager steps give."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import CudaGraphs, GraphRunner
from graph_hosts import Captured, Compiled, NoSync, Piecewise, Segments
from model_zoo import LIMITS, ZOO, Engine, run_eager, serve, speculate
from random_steps import RandomSteps

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [(config, "trtllm_mha", dtype, 16) for config in ZOO if not config.mla for dtype in (BF16, FP16)]
CASES += [(config, "torch_native", FP32, 16) for config in ZOO]
CASES += [
    (ZOO[-1], "flashmla", BF16, 64),
    (ZOO[-1], "cutlass_mla", FP16, 128),
    (ZOO[-1], "trtllm_mla", BF16, 32),
    (ZOO[-1], "trtllm_mla", FP16, 64),
]
SHORT = [case for case in CASES if case[1] != "torch_native" and case[2] is BF16]


def name_of(case) -> str:
    config, backend, dtype, page_size = case
    return f"{config.name}-{backend}-{str(dtype).removeprefix('torch.')}-{page_size}"


def cases(some):
    return pytest.mark.parametrize("case", some, ids=name_of)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float32_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def engine_of(case, host=run_eager) -> Engine:
    config, backend, dtype, page_size = case
    return Engine(config, backend, host, device="cuda", dtype=dtype, page_size=page_size)


def assert_equal(served, expected) -> None:
    assert served[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(served[1], expected[1], strict=True))


def assert_same_tokens(served, expected, tolerance: float) -> None:
    assert served[0] == expected[0]
    for a, b in zip(served[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def tolerance_of(case) -> float:
    """Products of other shapes round otherwise; behind the attention's dtype that may be one of its steps."""
    return {FP32: 1e-4, FP16: 2e-3, BF16: 2e-2}[case[2]]


@cases(CASES)
def test_captured_steps_equal_eager_bit_for_bit(case):
    host = Captured(recorder=CudaGraphs())
    assert_equal(serve(engine_of(case, NoSync(host))), serve(engine_of(case, NoSync())))
    assert host.replays > 0


@cases(CASES)
def test_captured_speculation_equals_eager_bit_for_bit(case):
    ragged = Captured(sizes=range(1, 4), recorder=CudaGraphs())
    assert_equal(speculate(engine_of(case, NoSync(ragged)), False), speculate(engine_of(case, NoSync()), False))


@cases(SHORT)
def test_padded_graphs_give_the_same_tokens(case):
    host = Captured(sizes=[3, 8], recorder=CudaGraphs())
    assert_same_tokens(serve(engine_of(case, host)), serve(engine_of(case)), tolerance_of(case))


@cases(SHORT)
def test_padded_speculation_with_ragged_steps_gives_the_same_tokens(case):
    """Graphs of 3 and 8; in some steps requests had different numbers of drafts accepted, at capture none at all."""
    host = Captured(sizes=[3, 8], recorder=CudaGraphs())
    assert_same_tokens(speculate(engine_of(case, NoSync(host))), speculate(engine_of(case)), tolerance_of(case))
    assert any(runner.static.is_ragged for runner in host.runners.values())


@cases(CASES)
def test_segments_give_the_same_tokens(case):
    host = NoSync(Segments(recorder=CudaGraphs()))
    assert_same_tokens(serve(engine_of(case, host)), serve(engine_of(case)), tolerance_of(case))


@cases(CASES)
def test_recorded_pieces_give_the_same_tokens(case):
    host = NoSync(Piecewise(recorder=CudaGraphs()))
    assert_same_tokens(serve(engine_of(case, host)), serve(engine_of(case)), tolerance_of(case))


@cases(SHORT)
def test_speculation_in_pieces_and_segments_gives_the_same_tokens(case):
    expected = speculate(engine_of(case))
    for host in (Segments(recorder=CudaGraphs()), Piecewise(recorder=CudaGraphs())):
        assert_same_tokens(speculate(engine_of(case, NoSync(host))), expected, tolerance_of(case))


@cases([SHORT[0], SHORT[-1]])
def test_a_whole_model_compiled_by_inductor_gives_the_same_tokens(case):
    assert_same_tokens(serve(engine_of(case, Compiled("inductor"))), serve(engine_of(case)), tolerance_of(case))


def allocations() -> tuple[int, ...]:
    """Allocations and segments taken so far, and bytes reserved now."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    names = (("allocation", "allocated"), ("segment", "allocated"), ("reserved_bytes", "current"))
    return tuple(stats[name]["all"][kind] for name, kind in names)


@cases([SHORT[0], SHORT[3], SHORT[-1]])
def test_a_thousand_replays_equal_eager_and_allocate_nothing(case):
    steps = RandomSteps(engine_of(case))
    engine = steps.engine
    table = engine.rows.req_to_token
    runner = GraphRunner(engine.model, engine.backend, table, engine.pool, sizes=range(1, LIMITS.max_batch_size + 1))
    runner.capture(progress=False)
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(1000):
            input_ids, batch = steps.draw()
            before = allocations()
            replayed = runner.replay(input_ids, batch)
            assert allocations() == before
            replayed = replayed.clone()
            eager = run_eager(engine, input_ids, batch)
            wrong |= ((replayed != eager) | ~eager.isfinite()).any()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong
