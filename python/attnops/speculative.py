"""What a speculative step is made of: a tree to verify, and what the draft model gets of the tokens that came out.

Names are SGLang's (`EagleVerifyInput`, `EagleDraftInput`). Nothing is read on the host, so a captured step may hold it.
A batch here is that of a draft loop: DECODE, with `cache_seqlens` of one token beyond the prefix. A padding request has
a negative `out_cache_loc`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.ops.speculation import DraftTree, Verified
from attnops.types import AttentionBatch, ForwardMode, StepBackend, TokenPool


@dataclass(kw_only=True)
class VerifyInput:
    """A tree of `draft_token_num` tokens for each of B requests.

    Args:
        draft_token: int64 ``[B * N]``, bonus token first.
        custom_mask: uint8 ``[B, N, ceil(N / 8)]``: the packed tree.
        positions: int64 ``[B * N]``.
        draft_token_num: N.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: int64 ``[B, N]``, as of `DraftTree`.
        path_length: Tokens that come out at most: depth of the trees plus one, at most N.

    Raises:
        ValueError: a tensor is not of that shape, or `path_length` not in ``[1, N]``.
    """

    draft_token: Tensor
    custom_mask: Tensor
    positions: Tensor
    draft_token_num: int
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    path_length: int

    def __post_init__(self) -> None:
        size, count = self.retrieve_index.shape[0], self.draft_token_num
        shapes = {
            "draft_token": (size * count,),
            "custom_mask": (size, count, -(-count // 8)),
            "positions": (size * count,),
            "retrieve_index": (size, count),
            "retrieve_next_token": (size, count),
            "retrieve_next_sibling": (size, count),
        }
        for name, shape in shapes.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise ValueError(f"attnops: {name} of a VerifyInput must have shape {shape}, got {got}")
        if not 1 <= self.path_length <= count:
            raise ValueError(f"attnops: path_length must be in [1, {count}] (draft_token_num), got {self.path_length}")

    @staticmethod
    def of_tree(tree: DraftTree, path_length: int) -> VerifyInput:
        """The input of a tree that `ops.build_draft_tree` made with tokens."""
        if tree.tokens is None:
            raise ValueError("attnops: a VerifyInput needs a tree with tokens; give build_draft_tree draft_tokens")
        count = tree.retrieve_index.shape[1]
        return VerifyInput(
            draft_token=tree.tokens,
            custom_mask=tree.tree_mask,
            positions=tree.positions,
            draft_token_num=count,
            retrieve_index=tree.retrieve_index,
            retrieve_next_token=tree.retrieve_next_token,
            retrieve_next_sibling=tree.retrieve_next_sibling,
            path_length=min(path_length, count),
        )

    def prepare_for_verify(
        self, batch: AttentionBatch, token_to_kv_pool: TokenPool, attn_backend: StepBackend
    ) -> AttentionBatch:
        """The target's TARGET_VERIFY step of a draft loop's batch: the tree's tokens take the cells behind the prefix.

        Args:
            token_to_kv_pool, attn_backend: The target's.
        """
        step = _step_behind(batch, self.draft_token_num, ForwardMode.TARGET_VERIFY, token_to_kv_pool, attn_backend)
        step.positions, step.tree_mask = self.positions, self.custom_mask
        return step

    def verify(self, target_predict: Tensor) -> Verified:
        """Judges greedily. target_predict: int64 ``[B * N]``, the target's token after each node."""
        return ops.verify_tree_greedy(
            self.draft_token.view(-1, self.draft_token_num),
            self.retrieve_index,
            self.retrieve_next_token,
            self.retrieve_next_sibling,
            target_predict,
            self.path_length,
        )


def keep_accepted(verified: Verified, step: AttentionBatch) -> None:
    """Moves K and V of accepted tokens to the first cells behind the prefix, in all layers of a verify step's pool."""
    pool = step.token_to_kv_pool
    if pool is None or step.out_cache_loc is None:
        raise ValueError("attnops: keep_accepted needs the verify step's token_to_kv_pool and out_cache_loc")
    full, window = pool.all_buffers()
    slot_map = pool.slot_map if window else None
    ops.move_kv(verified.accept_index, step.out_cache_loc, full, window_pages=window, slot_map=slot_map)


@dataclass(kw_only=True)
class DraftInput:
    """What the draft model gets after a verify step, for all `path_length` rows of a request (SGLang's version 2).

    Row i belongs to the i-th accepted node: the token that follows it, and the target's hidden state there. Rows behind
    the last accepted one hold token 0. They are computed and stored, and nobody reads them.

    Args:
        input_ids: int64 ``[B * path_length]``.
        hidden_states: ``[B * path_length, D]``, the target's.
        last_row: int64 ``[B]``: row of the last accepted token, from which the next loop starts.
        bonus_token: int64 ``[B]``: the token that follows it, root of the next tree.
        new_seqlens: int32 ``[B]``: tokens of the prefix after this step.
    """

    input_ids: Tensor
    hidden_states: Tensor
    last_row: Tensor
    bonus_token: Tensor
    new_seqlens: Tensor

    @staticmethod
    def after_verify(verified: Verified, hidden_states: Tensor, batch: AttentionBatch) -> DraftInput:
        """Of what was verified.

        Args:
            hidden_states: ``[B * N, D]``, the target's at every node.
            batch: The draft loop's.
        """
        size, path_length = verified.accept_index.shape
        rows = verified.accept_index.long()
        known = rows >= 0
        rows = rows.clamp(min=0)
        ids = torch.where(known, verified.predicts[rows].long(), 0)
        count = verified.accept_token_num
        last = torch.arange(size, device=rows.device) * path_length + count
        return DraftInput(
            input_ids=ids.flatten(),
            hidden_states=hidden_states[rows.flatten()],
            last_row=last,
            bonus_token=ids.flatten()[last],
            new_seqlens=batch.cache_seqlens + count,
        )

    def prepare_for_extend(
        self, batch: AttentionBatch, token_to_kv_pool: TokenPool, attn_backend: StepBackend
    ) -> AttentionBatch:
        """The draft model's DRAFT_EXTEND step over the cells behind the prefix, `path_length` tokens per request.

        Args:
            token_to_kv_pool, attn_backend: The draft model's.
        """
        tokens = self.input_ids.shape[0] // max(batch.batch_size, 1)
        return _step_behind(batch, tokens, ForwardMode.DRAFT_EXTEND, token_to_kv_pool, attn_backend)


def _step_behind(
    batch: AttentionBatch, tokens: int, mode: ForwardMode, pool: TokenPool, backend: StepBackend
) -> AttentionBatch:
    """A step of `tokens` tokens per request behind the prefixes of a draft loop's batch."""
    table, size = batch.req_to_token, batch.batch_size
    if table is None or batch.out_cache_loc is None:
        raise ValueError("attnops: a speculative step needs the batch's req_to_token and out_cache_loc")
    prefix = (batch.cache_seqlens.long() - 1).view(-1, 1)
    positions = prefix + torch.arange(tokens, device=batch.device)
    cells = positions.clamp(max=table.shape[1] - 1)
    slots = table[batch.req_pool_indices.long()].gather(1, cells).long()
    slots = slots.masked_fill((batch.out_cache_loc < 0).view(-1, 1), -1)
    return AttentionBatch(
        forward_mode=mode,
        req_pool_indices=batch.req_pool_indices,
        cache_seqlens=batch.cache_seqlens + (tokens - 1),
        num_tokens=size * tokens,
        req_to_token=table,
        out_cache_loc=slots.flatten(),
        tokens_per_request=tokens,
        positions=positions.flatten(),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
