"""What each option of an engine leads to: a backend's `Capability`, less what the adapter does not pass on.

Adapters of vLLM answer vLLM by it. `python -m attnops.info --plugins` prints it, with the reasons against the rest. It
imports no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnops.backends import Capability, get_backend_class
from attnops.types import AttentionSpec, AttentionType

FP8, FP8_WIDE, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
ROWS = ("q", "cache", "head dims", "page size", "window", "soft cap", "sinks", "tree mask", "batch-invariant")
_PAGE = 64


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An option of an engine.

    Args:
        name: What a user sets, and a word where an option serves two kinds of layers.
        backend: Whose capability it has.
        mla: Of its absorbed MLA, not of its layers with K and V of their own.
        own: Fields of `Capability` that differ here, each with the reason why.
        rows: Of `info`'s matrix: what there is to say.
    """

    name: str
    backend: str
    mla: bool = False
    own: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    rows: tuple[str, ...] = ROWS

    def capability(self) -> Capability:
        """What is served."""
        served = self._of_backend()
        return dataclasses.replace(served, **{name: value for name, (value, _) in self.own.items()})

    def _of_backend(self) -> Capability:
        whole = get_backend_class(self.backend).capability
        of_mla: dict[str, Any] = dict.fromkeys(("mla_archs", "mla_dtypes", "mla_kv_dtypes", "mla_page_sizes"))
        if not self.mla:
            return dataclasses.replace(whole, mla=False, **of_mla)
        return dataclasses.replace(
            whole,
            head_dims=None,
            archs=whole.archs if whole.mla_archs is None else whole.mla_archs,
            dtypes=whole.dtypes if whole.mla_dtypes is None else whole.mla_dtypes,
            kv_dtypes=whole.kv_dtypes if whole.mla_kv_dtypes is None else whole.mla_kv_dtypes,
            page_sizes=whole.page_sizes if whole.mla_page_sizes is None else whole.mla_page_sizes or None,
            **of_mla,
        )

    def refusals(self) -> list[str]:
        """What of `rows` is not served, and why: the capability's reason, then the adapter's where it is its own."""
        served, before = self.capability(), self._of_backend()
        lines = []
        for row, what, spec in _asked(self.mla):
            reasons = _reasons(served, row, spec) if row in self.rows else []
            if reasons:
                why = "" if _reasons(before, row, spec) else self._why(row)
                lines.append(f"{what}: {'; '.join(reasons)}" + (f" ({why})" if why else ""))
        return lines

    def _why(self, row: str) -> str:
        return next((why for name, (_, why) in self.own.items() if name == _FIELDS.get(row)), "")


# Row of the matrix -> the field that says it.
_FIELDS = {
    "q": "dtypes",
    "cache": "kv_dtypes",
    "head dims": "head_dims",
    "page size": "page_sizes",
    "window": "sliding_window",
    "soft cap": "logit_cap",
    "sinks": "sinks",
    "tree mask": "tree_mask",
    "batch-invariant": "deterministic",
}


def _asked(mla: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Row, words, and what of a model: one thing at a time that an engine could ask for."""
    yield "q", "q of float32", {"dtype": torch.float32}
    for dtype, name in ((FP8, "e4m3"), (FP8_WIDE, "e5m2"), (FP4, "fp4")):
        yield "cache", f"a cache of {name}", {"kv_dtype": dtype}
    if mla:
        yield "cache", "656-byte rows", {"kv_dtype": torch.uint8}
    else:
        yield "head dims", "head dims of 192 and 128", {"head_dim": 192, "v_head_dim": 128}
        yield "head dims", "a head dim of 512", {"head_dim": 512}
        yield "head dims", "a head dim of 20", {"head_dim": 20}
    yield "page size", "pages of 16", {"page_size": 16}
    yield "window", "a window", {"sliding_window_size": 128}
    yield "soft cap", "a soft cap", {"logit_cap": 30.0}
    yield "sinks", "sinks", {"has_sinks": True}
    yield "tree mask", "a tree of drafts", {}
    yield "batch-invariant", "batch invariance", {"deterministic": True}


def _reasons(served: Capability, row: str, asked: dict[str, Any]) -> list[str]:
    if row == "tree mask":
        return served.speculative_reasons(2, 3)
    plain: dict[str, Any] = {"page_size": min(served.page_sizes or (_PAGE,))}
    if served.head_dims is None:
        return served.reasons_against(AttentionSpec.mla(16, **plain | asked))
    heads: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    if AttentionType.DECODER not in served.attn_types:
        heads["attn_type"] = AttentionType.ENCODER_ONLY
    return served.reasons_against(AttentionSpec(**heads | plain | asked))


_CHAINS = (False, "vLLM's verification is of chains")
_MASKS = (False, "a mask bool [B, 1, S, K] says it")
_NO_OPTION = (False, "transformers has no such option")
_NOT_PASSED = (False, "the adapter passes none")
_E4M3 = (frozenset({FP8}), "of vLLM's caches attnops reads those of e4m3, a scale per tensor")
_AS_MODEL: tuple[Any, str] = (frozenset(), "transformers' caches have the model's dtype")

ADAPTERS = {
    "vllm": (
        Adapter(
            name="ATTNOPS",
            backend="trtllm_mha",
            own={
                "kv_dtypes": _E4M3,
                "tree_mask": _CHAINS,
                "swa_pool": (False, "vLLM's windows are in pages like all others"),
            },
        ),
        Adapter(
            name="ATTNOPS_MLA",
            backend="trtllm_mla",
            mla=True,
            own={
                "kv_dtypes": _E4M3,
                "page_sizes": (None, "`mla_decode` takes every size"),
                "sliding_window": _NOT_PASSED,
                "logit_cap": _NOT_PASSED,
                "sinks": _NOT_PASSED,
                "tree_mask": _CHAINS,
            },
        ),
        Adapter(
            name="ATTNOPS, as mla_prefill_backend",
            backend="fa3",
            own={"attn_types": (frozenset({AttentionType.ENCODER_ONLY}), "keys and values come from no cache")},
            rows=("q", "head dims", "batch-invariant"),
        ),
    ),
    "sglang": (
        Adapter(
            name="attnops",
            backend="fa3",
            own={"kv_dtypes": (frozenset({FP8, FP8_WIDE}), "MHATokenToKVPool has no other")},
        ),
        Adapter(
            name="attnops, of MLA",
            backend="fa3",
            mla=True,
            own={
                "kv_dtypes": (frozenset({FP8}), "MLATokenToKVPool has no other"),
                "sliding_window": _NOT_PASSED,
                "swa_pool": _NOT_PASSED,
            },
        ),
    ),
    "transformers": (
        Adapter(
            name="attnops",
            backend="fa3",
            own={
                "kv_dtypes": _AS_MODEL,
                "tree_mask": _MASKS,
                "swa_pool": (False, "a sliding cache is a cache"),
                "deterministic": _NO_OPTION,
            },
            rows=tuple(row for row in ROWS if row != "page size"),  # its caches have no pages
        ),
        Adapter(
            name="attnops_flash_attention_3, of generate_batch",
            backend="fa3",
            own={
                "kv_dtypes": _AS_MODEL,
                "tree_mask": (False, "the library's wrapper passes none"),
                "swa_pool": (False, "the library keeps windows in pages like all others"),
                "deterministic": _NO_OPTION,
            },
        ),
    ),
}


def find(engine: str, name: str) -> Adapter:
    """An engine's adapter of a name."""
    return next(adapter for adapter in ADAPTERS[engine] if adapter.name == name)
