"""When a wanted number of replicas becomes the number to have: up at once, down after a quiet time, no flapping. Pure.

`scaling` keeps one for each model. What goes up again soon after it went down waits longer before it goes down the next
time, so that a load which swings settles at its crest.
"""

from __future__ import annotations

from typing import Final

import msgspec

from janus_server.units import LONG_AGO_S

# A quiet time grows up to so many times its length, and is what it was after so many of its lengths without a return.
_LONGEST: Final = 8.0
_FORGET: Final = 20.0


class Patience(msgspec.Struct, eq=False, kw_only=True):
    """Of one model. Only its own methods write it.

    quiet_s is the present length of its quiet time, usual_s what that is without returns. It changed last at moved_s,
    with the traffic `jump_from`, and went down last at down_s. crest: wants since then, each the most until the next.
    """

    quiet_s: float
    usual_s: float
    hold_s: float
    moved_s: float = LONG_AGO_S
    down_s: float = LONG_AGO_S
    jump_from: float | None = None
    crest: list[tuple[float, int]] = []
    last: int = 0

    @classmethod
    def new(cls, quiet_s: float, hold_s: float) -> Patience:
        """Of a model that never changed."""
        return cls(quiet_s=quiet_s, usual_s=quiet_s, hold_s=hold_s)

    def decide(self, now_has: int, want: int, urgent: bool, now: float) -> int:
        """How many to have: `want`, what it has, or what was wanted lately."""
        # The last want held until now, however long ago it was told.
        self._push(now, self.last)
        self._push(now, want)
        self.last = want
        while len(self.crest) > 1 and now - self.crest[0][0] > self.quiet_s:
            del self.crest[0]
        if want > now_has:
            return want if urgent or self.held(now) else now_has
        highest = min(now_has, self.crest[0][1])
        return highest if now - self.moved_s >= self.quiet_s else now_has

    def since(self, now: float) -> float:
        """Seconds since the last change."""
        return now - self.moved_s

    def held(self, now: float) -> bool:
        """The last change is long enough ago for another."""
        return now - self.moved_s >= self.hold_s

    def over(self, now: float) -> bool:
        """Nothing is waited for any more."""
        return len(self.crest) <= 1 and now - self.moved_s >= max(self.quiet_s, self.hold_s)

    def jumped(self, heat: float, part: float) -> bool:
        """Whether the traffic changed by more than `part` of what it was when something changed last."""
        return self.jump_from is None or abs(heat - self.jump_from) > part * self.jump_from

    @property
    def heat(self) -> float:
        """The traffic at the last change."""
        return self.jump_from or 0.0

    def moved(self, before: int, count: int, heat: float, now: float) -> None:
        """It has so many from now on."""
        self.jump_from = heat
        if count > before:
            if now - self.down_s <= 2.0 * self.quiet_s:
                self.quiet_s = min(2.0 * self.quiet_s, _LONGEST * self.usual_s)
            elif now - self.down_s > _FORGET * self.usual_s:
                self.quiet_s = self.usual_s
        else:
            self.down_s = now
        self.moved_s = now

    def _push(self, now: float, want: int) -> None:
        while self.crest and self.crest[-1][1] <= want:
            self.crest.pop()
        self.crest.append((now, want))
