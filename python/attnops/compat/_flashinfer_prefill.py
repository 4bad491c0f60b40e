"""What FlashInfer's two wrappers of prefill share: masks, positions, scales, and a plan for each number of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import as_dtype, check_kv_layout, finish, fold_scale, refuse, require_default, with_lse
from attnops.compat._extend import new_fmha_plan
from attnops.compat._masks import MaskedRows, masked_rows
from attnops.compat._positions import check_mode, llama_angles, rotate
from attnops.metadata.fmha_plan import FmhaPlan

_ITEMS = "there is no multi-item scoring; leave the default"
_INSTEAD = dict.fromkeys(
    ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"), _ITEMS
)
JIT = "attnops compiles nothing at run time; leave it None"


class Prefill:
    """What both wrappers plan: masks, positions, scales, and a tile order for each number of query rows."""

    def __init__(self, name: str, buffer: Tensor, kv_layout: str, graph: bool, mask_buffers: tuple[Any, Any]) -> None:
        check_kv_layout(name, kv_layout)
        self.name, self.device, self.kv_layout, self.graph = name, buffer.device, kv_layout, graph
        self.mask_buffers = mask_buffers
        self.planned = False
        self._plans: dict[tuple[int, int, int, bool], FmhaPlan] = {}

    def plan(self, given: dict[str, Any], bounds: Tensor, k_lens: Tensor, bounds_k: Tensor | None) -> None:
        """Takes `plan`'s arguments. `bounds_k`: of ragged keys; None: `k_lens` in pages."""
        name = f"{self.name}.plan"
        require_default(name, _INSTEAD, {"token_pos_in_items_len": 0}, given)
        if bounds.shape[0] != k_lens.shape[0] + 1:
            raise ValueError(
                f"attnops.compat: {name}: qo_indptr must be [B + 1] of {k_lens.shape[0]} requests, "
                f"got {list(bounds.shape)}"
            )
        self.q_dtype = as_dtype(name, "q_data_type", given["q_data_type"])
        self.kv_dtype = as_dtype(name, "kv_data_type", given["kv_data_type"]) or self.q_dtype
        self.o_dtype = as_dtype(name, "o_data_type", given["o_data_type"])
        self.heads, self.head_dim = (given["num_qo_heads"], given["num_kv_heads"]), given["head_dim_qk"]
        self.masked: MaskedRows | None = None
        self.choose(name, given)
        self.bounds, self.k_lens, self.bounds_k = bounds, k_lens, bounds_k
        if given["custom_mask"] is not None or given["packed_custom_mask"] is not None:
            if self.graph:
                raise refuse(name, "a custom mask with use_cuda_graph", "plan without a graph, or use causal")
            q_lens = (bounds[1:] - bounds[:-1]).tolist()
            masks = given["custom_mask"], given["packed_custom_mask"]
            self.masked = masked_rows(name, *masks, q_lens, k_lens.tolist(), self.device)
            self.causal = True  # which the mask takes the place of
        self.planned = True
        if not self.graph:
            self._plans.clear()
        for plan in self._plans.values():
            self._fill(plan)

    def choose(self, name: str, given: dict[str, Any]) -> None:
        """What `forward` may choose anew after `plan`; a mask stays."""
        mode = given["pos_encoding_mode"]
        check_mode(name, mode)
        if mode == "ALIBI":
            raise refuse(name, "pos_encoding_mode='ALIBI'", "prefill has no bias; use NONE or ROPE_LLAMA")
        self.scale = self.head_dim**-0.5 if given["sm_scale"] is None else given["sm_scale"]
        self.causal, self.window = bool(given["causal"]) or self.masked is not None, given["window_left"]
        self.cap = given["logits_soft_cap"] or 0.0
        self.rope = (given["rope_scale"], given["rope_theta"]) if mode != "NONE" else None

    def tiles(self, rows: Tensor, window: int) -> FmhaPlan:
        """The plan for queries of this shape, made at their first call."""
        key = (rows.shape[0], rows.shape[1], window, self.causal)
        if key not in self._plans:
            batch_size = self.k_lens.shape[0]
            self._plans[key] = new_fmha_plan(rows, self.heads[1], batch_size, self.causal, window)
            self._fill(self._plans[key])
        return self._plans[key]

    def _fill(self, plan: FmhaPlan) -> None:
        bounds = self.bounds if self.masked is None else self.masked.bounds
        if self.bounds_k is None:
            ops.fmha_plan(plan, bounds, cache_seqlens=self.k_lens)
        else:
            ops.fmha_plan(plan, bounds, self.bounds_k)

    def check(self, name: str, q: Tensor, k: Tensor, window: int | None) -> int:
        """The window of a call; raises for what was planned otherwise."""
        if not self.planned:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        for what, got, planned in (
            ("q's dtype", q.dtype, self.q_dtype),
            ("the dtype of k and v", k.dtype, self.kv_dtype),
            ("the number of heads", (q.shape[1], k.shape[-2]), self.heads),
        ):
            if got != planned:
                raise ValueError(f"attnops.compat: {name}: {what} is {got}, planned was {planned}")
        return self.window if window is None else window

    def queries(self, q: Tensor) -> Tensor:
        """Turned and spread as the plan says."""
        if self.rope is not None:
            begins, token = self.bounds.long(), torch.arange(q.shape[0], device=q.device)
            last = self.k_lens.shape[0] - 1
            request = (torch.searchsorted(begins, token, right=True) - 1).clamp(0, max(last, 0))
            ends = begins[1:][request] - self.k_lens.long()[request]
            q = rotate(q, *llama_angles(token - ends, q.shape[-1], *self.rope), interleaved=False)
        return q if self.masked is None else self.masked.spread(q)

    def finish(
        self,
        result: tuple[Tensor, Tensor | None],
        q: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The results of the rows for the queries `q`."""
        rows, natural = result
        num_queries, dtype = q.shape[0], torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        if self.masked is not None:
            rows = self.masked.gather(rows, num_queries, 0.0)
            natural = None if natural is None else self.masked.gather(natural, num_queries, -math.inf)
        return with_lse(finish(rows, out, self.o_dtype or dtype), natural, lse, return_lse)

    def options(self, name: str, q: Tensor, q_scale: Any, k_scale: Any, v_scale: Any, args: tuple) -> dict[str, Any]:
        """Of the op. `args`: FlashInfer's FP8 scales per head ``[H_q]``, ``[H_kv]``, ``[H_kv]``, by position."""
        scale, k_heads, v_heads = self.scale, None, None
        if args:
            if len(args) != 3 or not all(isinstance(arg, Tensor) for arg in args):
                raise refuse(name, f"{len(args)} more positional arguments", "FP8 takes three scales per head")
            k_heads, v_heads = args[1].float().contiguous(), args[2].float().contiguous()
        for what, given in (("q_scale", q_scale), ("k_scale", k_scale)):
            factor, on_device = fold_scale(name, what, given, q.device)
            scale *= factor
            if on_device is not None:
                k_heads = on_device if k_heads is None else k_heads * on_device
        if v_scale is not None:
            of_values = v_scale if isinstance(v_scale, Tensor) else torch.full((1,), v_scale)
            factors = of_values.reshape(-1).to(q.device, torch.float32)
            v_heads = factors if v_heads is None else v_heads * factors
        masked = {} if self.masked is None else {"tree_mask": self.masked.tree_mask}
        scales = {"softmax_scale": scale, "k_scale": k_heads, "v_scale": v_heads, "logit_cap": self.cap}
        return {**scales, **masked, "causal": self.causal}

    @staticmethod
    def dequantized(q: Tensor, args: tuple) -> Tensor:
        """FP8 queries as bfloat16, with their scales per head."""
        if q.dtype.itemsize > 1:
            return q
        return (q.float() * args[0].float().view(-1, 1)).to(torch.bfloat16) if args else q.to(torch.bfloat16)
