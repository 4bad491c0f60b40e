"""What a step of vLLM needs besides vLLM's own tensors: plans, at addresses that never change."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig

from attnops import ops
from attnops.backends import Capability
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan
from attnops.plan_buffers import DecodePlan, DecodePlans
from attnops.types import AttentionSpec, Limits


def window_left(sliding_window: int | None) -> int:
    """vLLM counts the token itself, and says None where there is no window."""
    return -1 if sliding_window is None else sliding_window - 1


_CACHES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def cache_names(served: Capability) -> list[str]:
    """Those of vLLM's `kv_cache_dtype` that are served; "auto" is the model's dtype."""
    dtypes = served.dtypes | served.kv_dtypes
    return ["auto", *(name for name, dtype in _CACHES.items() if dtype in dtypes)]


def cache_dtype(name: str, model_dtype: torch.dtype, served: Capability) -> torch.dtype:
    """Of vLLM's `kv_cache_dtype`.

    Raises:
        NotImplementedError: attnops has no cache of that kind.
    """
    known = cache_names(served)
    if name not in known:
        raise NotImplementedError(f"attnops: kv_cache_dtype must be {' or '.join(known)}, got {name}")
    return model_dtype if name == "auto" else _CACHES[name]


def reason_against_cache(name: str | None) -> str | None:
    """What vLLM's own reason, "kv_cache_dtype not supported", does not say of a `kv_cache_dtype`."""
    if name is not None and name.endswith("_per_token_head"):
        return f"scales per token and head not supported, which kv_cache_dtype {name} has"
    return None


def limits_of(config: VllmConfig) -> Limits:
    """The largest step that vLLM schedules; full graphs pad a batch up to their own sizes."""
    scheduler, captured = config.scheduler_config, config.compilation_config.max_cudagraph_capture_size or 0
    return Limits(
        max_batch_size=max(scheduler.max_num_seqs, captured),
        max_seqlen=config.model_config.max_model_len,
        max_num_tokens=max(scheduler.max_num_batched_tokens, captured),
    )


class DecodePlanner:
    """Plans of uniform steps: of every window of a group of layers, and every number of tokens per request.

    Args:
        spec: Of the layers; its window is not asked.
        windows: `window_left` of the layers, -1 for those without.
    """

    def __init__(self, spec: AttentionSpec, windows: set[int], limits: Limits, device: torch.device) -> None:
        self._spec, self._windows, self._limits, self._device = spec, windows, limits, device
        self._plans: dict[tuple[int, int], DecodePlans] = {}
        self._views: dict[tuple[int, int, int], DecodePlan] = {}

    def plan(self, cache_seqlens: Tensor, seqlen_q: int) -> dict[int, DecodePlan]:
        """A plan per window for these lengths, made on the device."""
        plans: dict[int, DecodePlan] = {}
        for window in self._windows:
            key = (window, seqlen_q, cache_seqlens.shape[0])
            plan = self._views.get(key)
            if plan is None:  # some microseconds of every step
                plan = self._views[key] = self._buffers(window, seqlen_q).views(key[2])[window]
            if isinstance(plan, MlaDecodePlan):
                ops.mla_decode_plan(plan, cache_seqlens)
            else:
                assert isinstance(plan, XqaDecodePlan)
                ops.xqa_decode_plan(plan, cache_seqlens)
            plans[window] = plan
        return plans

    def _buffers(self, window: int, seqlen_q: int) -> DecodePlans:
        key = (window, seqlen_q)
        if key not in self._plans:
            spec = dataclasses.replace(self._spec, sliding_window_size=window)
            size = self._limits.max_batch_size
            self._plans[key] = DecodePlans(spec, self._limits, size, seqlen_q, self._device)
        return self._plans[key]


class PromptPlanner:
    """Plans of ragged steps: of every window, with a causal mask and without."""

    def __init__(self, spec: AttentionSpec, windows: set[int], limits: Limits, device: torch.device) -> None:
        self._windows = windows
        self._size = (limits.max_num_tokens, limits.max_batch_size)
        self._options: dict[str, Any] = {
            "num_q_heads": spec.num_q_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": max(spec.head_dim, spec.v_head_dim),
            "split_keys": not spec.deterministic,
            "device": device,
        }
        self._plans: dict[tuple[int, bool], FmhaPlan] = {}

    def plan(
        self, cu_seqlens_q: Tensor, num_tokens: int, causal: bool, cache_seqlens: Tensor | None
    ) -> dict[int, FmhaPlan]:
        """A plan per window; `cache_seqlens` is None for an encoder, whose keys are its queries' tokens."""
        plans = {}
        for window in self._windows:
            if (window, causal) not in self._plans:
                options = self._options | {"causal": causal, "window_left": window}
                self._plans[window, causal] = FmhaPlan.allocate(*self._size, **options)
            whole = self._plans[window, causal]
            tiles = -(-num_tokens // whole.tile_q) + cu_seqlens_q.shape[0] - 1
            plans[window] = dataclasses.replace(whole, tile_order=whole.tile_order[:tiles])
            ops.fmha_plan(plans[window], cu_seqlens_q, cache_seqlens=cache_seqlens)
        return plans


def is_batch_invariant() -> bool:
    """VLLM_BATCH_INVARIANT=1."""
    return bool(envs.VLLM_BATCH_INVARIANT)
