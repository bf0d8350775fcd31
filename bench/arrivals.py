"""When requests are sent: a stationary or ramped gamma process, or a trace's own times made faster or slower.

Pure: the caller brings the random generator. Times are seconds from the start of the run, in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from janus_server.errors import BadConfig


class Ramp(NamedTuple):
    """The rate grows from start_rps to end_rps over the run, by equal differences or (exponential) equal ratios."""

    start_rps: float
    end_rps: float
    exponential: bool = False

    def rate(self, progress: np.ndarray) -> np.ndarray:
        """Requests a second at each share of the requests, 0 … 1."""
        if self.exponential:
            return self.start_rps * (self.end_rps / self.start_rps) ** progress
        return self.start_rps + (self.end_rps - self.start_rps) * progress


def gamma_times(count: int, rate_rps: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """`count` times [count] f64 whose gaps are gamma distributed: mean 1/rate, coefficient of variation 1/√burstiness.

    burstiness 1 is a Poisson process, below 1 burstier, infinity evenly spaced. Rate infinity sends all at once. The
    gaps are scaled so that the last request comes at count/rate exactly: a run's rate is the one that was asked for.
    """
    check_rate(rate_rps, burstiness)
    if math.isinf(rate_rps) or count == 0:
        return np.zeros(count)
    times = np.cumsum(_unit_gaps(count, burstiness, rng))
    return times * (count / rate_rps / times[-1]) if times[-1] > 0 else times


def ramp_times(count: int, ramp: Ramp, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Times [count] whose rate follows the ramp over the requests; the gaps' variation is gamma_times's."""
    for name, rate in (("start", ramp.start_rps), ("end", ramp.end_rps)):
        if not 0 < rate < math.inf:
            raise BadConfig(f"--ramp-up-{name}-rps: {rate:g} is not a rate; write requests a second above 0")
    check_rate(ramp.start_rps, burstiness)
    progress = np.arange(count) / max(1, count - 1)
    return np.cumsum(_unit_gaps(count, burstiness, rng) / ramp.rate(progress))


def replay_times(times_s: np.ndarray, speed: float) -> np.ndarray:
    """A trace's times from its first one on, `speed` times as fast."""
    if not 0 < speed < math.inf:
        raise BadConfig(f"--speed: {speed:g} is not a speed; write a factor above 0 (2 replays in half the time)")
    return (times_s - times_s[0]) / speed if len(times_s) else times_s


def check_rate(rate_rps: float, burstiness: float) -> None:
    if not rate_rps > 0:
        raise BadConfig(f"--request-rate: {rate_rps:g} is not a rate; write requests a second above 0, or inf")
    if not burstiness > 0:
        raise BadConfig(f"--burstiness: {burstiness:g} is not a shape; write a number above 0 (1 is Poisson)")


def _unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Gaps [count] of mean 1."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(burstiness, 1 / burstiness, count)
