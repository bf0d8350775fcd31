"""The shape of the trace `workload62` in some hundred numbers, from which the generator draws others like it.

`janus bench workload --derive` prints them as TOML; `simulator/shape62.toml` is what it printed. They are aggregates:
a daily curve and quantiles for each class of service, and a mean, a spread and a variability for each application.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from janus_server.errors import BadConfig

from .traces import open_text

QUANTILES: Final = (
    0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0,
)  # fmt: skip
_DAY_S, _WINDOW_S = 86_400.0, 600.0
# Of each application's requests, so that one that has most does not set the quantiles of its class.
_SAMPLE: Final = 2000
Rows = npt.NDArray[np.int64]


def derive(folder: Path, clients: Path) -> str:
    """From the folder workload62, and ServeGen's clients.csv for how irregular their arrivals are."""
    try:
        with open_text(folder / "apps.csv") as file:
            apps = list(csv.DictReader(file))
        with open_text(folder / "requests.csv.gz") as file:
            rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
        with open_text(clients) as file:
            cv = {(row["model"], row["client"]): float(row["cv_median"] or 1.0) for row in csv.DictReader(file)}
    except (KeyError, ValueError) as error:
        raise BadConfig(f"{folder}: not the trace workload62 ({error})") from None
    mine = [rows[rows[:, 1] == i] for i in range(len(apps))]
    lines = [f"quantiles = {list(QUANTILES)}"]
    curves: dict[str, npt.NDArray[np.float64]] = {}
    for name in dict.fromkeys(app["servegen_model"] for app in apps):
        members = [mine[i] for i, app in enumerate(apps) if app["servegen_model"] == name]
        curves[name] = np.mean([_hours(part) for part in members], axis=0)
        lines += ["", f"[classes.{name}]", f"hours = {_list(curves[name], 3)}"]
        lines += [f"{what} = {_list(_spread(members, column), 3)}" for what, column in (("input", 2), ("output", 3))]
    lines += ["", "[apps]", "rows = ["]
    lines += [f"  {row}," for row in _apps(apps, mine, curves, cv)]
    return "\n".join([*lines, "]", ""])


def _apps(apps: Sequence[Mapping[str, str]], mine: Sequence[Rows], curves: Mapping[str, npt.NDArray[np.float64]],
          cv: Mapping[tuple[str, str], float]) -> Iterator[str]:  # fmt: skip
    for app, rows in zip(apps, mine, strict=True):
        kind = app["servegen_model"]
        varies = min(max(cv[kind, app["servegen_client"]], 0.7), 2.0)
        numbers = [*_moments(rows[:, 2]), *_moments(rows[:, 3]), varies, _wobble(rows, curves[kind])]
        promise = (float(app["ttft_slo_s"]), float(app["tpot_slo_ms"]) / 1e3)
        shown = ", ".join(f"{number:.4g}" for number in (*numbers, *promise))
        yield f'["{app["llm"]}", "{kind}", {shown}, {app["bursty"]}]'


def _hours(rows: Rows) -> npt.NDArray[np.float64]:
    """[24] of mean 1."""
    counts = np.bincount(rows[:, 0] // 3_600_000, minlength=24)
    return np.asarray(counts / counts.mean())


def _moments(lengths: Rows) -> tuple[float, float]:
    """The mean, and the standard deviation of logarithms."""
    return float(lengths.mean()), float(np.log(lengths).std())


def _spread(members: Sequence[Rows], column: int) -> npt.NDArray[np.float64]:
    """Quantiles of the logarithms of lengths, each application's shifted and scaled to mean 0 and deviation 1."""
    parts = []
    for rows in members:
        logs = np.log(rows[:: max(1, len(rows) // _SAMPLE), column])
        if logs.std() > 0.0:
            parts.append((logs - logs.mean()) / logs.std())
    weights = np.concatenate([np.full(len(part), 1.0 / len(part)) for part in parts])
    values = np.concatenate(parts)
    order = np.argsort(values, kind="stable")
    reached = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return np.asarray(np.interp(QUANTILES, reached, values[order]))


def _wobble(rows: Rows, hours: npt.NDArray[np.float64]) -> float:
    """How far ten minutes' rates stray from the curve of its class, as a deviation of logarithms; chance left out."""
    counts = np.bincount(rows[:, 0] // int(1e3 * _WINDOW_S), minlength=int(_DAY_S / _WINDOW_S))
    expected = np.repeat(hours, int(3600 / _WINDOW_S)) * counts.mean()
    ratio = counts / np.maximum(expected, 0.5)
    square = float(np.mean((ratio - 1.0) ** 2) - np.mean(1.0 / np.maximum(expected, 0.5)))
    return min(float(np.sqrt(np.log1p(max(square, 0.0)))), 1.0)


def _list(values: npt.NDArray[np.float64], digits: int) -> str:
    return str([round(float(value), digits) for value in values])
