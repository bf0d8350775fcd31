"""Which models are up on which of many nodes: both paths of the leader, over the rooms of its nodes. Pure.

The Brain owns one and asks it when time has passed or something happened. The slow path (30 s) says which models share
devices and packs those; the fast path (0.5 s) gives the others as many replicas as they need, and takes both plans one
step further: it tells rooms what to bring up, to give up and to keep, and they order it. With one node there is nothing
to choose, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from janus_server.duty import Duty
from janus_server.orders import Action, Counted, Decided, Verb
from janus_server.sched.fleet_records import FleetMemory, FleetSettings
from janus_server.sched.footing import Footing
from janus_server.sched.foresight import Foresight, at_rate
from janus_server.sched.meter import Meter
from janus_server.sched.mind import Load, Question, Shares
from janus_server.sched.notebook import Notebook
from janus_server.sched.oracle_records import Features
from janus_server.sched.placement import Change, Cluster, Device, Note, Replica, Standing
from janus_server.sched.plan import plan
from janus_server.sched.pools import Member, Pool, Pools, assign, steady_demands
from janus_server.sched.rollout import RolloutRules, roll
from janus_server.sched.room import Room
from janus_server.sched.roster import Roster
from janus_server.sched.scaling import Scaler, impossible
from janus_server.sched.seating import seat
from janus_server.sched.signals import signals
from janus_server.sched.source import Origin, choose

_UP = (Verb.LOAD, Verb.WAKE, Verb.FORK)
_DOWN = (Verb.DRAIN, Verb.SLEEP, Verb.UNLOAD)
# So many periods of the slow path a note holds after it was made last.
_NOTES_HOLD = 4.0


class Fleet:
    """backlog_s(node) is the prefill work before a node, waiting_s() by model that of requests that nobody began."""

    def __init__(
        self,
        settings: FleetSettings,
        rooms: Mapping[str, Room],
        foresight: Foresight,
        backlog_s: Callable[[str, float], float],
        waiting_s: Callable[[], Mapping[str, float]],
        known: FleetMemory,
    ) -> None:
        """With what another one knew (`memory`), this one goes on."""
        self._settings, self._rooms, self._foresight = settings, rooms, foresight
        self._backlog_s, self._waiting_s = backlog_s, waiting_s
        self._waiting: Mapping[str, float] = {}
        self.footing = Footing(rooms, known.homes)
        self._scaler = Scaler(settings.scaling, settings.table, known.scaler)
        self._meter = Meter(known.gauges)
        self._pools, self._seating = known.pools, known.seating
        self._called, self._asleep, self._lacking = dict(known.called), set(known.asleep), dict(known.lacking)
        self._notebook = Notebook(_NOTES_HOLD * settings.slow_s, known.noted)
        self._since_s, self._fast_s, self._slow_s = known.since_s, known.fast_s, known.slow_s
        self._roster = Roster()
        self._elastic: tuple[Device, ...] = ()
        self._inside: frozenset[str] = frozenset()
        self._moving = known.moving
        for room in rooms.values():
            self._know(room)
        self._cluster(0.0)

    def memory(self) -> FleetMemory:
        """What it knows now, as a copy."""
        return FleetMemory(
            homes=self.footing.homes(), pools=self._pools, seating=self._seating, scaler=self._scaler.memory(),
            gauges=self._meter.memory(),
            called=dict(self._called), lacking=dict(self._lacking), asleep=tuple(sorted(self._asleep)),
            noted=self._notebook.memory(), since_s=self._since_s, fast_s=self._fast_s, slow_s=self._slow_s,
            moving=self._moving,
        )  # fmt: skip

    @property
    def pools(self) -> Pools:
        """Which models share devices, and which have some of their own."""
        return self._pools

    @property
    def leads(self) -> bool:
        """There is something to choose."""
        return len(self._rooms) > 1

    def due(self, now: float) -> bool:
        return self.leads and now >= min(self._fast_s, self._slow_s)

    def next_wake(self) -> float | None:
        return min(self._fast_s, self._slow_s) if self.leads else None

    # Hearing

    def joined(self, room: Room) -> None:
        """A node came: who found no room may have some now."""
        self._know(room)
        self._soon()

    def _know(self, room: Room) -> None:
        room.led = self._roster.led
        self._roster.joined(room)

    def left(self, room: Room) -> None:
        """A node went, and its room with it."""
        self._roster.left(room)
        self._seating = self._seating.left(room.node)
        self.look(room.node)
        self._soon()

    def assigned(self, room: Room, now: float) -> None:
        """A node is to be emptied, or serves again: both paths go at once, without it or with it."""
        if room.duty is not Duty.SERVE:
            self._seating = self._seating.left(room.node)
        self._fast_s = self._slow_s = min(self._fast_s, now)
        self.look(room.node)

    def promised(self, model: str, nodes: tuple[str, ...]) -> None:
        """It is to be up there as soon as there is room."""
        if self.decides(model):
            self._seating = self._seating.without(model).taken(model, nodes)
            self._moving = True

    def _soon(self) -> None:
        """Both paths, the next time that one is due: nodes come and go many at once."""
        self._slow_s, self._moving = min(self._slow_s, self._fast_s), True

    def knows(self, model: str) -> bool:
        """A node has it in its catalogue."""
        return model in self._roster.models

    def decides(self, model: str) -> bool:
        """Where it is up is chosen here, and not by the nodes that have it."""
        return model in self._roster.led

    def note(self, notes: Sequence[Note], now: float, actions: list[Action]) -> None:
        """Say what is not done, or not believed, each once while it holds."""
        self._notebook.say(notes, now, actions)

    def look(self, node: str) -> None:
        """Something happened to what a room believes."""
        self.footing.look(node)
        self._moving = True

    def counted(self, event: Counted, now: float) -> None:
        self._meter.counted({name: counts for name, counts in event.models.items() if self.knows(name)}, now)

    def call(self, model: str, now: float) -> None:
        """Somebody wants the model, and no replica of it is up or on its way: it is looked for a place now."""
        self._asleep.discard(model)
        self._called[model] = now
        self._fast_s = self._slow_s = min(self._fast_s, now)

    def homeless(self, now: float) -> list[str]:
        """Models that requests wait for and that found no place: for a fast period no replica was up or on its way."""
        lacking = [name for name in self._waiting if self.knows(name) and not self.footing.held(name)]
        self._lacking = {name: self._lacking.get(name, now) for name in lacking}
        return [name for name, since_s in self._lacking.items() if now - since_s >= self._settings.fast_s]

    def sleep(self, model: str, node: str | None) -> None:
        """An operator put it to sleep, on one node or on all: it is left alone until somebody calls it, unless it is up
        elsewhere.
        """
        self._seating = self._seating.without(model, None if node is None else (node,))
        if node is None or not any(self.footing.of(model, other) for other in self._rooms if other != node):
            self._asleep.add(model)

    def wish(self, model: str, nodes: tuple[str, ...], now: float) -> None:
        """An operator wants it up there."""
        self._asleep.discard(model)
        self._called[model] = now
        self.adopt(model, nodes)

    def adopt(self, model: str, nodes: tuple[str, ...]) -> None:
        """A replica is up there, or will be, for a reason of its own."""
        if self._roster.models[model].shards == len(nodes) and self.footing.add(model, nodes) and self.decides(model):
            for s in self._seating.seats:
                if s.model == model and (s.devices == nodes or not self._held(s)):  # nothing came of it
                    self._seating = self._seating.without(model, s.devices)
            self._seating = self._seating.taken(model, nodes)

    def _held(self, seat: Replica) -> bool:
        return self.footing.of(seat.model, seat.devices[0]) == seat.devices

    # Deciding

    def decide(self, now: float, actions: list[Action]) -> list[str]:
        """What is due now. Rooms are told; their names come back, and sentences are appended."""
        if self._since_s is None:
            self._since_s = now
        notes: list[Note] = []
        self._waiting = self._waiting_s()
        pressed = self._pressed(now)
        if now >= self._slow_s or (pressed and now >= self._slow_s - self._settings.slow_s + self._settings.press_s):
            self._slow(self._cluster(now), pressed, now, actions, notes)
            self._slow_s, self._moving = now + self._settings.slow_s, True
        if any([self._held(one) for one in self._seating.seats if not self._kept(one.model, now)]):
            self._moving = True
        cluster = self._cluster(now) if self._moving else None
        if self._scale(now, actions, notes) and cluster is None:
            cluster = self._cluster(now)
        self._fast_s = now + self._settings.fast_s
        touched = [] if cluster is None else self._move(cluster, now, notes)
        self.note(notes, now, actions)
        return touched

    def _move(self, cluster: Cluster, now: float, notes: list[Note]) -> list[str]:
        """Tell rooms what comes next in both pools."""
        touched: list[str] = []
        here, there = self._apart(cluster)
        changes = [*self._roll(here, there, notes), *self._step(here, there, now, notes)]
        for change in changes:
            touched += self._tell(change, cluster, now, notes)
        for model, node in self.footing.rests():
            if self._rooms[node].lower(model, f"{model}@{node} is of no use: it is no whole replica"):
                touched.append(node)
        # Whatever is on its way or going needs another look, though nothing may happen in between.
        self._moving = bool(changes) or any(r.standing is not Standing.ACTIVE for r in cluster.replicas)
        return touched

    def _cluster(self, now: float) -> Cluster:
        cluster = self.footing.cluster(lambda node: self._backlog_s(node, now), self._roster.reserve_pages)
        held = {device for one in self._seating.seats for device in one.devices}
        steady = set(self._pools.of(Pool.STEADY))
        alone = steady.union(set(self._roster.models) - self._roster.led)
        held.update(device for r in cluster.replicas if r.model in alone for device in r.devices)
        # A replica is in one of the pools with all of its devices.
        while across := [r.devices for r in cluster.replicas
                         if not held.isdisjoint(r.devices) and not held.issuperset(r.devices)]:  # fmt: skip
            held.update(device for devices in across for device in devices)
        elastic = tuple(device for device in cluster.devices if device.id not in held)
        if elastic != self._elastic:  # the same object while it is the same: the scaler looks at no more
            self._elastic, self._inside = elastic, frozenset(device.id for device in elastic)
        return cluster

    # The slow path

    def _awake(self, now: float) -> list[str]:
        """The models that are to be up somewhere: who is left alone for as long as it may be is not."""
        return [name for name in sorted(self._roster.led) if name not in self._asleep and not self._idle(name, now)]

    def _idle(self, name: str, now: float) -> bool:
        idle_s = self._roster.models[name].idle_s
        if idle_s is None or name in self._waiting or self.footing.busy(name):
            return False
        called_s = self._called.get(name, self._since_s if self._since_s is not None else now)
        return min(self._meter.idle_for_s(name, now), now - called_s) >= idle_s

    def _pressed(self, now: float) -> list[str]:
        """Models that share devices and that one replica there is too little for: more prompts wait than it may let
        wait, or more requests were late than may be."""
        rules, found = self._settings.scaling, []
        for name in self._pools.of(Pool.STEADY):
            load = self._meter.load(name, self._waiting.get(name, 0.0), now)
            most = (1.0 - self._roster.models[name].target) * load.ended if name in self._roster.models else load.ended
            if load.backlog_s > rules.queue_most_s or (load.ended >= rules.late_least and load.late > most):
                found.append(name)
        return found

    def _slow(
        self, cluster: Cluster, pressed: Collection[str], now: float, actions: list[Action], notes: list[Note]
    ) -> None:
        """Who shares devices, and which."""
        devices = cluster.devices
        sizes = sorted(device.pages for device in devices)
        vain = {name: impossible(self._roster.models[name], sizes) for name in self._awake(now)}
        awake = [name for name, why in vain.items() if why is None]
        notes += [*self._roster.notes(), *(Note(name, why) for name, why in vain.items() if why is not None)]
        found = signals(awake, self._roster.models, devices, self._foresight, self._meter, pressed, self._settings, now)
        if len(self._settings.pools) == 1:
            only = self._settings.pools[0]
            self._pools = Pools(tuple(Member(model=name, pool=only, since_s=now) for name in sorted(awake)), now)
        else:
            assignment = assign(self._pools, found, len(devices), now, self._settings.assignment)
            self._pools = assignment.pools
            actions += [Decided(change.model, change.why) for change in assignment.changes]
            notes += assignment.notes
        demands = steady_demands(self._pools, found, self._settings.overlap)
        self._seating = seat(demands, cluster, self._seating, self._settings.packing, actions, notes)

    # The fast path

    def _scale(self, now: float, actions: list[Action], notes: list[Note]) -> bool:
        """How many replicas the elastic models are to have; whether that changed."""
        elastic = [name for name in self._pools.of(Pool.ELASTIC) if self.decides(name) and name not in self._asleep]
        loads = [self._meter.load(name, self._waiting.get(name, 0.0), now) for name in elastic]
        models = self._roster.models
        short = sum(models[name].shards for name in self._seating.refused if name in models)
        devices = self._elastic[: max(0, len(self._elastic) - short)] if short else self._elastic
        targets, said = self._scaler.decide(
            loads, models, devices, lambda questions: self._expect(questions, loads, now), now
        )
        actions += [Decided(target.model, target.why) for target in targets]
        notes += said
        return bool(targets)

    def _expect(self, questions: Sequence[Question], loads: Sequence[Load], now: float) -> Sequence[Shares | None]:
        """Asked of the few models whose traffic changed: most ticks ask nothing."""
        asked = {question.model for question in questions}
        traffic = {load.model: self._at(load, now) for load in loads if load.model in asked and load.tokens_s > 0.0}
        return self._foresight.expect(questions, traffic)

    def _at(self, load: Load, now: float) -> Features:
        """The lengths of the last seconds, at the rate that the load tells."""
        lately = self._meter.lately(load.model, now) or Features(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return at_rate(lately, load.tokens_s)

    def _roll(self, here: Cluster, there: Cluster, notes: list[Note]) -> tuple[Change, ...]:
        """One step of the elastic pool."""
        rolled = roll(here, self._roster.models, self._scaler.targets,
                      rules=RolloutRules(links=self._settings.links), around=there)  # fmt: skip
        notes += rolled.notes
        return rolled.changes

    def _step(self, here: Cluster, there: Cluster, now: float, notes: list[Note]) -> tuple[Change, ...]:
        """One step of the steady pool. A model that went to the other one stays until it is up there."""
        up = {r.model for r in here.replicas if r.standing is Standing.ACTIVE}
        leaving = set(self._pools.of(Pool.ELASTIC)) - up
        # A node where models wait for each other's room lets them take turns: that is not to be planned against.
        waiting = {r.key for r in there.replicas if self.footing.waits(r)}
        there = Cluster(there.devices, tuple(r for r in there.replicas if r.key not in waiting))
        wanted = [one for one in self._seating.seats
                  if one.key not in waiting and one.model not in leaving and self._kept(one.model, now)]  # fmt: skip
        # What is none of its business stays too.
        wanted += [r for r in there.replicas if r.standing is not Standing.SINKING
                   and (r.model in leaving or not self.decides(r.model))]  # fmt: skip
        made = plan(there, self._roster.models.values(), wanted)
        notes += made.notes
        return made.ready

    def _apart(self, cluster: Cluster) -> tuple[Cluster, Cluster]:
        """The elastic pool, and the rest."""
        inside = self._inside
        within = [inside.issuperset(r.devices) for r in cluster.replicas]
        return (
            Cluster(self._elastic, tuple(r for r, yes in zip(cluster.replicas, within, strict=True) if yes)),
            Cluster(tuple(device for device in cluster.devices if device.id not in inside),
                    tuple(r for r, yes in zip(cluster.replicas, within, strict=True) if not yes)),
        )  # fmt: skip

    def _kept(self, name: str, now: float) -> bool:
        return self.decides(name) and name not in self._asleep and not self._idle(name, now)

    # Telling

    def _tell(self, change: Change, cluster: Cluster, now: float, notes: list[Note]) -> Sequence[str]:
        if change.verb in _DOWN:
            feeding = any(r.key == (change.model, change.devices) and r.serves for r in cluster.replicas)
            return () if feeding else self._lower(change.model, change.devices, self._why_down(change, now))
        if change.verb is Verb.SERVE:
            for node in change.devices:
                self._rooms[node].keep(change.model)
            return change.devices
        if change.verb not in _UP:
            return ()
        for node in change.devices:
            belief = self._rooms[node].models[change.model]
            if belief.barred(now):
                notes.append(Note(f"{change.model}@{node}", f"it is not raised: {belief.broken}"))
                return ()
        sources = self._sources(change, cluster)
        if not self.footing.add(change.model, change.devices):
            return ()  # what is left of another one there goes first
        for node, source in zip(change.devices, sources, strict=True):
            self._rooms[node].bring(change.model, source, change.why, now)
        return change.devices

    def _why_down(self, change: Change, now: float) -> str:
        name = f"{change.model}@{'+'.join(change.devices)}"
        if self._idle(change.model, now):
            return f"{name}: no request for {self._roster.models[change.model].idle_s:g} s"
        if change.model in self._pools.of(Pool.ELASTIC) and not set(change.devices) <= self._inside:
            return f"{name}: the model has nodes of its own"
        return change.why

    def _lower(self, model: str, nodes: Sequence[str], why: str) -> list[str]:
        """The head first: what it runs takes all shards."""
        beliefs = [self._rooms[node].models[model] for node in nodes]
        if any(belief.pinned for belief in beliefs):
            return []
        there = nodes[:1] if beliefs[0].busy else nodes
        return [node for node in there if self._rooms[node].lower(model, why)]

    def _sources(self, change: Change, cluster: Cluster) -> Sequence[str | None]:
        """Of which node each shard is copied; None where it comes from the host or a checkpoint."""
        feeder: tuple[str, ...] = ()
        if change.source is not None:
            feeder = self.footing.of(change.model, change.source)
        elif change.verb is Verb.FORK:
            copy = choose(self._roster.models[change.model], change.devices, cluster, self._settings.links)
            if copy.source is not None and copy.origin in (Origin.NEAR, Origin.FAR):
                feeder = copy.source.devices
        return feeder if len(feeder) == len(change.devices) else self.footing.leaver(change.model, change.devices)
