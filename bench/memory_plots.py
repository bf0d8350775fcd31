"""Pictures of the memory benches, one a part. `memory` calls `draw`; matplotlib is imported here alone, with Agg."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from janus_server.errors import BadConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Three that stay apart for colour-blind readers too (Okabe and Ito).
_BLUE, _RED, _GREEN = "#0072b2", "#d55e00", "#009e73"


def draw(path: Path, part: str, figures: Mapping[str, Any]) -> None:
    """Write the part's picture as PNG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BadConfig("the picture needs matplotlib; run: pip install 'janus-server[bench]'") from None
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    _PAINTERS[part](figure, figures)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _density(figure: Figure, found: Mapping[str, Any]) -> None:
    axes = figure.add_subplot()
    rows = found["by services a model"]
    counts = range(1, len(rows) + 1)
    for way, colour, mark in zip(found["published"], (_BLUE, _RED, _GREEN), ("o", "s", "x"), strict=True):
        axes.plot([3 * n for n in counts], [row[way] for row in rows], color=colour, marker=mark, label=way)
    axes.axvline(12, color="#888888", linestyle=":", linewidth=1)
    axes.set(xlabel="services on three base models", ylabel="devices of 48 GB", ylim=(0, None))
    axes.legend()


def _borrowing(figure: Figure, found: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(found["periods"]), sharey=True, squeeze=False)[0]
    for axes, (period, sides) in zip(panels, found["periods"].items(), strict=True):
        for (side, one), colour in zip(sides.items(), (_BLUE, _RED), strict=True):
            ms = 1e3 * np.array(one["ttfts_s"])
            axes.step(ms, np.arange(1, len(ms) + 1) / one["requests"], where="post", color=colour,
                      label=f"{side}: {one['attained']:.0%} attained")  # fmt: skip
        axes.axvline(1e3 * found["slo"]["ttft_s"], color="#888888", linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="time to first token, ms", title=f"a burst every {period} s", ylim=(0, 1.01))
        axes.legend(fontsize=7)
    panels[0].set_ylabel("share of requests")


def _churn(figure: Figure, found: Mapping[str, Any]) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    for (period, one), colour in zip(found["periods"].items(), (_BLUE, _RED, _GREEN), strict=True):
        minutes = [row["second"] / 60 for row in one["samples"]]
        upper.plot(minutes, [100 * row["contiguous"] for row in one["samples"]], color=colour, linewidth=0.8,
                   alpha=0.6, label=f"every {period} s: were runs needed")  # fmt: skip
        upper.plot(minutes, [100 * row["external"] for row in one["samples"]], color=colour, linewidth=2)
        lower.plot([at / 60 for at, *_ in one["extents"]], [count for _, count, _ in one["extents"]], ".", color=colour,
                   markersize=3, label=f"every {period} s")  # fmt: skip
    upper.axhline(0.3, color="#888888", linestyle=":", linewidth=1)
    upper.set(yscale="symlog", ylabel="external, % of the pool")
    lower.set(yscale="log", xlabel="minutes", ylabel="extents of a weight copy")
    upper.legend(fontsize=7)
    lower.legend(fontsize=7)


def _together(figure: Figure, found: Mapping[str, Any]) -> None:
    axes = figure.add_subplot()
    axes.plot(range(1, len(found["ups_s"]) + 1), found["ups_s"], color=_BLUE, marker="o")
    axes.set(xlabel="round", ylabel="five models up and answered, s", ylim=(0, None))


_PAINTERS: Final[Mapping[str, Callable[[Figure, Mapping[str, Any]], None]]] = {
    "density": _density, "borrowing": _borrowing, "churn": _churn, "together": _together,
}  # fmt: skip
