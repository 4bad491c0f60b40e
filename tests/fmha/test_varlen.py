"""attnops::fmha_varlen on every device against float64; memory that belongs to no request holds NaN."""

import math

import pytest
import torch
import torch.nn.functional as F
from attnops import ops
from attnops.ops import _prefill_calls
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8, relative_error
from fmha_calls import assert_right, assert_same_bits, plan_of, run
from problems import E5M2, FP8, RaggedProblem, ragged_problem, random_tree_mask
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (128, 192), (40, 72), (256, 256)]
HEADS = [(1, 1), (3, 1), (3, 3), (10, 2), (7, 7), (8, 2), (128, 4), (300, 1)]  # (num_q_heads, num_kv_heads)
OPTIONS = [
    {"causal": False},
    {"window_left": 0},
    {"window_left": 40},
    {"window_left": 150, "logit_cap": 3.0},
    {"causal": False, "window_left": 33, "window_right": 7},
    {"causal": False, "window_right": 0},
    {"window_right": 50},
    {"logit_cap": 20.0, "softmax_scale": 0.5},
    {"softmax_scale": -0.1},
    {"softmax_scale": 0.0},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_head_dims(dims, dtype, device):
    problem = ragged_problem([70, 1, 9], [150, 33, 9], dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
    assert_right(problem.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dtype, device):
    problem = ragged_problem([67, 3], [67, 140], dtype=dtype, num_q_heads=heads[0], num_kv_heads=heads[1])
    assert_right(problem.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, dtype, device):
    assert_right(ragged_problem([5, 130, 200, 1], [5, 300, 200, 260], dtype=dtype).to(device), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_edge_lengths(causal, device):
    """Empty requests, requests without keys, and fewer keys than queries: rows before the first key see nothing."""
    problem = ragged_problem([0, 3, 7, 0, 66, 1, 128], [0, 0, 4, 5, 2, 1, 127], dtype=torch.float32).to(device)
    assert_right(problem, causal=causal, spare=1000)
    out, lse = run(problem, causal=causal)
    empty = slice(0, 6 if causal else 3)  # request 1 has no keys; the first three of request 2 are too early
    assert torch.equal(out[empty], torch.zeros_like(out[empty])) and (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP8])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("longest", [40, 300])
def test_many_short_requests(longest, dims, dtype, device):
    """Requests of a part of a tile, beside some without queries whose keys are NaN; Hopper brings small boxes."""
    lengths = [20, 0, 33, 1, 7, 0, longest, 3, 31, 5, 0, *[2] * 12]
    keys = [20, 9, 40, 1, 12, 31, longest, 3, 32, 5, 0, *[2] * 12]
    bounds = {}
    if dtype == FP8:
        bounds = {"bound": MAX_RELATIVE_ERROR[torch.bfloat16]}
        if device == "cuda":
            bounds = {"bound": MAX_RELATIVE_ERROR_FP8, "lse_atol": 1e-2}
    for num_q_heads, num_kv_heads in [(8, 2), (3, 3)]:
        heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
        problem = ragged_problem(lengths, keys, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], **heads)
        for request in (1, 5):
            mine = slice(*problem.cu_seqlens_k[request : request + 2].tolist())
            problem.k.view(torch.uint8)[mine], problem.v.view(torch.uint8)[mine] = 255, 255
        for options in ({}, {"causal": False, "window_left": 9}):
            assert_right(problem.to(device), **bounds, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_at_all(device):
    for lengths in ([], [0], [0, 0]):
        out, lse = run(ragged_problem(lengths, padding=0).to(device))
        assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_are_cleared(device):
    problem = ragged_problem([4, 9], padding=6).to(device)
    out, lse = torch.full_like(problem.q, math.nan), torch.full(problem.q.shape[:2], math.nan, device=device)
    run(problem, out=out, lse=lse)
    assert torch.equal(out[13:], torch.zeros_like(out[13:])) and (lse[13:] == -math.inf).all()
    assert out[:13].isfinite().all() and lse[:13].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_and_outputs(dtype, device):
    """q, k and v in one fused projection; out and its gaps in a wider tensor."""
    problem = ragged_problem([20, 77], dtype=dtype, strided=True).to(device)
    assert not problem.q.is_contiguous()
    assert_right(problem)
    wide = torch.full((problem.q.shape[0], 10, 72), math.nan, dtype=dtype, device=device)
    out, _ = run(problem, out=wide[:, 1:9, 8:])
    assert torch.equal(out, run(problem)[0])
    assert wide[:, 0].isnan().all() and wide[:, 9].isnan().all() and wide[..., :8].isnan().all(), "wrote in a gap"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window_left", [-1, 30])
def test_sinks(window_left, dtype, device):
    problem = ragged_problem([3, 90, 5], [3, 90, 0], dtype=dtype).to(device)
    sinks = torch.linspace(-3, 4, 8, device=device)
    sinks[3] = -math.inf  # no sink for this head
    assert_right(problem, sinks=sinks, window_left=window_left)
    plain = run(problem, window_left=window_left)[1]
    assert torch.equal(run(problem, sinks=sinks, window_left=window_left)[1], plain), "sinks changed the lse"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window_left": 12}, {"window_right": 1}], ids=str)
def test_tree_mask(options, dtype, device):
    lengths = [1, 13, 0, 200, 8]
    problem = ragged_problem(lengths, [1, 40, 9, 333, 8], dtype=dtype, padding=0).to(device)
    assert_right(problem, tree_mask=random_tree_mask(lengths).to(device), **options)


@pytest.mark.parametrize("device", DEVICES)
def test_tree_mask_rows_may_be_wide_and_strided(device):
    lengths = [9, 3]
    problem = ragged_problem(lengths, [30, 3], padding=0).to(device)
    mask = random_tree_mask(lengths).to(device)
    wide = torch.full((12, mask.shape[1] + 5), 255, dtype=torch.uint8, device=device)
    wide[:, 1 : 1 + mask.shape[1]] = mask
    out = run(problem, tree_mask=wide[:, 1:])[0]
    assert torch.equal(out, run(problem, tree_mask=mask)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window_left", [-1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_no_row_sees_may_hold_nan(dtype, window_left, device):
    """A tree mask without the token's own bit: masked means selected away, not multiplied by zero."""
    lengths = [9, 150]
    problem = ragged_problem(lengths, [30, 180], dtype=dtype, padding=0).to(device)
    mask = random_tree_mask(lengths).to(device)
    mask[:, 0] &= 0b11111011
    blind = problem.cu_seqlens_k[1:].long() - torch.tensor(lengths, device=device) + 2
    outs = []
    for value in (0.0, math.nan):
        problem.k[blind], problem.v[blind] = value, value
        outs.append(run(problem, tree_mask=mask, window_left=window_left))
    assert_same_bits(*outs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ["", "80"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_hidden_by_tree_or_window_may_hold_nan(dtype, arch, device, monkeypatch):
    """The tree leaves draft 2 to the rows before it alone, and their windows end at themselves."""
    if arch:
        monkeypatch.setenv("ATTNOPS_CUDA_ARCH", arch)
    lengths = [9, 150]
    problem = ragged_problem(lengths, [30, 180], dtype=dtype, padding=0).to(device)
    mask = random_tree_mask(lengths).to(device)
    mask[:, 0] &= 0b11111011
    firsts = problem.cu_seqlens_q[:-1].long()
    mask[torch.cat([firsts, firsts + 1]), 0] |= 0b100
    blind = problem.cu_seqlens_k[1:].long() - torch.tensor(lengths, device=device) + 2
    outs = []
    for value in (0.0, math.nan):
        problem.k[blind], problem.v[blind] = value, value
        outs.append(run(problem, tree_mask=mask, window_right=0))
    assert_same_bits(*outs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 128), (128, 48), (192, 128), (176, 192), (256, 256)])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_left": 70, "logit_cap": 30.0}], ids=str)
def test_fp8_queries(options, dims, device):
    """On the CPU they are bfloat16 rows, which hold every e4m3 value. Hopper rounds probabilities to e4m3, and its
    e4m3 products keep some 13 bits."""
    bounds = {"bound": MAX_RELATIVE_ERROR[torch.bfloat16]}
    if device == "cuda":
        bounds = {"bound": MAX_RELATIVE_ERROR_FP8, "lse_atol": 1e-2}
    lengths = [1, 130, 300], [40, 130, 777]
    problem = ragged_problem(*lengths, dtype=FP8, head_dim=dims[0], head_dim_v=dims[1]).to(device)
    assert_right(problem, **bounds, **options)
    assert run(problem, **options)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "hopper", "arch", "dtype"),
    [
        ("cuda", True, "", FP8),
        ("cuda", True, "90", FP8),
        ("cuda", True, "80", torch.bfloat16),
        ("cuda", False, "", torch.bfloat16),
        ("cpu", False, "", FP8),
    ],
)
def test_where_fp8_queries_become_bfloat16(device, hopper, arch, dtype, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", arch)
    monkeypatch.setattr(_prefill_calls, "runs_hopper_kernels", lambda device: hopper)
    with FakeTensorMode():
        q = torch.empty(3, 2, 64, dtype=torch.bfloat16, device=device)
        assert _prefill_calls.queries_of(q).dtype == torch.bfloat16
        assert _prefill_calls.queries_of(q.to(FP8)).dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_queries_take_their_scale_from_k_scale(device):
    problem = ragged_problem([90, 33], dtype=FP8, head_dim=128).to(device)
    scale = torch.tensor([0.5, 4.0], device=device)  # powers of two: no rounding
    out, lse = run(problem, k_scale=scale, softmax_scale=0.25)
    for head, factor in enumerate(scale.tolist()):
        mine = slice(4 * head, 4 * head + 4)
        expected, expected_lse = run(problem, k_scale=None, softmax_scale=0.25 * factor)
        assert_same_bits((out[:, mine], lse[:, mine]), (expected[:, mine], expected_lse[:, mine]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [FP8, E5M2])
def test_fp8_keys_and_values(dtype, kv_dtype, device):
    problem = ragged_problem([30, 100], [80, 140], dtype=dtype, kv_dtype=kv_dtype, head_dim=96).to(device)
    assert_right(problem)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_also_apply_to_16_bit_keys(per_head, device):
    problem = ragged_problem([30, 5], dtype=torch.float16)
    count = 2 if per_head else 1
    scales = {"k_scale": torch.linspace(0.5, -1.5, count), "v_scale": torch.linspace(2.0, -0.25, count)}
    problem = RaggedProblem(**{**vars(problem), **scales}).to(device)
    assert_right(problem)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_and_late_maxima(dtype, device):
    """Scores that grow along the keys by hundreds: the running reference must follow without overflow. A float32 score
    of 500 is itself known to 3e-5, which bounds what any float32 kernel can do."""
    problem = ragged_problem([40], [600], dtype=dtype, num_q_heads=2, num_kv_heads=1)
    ramp = torch.linspace(0.1, 8, problem.k.shape[0]).view(-1, 1, 1)
    k = (problem.q[:1, :1].float() * ramp).to(dtype)
    q = problem.q[:1].expand_as(problem.q).contiguous()
    problem = RaggedProblem(**{**vars(problem), "k": k, "q": q}).to(device)
    assert_right(problem, softmax_scale=1.0, bound=1e-4 if dtype == torch.float32 else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_sdpa(dtype, device):
    problem = ragged_problem([300], dtype=dtype, padding=0).to(device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (problem.q, problem.k, problem.v))
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    expected = problem.expected()[0]
    assert relative_error(run(problem)[0].cpu(), expected) <= 1.5 * relative_error(theirs.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_into_one_graph(device):
    problem = ragged_problem([20, 30], padding=0).to(device)
    plan = plan_of(problem)

    def layer(q, k, v, bounds):
        ops.fmha_plan(plan, bounds, bounds)
        return ops.fmha_varlen(q * 2, k, v, bounds, bounds, plan)[0] + 1

    arguments = (problem.q, problem.k, problem.v, problem.cu_seqlens_q)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), layer(*arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_schema(device):
    lengths = [3, 10]
    problem = ragged_problem(lengths, padding=0).to(device)
    plan = plan_of(problem)
    out, lse = torch.empty_like(problem.q), problem.q.new_empty(problem.q.shape[:2], dtype=torch.float32)
    inputs = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan.tile_order, plan.tile_q)
    op = torch.ops.attnops.fmha_varlen.default
    torch.library.opcheck(op, (out, None, *inputs, 0.1))
    options = {
        "window_left": 3,
        "window_right": 2,
        "logit_cap": 5.0,
        "sinks": torch.zeros(8, device=device),
        "tree_mask": random_tree_mask(lengths).to(device),
        "k_scale": torch.ones(2, device=device),
        "v_scale": torch.ones(1, device=device),
        "report": torch.zeros(8, dtype=torch.int32, device=device),
    }
    torch.library.opcheck(op, (out, lse, *inputs, 0.1), options)
