"""What FlashInfer's two wrappers of prefill share: masks, positions, scales, and a plan for each number of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    as_dtype,
    as_sinks,
    check_kv_layout,
    finish,
    fold_scale,
    head_scales,
    refuse,
    with_lse,
)
from attnops.compat._extend import new_fmha_plan
from attnops.compat._flashinfer_workspace import check_workspace
from attnops.compat._masks import MaskedRows, TreeBits, items_mask, masked_rows
from attnops.compat._positions import alibi_slopes, biased_queries, check_mode, llama_angles, owner_of, rotate
from attnops.metadata.fmha_plan import FmhaPlan

JIT = "attnops compiles nothing at run time; leave it None, or ask for the variant AttentionSink"


def _asks_for_sinks(name: str, jit_args: Any, jit_kwargs: Any) -> bool:
    """Whether FlashInfer is asked for its variant with sinks, which `ops.fmha_*` serve. Any other is refused."""
    if jit_args is None and jit_kwargs is None:
        return False
    if jit_args is None or list(jit_args[7:12]) != [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink"]:
        raise refuse(name, "jit_args", JIT)
    return True


class Prefill:
    """What both wrappers plan: masks, positions, scales, and a tile order for each number of query rows."""

    def __init__(
        self,
        name: str,
        buffer: Tensor,
        kv_layout: str,
        graph: bool,
        mask_buffers: tuple[Any, Any],
        backend: str,
        jit_args: Any,
        jit_kwargs: Any,
    ) -> None:
        check_kv_layout(name, kv_layout)
        check_workspace("float_workspace_buffer", buffer)
        self.takes_sink = _asks_for_sinks(name, jit_args, jit_kwargs)
        self.cudnn = backend == "cudnn"  # offsets are in elements, pages have heads first
        self.name, self.device, self.kv_layout, self.graph = name, buffer.device, kv_layout, graph
        self.mask_buffers = mask_buffers
        self.planned = False
        self.tree: TreeBits | None = None
        self._plans: dict[tuple[int, int, int, bool, bool], FmhaPlan] = {}

    def __getitem__(self, index: object) -> Any:
        raise refuse(self.name, f"_plan_info[{index}]", "tiles are attnops' own; only compare it with None")

    def plan(self, given: dict[str, Any], bounds: Tensor, k_lens: Tensor, bounds_k: Tensor | None) -> None:
        """Takes `plan`'s arguments. `bounds_k`: of ragged keys; None: `k_lens` in pages."""
        name = f"{self.name}.plan"
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
        self.tree_mask: Tensor | None = None
        self._windowed: dict[int, Tensor] = {}
        self.choose(name, given)
        self.bounds, self.k_lens, self.bounds_k = bounds, k_lens, bounds_k
        self.split_keys = not given["disable_split_kv"] and (given["fixed_split_size"] or 0) <= 0
        masks = [given["custom_mask"], given["packed_custom_mask"]]
        items = [given["prefix_len_ptr"], given["token_pos_in_items_ptr"]]
        any_mask = any(mask is not None for mask in masks + items)
        if self.graph and self.planned and any_mask != (self.tree is not None):
            raise ValueError(
                f"attnops.compat: {name}: use_cuda_graph fixes whether there is a custom mask: make a wrapper for each"
            )
        if any_mask:
            q_lens, lens = bounds.diff().tolist(), k_lens.tolist()
            if all(mask is None for mask in masks):
                places = (items[0], items[1], given["token_pos_in_items_len"])
                masks[0] = items_mask(name, *places, q_lens, lens, self.device)
            given_masks = (name, masks[0], masks[1], q_lens, lens, self.device)
            if self.graph:
                if any(buffer is None for buffer in self.mask_buffers):
                    raise ValueError(
                        f"attnops.compat: {name}: a custom mask with use_cuda_graph needs custom_mask_buf and "
                        "mask_indptr_buf"
                    )
                tree = TreeBits() if self.tree is None else self.tree
                tree.set(*given_masks)
                self.tree = tree
            else:
                self.masked = masked_rows(*given_masks)
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
        self.alibi = mode == "ALIBI"
        self.scale = self.head_dim**-0.5 if given["sm_scale"] is None else given["sm_scale"]
        masked = self.masked is not None or self.tree is not None
        self.causal, self.window = bool(given["causal"]) or masked, given["window_left"]
        self.cap = given["logits_soft_cap"] or 0.0
        self.rope = (given["rope_scale"], given["rope_theta"]) if mode == "ROPE_LLAMA" else None

    def tiles(self, rows: Tensor, window: int) -> FmhaPlan:
        """The plan for queries of this shape, made at their first call."""
        key = (rows.shape[0], rows.shape[1], window, self.causal, self.split_keys)
        if key not in self._plans:
            batch_size = self.k_lens.shape[0]
            self._plans[key] = new_fmha_plan(rows, self.heads[1], batch_size, self.causal, window, self.split_keys)
            self._fill(self._plans[key])
        return self._plans[key]

    def _fill(self, plan: FmhaPlan) -> None:
        bounds = self.bounds if self.masked is None else self.masked.bounds
        if self.bounds_k is None:
            ops.fmha_plan(plan, bounds, cache_seqlens=self.k_lens)
        else:
            ops.fmha_plan(plan, bounds, self.bounds_k)

    def check(self, name: str, q: Tensor, k: Tensor, window: int | None) -> int:
        """The window of the op's call: custom masks hold theirs as bits. Raises for what was planned otherwise."""
        if not self.planned:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        for what, got, planned in (
            ("q's dtype", q.dtype, self.q_dtype),
            ("the dtype of k and v", k.dtype, self.kv_dtype),
            ("the number of heads", (q.shape[1], k.shape[-2]), self.heads),
        ):
            if got != planned:
                raise ValueError(f"attnops.compat: {name}: {what} is {got}, planned was {planned}")
        window = self.window if window is None else window
        if self.tree is not None:
            if window >= 0:
                raise refuse(
                    name, f"window_left={window} with a custom mask and use_cuda_graph", "plan without a graph"
                )
            self.tree_mask = self.tree.of(q.shape[0])
            return window
        if self.masked is None or window < 0:
            self.tree_mask = None if self.masked is None else self.masked.tree_mask
            return window
        if window not in self._windowed:
            self._windowed[window] = self.masked.within(window)
        self.tree_mask = self._windowed[window]
        return -1

    def queries(self, name: str, q: Tensor, options: dict[str, Any]) -> Tensor:
        """Turned, biased and spread as the plan says. Scales that a bias must not meet leave `options`."""
        if self.rope is not None or self.alibi:
            begins, token = self.bounds.long(), torch.arange(q.shape[0], device=q.device)
            request = owner_of(token, begins)
            ahead = begins[1:][request] - 1 - token
        if self.rope is not None:
            position = self.k_lens.long()[request] - 1 - ahead
            q = rotate(q, *llama_angles(position, q.shape[-1], *self.rope), interleaved=False)
        if self.alibi:
            scale, k_scale = options["softmax_scale"], options.pop("k_scale")
            if scale == 0:
                raise refuse(name, "ALiBi with a softmax scale of 0", "give another scale")
            if k_scale is not None:
                q = q.float() * k_scale.repeat_interleave(q.shape[1] // k_scale.numel()).unsqueeze(1)
            q = biased_queries(q, alibi_slopes(q.shape[1], q.device).expand(q.shape[:2]) / scale, ahead)
        return q if self.masked is None else self.masked.spread(q)

    def finish(
        self,
        result: tuple[Tensor, Tensor | None],
        q: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        o_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The results of the rows for the queries `q`, over `o_scale`."""
        rows, natural = result
        num_queries, dtype = q.shape[0], torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        if self.masked is not None:
            rows = self.masked.gather(rows, num_queries, 0.0)
            natural = None if natural is None else self.masked.gather(natural, num_queries, -math.inf)
        if o_scale is not None and o_scale != 1:
            rows = rows.float() / o_scale
        return with_lse(finish(rows, out, self.o_dtype or dtype), natural, lse, return_lse)

    def options(
        self, name: str, q: Tensor, q_scale: Any, k_scale: Any, v_scale: Any, args: tuple, sinks: Tensor | None = None
    ) -> dict[str, Any]:
        """Of the op. `args`: FlashInfer's FP8 scales per head, by position, as `head_scales` takes them; or, of its
        variant with sinks, these and the softmax scale."""
        scale, k_heads, v_heads = self.scale, None, None
        if self.takes_sink:
            if len(args) != 2 or not isinstance(args[0], Tensor):
                raise refuse(name, f"{len(args)} more positional arguments", "AttentionSink takes sink and sm_scale")
            sinks, scale = args[0], float(args[1])
        elif args:
            k_heads, v_heads = head_scales(name, args)
        for what, given in (("q_scale", q_scale), ("k_scale", k_scale)):
            factor, on_device = fold_scale(name, what, given, q.device)
            scale *= factor
            if on_device is not None:
                k_heads = on_device if k_heads is None else k_heads * on_device
        if v_scale is not None:
            of_values = v_scale if isinstance(v_scale, Tensor) else torch.full((1,), v_scale)
            factors = of_values.reshape(-1).to(q.device, torch.float32)
            v_heads = factors if v_heads is None else v_heads * factors
        masked = {} if self.tree_mask is None else {"tree_mask": self.tree_mask}
        scales = {"softmax_scale": scale, "k_scale": k_heads, "v_scale": v_heads, "logit_cap": self.cap}
        return {**scales, **masked, "causal": self.causal, "sinks": as_sinks(sinks, q.shape[1], name)}
