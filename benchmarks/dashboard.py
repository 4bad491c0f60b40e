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
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import records
from report import geometric_mean, versions

OURS = "attnops"
CEILINGS = {"ceiling", "ceilings"}
# attnops itself under another name: with more in the call, or another way of its own.
OWN = {"with plan", "balanced", "five decodes", "xqa_decode"}
SLOWEST = 12  # cells of the list that the page of performance shows
OF_A_CASE = 3  # at most so many of them are of one case
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
    "h200-block_lists": "Lists of blocks, H200",
    "h200-fp4": "FP4 caches, H200",
    "h200-sparse_mla": "Sparse MLA, H200",
    "h200-sparse_sampled": "Sparse MLA of sampled shapes, H200",
    "h200-indexer": "Indexer of sparse MLA, H200",
    "h200-linear": "Linear attention, H200",
    "h200-linear-drawn": "Linear attention of drawn shapes, H200",
    "h200-speculation": "Speculative decoding, H200",
    "h200-vllm": "Attention of vLLM's steps, H200",
    "h200-vllm-engine-gqa": "vLLM as a whole, GQA, H200",
    "h200-vllm-engine-mla": "vLLM as a whole, MLA, H200",
    "h200-sglang": "Attention of SGLang's steps, H200",
    "h200-nano-vllm": "nano-vllm as a whole, H200",
    "h200-transformers": "transformers' generate_batch, H200",
    "cpu-decode": "Decode, AMD EPYC",
    "cpu-prefill": "Prefill, AMD EPYC",
    "cpu-mla": "MLA decode, AMD EPYC",
    "cpu-linear": "Linear attention, AMD EPYC",
    "cpu-vllm": "Attention of vLLM's steps, AMD EPYC",
    "cpu-amx-decode": "Decode, Intel Xeon with AMX",
    "cpu-amx-prefill": "Prefill, Intel Xeon with AMX",
    "cpu-amx-mla": "MLA decode, Intel Xeon with AMX",
    "cpu-amx-vllm": "Attention of vLLM's steps, Intel Xeon with AMX",
}
# Names of parameters that the scripts use, and what a reader calls them.
HEADS = (("h_q", "h_kv"), ("num_q_heads", "num_kv_heads"), ("heads", ""))
WORDS = {
    "batch_size": "batch",
    "batch": "batch",
    "s_q": "query tokens",
    "seqlen_q": "query tokens",
    "s_k": "keys",
    "seqlen": "keys",
    "d": "head dim",
    "d_v": "of values",
    "page": "pages of",
    "page_size": "pages of",
    "kv": "cache",
    "kv_dtype": "cache",
    "law": "lengths",
    "window_left": "window",
    "context": "table for",
    "table": "table for",
    "k": "keys chosen",
}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
CASES = {
    "table": "chosen shapes",
    "skew": "one long request",
    "speculative": "1 to 8 tokens",
    "page": "other pages",
    "hopper": "prompts and extends",
    "flashinfer layer": "a layer in a graph",
    "flashinfer layer, eager": "a layer, eager",
    "flashinfer extend": "new tokens, eager",
    "flashinfer host, layer": "the host's time of a layer",
    "flashinfer host, plan": "the host's time of a plan",
}
DRAWN = {
    "xqa16": "GQA in 16 bits",
    "fp8": "GQA over FP8",
    "tokens": "GQA, 2 to 16 tokens",
    "mla16": "MLA in 16 bits",
    "mla8": "MLA over FP8",
    "invariant": "batch-invariant",
}


@dataclass(frozen=True)
class Cell:
    """One cell that attnops measured, and its best peer ("": none). Times are in microseconds."""

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
    """The cells of a result file, in its order. Rows without a peer beside them are left out: `alone_in` has these."""
    return [cell for cell in every_cell(text) if cell.peer]


def alone_in(text: str) -> list[Cell]:
    """The cells that attnops measured without a peer."""
    return [cell for cell in every_cell(text) if not cell.peer]


def every_cell(text: str) -> list[Cell]:
    """The cells of a result file that attnops measured, in its order."""
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
        if ours is None or not ours["ms"]:
            continue
        peers = [row for row in rows if is_peer(row["peer"]) and row["ms"] > 0]
        best = min(peers, key=lambda row: row["ms"], default={"peer": "", "ms": 0.0})
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
    return not name.startswith(OURS) and name not in OWN


def _share(row: dict, ceiling: dict) -> float | None:
    """The larger share of the run's ceilings: of reading, or of products. Some rows have theirs in the note."""
    note = row.get("note", "")
    floor = re.search(r"floor ([\d.]+) us, ([\d.]+) of it", note)
    if floor and float(floor[1]):
        return float(floor[2])
    found = re.search(r"read sweep ([\d.]+) GB/s", note)
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
    if left.get("window_left") == -1:
        del left["window_left"]
    if left.get("d_v") == left.get("d"):
        left.pop("d_v", None)
    if left.get("kv") == left.get("dtype"):
        left.pop("kv", None)
    left.pop("tokens", None)  # of all requests together
    words = []
    for many, few in HEADS:
        if many in left:
            words.append(f"heads {_value(left.pop(many))}" + (f"/{left.pop(few)}" if few in left else ""))
    for key, value in left.items():
        if key == "dtype" or value is True:
            words.append(_value(value if key == "dtype" else key))
        else:
            words.append(f"{WORDS.get(key, key.replace('_', ' '))} {_value(value)}")
    return ", ".join(words)


def called(case: str) -> str:
    """The name of a group of cells, as a reader takes it: "sampled xqa16 seed 31" is "drawn, 16 bit, seed 31"."""
    drawn = re.fullmatch(r"sampled? (?:(\w+) seed )?(\d+)", case)
    if drawn:
        kind = f", {DRAWN.get(drawn[1], drawn[1])}" if drawn[1] else ""
        return f"drawn{kind}, seed {drawn[2]}"
    return CASES.get(case, case)


def _value(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(str, value))
    return TYPES.get(str(value), str(value))


def peers_of(cells: list[Cell]) -> str:
    return versions((cell.peer, cell.peer_version) for cell in cells)


def section(title: str, cells: list[Cell], alone: list[Cell], plots: list[str]) -> list[str]:
    """A family's part of the page: the sum in words, its plots, and every cell in lists that open."""
    ratios = [cell.ratio for cell in cells]
    lines = [f"## {title}", ""]
    if len(cells) == 1:
        lines += [f"1 cell: {ratios[0]:.2f}x the best peer's speed.", ""]
    elif cells:
        slower = sum(ratio < 1 for ratio in ratios)
        lines += [
            f"{len(cells)} cells. Geometric mean {geometric_mean(ratios):.2f}x the best peer's speed, "
            f"from {min(ratios):.2f}x to {max(ratios):.2f}x. attnops is slower in {slower or 'none'}.",
            "",
        ]
    lines += [f"Device: {'; '.join(sorted({cell.device for cell in cells or alone}))}. {peers_of(cells)}", ""]
    lines += [line for plot in plots for line in (f"![{title}]({plot})", "")]
    if cells:
        lines += [f"<details><summary>Every cell of {title}</summary>", ""]
        lines += ["| case | cell | attnops, us | best peer | its us | ratio | share of the ceiling | commit |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        lines += [
            f"| {called(cell.case)} | {described(cell.params)} | {cell.ours:.1f} | {cell.peer} | {cell.best:.1f} "
            f"| {cell.ratio:.2f} | {_number(cell.share)} | {cell.commit} |"
            for cell in cells
        ]
        lines += ["", "</details>", ""]
    if alone:
        lines += [f"<details><summary>{len(alone)} cells of {title} without a peer</summary>", ""]
        lines += ["| case | cell | attnops, us | GB/s | TFLOP/s | share of the ceiling | commit |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [
            f"| {called(cell.case)} | {described(cell.params)} | {cell.ours:.1f} | {_number(cell.gbs, 0)} "
            f"| {_number(cell.tflops, 1)} | {_number(cell.share)} | {cell.commit} |"
            for cell in alone
        ]
        lines += ["", "</details>", ""]
    return lines


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def slowest(cells: list[tuple[str, Cell]]) -> str:
    """A table of the cells that lag most behind their best peer, few of each case, so that no case hides the others."""
    lines = ["| family | case | cell | ratio | best peer | commit |", "| --- | --- | --- | --- | --- | --- |"]
    behind = sorted((pair for pair in cells if pair[1].ratio < 1), key=lambda pair: pair[1].ratio)
    listed: Counter[tuple[str, str]] = Counter()
    for title, cell in behind:
        listed[title, cell.case] += 1
        if listed[title, cell.case] <= OF_A_CASE and len(lines) < SLOWEST + 2:
            what = f"{title} | {called(cell.case)} | {described(cell.params)}"
            lines.append(f"| {what} | {cell.ratio:.2f}x | {cell.peer} | {cell.commit} |")
    said = f"{len(behind)} of {len(cells)} cells are slower than a peer. The slowest, {OF_A_CASE} of a case at most:"
    return "\n".join(["", said, "", *lines, ""])


def beside(texts: dict[str, str]) -> str:
    """A table of whom the result files have beside attnops, in which version, where a row says so.

    Args:
        texts: What a family is called, and the lines of its file.
    """
    lines = ["| measured | peer | version |", "| --- | --- | --- |"]
    for title, text in texts.items():
        found: dict[str, set[str]] = {}
        for row in map(json.loads, text.splitlines()):
            if is_peer(row["peer"]) and row["case"] not in CEILINGS:
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
        "Drawn cells come from a seed. Each cell names its commit: cells of an older commit show older kernels.",
        "",
    ]
    every: list[tuple[str, Cell]] = []
    texts: dict[str, str] = {}
    for name, title in FAMILIES.items():
        path = records.RESULTS / f"{name}.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        cells, alone = cells_of(text), alone_in(text)
        if not cells and not alone:
            continue
        plots = []
        if cells:
            every += [(title, cell) for cell in cells]
            texts[title] = text
            plots.append(dashboard_plots.ratios(cells, title, peers_of(cells), out / f"{name}.svg", called))
        ceilings = ceilings_of(text)
        if any(cell.gbs and cell.tflops for cell in cells) and "gbs" in ceilings:
            plots.append(dashboard_plots.roofline(cells, ceilings, title, out / f"{name}-roofline.svg"))
        history = history_of(name)
        if len(history) > 1:
            plots.append(dashboard_plots.history(history, title, out / f"{name}-history.svg"))
        lines += section(title, cells, alone, plots)
    (out / "slowest.txt").write_text(slowest(every), encoding="utf-8")
    (out / "peers.txt").write_text(beside(texts), encoding="utf-8")
    page = out / "dashboard.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.RESULTS.parents[1] / "docs/_generated")
    print(write(parser.parse_args().out))
