"""Stores, tables, merges, drafts and linear attention, made wrong."""

from __future__ import annotations

import math
from typing import Any

import torch

from .registry import Function, for_all, mutant


@mutant("store_kv", "rows are multiplied by their scale")
def _(right: Function, given: dict[str, Any]) -> Any:
    scale = given.get("k_scale")
    return right(**given | {"k_scale": None if scale is None else 1 / scale})


@mutant("store_kv", "padding goes to slot 0")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"out_cache_loc": given["out_cache_loc"].clamp(min=0)})


@mutant("store_mla_kv", "the last row is lost")
def _(right: Function, given: dict[str, Any]) -> Any:
    loc = given["out_cache_loc"].clone()
    loc[-1:] = -1
    return right(**given | {"out_cache_loc": loc})


@mutant("build_page_table", "the window's map is ignored")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"slot_map": None})


@mutant("build_kv_indices", "a full last page counts as empty")
def _(right: Function, given: dict[str, Any]) -> Any:
    result = right(**given)
    result[2].remainder_(given["page_size"])
    return result


@mutant("merge_state", "states weigh the same")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"lse_b": torch.where(given["lse_b"] == -math.inf, given["lse_b"], given["lse_a"])})


@mutant("build_draft_tree", "a token is hidden from itself")
def _(right: Function, given: dict[str, Any]) -> Any:
    tree = right(**given)
    tree.tree_mask[:, -1:, -1:] &= 127 if tree.tree_mask.shape[1] % 8 == 0 else 255 >> (9 - tree.tree_mask.shape[1] % 8)
    return tree


@mutant("verify_tree_greedy", "the last accepted draft is lost")
def _(right: Function, given: dict[str, Any]) -> Any:
    out = right(**given)
    out.accept_token_num.sub_(1).clamp_(min=0)
    return out


@mutant("move_kv", "the second accepted token stays")
def _(right: Function, given: dict[str, Any]) -> Any:
    accepted = given["accept_index"].clone()
    accepted[:, 1:2] = -1
    return right(**given | {"accept_index": accepted})


@mutant("delta_decode", "beta is forgotten")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"b": torch.full_like(given["b"], 30.0 if given.get("A_log") is not None else 1.0)})


@mutant("delta_decode", "padding has the first state")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"state_indices": given["state_indices"].clamp(min=0)})


@mutant("ssd_decode", "the skip is lost")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"D": None})


@mutant("delta_prefill", "a request without a prefix has its slot's state")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"prefix_lens": given["prefix_lens"].clamp(min=64)})


@mutant("ssd_prefill", "no state is kept on the way")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"checkpoint_slots": None})


@for_all(("delta_prefill", "ssd_prefill"), "a cut prompt begins at zero")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    first = given["prefix_lens"] * (0 if given.get("cut_prompts") else 1)
    return right(**given | {"prefix_lens": first})


@mutant("delta_verify", "a tree is a chain")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"tree_mask": None})


@mutant("ssd_commit", "one draft more is kept")
def _(right: Function, given: dict[str, Any]) -> Any:
    path, length = given["accepted_path"], given["accepted_len"]
    return right(**given | {"accepted_len": (length + 1).clamp(max=path.shape[1])})


@mutant("causal_conv1d", "every request begins with its state")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"has_initial_state": None})


@mutant("copy_states", "the first layer alone is copied")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"states": given["states"][:1]})
