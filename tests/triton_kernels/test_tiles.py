"""Tiles that fit each GPU, and whose extents do not change a row's bits where none may."""

from __future__ import annotations

import pytest

tiles = pytest.importorskip("attnops.triton_kernels.core.tiles", reason="needs triton")

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
DIMS = [(40, 40), (64, 64), (128, 128), (192, 128), (256, 256), (576, 512)]


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16, 128])
@pytest.mark.parametrize("element_size", [2, 4])
def test_extends_take_keys_alike_whatever_the_tokens_of_a_tile(arch, dims, group, element_size):
    """The keys of a step, and whether warps share a row, decide on a row's sums."""
    made = [tiles.choose_tiles(n, group, *dims, element_size, SHARED[arch], False) for n in (1, 2, 16, 64, 100, 4096)]
    assert len({one.block_n for one in made}) == 1
    shares_rows = {one.num_warps * 16 > one.block_q * one.block_h for one in made}
    assert len(shares_rows) == 1
    assert all(one.block_h * one.head_blocks >= group for one in made)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_decode_tile_has_no_more_rows_than_a_product_needs(dims):
    one = tiles.choose_tiles(1, 1, *dims, 2, SHARED[90], True)
    assert one.block_q * one.block_h == 16
    wide = tiles.choose_tiles(1, 128, *dims, 2, SHARED[90], True)
    assert wide.block_q == 1 and wide.block_h <= 64 and wide.head_blocks * wide.block_h == 128
