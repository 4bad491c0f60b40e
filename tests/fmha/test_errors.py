"""Every argument of fmha_varlen and fmha_paged wrong in shape, dtype, stride, device or range: the message names op,
argument, dimension, expected and got."""

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from fmha_calls import plan_of
from problems import paged_problem, ragged_problem


def strided(x):
    """The same shape with a last dimension that is not dense."""
    return torch.stack([x, x], dim=-1)[..., 0]


VARLEN_ORDER = [
    *("out", "lse", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "tile_order", "tile_q", "softmax_scale", "causal"),
    *("window_left", "window_right", "logit_cap", "sinks", "tree_mask", "k_scale", "v_scale", "report"),
]
PAGED_ORDER = [
    *("out", "lse", "q", "k_pages", "v_pages", "page_table", "kv_indptr", "cache_seqlens", "cu_seqlens_q"),
    *VARLEN_ORDER[VARLEN_ORDER.index("tile_order") :],
]


def common(problem):
    tokens, heads = problem.q.shape[:2]
    return {
        "out": torch.empty_like(problem.q),
        "lse": torch.empty(tokens, heads),
        "q": problem.q,
        "cu_seqlens_q": problem.cu_seqlens_q,
        "tile_order": plan_of(problem).tile_order,
        "tile_q": 64,
        "softmax_scale": 0.1,
        "causal": True,
        "window_left": -1,
        "window_right": -1,
        "logit_cap": 0.0,
        "sinks": torch.zeros(heads),
        "tree_mask": torch.zeros(tokens, 2, dtype=torch.uint8),
        "k_scale": torch.ones(2),
        "v_scale": torch.ones(1),
        "report": torch.zeros(8, dtype=torch.int32),
    }


def call_varlen(**changes):
    problem = ragged_problem([4, 9], [10, 9], padding=0)
    arguments = {**common(problem), "k": problem.k, "v": problem.v, "cu_seqlens_k": problem.cu_seqlens_k}
    arguments.update({name: change(arguments[name]) for name, change in changes.items()})
    torch.ops.attnops.fmha_varlen(*(arguments[name] for name in VARLEN_ORDER))


def call_paged(csr=False, **changes):
    problem = paged_problem([10, 9], [4, 9], page_size=4)
    arguments = {
        **common(problem),
        "k_pages": problem.k_pages,
        "v_pages": problem.v_pages,
        "page_table": problem.kv_indices if csr else problem.page_table,
        "kv_indptr": problem.kv_indptr if csr else None,
        "cache_seqlens": problem.cache_seqlens,
    }
    arguments.update({name: change(arguments[name]) for name, change in changes.items()})
    torch.ops.attnops.fmha_paged(*(arguments[name] for name in PAGED_ORDER))


# (argument, what is done to it, the message after "attnops::<op>: ")
COMMON_ERRORS = [
    ("q", lambda q: q.double(), "q must have dtype float32 or float16 or bfloat16 or float8_e4m3fn, got float64"),
    ("q", lambda q: q.to(torch.float8_e4m3fn), r"k\w* must have dtype float8_e4m3fn as q, got bfloat16"),
    ("q", lambda q: q[0], "q must have 3 dimensions, got 2"),
    ("q", strided, r"q\.stride\(2\) must be 1 .* got 2"),
    ("q", lambda q: q[:, :7], r"out\.shape\[1\] \(num_q_heads\) must be 7 as in q, got 8"),
    ("q", lambda q: q[:, :0], r"q\.shape\[1\] \(num_q_heads\) must be at least 1"),
    ("q", lambda q: q[..., :36], r"q\.shape\[2\] \(head_dim_qk\) must be a multiple of 8 in \[32, 576\], got 36"),
    ("q", lambda q: q[..., :24], r"q\.shape\[2\] \(head_dim_qk\) must be a multiple of 8 in \[32, 576\], got 24"),
    ("q", lambda q: q.repeat(1, 1, 10), r"q\.shape\[2\] \(head_dim_qk\) must be a multiple of 8 .* got 640"),
    ("out", lambda o: o.half(), "out must have dtype bfloat16 as q, got float16"),
    ("out", lambda o: o[:-1], r"out\.shape\[0\] \(num_q_tokens\) must be 13 as in q, got 12"),
    ("out", lambda o: o[..., :60], r"out\.shape\[2\] \(head_dim_v\) must be a multiple of 8 .* got 60"),
    ("out", strided, r"out\.stride\(2\) must be 1"),
    ("lse", lambda x: x.double(), "lse must have dtype float32, got float64"),
    ("lse", lambda x: x[:, :5], r"lse\.shape\[1\] \(num_q_heads\) must be 8 as in q, got 5"),
    ("lse", strided, "lse must be contiguous"),
    ("cu_seqlens_q", lambda x: x.long(), "cu_seqlens_q must have dtype int32, got int64"),
    ("cu_seqlens_q", lambda x: x.view(1, -1), "cu_seqlens_q must have 1 dimensions, got 2"),
    ("cu_seqlens_q", lambda x: x[:0], r"cu_seqlens_q\.shape\[0\] \(batch_size \+ 1\) must be at least 1"),
    ("cu_seqlens_q", strided, "cu_seqlens_q must be contiguous"),
    ("cu_seqlens_q", lambda x: x * 2, r"cu_seqlens_q\[2\] must be in \[8, 13\], got 26"),
    ("cu_seqlens_q", lambda x: x.flip(0), r"cu_seqlens_q\[1\] must be in \[13, 13\], got 4"),
    ("tile_order", lambda x: x.long(), "tile_order must have dtype int32, got int64"),
    ("tile_order", lambda x: x[:, :1].contiguous(), r"tile_order\.shape\[1\] \(request, tile\) must be 2 .* got 1"),
    ("tile_order", lambda x: x[:1], r"tile_order\.shape\[0\] \(max_tiles\) must be at least 3 .* got 1"),
    ("tile_order", strided, "tile_order must be contiguous"),
    ("tile_order", lambda x: x * 0 - 1, "tile_order is not the plan of these cu_seqlens_q .* 0 tiles, expected 2"),
    ("tile_order", lambda x: x * 0 + 1, "tile_order is not the plan of these cu_seqlens_q .* a tile outside the batch"),
    ("tile_q", lambda _: 0, r"tile_q must be in \[1, 1024\], got 0"),
    ("tile_q", lambda _: 4096, r"tile_q must be in \[1, 1024\], got 4096"),
    ("softmax_scale", lambda _: float("nan"), "softmax_scale must be finite, got nan"),
    ("window_left", lambda _: -2, r"window_left must be in \[-1, 2147483647\], got -2"),
    ("window_right", lambda _: 2**31, r"window_right must be in \[-1, 2147483647\], got 2147483648"),
    ("logit_cap", lambda _: -1.0, r"logit_cap must be 0 \(off\) or positive, got -1"),
    ("logit_cap", lambda _: float("inf"), "logit_cap must be finite, got inf"),
    ("causal", lambda _: False, "causal must be True with tree_mask"),
    ("sinks", lambda x: x[:3], r"sinks\.shape\[0\] \(num_q_heads\) must be 8 as in q, got 3"),
    ("sinks", lambda x: x.bfloat16(), "sinks must have dtype float32, got bfloat16"),
    ("sinks", strided, "sinks must be contiguous"),
    ("tree_mask", lambda x: x.bool(), "tree_mask must have dtype uint8, got bool"),
    ("tree_mask", lambda x: x[:-1], r"tree_mask\.shape\[0\] \(num_q_tokens\) must be 13 as in q, got 12"),
    ("tree_mask", lambda x: x[:, :1], r"tree_mask\.shape\[1\] \(mask_bytes\) must be at least 2 .* request 1\), got 1"),
    ("tree_mask", strided, r"tree_mask\.stride\(1\) must be 1"),
    ("k_scale", lambda _: torch.ones(3), r"k_scale\.shape\[0\] must be 1 or 2 \(num_kv_heads\) as in k\w*, got 3"),
    ("k_scale", lambda x: x.double(), "k_scale must have dtype float32, got float64"),
    ("k_scale", strided, "k_scale must be contiguous"),
    ("v_scale", lambda x: x.view(1, 1), "v_scale must have 1 dimensions, got 2"),
    ("report", lambda x: x[:4], r"report\.shape\[0\] \(report_size\) must be 8 as in core/report\.h, got 4"),
    ("report", lambda x: x.long(), "report must have dtype int32, got int64"),
]
VARLEN_ERRORS = [
    ("k", lambda k: k.half(), "k must have dtype bfloat16 or float8_e4m3fn or float8_e5m2, got float16"),
    ("k", lambda k: k[..., :40], r"k\.shape\[2\] \(head_dim_qk\) must be 64 as in q, got 40"),
    ("k", lambda k: k.repeat(1, 3, 1)[:, :3], r"v\.shape\[1\] \(num_kv_heads\) must be 3 as in k, got 2"),
    ("k", strided, r"k\.stride\(2\) must be 1"),
    ("v", lambda v: v[:-2], r"v\.shape\[0\] \(num_k_tokens\) must be 19 as in k, got 17"),
    ("v", lambda v: v.to(torch.float8_e4m3fn), "v must have dtype bfloat16 as k, got float8_e4m3fn"),
    ("v", lambda v: v[..., :40], r"v\.shape\[2\] \(head_dim_v\) must be 64 as in out, got 40"),
    ("v", strided, r"v\.stride\(2\) must be 1"),
    (
        "cu_seqlens_k",
        lambda x: x[:2],
        r"cu_seqlens_k\.shape\[0\] \(batch_size \+ 1\) must be 3 as in cu_seqlens_q, got 2",
    ),
    ("cu_seqlens_k", lambda x: x.float(), "cu_seqlens_k must have dtype int32, got float32"),
    ("cu_seqlens_k", lambda x: x + 1, r"cu_seqlens_k\[2\] must be in \[11, 19\], got 20"),
    ("cu_seqlens_k", strided, "cu_seqlens_k must be contiguous"),
]
PAGED_ERRORS = [
    ("k_pages", lambda k: k.float(), "k_pages must have dtype bfloat16 or float8_e4m3fn or float8_e5m2, got float32"),
    ("k_pages", lambda k: k[0], "k_pages must have 4 dimensions, got 3"),
    ("k_pages", lambda k: k[..., :40], r"k_pages\.shape\[3\] \(head_dim_qk\) must be 64 as in q, got 40"),
    ("k_pages", strided, r"k_pages\.stride\(3\) must be 1"),
    ("v_pages", lambda v: v[1:], r"v_pages\.shape\[0\] \(num_pages\) must be \d+ as in k_pages, got \d+"),
    ("v_pages", lambda v: v[:, :3], r"v_pages\.shape\[1\] \(page_size\) must be 4 as in k_pages, got 3"),
    ("v_pages", lambda v: v.half(), "v_pages must have dtype bfloat16 as k_pages, got float16"),
    ("page_table", lambda x: x.long(), "page_table must have dtype int32, got int64"),
    ("page_table", lambda x: x[:1], r"page_table\.shape\[0\] \(batch_size\) must be 2 as in cu_seqlens_q, got 1"),
    ("page_table", lambda x: x[0], "page_table must have 2 dimensions, got 1"),
    ("page_table", strided, r"page_table\.stride\(1\) must be 1"),
    ("cache_seqlens", lambda x: x.long(), "cache_seqlens must have dtype int32, got int64"),
    ("cache_seqlens", lambda x: x[:1], r"cache_seqlens\.shape\[0\] \(batch_size\) must be 2 as in cu_seqlens_q, got 1"),
]


def named(errors):
    return [pytest.param(*error, id=f"{i}-{error[0]}") for i, error in enumerate(errors)]


@pytest.mark.parametrize("argument, change, message", named([*COMMON_ERRORS, *VARLEN_ERRORS]))
def test_varlen(argument, change, message):
    with pytest.raises(RuntimeError, match="attnops::fmha_varlen: " + message):
        call_varlen(**{argument: change})


@pytest.mark.parametrize("argument, change, message", named([*COMMON_ERRORS, *PAGED_ERRORS]))
def test_paged(argument, change, message):
    with pytest.raises(RuntimeError, match="attnops::fmha_paged: " + message):
        call_paged(**{argument: change})


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call_varlen, call_paged])
@pytest.mark.parametrize("argument", ["out", "lse", "cu_seqlens_q", "tile_order", "sinks", "tree_mask", "v_scale"])
def test_devices_must_agree(call, argument):
    """One argument on the GPU, the others not; the op of the GPU answers."""
    with pytest.raises(RuntimeError, match=f"{argument} must be on cpu as q, got cuda:0"):
        call(**{argument: lambda x: x.cuda()})


def test_csr():
    call_paged(csr=True)
    with pytest.raises(
        RuntimeError, match=r"kv_indptr\.shape\[0\] \(batch_size \+ 1\) must be 3 as in cu_seqlens_q, got 2"
    ):
        call_paged(csr=True, kv_indptr=lambda x: x[:2])
    with pytest.raises(RuntimeError, match="kv_indptr must have dtype int32, got int64"):
        call_paged(csr=True, kv_indptr=lambda x: x.long())
    with pytest.raises(RuntimeError, match="page_table must have 1 dimensions, got 2"):
        call_paged(csr=True, page_table=lambda x: x.view(1, -1))


def test_heads_must_divide():
    with pytest.raises(RuntimeError, match=r"q\.shape\[1\] \(num_q_heads\) must be a multiple of 2, .* got 7"):
        call_varlen(
            q=lambda q: q[:, :7], out=lambda o: o[:, :7], lse=lambda x: x[:, :7].contiguous(), sinks=lambda x: x[:7]
        )
    with pytest.raises(RuntimeError, match=r"must be a multiple of 0, the num_kv_heads of k, got 8"):
        call_varlen(k=lambda k: k[:, :0], v=lambda v: v[:, :0])


def test_the_unchanged_calls_are_right():
    """The tables above break calls that work."""
    call_varlen()
    call_paged()


def test_a_plan_of_another_geometry_is_refused():
    problem = ragged_problem([4, 9], padding=0)
    plan = plan_of(problem, window_left=5)
    inputs = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)
    with pytest.raises(ValueError, match=r"FmhaPlan .* window_left 5, the call has -1$"):
        ops.fmha_varlen(*inputs, plan)
    with pytest.raises(ValueError, match=r"causal True, the call has False; window_left 5, the call has 6$"):
        ops.fmha_varlen(*inputs, plan, causal=False, window_left=6)
    pages = paged_problem([10, 9], [4, 9])
    with pytest.raises(ValueError, match="causal True, the call has False"):
        ops.fmha_paged(
            pages.q,
            pages.k_pages,
            pages.v_pages,
            pages.page_table,
            pages.cache_seqlens,
            pages.cu_seqlens_q,
            plan,
            causal=False,
            window_left=5,
        )


def test_a_stale_plan_is_refused_on_the_cpu():
    problem = ragged_problem([4, 200], padding=0)
    plan = FmhaPlan.allocate(204, 2)
    inputs = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)
    with pytest.raises(RuntimeError, match="tile_order is not the plan of these cu_seqlens_q with tile_q 64: 0 tiles"):
        ops.fmha_varlen(*inputs, plan)
    ops.fmha_plan(plan, torch.tensor([0, 100, 204], dtype=torch.int32))
    with pytest.raises(
        RuntimeError, match=r"tile_order is not the plan of these cu_seqlens_q .* a tile outside the batch"
    ):
        ops.fmha_varlen(*inputs, plan)
