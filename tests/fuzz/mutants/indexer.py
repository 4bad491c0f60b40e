"""Pages of four bits, selection, the indexer and compressed entries, made wrong."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Function, for_all, mutant


@mutant("fp4_decode", "sinks are dropped")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"sinks": None})


@mutant("fp4_decode", "the window is one too wide")
def _(right: Function, given: dict[str, Any]) -> Any:
    window = given.get("window_left", -1)
    return right(**given | {"window_left": window + 1 if 0 <= window < 1 << 20 else window})


@mutant("store_kv_fp4", "slots below 0 are stored")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"out_cache_loc": given["out_cache_loc"].clamp(min=0)})


@mutant("store_kv_fp4", "the scale of V is left out")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"v_scale": None})


@mutant("topk_select", "of equal keys the last are taken")
def _(right: Function, given: dict[str, Any]) -> Any:
    logits = given["logits"]
    rising = torch.arange(logits.shape[1], device=logits.device) * 2**-20
    return right(**given | {"logits": logits.float() + rising})


@mutant("topk_select", "-0 is below 0")
def _(right: Function, given: dict[str, Any]) -> Any:
    logits = given["logits"]
    return right(**given | {"logits": torch.where((logits == 0) & logits.signbit(), -1e-30, logits).to(logits.dtype)})


@mutant("topk_select", "NaN comes first")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"logits": given["logits"].nan_to_num(nan=float("inf"), posinf=None, neginf=None)})


@mutant("topk_select", "a key behind the row counts")
def _(right: Function, given: dict[str, Any]) -> Any:
    lengths, columns = given["lengths"], given["logits"].shape[1]
    ends = lengths if given.get("row_starts") is None else lengths + given["row_starts"]
    return right(**given | {"lengths": torch.where((lengths > 0) & (ends < columns), lengths + 1, lengths)})


@mutant("topk_select", "a bad length is cut in silence")
def _(right: Function, given: dict[str, Any]) -> Any:
    columns = given["logits"].shape[1]
    starts = 0 if given.get("row_starts") is None else given["row_starts"].clamp(0, columns)
    return right(**given | {"lengths": torch.minimum(given["lengths"], torch.as_tensor(columns - starts).int())})


@mutant("store_index_k", "scales are powers of two unasked")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"ue8m0": True})


@mutant("quantize_index_q", "queries are not rotated")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"hadamard": False})


@mutant("gather_index_k", "the last key of a batch is lost")
def _(right: Function, given: dict[str, Any]) -> Any:
    bounds = given["cu_seqlens_k"].clone()
    bounds[-1:] = (bounds[-1:] - 1).clamp(min=0)
    return right(**given | {"cu_seqlens_k": torch.minimum(bounds, bounds[-1:])})


@for_all(("index_logits", "index_logits_paged"), "negative products count")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    logits = right(**given)
    twin = right(**given | {"q": (-given["q"].float()).to(given["q"].dtype), "logits": logits.clone()})
    logits.sub_(twin)
    return logits


@for_all(("index_logits", "index_logits_paged"), "a head's weight is dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    weights = given["weights"].clone()
    weights[:, -1:] = 0
    return right(**given | {"weights": weights})


@mutant("index_topk", "rows of a later turn keep what was there")
def _(right: Function, given: dict[str, Any]) -> Any:
    indices = right(**given)
    scratch = given.get("scratch")
    indices[0 if scratch is None or scratch.dim() == 1 else len(scratch) :] = -1
    return indices


@mutant("compress_plan", "an entry comes a token late")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"cache_seqlens": (given["cache_seqlens"] - 1).clamp(min=0)})


@mutant("compress_kv", "places in a group weigh alike")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"ape": torch.zeros_like(given["ape"])})


@mutant("expand_rows", "a token does not see itself")
def _(right: Function, given: dict[str, Any]) -> Any:
    out = right(**given)
    out[0].sub_(1).clamp_(min=0)
    return out
