"""Tiles whose keys are cut where SMs would idle: the plan's choice, and the merged results on a GPU."""

import dataclasses
import random

import pytest
import torch
from attnops import ops
from attnops.explain_prefill import prefill_plan
from attnops.metadata import FmhaPlan
from checks import MAX_RELATIVE_ERROR_FP8, assert_attention_close, assert_lse_close
from fmha_calls import assert_same_bits, filled, plan_of, run, split_plan
from problems import FP8, paged_problem, ragged_problem

SMS, NEVER = 132, 2**31 - 1


def cuts_of(seqlens_q, seqlens_k, *, tile_q=32, works=8, num_sms=SMS, **options):
    """{(request, tile): pieces} and the limit, after the rows were checked."""
    order, pieces = prefill_plan(seqlens_q, seqlens_k, tile_q=tile_q, works=works, num_sms=num_sms, **options)
    count, limit = pieces[0, :2].tolist()
    rows = pieces[1 : 1 + count].tolist()
    cuts = {}
    for request, tile, number, of in rows:
        assert cuts.setdefault((request, tile), of) == of and number < of
    assert len(rows) == sum(cuts.values())
    assert rows == [[*tile, i, n] for tile, n in cuts.items() for i in range(n)]
    assert list(cuts) == [tile for tile in map(tuple, order.tolist()) if tile in cuts]
    return cuts, limit


def test_a_short_chunk_on_a_long_prefix_fills_the_sms():
    cuts, limit = cuts_of([64], [65600])
    assert cuts == {(0, 1): 8, (0, 0): 8}  # 2 tiles of 8 works: 128 of 132 SMs
    assert limit == 65
    cuts, _ = cuts_of([16], [131000], tile_q=16, works=1)
    assert 120 <= cuts[0, 0] <= 132


@pytest.mark.parametrize(
    ("new", "keys"),
    [([16384], [16384]), ([1024], [1024]), ([512] * 8, [4608] * 8), ([512], [66048]), ([1], [100]), ([], [])],
)
def test_what_fills_the_sms_is_left_whole(new, keys):
    assert cuts_of(new, keys) == ({}, NEVER)


def test_one_long_request_among_short_ones_is_cut_alone():
    cuts, _ = cuts_of([2048, *[1] * 3], [2048, 60000, 100, 100])
    assert set(cuts) == {(1, 0)}


def test_of_alike_tiles_only_those_are_cut_that_fill_no_turn():
    """41 tiles of 4 works: 33 fill 132 SMs once, the 8 others become pieces."""
    cuts, limit = cuts_of([727], [79556], tile_q=18, works=4, causal=False)
    assert cuts == {(0, tile): 4 for tile in range(7, -1, -1)} and limit == 156
    cuts, _ = cuts_of([16] * 150, [30000] * 150, tile_q=16, works=1)
    assert len(cuts) == 18 and {request for request, _ in cuts} == set(range(132, 150))
    assert cuts_of([2] * 150, [30000] * 150, tile_q=16, works=1) == ({}, NEVER)  # few rows wait for memory
    assert cuts_of([16] * 150, [30000] * 150, tile_q=16, works=1, cut_in_part=False) == ({}, NEVER)  # head dim 64


def test_the_estimate_never_grows_by_cutting():
    """The longest work, and all units over all SMs, bound what cuts may do."""
    for seed in range(200):
        r = random.Random(seed)
        batch = r.choice([1, 1, 2, 5, 30])
        new = [r.choice([0, 1, 30, 64, 300, 1000]) for _ in range(batch)]
        keys = [n + r.choice([0, 100, 3000, 30000, 100000]) for n in new]
        works, tile_q = r.choice([1, 2, 8, 32, 100]), r.choice([16, 32, 128])
        max_pieces = 2 * SMS // works
        cuts, limit = cuts_of(new, keys, tile_q=tile_q, works=works, causal=r.random() < 0.7)
        assert sum(cuts.values()) <= max_pieces and (limit == NEVER) == (not cuts)
        assert all(n > 1 for n in cuts.values())


def test_errors():
    order, bounds = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    pieces = torch.zeros(5, 4, dtype=torch.int32)

    def fails(pattern, pieces, works=1, sms=132):
        with pytest.raises(RuntimeError, match="fmha_plan: " + pattern):
            torch.ops.attnops.fmha_plan(order, bounds, None, None, 16, True, -1, pieces, works, sms)

    fails("pieces must have dtype int32, got int64", pieces.long())
    fails(r"pieces\.shape\[1\] .* must be 4", pieces[:, :3].contiguous())
    fails(r"pieces\.shape\[0\] \(max_pieces \+ 1\) must be at least 2", pieces[:1])
    fails("pieces must be contiguous", torch.zeros(4, 5, dtype=torch.int32).t())
    fails(r"works_per_tile must be in \[1, 65536\], got 0", pieces, works=0)
    fails(r"num_sms must be in \[0, 4096\], got -1", pieces, sms=-1)
    fails("num_sms must be given with pieces on a CPU", pieces, sms=0)
    problem = ragged_problem([4], [9], padding=0)
    plan = plan_of(problem)
    with pytest.raises(RuntimeError, match="fmha_varlen: pieces must be None on a CPU, which cuts no tile"):
        torch.ops.attnops.fmha_varlen(
            *(torch.empty_like(problem.q), None, problem.q, problem.k, problem.v, problem.cu_seqlens_q),
            *(problem.cu_seqlens_k, plan.tile_order, plan.tile_q, 0.1),
            pieces=pieces,
        )


def test_no_scratch_without_need():
    assert FmhaPlan.allocate(64, 2, num_q_heads=8, num_kv_heads=2).pieces is None


def run_paged(problem, plan, **options):
    ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    return ops.fmha_paged(
        *(problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q),
        plan,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        return_lse=True,
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "seed"), [*(("90", s) for s in range(40)), *(("80", s) for s in range(24))])
def test_cut_tiles_are_right(arch, seed, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", arch)
    r = random.Random(seed)
    batch = r.choice([1, 1, 2, 4])
    new = [r.choice([1, 2, 17, 64, 130]) for _ in range(batch)]
    keys = [n + r.choice([0, 700, 3000, 9000]) for n in new]
    keys[0] = new[0] + r.choice([2000, 9000])
    kv_heads, head_dim = r.choice([1, 2, 3, 8]), r.choice([64, 80, 128, 192, 256])
    problem = paged_problem(
        keys,
        new,
        num_q_heads=kv_heads * r.choice([1, 4, 7, 16]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=r.choice([1, 16, 24, 64]),
        kv_dtype=r.choice([None, None, FP8]),
        seed=seed,
    ).to("cuda")
    options = {
        "causal": r.random() < 0.8,
        "window_left": r.choice([-1, -1, 100, 5000]),
        "logit_cap": r.choice([0.0, 0.0, 30.0]),
    }
    if r.random() < 0.4:
        options["sinks"] = torch.randn(problem.q.shape[1], device="cuda")
    plan = split_plan(problem, causal=options["causal"], window_left=options["window_left"])
    out, lse = run_paged(problem, plan, **options)
    expected_out, expected_lse = problem.expected(
        **{k: v.cpu() if torch.is_tensor(v) else v for k, v in options.items()}
    )
    assert_attention_close(out.cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse)
    assert not plan.semaphores.any()
    for _ in range(3):
        again, _ = run_paged(problem, plan, **options)
        assert torch.equal(again, out)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [False, True])
def test_rows_of_the_output_may_start_anywhere(pages, monkeypatch):
    """Of the kernels of sm_80. The merge of pieces stores eight bytes at a time, so such calls are not cut."""
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", "80")
    heads = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 80}
    problem = (paged_problem([9003], [3], page_size=7, **heads) if pages else ragged_problem([3], [9003], **heads)).to(
        "cuda"
    )
    out = torch.full((problem.q.shape[0], 4, 83), torch.nan, dtype=problem.q.dtype, device="cuda")[:, :, 3:]
    plan = filled(split_plan(problem), problem)
    assert plan.pieces[0, 0] > 0
    found, lse = run(problem, plan=plan, out=out)
    expected_out, expected_lse = problem.expected()
    assert_attention_close(found.cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("cap", [2.0, 50.0, 90.0])
def test_capped_scores_of_any_size(cap, head_dim):
    """Small ones have polynomials of degree three and five. Exponents up to 80 need no reference, those of 90 do."""
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    problem = ragged_problem([300, 130], [1300, 2100], head_dim=head_dim, dtype=torch.bfloat16, **heads).to("cuda")
    plan = filled(split_plan(problem), problem)
    for scale in (0.02, 0.3, 1.0, 5.0, -0.4, 0.0):
        options = {"logit_cap": cap, "softmax_scale": scale}
        out, lse = run(problem, plan=plan, **options)
        expected_out, expected_lse = problem.expected(**options)
        assert_attention_close(out.cpu(), expected_out, torch.bfloat16)
        assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_plain_calls_have_the_bits_of_others(head_dim, dtype):
    """A scale of keys, which only the device knows, takes the kernel that has every option."""
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    problem = ragged_problem([300, 130, 70], [1300, 2100, 70], head_dim=head_dim, dtype=dtype, **heads).to("cuda")
    ones = torch.ones(2, device="cuda")
    for options in ({}, {"window_left": 200}, {"causal": False}):
        plan = filled(split_plan(problem, **options), problem)
        assert_same_bits(run(problem, plan=plan, **options), run(problem, plan=plan, k_scale=ones, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(1.0, 0.7), (-0.5, 0.0)])
@pytest.mark.parametrize("dtype, kv_dtype", [(FP8, None), (torch.bfloat16, FP8), (torch.float16, FP8)])
@pytest.mark.parametrize("options", [{}, {"causal": False}])
def test_plain_calls_of_fp8_keys_take_any_scale(scales, dtype, kv_dtype, options):
    """Intervals that hide no key take the kernel that has every option. With a window they also move its first tile."""
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    problem = ragged_problem([300, 130, 70], [1300, 2100, 70], head_dim=128, dtype=dtype, kv_dtype=kv_dtype, **heads)
    problem = problem.to("cuda")
    given = {"plan": filled(split_plan(problem, **options), problem), "k_scale": torch.tensor(scales, device="cuda")}
    none = torch.zeros(problem.q.shape[0], 2, dtype=torch.int32, device="cuda")
    assert_same_bits(run(problem, **given, **options), run(problem, **given, **options, hidden_keys=none))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_tiles_before_full_turns_are_cut_alone(seed):
    """With an SM less than works, the works of one tile are cut. Kernels run a plan for any number of SMs."""
    r = random.Random(seed)
    dtype = r.choice([torch.bfloat16, torch.bfloat16, torch.float16, FP8])
    heads = {"num_q_heads": 2 * r.choice([1, 4, 7]), "num_kv_heads": 2}
    batch, new = r.choice([(1, 300), (2, 270), (5, 130)])
    problem = paged_problem(
        [new + r.choice([1500, 2900])] * batch,
        new,
        **heads,
        head_dim=r.choice([64, 80, 128, 192, 256]),
        page_size=r.choice([1, 16, 24, 64]),
        dtype=dtype,
        kv_dtype=r.choice([None, FP8]),
        seed=seed,
    ).to("cuda")
    options = {"causal": r.random() < 0.6, "logit_cap": r.choice([0.0, 0.0, 30.0])}
    plan = split_plan(problem, causal=options["causal"])
    tiles, works = batch * -(-new // plan.tile_q), plan.works_per_tile
    keys = (problem.cu_seqlens_q, None, problem.cache_seqlens)
    shape = (plan.tile_q, plan.causal, -1, plan.pieces, works, tiles * works - 1)
    torch.ops.attnops.fmha_plan(plan.tile_order, *keys, *shape)
    count, _, first, _ = plan.pieces[0].tolist()
    assert count > 0 and first == tiles - 1 > 0
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    args = (problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
    found = [ops.fmha_paged(*args, keys[0], plan, return_lse=True, **scales, **options) for _ in range(3)]
    expected_out, expected_lse = problem.expected(**options)
    fp8 = dtype == FP8
    bound = MAX_RELATIVE_ERROR_FP8 if fp8 else None
    assert_attention_close(found[0][0].cpu(), expected_out, problem.q.dtype, bound)
    assert_lse_close(found[0][1].cpu(), expected_lse, 1e-2 if fp8 else 1e-4)
    assert all(torch.equal(out, found[0][0]) for out, _ in found[1:])
    assert not plan.semaphores.any()


@pytest.mark.gpu
def test_cuts_happen_and_replays_follow_the_lengths():
    """One graph of plan and call serves any lengths: with cuts and without."""
    problem = paged_problem([9000, 50], [40, 50], head_dim=128, num_q_heads=8, num_kv_heads=2, page_size=64).to("cuda")
    plan = split_plan(problem)
    run_paged(problem, plan)
    assert plan.pieces[0, 0] > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run_paged(problem, plan)
    r = random.Random(0)
    cut = 0
    for _ in range(1000):
        problem.cache_seqlens[0] = r.choice([40, 41, 128, 500, 3000, r.randint(40, 9000), 9000])
        graph.replay()
        if r.random() < 0.02:
            cut += int(plan.pieces[0, 0] > 0)
            eager = split_plan(problem, split_keys=False)
            torch.testing.assert_close(out, run_paged(problem, eager)[0], atol=2e-2, rtol=2e-2)
    assert cut > 0
    assert not plan.semaphores.any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 40, 128, 129, 300, 1024])
def test_a_gpu_cuts_as_the_planner_says(count):
    for seed in range(20):
        r = random.Random(seed)
        new = [r.choice([1, 64, 1000, 3000]) if r.random() < 12 / count else 0 for _ in range(count)]
        keys = [n + r.choice([0, 100, 5000, 100000]) for n in new]
        if seed % 4 == 0:  # alike: some of them are cut
            new, keys = [r.choice([9, 1000])] * count, [r.choice([3000, 50000])] * count
        works = r.choice([1, 2, 3, 16])
        bounds = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (new, keys)]
        found = []
        for device in ("cpu", "cuda"):
            order = torch.zeros(sum(-(-n // 64) for n in new) + 9, 2, dtype=torch.int32, device=device)
            pieces = torch.zeros(264 // works + 1, 4, dtype=torch.int32, device=device)
            limits = (*(b.to(device) for b in bounds), None, 64, True, -1)
            torch.ops.attnops.fmha_plan(order, *limits, pieces, works, SMS)
            found.append((order.cpu(), pieces[: 1 + int(pieces[0, 0])].cpu()))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.gpu
def test_hostile_pieces_end_nothing():
    problem = paged_problem([3000, 50], [40, 50], head_dim=128, page_size=64).to("cuda")
    plan = split_plan(problem)
    right, _ = run_paged(problem, plan)
    for fill in (-1, 0, 1, 7, 2**31 - 1, -(2**31)):
        plan.pieces.fill_(fill)
        torch.ops.attnops.fmha_paged(
            *(torch.empty_like(right), None, problem.q, problem.k_pages, problem.v_pages, problem.page_table, None),
            *(problem.cache_seqlens, problem.cu_seqlens_q, plan.tile_order, plan.tile_q, 0.1),
            semaphores=plan.semaphores,
            pieces=plan.pieces,
            partial=plan.partial,
        )
        torch.cuda.synchronize()
        assert not plan.semaphores.any()
    assert torch.equal(run_paged(problem, plan)[0], right)


@pytest.mark.gpu
def test_with_too_little_scratch_tiles_are_left_whole():
    problem = ragged_problem([40], [3000], head_dim=128, padding=0).to("cuda")
    plan = split_plan(problem)
    ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
    assert plan.pieces[0, 0] > 0
    whole = split_plan(problem, split_keys=False)
    ops.fmha_plan(whole, problem.cu_seqlens_q, problem.cu_seqlens_k)
    arguments = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)
    small = dataclasses.replace(plan, partial=plan.partial[:7])
    assert torch.equal(ops.fmha_varlen(*arguments, small)[0], ops.fmha_varlen(*arguments, whole)[0])
