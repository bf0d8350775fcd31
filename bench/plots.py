"""Pictures of a run as PNG files: how TTFT and TPOT are distributed, and attainment and throughput over time.

`serve` calls `draw` at the end when `--plot DIR` was given. matplotlib is imported here alone, with its Agg canvas and
without pyplot, whose state is global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from janus_server.errors import BadConfig

from . import stats
from .records import Application, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Eight colours that stay apart for colour-blind readers too (Okabe and Ito). More applications are pooled.
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#888888", "#f0e442")
_WINDOWS: Final = 60
_MIN_WINDOW_S: Final = 1.0


def draw(folder: Path, outcomes: Sequence[Outcome], apps: Sequence[Application]) -> list[Path]:
    """The files written: ttft_cdf, tpot_cdf, throughput, and attainment when something is promised."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    groups = grouped(outcomes, apps)
    pictures: list[tuple[str, Callable[[Figure], None]]] = [
        ("ttft_cdf", lambda f: _cdf(f.add_subplot(), groups, "ttft", "time to first token, ms")),
        ("tpot_cdf", lambda f: _cdf(f.add_subplot(), groups, "tpot", "time per output token, ms")),
        ("throughput", lambda f: _throughput(f, outcomes)),
    ]
    if any(not app.slo.empty for app in apps):
        pictures.append(("attainment", lambda f: _attainment(f.add_subplot(), groups)))
    written = []
    for name, paint in pictures:
        figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
        paint(figure)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.png"
        figure.savefig(path, format="png")
        written.append(path)
    return written


def grouped(outcomes: Sequence[Outcome], apps: Sequence[Application]) -> dict[str, list[Outcome]]:
    """By application, the busiest first; those beyond the colours go into one group of the rest."""
    by_name: dict[str, list[Outcome]] = {app.name: [] for app in apps}
    for outcome in outcomes:
        by_name[outcome.plan.app.name].append(outcome)
    ordered = sorted(by_name.items(), key=lambda item: -len(item[1]))
    if len(ordered) <= len(_COLOURS):
        return dict(ordered)
    shown, rest = ordered[: len(_COLOURS) - 1], ordered[len(_COLOURS) - 1 :]
    return {**dict(shown), f"{len(rest)} others": [o for _, group in rest for o in group]}


def attainment_over_time(outcomes: Sequence[Outcome], edges_s: np.ndarray) -> np.ndarray:
    """[windows] share of the requests sent in each window that kept their promise; NaN where none was sent."""
    pairs = [(o.start_s, stats.kept(o, o.plan.app.slo).get("overall")) for o in outcomes]
    pairs = [(t, holds) for t, holds in pairs if holds is not None]
    times = np.array([t for t, _ in pairs])
    sent, _ = np.histogram(times, edges_s)
    held, _ = np.histogram(times, edges_s, weights=np.array([float(bool(h)) for _, h in pairs]))
    with np.errstate(invalid="ignore"):
        return np.where(sent > 0, held / np.maximum(sent, 1), np.nan)


def windows(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Edges of equal windows over the run, of a second or more."""
    end_s = max((o.end_s for o in outcomes), default=1.0)
    width_s = max(_MIN_WINDOW_S, end_s / _WINDOWS)
    return np.arange(0.0, end_s + width_s, width_s)


def _cdf(axes: Axes, groups: dict[str, list[Outcome]], metric: str, label: str) -> None:
    for (name, group), colour in zip(groups.items(), _COLOURS, strict=False):
        ms = np.sort(stats.values_s(group, metric)) * 1e3
        if not len(ms):
            continue
        axes.step(ms, np.arange(1, len(ms) + 1) / len(ms), where="post", color=colour, label=f"{name} ({len(ms)})")
        slo = group[0].plan.app.slo
        limit_s = slo.ttft_s if metric == "ttft" else slo.tpot_s
        if limit_s is not None and not name.endswith(" others"):
            axes.axvline(limit_s * 1e3, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.01)
    _scale(axes)
    _legend(axes)


def _throughput(figure: Figure, outcomes: Sequence[Outcome]) -> None:
    edges_s = windows(outcomes)
    times, weights = stats.token_times_s(outcomes)
    width_s = edges_s[1] - edges_s[0]
    tokens, _ = np.histogram(times, edges_s, weights=weights)
    sent, _ = np.histogram(np.array([o.start_s for o in outcomes]), edges_s)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, counts, colour, label in (
        (upper, tokens, _COLOURS[0], "output tokens / s"),
        (lower, sent, _COLOURS[5], "requests sent / s"),
    ):
        axes.stairs(counts / width_s, edges_s, color=colour, fill=True, alpha=0.7)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    lower.set_xlabel("seconds since the start")


def _attainment(axes: Axes, groups: dict[str, list[Outcome]]) -> None:
    everything = [o for group in groups.values() for o in group]
    edges_s = windows(everything)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    for (name, group), colour in zip(groups.items(), _COLOURS, strict=False):
        shares = attainment_over_time(group, edges_s)
        # Windows without a request are gaps; the points keep single windows visible.
        axes.plot(middles_s, shares, color=colour, marker=".", label=name)
    wanted = {o.plan.app.slo.attain for o in everything if not o.plan.app.slo.empty}
    for share in sorted(wanted):
        axes.axhline(share, color="#555555", linestyle=":", linewidth=1)
    axes.set_xlabel("seconds since the start (when sent)")
    axes.set_ylabel("share that kept its promise")
    axes.set_ylim(-0.02, 1.02)
    _legend(axes)


def _scale(axes: Axes) -> None:
    """Logarithmic when the values span more than two orders of magnitude."""
    low, high = axes.dataLim.intervalx
    if low > 0 and high / low > 100:
        axes.set_xscale("log")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
