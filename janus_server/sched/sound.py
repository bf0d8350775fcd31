"""What the Brain makes of events with numbers that are none, and of a clock that goes back. Pure; `brain` asks first.

Nothing that a node, a front or a clock says may stop the leader, or stay with it: what is no number is left out here,
once, with a sentence, so that nobody behind has to doubt what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from janus_server.orders import Busy, Counted, Counts, Event, Joined, KnownModel, Observed, Report, Ticket, Traffic
from janus_server.sched.oracle_records import Observation
from janus_server.sched.placement import Note
from janus_server.units import LONG_AGO_S

T = TypeVar("T")
_MOST: Final = 1 << 60
# Ten minutes of prefill are no prediction but a mistake, and would keep everybody else from the device.
_MOST_WORK_S: Final = 600.0


class Clock(msgspec.Struct):
    """Time that never goes back: at_s is what it was last, lag_s how much further it is than who tells the time."""

    at_s: float = LONG_AGO_S
    lag_s: float = 0.0

    def read(self, now: float) -> float:
        """Example: told 5, 9, 2 and 3 it reads 5, 9, 9 and 10. What is no time is none."""
        if not math.isfinite(now):
            return self.at_s
        self.lag_s = max(self.lag_s, self.at_s - now)
        self.at_s = max(self.at_s, now + self.lag_s)
        return self.at_s

    def told(self, at_s: float) -> float:
        """What the teller's clock shows at that time or a hair later."""
        if not self.lag_s:
            return at_s
        told_s = at_s - self.lag_s
        while told_s + self.lag_s < at_s:  # rounded down
            told_s = math.nextafter(told_s, math.inf)
        return told_s


def sound(event: Event, lag_s: float, notes: list[Note]) -> Event:
    """The event without what is no number, its times on the Brain's own clock; a note about each thing left out."""
    match event:
        case Report(node, models):
            if all(map(_busy, models.values())):
                return event
            notes.append(Note(node, "how busy it says it is, is no number: that counts as nothing"))
            return Report(node, {name: busy if _busy(busy) else _clear(busy) for name, busy in models.items()})
        case Counted(models):
            counts = _kept(models, _counts, "its counts are left out: they are no numbers", notes)
            return event if len(counts) == len(models) else Counted(counts)
        case Observed(models, subjects):
            seen = _kept(models, _observation, "a period of it is left out: what was measured is no number", notes)
            if lag_s:
                seen = {name: msgspec.structs.replace(one, at_s=one.at_s + lag_s) for name, one in seen.items()}
            return event if not lag_s and len(seen) == len(models) else Observed(seen, subjects)
        case Traffic(arrived) if arrived and (lag_s or not all(map(_ticket, arrived))):
            why = "a ticket of it says what is no number: that counts as nothing"
            notes += [Note(ticket.model, why) for ticket in arrived if not _ticket(ticket)]
            return msgspec.structs.replace(event, arrived=tuple(_repaired(ticket, lag_s) for ticket in arrived))
        case Joined(models=models):
            kept = {known.model: known for known in models if _known(known)}
            if len(kept) == len(models) and event.pool_pages >= 0:
                return event
            notes.append(Note(event.node, "of its catalogue is left out what is named twice, or takes no number"))
            pages = max(0, event.pool_pages)
            return msgspec.structs.replace(event, models=tuple(kept.values()), pool_pages=pages)
        case _:
            return event


def number(value: float) -> bool:
    """Zero or more, and finite."""
    return 0.0 <= value < math.inf


def _kept(models: dict[str, T], fine: Callable[[T], bool], why: str, notes: list[Note]) -> dict[str, T]:
    kept = {name: one for name, one in models.items() if fine(one)}
    notes += [Note(name, why) for name in models if name not in kept]
    return kept


def _busy(busy: Busy) -> bool:
    return busy.running >= 0 and busy.waiting >= 0 and 0.0 <= busy.idle_for_s < math.inf


def _clear(busy: Busy) -> Busy:
    idle_s = busy.idle_for_s if number(busy.idle_for_s) else 0.0
    return Busy(max(0, busy.running), max(0, busy.waiting), idle_s)


def _ticket(ticket: Ticket) -> bool:
    promised = ticket.ttft_s is None or number(ticket.ttft_s)
    return 0.0 <= ticket.work_s <= _MOST_WORK_S and -_MOST < ticket.arrived_s < _MOST and promised


def _repaired(ticket: Ticket, lag_s: float) -> Ticket:
    """A request that waits is not forgotten because somebody cannot count."""
    work_s = min(ticket.work_s, _MOST_WORK_S) if ticket.work_s >= 0.0 else 0.0
    arrived_s = ticket.arrived_s if -_MOST < ticket.arrived_s < _MOST else 0.0
    ttft_s = ticket.ttft_s if ticket.ttft_s is None or number(ticket.ttft_s) else None
    return msgspec.structs.replace(ticket, work_s=work_s, arrived_s=arrived_s + lag_s, ttft_s=ttft_s)


def _counts(counts: Counts) -> bool:
    numbers = (counts.input_tokens, counts.output_tokens, counts.ended, counts.late, counts.requests)
    return all(0 <= n < _MOST for n in numbers)


def _observation(seen: Observation) -> bool:
    shares = [share for share in (seen.hbm, seen.compute, seen.bandwidth) if share is not None]
    counted = 0 <= seen.replicas and 0 <= seen.on_time <= seen.requests < _MOST
    return counted and math.isfinite(seen.at_s) and all(
        0.0 <= n < _MOST for n in (*msgspec.structs.astuple(seen.features), *shares)
    )  # fmt: skip


def _known(known: KnownModel) -> bool:
    times = (known.load_s, known.wake_s, 0.0 if known.idle_s is None else known.idle_s)
    sizes = (known.weight_pages, known.host_bytes, known.longest_pages, known.floor_pages, known.context_tokens)
    attain = known.attain is None or 0.0 <= known.attain <= 1.0
    return known.shards >= 1 and min(sizes) >= 0 and attain and all(map(number, times))
