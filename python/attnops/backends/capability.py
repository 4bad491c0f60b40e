"""What a backend can do, declared once: selection, error text, support matrix and tests all read it here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attnops.backends.machine import PACKAGES, Machine
from attnops.types import AttentionSpec, AttentionType, ForwardMode

SIXTEEN_BIT = frozenset({torch.bfloat16, torch.float16})
# On which the kernels in the folders `cuda/` run, where a build has them (`Machine.built_archs`).
PORTABLE_ARCHS = frozenset({80, 86, 87, 89, 90, 100, 103, 120, 121})
FLOATS = SIXTEEN_BIT | {torch.float32}
DECODER_MODES = frozenset(ForwardMode)

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.uint8: "656-byte rows",
    torch.float4_e2m1fn_x2: "fp4",
}


@dataclass(frozen=True)
class HeadDims:
    """Head dims that a backend takes: a range of multiples, or named pairs.

    Args:
        least, most, multiple: Of head_dim and v_head_dim alike.
        pairs: ``(head_dim, v_head_dim)``, besides the range.
        equal: In the range, both are the same.
    """

    least: int = 1
    most: int = 0
    multiple: int = 1
    pairs: frozenset[tuple[int, int]] = frozenset()
    equal: bool = True

    def reason_against(self, head_dim: int, v_head_dim: int) -> str:
        """Empty where the pair is served."""
        both = (head_dim, v_head_dim)
        ranged = all(self.least <= d <= self.most and d % self.multiple == 0 for d in both)
        if both in self.pairs or (ranged and (head_dim == v_head_dim or not self.equal)):
            return ""
        return f"takes head_dim/v_head_dim {self}, got {head_dim}/{v_head_dim}"

    def __str__(self) -> str:
        parts = [f"{qk}/{v}" for qk, v in sorted(self.pairs)]
        if self.most:
            step = "" if self.multiple == 1 else f" in steps of {self.multiple}"
            parts.insert(0, f"{self.least}-{self.most}{step}" + (" (equal)" if self.equal else ""))
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a backend serves.

    Args:
        devices: Of `machine.DEVICES`.
        chosen_on: Devices on which automatic selection may take it; None: `devices`. Elsewhere it runs when asked for
            by name. So a decode backend for GPUs runs on the CPU's kernels, but never replaces the CPU's own backend.
        archs: CUDA compute capabilities; None: all.
        needs_cuda_kernels: On "cuda" it needs the compiled module.
        needs_ops: Those of `machine.KERNEL_OPS` without whose CUDA kernels it is of no use there.
        modes: Forward modes.
        delegates_prefill: Asked for by name for everything, it takes the modes that it serves, and selection adds the
            first backend that serves the rest.
        attn_types: Of layers.
        dtypes: Of q and out.
        kv_dtypes: Of the cache where it is not q's dtype. `torch.uint8`: the 656-byte MLA rows. float4_e2m1fn_x2: the
            pools of `pools.fp4`, with a scale for 16 values.
        head_dims: Of MHA, GQA and MQA; None: not served.
        mla: MLA with absorbed queries is served.
        mla_lacks: Fields of this class that do not hold for MLA: "logit_cap", "kv_dtypes", ...
        mla_archs, mla_dtypes, mla_kv_dtypes: Those of `archs`, `dtypes` and `kv_dtypes` for which it is; None: all.
        page_sizes: None: all.
        mla_page_sizes: Of MLA; None: `page_sizes`; empty: all.
        widens_pages: Its kernels know pages of one token only: tables of any page size become tables of tokens.
        mla_widens_pages: So do those for MLA.
        sliding_window, swa_pool, logit_cap, sinks, tree_mask: Options.
        draft_trees: The branches of a draft step are tokens of one request (`AttentionBatch.draft_steps`). In layers
            with K and V of one head dim, and without a window.
        draft_trees_two_dims: Also with K and V of two head dims.
        draft_stages: So, too, but in two stages (`backends/draft_stages.py`).
        draft_windows: All of it in layers with a window, too.
        multi_item: Prompts of a prefix and items (`AttentionBatch.multi_item`).
        local_attention: Layers with `attention_chunk_size`; not beside a tree mask.
        sparse: MLA layers that bring lists of rows (`AttentionSpec.sparse_topk`).
        compressed: It is for layers over compressed entries (`AttentionSpec.compress_ratios`), and no others.
        max_tokens_per_request: Of verify and uniform draft extend; None: any.
        deterministic: `AttentionSpec.deterministic` is honoured.
        deterministic_modes: In these modes; None: in all.
        cuda_graph: Steps can be captured.
        package: Key of `machine.PACKAGES`: what it wraps and needs.
        interpreted_on_cpu: On "cpu" it runs in Triton's interpreter only: right, and very slow.
        compiles_at_run_time: Its kernels are compiled when they are first called, not when they were built.
        needs_cpu_seq_lens: It plans on the host: batches must bring `cache_seqlens_cpu` and `extend_seq_lens_cpu`.
        untested_on_hardware: Nobody has run it on the hardware that it is for; it is taken by name only.
    """

    devices: frozenset[str]
    modes: frozenset[ForwardMode]
    dtypes: frozenset[torch.dtype]
    chosen_on: frozenset[str] | None = None
    delegates_prefill: bool = False
    archs: frozenset[int] | None = None
    needs_cuda_kernels: bool = True
    needs_ops: frozenset[str] = frozenset()
    attn_types: frozenset[AttentionType] = frozenset({AttentionType.DECODER})
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: HeadDims | None = None
    mla: bool = False
    mla_lacks: frozenset[str] = frozenset()
    mla_archs: frozenset[int] | None = None
    mla_dtypes: frozenset[torch.dtype] | None = None
    mla_kv_dtypes: frozenset[torch.dtype] | None = None
    page_sizes: frozenset[int] | None = None
    mla_page_sizes: frozenset[int] | None = None
    widens_pages: bool = False
    mla_widens_pages: bool = False
    sliding_window: bool = False
    swa_pool: bool = False
    logit_cap: bool = False
    sinks: bool = False
    tree_mask: bool = False
    draft_trees: bool = False
    draft_trees_two_dims: bool = False
    draft_stages: bool = False
    draft_windows: bool = False
    local_attention: bool = False
    sparse: bool = False
    compressed: bool = False
    multi_item: bool = False
    max_tokens_per_request: int | None = None
    deterministic: bool = False
    deterministic_modes: frozenset[ForwardMode] | None = None
    cuda_graph: bool = False
    package: str | None = None
    interpreted_on_cpu: bool = False
    compiles_at_run_time: bool = False
    needs_cpu_seq_lens: bool = False
    untested_on_hardware: bool = False

    def reasons_against(self, spec: AttentionSpec, modes: Iterable[ForwardMode] = ()) -> list[str]:
        """Why a model is not served, each reason naming what is taken and what was asked for. Empty: it is."""
        if spec.is_mla and self.mla_lacks:
            none: dict[str, Any] = {name: type(getattr(self, name))() for name in self.mla_lacks}  # False, or no dtype
            return dataclasses.replace(self, mla_lacks=frozenset(), **none).reasons_against(spec, modes)
        missing = sorted(mode.name for mode in set(modes) - self.modes)
        varying = sorted(mode.name for mode in set(modes) - (self.deterministic_modes or set(modes)))
        dtypes = self.mla_dtypes if spec.is_mla and self.mla_dtypes is not None else self.dtypes
        checks = [
            (not missing, f"does not serve {', '.join(missing)}"),
            (spec.attn_type in self.attn_types, f"does not serve layers of type {spec.attn_type.name}"),
            (spec.dtype in dtypes, f"takes {names(dtypes)}, got {names([spec.dtype])}"),
            *(self._cache_checks(spec) if spec.attn_type is not AttentionType.ENCODER_ONLY else []),
            self._head_dims_check(spec),
            (self.sliding_window or spec.sliding_window_size < 0, "has no sliding window"),
            (self.local_attention or not spec.attention_chunk_size, "has no local attention (attention_chunk_size)"),
            (self.sparse or not spec.sparse_topk, "attends to every key, not to lists of rows (sparse_topk)"),
            (self.compressed or not spec.compress_ratios, "has no compressed entries (compress_ratios)"),
            (not self.compressed or bool(spec.compress_ratios), "serves layers of compress_ratios alone"),
            (self.logit_cap or not spec.logit_cap, "has no soft cap on logits"),
            (self.sinks or not spec.has_sinks, "has no attention sinks"),
            (self.deterministic or not spec.deterministic, "is not batch-invariant (deterministic=True)"),
            (not varying or not spec.deterministic, f"is not batch-invariant in {', '.join(varying)}"),
        ]
        return [reason for holds, reason in checks if not holds]

    def _cache_checks(self, spec: AttentionSpec) -> list[tuple[bool, str]]:
        kv_dtypes = self.mla_kv_dtypes if spec.is_mla and self.mla_kv_dtypes is not None else self.kv_dtypes
        taken = ", ".join(["a cache of the model's dtype", *sorted(DTYPE_NAMES[d] for d in kv_dtypes)])
        served = spec.cache_dtype == spec.dtype or spec.cache_dtype in kv_dtypes
        of_mla = spec.is_mla and self.mla_page_sizes is not None
        sizes = sorted((self.mla_page_sizes if of_mla else self.page_sizes) or ())
        return [
            (served, f"takes {taken}, got {names([spec.cache_dtype])}"),
            (spec.is_mla or spec.cache_dtype != torch.uint8, "a uint8 cache (656-byte rows) belongs to MLA"),
            (
                not sizes or spec.page_size in sizes,
                f"takes page_size {', '.join(map(str, sizes))}, got {spec.page_size}",
            ),
        ]

    def _head_dims_check(self, spec: AttentionSpec) -> tuple[bool, str]:
        if spec.is_mla:
            return self.mla, "does not serve MLA"
        if self.head_dims is None:
            return False, "serves MLA only"
        reason = self.head_dims.reason_against(spec.head_dim, spec.v_head_dim)
        return not reason, reason

    def speculative_reasons(self, topk: int | None, num_steps: int | None) -> list[str]:
        """Why the verify steps of a draft are not served: a tree of `topk` branches, `num_steps` tokens deep."""
        tokens = (num_steps or 0) + 1
        most = self.max_tokens_per_request
        checks = [
            (self.tree_mask or (topk or 1) == 1, f"has no tree mask, which speculative_eagle_topk={topk} needs"),
            (
                most is None or tokens <= most,
                f"verifies {most} tokens at most, speculative_num_steps={num_steps} brings {tokens}",
            ),
        ]
        return [reason for holds, reason in checks if not holds]

    def machine_reasons(self, machine: Machine, spec: AttentionSpec | None = None) -> list[str]:
        """Why it does not run on a machine, or not a model there; empty: it does."""
        if machine.device not in self.devices:
            return [f"runs on {' and '.join(sorted(self.devices))}, this is {machine.device}"]
        archs, what = self.archs, ""
        if spec is not None and spec.is_mla and self.mla_archs is not None:
            archs, what = self.mla_archs, " for MLA"
        if machine.device == "cuda" and archs is not None and machine.arch not in archs:
            return [f"needs sm_{' or sm_'.join(map(str, sorted(archs)))}{what}, this is sm_{machine.arch}"]
        if self.package is not None and self.package not in machine.packages:
            return [f"needs the package {PACKAGES[self.package]}, which is not installed"]
        if machine.device == "cpu" and self.interpreted_on_cpu and not machine.interprets_triton:
            return ["runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1"]
        if machine.device == "cuda" and self.needs_cuda_kernels and not machine.has_cuda_kernels:
            return ["needs the compiled CUDA kernels, which are not loaded (attnops.cuda_unavailable_reason)"]
        if machine.device == "cuda" and self.needs_cuda_kernels and not machine.runs_built_kernels:
            built = " and ".join(f"sm_{arch}" for arch in sorted(machine.built_archs))
            return [f"needs kernels for sm_{machine.arch} (ATTNOPS_ARCHS), this build has those of {built}"]
        missing = sorted(self.needs_ops & machine.missing_ops)
        return [f"needs CUDA kernels of {' and '.join(missing)}, which this build lacks"] if missing else []


def names(dtypes: Iterable[torch.dtype]) -> str:
    """Short names in a fixed order."""
    return ", ".join(sorted(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes))
