"""How large the tiles are: what fits a GPU's shared memory, and nothing larger than the work."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

# Head dims that are a power of two and a rest: taken as two products, so that neither is padded.
SPLIT_HEAD_DIMS = {576: (512, 64), 288: (256, 32), 192: (128, 64)}
LEAST_ROWS = 64  # of an extend's tile: from here on a row's bits do not depend on how many there are
_DEFAULT_SHARED_BYTES = 96 * 1024  # of a device that says nothing


@dataclass(frozen=True)
class Tiles:
    """Extents of a launch.

    Attributes:
        block_q, block_h, block_n: Tokens and heads of a tile's rows, keys of a step.
        head_blocks: Tiles that a KV head's group needs.
        num_warps, num_stages: As of Triton.
        peel: Steps in which every row sees every key run without masks.
    """

    block_q: int
    block_h: int
    block_n: int
    head_blocks: int
    num_warps: int
    num_stages: int
    peel: bool = True


def head_dim_parts(head_dim: int) -> tuple[int, int]:
    """(main, rest) of a head dim."""
    return SPLIT_HEAD_DIMS.get(head_dim, (head_dim, 0))


def padded(extent: int, least: int = 16) -> int:
    """The power of two that holds an extent; products need 16 at least."""
    return max(least, triton.next_power_of_2(extent))


@functools.cache
def choose_tiles(
    seqlen_q: int, group: int, head_dim: int, v_head_dim: int, element_size: int, shared_bytes: int, decode: bool
) -> Tiles:
    """Tiles of a problem.

    Args:
        seqlen_q: Tokens per request, or, of a ragged step, how many a tile should have at most.
        decode: Few rows over many keys: a tile holds no more rows than there are. Otherwise it holds 64 or 128, so that
            each warp has whole rows, by the same instructions: a row's bits are the same in both.
    """
    width = sum(padded(part) for part in head_dim_parts(head_dim) if part)
    width_v = padded(v_head_dim)
    most_rows = 64 if max(width, width_v) > 128 else 128
    if element_size == 4:
        most_rows = min(most_rows, 32)
    block_h = min(triton.next_power_of_2(group), most_rows)
    if decode:
        most_rows = min(most_rows, 64)
        block_h = min(block_h, most_rows)
    least_rows = 16 if decode else min(LEAST_ROWS, most_rows)
    block_q = max(1, least_rows // block_h, min(triton.next_power_of_2(seqlen_q), most_rows // block_h))
    for rows_shift in range(3):
        for block_n, stages in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1)):
            rows = block_q * block_h
            used = (rows * width + stages * block_n * (width + width_v)) * element_size
            if used <= shared_bytes:
                warps = 8 if rows * width_v >= 128 * 128 else 4
                return Tiles(block_q, block_h, block_n, -(-group // block_h), warps, stages)
        if block_q > 1 and block_q * block_h > 16:
            block_q //= 2
        elif block_h > 16:
            block_h //= 2
        del rows_shift
    return Tiles(block_q, block_h, 16, -(-group // block_h), 4, 1)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block of a device may have."""
    if device.type != "cuda":
        return _DEFAULT_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or 64 * 1024


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a CPU's interpreter counts as a few."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).max_compute_units)
    return 8
