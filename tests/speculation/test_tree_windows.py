"""Windows beside tree masks count steps of the tree: every kernel and backend, against walks over parents."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops, reference
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, assert_attention_close, assert_lse_close, relative_error
from draft_trees import attention_over, draw_parents, masks_of_parents, seen_by_walks
from fmha_calls import plan_of
from gpu_steps import on_gpu
from mla_calls import SCALE, lse_tolerance, plan_for
from problems import FP8, hide_unseen, mla_problem, paged_problem
from steps import LIMITS, Model, make_step
from xqa_decoding import make_plan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [0, 1, 5, 63, 64, 150, 300]  # of prefixes
NODES = [2, 5, 8, 16, 33, 64]
WINDOWS = [-1, 0, 1, 3, 8, 40, 130, 400]  # -1: none


def draw(seed: int, nodes: int):
    """Trees of a batch, their masks, and keys that nobody sees."""
    rng = random.Random(seed)
    trees = [draw_parents(rng, nodes) for _ in LENGTHS]
    return trees, masks_of_parents(trees), rng.choice(WINDOWS)


def hide(problem, trees, window: int) -> None:
    """NaN in drafts that no row sees, and in keys before every window."""
    seen = [seen_by_walks(tree, prefix, window).any(0) for tree, prefix in zip(trees, LENGTHS)]
    widest = max(map(len, seen))
    hide_unseen(problem, torch.stack([torch.nn.functional.pad(row, (widest - len(row), 0)) for row in seen]))


def check(problem, trees, window: int, out, lse, *, scale: float, keys, lse_atol=1e-3) -> None:
    """`keys(b)`: the real K and V of request b."""
    nodes = len(trees[0])
    for b, (tree, prefix) in enumerate(zip(trees, LENGTHS)):
        rows = slice(b * nodes, (b + 1) * nodes)
        k, v = keys(b)
        seen = seen_by_walks(tree, prefix, window)
        unused = ~seen.any(0)
        k, v = k.masked_fill(unused.view(-1, 1, 1), 0), v.masked_fill(unused.view(-1, 1, 1), 0)
        expected, expected_lse = attention_over(problem.q[rows].cpu(), k, v, seen, scale=scale)
        assert_attention_close(out[rows].cpu(), expected, problem.q.dtype)
        assert_lse_close(lse[rows].cpu(), expected_lse, lse_atol)


def keys_of(problem):
    def take(b: int):
        parts = []
        for pages, scale in ((problem.k_pages, problem.k_scale), (problem.v_pages, problem.v_scale)):
            stored = reference.gather_tokens(pages.cpu(), problem.page_table.cpu(), b, int(problem.cache_seqlens[b]))
            parts.append(stored.double() * (1.0 if scale is None else scale.cpu().double().view(-1, 1)))
        return parts

    return take


XQA = [(32, 8, 128), (8, 1, 128), (64, 4, 64), (6, 2, 256), (5, 1, 40)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("heads", XQA, ids=str)
@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, None), (FP16, FP8), (FP32, None)], ids=str)
@pytest.mark.parametrize("fixed", [0, 128])
def test_xqa_decode(device, nodes, heads, dtype, kv_dtype, fixed):
    (q_heads, kv_heads, dim), seed = heads, nodes * 7 + heads[0] + fixed
    if device == "cpu" and nodes > 16 and q_heads > 8:
        pytest.skip("the same code as with fewer heads")
    trees, masks, window = draw(seed, nodes)
    lengths = [prefix + nodes for prefix in LENGTHS]
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": [1, 3, 16, 64][seed % 4]}
    problem = paged_problem(lengths, nodes, **shape, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
    hide(problem, trees, window)
    problem, take = problem.to(device), keys_of(problem)
    plan = make_plan(
        problem, seqlen_q=nodes, num_sm_parts=None if device == "cuda" else 3, window_left=window,
        fixed_split_tokens=fixed, max_seqlen_k=512,
    )  # fmt: skip
    call = (problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, plan)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    out, lse = ops.xqa_decode(
        *call, **scales, window_left=window, tree_mask=masks.to(device), softmax_scale=0.15, return_lse=True
    )
    check(problem, trees, window, out, lse, scale=0.15, keys=take)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("heads", [16, 3, 128])
@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, None), (FP16, None), (BF16, torch.uint8), (BF16, FP8)], ids=str)
@pytest.mark.parametrize("fixed", [0, 128])
def test_mla_decode(device, nodes, heads, dtype, kv_dtype, fixed):
    if device == "cpu" and nodes * heads > 200:
        pytest.skip("the same code as with fewer rows")
    seed = nodes * 5 + heads + fixed
    trees, masks, window = draw(seed, nodes)
    lengths, page_size = [prefix + nodes for prefix in LENGTHS], [1, 3, 16, 64][seed % 4]
    problem = mla_problem(
        lengths, nodes, num_q_heads=heads, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype, seed=seed
    )
    hide(problem, trees, window)
    whole = problem
    problem = problem.to(device)

    def take(b: int):
        rows = reference.gather_tokens(whole.kv_pages, whole.page_table, b, lengths[b])
        rows = reference.unpack_mla_fp8_rows(rows) if kv_dtype == torch.uint8 else rows.double()
        rows = (rows * (1.0 if whole.kv_scale is None else whole.kv_scale.double())).unsqueeze(1)
        return rows, rows[..., :512]

    plan = plan_for(problem, window_left=window, fixed=fixed, max_seqlen_k=512)
    out, lse = ops.mla_decode(
        problem.q_by_request, problem.kv_pages, problem.page_table, problem.cache_seqlens, plan,
        kv_scale=problem.kv_scale, window_left=window, tree_mask=masks.to(device), softmax_scale=SCALE, return_lse=True,
    )  # fmt: skip
    rows = (out.flatten(0, 1), lse.flatten(0, 1))
    check(problem, trees, window, *rows, scale=SCALE, keys=take, lse_atol=lse_tolerance(problem))


FMHA = [(32, 8, 128), (8, 2, 64), (4, 2, 256), (6, 1, 40)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ["", "80"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("heads", FMHA, ids=str)
@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, None), (FP16, None), (BF16, FP8), (FP32, None)], ids=str)
def test_fmha_paged(device, arch, nodes, heads, dtype, kv_dtype, monkeypatch):
    if device == "cpu" and (arch or (nodes > 16 and heads[0] > 8)):
        pytest.skip("a GPU's kernels, or the same code as with fewer heads")
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", arch)
    (q_heads, kv_heads, dim), seed = heads, nodes * 3 + heads[0]
    trees, masks, window = draw(seed, nodes)
    lengths = [prefix + nodes for prefix in LENGTHS]
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": [1, 3, 16, 64][seed % 4]}
    problem = paged_problem(lengths, nodes, **shape, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
    hide(problem, trees, window)
    problem, take = problem.to(device), keys_of(problem)
    plan = plan_of(problem, window_left=window, tile_q=[4, 16, 64][seed % 3])
    call = (problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
    out, lse = ops.fmha_paged(
        *call, problem.cu_seqlens_q, plan, k_scale=problem.k_scale, v_scale=problem.v_scale, window_left=window,
        tree_mask=masks.flatten(0, 1).to(device), softmax_scale=0.15, return_lse=True,
    )  # fmt: skip
    check(problem, trees, window, out, lse, scale=0.15, keys=take)


GQA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
CPU_BACKENDS = [("torch_native", False), ("intel_amx", False), ("trtllm_mha", False), ("flex_attention", False)]
CPU_BACKENDS += [("fa3", False), ("triton", False), ("torch_native", True), ("intel_amx", True), ("flashmla", True)]
CPU_BACKENDS += [("trtllm_mla", True), ("cutlass_mla", True), ("triton", True)]
GPU_BACKENDS = [("fa3", False), ("trtllm_mha", False), ("triton", False), ("torch_native", False), ("flashmla", True)]
GPU_BACKENDS += [("trtllm_mla", True), ("cutlass_mla", True), ("triton", True)]

PAGE_SIZES = {"cutlass_mla": 128, "trtllm_mla": 32, "flashmla": 64}


def check_backend(
    name: str, is_mla: bool, page_size: int, pool: bool, seed: int, device: str, nodes: int = 0, **more
) -> None:
    rng = random.Random(seed)
    nodes, window = nodes or rng.choice([2, 5, 16]), rng.choice([-1, 0, 2, 6, 30])
    options = {"page_size": PAGE_SIZES.get(name, page_size), "sliding_window_size": window, **more}
    spec = AttentionSpec.mla(4, **options) if is_mla else AttentionSpec(**{**GQA, **options})
    prefixes = [0, 70, 9]
    pool = pool and window >= 0
    model = Model("one", spec, scale=0.1, swa_pool=pool, options={"drop_window": pool})
    trees = [draw_parents(rng, nodes) for _ in prefixes]
    limits = type(LIMITS)(max_batch_size=8, max_seqlen=192, max_num_tokens=256, max_tokens_per_request=nodes)
    step = make_step(model, ForwardMode.TARGET_VERIFY, prefixes, [nodes] * 3, seed=seed, uniform=True, tree=trees)
    step = on_gpu(step) if device == "cuda" else step
    backend = get_backend_class(name)(spec, limits, device=device)
    backend.init_forward_metadata(step.batch)
    error = relative_error(step.run(backend).cpu(), step.expected)
    assert error <= MAX_RELATIVE_ERROR[spec.dtype], f"relative error {error:.3g}, window {window}"


@pytest.mark.parametrize("name, is_mla", CPU_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("pool", [False, True])
def test_every_backend(name, is_mla, page_size, pool):
    if is_mla and pool:
        pytest.skip("a pool for windows holds keys and values")
    if page_size != 16 and (name == "triton" or name in PAGE_SIZES):
        pytest.skip("takes pages of one size, or seconds in the interpreter")
    for seed in range(2 if name == "triton" else 4):
        check_backend(name, is_mla, page_size, pool, seed, "cpu")


MANY = [33, 64]


@pytest.mark.parametrize("name, is_mla", CPU_BACKENDS)
@pytest.mark.parametrize("nodes", MANY)
def test_every_backend_with_many_nodes(name, is_mla, nodes):
    if name == "triton" and nodes > 33:
        pytest.skip("seconds in the interpreter")
    check_backend(name, is_mla, 16, True, nodes, "cpu", nodes)


MORE = [{"has_sinks": True, "dtype": FP32}, {"kv_dtype": FP8}, {"logit_cap": 3.0}]
WITH_OPTIONS = ["torch_native", "intel_amx", "trtllm_mha", "fa3", "flex_attention", "triton"]


def check_options(name: str, more: dict, seed: int, device: str, nodes: int = 0) -> None:
    if device == "cuda" and more.get("dtype") == FP32:
        more = {**more, "dtype": BF16}
    reasons = get_backend_class(name).capability.reasons_against(
        AttentionSpec(**GQA, page_size=16, **more), [ForwardMode.TARGET_VERIFY]
    )
    if reasons:
        pytest.skip(f"{name} {'; '.join(reasons)}")
    check_backend(name, False, 16, True, seed, device, nodes, **more)


@pytest.mark.parametrize("name", WITH_OPTIONS)
@pytest.mark.parametrize("more", MORE, ids=str)
def test_with_sinks_fp8_and_caps(name, more):
    for seed in range(1 if name == "triton" else 4):
        check_options(name, more, seed, "cpu")
    if name != "triton":
        check_options(name, more, 9, "cpu", 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WITH_OPTIONS if name not in ("intel_amx", "flex_attention")])
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("nodes", [5, 64])
def test_with_sinks_fp8_and_caps_on_a_gpu(name, more, nodes):
    for seed in range(2):
        check_options(name, more, seed, "cuda", nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("name, is_mla", GPU_BACKENDS)
@pytest.mark.parametrize("nodes", MANY)
def test_every_backend_with_many_nodes_on_a_gpu(name, is_mla, nodes):
    check_backend(name, is_mla, 16, True, nodes, "cuda", nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("name, is_mla", GPU_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("pool", [False, True])
def test_every_backend_on_a_gpu(name, is_mla, page_size, pool):
    if is_mla and pool:
        pytest.skip("a pool for windows holds keys and values")
    if page_size != 16 and name in PAGE_SIZES:
        pytest.skip("takes pages of one size")
    for seed in range(4):
        check_backend(name, is_mla, page_size, pool, seed, "cuda")
