"""Prompts of MLA by `fmha`: ATTNOPS among vLLM's MLA prefill backends.

vLLM expands latents to keys and values of each head. The new tokens of prompts attend to each other, then to what was
stored before, a chunk at a time, and vLLM merges the results.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from attnops import environment, ops
from attnops.backends import Capability, detect_machine
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plugins import adapters
from attnops.plugins.vllm import PREFILL_NAME as NAME
from attnops.plugins.vllm.plans import is_batch_invariant
from attnops.types import AttentionSpec, AttentionType

logger = logging.getLogger("attnops.plugins.vllm")


def capability() -> Capability:
    """What `fmha` serves of prompts whose keys and values come from no cache."""
    return adapters.find("vllm", "ATTNOPS, as mla_prefill_backend").capability()


def reasons_against(head_dim: int, v_head_dim: int, dtype: torch.dtype | None = None) -> list[str]:
    """Why `fmha` does not serve prompts of these head dims here; empty: it does."""
    reasons = capability().machine_reasons(detect_machine(current_platform.device_type))
    try:
        spec = AttentionSpec(
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=torch.bfloat16 if dtype is None else dtype,
            attn_type=AttentionType.ENCODER_ONLY,  # what a cache could be does not matter
            deterministic=is_batch_invariant(),
        )
    except ValueError as error:
        return [*reasons, str(error)]
    return [*reasons, *capability().reasons_against(spec)]


def choose(config: VllmConfig, head_dim: int, v_head_dim: int) -> None:
    """Names ATTNOPS in vLLM's option `mla_prefill_backend`, where it names none and `fmha` serves the prompts.

    The log says which kernels serve them, and why. On a CPU vLLM asks for no option: there ATTNOPS_VLLM_CPU=1 counts.
    """
    attention, reasons = config.attention_config, reasons_against(head_dim, v_head_dim, config.model_config.dtype)
    if current_platform.is_cpu():
        if not environment.VLLM_CPU.value():
            reasons = ["ATTNOPS_VLLM_CPU=1 is not set"]
        _say("; ".join(reasons))
        return
    ours: Any = MLAPrefillBackendEnum[NAME]
    if attention.mla_prefill_backend is None and not reasons:
        attention.mla_prefill_backend = ours
    named = attention.mla_prefill_backend
    if named is not None and named is not ours:
        reasons = [f"mla_prefill_backend is {named.name}"]
    _say("; ".join(reasons))


@functools.cache
def _say(reasons: str) -> None:
    if reasons:
        logger.warning("attnops: prompts of MLA go to an MLA prefill backend of vLLM's own: %s", reasons)
    else:
        logger.info("attnops: prompts of MLA go to fmha, by the MLA prefill backend %s", NAME)


class AttnopsPrefillBackend(MLAPrefillBackend):
    """One layer's, or one builder's: what a builder has holds the plans of a step, for all layers."""

    supported_dtypes = sorted(capability().dtypes, key=str)

    def __new__(cls, *args: Any, **layer: Any) -> Any:
        """On a CPU, which validates nothing, vLLM's own for what `fmha` does not serve."""
        if current_platform.is_cpu() and layer:
            head_dim = layer["qk_nope_head_dim"] + layer["qk_rope_head_dim"]
            if reasons_against(head_dim, layer["v_head_dim"], layer["vllm_config"].model_config.dtype):
                from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

                return CPUSDPAMLAPrefillBackend(*args, **layer)
        return super().__new__(cls)

    def __init__(self, *args: Any, **layer: Any) -> None:
        super().__init__(*args, **layer)
        self._plans: dict[int | None, FmhaPlan] = {}

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        archs = capability().archs
        return device_capability is None or archs is None or device_capability.to_int() in archs

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        head_dim = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        dims = capability().head_dims
        return dims is not None and not dims.reason_against(head_dim, mla_dimensions.v_head_dim)

    @classmethod
    def is_available(cls) -> bool:
        return not capability().machine_reasons(detect_machine(current_platform.device_type))

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """A new step: its first layer plans it."""
        super().prepare_metadata(prefill_metadata)
        self._plans.clear()

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q, k: ``[T, heads, D]``, v: ``[T, heads, D_v]``, each token sees its request up to itself.

        Returns:
            ``[T, heads, D_v]``; and with `return_softmax_lse` float32 ``[heads, T]``.
        """
        if output_scale is not None:
            raise NotImplementedError("attnops: the MLA prefill backend ATTNOPS does not quantize its output")
        bounds = self._prefill_metadata.query_start_loc
        result, lse = self._attend(None, (q, k, v), (bounds, bounds), True, out, return_softmax_lse)
        return result if lse is None else (result, lse)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same over a part of what was stored before, which every token of a request sees."""
        bounds = (chunk.query_start_loc, chunk.cu_seq_lens)
        result, lse = self._attend(chunk.index, (q, k, v), bounds, False, out, True)
        assert lse is not None
        return result, lse

    def _attend(
        self,
        part: int | None,
        rows: tuple[Tensor, Tensor, Tensor],
        bounds: tuple[Tensor, Tensor],
        causal: bool,
        out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`part`: the number of a chunk, None for the new tokens."""
        plan = self._plans.get(part)
        if plan is None:
            plan = self._plans[part] = self._plan(rows, bounds, causal)
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": causal, "return_lse": return_lse}
        result, lse = ops.fmha_varlen(*rows, *bounds, plan, out=out, **options)
        return result, None if lse is None else lse.t().contiguous()

    def _plan(self, rows: tuple[Tensor, Tensor, Tensor], bounds: tuple[Tensor, Tensor], causal: bool) -> FmhaPlan:
        q, _, v = rows
        plan = FmhaPlan.allocate(
            q.shape[0],
            bounds[0].shape[0] - 1,
            causal=causal,
            num_q_heads=q.shape[1],
            num_kv_heads=q.shape[1],
            head_dim=max(q.shape[2], v.shape[2]),
            split_keys=not is_batch_invariant(),
            device=q.device,
        )
        ops.fmha_plan(plan, bounds[0], cu_seqlens_k=bounds[1])
        return plan
