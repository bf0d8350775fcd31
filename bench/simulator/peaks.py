"""How many replicas each model of a scenario takes at its peak: read off its calls before the day, by the roofline.

`static` is provisioned by it. The calls are read once, in bounded memory; each half minute of each model becomes one
row, and the leader's own prior says how many replicas keep the promise at that traffic on devices of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from janus_server.sched.oracle_prior import expect, physics_and_limits, traffic_of
from janus_server.sched.oracle_records import Promise, Subject

from .records import AppSpec, Call, ModelSpec, Scenario

# As long as the leader's own observations.
WINDOW_S: Final = 30.0
# Where no number keeps the promise, a replica is to be so busy at most.
_BUSY_MOST: Final = 0.5


class _Sums:
    """Of one model's calls in one window."""

    __slots__ = ("input", "input_square", "output", "output_square", "requests")

    def __init__(self) -> None:
        self.requests = self.input = self.input_square = self.output = self.output_square = 0


def needs(scenario: Scenario) -> dict[str, int]:
    """Replicas by model, 0 for those that no call is for; at most as many as there are nodes for them."""
    models = {spec.known.model: spec for spec in scenario.models}
    windows = windows_of(scenario.calls, scenario.apps)
    found = {}
    for model, spec in models.items():
        rows = windows.get(model)
        most = max(1, len(scenario.nodes) // spec.known.shards)
        subject = subject_of(scenario, spec)
        attain = max((app.attain for app in scenario.apps if app.model == model), default=0.0)
        found[model] = 0 if rows is None or subject is None else replicas_for(rows, subject, attain, most)
    return found


def subject_of(scenario: Scenario, spec: ModelSpec) -> Subject | None:
    """The model on devices of its own, with the strictest promise of its applications; None where it has none."""
    apps = [app for app in scenario.apps if app.model == spec.known.model]
    if not apps or not scenario.nodes:
        return None
    promise = Promise(min(app.ttft_s for app in apps), min(app.tpot_s for app in apps))
    return Subject(model=spec.shape, device=scenario.nodes[0].shape, promise=promise, shards=spec.known.shards)


def windows_of(calls: Iterable[Call], apps: Sequence[AppSpec]) -> dict[str, npt.NDArray[np.float64]]:
    """By model, a row for each window with calls: as `Features`, [windows, 6]."""
    names = [app.model for app in apps]
    rows: dict[str, list[tuple[float, ...]]] = {}
    sums: dict[str, _Sums] = {}
    until_s = WINDOW_S
    for _, at_s, app, given, answered in calls:
        if at_s >= until_s:
            _close(sums, rows)
            until_s = (at_s // WINDOW_S + 1.0) * WINDOW_S
        one = sums.get(names[app])
        if one is None:
            one = sums[names[app]] = _Sums()
        one.requests += 1
        one.input += given
        one.input_square += given * given
        one.output += answered
        one.output_square += answered * answered
    _close(sums, rows)
    return {model: np.array(found, dtype=np.float64) for model, found in rows.items()}


def _close(sums: dict[str, _Sums], rows: dict[str, list[tuple[float, ...]]]) -> None:
    for model, one in sums.items():
        n, given, answered = one.requests, one.input / one.requests, one.output / one.requests
        row = ((one.input + one.output) / WINDOW_S, n / WINDOW_S, given, max(0.0, one.input_square / n - given**2),
               answered, max(0.0, one.output_square / n - answered**2))  # fmt: skip
        rows.setdefault(model, []).append(row)
    sums.clear()


def replicas_for(rows: npt.NDArray[np.float64], subject: Subject, attain: float, most: int) -> int:
    """The fewest that keep the promise in every window [windows, 6], or that leave devices half idle where none does.

    At least 1, at most `most`.
    """
    physics, limits = physics_and_limits([subject])
    open_rows, count = rows, 0
    while len(open_rows) and count < most:
        count += 1
        prior = expect(physics, limits, traffic_of(open_rows, np.full((len(open_rows), 1), float(count))))
        share = 1.0 / (1.0 + np.exp(-prior.log_odds[:, 0]))
        calm = prior.shares[:, 0, :].max(axis=-1) <= _BUSY_MOST
        open_rows = open_rows[~((share >= attain) | calm)]
    return max(1, count)
