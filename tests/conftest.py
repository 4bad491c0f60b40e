"""Every test: fixed seed. Tests marked `gpu` run only with `-m gpu`, and only for ops that have a CUDA kernel."""

from pathlib import Path

import pytest
import torch

# The op whose CUDA kernel the `gpu` tests of a folder need. Planners have theirs whatever the family's kernel.
FAMILY_OPS = {"xqa_decode": "xqa_decode", "mla_decode": "mla_decode", "fmha": "fmha_varlen"}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def has_cuda_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{op}", "CUDA")


def pytest_collection_modifyitems(items):
    for item in items:
        op = FAMILY_OPS.get(Path(item.path).parent.name)
        if op and item.get_closest_marker("gpu") and not has_cuda_kernel(op):
            item.add_marker(pytest.mark.skip(reason=f"{op} has no CUDA kernel in this build"))
