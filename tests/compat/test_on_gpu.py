"""Functions of `attnops.compat` on a GPU: what they give on the CPU, where they are compared with the reference."""

from __future__ import annotations

import pytest
import torch
from checks import relative_error
from right_calls import compat_calls
from torch import Tensor

pytestmark = pytest.mark.gpu

MADE = ("Wrapper", "BatchAttention", ".plan", ".begin_forward", "_plan", "size", "metadata")
NO_RESULT = {name for name in compat_calls() if name.endswith(MADE)}
JUDGED = ("predicts", "accept_index", "accept_token_num")
WRITTEN = {  # what functions write that return nothing
    "xqa": ("output",),
    "xqa_mla": ("output",),
    "append_paged_kv_cache": ("paged_kv_cache",),
    "append_paged_mla_kv_cache": ("ckv_cache",),
    "merge_state_in_place": ("v",),
    "build_tree_kernel_efficient": (
        "tree_mask",
        "positions",
        "retrive_index",
        "retrive_next_token",
        "retrive_next_sibling",
    ),
    "verify_tree_greedy": JUDGED,
    "tree_speculative_sampling_target_only": JUDGED,
}
FUNCTIONS = sorted(compat_calls().keys() - NO_RESULT)


def results(name: str, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    function, given = compat_calls(device)[name]
    returned = function(**given)
    if returned is None:
        written = [given[argument] for argument in WRITTEN[name]]
        returned = written[0] if isinstance(written[0], tuple) else tuple(written)
    given_back = returned if isinstance(returned, tuple) else (returned,)
    return [tensor.cpu() for tensor in given_back if tensor is not None]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_cpus_answer(name):
    for ours, expected in zip(results(name, "cuda"), results(name, "cpu"), strict=True):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        assert relative_error(ours[finite], expected[finite].double()) <= 8e-3  # each rounds by itself


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(1, 239), (799, 3), (97, 97), (257, 257), (1024, 128), (768, 768)])
def test_large_batches_give_the_same_bits(lengths, head_dim, causal):
    """The forward half of FlashAttention's test_flash_attn_race_condition; its other half takes gradients."""
    from attnops.compat.flash_attn_interface import flash_attn_func

    q, k, v = (torch.randn(60, lengths[i > 0], 4, head_dim, device="cuda", dtype=torch.bfloat16) for i in range(3))
    first = flash_attn_func(q, k, v, causal=causal)
    assert all(torch.equal(flash_attn_func(q, k, v, causal=causal), first) for _ in range(50))
