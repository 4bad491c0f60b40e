"""Calls of compress_kv over requests that come in chunks, and what their entries are in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attnops import ops
from torch import Tensor

ROPE = 64


@dataclasses.dataclass
class Model:
    """Weights of a compressor.

    Attributes:
        overlap: An entry pools two groups.
    """

    dim: int
    ratio: int
    overlap: bool
    dtype: torch.dtype
    interleaved: bool
    ape: Tensor
    norm_weight: Tensor
    cos_sin: Tensor
    eps: float = 1e-6

    @property
    def row(self) -> int:
        return (4 if self.overlap else 2) * self.dim


def model(dim: int, ratio: int, overlap: bool, dtype=torch.float32, interleaved=True, positions=2048) -> Model:
    width = (2 if overlap else 1) * dim
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
    return Model(dim, ratio, overlap, dtype, interleaved, torch.randn(ratio, width), torch.rand(dim) + 0.5, cos_sin)


def entries(given: Model, kv_score: Tensor) -> Tensor:
    """float64 ``[length // ratio, dim]``: the entries of a request's tokens, rows ``[length, row]``."""
    values, scores = kv_score.double().unflatten(1, (2, -1)).unbind(1)
    out = []
    for j in range(len(kv_score) // given.ratio):
        tokens = torch.arange(given.ratio * j, given.ratio * (j + 1))
        at, weigh = values[tokens][:, -given.dim :], (scores[tokens] + given.ape.double())[:, -given.dim :]
        if given.overlap and j:
            before = tokens - given.ratio
            at = torch.cat([values[before][:, : given.dim], at])
            weigh = torch.cat([(scores[before] + given.ape.double())[:, : given.dim], weigh])
        x = (weigh.softmax(0) * at).sum(0)
        x = x / (x.square().mean() + given.eps).sqrt() * given.norm_weight.double()
        cosine, sine = given.cos_sin[given.ratio * j].double().chunk(2)
        rope = x[-ROPE:].clone()
        a, b = (rope[::2], rope[1::2]) if given.interleaved else rope.chunk(2)
        turned = torch.stack([a * cosine - b * sine, b * cosine + a * sine], 1 if given.interleaved else 0).flatten()
        out.append(torch.cat([x[:-ROPE], turned]))
    return torch.stack(out) if out else values.new_zeros(0, given.dim)


@dataclasses.dataclass
class Cache:
    """A pool of entries, with states and the tokens that came so far."""

    given: Model
    pages: Tensor
    state: Tensor
    page_table: Tensor
    slots: list[int]
    tokens: list[Tensor]

    def step(self, counts: list[int], device: str = "cpu", **options: Any) -> None:
        """The next `counts` tokens of each request."""
        new = [torch.randn(count, self.given.row).to(self.given.dtype) for count in counts]
        self.tokens = [torch.cat(both) for both in zip(self.tokens, new)]
        self.call(new, device, **options)

    def call(self, new: list[Tensor], device: str = "cpu", **options: Any) -> None:
        given = self.given
        lengths = torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.int32, device=device)
        bounds = torch.tensor([0, *map(len, new)], dtype=torch.int32).cumsum(0).int().to(device)
        plan = ops.compress_plan(lengths, bounds, ratio=given.ratio)
        ops.compress_kv(
            self.pages,
            self.state,
            torch.cat(new).to(device),
            ape=given.ape.to(device),
            norm_weight=given.norm_weight.to(device),
            cos_sin=given.cos_sin.to(device),
            page_table=self.page_table,
            state_indices=torch.tensor(self.slots, dtype=torch.int32, device=device),
            cache_seqlens=lengths,
            cu_seqlens_q=bounds,
            entry_indptr=plan,
            ratio=given.ratio,
            eps=given.eps,
            interleaved=given.interleaved,
            **options,
        )

    def slots_of(self, request: int) -> Tensor:
        """Slots of the entries that a request has."""
        index = torch.arange(len(self.tokens[request]) // self.given.ratio)
        page_size = self.pages.shape[1]
        return self.page_table.cpu()[request, index // page_size] * page_size + index % page_size


def cache(given: Model, requests: int, most: int, pages: Tensor, *, drafts: int = 0, device: str = "cpu") -> Cache:
    """An empty cache for up to `most` tokens a request; what nobody wrote is NaN, or 0x7F in bytes."""
    columns = -(-(most // given.ratio + 1) // pages.shape[1])
    assert requests * columns <= len(pages), "the pool is too small"
    table = torch.randperm(len(pages))[: requests * columns].view(requests, columns).int()
    state = torch.full((requests + 2, (2 if given.overlap else 1) * given.ratio + drafts, given.row), float("nan"))
    none = torch.empty(0, given.row, dtype=given.dtype)
    slots = [(3 * i + 1) % (requests + 2) for i in range(requests)]
    if len(set(slots)) < requests:
        slots = list(range(requests))
    return Cache(given, pages, state.to(given.dtype).to(device), table.to(device), slots, [none] * requests)


def compress_arguments() -> dict[str, dict[str, Any]]:
    """Two requests, 3 and 2 new tokens, ratio 2."""
    given = model(64, 2, True, positions=16)
    lengths = {"cache_seqlens": torch.tensor([5, 2]).int(), "cu_seqlens_q": torch.tensor([0, 3, 5]).int(), "ratio": 2}
    return {
        "compress_plan": lengths | {"entry_indptr": torch.zeros(3, dtype=torch.int32)},
        "compress_kv": lengths
        | {"kv_pages": torch.zeros(4, 3, 64), "state": torch.zeros(3, 4, 256), "kv_score": torch.randn(5, 256)}
        | {"ape": given.ape, "norm_weight": given.norm_weight, "cos_sin": given.cos_sin}
        | {"page_table": torch.tensor([[0], [2]]).int(), "state_indices": torch.tensor([2, 0]).int()}
        | {"entry_indptr": torch.tensor([0, 1, 2]).int()},
    }
