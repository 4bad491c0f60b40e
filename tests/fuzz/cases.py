"""One case: drawn, run, judged."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import (
    backends,
    blocks,
    compressed,
    fmha,
    fp4,
    index_keys,
    indexer,
    linear,
    linear_cuts,
    linear_peers,
    linear_prefill,
    linear_verify,
    mla,
    paged,
    peers,
    plans,
    ragged,
    sparse,
    speculation,
    values,
    words,
    wrong,
    xqa,
)
from .draw import NO_KERNEL, Draw, Failure, Refused, Void

# Name: weight, and what draws and runs a case of it.
FAMILIES: dict[str, tuple[float, Callable[[Draw], None]]] = {
    "xqa_decode": (20, xqa.right),
    "ragged decode": (10, ragged.right),
    "mla_decode": (15, mla.right),
    "fmha": (25, fmha.right),
    "fp8 queries": (6, fmha.right_fp8_queries),
    "prefill forms": (4, fmha.right_forms),
    "four bits": (5, fp4.right_decode),
    "stores of four bits": (2, fp4.right_store),
    "page tables": (4, paged.right_tables),
    "scans": (2, paged.right_scan),
    "store_kv": (4, paged.right_store_kv),
    "store_mla_kv": (4, paged.right_store_mla),
    "merge": (4, paged.right_merge),
    "draft trees": (10, speculation.right_trees),
    "draft slots": (4, speculation.right_drafts),
    "hostile trees": (3, speculation.hostile_trees),
    "linear steps": (8, linear.right_step),
    "linear prompts": (9, linear_prefill.right_prompts),
    "cut prompts": (0.8, linear_cuts.right),
    "linear drafts": (10, linear_verify.right_drafts),
    "linear names": (3, linear_peers.right),
    "convolutions": (3, linear.right_convolution),
    "convolutions in front": (4, linear.right_convolved_step),
    "convolutions in front of state spaces": (3, linear.right_convolved_state_space),
    "states": (2, linear.right_states),
    "hostile states": (1, linear.hostile_slots),
    "selection": (4, indexer.right_select),
    "index keys": (3, index_keys.right_quantization),
    "index logits": (4, index_keys.right_logits),
    "hostile index keys": (2, index_keys.hostile_pages),
    "hostile rows": (1, indexer.hostile_rows),
    "compressed entries": (2, compressed.right_entries),
    "hostile entries": (1, compressed.hostile_entries),
    "sparse decode": (5, sparse.right_decode),
    "sparse prefill": (3, sparse.right_prefill),
    "block lists in decode": (4, blocks.right_decode),
    "block lists in prefill": (3, blocks.right_prefill),
    "label scores": (1, blocks.right_scores),
    "hostile lists": (1, sparse.hostile_lists),
    "backend": (20, backends.right_eager),
    "captured": (6, backends.right_captured),
    "compat": (12, peers.right),
    "ranks": (2, peers.right_ranks),
    "hostile decode": (6, values.hostile_decode),
    "hostile fmha": (6, values.hostile_fmha),
    "hostile tables": (5, values.hostile_tables),
    "wrong argument": (8, wrong.wrong_argument),
    "runner": (3, backends.right_runner),
    "any words": (8, words.any_words),
    "hostile plans": (4, plans.hostile_plans),
}

NO_MEMORY = ("out of memory", "ALLOC_FAILED")  # words of an allocator, and of a library that asked it
PAUSES = (1, 5, 20)  # seconds
LARGE = 1 << 30  # bytes


@dataclass
class Result:
    """What became of a case.

    Args:
        status: "ok", "failed", "void": nothing was called; or "refused": the library has honestly no kernel for it.
        seen: What the run counts.
        fatal: The process is of no more use.
        seconds: That the case took, a compiler's among them.
    """

    status: str
    family: str
    message: str = ""
    seen: list[str] = field(default_factory=list)
    fatal: bool = False
    seconds: float = 0.0


def family_of(draw: Draw, only: tuple[str, ...] = ()) -> str:
    names = [name for name in FAMILIES if not only or name in only]
    return draw.random.choices(names, [FAMILIES[name][0] or int(bool(only)) for name in names])[0]


def run_case(seed: int, index: int, device: str = "cpu", only: tuple[str, ...] = ()) -> Result:
    """Runs case `index` of a seed.

    Where other processes fill the card, it is drawn and run again a little later.

    Args:
        only: Families to draw from; empty: all.
    """
    for pause in (*PAUSES, None):
        result = _run_case(Draw(seed, index, device), only)
        _give_back(device)
        if pause is None or result.fatal or not any(text in result.message for text in NO_MEMORY):
            return result
        time.sleep(pause)
    raise AssertionError  # the last pause is None


def _run_case(draw: Draw, only: tuple[str, ...]) -> Result:
    device = draw.device
    family = family_of(draw, only)
    os.environ.pop("ATTNOPS_CPU_ISA", None)
    os.environ.pop("ATTNOPS_CUDA_ARCH", None)
    try:
        FAMILIES[family][1](draw)
        _wait(device)
    except Void:
        return Result("void", family)
    except Refused as error:
        return Result("refused", family, str(error), draw.seen)
    except Failure as error:
        return Result("failed", family, f"{error} | {_notes(draw)}", draw.seen, fatal=_is_dead(device))
    except Exception as error:
        if device != "cpu" and any(text in str(error) for text in NO_KERNEL):
            return Result("refused", family, str(error).split("\n")[0][:120], draw.seen)
        where = traceback.extract_tb(error.__traceback__)[-1]
        first, *_ = str(error).split("\n")
        text = f"{type(error).__name__}: {first} (at {os.path.basename(where.filename)}:{where.lineno})"
        return Result("failed", family, f"{text} | {_notes(draw)}", draw.seen, fatal=_is_dead(device))
    return Result("ok", family, "", draw.seen)


def _give_back(device: str) -> None:
    """Large memory of a case, which other processes of the run would lack: tables for hostile values take gigabytes."""
    if device != "cpu" and torch.cuda.memory_reserved() > LARGE:
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _is_dead(device: str) -> bool:
    """A GPU's context does not outlive a fault of a kernel."""
    try:
        _wait(device)
    except Exception:
        return True
    return False


def _notes(draw: Draw) -> str:
    return " ".join(f"{name}={value}".replace("torch.", "") for name, value in draw.notes.items())
