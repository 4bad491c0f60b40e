"""Lists from vertical and slash indices against a walk over both, one list at a time."""

from __future__ import annotations

import pytest
import torch
from attnops.compat.sgl_kernel import sparse_flash_attn
from attnops.compat.sgl_kernel.sparse_flash_attn import (
    convert_vertical_slash_indexes,
    convert_vertical_slash_indexes_mergehead,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def walk(first: int, q_len: int, kv_len: int, vertical: list, slash: list, size: int, causal: bool):
    """Blocks and columns of the queries from `first` on: ranges one after the other, columns between them."""
    if first >= q_len:
        return [], []
    reach = first + size + (kv_len - q_len if causal else kv_len)
    near = [distance for distance in slash if distance < reach]
    opening = near[0] if near else slash[-1]
    more = slash[slash.index(opening) + 1 :]
    if opening > reach:
        begin = reach if causal else kv_len
        ranges = [[begin, begin + size]]
    else:
        end = max(reach - opening, size)
        ranges = [[end - size, end]]
    for distance in more:
        if not causal and distance < first:
            break
        end = max(reach - distance, size)
        if end > ranges[-1][1] + size:
            ranges.append([end - size, end])
        elif end > ranges[-1][1]:
            ranges[-1][1] += size
    columns = [key for key in vertical if not any(low <= key < high for low, high in ranges)]
    columns = [key for key in columns if (key < ranges[-1][1] if causal else key < kv_len)]
    return [key for low, high in ranges for key in range(low, min(high, kv_len), size)], columns


def draw(generator: torch.Generator, most: int, count: int, falling: bool) -> torch.Tensor:
    """``[2, 3, count]`` indices below `most`, in order, none twice."""
    rows = [torch.randperm(most, generator=generator)[:count].sort(descending=falling).values for _ in range(6)]
    return torch.stack(rows).view(2, 3, count).int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_every_list(seed, causal, counted, device):
    generator = torch.Generator().manual_seed(seed)
    size = (2, 4, 16)[seed % 3]
    q_lens = torch.randint(1, 90, (2,), generator=generator)
    kv_lens = q_lens + torch.randint(0, 60, (2,), generator=generator)
    vertical = draw(generator, int(kv_lens.min()), min(int(kv_lens.min()), 9), False)
    slash = draw(generator, int(kv_lens.max()), min(int(kv_lens.max()), 7), True)
    used = [torch.randint(1, t.shape[-1] + 1, (3,), generator=generator).int() for t in (vertical, slash)]
    context = int(q_lens.max())
    call, counts = convert_vertical_slash_indexes, [torch.tensor([t.shape[-1]] * 3) for t in (vertical, slash)]
    given = [q_lens.int(), kv_lens.int(), vertical, slash]
    if counted:
        call, counts = convert_vertical_slash_indexes_mergehead, used
        given += used
    got = [t.cpu() for t in call(*(t.to(device) for t in given), context, size, size, causal)]
    rows = -(-context // size)
    assert [tuple(t.shape) for t in got] == [
        (2, 3, rows, *end) for end in ((), slash.shape[2:], (), vertical.shape[2:])
    ]
    assert all(t.dtype == torch.int32 for t in got)
    for request in range(2):
        for head in range(3):
            keys = vertical[request, head, : counts[0][head]].tolist()
            distances = slash[request, head, : counts[1][head]].tolist()
            for row in range(rows):
                lens = int(q_lens[request]), int(kv_lens[request])
                blocks, columns = walk(row * size, *lens, keys, distances, size, causal)
                count, offset, column_count, column = (t[request, head, row].tolist() for t in got)
                assert (offset[:count], column[:column_count]) == (blocks, columns)
                assert not any(offset[count:]) and not any(column[column_count:])


@pytest.mark.parametrize("causal", [True, False])
def test_the_peers_small_example(causal):
    four = torch.tensor([4], dtype=torch.int32)
    vertical, slash = torch.tensor([[[1, 3]]], dtype=torch.int32), torch.tensor([[[2]]], dtype=torch.int32)
    columns = convert_vertical_slash_indexes(four, four, vertical, slash, 4, 2, 2, causal=causal)[3]
    assert columns.tolist() == ([[[[0, 0], [0, 0]]]] if causal else [[[[1, 0], [1, 3]]]])


def test_lists_are_what_attention_takes():
    q, k, v = (torch.randn(1, 130, 2, 64).bfloat16() for _ in range(3))
    length = torch.tensor([130], dtype=torch.int32)
    vertical = torch.tensor([0, 7, 100], dtype=torch.int32).expand(1, 2, 3)
    slash = torch.tensor([129, 64, 0], dtype=torch.int32).expand(1, 2, 3)  # whole diagonals: every block
    lists = convert_vertical_slash_indexes(length, length, vertical, slash, 130, 64, 64)
    got = sparse_flash_attn.sparse_attn_func(q, k, v, *lists, causal=True)
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2).float() for t in (q, k, v)), is_causal=True
    )
    assert (got.float() - whole.transpose(1, 2)).abs().max() < 2e-2


def test_refusals():
    one = torch.ones(1, dtype=torch.int32)
    lists = torch.ones(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_size_N must be at least block_size_M"):
        convert_vertical_slash_indexes(one, one, lists, lists, 1, 64, 32)
    with pytest.raises(ValueError, match="must have an entry each"):
        convert_vertical_slash_indexes(one, one, lists[..., :0], lists, 1, 64, 64)
