"""What the backends on `mla_decode` have in common; each adds the page sizes that its users know."""

from __future__ import annotations

import torch

from attnops.backends.capability import SIXTEEN_BIT, Capability
from attnops.backends.decode_steps import MODES


def mla_capability(*page_sizes: int) -> Capability:
    return Capability(
        devices=frozenset({"cpu", "cuda"}),
        chosen_on=frozenset({"cuda"}),
        archs=frozenset({90}),
        modes=MODES,
        delegates_prefill=True,
        dtypes=SIXTEEN_BIT,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.uint8}),
        mla=True,
        page_sizes=frozenset(page_sizes),
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        tree_mask=True,
        deterministic=True,
        cuda_graph=True,
    )
