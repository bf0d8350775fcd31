"""Pictures of live runs beside simulated ones: replicas over time, and requests on time.

`live` draws them where `--plot DIR` was given. matplotlib is imported here alone, with its Agg canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from janus_server.errors import BadConfig

from .live import burst_s, cores, since_s
from .live_run import Ran, attainment, on_time, replicas
from .simulator.records import Scenario

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_BIN_S: Final = 3.0


def draw(folder: Path, kind: str, ran: Sequence[Ran], asked: Scenario) -> list[Path]:
    """The file written: live_KIND.png."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 8 if kind != "dispatch" else 4.5), dpi=110, layout="constrained")
    if kind == "dispatch":
        _bars(figure.add_subplot(), ran, asked)
    else:
        _over_time(figure, kind, ran, asked)
    figure.supxlabel(_caption(ran), fontsize=8)
    path = folder / f"live_{kind}.png"
    figure.savefig(path, format="png")
    return [path]


def _caption(ran: Sequence[Ran]) -> str:
    took = [cores(one)[0] for one in ran if one.busy]
    return (
        "live nodes are paced: real processes and small models, device time as the simulator's; nodes and clients took "
        f"{' and '.join(f'{one:.2f}' for one in took)} of this machine's cores on average"
    )


def _over_time(figure: Any, kind: str, ran: Sequence[Ran], asked: Scenario) -> None:
    """A row for each model's replicas (of a burst, the bursting one's), and one for the share on time."""
    models = [spec.known.model for spec in asked.models]
    busiest = max(range(len(asked.apps)), key=lambda i: sum(one.app == i for one in ran[0].answers))
    if kind == "burst":
        models = [asked.apps[busiest].model]
    rows = figure.subplots(len(models) + 1, 1, sharex=True)
    end_s = max(one.answers[-1].at_s for one in ran)
    times = np.arange(0.0, end_s, 0.1).tolist()
    for axes, model in zip(rows, models, strict=False):
        for number, one in enumerate(ran):
            counts = replicas(one.moved, model, times)
            axes.step(times, np.array(counts) + 0.03 * number, where="post", label=one.name, **_style(number, one))
        axes.set(ylabel=f"replicas of\n{model}", ylim=(-0.1, len(asked.nodes) + 0.3))
        axes.set_yticks(range(len(asked.nodes) + 1))
    rows[0].legend(fontsize=8, loc="upper left", ncols=len(ran))
    bin_s = _BIN_S if kind == "burst" else 10 * _BIN_S
    for number, one in enumerate(ran):
        at, share = _shares(one, asked, bin_s, busiest if kind == "burst" else None)
        rows[-1].plot(at, share, label=one.name, **_style(number, one))
    rows[-1].set(xlabel="seconds", ylabel=f"on time,\nin {bin_s:g} s", ylim=(-0.05, 1.05))
    began_s = burst_s(asked)
    for axes in rows:
        axes.grid(alpha=0.3)
        axes.axvspan(0.0, since_s(asked), color="#888888", alpha=0.15)
        if kind == "burst" and began_s is not None:
            axes.axvspan(began_s, began_s + 31.0, color="#d55e00", alpha=0.12)


def _style(number: int, ran: Ran) -> dict[str, Any]:
    simulated = not ran.busy
    return {"color": _COLOURS[number // 2], "linestyle": "--" if simulated else "-", "alpha": 0.9, "linewidth": 1.4}


def _shares(ran: Ran, asked: Scenario, bin_s: float, app: int | None) -> tuple[list[float], list[float]]:
    """By when requests came."""
    kept = [one for one in ran.answers if app is None or one.app == app]
    bins: dict[int, list[bool]] = {}
    for one in kept:
        bins.setdefault(int(one.at_s / bin_s), []).append(on_time(one, asked.apps[one.app]))
    return [(i + 0.5) * bin_s for i in sorted(bins)], [sum(bins[i]) / len(bins[i]) for i in sorted(bins)]


def _bars(axes: Any, ran: Sequence[Ran], asked: Scenario) -> None:
    names = ["all", *(app.name for app in asked.apps)]
    width = 0.8 / len(ran)
    for number, one in enumerate(ran):
        shares = attainment(one.answers, asked.apps, since_s(asked))
        at = np.arange(len(names)) + (number - (len(ran) - 1) / 2) * width
        bars = axes.bar(at, [shares[name] for name in names], width, label=one.name, color=_COLOURS[number // 2],
                        alpha=0.45 if not one.busy else 0.95, hatch="//" if not one.busy else None)  # fmt: skip
        axes.bar_label(bars, [f"{100 * shares[name]:.0f}" for name in names], fontsize=7)
    axes.set_xticks(range(len(names)), names)
    least = min(share for one in ran for share in attainment(one.answers, asked.apps, since_s(asked)).values())
    axes.set(ylabel="share of requests on time", ylim=(max(0.0, np.floor(20 * least - 1) / 20), 1.02))
    axes.legend(fontsize=8, ncols=2, loc="lower right")
    axes.grid(alpha=0.3, axis="y")
