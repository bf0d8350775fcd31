"""How a model's traffic has gone lately and where it is going: the samples that `scaling` forecasts from. Pure.

`scaling` keeps one for each model. Samples are kept only where something changed, so that a quiet model costs nothing.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

# The usual rate and its usual deviation are means over about so long.
_USUAL_S: Final = 30.0
_UNUSUAL: Final = 4.0
_FIRST_PART: Final = 0.1


class Sample(msgspec.Struct, frozen=True):
    """A rate, as of one time."""

    at_s: float
    rate: float


class Trend(msgspec.Struct, eq=False):
    """A rate as it was counted now and then, and straight lines between. Only its own methods write it.

    usual is the rate's long mean, as of usual_s, deviation how far it mostly strays from that.
    """

    window_s: float
    samples: list[Sample] = []
    seen_s: float = 0.0
    usual_s: float = 0.0
    usual: float = 0.0
    deviation: float = 0.0

    def add(self, now: float, rate: float) -> None:
        """Samples older than the window go, but the last of them."""
        last = self.samples[-1] if self.samples else None
        if last is None:
            self.usual, self.deviation = rate, _FIRST_PART * rate
        else:
            part = -math.expm1(min(0.0, self.usual_s - now) / _USUAL_S)
            self.deviation += part * (abs(last.rate - self.usual) - self.deviation)
            self.usual += part * (last.rate - self.usual)
        self.usual_s = now
        if last is None or last.rate != rate:
            if last is not None and last.at_s < self.seen_s:
                self.samples.append(Sample(self.seen_s, last.rate))
            self.samples.append(Sample(now, rate))
        self.seen_s = now
        start_s = now - self.window_s
        while len(self.samples) > 1 and self.samples[1].at_s <= start_s:
            del self.samples[0]

    def still(self, now: float) -> None:
        """The rate is what it was."""
        self.seen_s = now

    def settled(self, now: float) -> bool:
        """Nothing changed for a window."""
        return len(self.samples) == 1 and now - self.samples[0].at_s >= self.window_s

    def unusual(self) -> bool:
        """The rate is above what it mostly is by more than it mostly strays: it rises and does not just tremble."""
        return bool(self.samples) and self.samples[-1].rate - self.usual > _UNUSUAL * self.deviation

    def ahead(self, now: float, ahead_s: float) -> float:
        """The rate in ahead_s, by a straight line through the means of both halves of the window; 0 at least.

        What rose has to be rising still: the line is no steeper than the second half, so that a step is not taken for a
        slope. Example: a rate that rose from 100 to 140 in the 4 s of the window: the halves' means are 110 and 130,
        2 s apart, so it rises by 10 a second; in 3 s it is 170.
        """
        if not self.samples:
            return 0.0
        rate = self.samples[-1].rate
        first_s = max(self.samples[0].at_s, now - self.window_s)
        if now <= first_s:
            return rate
        middle_s = (first_s + now) / 2.0
        second = self._mean(middle_s, now)
        slope = (second - self._mean(first_s, middle_s)) / (now - middle_s)
        # Twice from the mean of the second half to its end.
        slope = min(slope, max(0.0, 2.0 * (rate - second) / (now - middle_s)))
        return max(0.0, rate + slope * ahead_s)

    def _mean(self, start_s: float, end_s: float) -> float:
        total = 0.0
        later = Sample(end_s, self.samples[-1].rate)
        for sample in reversed(self.samples):
            since_s, until_s = max(sample.at_s, start_s), min(later.at_s, end_s)
            if since_s < until_s:
                ends = _between(sample, later, since_s) + _between(sample, later, until_s)
                total += (until_s - since_s) * ends / 2.0
            later = sample
            if sample.at_s <= start_s:
                break
        return total / (end_s - start_s)


def _between(one: Sample, other: Sample, at_s: float) -> float:
    if other.at_s <= one.at_s:
        return other.rate
    return one.rate + (other.rate - one.rate) * (at_s - one.at_s) / (other.at_s - one.at_s)
