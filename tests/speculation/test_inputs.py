"""`VerifyInput` and `DraftInput`: the steps that they make of a draft loop's batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from attnops.ops.speculation import Verified
from attnops.pools import MHATokenToKVPool, SWAKVPool
from attnops.speculative import DraftInput, VerifyInput, keep_accepted
from attnops.types import AttentionBatch, ForwardMode
from graph_tape import GraphTape
from right_calls import speculation_arguments


def make_input(path_length=3):
    tree = ops.build_draft_tree(**speculation_arguments()["build_draft_tree"])
    return VerifyInput.of_tree(tree, path_length)


def loop_batch():
    table = torch.arange(128, dtype=torch.int32).view(2, 64)
    return AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor([1, 0]),
        cache_seqlens=torch.tensor([18, 6], dtype=torch.int32),
        num_tokens=2,
        req_to_token=table,
        out_cache_loc=torch.tensor([0, -1]),
    )


def test_a_verify_step_stands_behind_the_prefix():
    drafts = make_input()
    step = drafts.prepare_for_verify(loop_batch(), None, None)
    assert step.forward_mode is ForwardMode.TARGET_VERIFY and step.tokens_per_request == 4
    assert step.cache_seqlens.tolist() == [21, 9]  # lengths never count drafts twice
    assert step.out_cache_loc.tolist() == [64 + 17, 64 + 18, 64 + 19, 64 + 20] + [-1] * 4  # padding is not stored
    assert step.positions.tolist() == [17, 18, 18, 19, 5, 6, 6, 7]
    assert torch.equal(step.tree_mask, drafts.custom_mask)


def test_the_draft_model_gets_all_rows_and_the_last_one():
    drafts = make_input()
    target = torch.tensor([3, 1, 0, 9, 5, 0, 6, 0])  # node 0, 1, 3 of the first; node 0, 2 of the second
    verified = drafts.verify(target)
    assert verified.accept_index.tolist() == [[0, 1, 3], [4, 6, -1]]
    hidden = torch.arange(8.0).view(8, 1)
    draft = DraftInput.after_verify(verified, hidden, loop_batch())
    assert draft.input_ids.tolist() == [3, 1, 9, 5, 6, 0]
    assert draft.hidden_states.flatten()[:5].tolist() == [0, 1, 3, 4, 6]
    assert draft.last_row.tolist() == [2, 4]
    assert draft.bonus_token.tolist() == [9, 6]
    assert draft.new_seqlens.tolist() == [20, 7]
    step = draft.prepare_for_extend(loop_batch(), None, None)
    assert step.forward_mode is ForwardMode.DRAFT_EXTEND and step.cache_seqlens.tolist() == [20, 8]
    assert step.positions.tolist() == [17, 18, 19, 5, 6, 7]


@pytest.mark.parametrize("swa", [False, True])
def test_accepted_rows_move_in_every_layer(swa):
    if swa:
        pool = SWAKVPool(128, 128, 16, torch.float32, 1, 4, [0], [1, 2])
        pool.slot_map.copy_(torch.arange(128).flip(0))
    else:
        pool = MHATokenToKVPool(128, 16, torch.float32, 1, 4, 3)
    full, window = pool.all_buffers()
    assert (len(full), len(window)) == ((2, 4) if swa else (6, 0))
    for buffer in [*full, *window]:
        buffer.copy_(torch.arange(128.0).view(8, 16, 1, 1).expand_as(buffer))
    step = dataclasses.replace(make_input().prepare_for_verify(loop_batch(), None, None), token_to_kv_pool=pool)
    verified = Verified.allocate(2, 4, 3)
    verified.accept_index.copy_(torch.tensor([[0, 2, 3], [4, 6, -1]]))
    keep_accepted(verified, step)
    for buffer in full:
        assert buffer.flatten(0, 1)[81:85, 0, 0].tolist() == [81, 83, 84, 84]
    for buffer in window:
        assert buffer.flatten(0, 1).flip(0)[81:85, 0, 0].tolist() == [46, 44, 43, 43]


def test_a_tape_holds_all_of_it():
    drafts, batch, target = make_input(), loop_batch(), torch.tensor([3, 1, 0, 9, 5, 0, 6, 0])
    hidden = torch.arange(8.0).view(8, 1)
    tape = GraphTape()
    with tape.capture():
        step = drafts.prepare_for_verify(batch, None, None)
        verified = drafts.verify(target)
        draft = DraftInput.after_verify(verified, hidden, batch)
    target.copy_(torch.tensor([5, 0, 8, 0, 3, 1, 0, 9]))
    batch.cache_seqlens.add_(3)
    tape.replay()
    assert verified.accept_index.tolist() == [[0, 2, -1], [4, 5, 7]]
    assert step.cache_seqlens.tolist() == [24, 12]
    assert draft.new_seqlens.tolist() == [22, 11]
    assert draft.bonus_token.tolist() == [8, 9]


def test_errors_name_what_is_wrong():
    drafts = make_input()
    with pytest.raises(ValueError, match=r"custom_mask of a VerifyInput must have shape \(2, 4, 1\), got \(2, 4, 2\)"):
        dataclasses.replace(drafts, custom_mask=torch.zeros(2, 4, 2))
    with pytest.raises(ValueError, match=r"path_length must be in \[1, 4\] \(draft_token_num\), got 5"):
        dataclasses.replace(drafts, path_length=5)
    with pytest.raises(ValueError, match="needs a tree with tokens"):
        VerifyInput.of_tree(
            ops.build_draft_tree(torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), torch.ones(1).int(), 1), 2
        )
    with pytest.raises(ValueError, match="needs the batch's req_to_token and out_cache_loc"):
        drafts.prepare_for_verify(dataclasses.replace(loop_batch(), out_cache_loc=None), None, None)
    with pytest.raises(ValueError, match="keep_accepted needs the verify step's token_to_kv_pool"):
        keep_accepted(Verified.allocate(2, 4, 3), drafts.prepare_for_verify(loop_batch(), None, None))
