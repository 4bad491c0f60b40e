"""A DeepSeek-V4 in small: three layers of ratios 0, 4 and 128, requests that go on in any steps, and float64 answers.

What a token brings to each layer is drawn beforehand. So a step's answer depends on its tokens and on those before, not
on how a request was cut into steps. The answer of ratio 4 is over the entries that the backend has selected; they are
judged apart, by logits in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import compress_calls
import indexer_reference
import torch
from attnops.backends.dsv4 import DeepseekV4AttnBackend
from attnops.layers import CompressedAttention, Compressor
from attnops.pools import DeepSeekV4TokenToKVPool, ReqToTokenPool, SWATokenToKVPoolAllocator
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from sparse_calls import shared_bytes
from torch import Tensor

RATIOS = (0, 4, 128)
INDEX_HEADS, INDEX_DIM = 4, 128
INDEX_PARTS = (
    ("index_kv_score", 4 * INDEX_DIM),
    ("index_q", INDEX_HEADS * INDEX_DIM),
    ("index_weights", INDEX_HEADS),
)
LIMITS = Limits(max_batch_size=4, max_seqlen=640, max_num_tokens=512, max_tokens_per_request=4)
DECODE, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED
VERIFY, DRAFT_EXTEND = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND


def spec_of(num_q_heads: int = 3, topk: int = 24, **options: Any) -> AttentionSpec:
    return AttentionSpec.deepseek_v4(num_q_heads, RATIOS, **{"page_size": 128, "sparse_topk": topk} | options)


class Recording(DeepseekV4AttnBackend):
    """Remembers what the layer of ratio 4 selects."""

    def _select(self, index_pages, batch, step, part, *rest) -> None:
        super()._select(index_pages, batch, step, part, *rest)
        self.selected = {**getattr(self, "selected", {}), part.tokens.start: part.lists[4].clone()}

    def taken(self) -> Tensor:
        """Slots that the step's tokens attend to, and none remembered."""
        lists, self.selected = torch.cat([self.selected[at] for at in sorted(self.selected)]), {}
        return lists.cpu()


class Compressed:
    """Weights, layers, and the pool of a model."""

    def __init__(
        self, spec: AttentionSpec, device: str = "cpu", *, pages: int = 24, window_pages: int = 20, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.spec, self.device = spec, torch.device(device)
        self.weights = {4: compress_calls.model(512, 4, True), 128: compress_calls.model(512, 128, False)}
        self.index_weights = compress_calls.model(INDEX_DIM, 4, True)
        self.sinks = torch.randn(spec.num_q_heads)
        self.layers = []
        for place, ratio in enumerate(RATIOS):
            given = {"compressor": self._compressor(self.weights[ratio])} if ratio else {}
            given |= {"index_compressor": self._compressor(self.index_weights)} if ratio == 4 else {}
            window = {"sliding_window_size": spec.sliding_window_size, "sinks": self.sinks.clone()}
            layer = CompressedAttention(spec.num_q_heads, 0.05, place, ratio, **window, **given)
            self.layers.append(layer.to(self.device))
        size = spec.page_size
        self.pool = DeepSeekV4TokenToKVPool(
            pages * size, window_pages * size, size, RATIOS, 6, self.device, **{"max_draft_tokens": 3} | options
        )
        for tensors in (self.pool._swa, self.pool._entries, self.pool._index):
            for tensor in tensors:
                if tensor is not None:
                    tensor.fill_(0xFF)
        for tensors in (self.pool._states, self.pool._index_states):
            for tensor in tensors:
                if tensor is not None:
                    tensor.fill_(float("nan"))
        self.allocator = SWATokenToKVPoolAllocator(self.pool)
        self.requests = ReqToTokenPool(6, LIMITS.max_seqlen, self.device)
        self.requests.alloc(1)  # row 0 is padding's
        self.widths = [
            (("q", spec.num_q_heads * 512), ("k", 512)),
            (("q", spec.num_q_heads * 512), ("k", 512), ("kv_score", 2048), *INDEX_PARTS),
            (("q", spec.num_q_heads * 512), ("k", 512), ("kv_score", 1024)),
        ]

    @property
    def width(self) -> int:
        return sum(width for parts in self.widths for _, width in parts)

    def _compressor(self, given: compress_calls.Model) -> Compressor:
        tensors = (given.ape.clone(), given.norm_weight.clone(), given.cos_sin.clone())
        return Compressor(*tensors, given.eps, given.interleaved)

    def parts(self, x: Tensor) -> list[dict[str, Tensor]]:
        """What rows ``[T, width]`` bring to each layer."""
        out, begin = [], 0
        for parts in self.widths:
            here = {}
            for name, width in parts:
                value = x[:, begin : begin + width]
                here[name] = value if "score" in name else value.to(self.spec.dtype)
                begin += width
            if "index_q" in here:
                here["index_q"] = here["index_q"].unflatten(1, (INDEX_HEADS, INDEX_DIM))
            out.append(here)
        return out

    def __call__(self, input_ids: Tensor | None, positions: Tensor | None, batch: AttentionBatch, x: Tensor) -> Tensor:
        """``[T, layers, H, 512]``."""
        outs = []
        for layer, given in zip(self.layers, self.parts(x)):
            q, k = given.pop("q"), given.pop("k")
            outs.append(layer(q, k, None, batch, **given).unflatten(1, (-1, 512)))
        return torch.stack(outs, 1)


@dataclasses.dataclass
class Request:
    row: int
    x: Tensor  # all tokens that will ever come
    length: int = 0
    slots: list[int] = dataclasses.field(default_factory=list)


class Server:
    """Requests of a model, and the steps that they take."""

    def __init__(self, model: Compressed, backend: DeepseekV4AttnBackend, count: int, most: int = 570) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = model.requests.alloc(count)
        assert rows is not None
        self.model, self.backend = model, backend
        self.live = [Request(row, torch.randn(most, model.width, generator=generator)) for row in rows]

    def batch(self, mode: ForwardMode, new: dict[int, int], uniform: bool, padding: int = 0) -> AttentionBatch:
        """The next `new` tokens of requests; `padding` rows of a ragged step behind them."""
        model, slots = self.model, []
        for index, count in new.items():
            request = self.live[index]
            last = request.slots[request.length - 1] if request.length else -1
            known = request.slots[request.length : request.length + count]  # of drafts that were rejected
            held, end = request.length + len(known), request.length + count
            if end > held:
                last = request.slots[held - 1] if held else -1
                fresh = model.allocator.alloc_extend([held], [end], [last])
                assert fresh is not None
                model.requests.write(request.row, held, fresh)
                request.slots += fresh.tolist()
            slots += request.slots[request.length : end]
            request.length = end
        device = model.device
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
        return AttentionBatch(
            forward_mode=mode,
            req_pool_indices=ints([self.live[index].row for index in new]).long(),
            cache_seqlens=ints([self.live[index].length for index in new]),
            num_tokens=len(slots) + padding,
            req_to_token=model.requests.req_to_token,
            out_cache_loc=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
            tokens_per_request=next(iter(new.values())) if uniform else 0,
            extend_seq_lens=None if uniform else ints(list(new.values())),
            positions=torch.zeros(len(slots) + padding, dtype=torch.int64, device=device),
            token_to_kv_pool=model.pool,
            attn_backend=self.backend,
        )

    def x_of(self, new: dict[int, int], padding: int = 0) -> Tensor:
        """Rows of tokens that `batch` has counted; NaN in those that pad."""
        rows = [self.live[i].x[self.live[i].length - count : self.live[i].length] for i, count in new.items()]
        return torch.cat([*rows, torch.full((padding, self.model.width), float("nan"))]).to(self.model.device)

    def step(
        self, mode: ForwardMode, new: dict[int, int], *, uniform: bool = False, padding: int = 0, judged: bool = True
    ) -> Tensor:
        """An eager step."""
        batch = self.batch(mode, new, uniform, padding)
        self.backend.init_forward_metadata(batch)
        out = self.model(None, None, batch, self.x_of(new, padding))
        lists = self.backend.taken() if isinstance(self.backend, Recording) else None
        if judged:
            self.check(out, new, lists)
        return out

    def check(self, out: Tensor, new: dict[int, int], lists: Tensor | None) -> None:
        begin = 0
        for index, count in new.items():
            rows = slice(begin, begin + count)
            begin += count
            if count:
                expected = self.expected(index, count, None if lists is None else lists[rows])
                for place, ratio in enumerate(RATIOS):
                    error = relative_error(out[rows, place].cpu(), expected[:, place])
                    assert error <= MAX_RELATIVE_ERROR[self.model.spec.dtype], (ratio, index, count, error)
        assert not bool(out[begin:].any()), "rows that pad a step are not zero"

    def expected(self, index: int, count: int, lists: Tensor | None) -> Tensor:
        """float64 ``[count, layers, H, 512]`` of the last `count` tokens of a request."""
        model, request = self.model, self.live[index]
        window, heads = model.spec.sliding_window_size, model.spec.num_q_heads
        outs = []
        for given, ratio in zip(model.parts(request.x[: request.length]), RATIOS):
            rows, entries = shared_bytes(given["k"].float())[2], torch.zeros(0, 512, dtype=torch.float64)
            if ratio and request.length >= ratio:
                pooled = compress_calls.entries(model.weights[ratio], given["kv_score"])
                entries = shared_bytes(pooled.float())[2]
            keys = compress_calls.entries(model.index_weights, given["index_kv_score"]).float() if ratio == 4 else None
            index_keys = None if keys is None else indexer_reference.quantize(keys, rotate=True, ue8m0=True)
            places = {request.slots[j * 4] // 4: j for j in range(request.length // 4)}
            here = []
            for at, position in enumerate(range(request.length - count, request.length)):
                seen = torch.arange((position + 1) // ratio if ratio else 0)
                if ratio == 4:
                    if lists is None:
                        assert len(seen) <= model.spec.sparse_topk, "who selects is asked what"
                    else:
                        assert index_keys is not None
                        seen = self._judged(index_keys, places, given, position, lists[at])
                keys = torch.cat([rows[max(0, position - window) : position + 1], entries[seen]])
                scores = 0.05 * given["q"][position].view(heads, 512).double() @ keys.T
                total = torch.logaddexp(scores.logsumexp(-1), model.sinks.double())
                here.append((scores - total.unsqueeze(-1)).exp() @ keys)
            outs.append(torch.stack(here))
        return torch.stack(outs, 1)

    def _judged(
        self,
        index_keys: tuple[Tensor, Tensor],
        places: dict[int, int],
        given: dict[str, Tensor],
        position: int,
        slots: Tensor,
    ) -> Tensor:
        """Entries that were selected; an error where they are not the best. `places`: entries by their slots."""
        visible, topk = (position + 1) // 4, self.model.spec.sparse_topk
        taken = [slot for slot in slots.tolist() if slot >= 0]
        chosen = torch.tensor([places[slot] for slot in taken], dtype=torch.int64)
        assert len(set(taken)) == len(taken) == min(visible, topk)
        assert not len(chosen) or int(chosen.max()) < visible
        if len(chosen) == visible:
            return chosen
        k, k_scale = index_keys[0][:visible], index_keys[1][:visible]
        q, q_scale = indexer_reference.quantize(given["index_q"][position], rotate=True, ue8m0=True)
        weights = given["index_weights"][position].double() * q_scale.double() * (INDEX_HEADS * INDEX_DIM) ** -0.5
        logits = k_scale.double() * ((q.double() @ k.double().T).clamp(min=0) * weights.unsqueeze(1)).sum(0)
        rest = torch.ones(visible, dtype=torch.bool)
        rest[chosen] = False
        slack = 2e-3 * float(logits.abs().max())
        assert float(logits[chosen].min()) >= float(logits[rest].max()) - slack
        return chosen

    def reject(self, index: int, count: int) -> None:
        """The newest `count` tokens of a request were drafts; others come in their place."""
        request = self.live[index]
        request.length -= count
        generator = torch.Generator().manual_seed(request.length)
        end = request.length + count
        request.x[request.length : end] = torch.randn(count, self.model.width, generator=generator)
