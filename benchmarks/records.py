"""Results of measurements as JSON lines, one object a measurement; see benchmarks/README.md for the fields."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Record:
    """One measured cell of one implementation. Rates count useful work only: what the cell needs, not what was done."""

    case: str  # group of cells, replaced as a whole by a newer run
    peer: str  # "attnops", or whom it is measured beside
    params: dict  # everything that defines the cell: the same object for every peer
    ms: float
    version: str = ""
    gbs: float | None = None
    tflops: float | None = None
    rel_err: float | None = None
    state: str = "burst"  # or "sustained"
    note: str = ""
    commit: str = field(default_factory=lambda: current_commit())
    device: str = field(default_factory=lambda: device_name())


# How names of peers begin, and the distributions that may hold them.
DISTRIBUTIONS = {
    "FlashInfer": ("flashinfer-python",),
    "XQA": ("flashinfer-python",),
    "FA3": ("flash_attn_3", "flash-attn-3"),
    "FlashMLA": ("flash_mla", "flash-mla"),
    "DeepGEMM": ("deep_gemm", "deep-gemm", "sgl-deep-gemm"),
    "fast_topk": ("sgl-kernel", "sgl_kernel", "sglang-kernel"),
    "SDPA": ("torch",),
    "sglang": ("sglang",),
    "SGLang": ("sglang",),
    "sgl_kernel": ("sgl-kernel", "sgl_kernel", "sglang-kernel"),
    "torch": ("torch",),
}


def version_of(peer: str) -> str:
    """The installed version of a peer, else what the environment's `PEER_VERSIONS` says of a pack. "": not known.

    `PEER_VERSIONS` is ``name=version;name=version``, by the first word of a peer's name in small letters.
    """
    if peer.startswith("attnops"):
        from attnops import __version__

        return __version__
    if peer.startswith("cuDNN"):
        return str(torch.backends.cudnn.version() or "")
    for begin, names in DISTRIBUTIONS.items():
        if peer.startswith(begin):
            for name in names:
                try:
                    return metadata.version(name)
                except metadata.PackageNotFoundError:
                    continue
    packed = dict(part.split("=", 1) for part in os.environ.get("PEER_VERSIONS", "").split(";") if "=" in part)
    return packed.get(re.split("[ ,]", peer)[0].lower(), "")


@cache
def current_commit() -> str:
    """Short hash of HEAD, with "+" when the tree differs from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def device_name() -> str:
    """The GPU where there is one, else the processor. CPU benchmarks name `cpu_name()` themselves."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, driver {driver_version()}, torch {torch.__version__}"
    return cpu_name()


@cache
def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.split("\n")[0].strip() or "unknown"


def cpu_name() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{model} ({isa}), {torch.get_num_threads()} threads, torch {torch.__version__}"


def write(
    records: list[Record], name: str, folder: Path = RESULTS, whole: bool = True, by: Sequence[str] | None = None
) -> Path:
    """Write records to `<name>.jsonl`, replacing the rows of the same cases and keeping the others.

    Not whole: replacing only those of the same cells, for a run that writes as it goes. by: names of the fields that
    rows to replace have in common with a record, in place of `whole`.
    """
    path = folder / f"{name}.jsonl"
    by = by or (("case",) if whole else ("case", "params"))
    new = [[getattr(record, field) for field in by] for record in records]
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if [row[field] for field in by] not in new:
                kept.append(line)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*kept, *(json.dumps(asdict(record)) for record in records)]) + "\n")
    return path
