"""The dashboard: every result beside its best peer, its share of the machine's ceiling, and the history by commit.

    python benchmarks/dashboard.py [--out docs/_generated]

Reads `results/*.jsonl` and the history that git has of them. Writes `dashboard.md` and its plots, a page of the book;
`make docs` and `make dashboard` run it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import records
from report import geometric_mean, versions

OURS = "attnops"
CEILINGS = {"ceiling", "ceilings"}
NOT_PEERS = {"with plan"}  # attnops itself, with more in the call
# Of attnops itself, under a name of its own in the rows.
OWN = {"balanced", "five decodes", "xqa_decode"}
SLOWEST = 12  # cells of the list that the page of performance shows
# What is measured beside others, in the order of the page: file, and what a reader calls it.
FAMILIES = {
    "h200-xqa_decode": "GQA decode, H200",
    "h200-mla_decode": "MLA decode, H200",
    "h200-fmha": "Prefill and extend, H200",
    "h200-fmha-engine": "Steps of a model with chunked prefill, H200",
    "h200-decode_sampled": "Decode of sampled shapes, H200",
    "h200-triton": "Triton kernels, H200",
    "h200-flashinfer": "Backend flashinfer beside FlashInfer by hand, H200",
    "h200-paged_kv": "Stores and merges, H200",
    "h200-sparse_mla": "Sparse MLA, H200",
    "h200-indexer": "Indexer of sparse MLA, H200",
    "h200-linear": "Linear attention, H200",
    "h200-speculation": "Speculative decoding, H200",
    "h200-vllm": "Attention of vLLM's steps, H200",
    "h200-nano-vllm": "nano-vllm as a whole, H200",
    "h200-transformers": "transformers' generate_batch, H200",
    "cpu-decode": "Decode, AMD EPYC",
    "cpu-prefill": "Prefill, AMD EPYC",
    "cpu-mla": "MLA decode, AMD EPYC",
    "cpu-amx-decode": "Decode, Intel Xeon with AMX",
    "cpu-amx-prefill": "Prefill, Intel Xeon with AMX",
    "cpu-amx-mla": "MLA decode, Intel Xeon with AMX",
}


@dataclass(frozen=True)
class Cell:
    """One cell that attnops and at least one peer measured. Times are in microseconds."""

    case: str
    params: dict
    ours: float
    peer: str
    best: float
    share: float | None  # of the ceiling of its run, None where the run has none
    commit: str
    device: str
    gbs: float | None = None  # what attnops reached, useful work only
    tflops: float | None = None
    peer_version: str = ""

    @property
    def ratio(self) -> float:
        """Above 1: attnops is faster than the best peer."""
        return self.best / self.ours


def cells_of(text: str) -> list[Cell]:
    """The cells of a result file, in its order. Rows without a peer beside them are left out."""
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    ceilings: dict[str, dict] = defaultdict(dict)
    for line in text.splitlines():
        row = json.loads(line)
        if row["case"] in CEILINGS:
            ceilings[row["commit"]].update({k: row[k] for k in ("gbs", "tflops") if row.get(k)})
        else:
            groups[row["case"], json.dumps(row["params"], sort_keys=True)].append(row)
    cells = []
    for (case, _), rows in groups.items():
        ours = next((row for row in rows if row["peer"] == OURS), None)
        peers = [row for row in rows if is_peer(row["peer"]) and row["ms"] > 0]
        if ours is None or not peers or not ours["ms"]:
            continue
        best = min(peers, key=lambda row: row["ms"])
        times = ours["ms"] * 1e3, best["peer"], best["ms"] * 1e3
        share = _share(ours, ceilings[ours["commit"]])
        rates = ours.get("gbs"), ours.get("tflops"), best.get("version", "")
        cells.append(Cell(case, ours["params"], *times, share, ours["commit"], ours["device"], *rates))
    return cells


def ceilings_of(text: str) -> dict[str, float]:
    """The highest measured ceilings of a result file: "gbs" of reading, "tflops" of products."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        row = json.loads(line)
        if row["case"] in CEILINGS:
            for unit in ("gbs", "tflops"):
                found[unit] = max(found.get(unit, 0.0), row.get(unit) or 0.0)
    return {unit: value for unit, value in found.items() if value}


def is_peer(name: str) -> bool:
    return not name.startswith(OURS) and name not in NOT_PEERS


def _share(row: dict, ceiling: dict) -> float | None:
    """The larger share of the run's ceilings: of reading, or of products. On a CPU the row's note has the first."""
    found = re.search(r"read sweep ([\d.]+) GB/s", row.get("note", ""))
    limits = {**ceiling, **({"gbs": float(found[1])} if found else {})}
    shares = [row[unit] / limit for unit, limit in limits.items() if row.get(unit)]
    return max(shares, default=None)


def history_of(name: str) -> list[tuple[str, float]]:
    """(commit, geometric mean of the ratios) of every version of a result file that git has, oldest first."""
    path = f"benchmarks/results/{name}.jsonl"
    root = records.RESULTS.parents[1]

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True).stdout

    history = []
    for commit in reversed(git("log", "--format=%h", "--", path).split()):
        try:
            cells = cells_of(git("show", f"{commit}:{path}"))
        except (KeyError, ValueError):  # a version from before the fields were what they are
            continue
        if cells:
            history.append((commit, geometric_mean([cell.ratio for cell in cells])))
    return history


def described(params: dict) -> str:
    """A cell's parameters in a line: what says nothing new is left out."""
    left = {key: value for key, value in params.items() if value not in (None, "", False)}
    words = []
    if "h_q" in left:
        words.append(f"heads {left.pop('h_q')}" + (f"/{left.pop('h_kv')}" if "h_kv" in left else ""))
    if left.get("d_v") == left.get("d"):
        left.pop("d_v", None)
    if left.get("kv") == left.get("dtype"):
        left.pop("kv", None)
    left.pop("tokens", None)  # of all requests together
    for key, value in left.items():
        words.append(key if value is True else f"{key} {value}" if key != "dtype" else str(value))
    return ", ".join(words)


def peers_of(cells: list[Cell]) -> str:
    return versions((cell.peer, cell.peer_version) for cell in cells)


def section(name: str, title: str, cells: list[Cell], plots: list[str]) -> list[str]:
    ratios = [cell.ratio for cell in cells]
    slower = sum(ratio < 1 for ratio in ratios)
    lines = [
        f"## {title}",
        "",
        f"{len(cells)} cells. Geometric mean {geometric_mean(ratios):.2f}x the best peer's speed, "
        f"from {min(ratios):.2f}x to {max(ratios):.2f}x. attnops is slower in {slower}.",
        "",
        f"Device: {'; '.join(sorted({cell.device for cell in cells}))}. {peers_of(cells)}",
        "",
        *(line for plot in plots for line in (f"![{title}]({plot})", "")),
        f"<details><summary>Every cell of {title}</summary>",
        "",
        "| case | cell | attnops, us | best peer | its us | ratio | share of the ceiling | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        share = "" if cell.share is None else f"{cell.share:.2f}"
        lines.append(
            f"| {cell.case} | {described(cell.params)} | {cell.ours:.1f} | {cell.peer} | {cell.best:.1f} "
            f"| {cell.ratio:.2f} | {share} | {cell.commit} |"
        )
    return [*lines, "", "</details>", ""]


def slowest(cells: list[tuple[str, Cell]]) -> str:
    """A table of the cells that lag most behind their best peer."""
    lines = ["| family | cell | ratio | best peer |", "| --- | --- | --- | --- |"]
    behind = sorted((pair for pair in cells if pair[1].ratio < 1), key=lambda pair: pair[1].ratio)
    for title, cell in behind[:SLOWEST]:
        lines.append(f"| {title} | {described(cell.params)} | {cell.ratio:.2f}x | {cell.peer} |")
    return "\n".join(["", f"{len(behind)} of {len(cells)} cells are slower than a peer. The slowest:", "", *lines, ""])


def beside(texts: dict[str, str]) -> str:
    """A table of whom the result files have beside attnops, in which version, where a row says so.

    Args:
        texts: What a family is called, and the lines of its file.
    """
    lines = ["| measured | peer | version |", "| --- | --- | --- |"]
    for title, text in texts.items():
        found: dict[str, set[str]] = {}
        for row in map(json.loads, text.splitlines()):
            if not row["peer"].startswith("attnops") and row["peer"] not in OWN and row["case"] != "ceiling":
                found.setdefault(row["peer"], set()).add(row.get("version", ""))
        for peer, recorded in sorted(found.items()):
            named = [*sorted(recorded - {""}), *(["not recorded"] if "" in recorded else [])]
            lines.append(f"| {title} | {peer} | {'; '.join(named)} |")
    return "\n".join(["", *lines, ""])


def write(out: Path) -> Path:
    """The page, its plots, and the lists of what is slow and of peers, into `out`; returns the page."""
    import dashboard_plots

    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Dashboard",
        "",
        "Every measured cell beside the fastest peer of the same run. A ratio above 1 means that attnops is faster.",
        "The share is that of the ceiling measured in the same run: reading memory, or multiplying matrices.",
        "",
    ]
    every: list[tuple[str, Cell]] = []
    texts: dict[str, str] = {}
    for name, title in FAMILIES.items():
        path = records.RESULTS / f"{name}.jsonl"
        cells = cells_of(path.read_text(encoding="utf-8")) if path.exists() else []
        if not cells:
            continue
        every += [(title, cell) for cell in cells]
        texts[title] = path.read_text(encoding="utf-8")
        plots = [dashboard_plots.ratios(cells, title, peers_of(cells), out / f"{name}.svg")]
        ceilings = ceilings_of(path.read_text(encoding="utf-8"))
        if any(cell.gbs and cell.tflops for cell in cells) and "gbs" in ceilings:
            plots.append(dashboard_plots.roofline(cells, ceilings, title, out / f"{name}-roofline.svg"))
        history = history_of(name)
        if len(history) > 1:
            plots.append(dashboard_plots.history(history, title, out / f"{name}-history.svg"))
        lines += section(name, title, cells, plots)
    (out / "slowest.txt").write_text(slowest(every), encoding="utf-8")
    (out / "peers.txt").write_text(beside(texts), encoding="utf-8")
    page = out / "dashboard.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.RESULTS.parents[1] / "docs/_generated")
    print(write(parser.parse_args().out))
