"""Large pages of memory for pools on a CPU."""

from __future__ import annotations

import ctypes
import functools
import mmap

from torch import Tensor

LEAST_BYTES = 16 << 20  # of a tensor for which it is worth asking


@functools.cache
def _madvise() -> ctypes._FuncPointer | None:
    """libc's function; None where there is none, or no large pages."""
    found = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if found is not None:
        found.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return found


def with_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back a large new CPU tensor by pages of 2 MB; returns the tensor.

    Decode reads tokens that lie anywhere in a pool. With pages of 4 KB many reads first wait for a look-up of their
    address. The system may refuse: then all is as before, and slower.
    """
    num_bytes = tensor.untyped_storage().nbytes()
    madvise = _madvise()
    if tensor.device.type == "cpu" and num_bytes >= LEAST_BYTES and madvise is not None:
        page = mmap.PAGESIZE
        begin = -(-tensor.untyped_storage().data_ptr() // page) * page
        end = (tensor.untyped_storage().data_ptr() + num_bytes) // page * page
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor
