"""Pictures of packing: devices over a day, how long decisions take, and cost against applications and devices.

`bench.packing` draws them where `--plot DIR` was given. matplotlib is imported here alone, with its Agg canvas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from janus_server.errors import BadConfig

if TYPE_CHECKING:
    from .packing import Scale, Tick


def draw(folder: Path, days: Mapping[str, Sequence[Tick]], scales: Sequence[Scale]) -> list[Path]:
    """The files written: packing_SHAPE for each day, packing_scale where there is one."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, ticks in days.items():
        figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
        top, bottom = figure.subplots(2, 1)
        hours = np.array([t.step for t in ticks]) / 120
        top.step(hours, [t.used for t in ticks], label="devices used", color="#0072b2")
        top.step(hours, [t.bound for t in ticks], label="bound", color="#009e73", linestyle="--")
        top.step(hours, [t.volume for t in ticks], label="volume", color="#888888", linestyle=":")
        top.set(title=f"packing, {name}", xlabel="hour", ylabel="devices")
        top.legend()
        ours = np.sort([1e3 * t.seconds for t in ticks])
        bottom.plot(ours, np.arange(1, len(ours) + 1) / len(ours), label="decision", color="#0072b2")
        exact = np.sort([1e3 * t.exact_s for t in ticks if t.exact_s is not None])
        if len(exact):
            bottom.plot(exact, np.arange(1, len(exact) + 1) / len(exact), label="CP-SAT", color="#d55e00")
        bottom.set(xscale="log", xlabel="milliseconds", ylabel="share of ticks")
        bottom.legend()
        written.append(folder / f"packing_{name}.png")
        figure.savefig(written[-1], format="png")
    if scales:
        figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        for devices in sorted({s.devices for s in scales}):
            row = [s for s in scales if s.devices == devices]
            axes.plot([s.apps for s in row], [s.tick_ms for s in row], marker="o", label=f"a tick, {devices} devices")
            axes.plot([s.apps for s in row], [s.cold_ms for s in row], marker="x", linestyle=":", alpha=0.6,
                      label=f"from nothing, {devices}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="models", ylabel="milliseconds", title="a packing decision")
        axes.legend(fontsize=7, ncols=2)
        written.append(folder / "packing_scale.png")
        figure.savefig(written[-1], format="png")
    return written
