"""What the conformance suite combines with every backend: features, modes and page sizes.

PYTHONPATH=python python tests/support/conformance.py    prints the matrix of the README
"""

from __future__ import annotations

import torch
from attnops.backends import get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, ROWS = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
PAGE_SIZES = (1, 3, 16, 64, 128)

GQA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
FEATURES = {
    "plain": GQA,
    "fp16": {**GQA, "dtype": FP16},
    "fp32": {**GQA, "dtype": FP32},
    "odd_heads": {**GQA, "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 40},
    "window": {**GQA, "sliding_window_size": 17},
    "cap": {**GQA, "logit_cap": 4.0},
    "sinks": {**GQA, "has_sinks": True},
    "e4m3": {**GQA, "kv_dtype": E4M3},
    "fp4": {**GQA, "kv_dtype": torch.float4_e2m1fn_x2},
    "e5m2": {**GQA, "kv_dtype": E5M2},
    "deterministic": {**GQA, "deterministic": True},
    "bidirectional": {**GQA, "attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "encoder": {**GQA, "attn_type": AttentionType.ENCODER_ONLY},
    "mla": {},
    "mla_window_cap": {"sliding_window_size": 17, "logit_cap": 4.0},
    "mla_e4m3": {"kv_dtype": E4M3},
    "mla_e5m2": {"kv_dtype": E5M2},
    "mla_rows": {"kv_dtype": ROWS},
    "mla_fp4": {"kv_dtype": torch.float4_e2m1fn_x2},
    # Layers of these bring lists of rows.
    "mla_lists": {"sparse_topk": 24},
    "mla_lists_rows": {"sparse_topk": 24, "kv_dtype": ROWS},
}
MODES = {
    ForwardMode.DECODE: ([9, 70], [1, 1], {"uniform": True}),
    ForwardMode.EXTEND: ([0, 70], [13, 5], {}),
    ForwardMode.MIXED: ([9, 40], [1, 6], {}),
    ForwardMode.TARGET_VERIFY: ([9, 70], [4, 4], {"uniform": True}),
    ForwardMode.DRAFT_EXTEND: ([9, 70], [3, 1], {}),
}


def spec_of(feature: str, page_size: int) -> AttentionSpec:
    options = {"page_size": page_size, **FEATURES[feature]}
    return AttentionSpec.mla(4, **options) if feature.startswith("mla") else AttentionSpec(**options)


def served_sizes(name: str, feature: str) -> list[int]:
    """Page sizes at which a backend serves a feature, in every mode that it has at all."""
    capability = get_backend_class(name).capability
    wanted = [mode for mode in modes_of(spec_of(feature, 1)) if mode in capability.modes]
    return [size for size in PAGE_SIZES if not capability.reasons_against(spec_of(feature, size), wanted)]


def modes_of(spec: AttentionSpec) -> list[ForwardMode]:
    return [ForwardMode.EXTEND] if spec.attn_type is AttentionType.ENCODER_ONLY else list(MODES)


_COLUMNS = {
    "16 bit": "plain",
    "fp32": "fp32",
    "any head dim": "odd_heads",
    "window": "window",
    "soft cap": "cap",
    "sinks": "sinks",
    "e4m3": "e4m3",
    "e5m2": "e5m2",
    "batch-invariant": "deterministic",
    "cross": "bidirectional",
    "encoder": "encoder",
    "MLA": "mla",
    "MLA e4m3": "mla_e4m3",
    "656-byte rows": "mla_rows",
}


def _modes_cell(name: str) -> str:
    modes = get_backend_class(name).capability.modes
    if modes.issuperset(MODES):
        return "all"
    return "decode" if ForwardMode.DECODE in modes else "prefill"


def _sizes_cell(sizes: list[int]) -> str:
    if not sizes:
        return "-"
    return "yes" if len(sizes) == len(PAGE_SIZES) else "pages of " + ", ".join(map(str, sizes))


def matrix() -> str:
    """The table of the README, from what the suite asks and the answers that it holds backends to."""
    names = [name for name in registered_names() if not get_backend_class(name).capability.compressed]
    lines = [["", "steps", *_COLUMNS, "trees"], ["---"] * (len(_COLUMNS) + 3)]
    for name in names:
        capability = get_backend_class(name).capability
        cells = [_sizes_cell(served_sizes(name, feature)) for feature in _COLUMNS.values()]
        trees = "yes" if capability.tree_mask else "-"
        mark = "\\*" if capability.untested_on_hardware else ""
        lines.append([f"`{name}`{mark}", _modes_cell(name), *cells, trees])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(matrix())
