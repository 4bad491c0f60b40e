"""SGLang's functions over draft trees and draft loops, which write into what they are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._errors import names_the_peers
from attnops.ops.speculation import DraftTree, TreeMaskMode, Verified

_BUILD = "attnops.compat: build_tree_kernel_efficient"


@names_the_peers(
    "build_tree_kernel_efficient",
    top_scores_index="selected_index",
    cache_seqlens="verified_seq_len",
    retrieve_index="retrive_index",
    retrieve_next_token="retrive_next_token",
    retrieve_next_sibling="retrive_next_sibling",
)
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> None:
    """`attnops.ops.build_draft_tree`, with the mask in SGLang's layout.

    Args:
        tree_mask: Written. FULL_MASK: bool, requests one after the other, N rows of ``len + N``; the prefix's columns
            are left as they are. QLEN_ONLY: bool ``[B * N * N]``. QLEN_ONLY_BITPACKING: uint8, 1, 2 or 4 bytes a row.
        depth: Steps of the loop: parent_list has ``topk * (depth - 1) + 1`` columns, or none with one step.
        draft_token_num: N, which selected_index must have.

    Raises:
        ValueError: draft_token_num or depth is not that of the tensors.
    """
    batch_size, drafts = selected_index.shape
    if draft_token_num != drafts + 1:
        raise ValueError(
            f"{_BUILD}: draft_token_num must be {drafts + 1} (columns of selected_index + 1), got {draft_token_num}"
        )
    if depth > 1 and parent_list.shape[1] != topk * (depth - 1) + 1:
        raise ValueError(
            f"{_BUILD}: parent_list must have {topk * (depth - 1) + 1} columns (topk * (depth - 1) + 1), "
            f"got {parent_list.shape[1]}"
        )
    packed = tree_mask.new_zeros(batch_size, draft_token_num, -(-draft_token_num // 8), dtype=torch.uint8)
    nodes = (retrive_index, retrive_next_token, retrive_next_sibling)
    out = DraftTree(packed, positions.flatten(), *(node.view(batch_size, draft_token_num) for node in nodes))
    lengths = verified_seq_len.to(torch.int32)
    ops.build_draft_tree(parent_list, selected_index, lengths, topk, out=out)
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        _write_bits(tree_mask, packed)
        return
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    seen = bits.flatten(2)[..., :draft_token_num]
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY:
        tree_mask.view(batch_size, draft_token_num, draft_token_num).copy_(seen)
    elif tree_mask_mode == TreeMaskMode.FULL_MASK:
        _write_full_rows(tree_mask, seen, lengths)
    else:
        raise ValueError(f"{_BUILD}: tree_mask_mode must be 0, 1 or 2, got {tree_mask_mode}")


def _write_bits(tree_mask: Tensor, packed: Tensor) -> None:
    """Rows of 1, 2 or 4 bytes."""
    batch_size, tokens, filled = packed.shape
    if tokens > 32:
        raise ValueError(f"{_BUILD}: tree_mask_mode 2 is for trees of at most 32 tokens, got {tokens}")
    rows = tree_mask.view(torch.uint8).view(batch_size, tokens, 4 if tokens > 16 else 2 if tokens > 8 else 1)
    rows.zero_()
    rows[..., :filled].copy_(packed)


def _write_full_rows(tree_mask: Tensor, seen: Tensor, lengths: Tensor) -> None:
    """The last N columns of each row of ``len + N``."""
    tokens = seen.shape[1]
    width = lengths.long() + tokens
    begin = (width * tokens).cumsum(0) - width * tokens
    row = torch.arange(tokens, device=seen.device)
    first = (begin + lengths).view(-1, 1, 1) + row.view(1, -1, 1) * width.view(-1, 1, 1)
    tree_mask.flatten().scatter_(0, (first + row).flatten(), seen.flatten().to(tree_mask.dtype))


@names_the_peers(
    "verify_tree_greedy",
    retrieve_index="retrive_index",
    retrieve_next_token="retrive_next_token",
    retrieve_next_sibling="retrive_next_sibling",
)
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """`attnops.ops.verify_tree_greedy`. Of nodes that are not accepted, predicts is 0; accept_index ends with -1."""
    ops.verify_tree_greedy(
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict.flatten(),
        out=Verified(predicts, accept_index, accept_token_num),
    )


@names_the_peers(
    "tree_speculative_sampling_target_only",
    retrieve_index="retrive_index",
    retrieve_next_token="retrive_next_token",
    retrieve_next_sibling="retrive_next_sibling",
    uniform_samples_final="uniform_samples_for_final_sampling",
)
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """`attnops.ops.verify_tree_sampling`.

    Args:
        draft_probs: Only read: what was rejected is remembered elsewhere.
        threshold_acc: 0 counts as 1e-9.
        deterministic: Every call is.
    """
    ops.verify_tree_sampling(
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs.view(*candidates.shape, -1),
        draft_probs=draft_probs.view(*candidates.shape, -1),
        threshold_single=threshold_single,
        threshold_acc=max(threshold_acc, 1e-9),
        out=Verified(predicts, accept_index, accept_token_num),
    )


_INDICES = "generate_draft_decode_kv_indices"


class _Launch:
    """SGLang's Triton kernel by name: `generate_draft_decode_kv_indices[(steps, requests, topk)](...)` writes.

    The arguments of the second call are those of `write_draft_decode_kv_indices` behind the grid.
    """

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """The function of a grid: steps of the loop, requests, branches.

        Raises:
            ValueError: the grid has not three numbers.
        """
        if len(grid) != 3:
            raise ValueError(f"attnops.compat: {_INDICES}: the grid must be (steps, requests, topk), got {tuple(grid)}")
        steps, size, topk = (int(number) for number in grid)
        return functools.partial(write_draft_decode_kv_indices, (steps, size, topk))


generate_draft_decode_kv_indices = _Launch()


@names_the_peers(_INDICES, cache_seqlens="paged_kernel_lens")
def write_draft_decode_kv_indices(
    grid: tuple[int, int, int],
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
    pool_len: int,
    kv_indices_stride: int,
    kv_indptr_stride: int,
    bs_upper: int,
    iter_upper: int,
    num_tokens_upper: int,
    page_size: int,
) -> None:
    """`attnops.ops.generate_draft_decode_kv_indices`, in S steps for B requests with topk branches.

    Args:
        grid: S, B, topk.
        req_pool_indices: ``[>= B]``. paged_kernel_lens: ``[>= B]``, int32 or int64, without drafts.
        req_to_token: int32 ``[max_requests, pool_len]``.
        kv_indices: int32 or int64 ``[>= S, kv_indices_stride]``, written. What does not fit is left out.
        kv_indptr: int32 ``[>= S, kv_indptr_stride]``, of which cells 1 to ``B * topk`` are written.
        positions: ``[>= B * topk]``, the branches' lengths, of which the sums stand in kv_indptr.
        bs_upper, iter_upper, num_tokens_upper: Bounds that nothing depends on here.

    Raises:
        ValueError: pool_len or a stride is not that of its tensor, or a tensor is too short for the grid.
    """
    steps, size, topk = grid
    rows = size * topk
    for name, got, tensor in (
        ("pool_len", pool_len, req_to_token),
        ("kv_indices_stride", kv_indices_stride, kv_indices),
        ("kv_indptr_stride", kv_indptr_stride, kv_indptr),
    ):
        if got != tensor.stride(0):
            raise ValueError(f"attnops.compat: {_INDICES}: {name} must be {tensor.stride(0)}, got {got}")
    for name, tensor, least in (
        ("req_pool_indices", req_pool_indices, size),
        ("paged_kernel_lens", paged_kernel_lens, size),
        ("kv_indices", kv_indices, steps),
        ("kv_indptr", kv_indptr, steps),
        ("positions", positions, rows),
    ):
        if tensor.shape[0] < least:
            raise ValueError(
                f"attnops.compat: {_INDICES}: {name}.shape[0] must be {least} or more (of the grid {grid}), "
                f"got {tensor.shape[0]}"
            )
    lengths = paged_kernel_lens[:size].to(torch.int32)
    indices = kv_indices[:steps].to(torch.int32)
    indptr = torch.empty(steps, rows + 1, dtype=torch.int32, device=kv_indptr.device)
    ops.generate_draft_decode_kv_indices(
        req_to_token,
        req_pool_indices[:size],
        lengths,
        topk,
        steps,
        page_size,
        kv_indptr=indptr,
        kv_indices=indices,
    )
    if indices.data_ptr() != kv_indices.data_ptr():
        kv_indices[:steps].copy_(indices)
    row, step = (torch.arange(1, n + 1, device=kv_indptr.device) for n in (rows, steps))
    kv_indptr[:steps, 1 : rows + 1].copy_(positions[:rows].cumsum(0) + row * step.unsqueeze(1))
