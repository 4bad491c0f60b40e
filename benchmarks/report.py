"""What the reports of decode benchmarks share: means, and panels of shares over batch and length."""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import records


@dataclass(frozen=True)
class Point:
    """A measured cell of a panel: its share of the machine's ceiling, and times the best peer (None: nobody beside)."""

    batch: int
    length: int
    share: float
    ratio: float | None


def read_groups(name: str) -> dict[tuple[str, str], list[dict]]:
    """The rows of `results/<name>.jsonl` by case and cell, in the file's order."""
    groups = defaultdict(list)
    for line in (records.RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups[row["case"], json.dumps(row["params"], sort_keys=True)].append(row)
    return groups


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def versions(peers: Iterable[tuple[str, str]]) -> str:
    """Peers by name, with their versions where the rows have them."""
    pairs = set(peers)
    recorded = ", ".join(sorted(f"{name} {version}" for name, version in pairs if version))
    without = ", ".join(sorted(name for name, version in pairs if not version))
    texts = [f"Peers: {recorded}."] if recorded else []
    return " ".join([*texts, *([f"Peers without a recorded version: {without}."] if without else [])])


def peers_beside(name: str) -> str:
    """`versions` of all whom `results/<name>.jsonl` has beside attnops, and the devices."""
    rows = [row for group in read_groups(name).values() for row in group]
    beside = {(row["peer"], row.get("version", "")) for row in rows if not row["peer"].startswith("attnops")}
    beside = {pair for pair in beside if pair[0] not in {"read sweep", "torch"}}  # ceilings
    return " ".join([f"Device: {'; '.join(sorted({row['device'] for row in rows}))}.", versions(beside)])


def write_plot(panels: list[list[tuple[str, list[Point]]]], label: str, name: str) -> None:
    """Rows of panels, (title, points) each, as `results/<name>.svg`: batch down, length across, share as color."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name  # the same file from the same rows
    from matplotlib import pyplot

    points = [point for row in panels for _, panel in row for point in panel]
    batches, lengths = (sorted({getattr(point, key) for point in points}) for key in ("batch", "length"))
    size = (3.2 * len(panels[0]), 2.8 * len(panels))
    figure, axes = pyplot.subplots(len(panels), len(panels[0]), figsize=size, layout="constrained", squeeze=False)
    image = None
    for axis, (title, panel) in zip(axes.flat, [panel for row in panels for panel in row]):
        grid = [[math.nan] * len(lengths) for _ in batches]
        for point in panel:
            y, x = batches.index(point.batch), lengths.index(point.length)
            grid[y][x] = point.share
            text = f"{point.share:.2f}" + ("" if point.ratio is None else f"\n({point.ratio:.2f}x)")
            color = "white" if point.share < 0.6 else "black"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
        image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto")
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(lengths)), lengths, fontsize=8)
        axis.set_yticks(range(len(batches)), batches, fontsize=8)
        axis.set(xlabel="KV tokens", ylabel="batch")
    figure.colorbar(image, ax=axes, label=label)
    figure.supxlabel("\n".join(textwrap.wrap(peers_beside(name), 110)), fontsize=7)
    figure.savefig(records.RESULTS / f"{name}.svg", metadata={"Date": None})
