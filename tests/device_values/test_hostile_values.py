"""No value in a tensor ends the process: every integer tensor of every op gets values that nobody meant, on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from mla_calls import plan_for
from problems import mla_problem, paged_problem
from right_calls import ops_calls
from torch import Tensor
from xqa_decoding import make_plan

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
HOSTILE = [-1, -7, INT_MIN, INT_MAX, INT_MAX - 5, 10**6, 1 << 30, 100]
LENGTHS = [40, 20, 7]
CHECKED = [False, True]

Call = tuple[Callable[..., Any], dict[str, Any]]


def csr(call: Call, problem: Any) -> Call:
    function, arguments = call
    indices = torch.where(problem.kv_indices < problem.num_pages, problem.kv_indices, 0)
    return function, {**arguments, "page_table": indices, "kv_indptr": problem.kv_indptr}


@dataclasses.dataclass
class Paged:
    """A problem, and how many pages its pools have."""

    kv_indices: Tensor
    kv_indptr: Tensor
    num_pages: int


def calls() -> dict[str, Call]:
    """Right calls of every op, new tensors every time; the paged ones in both forms, and with windows and trees."""
    every = ops_calls()
    gqa, mla = paged_problem(LENGTHS), mla_problem(LENGTHS, num_q_heads=5)
    gqa_table = Paged(gqa.kv_indices, gqa.kv_indptr, gqa.k_pages.shape[0])
    for name in ("xqa_decode", "fmha_paged"):
        every[f"{name}, csr"] = csr(every[name], gqa_table)
    every["mla_decode, csr"] = csr(every["mla_decode"], Paged(mla.kv_indices, mla.kv_indptr, mla.kv_pages.shape[0]))
    for op, problem, make in (("xqa_decode", gqa, make_plan), ("mla_decode", mla, plan_for)):
        function, arguments = every[op]
        for label, options in (("cuts", {"fixed": 64}), ("a window", {"window_left": 9})):
            if op == "xqa_decode" and "fixed" in options:
                options = {"fixed_split_tokens": 64, "max_seqlen_k": 64}
            plan = make(problem, **options)
            window = {name: value for name, value in options.items() if name == "window_left"}
            every[f"{op}, {label}"] = (function, {**arguments, "plan": plan, **window})
    function, arguments = every["fmha_paged"]
    plan = FmhaPlan.allocate(3, 3, window_left=9)
    ops.fmha_plan(plan, arguments["cu_seqlens_q"], cache_seqlens=arguments["cache_seqlens"])
    every["fmha_paged, a window"] = (function, {**arguments, "plan": plan, "window_left": 9})
    for name in ("build_page_table", "build_kv_indices"):
        function, arguments = every[name]
        every[f"{name}, a window"] = (function, {**arguments, "slot_map": torch.arange(64, dtype=torch.int32)})
    return every


NAMES = list(calls())


def integers(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The integer tensors of a call, those of its plan, too."""
    for name, value in arguments.items():
        if dataclasses.is_dataclass(value):
            yield from integers({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64, torch.uint8):
            yield name, value


@pytest.mark.parametrize("checked", CHECKED, ids=["", "checked"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_integer_is_an_error_that_names_the_op_or_nothing(name, checked):
    """Without a report; with one, kernels record, and what they leave out is left out."""
    op = name.split(",")[0]
    function, given = calls()[name]
    arguments = [tensor for tensor, _ in integers(given)]
    if checked and "report" not in inspect.signature(function).parameters:
        pytest.skip("takes no report")
    for index, argument in enumerate(arguments):
        for value in HOSTILE:
            for where in ("first", "last", "all"):
                function, given = calls()[name]
                tensor = list(integers(given))[index][1].view(-1)
                if tensor.numel() == 0:
                    continue
                chosen = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[where]
                tensor[chosen] = value % 256 if tensor.dtype == torch.uint8 else value
                if checked:
                    given["report"] = torch.zeros(8, dtype=torch.int32)
                try:
                    function(**given)
                except (RuntimeError, ValueError) as error:
                    assert f"attnops::{op}" in str(error), (argument, value, where, error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0, 3e38])
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_float_ends_nothing(name, value):
    function, given = calls()[name]
    floats = [v for v in given.values() if isinstance(v, Tensor) and v.dtype.is_floating_point]
    for tensor in floats:
        tensor.view(-1)[::7] = value
    try:
        function(**given)
    except RuntimeError as error:  # a probability that is none is an error on the CPU, with its place
        assert name == "verify_tree_sampling" and "must be a finite number of at least 0" in str(error)


def spoiled(name: str, argument: str, index: Any, value: int, **changes: Any) -> Call:
    function, given = calls()[name]
    dict(integers(given))[argument][index] = value
    return function, {**given, **changes}


NAMED = [
    # op, argument, where, value, message
    ("build_page_table", "req_pool_indices", 1, 10**6, "req_pool_indices[1] must be in [0, 5) (max_requests of req_to"),
    (
        "build_kv_indices",
        "req_pool_indices",
        2,
        -1,
        "req_pool_indices[2] must be in [0, 5) (max_requests of req_to_tok",
    ),
    (
        "build_page_table",
        "req_to_token",
        (1, 16),
        -3,
        "req_to_token, request 1, position 16 must be in [0, 2147483647)",
    ),
    (
        "build_kv_indices, a window",
        "req_to_token",
        (0, 31),
        64,
        "req_to_token, request 0, position 31 must be in [0, 64)",
    ),
    ("fmha_paged", "page_table", (0, 1), 10**6, "page_table, request 0, page 1 must be in [0, "),
    ("fmha_paged", "page_table", (0, 1), -1, "page_table, request 0, page 1 must be in [0, "),
    ("fmha_paged", "cache_seqlens", 1, 10**6, r"cache_seqlens[1] must be below "),
    ("fmha_paged, csr", "kv_indptr", 2, INT_MAX, r"cache_seqlens[2] must be below 1 (the tokens that"),
    ("fmha_paged", "cu_seqlens_q", 1, -5, "cu_seqlens_q[1] must be in [0, 3], got -5"),
    ("fmha_paged", "cu_seqlens_q", 1, 9, "cu_seqlens_q[1] must be in [0, 3], got 9"),
    ("fmha_plan", "cu_seqlens_q", 1, -5, "cu_seqlens_q[1] must be in [0, 2147483647], got -5"),
    ("fmha_plan", "cu_seqlens_q", 1, INT_MAX, "cu_seqlens_q[2] must be in [2147483647, 2147483647], got 12"),
    ("mla_decode", "page_table", (0, 0), 10**6, "page_table, request 0, page 0 must be in [0, "),
    ("mla_decode", "page_table", (1, 0), INT_MIN, "page_table, request 1, page 0 must be in [0, "),
    ("mla_decode", "cache_seqlens", 2, 10**6, "cache_seqlens[2] must be below "),
    ("mla_decode, csr", "kv_indptr", 1, INT_MIN, "cache_seqlens[0] must be below 1 (the tokens"),
    ("xqa_decode, csr", "kv_indptr", 0, -9, "cache_seqlens[0] must be below 1 (the tokens"),
    ("mla_decode", "tile_scheduler_metadata", (0, 0), INT_MAX, "tile_scheduler_metadata is not the plan of these"),
    ("mla_decode", "num_splits", 1, 10**6, "tile_scheduler_metadata is not the plan of these"),
    ("xqa_decode", "num_splits", 1, 10**6, "tile_scheduler_metadata and num_splits are not the plan of these"),
]


@pytest.mark.parametrize("name, argument, index, value, message", NAMED)
def test_what_is_out_of_range_is_named(name, argument, index, value, message):
    function, given = spoiled(name, argument, index, value)
    with pytest.raises((RuntimeError, ValueError), match=re.escape(f"attnops::{name.split(',')[0]}: {message}")):
        function(**given)


def test_a_tile_that_is_planned_twice_is_an_error():
    """As many tiles as the batch has, but one of them twice: its twin's rows would stay what they were."""
    function, given = calls()["fmha_varlen"]
    order = given["plan"].tile_order
    order[0] = order[1]
    with pytest.raises(RuntimeError, match=r"tile_order is not the plan of these cu_seqlens_q .* 1 tiles, expected 2"):
        function(**given)


@pytest.mark.parametrize("name", ["build_page_table", "build_kv_indices"])
def test_a_length_above_the_table_is_clamped(name):
    """docs/architecture.md: served as far as the row goes; and a negative one counts as 0."""
    function, given = spoiled(name, "cache_seqlens", 1, INT_MAX)
    longest = given["req_to_token"].shape[1]
    got = function(**given)
    given["cache_seqlens"][1] = longest
    for one, other in zip(_tensors(got), _tensors(function(**given)), strict=True):
        assert torch.equal(one, other)
    given["cache_seqlens"][1] = INT_MIN
    got = function(**given)
    given["cache_seqlens"][1] = 0
    for one, other in zip(_tensors(got), _tensors(function(**given)), strict=True):
        assert torch.equal(one[:1], other[:1])


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("checked", CHECKED)
@pytest.mark.parametrize("op", ["xqa_decode", "mla_decode"])
def test_a_plan_for_nonsense_is_made_and_refused(op, checked):
    """Lengths that no table holds: the planner must not overflow, and no call walks over their tiles."""
    problem = paged_problem(LENGTHS) if op == "xqa_decode" else mla_problem(LENGTHS, num_q_heads=5)
    for lengths in ([INT_MAX] * 3, [INT_MIN] * 3, [INT_MAX, INT_MIN, -1]):
        for fixed in (0, 64):
            options = {"fixed_split_tokens": fixed, "max_seqlen_k": 64} if op == "xqa_decode" else {"fixed": fixed}
            plan = make_plan(problem, **options) if op == "xqa_decode" else plan_for(problem, **options)
            seqlens = torch.tensor(lengths, dtype=torch.int32)
            getattr(ops, f"{op}_plan")(plan, seqlens)
            pages = (problem.k_pages, problem.v_pages) if op == "xqa_decode" else (problem.kv_pages,)
            table = torch.where(problem.page_table < pages[0].shape[0], problem.page_table, 0)
            report = torch.zeros(8, dtype=torch.int32) if checked else None
            call = (problem.q_by_request, *pages, table, seqlens, plan)
            if INT_MAX in lengths and not checked:
                with pytest.raises(RuntimeError, match=r"cache_seqlens|num_partials"):
                    getattr(ops, op)(*call, softmax_scale=0.1, report=report)
                continue
            getattr(ops, op)(*call, softmax_scale=0.1, report=report)
            assert report is None or bool(report[0]) == (INT_MAX in lengths)
