"""From the placement that is to the one that is wanted, in steps that never exceed free pages. Pure.

Whoever has decided where replicas are to be asks for the steps, hands over those that wait for nothing and asks again
at the next event: a plan made anew from any point in between continues the old one. No replica is drained before what
takes its place is Active; where that is impossible, the least important model is stopped first, and its step says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from janus_server.orders import Verb
from janus_server.sched.placement import Change, Cluster, Device, Model, Note, Replica, Standing
from janus_server.sched.plan_order import Piece, Task, Turn, order

Key = tuple[str, tuple[str, ...]]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """after: the steps that must have ended before this one begins. begun: it is under way already."""

    change: Change
    after: tuple[int, ...] = ()
    begun: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """steps in an order that works one by one; they may also run at once, each as soon as what it is after has ended.

    stopped: models that have fewer replicas in between than they had and are to have. notes: what is wanted and not
    done, or not understood.
    """

    steps: tuple[Step, ...] = ()
    stopped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def ready(self) -> tuple[Change, ...]:
        """What can be ordered now."""
        return tuple(step.change for step in self.steps if not step.after and not step.begun)


def plan(cluster: Cluster, models: Iterable[Model], wanted: Sequence[Replica]) -> Plan:
    """The steps from `cluster` to the replicas `wanted`; of these only model, devices and role count.

    Example: x and y have 10 pages each, "a" (6) is on x and "b" (6) on y, and they are to change places; z is free.
    FORK a to z, DRAIN and SLEEP a on x, FORK b to x, DRAIN and SLEEP b on y, FORK a to y, DRAIN and UNLOAD a on z.
    Without z, "b" is stopped: DRAIN and SLEEP b on y, FORK a to y, DRAIN and SLEEP a on x, WAKE or LOAD b on x.
    """
    known = {model.model: model for model in models}
    devices = {device.id: device for device in cluster.devices}
    there, strangers = _present(cluster.replicas, known, devices)
    chosen, left_out = _possible(wanted, there, known, devices)
    work = _Work(there, chosen, known, devices)
    turns = order(work.task())
    written = _Writer(work, turns)
    for turn in turns:
        written.write(turn)
    raised = {turn.piece.key for turn in turns if turn.rises}
    lost = [
        Note(piece.model, f"{'+'.join(piece.devices)} has no room for it, whatever goes")
        for piece in work.rising if piece.key not in raised
    ]  # fmt: skip
    stopped = tuple(sorted({turn.piece.model for turn in turns if turn.stopped}))
    return Plan(steps=tuple(written.steps), stopped=stopped, notes=(*strangers, *left_out, *lost))


def _present(
    replicas: Sequence[Replica], known: dict[str, Model], devices: dict[str, Device]
) -> tuple[dict[Key, Replica], list[Note]]:
    """What stands, by key. Of devices or models that nobody knows it is left alone, and told."""
    there, notes = {}, []
    for replica in sorted(replicas, key=lambda r: r.key):
        if replica.model in known and all(device in devices for device in replica.devices):
            there[replica.key] = replica
        else:
            what = "the model" if replica.model not in known else "the device"
            notes.append(Note(replica.name, f"it is left alone: {what} is unknown"))
    return there, notes


def _possible(
    wanted: Sequence[Replica],
    there: dict[Key, Replica],
    known: dict[str, Model],
    devices: dict[str, Device],
) -> tuple[dict[Key, Replica], list[Note]]:
    """Of the wanted replicas those that fit together, the important and the present first, and why the others do not.

    Where one is left out, a replica of the model that would have gone stays in its place if there is room.
    """
    room = {device.id: device.pages for device in devices.values()}
    chosen: dict[Key, Replica] = {}
    on: set[tuple[str, str]] = set()
    notes, short = [], []

    def fits(replica: Replica) -> bool:
        pages = known[replica.model].pages
        free = all(room[device] >= pages and (replica.model, device) not in on for device in replica.devices)
        if free:
            chosen[replica.key] = replica
            for device in replica.devices:
                room[device] -= pages
                on.add((replica.model, device))
        return free

    def rank(replica: Replica) -> tuple[int, bool, Key]:
        model = known.get(replica.model)
        return (0 if model is None else -model.priority, replica.key not in there, replica.key)

    for replica in sorted(wanted, key=rank):
        why = _wrong(replica, known, devices)
        if why is None and not fits(replica):
            why = "its devices have no room for all that is wanted on them"
            short.append(replica.model)
        if why is not None:
            notes.append(Note(replica.name, f"it is not raised: {why}"))
    for model in short:
        staying = [r for r in there.values() if r.model == model and r.standing is Standing.ACTIVE]
        next((r for r in staying if r.key not in chosen and fits(r)), None)
    return chosen, notes


def _wrong(replica: Replica, known: dict[str, Model], devices: dict[str, Device]) -> str | None:
    model = known.get(replica.model)
    if model is None:
        return "the model is unknown"
    strange = [device for device in replica.devices if device not in devices]
    if strange:
        return f"there is no device {strange[0]}"
    if len(set(replica.devices)) != len(replica.devices) or len(replica.devices) != model.shards:
        return f"it takes {model.shards} different devices"
    small = min((devices[device] for device in replica.devices), key=lambda d: d.pages)
    if small.pages < model.pages:
        return f"it needs {model.pages} pages and {small.id} has {small.pages} in all"
    return None


class _Work:
    """What rises, what goes and what only changes, as pieces."""

    def __init__(
        self,
        there: dict[Key, Replica],
        chosen: dict[Key, Replica],
        known: dict[str, Model],
        devices: dict[str, Device],
    ) -> None:
        self.there, self.chosen, self.known, self.devices = there, chosen, known, devices
        self.active: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self.coming: Counter[str] = Counter()
        self.rising: list[Piece] = []
        self.going: list[Piece] = []
        standing: dict[tuple[str, str], Key] = {}
        for key, replica in there.items():
            stays, standing_now = key in chosen, replica.standing
            again = stays and standing_now is Standing.DRAINING
            self.active[replica.model] += standing_now is Standing.ACTIVE
            self.again[replica.model] += again
            self.coming[replica.model] += standing_now is Standing.RISING
            if standing_now is Standing.SINKING or not stays:
                serves = standing_now in (Standing.ACTIVE, Standing.RISING)
                self.going.append(Piece(replica.model, replica.devices, known[replica.model].pages, serves))
                standing.update(((replica.model, device), key) for device in replica.devices)
        for key, replica in chosen.items():
            now = there[key].standing if key in there else None
            if now is None or now is Standing.SINKING:
                on = [standing[replica.model, d] for d in replica.devices if (replica.model, d) in standing]
                after = tuple(sorted(set(on)))
                self.rising.append(Piece(replica.model, replica.devices, known[replica.model].pages, True, after))
        self.rising.sort(key=lambda p: (-known[p.model].priority, -p.pages * len(p.devices), p.key))
        self.free = {device.id: device.pages for device in devices.values()}
        for replica in there.values():
            for device in replica.devices:
                self.free[device] -= known[replica.model].pages
        counts = Counter(replica.model for replica in chosen.values())
        self.floor = {name: min(self.active[name] + self.again[name], counts[name]) for name in known}

    def task(self) -> Task:
        """What is on its way, or will serve again, counts as there: the steps wait for it."""
        serving = self.active + self.again + self.coming
        cost = {name: (float(model.priority), model.outage_s) for name, model in self.known.items()}
        homes: dict[str, set[str]] = {name: set() for name in self.known}
        for model, devices in (*self.there, *self.chosen):
            homes[model].update(devices)
        closed = {name: frozenset(on) for name, on in homes.items()}
        return Task(self.rising, self.going, serving, self.floor, cost, self.free, closed)


class _After(NamedTuple):
    """Of one device or model: what it has at the start, what the steps so far take of it, and what they give when."""

    left: int
    given: list[tuple[int, int]]

    def needed(self) -> tuple[int, ...]:
        """The earliest of the steps that give which make up for what is missing."""
        missing, needed = -self.left, []
        for amount, step in self.given:
            if missing <= 0:
                break
            missing -= amount
            needed.append(step)
        return tuple(needed)


class _Writer:
    """Turns become steps: an order with its sentence, and the earlier steps that it has to wait for.

    A step counts every earlier one as having taken what it takes, and waits for as many of those that give as make up
    for it. So steps may overtake each other, and what a device or a model lacks never depends on who was faster.
    """

    def __init__(self, work: _Work, turns: Sequence[Turn]) -> None:
        self.work = work
        self.steps: list[Step] = []
        self.pages = {device: _After(free, []) for device, free in work.free.items()}
        self.spare = {name: _After(work.active[name] - floor, []) for name, floor in work.floor.items()}
        self.raised: dict[Key, int] = {}
        self.sunk: dict[Key, int] = {}
        self.holders: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        self.next_of: dict[str, list[Piece]] = defaultdict(list)
        for turn in turns:
            if turn.rises:
                self.next_of[turn.piece.model].append(turn.piece)
        for key, replica in work.there.items():
            if replica.standing is Standing.ACTIVE:
                self.holders[replica.model].append(replica.devices)
            elif replica.standing is Standing.RISING:
                why = f"{replica.name} is on its way"
                self._risen(key, self._add(_of(replica, Verb.LOAD, why, work.chosen.get(key)), (), begun=True))
            if key in work.chosen:
                self._keep(replica, work.chosen[key])

    def write(self, turn: Turn) -> None:
        if turn.rises:
            self._raise(turn)
        else:
            self._lower(turn)

    def _keep(self, replica: Replica, wanted: Replica) -> None:
        if replica.standing is Standing.DRAINING:
            why = f"{replica.name} serves again: it is wanted where it is"
            self._risen(replica.key, self._add(_of(replica, Verb.SERVE, why, wanted), ()))
        elif replica.standing is Standing.ACTIVE and replica.role is not wanted.role:
            why = f"{replica.name} is wanted for {wanted.role.value} instead of {replica.role.value}"
            self._add(_of(replica, None, why, wanted), ())

    def _raise(self, turn: Turn) -> None:
        piece, key = turn.piece, turn.piece.key
        after = {self.sunk[k] for k in piece.after if k in self.sunk}
        for device in piece.devices:
            room = self._take(self.pages, device, piece.pages)
            after.update(room.needed())
        if turn.detour:
            why = f"{piece.model} goes to {'+'.join(piece.devices)} for the time being: it stands in the way"
        else:
            why = f"{piece.model} is wanted on {'+'.join(piece.devices)}"
        wanted = self.work.chosen.get(key)
        change = _of(Replica(model=piece.model, devices=piece.devices), self._verb(piece), why, wanted)
        self._risen(key, self._add(change, tuple(sorted(after))))

    def _risen(self, key: Key, step: int) -> None:
        self.raised[key] = step
        self.holders[key[0]].append(key[1])
        self.spare[key[0]].given.append((1, step))

    def _lower(self, turn: Turn) -> None:
        piece, key = turn.piece, turn.piece.key
        replica = self.work.there.get(key) if not turn.detour else None
        standing = Standing.ACTIVE if replica is None else replica.standing
        at = "+".join(piece.devices)
        after: tuple[int, ...] = (self.raised[key],) if key in self.raised else ()
        self.holders[piece.model] = [on for on in self.holders[piece.model] if on != piece.devices]
        begun = standing is Standing.SINKING
        if standing in (Standing.ACTIVE, Standing.RISING):
            if piece.serving:
                spare = self._take(self.spare, piece.model, 0 if turn.stopped else 1)
                after = (*after, *(() if turn.stopped else spare.needed()))
            change = Change(verb=Verb.DRAIN, model=piece.model, devices=piece.devices, why=self._why_drained(turn))
            after = (self._add(change, tuple(sorted(set(after)))),)
        elif standing is Standing.DRAINING and replica is not None and replica.running:
            why = f"{replica.name} finishes its {replica.running} requests"
            after = (self._add(_of(replica, Verb.DRAIN, why, None), (), begun=True),)
        verb = Verb.UNLOAD if turn.detour else Verb.SLEEP
        why = f"{piece.model} gives up its pages on {at} when its requests have ended"
        sink = Change(verb=verb, model=piece.model, devices=piece.devices, why=why)
        step = self._add(sink, after, begun=begun)
        self.sunk[key] = step
        for device in piece.devices:
            self.pages[device].given.append((piece.pages, step))

    def _why_drained(self, turn: Turn) -> str:
        piece = turn.piece
        name = f"{piece.model}@{'+'.join(piece.devices)}"
        others = self.holders[piece.model]
        if turn.stopped:
            return (
                f"{name} is stopped before it is up elsewhere: no order of the moves and no spare device avoids it, "
                f"and it is the least important in the way (about {self.work.known[piece.model].outage_s:g} s)"
            )
        if turn.detour:
            return f"{name} was there for the time being"
        if piece.serving and piece.model in self.next_of and others:
            return f"{name} is not wanted there any more: {'+'.join(others[-1])} has taken its place"
        return f"{name} is not wanted any more"

    def _verb(self, piece: Piece) -> Verb:
        """A near holder, then the host copies, then any holder, then the checkpoint: what `source` will find then."""
        devices = self.work.devices
        domains = {devices[device].domain for device in piece.devices}
        holders = self.holders[piece.model]
        if any({devices[d].domain for d in on} == domains for on in holders):
            return Verb.FORK
        slept = {devices[d].host for key in self.sunk if key[0] == piece.model for d in key[1]}
        if all(piece.model in devices[d].copies or devices[d].host in slept for d in piece.devices):
            return Verb.WAKE
        return Verb.FORK if holders else Verb.LOAD

    def _take(self, of: dict[str, _After], what: str, amount: int) -> _After:
        of[what] = of[what]._replace(left=of[what].left - amount)
        return of[what]

    def _add(self, change: Change, after: tuple[int, ...], begun: bool = False) -> int:
        self.steps.append(Step(change=change, after=after, begun=begun))
        return len(self.steps) - 1


def _of(replica: Replica, verb: Verb | None, why: str, wanted: Replica | None) -> Change:
    role = replica.role if wanted is None else wanted.role
    return Change(verb=verb, model=replica.model, devices=replica.devices, why=why, role=role)
