"""Pictures of `bench.workload`: popularity, the day, and one burst from close by. matplotlib is imported here alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from janus_server.errors import BadConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .workload import Load

_COLOURS: Final = ("#0072b2", "#d55e00")
_DAY_BINS: Final = 288


def draw(folder: Path, loads: Sequence[Load]) -> list[Path]:
    """One file, workload.png, with three panels."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(13, 4.2), dpi=110, layout="constrained")
    panels = figure.subplots(1, 3)
    _popularity(panels[0], loads)
    _day(panels[1], loads)
    _burst(panels[2], loads)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    path = folder / "workload.png"
    figure.savefig(path, format="png")
    return [path]


def _popularity(axes: Axes, loads: Sequence[Load]) -> None:
    for load, colour in zip(loads, _COLOURS, strict=False):
        apps = 100 * np.arange(len(load.requests) + 1) / len(load.requests)
        for values, what, line in ((load.requests, "requests", "-"), (load.tokens, "tokens", "--")):
            reached = np.concatenate([[0.0], np.cumsum(np.sort(values)[::-1])]) / values.sum()
            axes.plot(apps, 100 * reached, line, color=colour, label=f"{load.name}, {what}")
    axes.plot([12, 30], [80, 80], "k+", markersize=12, markeredgewidth=2, label="published")
    axes.set(xlabel="applications, % (the busiest first)", ylabel="share, %", title="popularity (A17)")


def _day(axes: Axes, loads: Sequence[Load]) -> None:
    for load, colour in zip(loads, _COLOURS, strict=False):
        counts = load.counts.sum(0).reshape(_DAY_BINS, -1).mean(1)
        axes.plot(np.arange(_DAY_BINS) * 24 / _DAY_BINS, counts, color=colour, label=load.name, linewidth=1)
    axes.set(xlabel="hour of the day", ylabel="requests a second (mean of 5 min)", title="the day", ylim=(0, None))


def _burst(axes: Axes, loads: Sequence[Load]) -> None:
    """The busiest application's largest: what its fastest ten seconds look like from two minutes before on."""
    for load, colour in zip(loads, _COLOURS, strict=False):
        app = int(np.argmax(load.requests))
        near = np.convolve(load.counts[app], np.ones(3) / 3, "same")
        before = np.convolve(load.counts[app], np.ones(120) / 120, "full")[: len(near)]
        at = 200 + int(np.argmax(near[200:-200] / np.maximum(before[190:-210], 0.5)))
        part = slice(at - 120, at + 150)
        axes.plot(np.arange(-120, 150), near[part], color=colour, label=f"{load.name}, app {app}", linewidth=1)
    axes.set(xlabel="seconds from its peak", ylabel="requests a second (mean of 3 s)", title="one burst (A16)",
             ylim=(0, None))  # fmt: skip
