"""Which models share devices and which have devices of their own: the steady and the elastic pool. Pure.

The slow path asks with what each model needs, hands the steady ones to `packing` and the elastic ones to `scaling`. A
model becomes elastic as soon as one shared replica would not do, and steady again when that has not been so for a
while; whoever comes back is kept longer each time. The same questions in the same order give the same answers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec

from janus_server.sched.demand import Demand
from janus_server.sched.placement import Note
from janus_server.units import LONG_AGO_S, format_seconds


class Pool(enum.Enum):
    STEADY = "steady"
    ELASTIC = "elastic"


class Overlap(enum.Enum):
    """How models on one device share its time: each step has the device to itself, or steps run beside each other."""

    TURNS = "turns"
    STREAMS = "streams"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs now, by a pessimist.

    replicas: how many keep its promise, on devices of their own. hbm, compute and bandwidth: shares of a device that
    one replica's shard takes with all of the traffic; busy, where it was measured, of its time. heat: tokens a second.
    """

    model: str
    replicas: int
    hbm: float
    compute: float
    bandwidth: float
    busy: float | None = None
    shards: int = 1
    heat: float = 0.0
    move_s: float = 1.0

    @property
    def load(self) -> float:
        """The largest share of what traffic takes."""
        return max(self.compute, self.bandwidth, self.busy or 0.0)


class PoolRules(msgspec.Struct, frozen=True, kw_only=True):
    """A model leaves the steady pool above enter_load of a device, or where one replica does not do, and comes back
    below leave_load with one, after calm_s; twice that after each return within forget_s, up to longest_s.

    spare: replicas that each elastic model must have room for before another becomes one.
    """

    enter_load: float = 0.8
    leave_load: float = 0.4
    calm_s: float = 30.0
    longest_s: float = 1800.0
    forget_s: float = 3600.0
    spare: int = 2


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A model's pool since since_s. calm_s: since when an elastic one could go back, if so; when a steady one came
    back, if it did. returns: how often it left again soon."""

    model: str
    pool: Pool
    since_s: float
    calm_s: float | None = None
    returns: int = 0


class Pools(msgspec.Struct, frozen=True):
    """Members by model, rising; as of at_s."""

    members: tuple[Member, ...] = ()
    at_s: float = LONG_AGO_S

    def of(self, pool: Pool) -> tuple[str, ...]:
        return tuple(member.model for member in self.members if member.pool is pool)


class Turnover(msgspec.Struct, frozen=True):
    """A model changes its pool."""

    model: str
    to: Pool
    why: str


class Assignment(msgspec.Struct, frozen=True):
    pools: Pools
    changes: tuple[Turnover, ...] = ()
    notes: tuple[Note, ...] = ()


def assign(
    before: Pools,
    signals: Sequence[Signal],
    devices: int,
    now: float,
    rules: PoolRules = PoolRules(),  # noqa: B008
) -> Assignment:
    """The pools from now on, of the models that signals speak of. A new one starts as steady and may leave at once.

    Where all elastic models together have no room for one replica each beside the steady ones, the coldest go back.
    """
    notes: list[Note] = []
    if now < before.at_s:
        notes.append(Note("clock", f"it went back by {format_seconds(before.at_s - now)}: waiting times start anew"))
        started = [msgspec.structs.replace(m, since_s=now, calm_s=None) for m in before.members]
        before = Pools(tuple(started), now)
    known = {member.model: member for member in before.members}
    changes: list[Turnover] = []
    members: dict[str, Member] = {}
    clean = sorted({s.model: s for s in signals}.values(), key=lambda s: (-s.heat if _sound(s) else 0.0, s.model))
    room = _Room(devices, [s for s in clean if _sound(s)], known, rules)
    for signal in clean:
        model = signal.model
        member = known.get(model, Member(model=model, pool=Pool.STEADY, since_s=now))
        if not _sound(signal):
            notes.append(Note(model, f"it stays {member.pool.value}: what it needs is not a number"))
        elif member.pool is Pool.STEADY:
            member = _leave(member, signal, room, now, rules, changes, notes)
        else:
            member = _return(member, signal, room, now, rules, changes)
        members[model] = member
    for signal in room.too_many([members[s.model] for s in clean if _sound(s)]):
        why = f"{signal.model} to steady: there are {devices} devices, too few for one each; it is the coldest"
        if signal.load > 1.0 or signal.hbm > 1.0:
            notes.append(Note(signal.model, "it stays elastic without a device: it fits on none beside others"))
            continue
        changes.append(Turnover(signal.model, Pool.STEADY, why))
        members[signal.model] = Member(model=signal.model, pool=Pool.STEADY, since_s=now,
                                       returns=members[signal.model].returns)  # fmt: skip
    ordered = tuple(members[model] for model in sorted(members))
    return Assignment(Pools(ordered, now), tuple(changes), tuple(notes))


def steady_demands(pools: Pools, signals: Sequence[Signal], overlap: Overlap) -> list[Demand]:
    """What `packing` is asked to place.

    Where models take turns, a step keeps the device for as long as the slower of its computing and its reading takes: a
    compute-heavy and a bandwidth-heavy model fit beside each other only where their steps overlap.
    """
    steady = set(pools.of(Pool.STEADY))
    out = []
    for signal in signals:
        if signal.model in steady:
            busy = signal.busy if signal.busy is not None else max(signal.compute, signal.bandwidth)
            out.append(Demand(
                model=signal.model, hbm=signal.hbm, compute=signal.compute, bandwidth=signal.bandwidth,
                busy=busy if overlap is Overlap.TURNS else 0.0, shards=signal.shards, move_s=signal.move_s,
            ))  # fmt: skip
    return out


class _Room:
    """Devices for elastic models beside what the steady ones take at least (by volume)."""

    def __init__(self, devices: int, signals: Sequence[Signal], known: dict[str, Member], rules: PoolRules) -> None:
        self.devices, self.signals, self.rules = devices, {s.model: s for s in signals}, rules
        elastic = [s for s in signals if s.model in known and known[s.model].pool is Pool.ELASTIC]
        steady = [s for s in signals if s not in elastic]
        self.taken = rules.spare * sum(s.shards for s in elastic)
        self.volume = [sum(s.hbm * s.shards for s in steady), sum(s.load * s.shards for s in steady)]

    def admits(self, signal: Signal) -> bool:
        """Whether the model may leave the steady pool; if so, it counts as gone."""
        volume = [self.volume[0] - signal.hbm * signal.shards, self.volume[1] - signal.load * signal.shards]
        taken = self.taken + self.rules.spare * signal.shards
        if taken + math.ceil(max(0.0, *volume) - 1e-9) > self.devices:
            return False
        self.volume, self.taken = volume, taken
        return True

    def too_many(self, members: Sequence[Member]) -> list[Signal]:
        """Elastic models beyond one replica each, the coldest; members are the hottest first."""
        steady = [self.signals[m.model] for m in members if m.pool is Pool.STEADY]
        left = self.devices - math.ceil(max(sum(s.hbm * s.shards for s in steady),
                                            sum(s.load * s.shards for s in steady)) - 1e-9)  # fmt: skip
        out = []
        for member in members:
            if member.pool is Pool.ELASTIC:
                signal = self.signals[member.model]
                left -= signal.shards
                if left < 0:
                    out.append(signal)
                    left += signal.shards
        return out


def _sound(signal: Signal) -> bool:
    numbers = (signal.hbm, signal.compute, signal.bandwidth, signal.busy or 0.0, signal.heat)
    return signal.replicas >= 0 and signal.shards >= 1 and all(math.isfinite(n) and n >= 0.0 for n in numbers)


def _leave(
    member: Member, signal: Signal, room: _Room, now: float, rules: PoolRules, changes: list[Turnover],
    notes: list[Note],
) -> Member:  # fmt: skip
    if signal.replicas < 2 and signal.load <= rules.enter_load:
        return member
    needs = f"{signal.replicas} replicas" if signal.replicas > 1 else f"{signal.load:.2f} of a device"
    if not room.admits(signal):
        notes.append(Note(member.model, f"it stays steady though it needs {needs}: no devices are left for it alone"))
        return member
    again = member.calm_s is not None and now - member.since_s < rules.forget_s
    returns = member.returns + 1 if again else 0
    stays = f"; once calm it stays for {format_seconds(_wait_s(returns, rules))}"
    why = f"{member.model} to elastic{' again' if returns else ''}: it needs {needs}{stays}"
    changes.append(Turnover(member.model, Pool.ELASTIC, why))
    return Member(model=member.model, pool=Pool.ELASTIC, since_s=now, returns=returns)


def _wait_s(returns: int, rules: PoolRules) -> float:
    return float(min(rules.calm_s * 2.0 ** min(returns, 16), rules.longest_s))


def _return(
    member: Member, signal: Signal, room: _Room, now: float, rules: PoolRules, changes: list[Turnover]
) -> Member:
    if signal.replicas > 1 or signal.load > rules.leave_load:
        return msgspec.structs.replace(member, calm_s=None)
    calm_s = now if member.calm_s is None else member.calm_s
    if now - calm_s < _wait_s(member.returns, rules):
        return msgspec.structs.replace(member, calm_s=calm_s)
    why = (
        f"{member.model} to steady: for {format_seconds(now - calm_s)} one replica was enough, "
        f"with {signal.load:.2f} of a device"
    )
    changes.append(Turnover(member.model, Pool.STEADY, why))
    return Member(model=member.model, pool=Pool.STEADY, since_s=now, calm_s=now, returns=member.returns)
