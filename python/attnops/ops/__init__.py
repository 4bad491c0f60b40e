"""The functional API: one function per op, with shapes, dtypes and errors. Each calls `torch.ops.attnops.<name>`."""

from attnops import _load  # noqa: F401  (the ops exist once the modules are loaded)
from attnops.ops.merge_state import merge_state, merge_states

__all__ = ["merge_state", "merge_states"]
