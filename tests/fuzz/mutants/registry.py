"""Where mutants are named, and which cases call their ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from attnops import ops

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
    "share_lists": {"sparse prefill"},
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
    "delta_prefill": {"linear prompts", "cut prompts"},
    "ssd_prefill": {"linear prompts", "cut prompts"},
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


def for_all(ops_: tuple[str, ...], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops_:
            mutant(op, name)(functools.partial(wrong, op))
        return wrong

    return register
