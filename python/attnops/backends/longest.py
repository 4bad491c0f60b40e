"""How long the longest request of an eager step is: what a GPU knows, on the host once it is there."""

from __future__ import annotations

import torch
from torch import Tensor


class LongestRequest:
    """The most keys that a request of a step has, by its lengths on the device.

    A CPU says it at once. A GPU's answer is a copy of four bytes behind the work that it has already. Nobody waits for
    it: who asks before it is there learns nothing, and walks on. Each step has memory of its own for it.
    """

    def __init__(self, cache_seqlens: Tensor) -> None:
        self._known: int | None = None
        self._device = cache_seqlens.device
        longest = cache_seqlens.amax()
        if self._device.type == "cpu":
            self._known = int(longest)
            return
        self._answer = torch.empty((), dtype=longest.dtype, pin_memory=True)
        self._answer.copy_(longest, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(self._device))

    @classmethod
    def ask(cls, cache_seqlens: Tensor, in_capture: bool) -> LongestRequest | None:
        """A question about ``cache_seqlens``, int32 ``[B]`` in tokens.

        None where a step is recorded for other lengths, or a device is no CPU and no GPU of torch.cuda.
        """
        device = cache_seqlens.device
        if in_capture or cache_seqlens.numel() == 0 or device.type not in ("cpu", "cuda") or _is_recorded(device):
            return None
        return cls(cache_seqlens)

    def keys(self) -> int | None:
        """What is known by now; None: nothing, or what is called now is recorded."""
        if _is_recorded(self._device):
            return None
        if self._known is None and self._arrival.query():
            self._known = int(self._answer)
        return self._known


def _is_recorded(device: torch.device) -> bool:
    """Whether a number would outlive the lengths that it is of: a tracer, a mode that records ops, or a graph."""
    # Not `layer_call.is_watched`: profilers and a default device, which it counts too, keep no number.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
