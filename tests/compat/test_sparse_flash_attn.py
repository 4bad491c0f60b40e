"""`sgl_kernel.sparse_flash_attn` against float64: blocks and single keys, listed for every 64 queries of a head."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat.sgl_kernel import sparse_flash_attn
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Q_LENS, K_LENS, HEADS, KV_HEADS, DIM = [70, 129], [200, 129], 4, 2, 64
ROWS = 3


def lists(seed: int):
    """Disjoint: blocks at multiples of 64, single keys elsewhere; the first list of head 1 is empty."""
    generator = torch.Generator().manual_seed(seed)
    blocks, columns = torch.zeros(2, HEADS, ROWS, 2, dtype=torch.int32), torch.zeros(2, HEADS, ROWS, 9).int()
    counts = torch.randint(0, 3, (2, HEADS, ROWS), generator=generator).int()
    column_counts = torch.randint(1, 10, (2, HEADS, ROWS), generator=generator).int()
    for request in range(2):
        for head in range(HEADS):
            for row in range(ROWS):
                chosen = torch.randperm(3, generator=generator)
                blocks[request, head, row] = chosen[:2].int() * 64
                places = chosen[2] * 64 + torch.randperm(64, generator=generator)
                columns[request, head, row] = places[:9].int()
    counts[0, 1, 0] = column_counts[0, 1, 0] = 0
    return counts, blocks, column_counts, columns


def hidden(made, request: int, head: int, causal: bool) -> torch.Tensor:
    counts, blocks, column_counts, columns = made
    q_len, k_len = Q_LENS[request], K_LENS[request]
    seen = torch.zeros(q_len, k_len, dtype=torch.bool)
    for query in range(q_len):
        at = (request, head, query // 64)
        for first in blocks[at][: counts[at]].tolist():
            seen[query, first : first + 64] = True
        places = columns[at][: column_counts[at]].long()
        seen[query, places[places < k_len]] = True
    if causal:
        seen &= torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    return ~seen


def check(out, lse, q, k, v, made, causal, request):
    """`out` ``[S, H, D]``, `lse` ``[H, S]`` of one request."""
    for head in range(HEADS):
        away = hidden(made, request, head, causal)
        pair = [t[:, head // (HEADS // KV_HEADS)].unsqueeze(1) for t in (k, v)]
        shown, shown_lse = attention(q[:, head].unsqueeze(1), *pair, away, DIM**-0.5)
        rows = ~away.all(1)
        assert relative_error(out[rows, head], shown[rows, 0]) <= MAX_RELATIVE_ERROR[torch.bfloat16]
        assert not out[~rows, head].any() and (lse[head, ~rows] == -math.inf).all()
        assert_lse_close(lse[head, rows], shown_lse[rows, 0], atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_requests(causal, device):
    made = lists(1)
    q = torch.randn(sum(Q_LENS), HEADS, DIM).bfloat16()
    k, v = (torch.randn(sum(K_LENS), KV_HEADS, DIM).bfloat16() for _ in range(2))
    bounds = [torch.tensor([0, *lens]).cumsum(0).int().to(device) for lens in (Q_LENS, K_LENS)]
    given = [t.to(device) for t in (q, k, v, *made)]
    options = {"causal": causal}
    call = sparse_flash_attn.sparse_attn_varlen_func
    out, lse = call(*given, *bounds, max(Q_LENS), max(K_LENS), **options, return_softmax_lse=True)
    again = torch.empty_like(out)
    assert call(*given, *bounds, max(Q_LENS), max(K_LENS), **options, out=again) is again and again.equal(out)
    out, lse = out.cpu(), lse.cpu()
    for request in range(2):
        first_q, first_k = sum(Q_LENS[:request]), sum(K_LENS[:request])
        mine = slice(first_q, first_q + Q_LENS[request])
        keys = slice(first_k, first_k + K_LENS[request])
        check(out[mine], lse[:, mine], q[mine], k[keys], v[keys], made, causal, request)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_of_one_length(causal, device):
    made = [t[1:].repeat_interleave(2, 0) for t in lists(2)]
    q = torch.randn(2, 129, HEADS, DIM).bfloat16()
    k, v = (torch.randn(2, 129, KV_HEADS, DIM).bfloat16() for _ in range(2))
    given = [t.to(device) for t in (q, k, v, *made)]
    out, lse = sparse_flash_attn.sparse_attn_func(*given, causal=causal, return_softmax_lse=True)
    assert lse.shape == (2, HEADS, 129)
    for request in range(2):
        check(out[request].cpu(), lse[request].cpu(), q[request], k[request], v[request], made, causal, 1)


def test_what_is_refused_or_wrong_is_named():
    made, q = lists(1), torch.randn(2, 129, HEADS, DIM)
    k = torch.randn(2, 200, KV_HEADS, DIM)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        sparse_flash_attn.sparse_attn_func(q, k, k, *made, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        sparse_flash_attn.sparse_attn_func(q, k, k, *made, alibi_slopes=torch.zeros(HEADS))
    with pytest.raises(ValueError, match=r"column_index must be \[2 \(requests\), 4"):
        sparse_flash_attn.sparse_attn_func(q, k, k, *made[:3], made[3][:, :2])
    with pytest.raises(ValueError, match=r"block_count.shape\[2\] must be at least 3"):
        sparse_flash_attn.sparse_attn_func(q, k, k, *(t[:, :, :2] for t in made))
