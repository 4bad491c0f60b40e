"""Attention over a cache of FlashAttention's kind: append, rotary embeddings, left padding, chunks, windows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attnops.compat._alibi import attend_alibi
from attnops.compat._attend import decode
from attnops.compat._cache_append import append
from attnops.compat._cache_tables import is_shared, one_token_pages, token_table, window_of
from attnops.compat._chunks import extend_chunks
from attnops.compat._convert import FP8, as_int32, as_sinks, product, refuse, to_dtype
from attnops.compat._device_windows import extend_window
from attnops.compat._extend import extend
from attnops.compat._latent_cache import attend_latent, is_mla, joined_values
from attnops.compat._positions import rotate
from attnops.metadata.plan_checks import MAX_CUTS

MAX_DECODE_QUERIES = 16  # per request; more are served as prefill


@dataclasses.dataclass
class Call:
    """One call, in FlashAttention's words; shapes as of `flash_attn_interface.flash_attn_with_kvcache`."""

    name: str
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    qv: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    max_seqlen_q: int | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    num_splits: int = 0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    out: Tensor | None = None
    return_lse: bool = False
    _written: bool = False

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Out in q's shape, and natural lse in that shape without its last dimension."""
        self._check()
        rows = self.q if self.cu_seqlens_q is not None else self.q.flatten(0, 1)
        table, lens = self._table(), self._lens()
        if self.k is not None and self.v is not None:
            rows, k = self._rotated(rows, lens)
            lens = append(self, k, self.v, table, lens)
        if rows.dtype == FP8:
            rows = rows.to(torch.bfloat16)
        out, lse = self._attend(rows, table, lens)
        shape = (*self.q.shape[:-1], out.shape[-1])
        out = out.view(shape)
        if self.out is not None and not self._written:
            out = self.out.copy_(to_dtype(out, self.out.dtype).view(self.out.shape))
        return out, None if lse is None else lse.view(shape[:-1])

    def _check(self) -> None:
        self.window_size = window_of(self.name, self.window_size)
        if self.num_splits < 0:
            raise ValueError(f"attnops.compat: {self.name}: num_splits must be at least 0, got {self.num_splits}")
        if self.cu_seqlens_q is not None and self.max_seqlen_q is None:
            raise ValueError(f"attnops.compat: {self.name}: cu_seqlens_q needs max_seqlen_q")
        if self.cu_seqlens_q is None and self.max_seqlen_q not in (None, self.q.shape[1]):
            raise ValueError(
                f"attnops.compat: {self.name}: max_seqlen_q must be {self.q.shape[1]} (q.shape[1]) without "
                f"cu_seqlens_q, got {self.max_seqlen_q}"
            )
        if (self.k is None) != (self.v is None):
            raise ValueError(f"attnops.compat: {self.name}: k and v come together")
        if (self.rotary_cos is None) != (self.rotary_sin is None):
            raise ValueError(f"attnops.compat: {self.name}: rotary_cos and rotary_sin come together")
        if self.rotary_cos is not None and self.k is None:
            raise ValueError(f"attnops.compat: {self.name}: rotary_cos needs k and v: cached keys are rotated already")

    @property
    def batch_size(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q or 0

    def query_bounds(self) -> Tensor:
        if self.cu_seqlens_q is not None:
            return as_int32(self.name, "cu_seqlens_q", self.cu_seqlens_q, self.q.device)
        return torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.q.device) * self.q.shape[1]

    def _table(self) -> Tensor:
        """A cache without pages is one of pages as long as its sequences."""
        rows = self.cache_batch_idx
        if self.page_table is not None:
            return self.page_table if rows is None else self.page_table.index_select(0, rows.long())
        if rows is None:
            rows = torch.arange(self.batch_size, dtype=torch.int32, device=self.q.device)
        return as_int32(self.name, "cache_batch_idx", rows, self.q.device).unsqueeze(1)

    def _lens(self) -> Tensor:
        given = self.cache_seqlens
        if isinstance(given, Tensor):
            return as_int32(self.name, "cache_seqlens", given, self.q.device)
        if given is None:
            pages = 1 if self.page_table is None else self.page_table.shape[1]
            given = pages * self.k_cache.shape[1]
        return torch.full((self.batch_size,), given, dtype=torch.int32, device=self.q.device)

    def _rotated(self, rows: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and new keys at their positions; all queries are at the first where none is masked."""
        k = self.k
        assert k is not None
        if self.rotary_cos is None or self.rotary_sin is None:
            return rows, k
        start = lens if self.rotary_seqlens is None else self.rotary_seqlens.to(lens.device)
        masked: bool | Tensor = self.causal or isinstance(self.window_size, Tensor) or self.window_size != (-1, -1)
        if isinstance(self.window_size, Tensor) and not self.causal:  # the host may not read it
            masked = (self.window_size >= 0).any().to(rows.device)
        limit = self.rotary_cos.shape[0] - 1

        def turned(x: Tensor, bounds: Tensor, step: bool | Tensor) -> Tensor:
            index = torch.arange(x.shape[0], device=x.device)
            owner = torch.searchsorted(bounds[1:].contiguous(), index, right=True).clamp(max=start.shape[0] - 1)
            at = (start[owner] + (index - bounds[owner]) * step).clamp(0, limit)
            cos, sin = self.rotary_cos[at].unsqueeze(1), self.rotary_sin[at].unsqueeze(1)  # type: ignore[index]
            wide = x.to(torch.bfloat16) if x.dtype == FP8 else x
            return rotate(wide, cos, sin, self.rotary_interleaved)

        rows = turned(rows, self.query_bounds().long(), masked)
        new = self.key_bounds().long()
        flat = k if self.cu_seqlens_k_new is not None else k.flatten(0, 1)
        return rows, to_dtype(turned(flat, new, True), k.dtype).view(k.shape)

    def key_bounds(self) -> Tensor:
        assert self.k is not None
        if self.cu_seqlens_k_new is not None:
            return as_int32(self.name, "cu_seqlens_k_new", self.cu_seqlens_k_new, self.q.device)
        return torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.q.device) * self.k.shape[1]

    def _attend(self, rows: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor | None]:
        window = self.window_size if isinstance(self.window_size, Tensor) else None
        left, right = (-1, -1) if window is not None else self.window_size
        causal = self.causal or right == 0
        if self.cache_leftpad is not None:
            pad = as_int32(self.name, "cache_leftpad", self.cache_leftpad, rows.device)
            k_cache, v_cache = one_token_pages(self.k_cache), one_token_pages(self.v_cache)
            table = token_table(table, self.k_cache.shape[1], pad, table.shape[1] * self.k_cache.shape[1])
            lens = (lens - pad).clamp(min=0)
        else:
            k_cache, v_cache = self.k_cache, self.v_cache
        dtype = rows.dtype
        self._check_descales()
        if self.qv is None:
            rows, v_factor, scales = self._descaled(rows)
        elif right > 0 or self.attention_chunk > 0 or window is not None or not is_mla(self):
            rows, k_cache, v_cache, table, v_factor = joined_values(self, rows, k_cache, v_cache, table)
            scales = {}
        else:
            return attend_latent(self, rows, k_cache, v_cache, table, lens, causal, left)
        options: dict[str, Any] = {
            "softmax_scale": rows.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            "logit_cap": self.softcap,
            "sinks": as_sinks(self.sinks, rows.shape[1], self.name),
            "return_lse": self.return_lse,
            **scales,
        }
        uniform = self.cu_seqlens_q is None
        same_dims = v_cache.shape[-1] == rows.shape[-1]  # as xqa_decode needs them
        few = uniform and self.seqlen_q <= MAX_DECODE_QUERIES and same_dims
        plain = v_factor is None and rows.dtype == dtype and self.attention_chunk <= 0 and self.slopes is None
        plain = plain and window is None
        destination = None
        if self.out is not None and plain and self.out.dtype == dtype and self.out.is_contiguous():
            destination = self.out.view(*rows.shape[:-1], v_cache.shape[-1])
        self._written = destination is not None
        if self.slopes is not None and (self.attention_chunk > 0 or window is not None):
            other = "attention_chunk" if window is None else "window_size on a device"
            raise refuse(self.name, f"{other} with alibi_slopes", "leave one of them out")
        if window is not None:
            given = {"causal": causal, "chunk": self.attention_chunk, "cuts": min(self.num_splits, MAX_CUTS), **options}
            caches = (rows, k_cache, v_cache, table, lens)
            out, lse = extend_window(self.name, *caches, self.query_bounds(), window, **given)
        elif self.attention_chunk > 0:
            given = {"causal": causal, "window_left": left, "window_right": -1 if causal else right, **options}
            given["split_keys"] = self.num_splits == 0
            caches = (rows, k_cache, v_cache, table, lens)
            out, lse = extend_chunks(*caches, self.query_bounds(), self.attention_chunk, **given)
        elif self.slopes is not None:
            caches = (rows, k_cache, v_cache, table, lens)
            out, lse = attend_alibi(self, *caches, causal, (left, right), options)
        elif few and (right < 0 or causal):
            cuts = min(self.num_splits, MAX_CUTS)
            given = {"causal": causal, "window_left": left, "cuts": cuts, "out": destination, **options}
            out, lse = decode(self.name, rows, k_cache, v_cache, table, lens, seqlen_q=self.seqlen_q, **given)
        else:
            given = {"causal": causal, "window_left": left, "window_right": -1 if causal else right, **options}
            given["split_keys"] = self.num_splits == 0
            out, lse = extend(rows, k_cache, v_cache, table, lens, self.query_bounds(), out=destination, **given)
        if v_factor is not None:
            out = out * v_factor
        return to_dtype(out, dtype), lse

    def _check_descales(self) -> None:
        for what in ("q_descale", "k_descale", "v_descale"):
            scale = getattr(self, what)
            if scale is not None and self.k_cache.dtype.itemsize != 1:
                raise refuse(self.name, f"{what} with a cache of {self.k_cache.dtype}", "only FP8 caches have descales")
            if scale is not None and scale.dim() != 2:
                raise ValueError(f"attnops.compat: {self.name}: {what} must be [B, H_kv], got {list(scale.shape)}")

    def of_rows(self, scale: Tensor | None, rows: Tensor) -> Tensor | None:
        """A descale ``[B, H_kv]`` as float32 ``[T, H_q, 1]`` of the queries; None: 1."""
        if scale is None:
            return None
        index = torch.arange(rows.shape[0], device=rows.device)
        owner = torch.searchsorted(self.query_bounds()[1:].contiguous(), index, right=True)
        owner = owner.clamp(max=self.batch_size - 1)
        scale = scale.float().expand(self.batch_size, self.k_cache.shape[2])
        return scale[owner].repeat_interleave(rows.shape[1] // self.k_cache.shape[2], 1).unsqueeze(2)

    def _descaled(self, rows: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Float32 queries times the scales that differ between requests, a factor of the output, and the scales that
        all requests share."""
        given = (self.q_descale, self.k_descale, self.v_descale)
        if all(scale is None or is_shared(scale) for scale in given):
            scales = {}
            of_scores = [scale[0].float() for scale in given[:2] if scale is not None and scale.shape[0]]
            if of_scores:
                scales["k_scale"] = (of_scores[0] if len(of_scores) == 1 else of_scores[0] * of_scores[1]).contiguous()
            if self.v_descale is not None and self.v_descale.shape[0]:
                scales["v_scale"] = self.v_descale[0].float().contiguous()
            return rows, None, scales
        factor = product(self.of_rows(self.q_descale, rows), self.of_rows(self.k_descale, rows))
        rows = rows.float() if factor is None else rows.float() * factor
        return rows, self.of_rows(self.v_descale, rows), {}
