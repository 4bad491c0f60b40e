"""How far loops over gathered keys run: to the least that the host was told, and never by a length of the device."""

from __future__ import annotations

import dataclasses

import pytest
from attnops.backends import gathered, get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

MODEL = Model("gqa", AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16))
LONG = dataclasses.replace(LIMITS, max_seqlen=2048)
EXTEND, VERIFY = ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY

# What the host says, the columns of its table, and the chunks of 256 keys that a layer then walks.
KNOWN = {
    "nothing": ({}, 2048, 8),
    "a narrow table": ({}, 700, 3),
    "the longest request": ({"max_cache_seqlen": 120}, 2048, 1),
    "the prefixes": ({"max_prefix_tokens": 168}, 2048, 1),
    "loose prefixes": ({"max_prefix_tokens": 800}, 2048, 4),
    "prefixes and the newest": ({"max_prefix_tokens": 480, "max_seqlen_q": 33}, 2048, 3),
    "the least counts": ({"max_cache_seqlen": 513, "max_prefix_tokens": 168}, 2048, 1),
}


@pytest.mark.parametrize("known", KNOWN)
def test_chunks_end_where_the_host_knows_that_keys_end(known, monkeypatch):
    options, columns, chunks = KNOWN[known]
    step = make_step(MODEL, EXTEND, [0, 65, 100, 3], [33, 1, 20, 7], max_context=columns)
    for name, value in options.items():
        setattr(step.batch, name, value)
    taken = []
    taker = gathered._taker

    def counted(*arguments):
        take = taker(*arguments)
        return lambda cells, valid: taken.append(cells.shape[1]) or take(cells, valid)

    monkeypatch.setattr(gathered, "_taker", counted)
    backend = get_backend_class("torch_native")(MODEL.spec, LONG)
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[MODEL.spec.dtype]
    assert len(taken) == chunks


def test_drafts_of_every_branch_are_keys():
    """A draft step's lengths count the cells of all drafts, which stand behind the prefix."""
    batch = make_step(MODEL, VERIFY, [100, 30], [4, 4], uniform=True).batch
    batch.max_prefix_tokens = 130
    assert gathered.most_keys(batch, LIMITS) == 134
    batch.draft_steps = 3
    assert gathered.most_keys(batch, LIMITS) == 142
