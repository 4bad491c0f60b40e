"""Ops made wrong on purpose: what the fuzzer must find. Each takes the right function and gives a wrong one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attnops import ops
from torch import Tensor

Function = Callable[..., Any]
MUTANTS: dict[str, tuple[str, Callable[[Function], Function]]] = {}


def mutant(op: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``wrong(right, given)``, called in place of `op` with its arguments by name."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def make(right: Function) -> Function:
            names = list(right.__wrapped__.__code__.co_varnames if hasattr(right, "__wrapped__") else ())
            names = names or list(right.__code__.co_varnames)

            @functools.wraps(right)
            def call(*args: Any, **options: Any) -> Any:
                return wrong(right, dict(zip(names, args)) | options)

            return call

        MUTANTS[f"{op}: {name}"] = (op, make)
        return wrong

    return register


# Families of cases that call an op. The rest of a run does not notice its mutants.
CALLERS = {
    "xqa_decode": {"xqa_decode", "hostile decode", "wrong argument"},
    "mla_decode": {"mla_decode", "hostile decode", "wrong argument"},
    "sparse_mla_decode": {"sparse decode", "wrong argument"},
    "sparse_mla_prefill": {"sparse prefill", "hostile lists"},
    "fmha_paged": {"fmha"},
    "fmha_varlen": {"fmha"},
    "store_kv": {"store_kv", "hostile tables"},
    "store_mla_kv": {"store_mla_kv", "hostile tables"},
    "build_page_table": {"page tables", "hostile tables"},
    "build_kv_indices": {"page tables", "hostile tables"},
    "merge_state": {"merge"},
    "build_draft_tree": {"draft trees"},
    "verify_tree_greedy": {"draft trees"},
    "move_kv": {"draft slots"},
    "delta_decode": {"linear steps", "hostile states"},
    "ssd_decode": {"linear steps"},
    "delta_prefill": {"linear prompts"},
    "ssd_prefill": {"linear prompts"},
    "delta_verify": {"linear drafts"},
    "ssd_commit": {"linear drafts"},
    "causal_conv1d": {"convolutions"},
    "copy_states": {"states"},
    "fp4_decode": {"four bits"},
    "store_kv_fp4": {"stores of four bits"},
    "topk_select": {"selection", "hostile rows"},
    "store_index_k": {"index keys"},
    "quantize_index_q": {"index keys"},
    "gather_index_k": {"index keys", "hostile index keys"},
    "index_logits": {"index logits"},
    "index_logits_paged": {"index logits", "hostile index keys"},
    "index_topk": {"index logits"},
    "expand_rows": {"index logits"},
    "compress_plan": {"compressed entries"},
    "compress_kv": {"compressed entries"},
}


def callers_of(name: str) -> set[str]:
    return CALLERS[MUTANTS[name][0]]


@contextlib.contextmanager
def living(name: str) -> Iterator[None]:
    """A mutant in place of its op."""
    op, make = MUTANTS[name]
    right = getattr(ops, op)
    setattr(ops, op, make(right))
    try:
        yield
    finally:
        setattr(ops, op, right)


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


def _for_all(ops_: tuple[str, ...], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops_:
            mutant(op, name)(functools.partial(wrong, op))
        return wrong

    return register


DECODE = ("xqa_decode", "mla_decode")
ATTENTION = (*DECODE, "fmha_paged", "fmha_varlen")


@_for_all(DECODE, "the window is one too wide")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    window = given.get("window_left", -1)
    if 0 <= window < 1 << 20:
        given = _replanned(op, given, window_left=window + 1)
    return right(**given)


@_for_all(ATTENTION, "sinks are dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"sinks": None})


@_for_all(ATTENTION, "lse is shifted by a thousandth")
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


@_for_all(DECODE, "two pages are swapped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    table = given["page_table"]
    if given.get("kv_indptr") is None and table.shape[1] > 1:
        table = table.clone()
        held = (table[:, :2] < 2**30).all(1)
        table[held] = torch.cat([table[held][:, 1:2], table[held][:, :1], table[held][:, 2:]], 1)
    return right(**given | {"page_table": table})


@_for_all(("xqa_decode", "fmha_paged", "fmha_varlen"), "the keys' scale is ignored")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"k_scale": None})


@_for_all(("xqa_decode", "fmha_paged", "fmha_varlen"), "one scale for all heads")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    scale = given.get("v_scale")
    return right(**given | {"v_scale": None if scale is None else scale[:1].contiguous()})


@mutant("mla_decode", "the latents' scale is ignored")
def _(right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"kv_scale": None})


@_for_all(("sparse_mla_decode", "sparse_mla_prefill"), "sinks are dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"sinks": None})


@_for_all(("sparse_mla_decode", "sparse_mla_prefill"), "a negative index is row 0")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"indices": given["indices"].clamp(min=0)})


@_for_all(("sparse_mla_decode", "sparse_mla_prefill"), "a row that is there twice counts once")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    rows = given["indices"]
    earlier = torch.ones(rows.shape[-1], rows.shape[-1], dtype=torch.bool, device=rows.device).tril(-1)
    twice = ((rows.unsqueeze(-1) == rows.unsqueeze(-2)) & earlier).any(-1)
    return right(**given | {"indices": rows.masked_fill(twice, -1)})


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


@_for_all(DECODE, "the tail behind a request is read")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    pages = given["k_pages"] if op == "xqa_decode" else given["kv_pages"]
    lengths = given["cache_seqlens"]
    longer = lengths + (lengths % pages.shape[1] != 0).int()  # the page has room
    if given["plan"].fixed_split_tokens > 0:
        return right(**given)
    return right(**_replanned(op, given, cache_seqlens=longer))


@_for_all(DECODE, "the newest key is not seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**_replanned(op, given, cache_seqlens=(given["cache_seqlens"] - 1).clamp(min=0)))


@_for_all(ATTENTION, "a tree mask is taken for the causal rule")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**{name: value for name, value in given.items() if name != "tree_keys"} | {"tree_mask": None})


@_for_all(DECODE, "a tree over more keys is taken for one over the new tokens")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**{name: value for name, value in given.items() if name != "tree_keys"})


@_for_all(ATTENTION, "tokens see themselves whatever a tree mask says")
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


@_for_all(ATTENTION, "the soft cap is dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"logit_cap": 0.0})


@_for_all(ATTENTION, "a row without keys is not zero")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    out, lse = right(**given | {"return_lse": True})
    out[lse == -math.inf] = math.nan
    return out, lse


@_for_all(ATTENTION, "outputs are three percent too large")
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


@_for_all(("fmha_paged", "fmha_varlen"), "the window on the right is one too wide")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    window = given.get("window_right", -1)
    return right(**given | {"window_right": window + (window >= 0)})


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


@mutant("xqa_decode", "pages of e5m2 are read as e4m3")
def _(right: Function, given: dict[str, Any]) -> Any:
    if given["k_pages"].dtype == torch.float8_e5m2:
        given |= {name: given[name].view(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return right(**given)


@_for_all(("fmha_paged", "fmha_varlen"), "hidden keys are seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    return right(**given | {"hidden_keys": None})


@_for_all(("fmha_paged", "fmha_varlen"), "one hidden key is seen")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    hidden = given.get("hidden_keys")
    if hidden is not None:
        hidden = torch.stack([torch.minimum(hidden[:, 0] + 1, hidden[:, 1]), hidden[:, 1]], 1)
    return right(**given | {"hidden_keys": hidden})


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


@_for_all(("index_logits", "index_logits_paged"), "negative products count")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    logits = right(**given)
    twin = right(**given | {"q": (-given["q"].float()).to(given["q"].dtype), "logits": logits.clone()})
    logits.sub_(twin)
    return logits


@_for_all(("index_logits", "index_logits_paged"), "a head's weight is dropped")
def _(op: str, right: Function, given: dict[str, Any]) -> Any:
    weights = given["weights"].clone()
    weights[:, -1:] = 0
    return right(**given | {"weights": weights})


@mutant("index_topk", "rows of a later turn keep what was there")
def _(right: Function, given: dict[str, Any]) -> Any:
    indices = right(**given)
    scratch = given.get("scratch")
    indices[0 if scratch is None else len(scratch) :] = -1
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
