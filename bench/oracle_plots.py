"""Pictures of the oracle: how often truths lie in the band, how far off the prior is, and what fits and ticks cost.

`bench.oracle` draws them where `--plot DIR` was given. matplotlib is imported here alone, with its Agg canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from janus_server.errors import BadConfig
from janus_server.sched.oracle_records import OUTPUTS

from .oracle_speed import Speed

if TYPE_CHECKING:
    from .oracle import Trial

_COLOURS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7")


def draw(folder: Path, trials: Sequence[Trial], speed: Speed) -> list[Path]:
    """The files written: oracle_SCENARIO for each kind of traffic, oracle_cost."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for scenario in dict.fromkeys(t.scenario for t in trials):
        figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
        _draw_trials(figure, scenario, [t for t in trials if t.scenario == scenario])
        written.append(folder / f"oracle_{scenario}.png")
        figure.savefig(written[-1], format="png")
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    _draw_cost(figure, speed)
    written.append(folder / "oracle_cost.png")
    figure.savefig(written[-1], format="png")
    return written


def _draw_trials(figure: Any, scenario: str, trials: Sequence[Trial]) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True)
    at = np.arange(len(trials))
    for k, name in enumerate((*OUTPUTS, "attainment")):
        inside = [100 * (t.covered[k] if k < len(OUTPUTS) else t.attainment_covered) for t in trials]
        top.plot(at + 0.15 * (k - 1.5), inside, "o", color=_COLOURS[k], label=name)
        if k < len(OUTPUTS):
            bottom.plot(at + 0.15 * (k - 1), [t.prior_ratio[k] for t in trials], "o", color=_COLOURS[k], label=name)
    top.axhspan(85, 95, color="#999999", alpha=0.25)
    top.set(title=f"{scenario} traffic", ylabel="% of truths in the 90 % band", ylim=(50, 101))
    top.legend(ncols=4, fontsize=8)
    bottom.axhspan(0.5, 2.0, color="#999999", alpha=0.25)
    bottom.set(yscale="log", ylabel="truth over the prior, median", xticks=at)
    bottom.set_xticklabels([t.model for t in trials], rotation=40, ha="right", fontsize=8)
    bottom.legend(ncols=3, fontsize=8)


def _draw_cost(figure: Any, speed: Speed) -> None:
    left, right = figure.subplots(1, 2)
    sizes = [f.points for f in speed.fits]
    left.plot(sizes, [f.cold_s for f in speed.fits], "o-", color=_COLOURS[2], label="the first")
    left.plot(sizes, [f.warm_s for f in speed.fits], "o-", color=_COLOURS[0], label="from the last one")
    left.set(xscale="log", yscale="log", xlabel="observations", ylabel="seconds", title="fitting one model")
    left.legend()
    models = [t.models for t in speed.ticks]
    right.plot(models, [t.changed_ms for t in speed.ticks], "o-", color=_COLOURS[0], label="attainment, all changed")
    right.plot(models, [t.unchanged_ms for t in speed.ticks], "o-", color=_COLOURS[1], label="none changed")
    right.plot(models, [t.demand_ms for t in speed.ticks], "o-", color=_COLOURS[2], label="demands")
    right.set(xscale="log", yscale="log", xlabel="models", ylabel="milliseconds", title="asking")
    right.legend()
