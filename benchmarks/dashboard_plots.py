"""Plots of the dashboard: ratios to the best peer with the share of the ceiling, and their mean by commit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import matplotlib.ticker

if TYPE_CHECKING:
    from dashboard import Cell

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "attnops"  # the same file from the same rows
from matplotlib import pyplot  # noqa: E402

FASTER, SLOWER, LINE = "#0072b2", "#d55e00", "#777777"


def ratios(cells: list[Cell], title: str, peers: str, path: Path, called: Callable[[str], str] = str) -> str:
    """A dot per cell, a row per case: how fast beside the best peer, and what share of the ceiling.

    `peers` stands below the axes: whom the cells are beside, with versions. `called` names a case for readers.
    """
    cases = list(dict.fromkeys(cell.case for cell in cells))
    shared = any(cell.share is not None for cell in cells)
    height = 1.5 + 0.32 * len(cases)
    figure, axes = pyplot.subplots(1, 1 + shared, figsize=(8, height), sharey=True, layout="constrained", squeeze=False)
    left = axes[0][0]
    for cell in cells:
        row = cases.index(cell.case)
        color = FASTER if cell.ratio >= 1 else SLOWER
        left.plot(cell.ratio, row, "o", color=color, alpha=0.55, markersize=6)
        if shared and cell.share is not None:
            axes[0][1].plot(cell.share, row, "o", color=LINE, alpha=0.55, markersize=6)
    left.axvline(1, color=LINE, linewidth=1)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%gx"))
    left.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    most = max(max(cell.ratio for cell in cells), 1.1)
    least = min(min(cell.ratio for cell in cells), 0.9)
    choice = (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5) if most < 8 * least else (0.25, 0.5, 1, 2, 5, 10, 30, 60)
    if most > 25 * least:
        choice = (0.1, 0.3, 1, 3, 10, 30, 100)
    ticks = [tick for tick in choice if least * 0.7 <= tick <= most * 1.4]
    left.set_xticks(ticks)
    left.set_yticks(range(len(cases)), map(called, cases), fontsize=9)
    left.set_ylim(len(cases) - 0.5, -0.5)
    left.set_xlabel("speed beside the best peer (right: attnops is faster)")
    if shared:
        axes[0][1].set_xlim(0, 1.05)
        axes[0][1].set_xlabel("share of the ceiling")
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("\n".join(textwrap.wrap(peers, 120)), fontsize=7, color=LINE)
    return _save(figure, path)


def roofline(cells: list[Cell], ceilings: dict[str, float], title: str, path: Path) -> str:
    """Useful operations a second over operations per byte, under the machine's measured ceilings."""
    figure, axis = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    points = [(1e3 * cell.tflops / cell.gbs, cell.tflops) for cell in cells if cell.gbs and cell.tflops]
    axis.plot(*zip(*points), "o", color=FASTER, alpha=0.5, markersize=5)
    top = ceilings.get("tflops")
    right = max(max(x for x, _ in points) * 2, 1e3 * top / ceilings["gbs"] * 4 if top else 0)
    left = min(x for x, _ in points) / 2
    ends = [left, 1e3 * top / ceilings["gbs"] if top else right]
    axis.plot(
        ends, [x * ceilings["gbs"] / 1e3 for x in ends], color=LINE, label=f"reads {ceilings['gbs'] / 1e3:.2f} TB/s"
    )
    if top:
        axis.plot([ends[1], right], [top, top], color=SLOWER, label=f"products {top:.0f} TFLOP/s")
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axis.legend(loc="lower right", fontsize=9)
    axis.set_title(f"{title}: roofline", fontsize=11)
    return _save(figure, path)


def history(points: list[tuple[str, float]], title: str, path: Path) -> str:
    """Geometric mean of a family's ratios over the commits that recorded results."""
    figure, axis = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    axis.plot(range(len(points)), [ratio for _, ratio in points], "o-", color=FASTER)
    axis.axhline(1, color=LINE, linewidth=1)
    axis.set_xticks(range(len(points)), [commit for commit, _ in points], rotation=60, fontsize=8, ha="right")
    axis.set_ylabel("mean ratio")
    axis.set_title(f"{title}: by commit of the results", fontsize=11)
    return _save(figure, path)


def _save(figure: pyplot.Figure, path: Path) -> str:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path.name
