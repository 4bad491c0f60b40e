"""The table and the plot of a run of bench_xqa_decode.py: each cell beside its best peer, and its share of the ceiling.

    python benchmarks/report_xqa_decode.py [--name h200-xqa_decode]

Reads `results/<name>.jsonl`, writes `results/<name>.md` and `results/<name>.svg`. The ceiling is the read sweep of the
same run (same commit). FP8 cells count peers of any arithmetic; the error in the rows tells them apart.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import records
import report


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
    groups = report.read_groups(name)
    ceilings = {row["commit"]: row["gbs"] for (case, _), rows in groups.items() if case == "ceiling" for row in rows}
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


def table_text(cells: list[Cell], name: str) -> str:
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
            f"Commit {commits}; {len(group)} cells: {report.geometric_mean(ratios):.3f}x the best peer ",
        ]
        lines[-1] += f"in the geometric mean, worst {min(ratios):.2f}x."
        lines += ["", "| heads | batch x tokens | page | query tokens | attnops | best peer | ratio | share |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for c in group:
            p = c.params
            what = f"| {c.heads} | {p['batch']} x {p['s_k']} | {p['page']} | {p['s_q']} "
            lines.append(what + f"| {c.ours:.1f} | {c.peer} {c.best:.1f} | {c.ratio:.2f} | {c.share:.2f} |")
        lines.append("")
    return "\n".join(lines)


def panels_of(cells: list[Cell]) -> list[list[tuple[str, list[report.Point]]]]:
    """A row for each cache type, a panel for each head count; even batches."""
    cells = [c for c in cells if c.case in ("bf16", "fp8") and isinstance(c.params["s_k"], int)]
    heads = sorted({c.heads for c in cells}, key=lambda h: [int(n) for n in h.split("/")][::-1])
    points = {
        (case, head): [
            report.Point(c.params["batch"], c.params["s_k"], c.share, c.ratio)
            for c in cells
            if (c.case, c.heads) == (case, head)
        ]
        for case in ("bf16", "fp8")
        for head in heads
    }
    return [[(f"{case}, {head} heads", points[case, head]) for head in heads] for case in ("bf16", "fp8")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200-xqa_decode")
    name = parser.parse_args().name
    cells = read_cells(name)
    (records.RESULTS / f"{name}.md").write_text(table_text(cells, name))
    report.write_plot(panels_of(cells), "share of the read ceiling (ratio to the best peer)", name)


if __name__ == "__main__":
    main()
