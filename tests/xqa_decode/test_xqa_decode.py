"""attnops::xqa_decode on every device: against float64 attention over poisoned pages."""

import dataclasses
import math

import pytest
import torch
from attnops import ops, reference
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8, assert_attention_close, assert_lse_close, relative_error
from problems import E5M2, FP8, LAYOUTS, hide_unseen, paged_problem, random_tree_mask
from xqa_decoding import assert_decodes, decode, isas_here, make_plan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]
HEADS = [(1, 1), (3, 3), (3, 1), (5, 1), (7, 7), (8, 2), (14, 2), (16, 1), (128, 8), (128, 1)]  # (query, KV)
PAGE_SIZES = [1, 3, 16, 64, 128]
LENGTHS = [130, 1, 0, 77]
MIXED_LENGTHS = [700, 64, 0, 1500, 3, 129, 256, 1]
RULES = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window_left": 70},
    "window of one key": {"window_left": 0},
    "window, not causal": {"window_left": 5, "causal": False},
    "cap": {"logit_cap": 5.0},
    "scale": {"softmax_scale": 0.3},
    "cap and window": {"logit_cap": 30.0, "window_left": 64},
}


def sinks_of(num_q_heads: int) -> torch.Tensor:
    return torch.linspace(-4, 6, num_q_heads)


@pytest.fixture(params=isas_here())
def isa(request, monkeypatch):
    """Run the test with every instruction set of this machine."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", request.param)
    return request.param


class TestEveryInstructionSet:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kv", ["same", "fp8"])
    @pytest.mark.parametrize("head_dim", [32, 80, 128, 256, 8, 40, 248, 20])
    def test_dtypes_and_head_dims(self, isa, dtype, kv, head_dim):
        kv_dtype = FP8 if kv == "fp8" else dtype
        problem = paged_problem(
            LENGTHS, 2, num_q_heads=14, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype
        )
        assert_decodes(problem, seqlen_q=2)

    @pytest.mark.parametrize("heads", HEADS)
    def test_head_counts(self, isa, heads):
        problem = paged_problem([100, 64, 3], num_q_heads=heads[0], num_kv_heads=heads[1])
        assert_decodes(problem)

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    def test_rules(self, isa, rules):
        problem = paged_problem([300, 2, 65], 3, num_q_heads=6, num_kv_heads=2, head_dim=40, dtype=torch.float32)
        assert_decodes(problem, seqlen_q=3, sinks=sinks_of(6), **rules)

    @pytest.mark.parametrize("flush_denormal", [False, True])
    def test_all_fp8_codes(self, isa, flush_denormal):
        """Every e4m3 value, subnormals too, is converted exactly: V holds them, and one key has all the weight."""
        problem = paged_problem(
            [1], num_q_heads=1, num_kv_heads=1, head_dim=256, kv_dtype=FP8, scales="none", page_size=1
        )
        codes = torch.arange(256, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN is tested beside this
        problem.k_pages[problem.page_table[0, 0]].view(torch.uint8).zero_()
        problem.v_pages[problem.page_table[0, 0]].view(torch.uint8).copy_(codes)
        torch.set_flush_denormal(flush_denormal)  # a conversion that passes through denormal floats would lose them
        try:
            out, _ = decode(problem, num_sm_parts=1)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(out.view(-1).float(), codes.view(FP8).float())
        problem.v_pages[problem.page_table[0, 0]].view(torch.uint8).fill_(0x7F)
        assert decode(problem)[0].isnan().all(), "a NaN that a query sees must not become a number"


@pytest.mark.parametrize("device", DEVICES)
class TestEqualsFloat64:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_dtypes_and_head_dims(self, device, dtype, head_dim):
        problem = paged_problem(LENGTHS, head_dim=head_dim, dtype=dtype).to(device)
        assert_decodes(problem)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("length", [20, 1000])
    def test_no_less_accurate_than_sdpa(self, device, dtype, length):
        problem = paged_problem([length] * 4, dtype=dtype, head_dim=128).to(device)
        expected, _ = problem.expected()
        keys, values = (
            torch.stack([reference.gather_tokens(pages, problem.page_table, b, length) for b in range(4)])
            .transpose(1, 2)
            .repeat_interleave(4, dim=1)
            for pages in (problem.k_pages, problem.v_pages)
        )
        q = problem.q_by_request.transpose(1, 2)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(0, 1)
        bound = 1.5 * relative_error(sdpa.cpu(), expected)
        assert_attention_close(decode(problem)[0], expected, dtype, bound=bound)

    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("seqlen_q", [1, 4])
    def test_head_counts(self, device, heads, seqlen_q):
        problem = paged_problem(LENGTHS, seqlen_q, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128).to(device)
        assert_decodes(problem, seqlen_q=seqlen_q)

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    @pytest.mark.parametrize("csr", [False, True], ids=["matrix", "csr"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_page_sizes_table_forms_and_strides(self, device, page_size, csr, layout):
        problem = paged_problem([200, 63, 0, 65], 2, page_size=page_size, layout=layout, head_dim=128).to(device)
        assert_decodes(problem, seqlen_q=2, csr=csr)

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_lengths_at_page_boundaries(self, device, page_size):
        lengths = sorted({max(pages * page_size + off, 0) for pages in (0, 1, 2, 3) for off in (-1, 0, 1)})
        problem = paged_problem(lengths, page_size=page_size, head_dim=128).to(device)
        assert_decodes(problem)

    @pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
    @pytest.mark.parametrize("seqlen_q", [1, 2, 5, 16])
    def test_rules(self, device, rules, seqlen_q):
        problem = paged_problem([300, 2, 65, 0], seqlen_q, num_q_heads=6, num_kv_heads=2, head_dim=128).to(device)
        assert_decodes(problem, seqlen_q=seqlen_q, sinks=sinks_of(6).to(device), **rules)

    @pytest.mark.parametrize("window_left", [-1, 3, 70])
    @pytest.mark.parametrize("seqlen_q", [1, 2, 8, 17])
    def test_tree_mask(self, device, window_left, seqlen_q):
        lengths = [300, seqlen_q, 64 + seqlen_q, 1]  # the last one is shorter than its draft when S_q > 1
        problem = paged_problem(lengths, seqlen_q, head_dim=128).to(device)
        mask = random_tree_mask([seqlen_q] * 4).to(device)
        assert_decodes(problem, seqlen_q=seqlen_q, tree_mask=mask, window_left=window_left)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scales", ["none", "tensor", "head"])
    def test_e4m3(self, device, dtype, scales):
        problem = paged_problem(LENGTHS, 2, head_dim=128, dtype=dtype, kv_dtype=FP8, scales=scales).to(device)
        assert_decodes(problem, seqlen_q=2)
        out, _ = decode(problem, seqlen_q=2)
        expected, _ = problem.expected_unquantized()
        assert_attention_close(out, expected, dtype, bound=MAX_RELATIVE_ERROR_FP8)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
    @pytest.mark.parametrize("scales", ["none", "tensor", "head"])
    def test_e5m2(self, device, dtype, head_dim, scales):
        options = {"head_dim": head_dim, "dtype": dtype, "kv_dtype": E5M2, "scales": scales}
        for heads, seqlen_q in (((8, 2), 1), ((8, 2), 3), ((40, 2), 2)):
            num_q_heads, num_kv_heads = heads
            problem = paged_problem(LENGTHS, seqlen_q, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, **options)
            assert_decodes(problem.to(device), seqlen_q=seqlen_q, logit_cap=5.0, window_left=40)

    def test_every_e5m2_value(self, device):
        options = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 256, "kv_dtype": E5M2, "scales": "none"}
        problem = paged_problem([1], page_size=1, **options)
        codes = torch.arange(256, dtype=torch.uint8)
        page = problem.page_table[0, 0]
        problem.k_pages[page].view(torch.uint8).zero_()
        problem.v_pages[page].view(torch.uint8).copy_(codes)
        out, _ = decode(problem.to(device), num_sm_parts=1)
        torch.testing.assert_close(out.view(-1).float().cpu(), codes.view(E5M2).float(), rtol=0, atol=0, equal_nan=True)

    def test_scales_apply_to_wide_kv_too(self, device):
        problem = paged_problem([70], dtype=torch.float32).to(device)
        plain_out, _ = decode(problem)
        v_scale = torch.tensor([2.0], device=device)
        plan = make_plan(problem)
        out, _ = ops.xqa_decode(
            problem.q,
            problem.k_pages,
            problem.v_pages,
            problem.page_table,
            problem.cache_seqlens,
            plan,
            v_scale=v_scale,
        )
        torch.testing.assert_close(out.cpu(), 2 * plain_out)

    @pytest.mark.parametrize("num_sm_parts", [1, 2, 7, 64])
    @pytest.mark.parametrize("fixed_split_tokens", [0, 64, 256, -1, -5])
    def test_any_number_of_parts_and_splits(self, device, num_sm_parts, fixed_split_tokens):
        problem = paged_problem([1000, 64, 0, 1, 513], num_q_heads=6, num_kv_heads=2).to(device)
        assert_decodes(
            problem, num_sm_parts=num_sm_parts, fixed_split_tokens=fixed_split_tokens, sinks=sinks_of(6).to(device)
        )

    def test_matrix_and_csr_give_the_same_bits(self, device):
        problem = paged_problem(LENGTHS, 2).to(device)
        by_matrix, by_csr = (decode(problem, seqlen_q=2, csr=csr) for csr in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(by_matrix, by_csr, strict=True))

    def test_sinks_in_lse(self, device):
        problem = paged_problem(LENGTHS, num_q_heads=4, num_kv_heads=2).to(device)
        assert_decodes(problem, sinks=sinks_of(4).to(device), sinks_in_lse=True)


class TestTreesOverMoreKeys:
    """Branches of a draft loop: rows of one request, whose mask is over the keys of all their drafts."""

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("kv_dtype", [None, FP8])
    @pytest.mark.parametrize("seqlen_q, tree_keys", [(1, 3), (4, 5), (4, 20), (3, 64), (8, 130), (17, 17)])
    @pytest.mark.parametrize("fixed_split_tokens", [0, 64])
    def test_any_bits(self, device, head_dim, kv_dtype, seqlen_q, tree_keys, fixed_split_tokens):
        """Keys that nobody sees hold NaN; the third request is shorter than its tree."""
        lengths = [300, tree_keys, tree_keys // 2 + 1, 64 + tree_keys, 1100]
        generator = torch.Generator().manual_seed(tree_keys)
        problem = paged_problem(lengths, seqlen_q, num_q_heads=8, num_kv_heads=2, head_dim=head_dim, kv_dtype=kv_dtype)
        visible = torch.rand(5, seqlen_q, tree_keys, generator=generator) < 0.3
        mask = reference.pack_tree_mask(visible)
        rules = {"tree_mask": mask.flatten(0, 1), "tree_keys": tree_keys}
        expected_out, expected_lse = problem.expected(**rules)
        hide_unseen(problem, visible.any(1))
        problem = problem.to(device)
        options = {"seqlen_q": seqlen_q, "fixed_split_tokens": fixed_split_tokens, "tree_keys": tree_keys}
        out, lse = decode(problem, tree_mask=mask.to(device), **options)
        assert_attention_close(out, expected_out, problem.q.dtype, None if kv_dtype is None else 6e-3)
        assert_lse_close(lse, expected_lse)

    @pytest.mark.parametrize("device", DEVICES)
    def test_a_branch_is_a_request_with_its_own_keys(self, device):
        """Four branches of three drafts, against four requests over the prefix and one branch's drafts."""
        prefix, branches, drafts = 150, 4, 3
        keys = branches * drafts
        problem = paged_problem([prefix + keys], branches, num_q_heads=8, num_kv_heads=2, page_size=1).to(device)
        visible = torch.zeros(branches, keys, dtype=torch.bool)
        for k in range(branches):
            visible[k, k * drafts : (k + 1) * drafts] = True
        mask = reference.pack_tree_mask(visible).unsqueeze(0).to(device)
        out, lse = decode(problem, seqlen_q=branches, tree_mask=mask, tree_keys=keys)
        for k in range(branches):
            cells = [*range(prefix), *range(prefix + k * drafts, prefix + (k + 1) * drafts)]
            table = problem.page_table[:, cells].contiguous()
            lens = torch.tensor([prefix + drafts], dtype=torch.int32, device=device)
            one = dataclasses.replace(problem, q=problem.q[k : k + 1], page_table=table, cache_seqlens=lens)
            alone, alone_lse = decode(one)
            assert relative_error(alone, out[k : k + 1]) <= MAX_RELATIVE_ERROR[alone.dtype]
            assert_lse_close(alone_lse, lse[k : k + 1])

    def test_errors_name_what_is_wrong(self):
        problem = paged_problem([70, 9], 4)
        mask = torch.ones(2, 4, 1, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=r"tree_keys must be 0 \(as many as new tokens\) or in \[4 .*, got 3"):
            decode(problem, seqlen_q=4, tree_mask=mask, tree_keys=3)
        with pytest.raises(
            RuntimeError, match=r"tree_mask.shape\[2\] \(mask_bytes\) must be at least 2 \(one bit per t"
        ):
            decode(problem, seqlen_q=4, tree_mask=mask, tree_keys=9)
        with pytest.raises(RuntimeError, match=r"window_left must be -1 .* with tree_keys above seqlen_q, got 5"):
            decode(problem, seqlen_q=4, tree_mask=mask, tree_keys=8, window_left=5)
        with pytest.raises(RuntimeError, match="tree_mask must be given with tree_keys, got None"):
            decode(problem, seqlen_q=4, tree_keys=8)


class TestHiddenTokens:
    def test_a_new_token_that_nobody_sees_may_hold_nan(self, isa):
        """A draft that is padded to a fixed size: the mask hides the rest, whose keys and values were never stored."""
        problem = paged_problem([70, 9], 4, dtype=torch.float32)
        visible = torch.ones(4, 4, dtype=torch.bool).tril()
        visible[:, 2:] = False
        mask = reference.pack_tree_mask(visible).expand(2, 4, 1)
        expected, _ = problem.expected(tree_mask=mask.flatten(0, 1))
        for request, length in enumerate([70, 9]):
            for position in (length - 2, length - 1):
                page = problem.page_table[request, position // 16]
                problem.k_pages[page, position % 16] = torch.nan
                problem.v_pages[page, position % 16] = torch.nan
        out, _ = decode(problem, seqlen_q=4, tree_mask=mask)
        assert_attention_close(out, expected, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
class TestShapes:
    def test_batch_of_none(self, device):
        problem = paged_problem([]).to(device)
        out, lse = decode(problem)
        assert out.shape == (0, 8, 64) and lse.shape == (0, 8)

    def test_only_empty_requests(self, device):
        out, lse = decode(paged_problem([0, 0, 0], spare_pages=0).to(device), sinks=torch.zeros(8, device=device))
        assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()

    def test_strided_queries_and_outputs(self, device):
        problem = paged_problem(LENGTHS, 2, num_q_heads=6, num_kv_heads=2, head_dim=32).to(device)
        expected, _ = problem.expected()
        fused = torch.full((4, 2, 10, 48), torch.nan, dtype=problem.q.dtype, device=device)
        q = fused[:, :, 1:7, :32].copy_(problem.q_by_request)
        wide = torch.full((4, 2, 7, 64), torch.nan, dtype=problem.q.dtype, device=device)
        plan = make_plan(problem, seqlen_q=2)
        tensors = problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens
        out, lse = ops.xqa_decode(q, *tensors, plan, out=wide[:, :, :6, :32])
        assert lse is None and out.data_ptr() == wide.data_ptr()
        assert_attention_close(out.flatten(0, 1).cpu(), expected, problem.q.dtype)
        assert wide[..., 32:].isnan().all() and wide[:, :, 6].isnan().all(), "wrote outside its slice"

    def test_pool_above_2_to_the_31_elements(self, device):
        """Offsets are int64: the only pages ever touched lie beyond 2^31 elements."""
        num_pages, page_size, heads, dim = 2**14 + 8, 64, 16, 128  # 2^31 + 2^20 elements
        if torch.device(device).type == "cpu" and not overcommits(2 * 2 * num_pages * page_size * heads * dim):
            pytest.skip("this machine does not hand out 8.6 GB of untouched memory")
        small = paged_problem([100], num_q_heads=16, num_kv_heads=16, head_dim=dim, page_size=page_size, spare_pages=0)
        k_pages, v_pages = (
            torch.empty(num_pages, page_size, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        for page in range(2):
            k_pages[num_pages - 2 + page] = small.k_pages[page].to(device)
            v_pages[num_pages - 2 + page] = small.v_pages[page].to(device)
        plan = make_plan(small.to(device))
        page_table = small.page_table.clone()
        page_table[0, :2] += num_pages - 2
        out, _ = ops.xqa_decode(
            small.q.to(device), k_pages, v_pages, page_table.to(device), small.cache_seqlens.to(device), plan
        )
        assert_attention_close(out.cpu(), small.expected()[0], torch.bfloat16)


def overcommits(num_bytes: int) -> bool:
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
class TestDeterminism:
    def run(self, problem, requests, fixed_split_tokens, num_sm_parts=5):
        """The rows of some requests, alone in a batch of their own."""
        index = torch.tensor(requests, device=problem.q.device)
        lengths = problem.cache_seqlens[index]
        sub = type(problem)(
            **{
                **{name: getattr(problem, name) for name in problem.__dataclass_fields__},
                "q": problem.q[index],
                "cache_seqlens": lengths,
                "page_table": problem.page_table[index],
            }
        )
        return decode(sub, fixed_split_tokens=fixed_split_tokens, num_sm_parts=num_sm_parts)

    @pytest.mark.parametrize("fixed_split_tokens", [0, 256, -4])
    def test_repeats_bit_for_bit(self, device, kv_dtype, fixed_split_tokens):
        problem = paged_problem(MIXED_LENGTHS, kv_dtype=kv_dtype).to(device)
        first = self.run(problem, range(8), fixed_split_tokens)
        for _ in range(3):
            again = self.run(problem, range(8), fixed_split_tokens)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @pytest.mark.parametrize("fixed_split_tokens", [256, -3])
    def test_batch_invariant_mode_does_not_depend_on_the_batch(self, device, kv_dtype, fixed_split_tokens):
        problem = paged_problem(MIXED_LENGTHS, kv_dtype=kv_dtype).to(device)
        out, lse = self.run(problem, range(8), fixed_split_tokens)
        for requests in ([3], [0, 3], [7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 3, 0]):
            for num_sm_parts in (1, 3, 16):
                part_out, part_lse = self.run(problem, requests, fixed_split_tokens, num_sm_parts)
                assert torch.equal(part_out, out[requests]) and torch.equal(part_lse, lse[requests])


@pytest.mark.parametrize("device", DEVICES)
class TestCheckedMode:
    def report_of(self, problem, **changes):
        report = torch.zeros(8, dtype=torch.int32, device=problem.q.device)
        problem = type(problem)(
            **{**{name: getattr(problem, name) for name in problem.__dataclass_fields__}, **changes}
        )
        out, lse = decode(problem, report=report)
        return out, lse, report.tolist()

    def test_good_input_reports_nothing(self, device):
        _, _, report = self.report_of(paged_problem(LENGTHS).to(device))
        assert report == [0] * 8

    def test_bad_page_is_reported_and_skipped(self, device):
        problem = paged_problem([40, 40], page_size=16).to(device)
        bad = problem.page_table.clone()
        bad[1, 1] = 1000
        out, _, report = self.report_of(problem, page_table=bad)
        assert report[0] > 0 and report[1:7] == [6, 1, 1, 1, 1000, problem.k_pages.shape[0]]
        assert out.isfinite().all()
        assert_attention_close(out[:1], problem.expected()[0][:1], torch.bfloat16)

    @pytest.mark.parametrize("checked", [True, False])
    def test_more_cuts_than_the_plan_has_room_for(self, device, checked):
        """NaN, and recorded in checked mode. What the host can see without one is an error: test_errors.py."""
        if device == "cpu" and not checked:
            pytest.skip("raises")
        problem = paged_problem([70, 3000, 30, 200], 2).to(device)
        report = torch.zeros(8, dtype=torch.int32, device=device) if checked else None
        plan = make_plan(problem, seqlen_q=2, fixed_split_tokens=64, max_seqlen_k=200)
        out, lse = decode(problem, plan=plan, report=report)
        assert out[2:4].isnan().all() and lse[2:4].isnan().all()
        fresh = None if report is None else torch.zeros_like(report)
        good = decode(problem, seqlen_q=2, fixed_split_tokens=64, report=fresh)
        for kept in (slice(2), slice(4, 6)):  # the last one's cuts have no room behind those of the long one
            assert torch.equal(out[kept], good[0][kept]) and torch.equal(lse[kept], good[1][kept])
        assert out[6:].isnan().all()
        if report is not None:
            count, op, kind, request, _, value, limit = report.tolist()[:7]
            assert count > 0 and (op, kind) == (6, 4) and request in (1, 3)
            assert value > plan.out_partial.shape[0] and limit == plan.out_partial.shape[0] + 1

    def test_length_beyond_the_table_is_reported(self, device):
        problem = paged_problem([40, 40], page_size=16).to(device)
        lengths = torch.tensor([40, 80], dtype=torch.int32, device=problem.q.device)
        good = problem.page_table.clone()
        good[1, 3] = 0  # the last column; its page may hold NaN, which a query then rightly sees
        _, _, report = self.report_of(problem, page_table=good, cache_seqlens=lengths)
        assert report[0] > 0 and report[1:4] == [6, 4, 1] and report[5:7] == [80, 65]


@pytest.mark.parametrize("device", DEVICES)
class TestTracing:
    def test_opcheck(self, device):
        problem = paged_problem(LENGTHS, 2).to(device)  # opcheck cannot compare float8 tensors
        plan = make_plan(problem, seqlen_q=2)
        q = problem.q_by_request
        args = (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), q)
        args += (problem.k_pages, problem.v_pages, problem.kv_indices, problem.kv_indptr, problem.cache_seqlens)
        args += (plan.tile_scheduler_metadata, plan.num_splits, plan.out_partial.fill_(0), plan.lse_partial.fill_(0))
        options = {
            "sinks": sinks_of(8).to(device),
            "tree_mask": random_tree_mask([2] * 4).view(4, 2, 1).to(device),
            "k_scale": torch.ones(1, device=device),
            "v_scale": torch.ones(2, device=device),
            "report": torch.zeros(8, dtype=torch.int32, device=device),
        }
        torch.library.opcheck(torch.ops.attnops.xqa_decode.default, (*args, plan.semaphores, 0.1), options)
        torch.library.opcheck(
            torch.ops.attnops.xqa_decode_plan.default,
            (plan.tile_scheduler_metadata, plan.num_splits, problem.cache_seqlens, 2, 2),
        )

    def test_compiles_without_a_graph_break(self, device):
        problem = paged_problem(LENGTHS, dtype=torch.float32).to(device)
        plan = make_plan(problem)

        def step(q, k_pages, v_pages, page_table, cache_seqlens):
            ops.xqa_decode_plan(plan, cache_seqlens)
            out, lse = ops.xqa_decode(q, k_pages, v_pages, page_table, cache_seqlens, plan, return_lse=True)
            return out * 2, lse

        args = problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens
        out, lse = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
        expected_out, expected_lse = problem.expected()
        assert_attention_close(out.cpu() / 2, expected_out, torch.float32)
        assert_lse_close(lse.cpu(), expected_lse)
