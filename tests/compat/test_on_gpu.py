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


def _rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide_decode(device: str) -> Tensor:
    """Head dim 512 by the shortest way."""
    from attnops.compat.flash_attn_interface import flash_attn_with_kvcache

    q, k, v = _rows(2, 3, 8, 512), _rows(4, 16, 2, 512, seed=1), _rows(4, 16, 2, 512, seed=2)
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([29, 5], dtype=torch.int32)
    q, k, v, table, lens = (x.to(device) for x in (q, k, v, table, lens))
    return flash_attn_with_kvcache(q, k, v, page_table=table, cache_seqlens=lens, causal=True, softmax_scale=0.05)


def alibi(device: str) -> Tensor:
    """Of keys on both sides of a query."""
    from attnops.compat.flash_attn import flash_attn_func

    q, k, v = (x.to(device) for x in (_rows(2, 20, 4, 64), _rows(2, 50, 2, 64, seed=1), _rows(2, 50, 2, 64, seed=2)))
    return flash_attn_func(q, k, v, alibi_slopes=torch.linspace(0.1, 1, 4, device=device), window_size=(30, 9))


def qv_descales(device: str, dim_v: int) -> Tensor:
    """Another of every request, beside MLA's `qv` and another."""
    from attnops.compat.flash_attn_interface import flash_attn_with_kvcache

    fp8 = torch.float8_e4m3fn
    q, qv, k, v = (_rows(2, n, h, d, dtype=fp8) for n, h, d in ((3, 4, 64), (3, 4, dim_v), (40, 1, 64), (40, 1, dim_v)))
    scales = {name: torch.tensor([[0.5], [0.7]], device=device) for name in ("q_descale", "k_descale", "v_descale")}
    lens = torch.tensor([40, 7], dtype=torch.int32, device=device)
    q, qv, k, v = (x.to(device) for x in (q, qv, k, v))
    return flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lens, causal=True, **scales)


def mla_wrapper(device: str, kv_dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    from attnops.compat.flashinfer import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(16, dtype=torch.uint8, device=device))
    int32 = {"dtype": torch.int32, "device": device}
    bounds, indptr = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 2, 3], **int32)
    lens = torch.tensor([100, 9], **int32)
    wrapper.plan(bounds, indptr, torch.tensor([2, 0, 1], **int32), lens, 16, 512, 64, 64, True, 0.1,
                 torch.bfloat16, kv_dtype)  # fmt: skip
    q, pages = _rows(4, 16, 576).to(device), _rows(3, 64, 576, seed=1).to(kv_dtype).to(device)
    scales = {"ckv_scale": 0.5, "kpe_scale": 0.25} if kv_dtype.itemsize == 1 else {}
    out = torch.empty(4, 16, 512, dtype=out_dtype, device=device)
    wrapper.run(
        q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:], out=out,
        o_scale=0.05 if out_dtype.itemsize == 1 else None, **scales,
    )  # fmt: skip
    return out.float()


FORMS = {
    "head dim 512": wide_decode,
    "alibi": alibi,
    "qv of MLA": lambda device: qv_descales(device, 512),
    "qv": lambda device: qv_descales(device, 96),
    "MLA over e5m2": lambda device: mla_wrapper(device, torch.float8_e5m2, torch.bfloat16),
    "MLA into e4m3": lambda device: mla_wrapper(device, torch.bfloat16, torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_cpus_answer_to_forms(name):
    ours, expected = FORMS[name]("cuda").cpu(), FORMS[name]("cpu")
    assert ours.dtype == expected.dtype
    assert relative_error(ours, expected.double()) <= (0.03 if "e4m3" in name else 1.5e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(1, 239), (799, 3), (97, 97), (257, 257), (1024, 128), (768, 768)])
def test_large_batches_give_the_same_bits(lengths, head_dim, causal):
    """The forward half of FlashAttention's test_flash_attn_race_condition; its other half takes gradients."""
    from attnops.compat.flash_attn_interface import flash_attn_func

    q, k, v = (torch.randn(60, lengths[i > 0], 4, head_dim, device="cuda", dtype=torch.bfloat16) for i in range(3))
    first = flash_attn_func(q, k, v, causal=causal)
    assert all(torch.equal(flash_attn_func(q, k, v, causal=causal), first) for _ in range(50))
