"""Plan of the ragged attention ops: the order in which the query tiles of a batch are started."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.metadata.plan import MAX_HEAD_DIM, XqaDecodePlan
from attnops.metadata.plan_checks import MAX_WINDOW
from attnops.metadata.plan_parts import default_num_sm_parts, runs_hopper_kernels
from attnops.types import check_range

DEFAULT_TILE_Q = 64
CPU_TILE_ROWS = 256  # rows (token, head of a group) that the CPU kernels carry over one packed tile of keys
MIN_CPU_TILE_Q, MAX_CPU_TILE_Q = 16, 256

MOST_PIECE_WORKS_PER_SM = 2  # works of cut tiles that there is scratch for

FEW_REQUESTS = 32  # fewer than that leave SMs idle if tiles take one token
SHORT_ROWS = 64  # of a CTA's tile where requests have few rows: csrc/fmha/sm90/short.h

# Rows (token, head of a group) of requests whose calls over pages `xqa_decode` serves: its kernels wait for memory, and
# spread each request over the GPU. More rows keep the products busy. As most_ragged_rows of xqa_decode/sm90/limits.h.
MOST_DECODE_ROWS, MOST_DECODE_ROWS_OF_WIDE = 64, 32  # the second above head dim 128


def cuda_tile_rows(head_dim: int) -> int:
    """Rows of a CTA's tile: csrc/fmha/sm90/instantiations, cuda/instantiations."""
    return 192 if head_dim <= 64 else 128


def cuda_tile_q(group: int, head_dim: int, tokens: int = 1024) -> int:
    """Query tokens that fill the rows of a CTA, with as many heads of a group beside each other as divide it well.

    `tokens`: of a request. With few of them, one head alone fills no tile, and each would read all keys again.
    """
    rows = cuda_tile_rows(head_dim)
    if max(tokens, 1) * group <= SHORT_ROWS and head_dim <= 192:  # whole short tiles, with all heads of a group
        return rows // SHORT_ROWS * (SHORT_ROWS // group)
    blocks = {blocked_heads(group, n): -(-group // n) for n in range(1, min(group, rows) + 1)}
    used = {n: min(rows // n, max(tokens, 1)) * group / blocks[n] for n in blocks}
    full = [n for n in used if used[n] >= 0.97 * max(used.values())]
    in_pairs = [n for n in full if blocks[n] % 2 == 0]  # two CTAs then bring their keys once: sm90/load.cuh
    return rows // max(in_pairs or full)


def have_few_rows(group: int, head_dim: int, max_seqlen_q: int | None) -> bool:
    """Whether no request has more rows than a short tile. Then a tile of the plan needs no more, and a CTA of the
    kernels for short calls finds no half of it without tokens.
    """
    return max_seqlen_q is not None and 0 < max_seqlen_q * group <= SHORT_ROWS and head_dim <= 192


def tokens_as_a_rule(num_tokens: int, batch: int) -> int:
    """Of a request: the mean, rounded up; one, if half of many requests or fewer have two."""
    return 1 if batch > FEW_REQUESTS and 2 * num_tokens <= 3 * batch else -(-num_tokens // max(batch, 1))


def cuts_in_part(head_dim: int, few_rows: bool = False) -> bool:
    """Not up to head dim 64: cuts of its tiles were slower than the estimate says (docs/log/fmha_sm90.md).

    `few_rows`: `have_few_rows`. A tile of the plan is then half of a CTA's rows at most.
    """
    return head_dim > 64 and not few_rows


def blocked_heads(group: int, most: int) -> int:
    """Heads of a block of a group: as few blocks as can be, of `most` heads or less, and alike."""
    return -(-group // -(-group // most))


def works_per_tile(group: int, num_kv_heads: int, head_dim: int, tile_q: int) -> int:
    """CTAs' works in a tile of the plan: KV heads, blocks of a group's heads, rows (csrc/fmha/sm90/launch.cuh)."""
    rows = cuda_tile_rows(head_dim)
    heads = blocked_heads(group, max(min(group, rows // min(tile_q, rows)), 1))
    return num_kv_heads * -(-group // heads) * -(-tile_q // min(tile_q, rows // heads))


def default_tile_q(
    device: torch.device, num_q_heads: int | None, num_kv_heads: int | None, head_dim: int, tokens: int
) -> int:
    """On the CPU, a tile of `CPU_TILE_ROWS` rows when the heads are known: packing keys then costs the least."""
    if not num_q_heads or not num_kv_heads:
        return DEFAULT_TILE_Q
    group = max(num_q_heads // num_kv_heads, 1)
    if device.type != "cpu":
        return cuda_tile_q(group, head_dim, tokens)
    return min(max(CPU_TILE_ROWS // group, MIN_CPU_TILE_Q), MAX_CPU_TILE_Q)


# What a pass over keys costs kernels of so many rows, beside 16: docs/log/fmha_sm90.md.
COST_OF_ROWS = {16: 1.0, 32: 1.07, 64: 1.12}

# Chunks may be so many times the requests: each reads its keys again. Or twice as many, where they are so few works
# (chunks times KV heads) that even with both a GPU has SMs left. Without groups a KV head's keys serve one head alone,
# and the second reading is most of what a work costs.
MOST_CHUNKS_AS_A_RULE, MOST_CHUNKS_FOR_EACH = 1.3, 2
FEW_CHUNK_WORKS, FEW_CHUNK_WORKS_OF_ONE_HEAD = 48, 32

# More works than two an SM keep a GPU busy in prefill's kernels, too, and those read keys once for 128 rows. But not
# where tiles of theirs are almost empty: chunks of 16 rows, or head dims whose tiles have 192.
MOST_CHUNK_WORKS, ROWS_OF_SMALL_CHUNKS, HEAD_DIM_OF_LONG_TILES = 264, 16, 64


class DecodeChunks(NamedTuple):
    """How a batch is cut for a plan of `xqa_decode`."""

    tokens: int  # of a chunk, at most
    number: int  # of chunks, at most; 0: requests are not divided


def most_chunks(max_num_tokens: int, max_batch_size: int, max_seqlen_q: int, tokens: int) -> int:
    """Chunks of `tokens` that so many tokens of so many requests make at most."""
    chunks = min((max_num_tokens + max_batch_size * (tokens - 1)) // tokens, max_num_tokens)
    return min(chunks, max_batch_size * -(-max_seqlen_q // tokens))


def chunks_for_decode(
    max_num_tokens: int,
    max_batch_size: int,
    max_seqlen_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    split_keys: bool,
    device: torch.device,
) -> DecodeChunks | None:
    """Where `xqa_decode`'s kernels serve a call of few tokens, of which some requests have more than their rows take.

    Such a request is cut into chunks of tokens (`ops.xqa_decode_chunks`). Most must have a chunk alone.
    """
    group = max(num_q_heads // num_kv_heads, 1)
    most = MOST_DECODE_ROWS if head_dim <= 128 else MOST_DECODE_ROWS_OF_WIDE
    limits = (max_num_tokens, max_batch_size, max_seqlen_q)
    if not all(limits) or group > most or head_dim > MAX_HEAD_DIM:
        return None
    if not split_keys or not runs_hopper_kernels(device):
        return None
    ways = {rows: rows // group for rows in COST_OF_ROWS if group <= rows <= most}
    costs = {rows: most_chunks(*limits, tokens) * COST_OF_ROWS[rows] for rows, tokens in ways.items()}
    tokens = ways[min(costs, key=lambda rows: costs[rows])]
    count = most_chunks(*limits, tokens)
    times = _most_chunks_of_a_request(group, head_dim, tokens * group, count * num_kv_heads)
    return DecodeChunks(tokens, count) if count <= times * max_batch_size else None


def _most_chunks_of_a_request(group: int, head_dim: int, rows: int, works: int) -> float:
    """In the mean of a batch, where chunks of `rows` rows are `works` works; 0: none."""
    few, most = FEW_CHUNK_WORKS, MOST_CHUNK_WORKS
    if rows <= ROWS_OF_SMALL_CHUNKS or head_dim <= HEAD_DIM_OF_LONG_TILES:
        most = works
    elif group == 1:
        few = most = FEW_CHUNK_WORKS_OF_ONE_HEAD
    if works <= few:
        return MOST_CHUNKS_FOR_EACH
    return MOST_CHUNKS_AS_A_RULE if works <= most else 0


def tokens_for_decode(
    max_seqlen_q: int, num_q_heads: int, num_kv_heads: int, head_dim: int, split_keys: bool, device: torch.device
) -> int:
    """Query tokens of a request that a plan of `xqa_decode` is for, where its kernels serve `fmha_paged`; else 0.

    A power of two where it can be, so that a server's steps need few plans.
    """
    group = max(num_q_heads // num_kv_heads, 1)
    most = (MOST_DECODE_ROWS if head_dim <= 128 else MOST_DECODE_ROWS_OF_WIDE) // group
    if not 0 < max_seqlen_q <= most or head_dim > MAX_HEAD_DIM or not split_keys or not runs_hopper_kernels(device):
        return 0
    return min(1 << (max_seqlen_q - 1).bit_length(), most)


def _check_heads(num_q_heads: int | None, num_kv_heads: int | None) -> None:
    """Both may be left out."""
    if num_q_heads is None and num_kv_heads is None:
        return
    if num_q_heads is None or num_kv_heads is None:
        raise ValueError(
            "FmhaPlan.allocate: num_q_heads and num_kv_heads are given together or not at all, "
            f"got {num_q_heads} and {num_kv_heads}"
        )
    check_range("FmhaPlan.allocate", "num_q_heads", num_q_heads, 1)
    check_range("FmhaPlan.allocate", "num_kv_heads", num_kv_heads, 1)


@dataclasses.dataclass(frozen=True)
class ChunkTensors:
    """A batch of chunks, as `ops.xqa_decode_chunks` writes it at every step."""

    table: Tensor  # int32 [3, C + 1]; the others are its rows
    cu_seqlens_q: Tensor  # [C + 1]
    cache_seqlens: Tensor  # [C]
    table_rows: Tensor  # [C]
    max_requests: int  # that have their chunks here

    @classmethod
    def allocate(cls, max_chunks: int, max_requests: int, device: torch.device) -> ChunkTensors:
        return cls.within(torch.zeros(3 * (max_chunks + 1), dtype=torch.int32, device=device), max_chunks, max_requests)

    @classmethod
    def within(cls, memory: Tensor, max_chunks: int, max_requests: int) -> ChunkTensors:
        """Views of int32 memory, at its beginning."""
        table = memory[: 3 * (max_chunks + 1)].view(3, max_chunks + 1)
        return cls(table, table[0], table[1, :-1], table[2, :-1], max_requests)


@dataclasses.dataclass(frozen=True)
class FmhaPlan:
    """Plan of `ops.fmha_varlen` and `ops.fmha_paged`, allocated once for a limit. `ops.fmha_plan` fills it on the
    device at every step, and every layer of that step uses it. Its tensor never moves, so a CUDA graph may hold all
    calls."""

    tile_q: int
    causal: bool
    window_left: int
    tile_order: Tensor  # int32 [max_tiles, 2]: (request, query tile of it), longest first; the rest is (-1, -1)
    semaphores: Tensor | None = None  # int32 [3], zeros between calls: a GPU's CTAs take works by it
    works_per_tile: int = 1
    cut_in_part: bool = True  # whether the first tiles may stay whole where others are cut
    pieces: Tensor | None = None  # int32 [1 + max_pieces, 4] of tiles whose keys are cut (csrc/scheduler/varlen_cuts.h)
    partial: Tensor | None = None  # float32, scratch of their results
    decode: XqaDecodePlan | None = None  # where `fmha_paged` goes by `xqa_decode`'s kernels
    chunks: ChunkTensors | None = None  # where `decode` is for chunks of the batch's requests

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        return {"causal": self.causal, "window_left": self.window_left}

    def decodes(self, num_requests: int) -> bool:
        """Whether `decode` is for a batch of so many."""
        if self.decode is None:
            return False
        if self.chunks is not None:
            return num_requests <= self.chunks.max_requests
        return num_requests == self.decode.batch_size

    @classmethod
    def allocate(
        cls,
        max_num_tokens: int,
        max_batch_size: int,
        *,
        causal: bool = True,
        window_left: int = -1,
        num_q_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        tile_q: int | None = None,
        split_keys: bool = True,
        max_seqlen_q: int | None = None,
        device: torch.device | str = "cpu",
    ) -> FmhaPlan:
        """Allocate a plan.

        Args:
            max_num_tokens, max_batch_size: Rows of q, and requests, of the largest batch that the plan will describe.
            causal, window_left: Of the calls that use the plan: they decide which tiles are long. A window on one side
                and none on the other layer take two plans.
            num_q_heads, num_kv_heads, head_dim: Of the attention, the larger head dim; they choose a good `tile_q` and
                bind nothing else.
            tile_q: Query tokens per tile; chosen when None. It changes no result.
            split_keys: Whether a GPU may cut the keys of long tiles where its SMs would idle. The last bits of a
                request's result then depend on the batch. Only with heads given; takes scratch of
                `MOST_PIECE_WORKS_PER_SM` tiles of results for each SM.
            max_seqlen_q: No request has more query tokens, if given. Where they are few, tiles are small. Hopper then
                serves `fmha_paged` by the kernels of `xqa_decode`, if the batch has `max_batch_size` requests, no
                window, and cuts of keys. Where most requests have few tokens, those of the others are divided
                (`chunks_for_decode`).

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        device = torch.device(device)
        owner = "FmhaPlan.allocate"
        check_range(owner, "max_num_tokens", max_num_tokens, 0)
        check_range(owner, "max_batch_size", max_batch_size, 0)
        check_range(owner, "window_left", window_left, -1, MAX_WINDOW)
        check_range(owner, "head_dim", head_dim, 1)
        if max_seqlen_q is not None:
            check_range(owner, "max_seqlen_q", max_seqlen_q, 0)
        _check_heads(num_q_heads, num_kv_heads)
        few_rows = False
        if tile_q is None and split_keys and num_q_heads and num_kv_heads and device.type == "cuda":
            group = max(num_q_heads // num_kv_heads, 1)
            few_rows = have_few_rows(group, head_dim, max_seqlen_q)
            tile_q = SHORT_ROWS // group if few_rows else None
        if tile_q is None:
            tokens = tokens_as_a_rule(max_num_tokens, max_batch_size)
            tile_q = default_tile_q(device, num_q_heads, num_kv_heads, head_dim, tokens)
        check_range(owner, "tile_q", tile_q, 1, 1024)
        max_tiles = -(-max_num_tokens // tile_q) + max_batch_size
        tile_order = torch.full((max_tiles, 2), -1, dtype=torch.int32, device=device)
        if device.type != "cuda":
            return cls(tile_q, causal, window_left, tile_order)
        semaphores = torch.zeros(3, dtype=torch.int32, device=device)
        whole = cls(tile_q, causal, window_left, tile_order, semaphores)
        if not split_keys or not num_q_heads or not num_kv_heads:
            return whole
        most_tokens, heads = max_seqlen_q or 0, (num_q_heads, num_kv_heads, head_dim)
        limits = (max_num_tokens, max_batch_size, most_tokens)
        if window_left < 0 and max_batch_size:
            if tokens_for_decode(most_tokens, *heads, split_keys, device):
                whole = dataclasses.replace(whole, decode=_decode_plan(max_batch_size, most_tokens, *heads, device))
            elif (chunks := chunks_for_decode(*limits, *heads, split_keys, device)) is not None:
                whole = dataclasses.replace(
                    whole,
                    decode=_decode_plan(chunks.number, chunks.tokens, *heads, device),
                    chunks=ChunkTensors.allocate(chunks.number, max_batch_size, device),
                )
        works = works_per_tile(max(num_q_heads // num_kv_heads, 1), num_kv_heads, head_dim, tile_q)
        max_pieces = default_num_sm_parts(device, MOST_PIECE_WORKS_PER_SM) // works
        if max_pieces < 2:
            return whole
        rows = max_pieces * works * cuda_tile_rows(head_dim)
        return dataclasses.replace(
            whole,
            works_per_tile=works,
            cut_in_part=cuts_in_part(head_dim, few_rows),
            pieces=torch.zeros(max_pieces + 1, 4, dtype=torch.int32, device=device),
            partial=torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=device),
        )


def _decode_plan(
    requests: int, tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> XqaDecodePlan:
    return XqaDecodePlan.allocate(
        requests,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seqlen_q=tokens,
        device=device,
    )
