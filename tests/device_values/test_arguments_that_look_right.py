"""Arguments of the right dtype and rank that no kernel may take: of every op, found by its schema."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from attnops import ops
from recorded_calls import copied, outcome, recorded_calls, same, written
from right_calls import ops_calls
from torch import Tensor

calls = functools.cache(recorded_calls)


def tensors_of(name: str, names: set[str]) -> list[str]:
    return [key for key, value in calls()[name][1].items() if isinstance(value, Tensor) and key in names]


WRITTEN = [
    (name, key, axis)
    for name, (function, given) in calls().items()
    for key in tensors_of(name, written(function))
    for axis, extent in enumerate(given[key].shape)
    if extent > 1 and key != "report"
]


@pytest.mark.parametrize("name, argument, axis", WRITTEN)
def test_what_is_written_does_not_lie_on_itself(name, argument, axis):
    """As what `expand` makes: of rows at one address the last one written would be left, without a word."""
    function, given = calls()[name]
    given = copied(given)
    given[argument] = given[argument].narrow(axis, 0, 1).expand(given[argument].shape)
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::{name}: {argument}")):
        function(**given)


def halved(value: Tensor, axis: int) -> Tensor:
    """The same shape, where the rows of an axis begin half a row apart."""
    strides = list(value.stride())
    strides[axis] //= 2
    return torch.zeros(value.numel(), dtype=torch.uint8).to(value.dtype).as_strided(value.shape, strides)


OVER = [
    (name, key, axis)
    for name, key, axis in WRITTEN
    if calls()[name][1][key].stride(axis) > 1 and calls()[name][1][key].dim() > axis + 1
]


@pytest.mark.parametrize("name, argument, axis", OVER)
def test_what_is_written_does_not_lie_on_its_neighbour(name, argument, axis):
    """Rows half of which are those of the next row: half of what is written would be lost."""
    function, given = calls()[name]
    given = copied(given)
    given[argument] = halved(given[argument], axis)
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::{name}: {argument}")):
        function(**given)


STRIDES = [
    ((4, 3, 5), (15, 5, 1), True),
    ((4, 3, 5), (5, 20, 1), True),  # another order
    ((4, 3, 5), (1, 100, 5), True),
    ((1, 1, 1), (0, 0, 0), True),
    ((2, 3), (3, 2), True),  # 0 2 4, 3 5 7: neither axis steps over the other
    ((3, 4), (3, 2), False),  # two steps of 3 are three of 2
    ((4, 3, 5), (14, 5, 1), False),
    ((4, 3, 5), (7, 5, 1), False),
    ((2, 2, 2), (3, 2, 1), False),  # 3 is 2 + 1
    ((2, 2, 2), (4, 2, 1), True),
    ((1 << 20, 1 << 20), (1, 1), False),
]


@pytest.mark.parametrize("shape, strides, apart", STRIDES)
def test_which_strides_lie_apart(shape, strides, apart):
    """No slot is cleared: nothing but the strides is looked at."""
    states = torch.zeros(1 << 21 if shape[0] > 100 else 1024).as_strided(shape, strides)
    slots = torch.zeros(0, dtype=torch.int32)
    if apart:
        try:
            torch.ops.attnops.clear_states(states, slots)
        except RuntimeError as error:
            assert "without gaps" in str(error)  # a rule of this op, after the one here
        return
    with pytest.raises(RuntimeError, match="attnops::clear_states: states must not lie on itself"):
        torch.ops.attnops.clear_states(states, slots)


WITH_MEMORY = [
    (name, key) for name, (_, given) in calls().items() for key in tensors_of(name, set(given)) if given[key].numel()
]


@pytest.mark.parametrize("name, argument", WITH_MEMORY)
def test_a_tensor_whose_storage_was_freed_is_refused(name, argument):
    """As engines free caches and weights while they sleep. The tensor keeps its shape, and its address is null."""
    function, given = calls()[name]
    given = copied(given)
    given[argument].untyped_storage().resize_(0)
    message = re.escape(f"attnops::{name}: {argument} must have memory, and its storage was freed")
    with pytest.raises(RuntimeError, match=message):
        function(**given)


@pytest.mark.parametrize("name", ["fp4_decode", "gather_index_k", "index_logits_paged", "index_topk"])
def test_pages_that_are_only_read_may_repeat(name):
    function, given = calls()[name]
    pools = [key for key in given if key.endswith("_pages") or key.endswith("_block_scales")]
    one = {key: given[key][:1] for key in pools}
    repeated = {key: value.expand(given[key].shape) for key, value in one.items()}
    right = {key: value.contiguous() for key, value in repeated.items()}
    assert same(outcome((function, given), **repeated), outcome((function, given), **right))


FLOATS = [(name, key) for name, (_, given) in calls().items() for key, value in given.items() if type(value) is float]


@pytest.mark.parametrize("name, argument", FLOATS)
@pytest.mark.parametrize("value", [1e39, -1e300])
def test_a_number_that_is_infinite_in_float32_is_refused(name, argument, value):
    """A kernel would take it for an infinity, and its rows would be NaN."""
    function, given = calls()[name]
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::{name}: {argument} must")):
        function(**(copied(given) | {argument: value}))


OPTIONAL = [
    (name, key, axis)
    for name, (function, given) in calls().items()
    for key in tensors_of(name, {a.name for a in function._schema.arguments if str(a.type).startswith("Optional")})
    for axis in range(given[key].dim())
    if key not in written(function)
]


@pytest.mark.parametrize("name, argument, axis", OPTIONAL)
def test_what_is_given_and_empty_is_not_absent(name, argument, axis):
    """torch has no address for a tensor without elements, by which a kernel may tell what is absent."""
    call = calls()[name]
    right = outcome(call)
    try:
        absent, empty = outcome(call, **{argument: None}), None
    except RuntimeError:
        return  # it may not be absent
    if same(right, absent):
        return  # without it nothing is different
    given = call[1][argument]
    try:
        empty = outcome(call, **{argument: given.narrow(axis, 0, 0)})
    except RuntimeError as error:
        assert f"attnops::{name}" in str(error)
        return
    assert not same(empty, absent), f"{argument} of shape {list(given.narrow(axis, 0, 0).shape)} is taken for none"


EMPTY_TABLES = [
    ("build_page_table", "slot_map", 0, "position 15 must be in [0, 0)"),
    ("build_kv_indices", "slot_map", 0, "position 15 must be in [0, 0)"),
    ("topk_select", "page_table", 0, "row_to_request[0] must be in [0, 0)"),
    ("topk_select", "page_table", 1, "its page must be in [0, 0)"),
    ("move_kv", "req_to_token", 0, "req_pool_indices[0] must be in [0, 0)"),
    ("move_kv", "req_to_token", 1, "cells below 0"),
]


@pytest.mark.parametrize("name, argument, axis, message", EMPTY_TABLES)
def test_a_table_without_rows_or_cells_is_looked_up(name, argument, axis, message):
    function, given = ops_calls()[name]
    table = given.get(argument, torch.arange(64, dtype=torch.int32))
    given[argument] = table.narrow(axis, 0, 0)
    with pytest.raises(RuntimeError, match=re.escape(f"attnops::{name}") + ".*" + re.escape(message)):
        function(**given)
    given["report"] = torch.zeros(8, dtype=torch.int32)
    function(**given)
    assert given["report"][0] > 0


POOLS = {
    "xqa_decode": ("k_pages", "v_pages"),
    "mla_decode": ("kv_pages",),
    "fmha_paged": ("k_pages", "v_pages"),
    "fp4_decode": ("k_pages", "v_pages", "k_block_scales", "v_block_scales"),
    "label_scores": ("label_pages",),
    "index_logits_paged": ("index_pages",),
    "index_topk": ("index_pages",),
    "gather_index_k": ("index_pages",),
    "sparse_mla_decode": ("kv_pages",),
    "sparse_mla_prefill": ("kv",),
}


@pytest.mark.parametrize("name", POOLS)
def test_keys_of_a_pool_without_pages_are_named(name):
    """Requests have lengths, and cells of their tables: no page is one of the pool. Threads meet any of them first."""
    function, given = ops_calls()[name]
    given |= {pool: given[pool][:0] for pool in POOLS[name]}
    with pytest.raises(RuntimeError, match=rf"attnops::{name}: \w+, (request|token) \d+, \w+ \d+ must be in \[0, 0\)"):
        function(**given)
    given["report"] = torch.zeros(8, dtype=torch.int32)
    function(**given)
    assert given["report"][0] > 0


def test_every_op_that_reads_pages_is_asked():
    """A new one belongs into POOLS."""
    readers = {
        name
        for name in ops.__all__
        if hasattr(torch.ops.attnops, name)
        for function in [getattr(torch.ops.attnops, name).default]
        for names in [{a.name for a in function._schema.arguments}]
        if names & {"page_table", "indices"}
        and {n for n in names if n.endswith("pages") or n == "kv"} - written(function)
    }
    assert readers - {"build_block_tables"} == set(POOLS)  # which reads the numbers of pages alone
