"""The table and the plot of a run of bench_mla_decode.py: each cell beside FlashMLA, and its share of the roofline.

    python benchmarks/report_mla_decode.py [--name h200-mla_decode]

Reads `results/<name>.jsonl`, writes `results/<name>.md` and `results/<name>.svg`. The roofline of a cell is what takes
longer, its bytes at the read rate or its products at the bf16 rate that the same run measured. FlashMLA's dense FP8 op
rounds q and the probabilities to e4m3; attnops does so only in the rows "rounded", and the errors tell them apart.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import records
import report

CASES = {
    "mla_decode": "Bursts",
    "mla_decode at 131072": "Bursts, page tables of 131072 tokens",
    "mla_decode-sustained": "Sustained, 0.7 s each",
}
CACHES = {"bf16": "bf16", "e4m3": "e4m3", "rows": "rows of 656 bytes"}


@dataclass(frozen=True)
class Cell:
    """What one cell measured. `rounded`: with `fp8_products`, where that was measured, too."""

    case: str
    params: dict
    ours: dict
    rounded: dict | None
    peer: dict | None
    share: float

    @property
    def cache(self) -> str:
        return self.params.get("kv", "bf16")

    @property
    def ratio(self) -> float | None:
        """Of the arithmetic that is nearest to the peer's."""
        return self.peer["ms"] / (self.rounded or self.ours)["ms"] if self.peer else None


def read_cells(name: str) -> list[Cell]:
    """The cells of attnops, in the file's order."""
    groups = report.read_groups(name)
    (ceiling,) = next(rows for (case, _), rows in groups.items() if case == "ceilings")
    cells = []
    for (case, _), group in groups.items():
        rows = {row["peer"]: row for row in group}
        if case not in CASES or "attnops" not in rows:
            continue
        ours = rows["attnops"]
        share = max(ours["gbs"] / ceiling["gbs"], ours["tflops"] / ceiling["tflops"])
        cells.append(Cell(case, ours["params"], ours, rows.get("attnops rounded"), rows.get("FlashMLA"), share))
    return cells


def table_of(cells: list[Cell]) -> list[str]:
    lines = ["| heads | query tokens | batch x tokens | page | attnops | rounded | FlashMLA | ratio | share | error |"]
    lines += ["|" + "---|" * 10]
    for cell in cells:
        p = cell.params
        fixed = f", cut every {p['fixed_split_tokens']}" if p["fixed_split_tokens"] else ""
        times = ["" if row is None else f"{1e3 * row['ms']:.1f}" for row in (cell.ours, cell.rounded, cell.peer)]
        ratio = "" if cell.ratio is None else f"{cell.ratio:.2f}"
        what = [p["h_q"], p["s_q"], f"{p['batch']} x {p['s_k']}{fixed}", p["page"]]
        what += [*times, ratio, f"{cell.share:.2f}", f"{cell.ours['rel_err']:.1e}"]
        lines.append("| " + " | ".join(map(str, what)) + " |")
    return lines


def table_text(cells: list[Cell], name: str) -> str:
    lines = [
        f"# {name}",
        "",
        "Written by `report_mla_decode.py`. Microseconds; rounded: with `fp8_products`, as FlashMLA's FP8 op rounds.",
        "Ratio: of the rounded time where there is one; share of the roofline of the run and error: without rounding.",
    ]
    for case, title in CASES.items():
        for cache, words in CACHES.items():
            group = [cell for cell in cells if (cell.case, cell.cache) == (case, cache)]
            if not group:
                continue
            commits = ", ".join(dict.fromkeys(cell.ours["commit"] for cell in group))
            ratios = [cell.ratio for cell in group if cell.ratio is not None]
            lines += ["", f"## {title}, {words}", "", f"Commit {commits}, {len(group)} cells"]
            if ratios:
                mean, slower = report.geometric_mean(ratios), sum(ratio < 0.97 for ratio in ratios)
                lines[-1] += f"; of {len(ratios)} beside FlashMLA {mean:.3f}x in the geometric mean, "
                lines[-1] += f"worst {min(ratios):.2f}x, {slower} below 0.97x"
            lines[-1] += "."
            lines += ["", *table_of(group)]
    return "\n".join(lines) + "\n"


def panel(cells: list[Cell], cache: str, heads: int) -> list[report.Point]:
    """Even batches of one query token in pages of 64."""
    return [
        report.Point(cell.params["batch"], cell.params["s_k"], cell.share, cell.ratio)
        for cell in cells
        if cell.case == "mla_decode"
        and (cell.cache, cell.params["h_q"]) == (cache, heads)
        and (cell.params["s_q"], cell.params["page"], cell.params["fixed_split_tokens"]) == (1, 64, 0)
        and isinstance(cell.params["s_k"], int)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200-mla_decode")
    name = parser.parse_args().name
    cells = read_cells(name)
    (records.RESULTS / f"{name}.md").write_text(table_text(cells, name))
    panels = [
        [(f"{words}, {heads} heads", panel(cells, cache, heads)) for heads in (16, 64, 128)]
        for cache, words in CACHES.items()
    ]
    report.write_plot(panels, "share of the roofline (ratio to FlashMLA)", name)


if __name__ == "__main__":
    main()
