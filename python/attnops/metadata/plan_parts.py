"""How many shares a split-KV plan has, and how many cuts a batch-invariant request: measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnops.metadata.plan_checks import cut_rule

# Parts per SM of the default plans. Decode is bound by memory: two CTAs on an SM hide each other's waits in xqa_decode;
# an MLA work fills an SM's registers alone.
XQA_PARTS_PER_SM = 2
MLA_PARTS_PER_SM = 1
MLA_MOST_BLOCKS_PER_WORK = 13  # csrc/mla_decode/plan.h
XQA_MOST_PARTS_PER_SM = 3  # of smaller CTAs: cuts of FP8 pages that are folded, and many works of 17 to 32 rows

# Tenths of the parts that must remain where KV heads get parts side by side: of any rows, and of rows that are no whole
# lines of 128 bytes.
XQA_SIDE_TENTHS, XQA_THIN_TENTHS = 9, 8

XQA_CLUSTER_WORKS = 132  # of a call that clusters may take: csrc/xqa_decode/sm90/cluster_wgmma/limits.h

# Query rows that have CTAs and merges of their own: csrc/xqa_decode/sm90/launch.cuh
XQA_LARGE_BLOCK, XQA_ROWS_PER_BLOCK, XQA_SMALL_BLOCK = 192, 128, 64
XQA_LEAST_LARGE_WORKS = 99  # of a call from which on one block takes 129 to 192 rows of 16-bit pages

# Works for each SM from which on prefill's kernels serve decode of 65 to 128 rows, and of more than 192.
XQA_PREFILL_WORKS_PER_SM, XQA_PREFILL_WORKS_PER_SM_OF_MANY = 2, 1

XQA_INVARIANT_CUTS = 96  # of a long request over all KV heads: docs/kernels/xqa_decode.md
XQA_CUTS_OF_FEW_HEADS, XQA_FEW_HEADS = 132, 5  # the same of up to so many, which 16 cuts each leave most SMs idle
XQA_MOST_CUTS_OF_HEAD = 64  # where it writes partial results; also of one KV head
XQA_LEAST_CUT = 8  # tiles of a cut, where it writes a partial result
XQA_FOLDED_CUTS = {4: 32, 8: 28}  # the same of one KV head, where 256 over all heads do not suit the clusters


class _Gpu(NamedTuple):
    major: int  # of its compute capability
    sms: int


_GPUS: dict[int, _Gpu] = {}


def _gpu(device: torch.device) -> _Gpu:
    """What plans must know of a GPU. torch takes 2 us to say it, so a GPU that has a number is asked once."""
    index = None if torch.compiler.is_compiling() else device.index
    known = None if index is None else _GPUS.get(index)
    if known is None:
        properties = torch.cuda.get_device_properties(device)
        known = _Gpu(properties.major, properties.multi_processor_count)
        if index is not None:
            _GPUS[index] = known
    return known


def runs_hopper_kernels(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.x."""
    return device.type == "cuda" and _gpu(device).major == 9


def default_num_sm_parts(device: torch.device, parts_per_sm: int) -> int:
    """SMs of a CUDA device times `parts_per_sm`; elsewhere the threads of torch's pool."""
    return _gpu(device).sms * parts_per_sm if device.type == "cuda" else _num_threads()


def _num_threads() -> int:
    return torch.get_num_threads()


# So that a compiled function can make a plan: the mark of `torch.compiler.assume_constant_result`, which would import
# the compiler with this package, a second of each start.
_num_threads._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_boxes(page_size: int | None) -> bool:
    """Whether the copy engine takes such pages: csrc/xqa_decode/sm90/limits.h."""
    return page_size is None or (page_size >= 8 and page_size & (page_size - 1) == 0)


def _folds(item: int, rows: int, head_dim: int, page_size: int | None) -> bool:
    """Whether batch-invariant kernels add neighbouring cuts up where they are: csrc/xqa_decode/sm90/fold.cuh."""
    return 64 < head_dim <= 128 and rows <= 16 and (item == 2 or (item == 1 and _in_boxes(page_size)))


def xqa_num_sm_parts(
    device: torch.device,
    batch_size: int,
    num_kv_heads: int,
    *,
    rows: int = 1,
    head_dim: int = 128,
    kv_dtype: torch.dtype | None = None,
    page_size: int | None = None,
    fixed_split_tokens: int = 0,
) -> int:
    """Parts for `batch_size` requests, likely of equal length; measured on an H200.

    On CUDA parts come in groups, one part for each KV head (csrc/xqa_decode/plan.h). Where a few groups fewer leave
    requests whole, they are fewer: a cut costs two partial results and their merge.

    Args:
        rows: Query rows (token, head) of a request and KV head.
        head_dim: Of K and V.
        kv_dtype: Of the pages; None: the type of q.
        page_size: Tokens of a page; None: one that suits the copy engine, a power of two from 8.
        fixed_split_tokens: Of the plan.
    """
    if device.type != "cuda":
        return _num_threads()
    gpu = _gpu(device)
    fp8 = kv_dtype is not None and kv_dtype.itemsize == 1
    on_sm90 = gpu.major == 9
    folds_fp8 = fp8 and fixed_split_tokens != 0 and _folds(1, rows, head_dim, page_size)
    many_works = batch_size * num_kv_heads > XQA_CLUSTER_WORKS
    three = folds_fp8 or (on_sm90 and not fp8 and many_works and 16 < rows <= 32 and head_dim <= 128)
    parts_per_sm = XQA_MOST_PARTS_PER_SM if three else XQA_PARTS_PER_SM
    # Blocks of rows: csrc/xqa_decode/sm90/launch.cuh, in_large_blocks and in_small_blocks.
    block = XQA_ROWS_PER_BLOCK
    if head_dim <= 128 and XQA_ROWS_PER_BLOCK < rows <= XQA_LARGE_BLOCK:
        large = not fp8 and fixed_split_tokens == 0 and batch_size * num_kv_heads >= XQA_LEAST_LARGE_WORKS
        block = XQA_LARGE_BLOCK if large else XQA_SMALL_BLOCK
    # A CTA of these kernels fills an SM; parts of a second round would keep merges waiting.
    fills_sm = on_sm90 and rows > 64 and block != XQA_SMALL_BLOCK
    if fp8:
        fills_sm = fills_sm or (on_sm90 and head_dim > 128 and rows > 32)
    else:
        wide = head_dim > (192 if on_sm90 and rows <= 32 and _in_boxes(page_size) else 128)
        fills_sm = fills_sm or (wide and rows > 16)
    most = gpu.sms * (1 if fills_sm else parts_per_sm)
    if on_sm90:  # blocks of rows run side by side, each with all parts
        most = max(most // -(-rows // block), 1)
    groups = most // num_kv_heads
    # Heads that share lines of memory walk side by side even if some SMs get a part less: else lines are read twice.
    item = 2 if kv_dtype is None else kv_dtype.itemsize
    tenths = XQA_THIN_TENTHS if on_sm90 and head_dim * item % 128 else XQA_SIDE_TENTHS
    if num_kv_heads == 1 or groups * num_kv_heads * 10 < most * tenths:
        return most
    for fewer in range(groups, groups - groups // 10, -1):
        if batch_size and (batch_size % fewer == 0 or fewer % batch_size == 0):
            return fewer * num_kv_heads
    return groups * num_kv_heads


def suits_prefill(
    device: torch.device,
    batch_size: int,
    num_kv_heads: int,
    *,
    rows: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    fixed_split_tokens: int = 0,
) -> bool:
    """Whether `fmha_paged`'s kernels serve such decode calls faster than those of `xqa_decode`, whatever the lengths.

    Products bind there, and prefill's tiles have twice as many keys. Few works are divided better by decode's plan, 129
    to 192 rows by its large blocks. Measured on an H200 (docs/log/xqa_decode.md, "Decode of many works by prefill").

    Args:
        rows: Query rows (token, head) of a request and KV head.
        dtype, kv_dtype: Of q and of the pages.
    """
    if dtype != kv_dtype or dtype.itemsize != 2 or fixed_split_tokens or not 64 < head_dim <= 128 or head_dim % 8:
        return False
    if not (64 < rows <= XQA_ROWS_PER_BLOCK or rows > XQA_LARGE_BLOCK) or not _in_boxes(page_size) or page_size > 128:
        return False
    if not runs_hopper_kernels(device):
        return False
    per_sm = XQA_PREFILL_WORKS_PER_SM if rows <= XQA_ROWS_PER_BLOCK else XQA_PREFILL_WORKS_PER_SM_OF_MANY
    return batch_size * num_kv_heads >= per_sm * _gpu(device).sms


def xqa_invariant_cuts(
    num_kv_heads: int,
    *,
    num_q_heads: int | None = None,
    seqlen_q: int = 1,
    head_dim: int = 128,
    kv_dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
) -> int:
    """`fixed_split_tokens` of a batch-invariant `XqaDecodePlan`, measured on an H200.

    A request must be cut alike alone and among others. Alone it wants a cut for every CTA, 256 over all KV heads. Some
    kernels on Hopper add neighbouring cuts up without a trip to memory, and get as many. They are those for head dims
    65 to 128 and up to 16 query rows per KV head. Their FP8 pages have 8, 16, 32, ... tokens. For other kernels a cut
    costs a CTA up to a microsecond and a partial result. They get about half as many, of 512 tokens and more.

    Args:
        num_kv_heads: KV heads.
        num_q_heads: Query heads; None: up to 16 rows per KV head.
        seqlen_q: Query tokens of a request.
        head_dim: Of K and V.
        kv_dtype, page_size: Of the pages.
    """
    rows = seqlen_q * ((num_q_heads or num_kv_heads) // num_kv_heads)
    fp8 = kv_dtype.itemsize == 1
    if _folds(kv_dtype.itemsize, rows, head_dim, page_size):
        cuts = XQA_FOLDED_CUTS.get(num_kv_heads, min(max(256 // num_kv_heads, 8), 64))
        return -min(cuts, 16 if fp8 and rows > 8 else cuts)
    if num_kv_heads <= XQA_FEW_HEADS:
        most = min(XQA_CUTS_OF_FEW_HEADS // num_kv_heads, XQA_MOST_CUTS_OF_HEAD)
    else:
        most = min(max(XQA_INVARIANT_CUTS // num_kv_heads, 4), 16)
    return cut_rule(most, XQA_LEAST_CUT)


def _mla_parts(num_sms: int, blocks: int) -> int:
    """Parts for requests of `blocks` row blocks: as many as SMs, in groups for the blocks of a work.

    A group reads the same tiles side by side (csrc/mla_decode/plan.h).
    """
    if blocks == 1:
        return num_sms
    group = next((n for n in range(2, min(blocks, MLA_MOST_BLOCKS_PER_WORK) + 1) if blocks % n == 0), 1)
    return num_sms // group * group or num_sms


def mla_num_sm_parts(device: torch.device, blocks: int) -> int:
    """Parts of a plan for requests of `blocks` row blocks."""
    parts = default_num_sm_parts(device, MLA_PARTS_PER_SM)
    return _mla_parts(parts, blocks) if device.type == "cuda" else parts
