"""Speculative decoding around attention: trees of draft tokens and their judgement. Slots of drafts: `draft_slots`.

B requests have trees of N tokens: node 0 is the bonus token, which is known, the others are drafts, parents before
their children. Everything is device work of one launch; nothing is read on the host. ``cache_seqlens`` never counts
the tokens of the tree.

``report`` is the buffer of the checked mode, int32 ``[8]``. With it, what tensors hold out of range is recorded.
Without it, that is an error on a CPU, and on a GPU the token is left out.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.ops._arguments import MAX_TREE_TOKENS, names_its_arguments, register_fake
from attnops.types import check_range


class TreeMaskMode(enum.IntEnum):
    """How a mask that is to be packed is laid out; SGLang's numbers."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class DraftTree(NamedTuple):
    """What `build_draft_tree` makes, and attention and judgement take.

    Args:
        tree_mask: uint8 ``[B, N, ceil(N / 8)]``, little-endian: bit j of row i says that node i sees node j.
        positions: int64 ``[B * N]``: length of the request plus depth of the node.
        retrieve_index: int64 ``[B, N]``: row of a node in the batch.
        retrieve_next_token: int64 ``[B, N]``: first child of a node, -1: none.
        retrieve_next_sibling: int64 ``[B, N]``: next child of the node's parent, -1: none.
        tokens: int64 ``[B * N]``: bonus token, then drafts; None where no tokens were given.
    """

    tree_mask: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    tokens: Tensor | None = None

    @staticmethod
    def allocate(batch_size: int, num_tokens: int, device: torch.device | str = "cpu") -> DraftTree:
        """Destinations for trees of `num_tokens` tokens, zeros."""
        mask = torch.zeros(batch_size, num_tokens, -(-num_tokens // 8), dtype=torch.uint8, device=device)
        flat = mask.new_zeros(2, batch_size * num_tokens, dtype=torch.int64)
        index, child, sibling = mask.new_zeros(3, batch_size, num_tokens, dtype=torch.int64)
        return DraftTree(mask, flat[0], index, child, sibling, flat[1])


class Verified(NamedTuple):
    """Which tokens came out.

    Args:
        predicts: int32 ``[B * N]``: of an accepted node the token that follows it; 0 elsewhere.
        accept_index: int32 ``[B, path_length]``: rows of the accepted nodes in their order, the root first, then -1.
        accept_token_num: int32 ``[B]``: accepted drafts. One token more comes out, of the last accepted node.
    """

    predicts: Tensor
    accept_index: Tensor
    accept_token_num: Tensor

    @staticmethod
    def allocate(batch_size: int, num_tokens: int, path_length: int, device: torch.device | str = "cpu") -> Verified:
        """Destinations, zeros. `path_length`: depth of the trees plus one."""
        check_range("Verified.allocate", "path_length", path_length, 1, MAX_TREE_TOKENS)
        shapes = ((batch_size * num_tokens,), (batch_size, path_length), (batch_size,))
        return Verified(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


@names_its_arguments
def build_draft_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    cache_seqlens: Tensor,
    topk: int,
    *,
    draft_tokens: Tensor | None = None,
    bonus_tokens: Tensor | None = None,
    out: DraftTree | None = None,
    report: Tensor | None = None,
) -> DraftTree:
    """The tree of the chosen candidates of a draft loop.

    Step 0 of the loop proposes `topk` candidates, each later step `topk` for each of `topk` branches. Candidates are
    numbered in their order: candidate c belongs to group ``c // topk``, whose common parent is candidate
    ``parent_list[b, c // topk]``; that of group 0 is the root.

    Args:
        parent_list: int32 or int64 ``[B, W]``, rows dense.
        top_scores_index: int32 or int64 ``[B, N - 1]``, rows dense: the chosen candidates, parents before children.
            N is at most 1024.
        cache_seqlens: int32 ``[B]``: tokens before the bonus token. A negative one counts as 0.
        topk: At least 1.
        draft_tokens: int32 or int64 ``[B, N - 1]``, rows dense: tokens of the chosen candidates.
        bonus_tokens: int32 or int64 ``[B]``. Both or none.
        out: Destinations, dense; allocated when omitted.
        report: Checked mode, see the module. A node whose parent does not stand before it sees itself alone, and is
            nobody's child.

    Returns:
        `out`, its `tokens` None where none were given.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for.

    Source: SGLang's `build_tree_kernel_efficient`, whose links and positions these are.
    """
    if out is None:
        out = DraftTree.allocate(cache_seqlens.shape[0], top_scores_index.shape[1] + 1, cache_seqlens.device)
    if draft_tokens is None and bonus_tokens is None:
        out = out._replace(tokens=None)
    torch.ops.attnops.build_draft_tree(
        *out, parent_list, top_scores_index, draft_tokens, bonus_tokens, cache_seqlens, topk, report
    )
    return out


@names_its_arguments
def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    path_length: int | None = None,
    *,
    out: Verified | None = None,
    report: Tensor | None = None,
) -> Verified:
    """Goes down each tree as long as a child is the token that the target predicts.

    Args:
        candidates: int32 or int64 ``[B, N]``, rows dense: the tokens of the trees, N at most 1024.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: int32 or int64 ``[B, N]``, as in `DraftTree`.
        target_predict: int32 or int64 ``[B * N]``: the target's token after each node, by row.
        path_length: Tokens that come out at most, at least 1: depth of the trees plus one. N where omitted.
        out: Destinations, dense, instead; allocated when omitted.
        report: Checked mode, see the module.

    Returns:
        `out`.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for.

    Source: SGLang's function of this name.
    """
    if out is None:
        batch_size, num_tokens = candidates.shape
        length = num_tokens if path_length is None else path_length
        out = Verified.allocate(batch_size, num_tokens, length, candidates.device)
    torch.ops.attnops.verify_tree_greedy(
        *out, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, report
    )
    return out


@names_its_arguments
def verify_tree_sampling(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_final: Tensor,
    target_probs: Tensor,
    path_length: int | None = None,
    *,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    out: Verified | None = None,
    report: Tensor | None = None,
) -> Verified:
    """Goes down each tree by the target's probabilities; with both thresholds at 1 what comes out follows the target.

    One number per node decides among its children. A child is taken where the number is below the probability of it
    and its rejected siblings together. At the last node a token is drawn from what the rejected children leave. Where
    rounding leaves nothing, it is the most likely token.

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, path_length, out, report: As in
            :func:`verify_tree_greedy`.
        uniform_samples: float32 ``[B, N]``, dense, in [0, 1): the number of each node.
        uniform_samples_final: float32 ``[B]``, dense, in [0, 1): for the last token.
        target_probs: float32 ``[B, N, V]``, dense. What is negative, infinite or NaN counts as 0.
        draft_probs: float32 ``[B, N, V]``, dense: taken off before the last draw, except after a path of full length.
        threshold_single: In [0, 1]: a child of that probability or more is taken.
        threshold_acc: In (0, 1]: the sum is divided by it.

    Returns:
        `out`. The same arguments give the same tokens.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for.

    Source: SGLang's `tree_speculative_sampling_target_only`.
    """
    if out is None:
        batch_size, num_tokens = candidates.shape
        length = num_tokens if path_length is None else path_length
        out = Verified.allocate(batch_size, num_tokens, length, candidates.device)
    torch.ops.attnops.verify_tree_sampling(
        *out,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        uniform_samples,
        uniform_samples_final,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        report,
    )
    return out


@names_its_arguments
def pack_tree_mask(
    mask: Tensor,
    num_tokens: int,
    layout: TreeMaskMode | int = TreeMaskMode.FULL_MASK,
    *,
    mask_indptr: Tensor | None = None,
    tree_mask: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """SGLang's masks of trees as ours, in bits.

    Args:
        mask: bool or uint8, 1-D, dense. FULL_MASK: requests one after the other, each N rows of prefix and tree.
            QLEN_ONLY: ``B * N * N`` elements. QLEN_ONLY_BITPACKING: uint8, N rows of 1, 2 or 4 bytes, N at most 32.
        num_tokens: N, at most 1024.
        layout: One of `TreeMaskMode`.
        mask_indptr: int32 or int64 ``[B + 1]``: where each request's mask begins, in elements. FULL_MASK only.
            A request whose bounds are no N rows sees its prefix alone.
        tree_mask: Destination uint8 ``[B, N, ceil(N / 8)]``; allocated when omitted.
        report: Checked mode, see the module: also of a mask that hides a key of the prefix, which ours cannot say.

    Returns:
        `tree_mask`.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for. Or `mask` holds
            no whole trees.
    """
    flat = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    if tree_mask is None:
        check_range("attnops::pack_tree_mask", "num_tokens", num_tokens, 1, MAX_TREE_TOKENS)
        item = num_tokens if layout == TreeMaskMode.QLEN_ONLY else 4 if num_tokens > 16 else 2 if num_tokens > 8 else 1
        if layout in (1, 2) and flat.dim() == 1 and flat.shape[0] % (num_tokens * item):
            raise ValueError(
                f"attnops::pack_tree_mask: mask.shape[0] must be a multiple of {num_tokens * item}, as a tree of "
                f"num_tokens {num_tokens} takes so many elements, got {flat.shape[0]}"
            )
        batch_size = flat.shape[0] // max(num_tokens * item, 1) if mask_indptr is None else mask_indptr.shape[0] - 1
        tree_mask = flat.new_zeros(max(batch_size, 0), num_tokens, -(-num_tokens // 8), dtype=torch.uint8)
    elif tree_mask.dim() == 3 and tree_mask.shape[1] != num_tokens:
        raise ValueError(
            f"attnops::pack_tree_mask: tree_mask.shape[1] must be {num_tokens} (num_tokens), got {tree_mask.shape[1]}, "
            f"shape {list(tree_mask.shape)}"
        )
    torch.ops.attnops.pack_tree_mask(tree_mask, flat, int(layout), mask_indptr, report)
    return tree_mask


for _op in ("build_draft_tree", "verify_tree_greedy", "verify_tree_sampling", "pack_tree_mask"):
    register_fake(_op)
