"""Copies of tensors in memory whose ends show who goes beyond them."""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch
from torch import Tensor

_GUARD = 0xA5
_SLACK = 4096  # bytes on each side of a tensor on a GPU
_NOBODY = 0  # PROT_NONE


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


class Fenced:
    """A dense copy of a tensor between guards. On the CPU pages lie beyond them that end a process that touches one.

    Attributes:
        view: The copy.
    """

    def __init__(self, tensor: Tensor, *, at_end: bool = True) -> None:
        """
        Args:
            at_end: Whether the last byte lies before a fence; otherwise it is the first one that lies behind one.
        """
        size = tensor.numel() * tensor.element_size()
        if tensor.is_cpu:
            page = mmap.PAGESIZE
            room = -(-max(size, 1) // page) * page
            self._memory = mmap.mmap(-1, room + 2 * page)
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            for begin in (whole.data_ptr(), whole.data_ptr() + page + room):
                if _libc().mprotect(begin, page, _NOBODY):
                    raise OSError(ctypes.get_errno(), "mprotect")
            self._room, at = whole[page : page + room], room - size if at_end else 0
        else:
            self._room = torch.empty(size + 2 * _SLACK, dtype=torch.uint8, device=tensor.device)
            at = _SLACK
        self._room.fill_(_GUARD)
        self._inner = slice(at, at + size)
        if not size:
            self.view = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return
        self.view = self._room[self._inner].view(tensor.dtype).view(tensor.shape)
        self._room[self._inner].copy_(tensor.contiguous().view(-1).view(torch.uint8))

    def bytes(self) -> Tensor:
        """What the copy holds now, as bytes of their own."""
        return self._room[self._inner].clone()

    def is_whole(self) -> bool:
        """Whether nothing was written beside the copy."""
        before, after = self._room[: self._inner.start], self._room[self._inner.stop :]
        return bool((before == _GUARD).all()) and bool((after == _GUARD).all())
