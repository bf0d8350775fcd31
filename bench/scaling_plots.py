"""Pictures of scaling: replicas and what they had to serve over time, and cost against models and devices.

`bench.scaling` draws them where `--plot DIR` was given. matplotlib is imported here alone, with its Agg canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from janus_server.errors import BadConfig

if TYPE_CHECKING:
    from .scaling import Cost, Row

_SHOWN = 4


def draw(folder: Path, rows: Sequence[Row], costs: Sequence[Cost]) -> list[Path]:
    """The files written: scaling_burst.png and scaling_cost.png, as far as there is something to draw."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if rows:
        figure = Figure(figsize=(10, 9), dpi=110, layout="constrained")
        _burst(figure, rows)
        written.append(folder / "scaling_burst.png")
        figure.savefig(written[-1], format="png")
    if costs:
        figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        at = [c.devices for c in costs]
        named = (
            ("tick, all changed", [c.changed_ms for c in costs]),
            ("tick, unchanged", [c.unchanged_ms for c in costs]),
            ("rollout", [c.roll_ms for c in costs]),
            ("plan, a twentieth moves", [c.plan_ms for c in costs]),
        )
        for name, values in named:
            axes.plot(range(len(at)), values, marker="o", label=name)
        axes.set_xticks(range(len(at)), [f"{c.models}\n{c.devices}" for c in costs])
        axes.set(yscale="log", xlabel="models / devices", ylabel="milliseconds", title="what deciding costs")
        axes.legend(fontsize=8)
        written.append(folder / "scaling_cost.png")
        figure.savefig(written[-1], format="png")
    return written


def _burst(figure: Any, rows: Sequence[Row]) -> None:
    """The models whose demand varied most: what was needed, what was ready, what was aimed at, and what waited."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(row.model, []).append(row)
    spread = {name: max(r.demand for r in mine) - min(r.demand for r in mine) for name, mine in by.items()}
    shown = sorted(by, key=lambda name: -spread[name])[:_SHOWN]
    for axes, name in zip(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True):
        at = [row.at_s for row in by[name]]
        axes.plot(at, [row.demand for row in by[name]], label="demand, in replicas", color="#888888")
        axes.step(at, [row.ready for row in by[name]], where="post", label="ready", color="#0072b2")
        axes.step(at, [row.target for row in by[name]], where="post", label="target", color="#009e73", linestyle="--")
        axes.fill_between(at, [row.backlog_s for row in by[name]], label="backlog, replica-seconds", color="#d55e00",
                          alpha=0.4)  # fmt: skip
        axes.set(title=name, ylabel="replicas")
    axes.set_xlabel("seconds")
    figure.axes[0].legend(fontsize=7, ncols=4)
