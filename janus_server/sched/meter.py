"""How much traffic each model has, from what is counted twice a second. Pure; `fleet` owns one.

Counts are totals, so that one that is never heard loses nothing. What is told to `scaling` is a mean over some seconds,
and stays what it was while it only trembles: who compares it with what was told before finds that nothing happened.
"""

from __future__ import annotations

import bisect
import copy
import math
import operator
from collections.abc import Mapping
from typing import Final

import msgspec

from janus_server.orders import Counts
from janus_server.sched.mind import Load
from janus_server.sched.oracle_records import Features

RATE_S: Final = 3.0
"""What tokens a second are a mean over, as in the published fast path; over longer where few requests came."""
_LATE_S: Final = 10.0
# The rate of so few requests is chance: it is a mean over as long as it takes for as many to come, up to _KEPT_S.
_CHANCE_REQUESTS: Final = 16
_KEPT_S: Final = 30.0
# How long requests are is a mean over so many: with lengths that scatter as they do, the last few are chance.
_SIZED_MOST: Final = 200.0
# Of a rate: less than this part is no change.
_TREMBLE: Final = 0.05
_AT: Final = operator.attrgetter("at_s")


class Sample(msgspec.Struct, frozen=True):
    """Totals at one time."""

    at_s: float
    counts: Counts

    @property
    def tokens(self) -> int:
        return self.counts.input_tokens + self.counts.output_tokens


class Gauge(msgspec.Struct, eq=False):
    """One model's. samples rise in time, told is the rate that was given out last, came_s when a prompt came last.

    size is what one request takes in tokens, in the mean of the last `sized` of them; none before `sized_at` counts.
    """

    samples: list[Sample]
    came_s: float
    told: float = 0.0
    size: float = 0.0
    sized: float = 0.0
    sized_at: int = 0


class Meter:
    """Totals in, loads out."""

    def __init__(self, known: Mapping[str, Gauge] | None = None) -> None:
        """With what another one knew (`memory`), this one goes on."""
        self._gauges = copy.deepcopy(dict(known or {}))

    def memory(self) -> dict[str, Gauge]:
        """What it knows now, as a copy."""
        return copy.deepcopy(self._gauges)

    def counted(self, models: Mapping[str, Counts], now: float) -> None:
        """Totals of the models of which anything changed. Those that fell are of a leader that began to count anew."""
        for name, counts in models.items():
            sample = Sample(now, counts)
            gauge = self._gauges.get(name)
            if gauge is None or gauge.samples[-1].tokens > sample.tokens or gauge.samples[-1].at_s > now:
                # What was counted until now came at some time: none of it is known to have come just now.
                self._gauges[name] = Gauge([sample], now, sized_at=sample.tokens)
                continue
            if counts.input_tokens > gauge.samples[-1].counts.input_tokens:
                gauge.came_s = now
            _size(gauge, sample)
            gauge.samples.append(sample)
            while len(gauge.samples) > 1 and gauge.samples[1].at_s <= now - _KEPT_S:
                del gauge.samples[0]

    def idle_for_s(self, model: str, now: float) -> float:
        """Since a prompt came last; inf where none was ever counted."""
        gauge = self._gauges.get(model)
        return math.inf if gauge is None else max(0.0, now - gauge.came_s)

    def lately(self, model: str, now: float) -> Features | None:
        """The traffic of the last ten seconds, as it was counted: for who decides seldom. Lengths are taken to scatter
        as much as they are; None where there was no token.
        """
        gauge = self._gauges.get(model)
        if gauge is None:
            return None
        last, before = gauge.samples[-1].counts, _at(gauge, now - _LATE_S).counts
        tokens_in = max(0, last.input_tokens - before.input_tokens)
        tokens_out = max(0, last.output_tokens - before.output_tokens)
        if not tokens_in + tokens_out:
            return None
        requests = max(0, last.requests - before.requests)
        mean_in, mean_out = tokens_in / max(1, requests), tokens_out / max(1, requests)
        rate = (tokens_in + tokens_out) / _LATE_S
        return Features(rate, requests / _LATE_S, mean_in, mean_in**2, mean_out, mean_out**2)

    def load(self, model: str, backlog_s: float, now: float) -> Load:
        """What the model has to do. backlog_s: predicted work of its prompts that wait.

        Example: 30 requests in the last 3 s, of 100 tokens each in the mean, are 1,000 a second; 1,020 a tick later are
        still told as 1,000.
        """
        gauge = self._gauges.get(model)
        if gauge is None:
            return Load(model=model, tokens_s=0.0, backlog_s=backlog_s)
        rate = _rate(gauge, now)
        if not rate or abs(rate - gauge.told) > _TREMBLE * gauge.told:
            gauge.told = rate
        last, before = gauge.samples[-1].counts, _at(gauge, now - _LATE_S).counts
        idle_s = max(0.0, now - gauge.came_s)
        return Load(model=model, tokens_s=gauge.told, backlog_s=backlog_s, ended=last.ended - before.ended,
                    late=last.late - before.late, idle_for_s=idle_s)  # fmt: skip


def _size(gauge: Gauge, sample: Sample) -> None:
    """Take the requests since the last sample into the mean."""
    came = sample.counts.requests - gauge.samples[-1].counts.requests
    if came > 0:
        gauge.sized = min(gauge.sized + came, max(_SIZED_MOST, came))
        gauge.size += came / gauge.sized * ((sample.tokens - gauge.sized_at) / came - gauge.size)
        gauge.sized_at = sample.tokens


def _rate(gauge: Gauge, now: float) -> float:
    """Tokens a second: of the requests that came, each as large as they are in the mean; where none did, as counted.
    Samples may be missing while nothing changes."""
    last = gauge.samples[-1]
    most = last.counts.requests - _CHANCE_REQUESTS

    def too_new(sample: Sample) -> bool:
        return now - sample.at_s < RATE_S or sample.counts.requests > most

    after = bisect.bisect_left(gauge.samples, True, key=too_new)
    if after:
        sample = gauge.samples[after - 1]
        return (last.counts.requests - sample.counts.requests) * gauge.size / (now - sample.at_s)
    before, span_s = _at(gauge, now - _KEPT_S), max(RATE_S, min(_KEPT_S, now - gauge.samples[0].at_s))
    came = last.counts.requests - before.counts.requests
    return (came * gauge.size if came else last.tokens - before.tokens) / span_s


def _at(gauge: Gauge, at_s: float) -> Sample:
    """The totals as they stood then, or the oldest known."""
    return gauge.samples[max(0, bisect.bisect_right(gauge.samples, at_s, key=_AT) - 1)]
