"""Pictures of the dispatch benchmark as PNG files. `dispatch` calls these when --plot FOLDER was given.

matplotlib is imported here alone, with its Agg canvas and without pyplot, whose state is global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from janus_server.errors import BadConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers too (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#888888", "#f0e442", "#7f3c00")


class Timing(Protocol):
    @property
    def planner(self) -> str: ...
    @property
    def jobs(self) -> int: ...
    @property
    def machines(self) -> int: ...
    @property
    def took_s(self) -> float: ...


def runtime(folder: Path, timings: Sequence[Timing]) -> None:
    """dispatch_runtime.png: time of a plan over the number of machines, a line for each number of jobs."""
    names = list(dict.fromkeys(timing.planner for timing in timings))
    figure = _figure(4.2 * len(names))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        sizes = sorted({timing.jobs for timing in timings})
        for n, colour in zip(sizes, _COLOURS, strict=False):
            line = [timing for timing in timings if timing.planner == name and timing.jobs == n]
            x, y = [timing.machines for timing in line], [timing.took_s * 1e3 for timing in line]
            axes.loglog(x, y, marker="o", color=colour, label=f"{n:,} jobs")
        axes.set_title(name)
        axes.set_xlabel("machines")
    panels[0].set_ylabel("ms a plan")
    panels[0].legend(fontsize=8)
    _save(figure, folder / "dispatch_runtime.png")


def shares(folder: Path, name: str, loads: Sequence[float], by_planner: Mapping[str, Sequence[float]]) -> None:
    """dispatch_NAME.png: share on time over the load, a line for each planner; bounds are dotted."""
    figure = _figure(8)
    axes = figure.add_subplot()
    colours = iter(_COLOURS)
    for planner, values in by_planner.items():
        bound = "bound" in planner
        style = {"linestyle": ":", "color": "#000000"} if bound else {"marker": "o", "color": next(colours)}
        axes.plot(loads, values, label=planner, **style)
    axes.set_xlabel("load")
    axes.set_ylabel("share on time")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    _save(figure, folder / f"dispatch_{name}.png")


def _figure(width_in: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    return Figure(figsize=(width_in, 4.5), dpi=110, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
