"""The arithmetic of leases and terms: how long a leader may act, who may lead next, and in which term.

Both coordinators ask it. Pure: times come in, on one clock that never goes back and also counts while the machine is
suspended; nothing is read or written here. What must hold: a leader stops before anybody else can begin; no term is
given twice, and whoever has once stopped in a term never acts in it again, since the ids of its orders would repeat.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from janus_server.coordinator.records import Leader, Leadership

RENEWALS: Final = 4
"""A lease is renewed this many times within its length: one lost reply and a dead server of the coordinator's are
survived before the deadline."""
LEAST_LEASE_S: Final = 0.5
MOST_LEASE_S: Final = 60.0


def margin_s(lease_s: float) -> float:
    """How long before its lease ends a leader stops: a tenth for clocks that run apart (by 0.05 % when they are being
    set) and what an order sent at the last moment spends on its way."""
    return min(0.1 + lease_s / 10, lease_s / 2)


def deadline_s(asked_s: float, lease_s: float) -> float:
    """Until when a leader may act whose lease was granted or renewed by a request begun at asked_s.

    Counted from before the request: the coordinator counts from when it got it, which is later.
    """
    return asked_s + lease_s - margin_s(lease_s)


def renew_s(lease_s: float) -> float:
    """From one renewal to the next."""
    return lease_s / RENEWALS


def extended_s(until_s: float, now_s: float, asked_s: float, lease_s: float) -> float | None:
    """The deadline after a renewal was granted; None where the former one had passed: that leadership has ended."""
    if now_s >= until_s:
        return None
    return max(until_s, deadline_s(asked_s, lease_s))


class Step(enum.Enum):
    """What a candidate does next."""

    WAIT = "somebody leads, or this node does not stand"
    LEAD = "the place is its own, in a term in which it has not led yet"
    GO_ON = "it leads"
    STOP = "it led, and the place is not its own any more"
    LEAVE = "it holds the place without leading: it must give it back first"
    TAKE = "nobody leads"


class Seat(msgspec.Struct, frozen=True):
    """The leader's place as a coordinator shows it; a term without a holder is over."""

    term: int = 0
    holder: Leader | None = None


def next_step(seat: Seat, own: Leader, leading: int | None, spent: int, stands: bool) -> Step:
    """`leading` is the term in which this node believes to lead; `spent` the highest in which it has led and stopped.

    The seat must not be older than `leading`: what was seen before the election says nothing about it.
    """
    if leading is not None:
        return Step.GO_ON if seat.holder == own and seat.term == leading else Step.STOP
    if seat.holder == own:
        return Step.LEAD if stands and seat.term > spent else Step.LEAVE
    return Step.TAKE if stands and seat.holder is None else Step.WAIT


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's place where it is a file of one host. boot: the start of the machine, on whose clock until_s is."""

    term: int = 0
    name: str = ""
    incarnation: str = ""
    until_s: float = 0.0
    boot: str = ""

    def is_held(self, now_s: float, boot: str) -> bool:
        """Whether somebody may still act under it. A restart of the machine ends all leases, and no term."""
        return bool(self.name) and self.boot == boot and now_s < self.until_s

    def leader(self) -> Leader:
        return Leader(self.name, self.incarnation)


class Turn(msgspec.Struct, frozen=True):
    """What the record is to become, and under which right this node acts from now on."""

    record: LeaseRecord
    held: Leadership | None


def take_turn(
    record: LeaseRecord, own: Leader, held: Leadership | None, *, stands: bool, now_s: float, boot: str, lease_s: float
) -> Turn:
    """One look at the record, between reading and writing which nobody else reads it: renew it, take it or leave it.

    now_s is read before the record is: what is written ends a margin later than what this node allows itself.
    """
    mine = record.leader() == own and record.boot == boot
    if held is not None and mine and record.term == held.term and stands:
        until_s = extended_s(held.until_s, now_s, now_s, lease_s)
        if until_s is not None:
            renewed = msgspec.structs.replace(record, until_s=max(record.until_s, now_s + lease_s))
            return Turn(renewed, Leadership(held.term, until_s))
    if mine and not stands:
        return Turn(LeaseRecord(term=record.term), None)
    if not stands or (record.is_held(now_s, boot) and not mine):
        return Turn(record, None)
    # Its own record in a term in which it has stopped stands in nobody's way.
    taken = LeaseRecord(
        term=record.term + 1, name=own.name, incarnation=own.incarnation, until_s=now_s + lease_s, boot=boot
    )
    return Turn(taken, Leadership(taken.term, deadline_s(now_s, lease_s)))
