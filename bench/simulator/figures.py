"""Pictures of simulations as PNG files: promises kept and devices held over time, waits, and what they cost together.

`report` draws them. matplotlib is imported here alone, with its Agg canvas and without pyplot, whose state is global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from janus_server.errors import BadConfig

from .recorder import Record
from .tallies import Part, edges_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers too (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#888888", "#f0e442", "#7f3c00")
_LAYERS: Final = 8
_WINDOWS: Final = 120


def draw(folder: Path, records: Mapping[str, Record], found: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """The files written."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[str, Callable[[Figure], None], float]] = [
        ("attainment", lambda f: _attainment(f.add_subplot(), records), 4.5),
        ("devices", lambda f: _devices(f.add_subplot(), records), 4.5),
        ("waits", lambda f: _waits(f, records), 4.5),
        ("models", lambda f: _models(f, records), 1.2 + 2.6 * len(records)),
    ]
    if len(records) > 1:
        pictures.append(("cost", lambda f: _cost(f.add_subplot(), found), 4.5))
    written = []
    for name, paint, height_in in pictures:
        written.append(picture(folder / f"{name}.png", paint, height_in))
    return written


def picture(path: Path, paint: Callable[[Figure], None], height_in: float = 4.5) -> Path:
    """One file, painted."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("figures need matplotlib; run: pip install 'janus-server[bench]'") from None
    figure = Figure(figsize=(9, height_in), dpi=110, layout="constrained")
    paint(figure)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
    return path


def _attainment(axes: Axes, records: Mapping[str, Record]) -> None:
    """The share kept of the requests that came in each window; windows without one are gaps."""
    for (name, record), colour in zip(records.items(), colours(len(records)), strict=True):
        tallies = record.tallies
        each = max(1, round(max(5.0, record.scenario.duration_s / _WINDOWS) / tallies.second_s))
        padded = np.pad(tallies.seconds, ((0, -len(tallies.seconds) % each), (0, 0)))
        windows = padded.reshape(-1, each, padded.shape[1]).sum(axis=1)
        came = windows[:, Part.CAME]
        shares = np.where(came > 0, windows[:, Part.GOOD] / np.maximum(came, 1), np.nan)
        scale, _ = _unit(record)
        at = (np.arange(len(windows)) + 0.5) * each * tallies.second_s / scale
        axes.plot(at, shares, color=colour, label=name)
    axes.axhline(0.95, color="#555555", linestyle=":", linewidth=1)
    axes.set(
        ylabel="share that kept its promise", xlabel=_unit(record)[1], title=f"{record.scenario.name}: promises kept"
    )
    axes.legend(fontsize=8)


def _devices(axes: Axes, records: Mapping[str, Record]) -> None:
    for (name, record), colour in zip(records.items(), colours(len(records)), strict=True):
        line, (scale, _) = record.timeline, _unit(record)
        held = line.held()
        axes.stairs(held, np.arange(len(held) + 1) * line.width_s / scale, color=colour, label=name, baseline=None)
    axes.axhline(len(record.scenario.nodes), color="#555555", linestyle=":", linewidth=1)
    axes.set(
        ylabel="devices held", xlabel=_unit(record)[1], title=f"{record.scenario.name}: devices; dotted: the cluster"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, _end_s(records) / _unit(next(iter(records.values())))[0])
    axes.legend(fontsize=8)


def _waits(figure: Figure, records: Mapping[str, Record]) -> None:
    """Distributions of TTFT and TPOT over all applications."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, which, label in ((left, 0, "time to first token, s"), (right, 1, "time per output token, s")):
        for (name, record), colour in zip(records.items(), colours(len(records)), strict=True):
            histogram = (record.tallies.waits, record.tallies.paces)[which].sum(axis=0)
            known = np.flatnonzero(histogram)
            if len(known):
                axes.plot(edges_s()[known], np.cumsum(histogram)[known] / histogram.sum(), color=colour, label=name)
        axes.set(xscale="log", xlabel=label)
    left.set_ylabel("share of requests")
    left.legend(fontsize=8)


def _models(figure: Figure, records: Mapping[str, Record]) -> None:
    """Devices by model, one panel a policy; a model has one colour in all of them."""
    total: dict[str, float] = {}
    for record in records.values():
        for model, held in zip(record.timeline.models, record.timeline.shares().sum(axis=0).tolist(), strict=True):
            total[model] = total.get(model, 0.0) + held
    shown = sorted((m for m, held in total.items() if held > 0), key=lambda m: (-total[m], m))[:_LAYERS]
    panels = figure.subplots(len(records), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, record) in zip(panels, records.items(), strict=True):
        line, (scale, unit) = record.timeline, _unit(record)
        shares, at = line.shares(), {model: i for i, model in enumerate(line.models)}
        rest = shares.sum(axis=1) - sum((shares[:, at[m]] for m in shown), np.zeros(len(shares)))
        layers = [*(shares[:, at[m]] for m in shown), np.maximum(rest, 0.0)]
        hours = (np.arange(len(shares)) + 0.5) * line.width_s / scale
        axes.stackplot(
            hours, layers, labels=[*shown, "others"], colors=[*_COLOURS[: len(shown)], "#cccccc"], step="mid"
        )
        axes.set(title=name, ylabel="devices")
    panels[-1].set_xlabel(unit)
    panels[0].set_xlim(0, _end_s(records) / scale)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, ncols=5, loc="outside lower center")


def _cost(axes: Axes, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Up is more promises kept, left is fewer device-hours."""
    for (name, summary), colour in zip(found.items(), colours(len(found)), strict=True):
        kept = summary["attainment"]["of_all"]["overall"]
        if kept is None:
            continue
        hours = summary["devices"]["device_hours"]
        axes.plot([hours], [kept], marker="o", markersize=9, color=colour, linestyle="")
        axes.annotate(name, (hours, kept), textcoords="offset points", xytext=(9, -3), fontsize=9)
    axes.set(xlabel="device-hours", ylabel="share that kept its promise", title="what it costs")
    axes.margins(x=0.15)
    axes.set_xlim(left=0)


def _end_s(records: Mapping[str, Record]) -> float:
    """What comes long after the trace would squash the rest."""
    ends = [(record.closed_s or 0.0, record.scenario.duration_s) for record in records.values()]
    return max(min(closed_s, 1.25 * duration_s) for closed_s, duration_s in ends) or 1.0


def _unit(record: Record) -> tuple[float, str]:
    """Seconds of one, and its name."""
    return (3600.0, "hour") if record.scenario.duration_s >= 7200.0 else (1.0, "second")


def colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
