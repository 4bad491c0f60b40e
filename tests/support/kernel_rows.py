"""Every row of the CUDA tables of `xqa_decode` and `mla_decode`, each with a small problem that it serves.

The names are those of `csrc/<op>/impls.cpp`; `tests/test_kernel_rows.py` holds this file to them.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, nullcontext

import torch
from attnops import info, reference
from mla_calls import SCALE
from mla_calls import decode as decode_mla
from problems import E5M2, FP8, FP8_NAN, mla_problem, paged_problem, poisoned, write_tokens
from torch import Tensor
from xqa_decoding import decode as decode_xqa

BF16, FP16, FP32, ROW = torch.bfloat16, torch.float16, torch.float32, torch.uint8
LENGTHS = [130, 64, 5, 517, 66]
MANY_ROWS = {"num_q_heads": 72, "num_kv_heads": 2}  # of a KV head: more than clusters take
PAIRED_HEADS = {"num_q_heads": 30, "num_kv_heads": 30, "num_sm_parts": 60}  # more works than clusters take
TWELVE_ROWS = {"rows": 12, "num_kv_heads": 28}  # the same
TWENTY_ROWS = {"rows": 20, "num_kv_heads": 28}  # the same, whatever their blocks

# Options of the problem, and: "checked", with a report; "odd", rows of K and V that start on no 16-byte boundary;
# "rows", those of a KV head, whatever the number of tokens.
XQA_ROWS = {
    "sm90_cluster_wgmma_bf16_hd64": {},
    "sm90_cluster_gather_bf16_hd64": {"page_size": 5},
    "sm90_cluster_wgmma_fp8_hd64": {"kv_dtype": FP8},
    "sm90_cluster_gather_fp8_hd64": {"kv_dtype": FP8, "page_size": 5},
    "sm90_bf16_hd64": {**MANY_ROWS},
    "sm90_gather_bf16_hd64": {**MANY_ROWS, "page_size": 5},
    "sm90_fp16_hd64": {"dtype": FP16},
    "sm90_gather_fp16_hd64": {"dtype": FP16, "page_size": 5},
    "bf16_hd64": {"checked": True},
    "fp16_hd64": {"dtype": FP16, "checked": True},
    "sm90_fp8_hd64": {"kv_dtype": FP8, **MANY_ROWS},
    "sm90_gather_fp8_hd64": {"kv_dtype": FP8, **MANY_ROWS, "page_size": 5},
    "fp8_hd64": {"kv_dtype": FP8, "checked": True},
    "e5m2_hd64": {"kv_dtype": E5M2},
    "sm90_cluster_wgmma_bf16_hd128": {"head_dim": 128},
    "sm90_cluster_wgmma_fp16_hd128": {"head_dim": 128, "dtype": FP16},
    "sm90_cluster_gather_bf16_hd128": {"head_dim": 128, "page_size": 3},
    "sm90_cluster_gather_fp16_hd128": {"head_dim": 128, "page_size": 3, "dtype": FP16},
    "sm90_cluster_wgmma_fp8_hd128": {"head_dim": 128, "kv_dtype": FP8},
    "sm90_cluster_gather_fp8_hd128": {"head_dim": 128, "kv_dtype": FP8, "page_size": 3},
    "sm90_fp8_hd128": {"head_dim": 96, "kv_dtype": FP8, **PAIRED_HEADS},
    "sm90_gather_fp8_hd128": {"head_dim": 128, "kv_dtype": FP8, **TWELVE_ROWS, "page_size": 3},
    "sm90_fp8_rows_hd128": {"head_dim": 128, "kv_dtype": FP8, **TWENTY_ROWS},
    "sm90_gather_fp8_rows_hd128": {"head_dim": 128, "kv_dtype": FP8, **TWENTY_ROWS, "page_size": 3},
    "sm90_cluster_blocks_bf16_hd128": {"head_dim": 128, **MANY_ROWS},
    "sm90_cluster_blocks_gather_bf16_hd128": {"head_dim": 128, **MANY_ROWS, "page_size": 3},
    "sm90_cluster_blocks_fp8_hd128": {"head_dim": 128, "kv_dtype": FP8, **MANY_ROWS},
    "sm90_cluster_blocks_gather_fp8_hd128": {"head_dim": 128, "kv_dtype": FP8, **MANY_ROWS, "page_size": 3},
    "sm90_bf16_hd128": {"head_dim": 128, **TWENTY_ROWS},
    "sm90_gather_bf16_hd128": {"head_dim": 128, **TWENTY_ROWS, "page_size": 3},
    "sm90_cluster_wgmma_bf16_hd192": {"head_dim": 192},
    "sm90_bf16_hd192": {"head_dim": 192, **MANY_ROWS},
    "sm90_bf16_hd256": {"head_dim": 256},
    "sm90_gather_bf16_hd256": {"head_dim": 256, "page_size": 3},
    "sm90_fp16_hd128": {"head_dim": 128, **MANY_ROWS, "dtype": FP16},
    "sm90_gather_fp16_hd128": {"head_dim": 128, **MANY_ROWS, "page_size": 3, "dtype": FP16},
    "sm90_fp16_hd192": {"head_dim": 192, "dtype": FP16},
    "sm90_fp16_hd256": {"head_dim": 256, "dtype": FP16},
    "sm90_gather_fp16_hd256": {"head_dim": 256, "page_size": 3, "dtype": FP16},
    "sm90_fp8_hd256": {"head_dim": 256, "kv_dtype": FP8},
    "sm90_gather_fp8_hd256": {"head_dim": 256, "kv_dtype": FP8, "page_size": 3},
    "bf16_hd128": {"head_dim": 128, "checked": True},
    "bf16_hd256": {"head_dim": 256, "checked": True},
    "fp16_hd128": {"head_dim": 128, "dtype": FP16, "checked": True},
    "fp16_hd256": {"head_dim": 256, "dtype": FP16, "checked": True},
    "fp8_hd128": {"head_dim": 128, "kv_dtype": FP8, "checked": True},
    "fp8_hd256": {"head_dim": 256, "kv_dtype": FP8, "checked": True},
    "e5m2_hd128": {"head_dim": 128, "kv_dtype": E5M2},
    "e5m2_hd256": {"head_dim": 256, "kv_dtype": E5M2},
    "fp32": {"dtype": FP32},
    "sm90_ragged_bf16_hd64": {"ragged": True, "head_dim": 64},
    "sm90_ragged_gather_bf16_hd64": {"ragged": True, "head_dim": 64, "page_size": 3},
    "sm90_ragged_bf16_hd128": {"ragged": True, "head_dim": 128},
    "sm90_ragged_gather_bf16_hd128": {"ragged": True, "head_dim": 128, "page_size": 3},
    "sm90_ragged_bf16_hd192": {"ragged": True, "head_dim": 192},
    "sm90_ragged_bf16_hd256": {"ragged": True, "head_dim": 256},
    "sm90_ragged_gather_bf16_hd256": {"ragged": True, "head_dim": 256, "page_size": 3},
    "sm90_ragged_fp16_hd64": {"ragged": True, "dtype": FP16, "head_dim": 64},
    "sm90_ragged_gather_fp16_hd64": {"ragged": True, "dtype": FP16, "head_dim": 64, "page_size": 3},
    "sm90_ragged_fp16_hd128": {"ragged": True, "dtype": FP16, "head_dim": 128},
    "sm90_ragged_gather_fp16_hd128": {"ragged": True, "dtype": FP16, "head_dim": 128, "page_size": 3},
    "sm90_ragged_fp16_hd192": {"ragged": True, "dtype": FP16, "head_dim": 192},
    "sm90_ragged_fp16_hd256": {"ragged": True, "dtype": FP16, "head_dim": 256},
    "sm90_ragged_gather_fp16_hd256": {"ragged": True, "dtype": FP16, "head_dim": 256, "page_size": 3},
    "sm90_ragged_fp8_hd64": {"ragged": True, "kv_dtype": FP8, "head_dim": 64},
    "sm90_ragged_gather_fp8_hd64": {"ragged": True, "kv_dtype": FP8, "head_dim": 64, "page_size": 3},
    "sm90_ragged_fp8_hd128": {"ragged": True, "kv_dtype": FP8, "head_dim": 128},
    "sm90_ragged_gather_fp8_hd128": {"ragged": True, "kv_dtype": FP8, "head_dim": 128, "page_size": 3},
    "sm90_ragged_fp8_hd256": {"ragged": True, "kv_dtype": FP8, "head_dim": 256},
    "sm90_ragged_gather_fp8_hd256": {"ragged": True, "kv_dtype": FP8, "head_dim": 256, "page_size": 3},
}
RING = {"num_q_heads": 96, "num_sm_parts": 2}  # two blocks of 64 rows, with four tokens six; many tiles a part
# What a row's kernel does by the pages of a call has a word more.
MLA_ROWS = {
    "sm90_few_rows_bf16": {},
    "sm90_few_rows_bf16 gathers": {"page_size": 5},
    "sm90_few_rows_fp16": {"dtype": FP16},
    "sm90_bf16": {"num_q_heads": 72},
    "sm90_bf16 small": {"num_q_heads": 72, "page_size": 32},
    "sm90_bf16 gathers": {"num_q_heads": 72, "page_size": 5},
    "sm90_ring_bf16": {**RING},
    "sm90_ring_fp16": {**RING, "dtype": FP16},
    "sm90_fp16": {"num_q_heads": 72, "dtype": FP16},
    "sm90_few_rows_e4m3_bf16": {"kv_dtype": FP8},
    "sm90_few_rows_e4m3_bf16 gathers": {"kv_dtype": FP8, "page_size": 5},
    "sm90_few_rows_e4m3_fp16": {"kv_dtype": FP8, "dtype": FP16},
    "sm90_few_rows_656_bf16": {"kv_dtype": ROW},
    "sm90_few_rows_656_bf16 gathers": {"kv_dtype": ROW, "page_size": 5},
    "sm90_few_rows_656_fp16": {"kv_dtype": ROW, "dtype": FP16},
    "sm90_e4m3_rounded": {"num_q_heads": 72, "kv_dtype": FP8, "fp8_products": True},
    "sm90_e4m3_rounded gathers": {"num_q_heads": 72, "kv_dtype": FP8, "fp8_products": True, "page_size": 5},
    "sm90_e4m3_bf16": {"num_q_heads": 72, "kv_dtype": FP8},
    "sm90_e4m3_fp16": {"num_q_heads": 72, "kv_dtype": FP8, "dtype": FP16},
    "sm90_rows_bf16": {"num_q_heads": 72, "kv_dtype": ROW},
    "sm90_rows_bf16 gathers": {"num_q_heads": 72, "kv_dtype": ROW, "page_size": 5},
    "sm90_rows_fp16": {"num_q_heads": 72, "kv_dtype": ROW, "dtype": FP16},
}
ROWS = {f"{op} {row}": (op, row) for op, rows in (("xqa_decode", XQA_ROWS), ("mla_decode", MLA_ROWS)) for row in rows}


@dataclasses.dataclass
class Case:
    """A problem on the GPU for one row of one table."""

    op: str
    row: str
    problem: object
    call: dict

    @property
    def page_size(self) -> int:
        return self.pools[0].shape[1]

    @property
    def pools(self) -> list[Tensor]:
        return [getattr(self.problem, name) for name in self._pool_names]

    @property
    def _pool_names(self) -> list[str]:
        return ["k_pages", "v_pages"] if self.op == "xqa_decode" else ["kv_pages"]

    def with_pools(self, change) -> Case:
        pools = {name: change(getattr(self.problem, name)) for name in self._pool_names}
        return self.having(**pools)

    def having(self, **fields) -> Case:
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **fields))

    def decode(self, any_row: bool = False, **options) -> tuple[Tensor, Tensor]:
        """(out, lse) on the CPU. Fails where another row served the call, unless `any_row`."""
        call = {**self.call, **options}
        if call.pop("ragged", False):
            call["cu_seqlens_q"] = self.problem.cu_seqlens_q
        if call.pop("checked", False):
            call["report"] = torch.zeros(8, dtype=torch.int32, device="cuda")
        with nullcontext() if any_row else reaches(self.op, self.row.split()[0]):
            out, lse = (decode_xqa if self.op == "xqa_decode" else decode_mla)(self.problem, **call)
        return out.cpu(), lse.cpu()

    def expected(self, **options) -> tuple[Tensor, Tensor]:
        return self.problem.expected(**options, **({} if self.op == "xqa_decode" else {"softmax_scale": SCALE}))

    def bound(self) -> float:
        """Of the relative error."""
        if "fp8_products" in self.call:
            return 6e-2  # q and probabilities are rounded, 2.6 % each on average
        return {BF16: 6e-3, FP16: 1e-3, FP32: 1e-5}[self.problem.q.dtype]

    def lse_bound(self) -> float:
        if "fp8_products" in self.call:
            return 0.3
        return 1e-2 if self.pools[0].dtype == ROW else 2e-4

    def poison(self, request: int, positions) -> None:
        """NaN in the keys and values at these positions, in place."""
        for position in positions:
            if position < 0:
                continue
            page = self.problem.page_table[request, position // self.page_size].long()
            for pool in self.pools:
                nan = poisoned(pool.shape[2:], pool.dtype).to(pool.device)
                write_tokens(pool, page, position % self.page_size, nan)


@contextmanager
def reaches(op: str, row: str):
    key = f"cuda {op} {row}"
    before = info.kernel_counts().get(key, 0)
    yield
    counts = info.kernel_counts()
    served = [name for name in counts if name.startswith(f"cuda {op} ")]
    assert counts.get(key, 0) > before, f"{row} did not serve the call; asked were {served}"


def case_of(op: str, row: str, lengths=LENGTHS, seqlen_q: int = 1) -> Case:
    options = dict((XQA_ROWS if op == "xqa_decode" else MLA_ROWS)[row])
    odd = options.pop("odd", False)
    if rows := options.pop("rows", 0):
        options["num_q_heads"] = rows // seqlen_q * options["num_kv_heads"]
    names = ("checked", "fp8_products", "num_sm_parts", "ragged")
    call = {name: options.pop(name) for name in names if name in options}
    problem = (paged_problem if op == "xqa_decode" else mla_problem)(lengths, seqlen_q, **options)
    if op == "xqa_decode":
        call["seqlen_q"] = seqlen_q
    elif problem.q.shape[1] * seqlen_q > 16 and options.get("num_q_heads", 16) <= 16:
        heads = 16 // seqlen_q  # few rows stay few
        problem = mla_problem(lengths, seqlen_q, **{**options, "num_q_heads": heads})
    case = Case(op, row, problem, call)
    if odd:
        case = case.with_pools(lambda pool: torch.nn.functional.pad(pool, (0, 4))[..., : pool.shape[-1]])
    return dataclasses.replace(case, problem=case.problem.to("cuda"))


def finite(pool: Tensor) -> Tensor:
    """The pool without a NaN in any byte, in the same strides: whatever page is read, what comes out is a number."""
    if pool.dtype in (FP8, E5M2, ROW):
        raw = pool.view(torch.uint8)
        nan = raw == 0xFF if pool.dtype == ROW else raw & 0x7F == FP8_NAN
        values = torch.where(nan, torch.full_like(raw, 0x30), raw).view(pool.dtype)
    else:
        values = torch.where(pool.isnan(), torch.full_like(pool, 0.5), pool)
    out = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=pool.device)
    out.view(torch.uint8).copy_(values.view(torch.uint8))
    return out


def between_nans(pool: Tensor) -> Tensor:
    """The same pages with pages of NaN on both sides, in one allocation, with the strides of the pool."""
    pages = pool.shape[0] + 2
    around = poisoned((pages * pool.stride(0),), pool.dtype).to(pool.device)
    whole = around.as_strided((pages, *pool.shape[1:]), pool.stride())
    whole.view(torch.uint8)[1:-1].copy_(pool.view(torch.uint8))
    return whole[1:-1]


def blind_tree(batch: int, tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(packed mask [batch * tokens, bytes], hidden [batch, tokens]): random rows, and the tokens that no row sees."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(batch, tokens, tokens, generator=generator) < 0.4
    hidden = torch.rand(batch, tokens, generator=generator) < 0.4
    hidden[:, 0] |= ~hidden.any(1)
    visible &= ~hidden.unsqueeze(1)
    return reference.pack_tree_mask(visible).flatten(0, 1), ~visible.any(1)
