"""Events told once and in order, actions given once and in time, over connections that break. Pure.

What is told is numbered and kept until it was heard; a new connection repeats the rest. What is given carries its term
and an id, and dies by its own time on either side. First numbers are drawn from a clock by the caller, so that who
starts anew in one process never repeats a number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from janus_server.wire.frames import Ack, Give, Given, Outcome, Tell, Told

# A leader that hears nothing for so long is told everything anew by a report.
MOST_UNHEARD: Final = 4096
MOST_OPEN: Final = 4096
# Ids are asked for again only while an order lives, which is seconds.
_OUTCOMES_KEPT: Final = 8192


class Outtray:
    """What this process tells one other."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._unheard: OrderedDict[int, Tell] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unheard)

    def add(self, term: int, events: Sequence[Told]) -> Tell | None:
        """To be sent, and kept; None where nothing was heard for too long, and no more is kept."""
        if len(self._unheard) >= MOST_UNHEARD:
            return None
        tell = self._unheard[self._next] = Tell(self._next, term, tuple(events))
        self._next += 1
        return tell

    def heard(self, number: int) -> bool:
        """Everything before that number was heard; False where so much was never told."""
        if number > self._next:
            return False
        while self._unheard and next(iter(self._unheard)) < number:
            self._unheard.popitem(last=False)
        return True

    def unheard(self) -> list[Tell]:
        """In order."""
        return list(self._unheard.values())

    def drop(self) -> None:
        """Who was to hear it is another one now, or will be told by a report."""
        self._unheard.clear()


class Intray:
    """What one other process tells this one."""

    def __init__(self) -> None:
        self.expected = 0

    def take(self, tell: Tell) -> bool:
        """True when it is new."""
        if tell.number < self.expected:
            return False
        self.expected = tell.number + 1
        return True


class _Open(NamedTuple):
    action: Given
    until_s: float


class Orders:
    """What this process gives one other, until it is answered or its time is over. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._unsent: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, term: int, id: int, action: Given, until_s: float) -> bool:
        """False where too many are open."""
        if len(self._open) >= MOST_OPEN:
            return False
        self._open[term, id] = _Open(action, until_s)
        self._unsent[term, id] = None
        return True

    def answered(self, ack: Ack) -> Outcome | None:
        """What became of it; None where nothing did yet, or it was not asked for."""
        key = ack.term, ack.id
        if key not in self._open:
            return None
        if ack.outcome is Outcome.EARLY:
            self._unsent[key] = None
            return None
        del self._open[key]
        self._unsent.pop(key, None)
        return ack.outcome

    def connected(self) -> None:
        """Whatever has no answer is sent again."""
        self._unsent = OrderedDict.fromkeys(self._open)

    def due(self, now: float, beat: int) -> list[Give]:
        """What is to be sent; from then on it waits for its answer."""
        unsent, self._unsent = self._unsent, OrderedDict()
        return [
            Give(term, id, self._open[term, id].until_s - now, beat, self._open[term, id].action)
            for term, id in unsent
            if self._open[term, id].until_s > now
        ]

    def expired(self, now: float) -> list[tuple[int, int]]:
        """(term, id) of those whose time is over without an answer; they may have been carried out all the same."""
        over = [key for key, order in self._open.items() if order.until_s <= now]
        for key in over:
            del self._open[key]
            self._unsent.pop(key, None)
        return over


class Judge:
    """Whether what a leader gives may be carried out here, and what became of it when it was given before."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[tuple[int, int], Outcome] = OrderedDict()

    def look(self, give: Give, term: int, until_s: float | None, now: float) -> Outcome | None:
        """None where it is to be carried out now; term is the newest that the coordinator told of.

        until_s is when its time is over by our clock, None where that cannot be told.
        """
        known = self._outcomes.get((give.term, give.id))
        if known is not None:
            return Outcome.ALREADY if known is Outcome.APPLIED else known
        if give.term < term or until_s is None or now >= until_s:
            return Outcome.STALE
        return Outcome.EARLY if give.term > term else None

    def note(self, give: Give, outcome: Outcome) -> None:
        self._outcomes[give.term, give.id] = outcome
        if len(self._outcomes) > _OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)
