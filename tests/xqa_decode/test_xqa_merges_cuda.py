"""attnops::xqa_decode on a GPU: works of few rows and of many, in two splits and more, which are merged."""

import pytest
import torch
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes

pytestmark = pytest.mark.gpu
FP16 = torch.float16
TILE = 64


@pytest.mark.parametrize("splits", [2, 3, 6, 12, 20, 66])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "kv_dtype"),
    [
        ((8, 1), 128, 64, None),
        ((15, 1), 96, 64, None),
        ((24, 1), 80, 5, None),
        ((32, 1), 256, 64, None),
        ((41, 1), 64, 64, None),
        ((64, 1), 128, 16, None),
        ((64, 1), 192, 6, None),
        ((77, 1), 112, 64, None),
        ((50, 1), 54, 64, None),  # rows of partial results that are no multiples of 16 bytes
        ((128, 1), 128, 3, None),
        ((100, 1), 256, 64, None),
        ((130, 1), 128, 32, None),
        ((12, 1), 128, 64, FP8),
        ((30, 1), 64, 64, FP8),
        ((60, 1), 128, 7, FP8),
        ((126, 1), 128, 16, FP8),
        ((70, 1), 256, 64, FP8),
    ],
)
def test_merges(heads, head_dim, page_size, kv_dtype, splits):
    """Parts of one tile or a few, the last of them torn."""
    tiles = max(splits, 12)
    options = {"head_dim": head_dim, "page_size": page_size, "kv_dtype": kv_dtype}
    problem = paged_problem([tiles * TILE - 10], num_q_heads=heads[0], num_kv_heads=heads[1], **options).to("cuda")
    assert_decodes(problem, num_sm_parts=splits)


@pytest.mark.parametrize("splits", [2, 4, 7, 12, 20])
@pytest.mark.parametrize("options", [{"window_left": 300}, {"sinks": True}, {"logit_cap": 5.0}])
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 2), 128), ((64, 8), 64), ((20, 2), 192), ((48, 4), 128)])
def test_merges_of_rows_that_see_different_keys(heads, head_dim, options, splits):
    """Splits in which some rows, or all, see no key."""
    rules = dict(options)
    if rules.pop("sinks", False):
        rules["sinks"] = torch.randn(heads[0], device="cuda")
    tokens = 8
    lengths = [splits * 2 * TILE + 1, 700, 0, 64]
    problem = paged_problem(
        lengths, tokens, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, page_size=64, dtype=FP16
    ).to("cuda")
    assert_decodes(problem, seqlen_q=tokens, num_sm_parts=splits * heads[1], **rules)


@pytest.mark.parametrize("splits", [2, 9, 20])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "kv_dtype"),
    [
        ((8, 1), 128, 64, None),
        ((16, 1), 112, 6, None),
        ((24, 1), 128, 16, None),
        ((5, 1), 64, 32, None),
        ((8, 1), 128, 64, FP8),
        ((14, 1), 96, 3, FP8),
        ((7, 1), 256, 16, FP8),
    ],
)
def test_merges_beside_many_works(heads, head_dim, page_size, kv_dtype, splits):
    """Works outnumber what clusters take: the plan's kernels merge few rows, too."""
    lengths = [*[splits * 4 * TILE - 10] * 3, *[3] * 140]
    options = {"head_dim": head_dim, "page_size": page_size, "kv_dtype": kv_dtype}
    problem = paged_problem(lengths, num_q_heads=heads[0], num_kv_heads=heads[1], **options).to("cuda")
    assert_decodes(problem, num_sm_parts=3 * splits + 50)
