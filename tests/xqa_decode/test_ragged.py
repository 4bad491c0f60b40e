"""`xqa_decode` over ragged requests (`cu_seqlens_q`), on every device, against float64 over poisoned pages."""

import dataclasses
import math

import pytest
import torch
from attnops import info, ops
from attnops.metadata import FmhaPlan
from checks import assert_attention_close, assert_lse_close
from problems import FP8, HUGE_INDEX, paged_problem
from xqa_decoding import make_plan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS, TOKENS = [300, 7, 65, 40, 1000, 128, 3], [1, 3, 0, 4, 2, 4, 3]


def attend(problem, most, *, padding=0, csr=False, parts=3, fixed=0, plan=None, **options):
    """(out, lse) with NaN in the rows of q behind the last request, and in what is written."""
    q = torch.cat([problem.q, problem.q.new_full((padding, *problem.q.shape[1:]), math.nan)])
    cuts = {"fixed_split_tokens": fixed, "max_seqlen_k": 4096} if fixed else {}
    plan = plan or make_plan(problem, seqlen_q=most, num_sm_parts=parts, **cuts)
    plan.out_partial.fill_(math.nan)  # what unwritten rows may hold
    plan.lse_partial.fill_(math.nan)
    out, lse = torch.full_like(q, math.nan), q.new_full(q.shape[:2], math.nan, dtype=torch.float32)
    ops.xqa_decode(
        q,
        problem.k_pages,
        problem.v_pages,
        problem.kv_indices if csr else problem.page_table,
        problem.cache_seqlens,
        plan,
        kv_indptr=problem.kv_indptr if csr else None,
        cu_seqlens_q=problem.cu_seqlens_q,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        out=out,
        lse=lse,
        **options,
    )
    assert not plan.semaphores.any(), "semaphores must be zero after a call"
    return out, lse


def check(problem, most, *, padding=0, bound=None, **options):
    rules = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    rules = {k: v for k, v in rules.items() if k not in ("csr", "parts", "fixed", "plan")}
    expected_out, expected_lse = problem.expected(**rules)
    out, lse = attend(problem, most, padding=padding, **options)
    tokens = problem.q.shape[0]
    assert_attention_close(out[:tokens].cpu(), expected_out, problem.q.dtype, bound)
    assert_lse_close(lse[:tokens].cpu(), expected_lse, 1e-3 if problem.k_pages.dtype == FP8 else 1e-4)
    assert (out[tokens:] == 0).all() and (lse[tokens:] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_kernel(page_size, head_dim, dtype, kv_dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("a GPU serves 16-bit queries")
    problem = paged_problem(LENGTHS, TOKENS, head_dim=head_dim, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    for parts in (3, None):
        check(problem.to(device), 4, padding=5, parts=parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "heads,most",
    [((8, 1), 1), ((32, 8), 4), ((8, 8), 16), ((6, 2), 9), ((64, 8), 4), ((31, 1), 1), ((8, 1), 8), ((4, 4), 50)],
)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("csr", [False, True])
def test_rows(csr, kv_dtype, heads, most, device):
    """One to 64 rows: with and without rows that are nobody's, and requests without any token."""
    generator = torch.Generator().manual_seed(most)
    lengths = torch.randint(most, 900, (12,), generator=generator).tolist()
    tokens = torch.randint(0, most + 1, (12,), generator=generator).tolist()
    problem = paged_problem(
        lengths, tokens, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, kv_dtype=kv_dtype
    )
    for parts in (7, None):
        check(problem.to(device), most, csr=csr, parts=parts, padding=most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size,kv_dtype", [(1, None), (16, None), (3, FP8), (64, FP8)])
@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 128])
def test_more_than_32_rows(head_dim, page_size, kv_dtype, device):
    problem = paged_problem(
        [2100, 70, 9, 130, 64, 700], [8, 1, 6, 0, 5, 7], head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype,
        num_q_heads=14, num_kv_heads=2,
    )  # fmt: skip
    for parts in (3, None):
        check(problem.to(device), 8, padding=3, parts=parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 2, 5, 40])
def test_few_and_many_requests(batch, device):
    """Short calls by clusters, and by parts of the plan."""
    problem = paged_problem([129 + 3 * b for b in range(batch)], [b % 4 for b in range(1, batch + 1)], head_dim=128)
    check(problem.to(device), 3, parts=None, padding=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"causal": False}, {"logit_cap": 3.0}, {"sinks": 8}], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("parts", [3, None])
def test_options(parts, kv_dtype, options, device):
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1, 1, 8, device=device)}
    problem = paged_problem(LENGTHS, TOKENS, head_dim=128, kv_dtype=kv_dtype).to(device)
    check(problem, 5, parts=parts, **options)


@pytest.mark.parametrize("fixed", [128, -3])
def test_batch_invariant_plans(fixed):
    check(paged_problem(LENGTHS, TOKENS, head_dim=128), 4, fixed=fixed, padding=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change,message",
    [
        ({"fixed": 128}, "takes balanced plans, got fixed_split_tokens"),
        ({"most": 17}, "takes max_seqlen_q \\* group up to 64, got 68"),
        ({"report": 8}, "has no checked mode, got report"),
    ],
    ids=str,
)
def test_what_hopper_has_no_kernel_for_is_named(change, message):
    problem = paged_problem(LENGTHS, TOKENS, head_dim=128).to("cuda")
    if "report" in change:
        change = {"report": torch.zeros(8, dtype=torch.int32, device="cuda")}
    with pytest.raises(RuntimeError, match=message):
        attend(problem, **{"most": 4, **change})


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_even_tokens_have_the_bits_of_an_even_call(kv_dtype):
    problem = paged_problem(LENGTHS[:2], 3, head_dim=128, kv_dtype=kv_dtype)
    out, lse = attend(problem, 3)
    even, even_lse = ops.xqa_decode(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens,
        make_plan(problem, seqlen_q=3),
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        return_lse=True,
    )
    assert torch.equal(out, even) and torch.equal(lse, even_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("bounds", [[0, HUGE_INDEX, -5, 9], [-7, -7, -7, -7], [9, 3, 1, 0], [0, 9, 9, HUGE_INDEX]])
def test_bounds_may_hold_anything(bounds, kv_dtype):
    """Nothing outside the batch is read or written, and the next call is right."""
    problem = paged_problem([200, 50, 9], [3, 3, 3], head_dim=128, kv_dtype=kv_dtype).to("cuda")
    wrong = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    attend(dataclasses.replace(problem, cu_seqlens_q=wrong), 3, parts=None)
    check(problem, 3, parts=None)


@pytest.mark.parametrize("bounds", [[0, 1, 9, 9], [0, 3, 2, 9], [-1, 3, 6, 9], [0, 3, 6, 10]])
def test_wrong_bounds_are_errors_on_a_cpu(bounds):
    problem = paged_problem([200, 50, 9], [3, 3, 3])
    wrong = dataclasses.replace(problem, cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"attnops::xqa_decode: cu_seqlens_q\[\d\] must be in \["):
        attend(wrong, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_named(device):
    problem = paged_problem([20, 30], [1, 2]).to(device)
    plan = make_plan(problem, seqlen_q=2)
    mask = torch.ones(3, 1, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="tree_mask must be absent with cu_seqlens_q"):
        attend(problem, 2, plan=plan, tree_mask=mask)
    windowed = make_plan(problem, seqlen_q=2, window_left=4)
    with pytest.raises(RuntimeError, match="window_left must be -1 with cu_seqlens_q, got 4"):
        attend(problem, 2, plan=windowed, window_left=4)
    with pytest.raises(ValueError, match=r"q must be \[T, H_q, D\]"):
        attend(dataclasses.replace(problem, q=problem.q.unsqueeze(0)), 2, plan=plan)


@pytest.mark.parametrize("device", DEVICES)
def test_no_token_at_all(device):
    problem = paged_problem([20, 30], [0, 0]).to(device)
    out, _ = attend(problem, 2)
    assert out.shape[0] == 0
    check(problem, 2, padding=3)


def _decodes() -> int:
    return sum(count for row, count in info.kernel_counts().items() if row.startswith("cuda xqa_decode "))


def prefill(problem, plan, padding=0, **options):
    q = torch.cat([problem.q, problem.q.new_full((padding, *problem.q.shape[1:]), math.nan)])
    return ops.fmha_paged(
        q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens,
        problem.cu_seqlens_q,
        plan,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        return_lse=True,
        **options,
    )


def prefill_plan(problem, most, tokens=100, **options) -> FmhaPlan:
    heads = {"num_q_heads": problem.q.shape[1], "num_kv_heads": problem.k_pages.shape[2], "head_dim": 128}
    return FmhaPlan.allocate(tokens, problem.batch_size, **heads, max_seqlen_q=most, device="cuda", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("padding", [0, 3])
def test_prefill_of_few_tokens_goes_this_way(padding, kv_dtype):
    problem = paged_problem(LENGTHS, TOKENS, head_dim=128, kv_dtype=kv_dtype).to("cuda")
    plan = prefill_plan(problem, 4)
    assert plan.decode is not None and plan.decode.seqlen_q == 4
    ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    before, tokens = _decodes(), problem.q.shape[0]
    out, lse = prefill(problem, plan, padding)
    assert _decodes() == before + 1
    expected_out, expected_lse = problem.expected()
    assert_attention_close(out[:tokens].cpu(), expected_out, BF16)
    assert_lse_close(lse[:tokens].cpu(), expected_lse, 1e-3)
    assert (out[tokens:] == 0).all() and (lse[tokens:] == -math.inf).all()


@pytest.mark.gpu
def test_a_plan_without_lengths_is_of_prompts_alone():
    problem = paged_problem([3, 1, 4, 2], [3, 1, 4, 2], head_dim=128).to("cuda")
    plan = prefill_plan(problem, 4)
    ops.fmha_plan(plan, problem.cu_seqlens_q)
    before = _decodes()
    out, _ = prefill(problem, plan)
    assert _decodes() == before + 1
    assert_attention_close(out.cpu(), problem.expected()[0], BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["many rows", "a window", "no cuts", "hidden keys", "odd rows", "checked", "traced"])
def test_prefill_goes_its_own_way(why):
    problem = paged_problem(LENGTHS, TOKENS, head_dim=128).to("cuda")
    window = 5 if why == "a window" else -1
    limits = (100, 1000) if why == "many rows" else (4, 100)  # too many chunks for the requests
    plan = prefill_plan(problem, *limits, window_left=window, split_keys=why != "no cuts")
    ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    options = {"window_left": window}
    if why == "hidden keys":
        options["hidden_keys"] = torch.zeros(problem.q.shape[0], 2, dtype=torch.int32, device="cuda")
    if why == "checked":
        options["report"] = torch.zeros(8, dtype=torch.int32, device="cuda")
    if why == "odd rows":
        pages = [torch.nn.functional.pad(pool, (0, 4))[..., :128] for pool in (problem.k_pages, problem.v_pages)]
        problem = dataclasses.replace(problem, k_pages=pages[0], v_pages=pages[1])
    before = _decodes()
    call = torch.compile(prefill, backend="eager", fullgraph=True) if why == "traced" else prefill
    out, _ = call(problem, plan, **options)
    assert _decodes() == before
    assert_attention_close(out.cpu(), problem.expected(window_left=window)[0], BF16)
