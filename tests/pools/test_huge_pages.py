"""Large pools on a CPU ask for pages of 2 MB."""

from pathlib import Path

import pytest
import torch
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, huge_pages
from attnops.pools.huge_pages import LEAST_BYTES, with_huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")
on_linux = pytest.mark.skipif(
    not (SMAPS.exists() and HUGE_PAGES.exists()), reason="this system does not say how memory is backed"
)


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the middle of a tensor is marked so."""
    middle = tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes() // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(x, 16) for x in head.split("-"))
            inside = begin <= middle < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no such memory")


@on_linux
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pools_of_keys_and_values_ask(layout):
    pool = MHATokenToKVPool(LEAST_BYTES // 512, 16, torch.bfloat16, 2, 128, 1, layout=layout)
    assert all(asks_for_huge_pages(pages) for pages in pool.get_kv_buffer(0))


@on_linux
def test_pools_of_latents_ask():
    pool = MLATokenToKVPool(LEAST_BYTES // 1024, 64, torch.bfloat16, 1)
    assert asks_for_huge_pages(pool.kv_buffer[0])


@pytest.mark.parametrize(
    ("size", "device"), [(LEAST_BYTES - 1, "cpu"), (2 * LEAST_BYTES, "meta")], ids=["small", "elsewhere"]
)
def test_other_tensors_do_not(size, device, monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *where: asked.append(where))
    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    assert with_huge_pages(tensor) is tensor
    assert asked == []
