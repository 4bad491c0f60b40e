"""attnops::xqa_decode, one argument wrong at a time: the message names op, argument, dimension, expected and got."""

import re

import pytest
import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan
from problems import FP8, paged_problem
from xqa_decoding import make_plan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, S, H, H_KV, D = 3, 2, 6, 2, 64
SPLITS_MUST_BE = (
    "fixed_split_tokens must be 0 (balanced), a positive multiple of 64 (tokens of a cut) or -1 to -1024 "
    "(at most so many cuts)"
)


def arguments(device: str = "cpu") -> dict:
    """A good call, by the names of the schema."""
    problem = paged_problem([40, 0, 7], S, num_q_heads=H, num_kv_heads=H_KV, head_dim=D).to(device)
    plan = make_plan(problem, seqlen_q=S)
    q = problem.q_by_request
    return {
        "out": torch.empty_like(q),
        "lse": q.new_empty(q.shape[:-1], dtype=torch.float32),
        "q": q,
        "k_pages": problem.k_pages,
        "v_pages": problem.v_pages,
        "page_table": problem.page_table,
        "kv_indptr": None,
        "cache_seqlens": problem.cache_seqlens,
        "tile_scheduler_metadata": plan.tile_scheduler_metadata,
        "num_splits": plan.num_splits,
        "out_partial": plan.out_partial,
        "lse_partial": plan.lse_partial,
        "semaphores": plan.semaphores,
        "softmax_scale": 0.125,
        "sinks": torch.zeros(H, device=device),
        "tree_mask": torch.full((B, S, 1), 3, dtype=torch.uint8, device=device),
        "k_scale": torch.ones(1, device=device),
        "v_scale": torch.ones(H_KV, device=device),
        "report": torch.zeros(8, dtype=torch.int32, device=device),
    }


# argument -> how to break it -> what the message says after "attnops::xqa_decode: "
CASES = [
    ("q", lambda x: x.int(), "q must have dtype float32 or float16 or bfloat16, got int32"),
    ("q", lambda x: x[0], "q must have 4 dimensions, got 3, shape [2, 6, 64]"),
    ("q", lambda x: x[:, :0], "q.shape[1] (seqlen_q) must be at least 1 (a request has a query), got 0"),
    ("q", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "q.stride(3) must be 1"),
    ("q", lambda x: x[:2], "out.shape[0] (batch_size) must be 2 as in q, got 3"),
    ("q", lambda x: x.repeat(1, 1, 1, 5), "q.shape[3] (head_dim) must be in [1, 256], got 320"),
    ("out", lambda x: x.float(), "out must have dtype bfloat16 as q, got float32"),
    ("out", lambda x: x[:, :, :5], "out.shape[2] (num_q_heads) must be 6 as in q, got 5"),
    ("out", lambda x: torch.stack([x, x], -1)[..., 0], "out.stride(3) must be 1"),
    ("lse", lambda x: x.double(), "lse must have dtype float32, got float64"),
    ("lse", lambda x: x[:, :1], "lse.shape[1] (seqlen_q) must be 2 as in q, got 1"),
    ("lse", lambda x: torch.stack([x, x], -1)[..., 0], "lse must be contiguous"),
    ("k_pages", lambda x: x.half(), "k_pages must have dtype bfloat16 or float8_e4m3fn or float8_e5m2, got float16"),
    ("k_pages", lambda x: x[0], "k_pages must have 4 dimensions, got 3"),
    ("k_pages", lambda x: x[..., :32], "k_pages.shape[3] (head_dim) must be 64 as in q, got 32"),
    ("k_pages", lambda x: x[:, :, :0], "k_pages.shape[2] (num_kv_heads) must be at least 1"),
    ("k_pages", lambda x: x[:, :0], "k_pages.shape[1] (page_size) must be at least 1 (a page holds a token), got 0"),
    ("k_pages", lambda x: torch.stack([x, x], -1)[..., 0], "k_pages.stride(3) must be 1"),
    ("v_pages", lambda x: x.to(FP8), "v_pages must have dtype bfloat16 as k_pages, got float8_e4m3fn"),
    ("v_pages", lambda x: x[:, :3], "v_pages.shape[1] (page_size) must be 16 as in k_pages, got 3"),
    ("v_pages", lambda x: x[:1], "v_pages.shape[0] (num_pages) must be 7 as in k_pages, got 1"),
    ("page_table", lambda x: x.long(), "page_table must have dtype int32, got int64"),
    ("page_table", lambda x: x[0], "page_table must have 2 dimensions, got 1"),
    ("page_table", lambda x: x[:2], "page_table.shape[0] (batch_size) must be 3 as in q, got 2"),
    ("page_table", lambda x: torch.stack([x, x], -1)[..., 0], "page_table.stride(1) must be 1"),
    ("cache_seqlens", lambda x: x.long(), "cache_seqlens must have dtype int32, got int64"),
    ("cache_seqlens", lambda x: x[:2], "cache_seqlens.shape[0] (batch_size) must be 3 as in q, got 2"),
    ("tile_scheduler_metadata", lambda x: x.long(), "tile_scheduler_metadata must have dtype int32, got int64"),
    ("tile_scheduler_metadata", lambda x: x[:, :4], "tile_scheduler_metadata.shape[1] (entry_size) must be 8"),
    ("tile_scheduler_metadata", lambda x: x[:0], "tile_scheduler_metadata.shape[0] (num_sm_parts) must be at least 1"),
    ("num_splits", lambda x: x[:3], "num_splits.shape[0] (batch_size + 1) must be 4 as in q, got 3"),
    ("out_partial", lambda x: x.half(), "out_partial must have dtype float32, got float16"),
    ("out_partial", lambda x: x[:, :2], "out_partial.shape[1] (seqlen_q * group) must be 6 as in q and k_pages, got 2"),
    ("lse_partial", lambda x: x[:2], "lse_partial.shape[0] (num_partials) must be 6 as in out_partial, got 2"),
    ("semaphores", lambda x: x[:5], "semaphores.shape[0] (num_works) must be at least 6 (batch_size * num_kv_heads)"),
    ("semaphores", lambda x: x.float(), "semaphores must have dtype int32, got float32"),
    ("sinks", lambda x: x.bfloat16(), "sinks must have dtype float32, got bfloat16"),
    ("sinks", lambda x: x[:4], "sinks.shape[0] (num_q_heads) must be 6 as in q, got 4"),
    ("tree_mask", lambda x: x.bool(), "tree_mask must have dtype uint8, got bool"),
    ("tree_mask", lambda x: x[:, :, :0], "tree_mask.shape[2] (mask_bytes) must be at least 1 (one bit per new token)"),
    ("tree_mask", lambda x: x[:, :1], "tree_mask.shape[1] (seqlen_q) must be 2 as in q, got 1"),
    ("k_scale", lambda x: x.double(), "k_scale must have dtype float32, got float64"),
    ("k_scale", lambda x: x.repeat(3), "k_scale.shape[0] must be 1 or 2 (num_kv_heads) as in k_pages, got 3"),
    ("v_scale", lambda x: x[0], "v_scale must have 1 dimensions, got 0"),
    ("report", lambda x: x[:4], "report.shape[0] (report_size) must be 8 as in core/report.h, got 4"),
    ("report", lambda x: x.float(), "report must have dtype int32, got float32"),
    ("softmax_scale", lambda _: float("nan"), "softmax_scale must be finite, got nan"),
    ("logit_cap", lambda _: -1.0, "logit_cap must be 0 (off) or positive, got -1"),
    ("logit_cap", lambda _: float("inf"), "logit_cap must be finite, got inf"),
    ("window_left", lambda _: -2, "window_left must be in [-1, "),
    ("causal", lambda _: False, "causal must be True with tree_mask"),
    (
        "fixed_split_tokens",
        lambda _: 100,
        f"{SPLITS_MUST_BE}, got 100",
    ),
    ("kv_indptr", lambda _: torch.zeros(4, dtype=torch.int32), "page_table must have 1 dimensions, got 2"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, broken, message", CASES, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(CASES)])
def test_message(device, name, broken, message):
    args = arguments(device)
    args[name] = broken(args.get(name))
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::xqa_decode: {message}")):
        torch.ops.attnops.xqa_decode(**args)


@pytest.mark.parametrize("name", [name for name, value in arguments().items() if isinstance(value, torch.Tensor)])
def test_another_device(name):
    args = arguments()
    args[name] = args[name].to("meta")
    blamed = "out" if name == "q" else name
    with pytest.raises(RuntimeError, match=rf"attnops::xqa_decode: {blamed} must be on \w+ as q, got \w+"):
        torch.ops.attnops.xqa_decode(**args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", ["kv_indptr", "kv_indices"])
def test_csr_arguments(device, csr):
    args = arguments(device)
    args["page_table"] = torch.zeros(9, dtype=torch.int32, device=device)
    args["kv_indptr"] = torch.zeros(3 if csr == "kv_indptr" else 4, dtype=torch.int32, device=device)
    if csr == "kv_indices":
        args["page_table"] = args["page_table"].float()
    expected = {
        "kv_indptr": "kv_indptr.shape[0] (batch_size + 1) must be 4 as in q, got 3",
        "kv_indices": "page_table must have dtype int32, got float32",
    }
    with pytest.raises(RuntimeError, match=re.escape(expected[csr])):
        torch.ops.attnops.xqa_decode(**args)


@pytest.mark.parametrize("device", DEVICES)
def test_heads_that_do_not_divide(device):
    args = arguments(device)
    args["q"], args["out"] = args["q"][:, :, :5], args["out"][:, :, :5]
    args["lse"] = args["lse"][:, :, :5].contiguous()
    expected = "q.shape[2] (num_q_heads) must be a positive multiple of 2 as in k_pages.shape[2] (num_kv_heads), got 5"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        torch.ops.attnops.xqa_decode(**args)


def test_a_plan_of_other_lengths_is_refused():
    args = arguments()
    args["cache_seqlens"] = args["cache_seqlens"] + torch.tensor([64, 0, 0], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="tile_scheduler_metadata and num_splits are not the plan of these"):
        torch.ops.attnops.xqa_decode(**args)
    args = arguments()
    args["tile_scheduler_metadata"].zero_()
    with pytest.raises(RuntimeError, match="run xqa_decode_plan before"):
        torch.ops.attnops.xqa_decode(**args)


def test_lengths_beyond_the_plan_of_the_batch_invariant_mode():
    problem = paged_problem([500])
    plan = make_plan(problem, fixed_split_tokens=64, max_seqlen_k=200)
    with pytest.raises(RuntimeError, match=r"out_partial\.shape\[0\] \(num_partials\) must be at least 16 .* got 8"):
        ops.xqa_decode(problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, plan)


def test_page_index_out_of_the_pool():
    args = arguments()
    args["page_table"][0, 2] = 99
    args["report"] = None
    expected = "page_table, request 0, page 2 must be in [0, 7) (num_pages of k_pages), got 99"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        torch.ops.attnops.xqa_decode(**args)


@pytest.mark.parametrize("csr", [False, True])
def test_length_beyond_the_page_table(csr):
    problem = paged_problem([40, 20], page_size=16)
    problem.cache_seqlens[1] = 100
    tables = (problem.page_table[:, :4], None) if not csr else (problem.kv_indices[:6], problem.kv_indptr)
    plan = make_plan(problem)
    expected = r"cache_seqlens\[1\] must be below \d+ \(the tokens that its page_table row holds\), got 100"
    with pytest.raises(RuntimeError, match=expected):
        ops.xqa_decode(
            problem.q,
            problem.k_pages,
            problem.v_pages,
            torch.where(tables[0] < 99, tables[0], 0),
            problem.cache_seqlens,
            plan,
            kv_indptr=tables[1],
        )


PLAN_CASES = [
    ({"cache_seqlens": torch.zeros(3, dtype=torch.int64)}, "cache_seqlens must have dtype int32, got int64"),
    ({"cache_seqlens": torch.zeros(1, 3, dtype=torch.int32)}, "cache_seqlens must have 1 dimensions, got 2"),
    ({"cache_seqlens": torch.zeros(4, dtype=torch.int32)}, "num_splits.shape[0] (batch_size + 1) must be 5"),
    ({"num_splits": torch.zeros(4, dtype=torch.int64)}, "num_splits must have dtype int32, got int64"),
    (
        {"tile_scheduler_metadata": torch.zeros(4, 7, dtype=torch.int32)},
        "tile_scheduler_metadata.shape[1]",
    ),
    ({"seqlen_q": 0}, "seqlen_q must be in [1, 65536], got 0"),
    ({"num_kv_heads": 0}, "num_kv_heads must be in [1, 65536], got 0"),
    ({"window_left": -5}, "window_left must be in [-1, "),
    ({"fixed_split_tokens": -(66 * 1024)}, f"{SPLITS_MUST_BE}, got -67584"),
    ({"fixed_split_tokens": 63}, f"{SPLITS_MUST_BE}, got 63"),
    ({"rows": 0}, "rows must be in [1, "),
]


PLAN_IDS = [next(iter(changes)) + f"-{i}" for i, (changes, _) in enumerate(PLAN_CASES)]


@pytest.mark.parametrize("changes, message", PLAN_CASES, ids=PLAN_IDS)
def test_plan_message(changes, message):
    args = {
        "tile_scheduler_metadata": torch.zeros(4, 8, dtype=torch.int32),
        "num_splits": torch.zeros(4, dtype=torch.int32),
        "cache_seqlens": torch.zeros(3, dtype=torch.int32),
        "seqlen_q": 1,
        "num_kv_heads": 2,
    }
    torch.ops.attnops.xqa_decode_plan(**args)
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::xqa_decode_plan: {message}")):
        torch.ops.attnops.xqa_decode_plan(**{**args, **changes})


@pytest.mark.parametrize("window_left, cuts, refused", [(-1, 32767, False), (-1, 32768, True), (4000, 32768, False)])
def test_more_cuts_of_a_request_than_the_merge_counts(window_left, cuts, refused):
    """By what the page table holds and out_partial has room for: no request here is as long."""
    args = {**arguments(), "fixed_split_tokens": 64, "tree_mask": None, "window_left": window_left, "report": None}
    rows = S * (H // H_KV)
    args["page_table"] = torch.zeros(B, cuts * 64 // args["k_pages"].shape[1], dtype=torch.int32)
    args["out_partial"], args["lse_partial"] = torch.empty(cuts * H_KV, rows, D), torch.empty(cuts * H_KV, rows)
    plan = ("tile_scheduler_metadata", "num_splits", "cache_seqlens")
    torch.ops.attnops.xqa_decode_plan(
        *(args[name] for name in plan),
        seqlen_q=S,
        num_kv_heads=H_KV,
        window_left=window_left,
        fixed_split_tokens=64,
    )
    if not refused:
        torch.ops.attnops.xqa_decode(**args)
        return
    message = "fixed_split_tokens must make at most 32767 cuts of a request, 64 may make 32768"
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::xqa_decode: {message}")):
        torch.ops.attnops.xqa_decode(**args)


class TestPlanObject:
    GEOMETRY = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}  # noqa: RUF012

    def test_key_mismatch_names_both_sides(self):
        problem = paged_problem([5, 6])
        tensors = problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens
        plan = XqaDecodePlan.allocate(3, **self.GEOMETRY)
        with pytest.raises(ValueError, match="another geometry: batch_size 3, the call has 2"):
            ops.xqa_decode(problem.q, *tensors, plan)
        plan = XqaDecodePlan.allocate(2, **self.GEOMETRY, window_left=7)
        with pytest.raises(ValueError, match="window_left 7, the call has -1"):
            ops.xqa_decode(problem.q, *tensors, plan)
        plan = XqaDecodePlan.allocate(2, **{**self.GEOMETRY, "head_dim": 128, "num_kv_heads": 4})
        with pytest.raises(ValueError, match="num_kv_heads 4, the call has 2; head_dim 128, the call has 64"):
            ops.xqa_decode(problem.q, *tensors, plan)

    def test_queries_that_are_no_batch(self):
        problem = paged_problem([5, 6], [2, 1])
        tensors = problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens
        plan = XqaDecodePlan.allocate(2, **self.GEOMETRY, seqlen_q=2)
        for q in (problem.q, problem.q[0]):
            with pytest.raises(ValueError, match=r"q must be \[B, 2, H_q, D\] or \[B \* 2, H_q, D\] as its plan, got"):
                ops.xqa_decode(q, *tensors, plan)

    def test_allocation_errors(self):
        with pytest.raises(ValueError, match="num_q_heads must be a positive multiple of num_kv_heads, got 8 and 3"):
            XqaDecodePlan.allocate(1, num_q_heads=8, num_kv_heads=3, head_dim=64)
        with pytest.raises(ValueError, match=r"positive multiple of 64 .*, got 65"):
            XqaDecodePlan.allocate(1, **self.GEOMETRY, fixed_split_tokens=65)
        with pytest.raises(ValueError, match="fixed_split_tokens=64 needs max_seqlen_k"):
            XqaDecodePlan.allocate(1, **self.GEOMETRY, fixed_split_tokens=64)
        message = "fixed_split_tokens must make at most 32767 cuts of max_seqlen_k=2097153 tokens, got 64"
        with pytest.raises(ValueError, match=message):
            XqaDecodePlan.allocate(1, **self.GEOMETRY, fixed_split_tokens=64, max_seqlen_k=2097153)


def test_isa_limit_must_be_a_name(monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", "sse9")
    with pytest.raises(RuntimeError, match="must be scalar, avx2, avx512, avx512_bf16 or amx, got sse9"):
        torch.ops.attnops.xqa_decode(**arguments())
