"""attnops::mla_decode over many rows and pages of whole tiles, in a ring of three tiles, against float64 attention."""

import dataclasses

import pytest
import torch
from attnops import reference
from checks import assert_attention_close, assert_lse_close
from mla_calls import SCALE, decode, plan_for
from problems import hide_unseen, mla_problem

pytestmark = pytest.mark.gpu
LENGTHS = [2053, 1, 0, 3000, 64 * 30, 64]
DTYPES = [torch.float16, torch.bfloat16]


def check(dtype, page_size=64, num_q_heads=128, seqlen_q=1, scale=SCALE, lengths=LENGTHS, **options):
    problem = mla_problem(lengths, seqlen_q, num_q_heads=num_q_heads, page_size=page_size, dtype=dtype)
    options.setdefault("num_sm_parts", 2)  # of many tiles
    out, lse = decode(problem.to("cuda"), softmax_scale=scale, **options)
    masks = {name: options[name] for name in ("causal",) if name in options}
    expected_out, expected_lse = problem.expected(softmax_scale=scale, **masks)
    assert_attention_close(out.cpu(), expected_out, dtype)
    # A score near a thousand is known to 1e-5 of it.
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-4 if scale < 1 else 2e-3 * scale)


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_page_sizes(dtype, page_size):
    check(dtype, page_size)


@pytest.mark.parametrize("heads, tokens", [(128, 1), (64, 3), (64, 5)])
@pytest.mark.parametrize("num_sm_parts", [1, 2, 3, 4, 5, 12, 130, 132])
def test_parts_share_works(num_sm_parts, heads, tokens):
    """In groups for two, three and five blocks of rows, or without."""
    check(torch.bfloat16, num_sm_parts=num_sm_parts, num_q_heads=heads, seqlen_q=tokens)


@pytest.mark.parametrize("page_size", [64, 128, 320])
@pytest.mark.parametrize("heads, tokens", [(128, 1), (40, 4), (24, 8)])
@pytest.mark.parametrize("num_sm_parts", [2, 6, 12])
def test_many_short_works(num_sm_parts, heads, tokens, page_size):
    """Works of one tile, of none and of several in turns: the ring has the queries of the next ones in it."""
    lengths = [64, 1, 0, 63, 65, 130, 0, 0, 200, 2, 64, 7, 500, 64, 1, 321, 0, 128]
    for dtype in DTYPES:
        check(dtype, page_size, heads, tokens, lengths=lengths, num_sm_parts=num_sm_parts)


@pytest.mark.parametrize("heads, tokens", [(128, 2), (70, 1), (65, 3), (16, 5), (24, 8), (90, 2), (110, 4), (97, 7)])
def test_rows_of_several_tokens(heads, tokens):
    for num_sm_parts in (2, 3, 6):
        check(torch.bfloat16, num_q_heads=heads, seqlen_q=tokens, num_sm_parts=num_sm_parts)
    check(torch.float16, num_q_heads=heads, seqlen_q=tokens, causal=False, apart=True)


@pytest.mark.parametrize("fixed", [0, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, tokens, tree_keys", [(16, 8, 8), (16, 16, 16), (24, 3, 70), (2, 64, 64), (128, 1, 130)]
)
def test_trees(heads, tokens, tree_keys, dtype, fixed):
    """Drafts in one tile and in several, the first of a part or the last. Those that nobody sees hold NaN."""
    lengths = [3100, tree_keys, tree_keys // 2 + 1, 64 * 32 + tree_keys, 2047, 2000]
    problem = mla_problem(lengths, tokens, num_q_heads=heads, page_size=128 if tree_keys == 70 else 64, dtype=dtype)
    visible = torch.rand(6, tokens, tree_keys, generator=torch.Generator().manual_seed(tree_keys)) < 0.3
    mask = reference.pack_tree_mask(visible)
    rules = {"tree_mask": mask.flatten(0, 1), "tree_keys": tree_keys, "softmax_scale": SCALE}
    expected, expected_lse = problem.expected(**rules)
    hide_unseen(problem, visible.any(1))
    for num_sm_parts in (2, 4):
        out, lse = decode(
            problem.to("cuda"), tree_mask=mask.to("cuda"), tree_keys=tree_keys, fixed=fixed, num_sm_parts=num_sm_parts
        )
        assert_attention_close(out.cpu(), expected, dtype)
        assert_lse_close(lse.cpu(), expected_lse, atol=1e-4)


@pytest.mark.parametrize("fixed", [0, 1024])
@pytest.mark.parametrize("scale", [SCALE, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_first_key_is_in_a_later_tile_of_drafts(dtype, scale, fixed):
    """Their scores may be far below 0, the reference of a row without keys. The third request is cut at its drafts."""
    lengths, tokens, tree_keys = [192, 150, 2048 + 192], 8, 192
    problem = mla_problem(lengths, tokens, num_q_heads=16, dtype=dtype)
    visible = torch.zeros(3, tokens, tree_keys, dtype=torch.bool)
    for token in range(tokens):
        visible[:, token, 191 - token] = True
        visible[:, token, 100] = token > 4
    mask = reference.pack_tree_mask(visible)
    expected, expected_lse = problem.expected(tree_mask=mask.flatten(0, 1), tree_keys=tree_keys, softmax_scale=scale)
    hide_unseen(problem, visible.any(1))
    out, lse = decode(
        problem.to("cuda"),
        tree_mask=mask.to("cuda"),
        tree_keys=tree_keys,
        softmax_scale=scale,
        fixed=fixed,
        num_sm_parts=2,
    )
    assert_attention_close(out.cpu(), expected, dtype)
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-4 if scale < 1 else 2e-3 * scale)


def test_pages_in_csr_form():
    check(torch.bfloat16, csr=True)


@pytest.mark.parametrize("scale", [0.5, 4.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_rise_on_the_way(dtype, scale):
    """Maxima that later tiles raise by powers of two, and by so much that probabilities overflow first."""
    check(dtype, scale=scale)
    check(dtype, num_q_heads=40, seqlen_q=2, scale=scale, num_sm_parts=4)


@pytest.mark.parametrize("heads, tokens", [(128, 1), (40, 3)])
@pytest.mark.parametrize("scale", [SCALE, 4.0])
def test_batch_invariant_mode_gives_a_request_the_same_bits_in_any_batch(scale, heads, tokens):
    """Cuts long enough for the ring: in one part or over several, with others or alone."""
    problem = mla_problem([4000, 64, 0, 2048, 3000, 1], tokens, num_q_heads=heads).to("cuda")
    out, lse = (x.unflatten(0, (6, tokens)) for x in decode(problem, fixed=1024, softmax_scale=scale))
    expected_out, expected_lse = problem.expected(softmax_scale=scale)
    assert_attention_close(out.flatten(0, 1).cpu(), expected_out, out.dtype)
    assert_lse_close(lse.flatten(0, 1).cpu(), expected_lse, atol=1e-4 if scale < 1 else 2e-3 * scale)
    for chosen in ([0], [3], [4, 0], [5, 1, 3], [3] * 7, [2, 4, 4]):
        rows = torch.tensor(chosen, device="cuda")
        part = dataclasses.replace(
            problem,
            q=problem.q.unflatten(0, (6, tokens))[rows].flatten(0, 1),
            page_table=problem.page_table[rows],
            cache_seqlens=problem.cache_seqlens[rows],
        )
        for num_sm_parts in (2, 8, 132):
            part_out, part_lse = decode(part, fixed=1024, softmax_scale=scale, num_sm_parts=num_sm_parts)
            assert torch.equal(part_out.unflatten(0, (-1, tokens)), out[rows])
            assert torch.equal(part_lse.unflatten(0, (-1, tokens)), lse[rows])


@pytest.mark.parametrize("tree", [False, True])
def test_more_cuts_than_the_plan_has_room_for_give_nan(tree):
    problem = mla_problem([70, 12000, 64, 3000], num_q_heads=128).to("cuda")
    options = {"tree_mask": torch.full((4, 1, 1), 0xFF, dtype=torch.uint8, device="cuda")} if tree else {}
    out, lse = decode(problem, plan=plan_for(problem, fixed=1024, max_seqlen_k=1024), **options)
    good_out, good_lse = decode(problem, fixed=1024, **options)
    for request in (0, 2):
        assert torch.equal(out[request], good_out[request]) and torch.equal(lse[request], good_lse[request])
    for request in (1, 3):  # the last one's cuts have no room behind those of the long one
        assert out[request].isnan().all() and lse[request].isnan().all()
