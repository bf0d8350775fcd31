"""What an idle model is worth keeping: how often it is expected back, times what bringing it back costs. Pure.

`room` lets those go first that are worth least, from the device and from the host's memory. How often is an average of
the requests that were observed, the recent ones counted more; where there were none yet, it follows from how long the
model idles.
"""

from __future__ import annotations

import math
from typing import Final

from janus_server.sched.state import Belief

# A model that was used a moment ago and never before: one request in a hundred times as long as it idles.
_UNSEEN: Final = 0.01


class Keep:
    """An observation counts half after half_life_s.

    On a recorded day of 62 applications, with room for a quarter to three quarters of them, this order brings back 1 to
    25 % less than the one by idle time alone, for half-lives of 5 to 20 minutes (tests/pure/test_keep.py).
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s

    def seen(self, belief: Belief, requests: float, now: float) -> None:
        """The model had so many requests just now."""
        belief.recent = self._recent(belief, now) + requests
        belief.recent_s = now

    def rate(self, belief: Belief, now: float) -> float:
        """Requests a second that are expected of it."""
        return self._recent(belief, now) * math.log(2.0) / self._half_life_s

    def value(self, belief: Belief, now: float) -> float:
        """The least goes first: seconds of bringing it back for each second without it.

        Example: 0.1 s to wake and 0.05 requests a second (0.005) goes before 3 s to load and one request in five
        minutes (0.01). Where nothing was observed, idle for 10 s goes before idle for 5 s.
        """
        back_s = belief.reload_s if belief.copy else max(belief.load_s, 1e-3)
        return back_s * (self.rate(belief, now) + _UNSEEN / max(now - belief.idle_since_s, 1e-3))

    def why(self, belief: Belief, now: float) -> str:
        """For the sentence of a decision. Example: "idle for 12.0 s, 3.5 requests a minute expected"."""
        idle = f"idle for {now - belief.idle_since_s:.1f} s"
        per_minute = 60.0 * self.rate(belief, now)
        return f"{idle}, {per_minute:.2g} requests a minute expected" if per_minute >= 0.001 else idle

    def _recent(self, belief: Belief, now: float) -> float:
        return float(belief.recent * 2.0 ** (-max(0.0, now - belief.recent_s) / self._half_life_s))
