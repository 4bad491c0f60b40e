"""What FlashInfer's wrappers have beside `plan` and `run`: workspaces, an end, and names of their own for the lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._errors import names_the_peers


def check_workspace(name: str, buffer: Tensor) -> None:
    """attnops needs no workspace, but refuses one where FlashInfer does."""
    if not torch.compiler.is_compiling() and buffer.data_ptr() % 16:
        raise ValueError(f"attnops.compat: {name} must be 16-byte aligned, got an address of {buffer.data_ptr()}")


class Workspaces:
    """Taken from users of FlashInfer: attnops keeps its own small buffers."""

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes of the two buffers for a `plan` of these arguments: none are needed, so the least."""
        return 1, 1

    @names_the_peers("reset_workspace_buffer")
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Taken: no memory of a workspace is needed.

        Raises:
            ValueError: an address is no multiple of 16 bytes.
        """
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        check_workspace("int_workspace_buffer", int_workspace_buffer)

    @names_the_peers("end_forward")
    def end_forward(self) -> None:
        """Taken: a plan needs no end."""


class ReturnsLse(Workspaces):
    """Of wrappers whose `run` and `forward` take `return_lse`."""

    run: Any
    forward: Any

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(*args, return_lse=True, **options)

    def forward_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.forward(*args, return_lse=True, **options)
