"""What a run must hit on a device: every op, backend, mode, function of `compat` and kind of wrong call."""

from __future__ import annotations

import torch
from attnops import ops
from attnops.backends import detect_machine, get_backend_class, registered_names
from attnops.types import ForwardMode

from .options import ISAS

MODES = """all keys; alone; alone in a backend; balanced; batch-invariant; captured step; causal; checked; csr; checked
fault; e5m2; fp8; fp8 products; fp8 queries; graph runner; mla e4m3; 656-byte rows; page table; piecewise
runner; hidden keys; plain; rope apart; scales of fp8; scales of plain keys; segment runner; sinks; soft
cap; tree; tree with blind tokens; tree over more keys; verify with a tree; ragged tokens; window; window pool; lists of
rows; rounded keys; many requests; cut prompts; chunks of tokens"""
COMPAT = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "chunk_gated_delta_rule",
    "cutlass_mla_decode",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "merge_state",
    "merge_state_v2",
    "selective_state_update",
    "trtllm_batch_decode_with_kv_cache",
]
HOSTILE = ["words", "row index", "state slot", "row", "slot", "store", "store mla", "seqlens", "selected row"]
HOSTILE += [f"index key of {op}" for op in ("store_index_k", "gather_index_k", "index_logits_paged")]
HOSTILE += [f"{kind} of {op}" for kind in ("length", "page index") for op in ("xqa_decode", "mla_decode")]
HOSTILE += ["page index of fmha_paged", "bounds of fmha_paged", "bounds of fmha_varlen"]
HOSTILE += [f"plan of {op}" for op in ("xqa_decode", "mla_decode", "fmha_paged", "fmha_varlen")]
WRONG = ["rank", "dtype", "device", "stride", "extent", "number"]
# Rows of Hopper's tables that cut prompts. They also take whole ones, so that a row's count says nothing of cuts.
CUTTING = [f"delta_prefill sm90_{gate}_{keys}" for gate in ("chunks", "channels") for keys in (64, 128)]
CUTTING += [f"ssd_prefill sm90_chunks_{keys}" for keys in (64, 128)]
RARE = ("wrong argument of", "cut ")  # beginnings of names of which a run of a few thousand cases may hit none


def _has_kernel(op: str, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{op}", device.upper())


def expected(device: str) -> set[str]:
    """Names as cases count them."""
    called = [op for op in ops.__all__ if not op.endswith("_plan") and _has_kernel(op, device)]
    machine = detect_machine(device)
    kinds = {name: get_backend_class(name).capability for name in registered_names()}
    kinds = {name: kind for name, kind in kinds.items() if not kind.compressed}  # tests/backends/test_dsv4.py
    backends = [name for name, kind in kinds.items() if not kind.machine_reasons(machine)]
    names = {f"op {op}" for op in called} | {f"wrong argument of {op}" for op in ops.__all__ if _has_kernel(op, device)}
    names |= {f"backend {name}" for name in [*backends, "hybrid"]} | {f"compat {name}" for name in COMPAT}
    names |= {f"mode {mode}" for mode in " ".join(MODES.split()).split("; ")}
    names |= {f"mode {mode.name}" for mode in ForwardMode}
    names |= {f"hostile {kind}" for kind in HOSTILE} | {f"wrong {kind}" for kind in WRONG}
    names |= {"block_list of xqa_decode", "block_list of fmha_paged"}
    if device == "cpu":
        names |= {f"isa {isa}" for isa in ISAS[: ISAS.index(torch.ops.attnops.cpu_isa()) + 1]}
        names.add("mode window right")
    elif machine.arch == 90:
        names |= {f"cut cuda {row}" for row in CUTTING}
    return names


def cannot_run_here(name: str, device: str = "cpu") -> bool:
    """A row of a CPU table, as a run counts it, in a run of another device or without its instructions here."""
    if name.startswith("row ") and device != "cpu":
        return not name.startswith(f"row {device} ")
    op_and_row = name.removeprefix("row cpu ").split()
    if len(op_and_row) != 2 or not name.startswith("row cpu "):
        return False
    isa = op_and_row[1].rpartition("_")[0].replace("avx512bf16", "avx512_bf16")
    return isa in ISAS and ISAS.index(isa) > ISAS.index(torch.ops.attnops.cpu_isa())
