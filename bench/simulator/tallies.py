"""What came of requests, counted: per application and hour, per second of the run, and how long they waited.

`recorder` hands over outcomes in batches, `summary` reads the arrays. Memory depends on applications and on the length
of the run, never on the number of requests. Lengths of time are kept in buckets that are 2 % wide, so that a percentile
is within 1 % of the true one; means and maxima are exact. All times count by when a request came.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from .records import Outcome, Scenario

HOUR_S: Final = 3600.0
_SMALLEST_S: Final = 1e-4
_RATIO: Final = 1.02
_BUCKETS: Final = 932  # up to 10,000 s
# Beyond so many seconds a "second" of the run is wider.
_MOST_SECONDS: Final = 1_000_000
_HEAT_COLUMNS: Final = 240
_LATEST: Final = 40
_REASONS: Final = 64


class Part(IntEnum):
    """What is counted of requests: who came, who got all tokens, whose first token was on time (of all, of those that
    ended), whose later ones were, and both."""

    CAME = 0
    ENDED = 1
    TTFT = 2
    TTFT_ENDED = 3
    TPOT = 4
    GOOD = 5


class Late(NamedTuple):
    """A request that missed its promise; times_over is by how many times it missed the worse of the two."""

    times_over: float
    id: int
    at_s: float
    app: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    node: str


class Reason(NamedTuple):
    """Why requests did not end: how many, and one of them."""

    requests: int
    example: int


class Tallies:
    """counts [applications, hours, parts], seconds [seconds, parts], heat [applications, columns, 2: came, good];
    waits and paces are histograms [applications, buckets] of TTFT and TPOT. Requests that came before since_s are left
    out of everything."""

    def __init__(self, scenario: Scenario, since_s: float = 0.0) -> None:
        apps, span_s = len(scenario.apps), max(1.0, scenario.duration_s)
        self._since_s = since_s
        self.hours = max(1, math.ceil(span_s / HOUR_S))
        self.second_s = max(1.0, span_s / _MOST_SECONDS)
        self.column_s = max(1.0, span_s / _HEAT_COLUMNS)
        self.counts = np.zeros((apps, self.hours, len(Part)), np.int64)
        self.seconds = np.zeros((math.ceil(span_s / self.second_s), len(Part)), np.int32)
        self.heat = np.zeros((apps, math.ceil(span_s / self.column_s), 2), np.int32)
        self.waits = np.zeros((apps, _BUCKETS), np.int64)
        self.paces = np.zeros((apps, _BUCKETS), np.int64)
        self.sums_s = np.zeros((apps, 2))
        self.most_s = np.zeros((apps, 2))
        self.tokens = np.zeros((apps, 4), np.int64)  # in, out, out of those that ended, of the good
        self.reasons: dict[str, Reason] = {}
        self._ttft_s = np.array([app.ttft_s for app in scenario.apps])
        self._tpot_s = np.array([app.tpot_s for app in scenario.apps])
        self._latest: list[Late] = []

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """A batch; the arrays are true again when it returns."""
        if self._since_s > 0.0:
            outcomes = [outcome for outcome in outcomes if outcome.call.at_s >= self._since_s]
        if not outcomes:
            return
        calls, ttfts, tpots, _, _, whys = zip(*outcomes, strict=True)
        _, ats, apps, ins, outs = zip(*calls, strict=True)
        at_s, app = np.array(ats), np.array(apps)
        ttft_s, tpot_s = np.array(ttfts, dtype=float), np.array(tpots)
        ended = np.array([not why for why in whys])
        in_time = ttft_s <= self._ttft_s[app]  # a missing one compares as false
        paced = ended & (tpot_s <= self._tpot_s[app])
        good = in_time & paced
        parts = np.stack([np.ones_like(ended), ended, in_time, in_time & ended, paced, good], axis=1)
        np.add.at(self.counts, (app, _index(at_s, HOUR_S, self.hours)), parts)
        np.add.at(self.seconds, _index(at_s, self.second_s, len(self.seconds)), parts)
        np.add.at(self.heat, (app, _index(at_s, self.column_s, self.heat.shape[1])), parts[:, (Part.CAME, Part.GOOD)])
        self._tokens(app, np.array(ins), np.array(outs), ended, good)
        begun = ~np.isnan(ttft_s)
        self._times(self.waits, 0, app[begun], ttft_s[begun])
        several = ended & (np.array(outs) > 1)
        self._times(self.paces, 1, app[several], tpot_s[several])
        over = np.fmax(ttft_s / self._ttft_s[app], tpot_s / self._tpot_s[app])
        self._note_late(outcomes, over, good | ~begun)
        if not ended.all():
            for i in np.flatnonzero(~ended).tolist():
                self._note_reason(whys[i], calls[i].id)

    def latest(self) -> list[Late]:
        """Those that were served and missed their promise by the most, the worst first."""
        return sorted(self._latest, key=lambda late: (-late.times_over, late.id))

    def _tokens(self, app: np.ndarray, ins: np.ndarray, outs: np.ndarray, ended: np.ndarray, good: np.ndarray) -> None:
        np.add.at(self.tokens, app, np.stack([ins, outs, outs * ended, outs * good], axis=1))

    def _times(self, histogram: np.ndarray, which: int, app: np.ndarray, seconds: np.ndarray) -> None:
        buckets = np.log(np.maximum(seconds, _SMALLEST_S) / _SMALLEST_S) / math.log(_RATIO)
        np.add.at(histogram, (app, np.minimum(buckets.astype(int), _BUCKETS - 1)), 1)
        np.add.at(self.sums_s[:, which], app, seconds)
        np.maximum.at(self.most_s[:, which], app, seconds)

    def _note_late(self, outcomes: Sequence[Outcome], over: np.ndarray, spared: np.ndarray) -> None:
        least = self._latest[0].times_over if len(self._latest) == _LATEST else 0.0
        for i in np.flatnonzero(~spared & (over > least)).tolist():
            call, ttft_s, tpot_s, _, node, _ = outcomes[i]
            late = Late(float(over[i]), call.id, call.at_s, call.app, call.input_tokens, call.output_tokens,
                        ttft_s or 0.0, tpot_s, node)  # fmt: skip
            if len(self._latest) < _LATEST:
                heapq.heappush(self._latest, late)
            else:
                heapq.heappushpop(self._latest, late)

    def _note_reason(self, why: str, call: int) -> None:
        if why not in self.reasons and len(self.reasons) >= _REASONS:
            why = f"{why.partition(':')[0]}: other reasons"
        known = self.reasons.get(why, Reason(0, call))
        self.reasons[why] = Reason(known.requests + 1, known.example)


def percentile_s(histogram: np.ndarray, percent: float) -> float | None:
    """Of [buckets]; None of nothing."""
    total = int(histogram.sum())
    if not total:
        return None
    bucket = int(np.searchsorted(np.cumsum(histogram), max(1.0, percent / 100.0 * total)))
    return float(_SMALLEST_S * _RATIO ** (bucket + 0.5))


def edges_s() -> np.ndarray:
    """[buckets] where each ends."""
    ends: np.ndarray = _SMALLEST_S * _RATIO ** np.arange(1.0, _BUCKETS + 1.0)
    return ends


def by_model(scenario: Scenario) -> Mapping[str, list[int]]:
    """The applications of each model that has any, in the scenario's order of models."""
    found: dict[str, list[int]] = {spec.known.model: [] for spec in scenario.models}
    for i, app in enumerate(scenario.apps):
        found[app.model].append(i)
    return {model: apps for model, apps in found.items() if apps}


def _index(at_s: np.ndarray, width_s: float, most: int) -> np.ndarray:
    index: np.ndarray = np.clip((at_s / width_s).astype(int), 0, most - 1)
    return index
