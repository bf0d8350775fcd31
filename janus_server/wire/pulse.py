"""Whether the other end of a connection lives: beats go both ways, and each says which of ours came last. Pure.

Only that shows both directions to work. A silence is counted in our own ticks, none longer than two of them: a process
that was stopped itself, or whose loop was busy, first reads what came meanwhile before it gives up on anybody.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from janus_server.wire.frames import Beat

# Sent but not yet seen: at 4 a second, more than any silence that is borne.
_BEATS_KEPT: Final = 256


class Heartbeat(msgspec.Struct, frozen=True):
    """A beat every beat_s; a peer is given up after silent_s without one that answers."""

    beat_s: float = 0.25
    silent_s: float = 2.0


class Pulse:
    """The beats of one connection. Times are monotonic seconds."""

    def __init__(self, rate: Heartbeat, now: float) -> None:
        self._rate = rate
        self._ticked_s = self._opened_s = now
        self._quiet_s = 0.0
        self._number = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_BEATS_KEPT)
        self.heard = 0
        self._confirmed = 0

    @property
    def quiet_s(self) -> float:
        """For how long no beat has come that answers."""
        return self._quiet_s

    def tick(self, now: float) -> Beat | None:
        """The next beat to send; None when the other end is given up."""
        self._quiet_s += min(now - self._ticked_s, 2 * self._rate.beat_s)
        self._ticked_s = now
        if self._quiet_s >= self._rate.silent_s:
            return None
        self._number += 1
        self._sent.append((self._number, now))
        return Beat(self._number, self.heard)

    def hear(self, beat: Beat) -> bool:
        """False for a beat that cannot be: of what was never sent."""
        if beat.seen > self._number:
            return False
        self.heard = max(self.heard, beat.number)
        # The first beats cross: who has only just connected has seen none of ours.
        if beat.seen > self._confirmed or (beat.number == 1 and not beat.seen):
            self._confirmed = beat.seen
            self._quiet_s = 0.0
        return True

    def sent_s(self, number: int) -> float | None:
        """When the beat of that number was sent; of 0, when the connection opened. None where it is not known."""
        if number == 0:
            return self._opened_s
        return next((at_s for sent, at_s in self._sent if sent == number), None)
