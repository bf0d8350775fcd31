"""When a wanted number of replicas becomes the number to have: up at once, down after a quiet time, no flapping. Pure.

`scaling` keeps one for each model. What goes up again soon after it went down waits longer before it goes down the next
time, so that a load which swings settles at its crest.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

# A quiet time grows up to so many times its length, and is what it was after so many of its lengths without a return.
_LONGEST: Final = 8.0
_FORGET: Final = 20.0


class Patience:
    """Of one model. `quiet_s` is the present length of its quiet time."""

    def __init__(self, quiet_s: float, hold_s: float, now: float) -> None:
        self.quiet_s = self._usual_s = quiet_s
        self.hold_s = hold_s
        self._moved_s = -math.inf
        self._down_s = -math.inf
        self._heat: float | None = None
        # Wants since then, each the most until the next.
        self._crest: deque[tuple[float, int]] = deque()
        self._last = 0

    def decide(self, now_has: int, want: int, urgent: bool, now: float) -> int:
        """How many to have: `want`, what it has, or what was wanted lately."""
        # The last want held until now, however long ago it was told.
        self._push(now, self._last)
        self._push(now, want)
        self._last = want
        while len(self._crest) > 1 and now - self._crest[0][0] > self.quiet_s:
            self._crest.popleft()
        if want > now_has:
            return want if urgent or self.held(now) else now_has
        highest = min(now_has, self._crest[0][1])
        return highest if now - self._moved_s >= self.quiet_s else now_has

    def since(self, now: float) -> float:
        """Seconds since the last change."""
        return now - self._moved_s

    def held(self, now: float) -> bool:
        """The last change is long enough ago for another."""
        return now - self._moved_s >= self.hold_s

    def over(self, now: float) -> bool:
        """Nothing is waited for any more."""
        return len(self._crest) <= 1 and now - self._moved_s >= max(self.quiet_s, self.hold_s)

    def jumped(self, heat: float, part: float) -> bool:
        """Whether the traffic changed by more than `part` of what it was when something changed last."""
        return self._heat is None or abs(heat - self._heat) > part * self._heat

    @property
    def heat(self) -> float:
        """The traffic at the last change."""
        return self._heat or 0.0

    def moved(self, before: int, count: int, heat: float, now: float) -> None:
        """It has so many from now on."""
        self._heat = heat
        if count > before:
            if now - self._down_s <= 2.0 * self.quiet_s:
                self.quiet_s = min(2.0 * self.quiet_s, _LONGEST * self._usual_s)
            elif now - self._down_s > _FORGET * self._usual_s:
                self.quiet_s = self._usual_s
        else:
            self._down_s = now
        self._moved_s = now

    def _push(self, now: float, want: int) -> None:
        while self._crest and self._crest[-1][1] <= want:
            self._crest.pop()
        self._crest.append((now, want))
