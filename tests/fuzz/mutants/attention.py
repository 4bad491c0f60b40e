"""Decode, prefill and lists of sparse attention, made wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .registry import Function, for_all, mutant


def _replanned(op: str, given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The call with other lengths or another window, on a plan of its own."""
    given = given | changes
    plan = given["plan"]
    if "window_left" in changes:
        plan = dataclasses.replace(plan, window_left=changes["window_left"])
    plan = dataclasses.replace(
        plan, tile_scheduler_metadata=plan.tile_scheduler_metadata.clone(), num_splits=plan.num_splits.clone()
    )
    plan_op = {"xqa_decode": torch.ops.attnops.xqa_decode_plan, "mla_decode": torch.ops.attnops.mla_decode_plan}[op]
    heads = plan.num_kv_heads if op == "xqa_decode" else plan.num_q_heads
    scratch = (plan.tile_scheduler_metadata, plan.num_splits, given["cache_seqlens"])
    plan_op(*scratch, plan.seqlen_q, heads, plan.window_left, plan.fixed_split_tokens)
    return given | {"plan": plan}


DECODE = ("xqa_decode", "mla_decode")
ATTENTION = (*DECODE, "fmha_paged", "fmha_varlen")


@for_all(DECODE, "the window is one too wide")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    window = given.get("window_left", -1)
    if 0 <= window < 1 << 20:
        given = _replanned(op, given, window_left=window + 1)
    return right(**given)


@for_all(ATTENTION, "sinks are dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"sinks": None})


@for_all(ATTENTION, "lse is shifted by a thousandth")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    result = right(**given)
    if result[1] is not None:
        result[1].add_(1e-3 if op != "mla_decode" else 0.05)
    return result


@mutant("xqa_decode", "lse in powers of two")
def _(right: Function, given: dict[str, Any]) -> Any:
    result = right(**given)
    if result[1] is not None:
        result[1].mul_(1 / math.log(2))
    return result


@for_all(DECODE, "two pages are swapped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    table = given["page_table"]
    if given.get("kv_indptr") is None and table.shape[1] > 1:
        table = table.clone()
        held = (table[:, :2] < 2**30).all(1)
        table[held] = torch.cat([table[held][:, 1:2], table[held][:, :1], table[held][:, 2:]], 1)
    return right(**given | {"page_table": table})


@for_all(("xqa_decode", "fmha_paged", "fmha_varlen"), "the keys' scale is ignored")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"k_scale": None})


@for_all(("xqa_decode", "fmha_paged", "fmha_varlen"), "one scale for all heads")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    scale = given.get("v_scale")
    return right(**given | {"v_scale": None if scale is None else scale[:1].contiguous()})


@mutant("mla_decode", "the latents' scale is ignored")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"kv_scale": None})


@for_all(("sparse_mla_decode", "sparse_mla_prefill"), "sinks are dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"sinks": None})


@for_all(("sparse_mla_decode", "sparse_mla_prefill"), "a negative index is row 0")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"indices": given["indices"].clamp(min=0)})


@for_all(("sparse_mla_decode", "sparse_mla_prefill"), "a row that is there twice counts once")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    rows = given["indices"]
    earlier = torch.ones(rows.shape[-1], rows.shape[-1], dtype=torch.bool, device=rows.device).tril(-1)
    twice = ((rows.unsqueeze(-1) == rows.unsqueeze(-2)) & earlier).any(-1)
    return right(**given | {"indices": rows.masked_fill(twice, -1)})


@mutant("share_lists", "the first token sees no row")
def _(right: Function, given: dict[str, Any]) -> Any:
    shared, masks, lengths = right(**given)
    masks.bitwise_and_(0xFE)
    return shared, masks, lengths


@mutant("sparse_mla_prefill", "lists count to their end")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"topk_length": None})


@mutant("sparse_mla_decode", "the second list's last key is lost")
def _(right: Function, given: dict[str, Any]) -> Any:
    extra = given.get("extra_indices")
    if extra is not None and extra.shape[-1] > 1:
        given = given | {"extra_indices": torch.cat([extra[..., :-1], extra.new_full((*extra.shape[:-1], 1), -1)], -1)}
    return right(**given)


@mutant("mla_decode", "the rope part is ignored")
def _(right: Function, given: dict[str, Any]) -> Any:
    q_pe = given.get("q_pe")
    return right(**given | {"q_pe": None if q_pe is None else torch.zeros_like(q_pe)})


@for_all(DECODE, "the tail behind a request is read")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    pages = given["k_pages"] if op == "xqa_decode" else given["kv_pages"]
    lengths = given["cache_seqlens"]
    longer = lengths + (lengths % pages.shape[1] != 0).int()  # the page has room
    if given["plan"].fixed_split_tokens > 0:
        return right(**given)
    return right(**_replanned(op, given, cache_seqlens=longer))


@for_all(DECODE, "the newest key is not seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**_replanned(op, given, cache_seqlens=(given["cache_seqlens"] - 1).clamp(min=0)))


@for_all(ATTENTION, "a tree mask is taken for the causal rule")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**{name: value for name, value in given.items() if name != "tree_keys"} | {"tree_mask": None})


@for_all(DECODE, "a tree over more keys is taken for one over the new tokens")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**{name: value for name, value in given.items() if name != "tree_keys"})


@for_all(ATTENTION, "tokens see themselves whatever a tree mask says")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    mask = given.get("tree_mask")
    if mask is None or not mask.numel():
        return right(**given)
    mask, seqlen = mask.clone(), given["plan"].seqlen_q if op in DECODE else 0
    rows = mask.view(-1, mask.shape[-1])
    bounds = [] if seqlen else given["cu_seqlens_q"].tolist()
    begins = range(0, len(rows), seqlen) if seqlen else bounds[:-1]
    for begin, end in zip(begins, range(seqlen, len(rows) + 1, seqlen) if seqlen else bounds[1:]):
        for token in range(end - begin):
            rows[begin + token, token // 8] |= 1 << token % 8
    return right(**given | {"tree_mask": mask})


@for_all(ATTENTION, "the soft cap is dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"logit_cap": 0.0})


@for_all(ATTENTION, "a row without keys is not zero")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    out, lse = right(**given | {"return_lse": True})
    out[lse == -math.inf] = math.nan
    return out, lse


@for_all(ATTENTION, "outputs are three percent too large")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    out, lse = right(**given)
    out.mul_(1.03)
    return out, lse


@mutant("xqa_decode", "heads of a group are rolled")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"q": given["q"].roll(1, -2)})


@mutant("xqa_decode", "an element behind the output is written")
def _(right: Function, given: dict[str, Any]) -> Any:
    result = right(**given)
    _write_behind(result[0])
    return result


def _write_behind(view: Tensor) -> None:
    last = view.storage_offset() + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
    if view.numel() and last + 1 < view.untyped_storage().nbytes() // view.element_size():
        view.as_strided((1,), (1,), last + 1).fill_(0)


@mutant("xqa_decode", "a semaphore is left behind")
def _(right: Function, given: dict[str, Any]) -> Any:
    result = right(**given)
    given["plan"].semaphores[:1] = 1
    return result


@mutant("xqa_decode", "a bad page is taken for page 0 in silence")
def _(right: Function, given: dict[str, Any]) -> Any:
    table, pages = given["page_table"], given["k_pages"].shape[0]
    return right(**given | {"page_table": torch.where((table < 0) | (table >= pages), 0, table)})


@for_all(("fmha_paged", "fmha_varlen"), "the window on the right is one too wide")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    window = given.get("window_right", -1)
    return right(**given | {"window_right": window + (window >= 0)})


@mutant("xqa_decode", "pages of e5m2 are read as e4m3")
def _(right: Function, given: dict[str, Any]) -> Any:
    if given["k_pages"].dtype == torch.float8_e5m2:
        given |= {name: given[name].view(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return right(**given)


@for_all(("fmha_paged", "fmha_varlen"), "hidden keys are seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"hidden_keys": None})


@for_all(("fmha_paged", "fmha_varlen"), "one hidden key is seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    hidden = given.get("hidden_keys")
    if hidden is not None:
        hidden = torch.stack([torch.minimum(hidden[:, 0] + 1, hidden[:, 1]), hidden[:, 1]], 1)
    return right(**given | {"hidden_keys": hidden})
