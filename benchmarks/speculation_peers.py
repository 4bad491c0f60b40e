"""SGLang's functions around speculative decoding, where they are found: what bench_speculation.py measures beside ours.

Each is looked for by itself, in the modules that releases have it in. What is not found, or fails, leaves its rows out
and is printed: the other cells and ours are measured all the same.

- `sgl_kernel`: its CUDA kernels of trees, `build_tree_kernel_efficient` and `verify_tree_greedy`.
- Triton kernels of SGLang's Python package: the same two, `generate_draft_decode_kv_indices`, and
  `copy_all_layer_kv_cache_tiled`, which moves accepted tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attnops.ops.speculation import DraftTree, Verified
from turns import Contender

TREES = ("sglang.kernels.ops.speculative.spec_tree", "sglang.srt.speculative.eagle_utils")
INDICES = (
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.srt.speculative.triton_ops.cache_locs",
    "sglang.srt.speculative.spec_utils",
)
MOVES = ("sglang.kernels.ops.kvcache.cache_move", "sglang.srt.mem_cache.memory_pool")
TILES = ((8192, 512, 128, 8), (4096, 256, 256, 4), (0, 128, 256, 4))  # as SGLang's pools set their copy, see `moves`
QLEN_ONLY = 1  # SGLang's TreeMaskMode: masks of N x N


def find(name: str, modules: tuple[str, ...]) -> Any:
    """The attribute of the first module that has it; None where none has, which is printed."""
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # a part of a package may fail to import in many ways
            reasons.append(f"{type(error).__name__}: {str(error)[:120]}")
    print(f"SGLang's {name}: not found ({'; '.join(reasons)})", flush=True)
    return None


def kernels_of_trees() -> dict[str, tuple[Callable[..., None], Callable[..., None]]]:
    """(build, verify) by the name of a peer, each with the arguments of SGLang's CUDA functions."""
    found: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}
    try:
        importlib.import_module("sgl_kernel")  # registers its ops
        space = torch.ops.sgl_kernel
        cuda_build, cuda_verify = space.build_tree_kernel_efficient.default, space.verify_tree_greedy.default
    except Exception as error:
        print(f"SGLang's CUDA kernels of trees: not found ({type(error).__name__}: {str(error)[:120]})", flush=True)
    else:

        def judged(*args: Any) -> None:
            cuda_verify(*args, torch.cuda.current_stream().cuda_stream)

        found["sgl_kernel"] = (cuda_build, judged)
    build = find("sgl_build_tree_kernel_efficient_triton", TREES)
    verify = find("verify_tree_greedy_kernel_triton", TREES)
    if build is not None and verify is not None:
        found["SGLang, Triton"] = (partial(_build_in_triton, build), partial(_verify_in_triton, verify))
    return found


def _build_in_triton(kernel: Any, parents, chosen, lengths, mask, positions, *rest: Any) -> None:
    *links, topk, depth, tokens, mode = rest
    size = len(lengths)
    strides = (parents.stride(0), chosen.stride(0))
    sums = lengths  # the tokens before a request; read, and of no meaning for masks of N x N
    kernel[(size,)](
        parents, chosen, lengths, sums, mask, positions, *links, topk, depth, tokens, mode, size, *strides
    )  # fmt: skip


def _verify_in_triton(kernel: Any, predicts, accepted, *rest: Any) -> None:
    candidates = rest[1]
    kernel[(len(candidates),)](predicts, accepted, *rest, len(candidates), accepted.shape[1], candidates.shape[1])


class Trees:
    """One peer's two kernels over the candidates of a loop; its callers fill the links with -1 first.

    Args:
        kernels: As of `kernels_of_trees`. given: Arguments of `ops.build_draft_tree`.
        ours: The tree and what comes out, by attnops' ops.
    """

    def __init__(
        self, kernels: tuple[Callable[..., None], Callable[..., None]], given: dict, draft_steps: int, target, ours
    ) -> None:
        self._build, self._verify = kernels
        self._tree: DraftTree = ours[0]
        self._out: Verified = ours[1]
        size, tokens = self._tree.retrieve_index.shape
        device = target.device
        self._mask = torch.ones(size * tokens * tokens, dtype=torch.bool, device=device)
        self._positions = torch.zeros(size * tokens, dtype=torch.int64, device=device)
        self._links = torch.full((3, size, tokens), -1, device=device)
        self._lists = (given["parent_list"], given["top_scores_index"], given["cache_seqlens"].long())
        self._numbers = (given["topk"], draft_steps, tokens, QLEN_ONLY)
        self._results = [torch.full_like(x, -1) for x in self._out]
        assert self._tree.tokens is not None
        self._candidates, self._target = self._tree.tokens.view(size, tokens), target.view(size, tokens)

    def build_alone(self) -> None:
        self._build(*self._lists, self._mask, self._positions, *self._links, *self._numbers)

    def build(self) -> None:
        self._links.fill_(-1)
        self.build_alone()

    def verify(self) -> None:
        self._verify(*self._results, self._candidates, *self._links, self._target)

    def both(self) -> None:
        self.build()
        self.verify()

    def says(self) -> str:
        """Whether it makes the tree and takes the path that attnops does."""
        self.both()
        tree, out = self._tree, self._out
        same = all(torch.equal(x, y) for x, y in zip(self._links, tree[2:5]))
        same = same and torch.equal(self._positions, tree.positions)
        path = torch.equal(self._results[1], out.accept_index)
        return f"{'the same' if same else 'other'} links and positions, {'the same' if path else 'another'} path"


def indices(table, rows, lengths, topk: int, steps: int, page_size: int, like: tuple) -> Contender | None:
    """SGLang's `generate_draft_decode_kv_indices`, into tensors of the shape of ours."""
    kernel = find("generate_draft_decode_kv_indices", INDICES)
    if kernel is None:
        return None
    size = len(rows)
    kv_indptr, kv_indices = (torch.zeros_like(x) for x in like)
    positions = lengths.long().repeat_interleave(topk)
    upper = [1 << (n - 1).bit_length() for n in (size, steps, size * topk)]

    def call() -> None:
        kernel[(steps, size, topk)](
            rows, table, lengths, kv_indices, kv_indptr, positions, table.shape[1], kv_indices.shape[1],
            kv_indptr.shape[1], *upper, page_size,
        )  # fmt: skip

    def note() -> str:
        call()
        seen, same = kv_indptr[:, 1:].long(), torch.equal(kv_indptr[:, 1:], like[0][:, 1:])
        for step, count in enumerate(seen[:, -1].tolist()):
            same = same and torch.equal(kv_indices[step, :count], like[1][step, :count])
        return f"{'the same' if same else 'other'} slots"

    try:
        return Contender("SGLang, Triton", {}, [call], note=note())
    except Exception as error:
        print(f"SGLang's generate_draft_decode_kv_indices: left out ({str(error)[:200]!r})", flush=True)
        return None


def moves(pages: list, target: torch.Tensor, source: torch.Tensor) -> Contender | None:
    """SGLang's copy of accepted tokens in all layers, from slots that are given: no list of accepted nodes is read.

    Of a pool's rows of at least so many bytes, a program takes a tile of so many for so many slots, with so many warps.
    Slots beyond these are one more launch.
    """
    kernel = find("copy_all_layer_kv_cache_tiled", MOVES)
    if kernel is None:
        return None
    device, row = target.device, pages[0][0, 0].numel() * pages[0].element_size()
    pointers = torch.tensor([x.data_ptr() for x in pages], dtype=torch.uint64, device=device)
    strides = torch.full((len(pages),), row, dtype=torch.int64, device=device)
    tile, most, warps = next(rest for least, *rest in TILES if row >= least)
    pieces = list(zip(target.split(most), source.split(most)))

    def call() -> None:
        for to, at in pieces:
            kernel[(len(pages), -(-row // tile))](
                pointers, strides, to, at, len(to), most, BYTES_PER_TILE=tile, num_warps=warps, num_stages=2
            )

    return Contender("SGLang, Triton", {}, [call], note=f"slots given, {len(pieces)} launches")
