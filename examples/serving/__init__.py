"""A small serving engine over attnops: continuous batching, chunked prefill, and a prefix cache that shares pages."""

from .check import CheckFailed, CheckResult, check_request, check_requests
from .engine import Engine, Stats
from .graphs import MODES
from .prefix_cache import PrefixCache
from .request import Request
from .runner import ModelRunner
from .scheduler import Scheduler, Step
from .speculation import HeadDrafts, LookupDrafts, SpeculativeEngine

__all__ = [
    "MODES",
    "CheckFailed",
    "CheckResult",
    "Engine",
    "HeadDrafts",
    "LookupDrafts",
    "ModelRunner",
    "PrefixCache",
    "Request",
    "Scheduler",
    "SpeculativeEngine",
    "Stats",
    "Step",
    "check_request",
    "check_requests",
]
