"""Right calls with one argument made wrong: each is an error that names function and argument, before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .draw import NO_KERNEL, Draw, Failure, Refused, Void
from .memory import bytes_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from right_calls import PLANS, moved, ops_calls

# Dimensions that nothing else binds: another extent makes another right call. (function, argument): dimensions.
FREE = {
    ("xqa_decode", "page_table"): {1},
    ("xqa_decode_chunks", "chunks"): {1},  # room for any number of chunks
    ("mla_decode", "page_table"): {1},
    ("sparse_mla_decode", "kv_pages"): {0, 1},
    ("sparse_mla_decode", "extra_kv_pages"): {0, 1},
    ("sparse_mla_prefill", "kv"): {0, 1},
    ("sparse_mla_prefill", "indices"): {1},
    ("sparse_mla_prefill", "extra_kv"): {0, 1},
    ("sparse_mla_prefill", "extra_indices"): {1},
    ("fmha_paged", "page_table"): {1},
    ("fp4_decode", "page_table"): {1},
    ("fp4_decode", "q"): {1},
    ("mla_decode", "kv_pages"): {0, 1},
    ("store_mla_kv", "kv_pages"): {0, 1},
    ("build_page_table", "req_to_token"): {0, 1},
    ("build_kv_indices", "req_to_token"): {0, 1},
    ("build_cu_seqlens", "seqlens"): {0},
    ("translate_slots", "slots"): {0},
    ("translate_slots", "slot_map"): {0},
    ("fmha_paged", "q"): {0},  # more rows are padding
    ("fmha_varlen", "q"): {0},
    ("merge_states", "outs"): {3},
    ("build_local_batches", "page_table"): {1},
    ("build_block_tables", "page_table"): {1},
    ("build_block_tables", "block_list"): {2},
    ("build_block_tables", "block_tables"): {2},
    ("label_scores", "page_table"): {1},
    ("label_scores", "label_pages"): {0, 1},
    ("label_scores", "scores"): {2},
    ("build_draft_tree", "parent_list"): {1},
    ("delta_decode", "states"): {0},
    ("ssd_decode", "states"): {0},
    ("delta_prefill", "states"): {0},
    ("ssd_prefill", "states"): {0},
    ("delta_prefill", "checkpoint_slots"): {1},
    ("ssd_prefill", "checkpoint_slots"): {1},
    ("delta_commit", "accepted_path"): {1},
    ("ssd_commit", "accepted_path"): {1},
    ("delta_commit", "ring_k"): {1},  # groups: any divisor of the heads
    ("ssd_commit", "ring_k"): {1},
    ("ssd_verify", "state_indices"): {0},  # fewer requests, each with more drafts
    ("delta_plan", "cu_seqlens"): {0},
    ("ssd_plan", "cu_seqlens"): {0},
    ("causal_conv1d", "x"): {0},  # more rows are padding
    ("causal_conv1d", "conv_states"): {0},
    ("causal_conv1d_update", "conv_states"): {0},
    ("copy_states", "states"): {0, 1, 2},
    ("clear_states", "states"): {0, 1, 2},
    ("clear_states", "slots"): {0},
    ("pack_tree_mask", "mask"): {0},  # the device alone knows where a request's mask ends
    ("move_kv", "accept_index"): {1},
    ("move_kv", "out_cache_loc"): {0},  # any number of tokens for each request, 0 too
    ("move_kv", "req_to_token"): {0, 1},
    ("copy_page_tail", "req_to_token"): {0, 1},
    ("generate_draft_decode_kv_indices", "req_to_token"): {0, 1},
    ("verify_tree_sampling", "target_probs"): {2},
    ("context_parallel_seqlens", "seqlens"): {0},
    ("topk_select", "logits"): {1},  # the device alone knows whether a row fits
    ("topk_select", "page_table"): {0, 1},
    ("store_index_k", "index_pages"): {0, 1},
    ("gather_index_k", "page_table"): {1},
    ("gather_index_k", "index_pages"): {0, 1},
    ("index_logits_paged", "index_pages"): {0, 1},
    ("index_logits_paged", "page_table"): {1},
    ("index_logits_paged", "logits"): {1},
    ("index_logits", "logits"): {1},
    ("index_topk", "index_pages"): {0, 1},
    ("index_topk", "page_table"): {1},
    ("index_topk", "scratch"): {0, 1},
    ("context_parallel_slots", "slots"): {0},
    ("compress_kv", "kv_pages"): {0, 1},
    ("compress_kv", "state"): {0, 1},  # more tokens than an entry pools are room for drafts
    ("compress_kv", "kv_score"): {0},  # more rows are padding
    ("compress_kv", "cos_sin"): {0},
    ("compress_kv", "page_table"): {1},
}
WRONG_DTYPES = [torch.float64, torch.int16, torch.bool, torch.complex64, torch.int8]
# Arguments that have one of these dtypes, too.
ANY_DTYPE = {("pack_tree_mask", "mask"): {torch.bool}}
# Pools of slots that have any inner shape: a dimension more makes another right call.
ANY_RANK = {("copy_states", "states"), ("clear_states", "states")}
# Arguments that may have any stride.
ANY_STRIDE = {"out_cache_loc", "req_pool_indices", "slots", "slot_map", "bonus_tokens", "target_predict", "mask_indptr"}
ANY_STRIDE |= {"a", "b", "dt", "conv_states", "windows", "block_seqlens"}
NUMBERS = {
    "softmax_scale": [math.nan, math.inf, -math.inf],
    "logit_cap": [-1.0, math.nan, math.inf],
    "window_left": [-2, 2**31, -(2**40)],
    "page_size": [0, -1, 2**31],
    "topk": [0, -1, 2**31],
    "draft_steps": [0, -1, 2**31],
    "num_steps": [-1, 2**31],
    "num_tokens": [0, -1, 2**31],
    "path_length": [0, -1, 2**31],
    "tokens_per_request": [0, -1, 2**31],
    "together": [0, -1, 9],
    "threshold_acc": [0.0, 1.5, math.nan],
}
LEGAL = {("expand_rows", "topk"): {0}}  # numbers that a function takes all the same


def _another_rank(draw: Draw, value: Tensor, any_rank: bool) -> Tensor:
    """One dimension more, in front (a second one may be that of a request's tokens), or none at all."""
    return value.unsqueeze(0) if draw.chance(0.5) and not any_rank else value.flatten()[0]


def _another_dtype(draw: Draw, value: Tensor) -> Tensor:
    wrong = draw.pick(WRONG_DTYPES)
    return torch.zeros(value.shape, dtype=wrong, device=value.device)


def _another_device(draw: Draw, value: Tensor) -> Tensor:
    if value.device.type != "cpu" and draw.chance(0.5):
        return value.cpu()
    return value.to("meta")


def _another_stride(draw: Draw, value: Tensor) -> Tensor:
    """The same shape, the last dimension not dense."""
    twice = torch.stack([bytes_of(value), bytes_of(value)], -1)[..., 0]
    return twice if value.element_size() > 1 or bytes_of(value) is value else twice.view(value.dtype)


def _another_extent(draw: Draw, value: Tensor, free: set[int]) -> Tensor | None:
    axes = [axis for axis in range(value.dim()) if axis not in free]
    if not axes:
        return None
    axis = draw.pick(axes)
    return of_extent(value, axis, value.shape[axis] + draw.pick([-1, 1, 1, 7, -value.shape[axis]]))


def of_extent(value: Tensor, axis: int, extent: int) -> Tensor | None:
    """Zeros of `value`'s shape but for one extent; none where that is no other."""
    shape = list(value.shape)
    shape[axis] = max(extent, 0)
    if shape == list(value.shape):
        return None
    wider = bytes_of(torch.zeros(shape, dtype=torch.uint8, device=value.device))
    return (
        wider.to(value.dtype)
        if value.dtype.is_floating_point and value.element_size() > 1
        else torch.zeros(shape, dtype=bytes_of(value).dtype, device=value.device).view(value.dtype)
    )


def _spoil(draw: Draw, name: str, argument: str, value: Tensor, in_plan: bool) -> tuple[str, Tensor | None]:
    """(what was done, the wrong tensor or None where there is none of the kind)."""
    kind = draw.pick(["rank", "dtype", "device", "stride", "extent", "extent"])
    if kind == "rank":
        return kind, _another_rank(draw, value, (name, argument) in ANY_RANK)
    if kind == "dtype":
        wrong = _another_dtype(draw, value)
        return kind, None if wrong.dtype in ANY_DTYPE.get((name, argument), ()) else wrong
    if kind == "device":
        return kind, _another_device(draw, value)
    if kind == "stride":
        small = value.dim() == 0 or value.shape[-1] < 2 or 0 in value.shape
        return kind, None if argument in ANY_STRIDE or small else _another_stride(draw, value)
    free = FREE.get((name, argument), set())
    if in_plan:  # scratch may be larger, and fewer parts are another plan
        return kind, None
    return kind, _another_extent(draw, value, free)


def _only_tensor(given: dict[str, Any], argument: str) -> bool:
    return sum(isinstance(value, (Tensor, *PLANS)) for value in given.values()) == 1


def wrong_argument(draw: Draw) -> None:
    """One call of `attnops.ops` with one wrong argument."""
    torch.manual_seed(draw.number(0, 1 << 30))
    calls = ops_calls()
    name = draw.pick(sorted(calls))
    function, given = calls[name]
    given = {key: moved(value, draw.device) for key, value in given.items()}
    numbers = [key for key in inspect.signature(function).parameters if key in NUMBERS]
    before = {key: value.clone() for key, value in given.items() if isinstance(value, Tensor)}
    draw.note(function=name)
    if numbers and draw.chance(0.2):
        argument = draw.pick(numbers)
        kind, given[argument] = "number", draw.pick(NUMBERS[argument])
        if given[argument] in LEGAL.get((name, argument), ()):
            raise Void
        draw.note(argument=argument, value=given[argument])
    else:
        argument, kind = _spoil_one(draw, name, given)
        if not argument:
            raise Void
    draw.saw(f"wrong {kind}", f"wrong argument of {name}")
    expect_error(name, function, given, argument)
    for key, value in before.items():
        if key in given and key != argument and not _same(given[key], value):
            raise Failure(f"{key} was written by a call that failed")


def _same(now: Tensor, before: Tensor) -> bool:
    a, b = bytes_of(now), bytes_of(before)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _spoil_one(draw: Draw, name: str, given: dict[str, Any]) -> tuple[str, str]:
    """(argument, kind) of what was made wrong in `given`; nothing where the draw has no wrong tensor."""
    argument = draw.pick([key for key, value in given.items() if isinstance(value, (Tensor, *PLANS))])
    value = given[argument]
    if isinstance(value, Tensor):
        kind, wrong = _spoil(draw, name, argument, value, False)
        if wrong is None or (kind == "device" and _only_tensor(given, argument)):
            return "", ""
        draw.note(argument=argument, kind=kind, shape=list(wrong.shape), dtype=wrong.dtype)
        given[argument] = wrong
        return argument, kind
    field = draw.pick([key for key, part in vars(value).items() if isinstance(part, Tensor)])
    kind, wrong = _spoil(draw, name, field, getattr(value, field), True)
    unused = name.endswith("_plan") and field not in ("tile_scheduler_metadata", "num_splits", "tile_order")
    if wrong is None or unused:
        return "", ""
    draw.note(argument=f"plan.{field}", kind=kind, shape=list(wrong.shape), dtype=wrong.dtype)
    given[argument] = dataclasses.replace(value, **{field: wrong})
    return argument, kind


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def expect_error(name: str, function: Callable[..., Any], given: dict[str, Any], argument: str) -> None:
    try:
        function(**given)
    except (RuntimeError, ValueError, TypeError) as error:
        text = str(error)
    else:
        raise Failure(f"{name} accepts a wrong {argument}")
    if NO_KERNEL[-1] in text and any(_is_on_gpu(value) for value in given.values()):
        raise Refused(text.split("\n")[0][:120])
    plan = given.get("plan")
    names = {*given, *inspect.signature(function).parameters, *([] if plan is None else vars(plan))}
    if f"attnops::{name}" not in text or not any(re.search(rf"\b{key}\b", text) for key in names):
        raise Failure(f"{name}: the error for a wrong {argument} does not name function and argument: {text[:200]}")
