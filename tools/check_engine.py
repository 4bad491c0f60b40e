"""Ends with status 3 and the reason where an engine's tests cannot run here, since it is not installed.

python tools/check_engine.py vllm
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from attnops.plugins.engines import ENGINES, unsupported


def reason(name: str) -> str:
    """Why not; empty where they can."""
    if name in ENGINES:
        return unsupported(name)
    checkout = os.environ.get("NANO_VLLM", "")
    return "" if Path(checkout, "nanovllm").is_dir() else "NANO_VLLM names no checkout of nano-vllm"


def main() -> None:
    name = sys.argv[1]
    if why := reason(name):
        print(f"{name} is left out: {why}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
