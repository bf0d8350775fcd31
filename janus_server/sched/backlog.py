"""When a device will be done with the prefills it was given: predicted at dispatch, corrected by what happened.

One `Backlog` per device, over all its models, since they share the device; its `start_s` is a `Machine`'s. `Cadence`
says when to plan next. Pure: both are owned by whoever holds the devices' state, and are told the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import msgspec

from janus_server.errors import require

# Each finished prefill weighs this much less with every one after it; before any, a second of exact ones is assumed.
_FADE: Final = 0.95
_TRUSTED_S: Final = 1.0
# A device that is yet slower or faster is no longer described by a factor: its predictor needs to learn.
_MOST_CORRECTION: Final = 4.0


class Backlog(msgspec.Struct):
    """Prefills given to one device and not yet done, in the order given.

    Example: after given("a", 2.0, now_s=10.0) and given("b", 1.0, now_s=10.0) the device is expected to be free at
    13.0. When a is done at 12.5, half a second late, b is expected for 13.67: a second, times what a predicted second
    now takes, (0.95 + 2.5) / (0.95 + 2).
    """

    work_s: dict[str, float] = {}
    since_s: float = 0.0  # when the first of them began
    took_s: float = _TRUSTED_S
    predicted_s: float = _TRUSTED_S

    def __len__(self) -> int:
        return len(self.work_s)

    @property
    def correction(self) -> float:
        """What a predicted second has lately taken, between 1/4 and 4."""
        return min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, self.took_s / self.predicted_s))

    def start_s(self, now_s: float) -> float:
        """When the device is expected to be free for one more prefill; never before now."""
        if not self.work_s:
            return now_s
        *_, end_s = self._ends_s(now_s)  # none ends before the one ahead of it
        return end_s

    def expected_s(self, now_s: float) -> tuple[tuple[str, float], ...]:
        """When each prefill is expected to be done. One that is overdue may be done any moment; those after it wait."""
        return tuple(zip(self.work_s, self._ends_s(now_s), strict=True))

    def _ends_s(self, now_s: float) -> Iterator[float]:
        end_s, correction = self.since_s, self.correction
        for work_s in self.work_s.values():
            end_s = max(now_s, end_s + correction * work_s)
            yield end_s

    def given(self, job: str, work_s: float, now_s: float) -> None:
        """The job was handed over; work_s is its predicted prefill time as the predictor gave it."""
        require(job not in self.work_s, f"{job} was given to the device twice")
        require(0 <= work_s < math.inf, "a predicted prefill time is out of range")
        if not self.work_s:
            self.since_s = now_s
        self.work_s[job] = work_s

    def finished(self, job: str, now_s: float) -> None:
        """The job's prefill is done. It may be another than the first: models take turns on a device.

        Of a job that is not here (a finish may cross a cancel) nothing is learnt.
        """
        if job not in self.work_s:
            return
        ahead = list(itertools.takewhile(lambda other: other != job, self.work_s))
        work_s = self.work_s.pop(job)
        took_s = now_s - self.since_s
        self.since_s = now_s
        if not ahead:
            self.took_s = _FADE * self.took_s + took_s
            self.predicted_s = _FADE * self.predicted_s + work_s
            return
        # The time that this job did not need went to those before it. How fast it went cannot be told apart.
        spare_s = max(0.0, took_s / self.correction - work_s)
        for other in ahead:
            share_s = min(spare_s, self.work_s[other])
            self.work_s[other] -= share_s
            spare_s -= share_s

    def cancelled(self, job: str, now_s: float) -> None:
        """The job will not be run, or not to its end; if it was the first, the next one begins now."""
        if next(iter(self.work_s), None) == job:
            self.since_s = now_s
        self.work_s.pop(job, None)


class Cadence(msgspec.Struct):
    """At most one plan every spacing_s, none while nothing happens; the first event after a pause is planned at once.

    A burst of 500 arrivals within a spacing is two plans, not 500. Example with spacing_s=0.005: changed(1.0) is due at
    1.0; after planned(1.0), changed(1.001) and changed(1.002) are both due at 1.005.
    """

    spacing_s: float
    changed_s: float | None = None
    planned_s: float | None = None

    def __post_init__(self) -> None:
        require(self.spacing_s >= 0, "a spacing of plans is negative")

    def changed(self, now_s: float) -> None:
        """Something a plan depends on happened: an arrival, a prefill done, a cancel, a machine more or less."""
        self.changed_s = now_s if self.changed_s is None else min(self.changed_s, now_s)

    def due_s(self) -> float:
        """When to plan; infinite while nothing has changed since the last plan."""
        if self.changed_s is None:
            return math.inf
        return self.changed_s if self.planned_s is None else max(self.changed_s, self.planned_s + self.spacing_s)

    def planned(self, now_s: float) -> None:
        self.changed_s = None
        self.planned_s = now_s
