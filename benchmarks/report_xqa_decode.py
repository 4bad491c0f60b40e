"""The table and the plot of a run of bench_xqa_decode.py: each cell beside its best peer, and its share of the ceiling.

    python benchmarks/report_xqa_decode.py [--name h200-xqa_decode]

Reads `results/<name>.jsonl`, writes `results/<name>.md` and `results/<name>.svg`. The ceiling is the read sweep of the
same run (same commit). FP8 cells count peers of any arithmetic; the error in the rows tells them apart.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass

import records


@dataclass(frozen=True)
class Cell:
    """What one cell measured: times in microseconds, `share` of the read ceiling of its run."""

    case: str
    params: dict
    ours: float
    peer: str
    best: float
    share: float
    commit: str

    @property
    def ratio(self) -> float:
        return self.best / self.ours

    @property
    def heads(self) -> str:
        return f"{self.params['h_q']}/{self.params['h_kv']}"


def read_cells(name: str) -> list[Cell]:
    """The cells of attnops that some peer measured, too, in the file's order."""
    rows = [json.loads(line) for line in (records.RESULTS / f"{name}.jsonl").read_text().splitlines()]
    ceilings = {row["commit"]: row["gbs"] for row in rows if row["case"] == "ceiling"}
    groups = defaultdict(list)
    for row in rows:
        groups[row["case"], json.dumps(row["params"], sort_keys=True)].append(row)
    cells = []
    for (case, _), group in groups.items():
        ours = next((row for row in group if row["peer"] == "attnops"), None)
        peers = [row for row in group if not row["peer"].startswith("attnops")]
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda row: row["ms"])
        share = ours["gbs"] / ceilings[ours["commit"]]
        times = ours["ms"] * 1e3, best["peer"], best["ms"] * 1e3
        cells.append(Cell(case, ours["params"], *times, share, ours["commit"]))
    return cells


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def write_table(cells: list[Cell], name: str) -> None:
    lines = [
        f"# {name}",
        "",
        "Written by `report_xqa_decode.py`. Microseconds; share: of the read rate of the run.",
        "",
    ]
    for case in dict.fromkeys(cell.case for cell in cells):
        group = [cell for cell in cells if cell.case == case]
        ratios = [cell.ratio for cell in group]
        commits = ", ".join(dict.fromkeys(cell.commit for cell in group))
        lines += [
            f"## {case}",
            "",
            f"Commit {commits}; {len(group)} cells: {geometric_mean(ratios):.3f}x the best peer ",
        ]
        lines[-1] += f"in the geometric mean, worst {min(ratios):.2f}x."
        lines += ["", "| heads | batch x tokens | page | query tokens | attnops | best peer | ratio | share |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for c in group:
            p = c.params
            what = f"| {c.heads} | {p['batch']} x {p['s_k']} | {p['page']} | {p['s_q']} "
            lines.append(what + f"| {c.ours:.1f} | {c.peer} {c.best:.1f} | {c.ratio:.2f} | {c.share:.2f} |")
        lines.append("")
    (records.RESULTS / f"{name}.md").write_text("\n".join(lines))


def write_plot(cells: list[Cell], name: str) -> None:
    """Share of the read ceiling over batch (rows) and length (columns), a panel per cache type and head counts."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name  # the same file from the same rows
    from matplotlib import pyplot

    cells = [c for c in cells if c.case in ("bf16", "fp8") and isinstance(c.params["s_k"], int)]
    heads = sorted({c.heads for c in cells}, key=lambda h: [int(n) for n in h.split("/")][::-1])
    batches, lengths = (sorted({c.params[key] for c in cells}) for key in ("batch", "s_k"))
    cases = ("bf16", "fp8")
    figure, axes = pyplot.subplots(len(cases), len(heads), figsize=(3.2 * len(heads), 5.6), layout="constrained")
    image = None
    for row, case in enumerate(cases):
        for axis, head in zip(axes[row], heads):
            grid = [[math.nan] * len(lengths) for _ in batches]
            for c in (c for c in cells if (c.case, c.heads) == (case, head)):
                y, x = batches.index(c.params["batch"]), lengths.index(c.params["s_k"])
                grid[y][x] = c.share
                color = "white" if c.share < 0.6 else "black"
                axis.text(x, y, f"{c.share:.2f}\n({c.ratio:.2f}x)", ha="center", va="center", fontsize=8, color=color)
            image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto")
            axis.set_title(f"{case}, {head} heads", fontsize=9)
            axis.set_xticks(range(len(lengths)), lengths, fontsize=8)
            axis.set_yticks(range(len(batches)), batches, fontsize=8)
            axis.set(xlabel="KV tokens", ylabel="batch")
    figure.colorbar(image, ax=axes, label="share of the read ceiling (ratio to the best peer)")
    figure.savefig(records.RESULTS / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200-xqa_decode")
    name = parser.parse_args().name
    cells = read_cells(name)
    write_table(cells, name)
    write_plot(cells, name)


if __name__ == "__main__":
    main()
