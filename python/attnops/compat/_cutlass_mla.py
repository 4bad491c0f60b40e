"""`sgl_kernel`'s CUTLASS MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import as_int32, refuse
from attnops.compat._errors import names_the_peers
from attnops.metadata.plan import MLA_HEAD_DIM_V, MLA_ROWS_PER_WORK, MlaDecodePlan
from attnops.metadata.plan_parts import MLA_PARTS_PER_SM, default_num_sm_parts, mla_num_sm_parts

_ALIGN = 256  # bytes
_MAX_HEADS = 128  # that a workspace is sized for, as in the peer


@names_the_peers("cutlass_mla_get_workspace_size")
def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1, *, device: str | None = None
) -> int:
    """Bytes of `cutlass_mla_decode`'s workspace for up to 128 heads; the sequence length does not matter.

    Args:
        sm_count: 0: of the device.
        num_kv_splits: 1 or -1, see `cutlass_mla_decode`.
        device: By default the GPU where there is one.
    """
    _check_splits("cutlass_mla_get_workspace_size", num_kv_splits)
    for argument, value in (("max_seq_len", max_seq_len), ("num_batches", num_batches), ("sm_count", sm_count)):
        if value < 0:
            raise ValueError(
                f"attnops.compat: cutlass_mla_get_workspace_size: {argument} must be at least 0, got {value}"
            )
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    parts = sm_count or default_num_sm_parts(where, MLA_PARTS_PER_SM)
    return _workspace_bytes(num_batches, _MAX_HEADS, parts)


@names_the_peers(
    "cutlass_mla_decode",
    q="q_nope",
    kv_pages="kv_c_and_k_pe_cache",
    cache_seqlens="seq_lens",
    softmax_scale="sm_scale",
)
def cutlass_mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    workspace: Tensor,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> Tensor:
    """`attnops.ops.mla_decode` of one query token per request.

    Args:
        q_nope, q_pe: ``[B, H, 512]`` and ``[B, H, 64]``, any H and strides; not copied and not padded.
        kv_c_and_k_pe_cache: ``[P, page_size, 576]``, any page size.
        seq_lens: int32 ``[B]``.
        page_table: int32 ``[B, max_pages]``.
        workspace: uint8, at least `cutlass_mla_get_workspace_size` bytes: the plan and the splits' partial results.
        num_kv_splits: 1, the peer's default, or -1, automatic. Either way splits are planned on the device, and a graph
            may hold the call.

    Returns:
        ``[B, H, 512]``.

    Raises:
        NotImplementedError: another `num_kv_splits`.
        ValueError: the workspace is too small.
    """
    _check_splits("cutlass_mla_decode", num_kv_splits)
    plan = _carve(workspace, *q_nope.shape[:2])
    lengths = as_int32("cutlass_mla_decode", "seq_lens", seq_lens, q_nope.device)
    ops.mla_decode_plan(plan, lengths)
    out, _ = ops.mla_decode(q_nope, kv_c_and_k_pe_cache, page_table, lengths, plan, softmax_scale=sm_scale, q_pe=q_pe)
    return out


def _check_splits(function: str, num_kv_splits: int) -> None:
    if num_kv_splits not in (1, -1):
        raise refuse(function, f"num_kv_splits={num_kv_splits}", "splits are planned on the device: leave 1 or -1")


def _sizes(batch_size: int, num_heads: int, parts: int) -> list[int]:
    """Bytes of a plan's tensors: metadata, splits, semaphores, lse, out."""
    works = batch_size * -(-num_heads // MLA_ROWS_PER_WORK)
    rows = 2 * parts * MLA_ROWS_PER_WORK
    return [4 * n for n in (parts * 8, batch_size + 1, works, rows, rows * MLA_HEAD_DIM_V)]


def _workspace_bytes(batch_size: int, num_heads: int, parts: int) -> int:
    return _ALIGN + sum(-(-size // _ALIGN) * _ALIGN for size in _sizes(batch_size, num_heads, parts))


def _carve(workspace: Tensor, batch_size: int, num_heads: int) -> MlaDecodePlan:
    """A plan in the workspace, of as many parts as suit the device and the batch, or as fit."""
    if torch.compiler.is_compiling():  # a tracer knows no addresses: the plan's memory is allocated
        return MlaDecodePlan.allocate(batch_size, num_q_heads=num_heads, device=workspace.device)
    if workspace.dtype != torch.uint8 or not workspace.is_contiguous():
        raise ValueError("attnops.compat: cutlass_mla_decode: workspace must be contiguous uint8")
    parts = mla_num_sm_parts(workspace.device, -(-num_heads // MLA_ROWS_PER_WORK))
    wanted = parts
    while parts and _workspace_bytes(batch_size, num_heads, parts) > workspace.numel():
        parts -= 1
    if not parts:
        raise ValueError(
            f"attnops.compat: cutlass_mla_decode: workspace has {workspace.numel()} bytes, "
            f"{_workspace_bytes(batch_size, num_heads, wanted)} are needed (cutlass_mla_get_workspace_size)"
        )
    views, begin = [], -workspace.data_ptr() % _ALIGN
    for size in _sizes(batch_size, num_heads, parts):
        views.append(workspace[begin : begin + size])
        begin += -(-size // _ALIGN) * _ALIGN
    metadata, splits, semaphores = (view.view(torch.int32) for view in views[:3])
    lse, out = (view.view(torch.float32) for view in views[3:])
    semaphores.zero_()  # the workspace may hold anything
    return MlaDecodePlan(
        batch_size=batch_size,
        seqlen_q=1,
        num_q_heads=num_heads,
        window_left=-1,
        fixed_split_tokens=0,
        tile_scheduler_metadata=metadata.view(parts, 8),
        num_splits=splits,
        out_partial=out.view(2 * parts, MLA_ROWS_PER_WORK, MLA_HEAD_DIM_V),
        lse_partial=lse.view(2 * parts, MLA_ROWS_PER_WORK),
        semaphores=semaphores,
    )
