"""attnops: attention ops for LLM inference, compiled ahead of time."""

from attnops import _load, ops

__version__ = "0.1.0"

__all__ = ["__version__", "cuda_unavailable_reason", "ops"]

cuda_unavailable_reason = _load.cuda_unavailable_reason
