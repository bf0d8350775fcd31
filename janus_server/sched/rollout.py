"""Where the elastic pool's replicas start and which are drained, so that each model has as many as it is to have. Pure.

The fast path calls `roll` with the targets that `scaling` set and what stands, orders that were given included; more
orders are the answer, each with its reason. An elastic replica has its devices to itself, but it may start beside one
that is being drained. What has no device yet is a note, and is tried again at the next call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from janus_server.orders import Verb
from janus_server.sched.placement import Change, Cluster, Device, Model, Note, Replica, Role, Standing, free_pages
from janus_server.sched.roles import first_role, flips
from janus_server.sched.scaling import impossible
from janus_server.sched.source import Links, spread

_LIVE: Final = (Standing.ACTIVE, Standing.RISING)


class RolloutRules(msgspec.Struct, frozen=True, kw_only=True):
    """headroom_pages: what a device must have free beyond a replica's pages where another is still being drained."""

    headroom_pages: int = 0
    links: Links = Links()


class Rollout(msgspec.Struct, frozen=True):
    changes: tuple[Change, ...] = ()
    notes: tuple[Note, ...] = ()


def roll(
    cluster: Cluster,
    models: Mapping[str, Model],
    targets: Mapping[str, int],
    decode_shares: Mapping[str, float] | None = None,
    rules: RolloutRules = RolloutRules(),  # noqa: B008 - frozen
    around: Cluster = Cluster(),  # noqa: B008 - frozen
) -> Rollout:
    """The orders that bring `cluster`, the devices and replicas of the elastic pool, to `targets`.

    Models that are short take turns, the important first, then those with the smallest part of what they are to have.
    decode_shares: the part of each split model's work that is decoding, where it is known. around: devices that are not
    of the pool, and replicas there: weights may be copied from them.

    Example: x, y and z are free; "a" is to have 1 and has none, "b" is to have 4 and has 1: a starts on x, b on y and
    z, and a note says that b waits for one more.
    """
    return _Roll(cluster, models, targets, decode_shares or {}, rules, around).run()


class _Roll:
    """One call under way: what is free shrinks with every order."""

    def __init__(
        self,
        cluster: Cluster,
        models: Mapping[str, Model],
        targets: Mapping[str, int],
        decode_shares: Mapping[str, float],
        rules: RolloutRules,
        around: Cluster,
    ) -> None:
        self.cluster, self.models, self.targets, self.rules, self.around = cluster, models, targets, rules, around
        self.decode_shares = decode_shares
        self.devices = {device.id: device for device in cluster.devices}
        self.sizes = sorted(device.pages for device in cluster.devices)
        self.free = free_pages(cluster, models.values())
        self.changes: list[Change] = []
        self.notes: list[Note] = []
        self.of: dict[str, list[Replica]] = defaultdict(list)
        self.live_on: set[str] = set()
        self.on: dict[str, list[Replica]] = defaultdict(list)
        for replica in sorted(cluster.replicas, key=lambda r: r.key):
            if replica.model not in models or any(device not in self.devices for device in replica.devices):
                self.notes.append(Note(replica.name, "it is left alone: its model or its device is unknown"))
                self.live_on.update(replica.devices)
                continue
            self.of[replica.model].append(replica)
            for device in replica.devices:
                self.on[device].append(replica)
            if replica.standing in _LIVE:
                self.live_on.update(replica.devices)
        self.count = {model: sum(r.standing in _LIVE for r in held) for model, held in self.of.items()}

    def run(self) -> Rollout:
        for model in sorted(set(self.targets) - set(self.models)):
            self.notes.append(Note(model, "its target is ignored: the model is unknown"))
        for model in sorted(self.of):
            if model not in self.targets or self.targets[model] < self.count[model]:
                self._drain(self.models[model], self.targets.get(model, 0))
        starts = self._start()
        for model in sorted(self.of):
            self._flip(self.models[model], self.targets.get(model, 0))
        self._write(starts)
        self._sink()
        return Rollout(tuple(self.changes), tuple(self.notes))

    # Less

    def _drain(self, model: Model, target: int) -> None:
        """The least busy go: prefill before decode, and none whose weights are being copied if another can go.

        Of what is on its way nothing is stopped: it can be drained when it has arrived.
        """
        active = [r for r in self.of[model.model] if r.standing is Standing.ACTIVE]
        surplus = min(self.count[model.model] - target, len(active))
        ranked = sorted(active, key=lambda r: (r.role is Role.DECODE, r.serves > 0, r.running, r.backlog_s, r.devices))
        for n, replica in enumerate(ranked[: max(0, surplus)]):
            busy = f"{replica.running} requests finish first" if replica.running else "it has nothing to do"
            why = f"{replica.name} is drained: it is one too many of {self.count[model.model] - n}; {busy}"
            self.changes.append(Change(verb=Verb.DRAIN, model=model.model, devices=replica.devices, why=why,
                                       role=replica.role))  # fmt: skip
            self._replace(replica, msgspec.structs.replace(replica, standing=Standing.DRAINING))
            self.live_on.difference_update(replica.devices)
        if surplus > 0:
            self.count[model.model] -= surplus

    def _replace(self, old: Replica, new: Replica) -> None:
        self.of[old.model] = [new if r is old else r for r in self.of[old.model]]
        for device in old.devices:
            self.on[device] = [new if r is old else r for r in self.on[device]]

    def _sink(self) -> None:
        """What is drained and has nothing to do any more gives up its pages."""
        drained = {(change.model, change.devices) for change in self.changes if change.verb is Verb.DRAIN}
        served = {(change.model, change.devices) for change in self.changes if change.verb is Verb.SERVE}
        for model in sorted(self.of):
            for replica in self.of[model]:
                done = replica.standing is Standing.DRAINING and not replica.running and not replica.serves
                if done and replica.key not in drained and replica.key not in served:
                    why = f"{replica.name} has nothing to do any more and gives up its pages"
                    self.changes.append(Change(verb=Verb.SLEEP, model=model, devices=replica.devices, why=why,
                                               role=replica.role))  # fmt: skip

    # More

    def _start(self) -> dict[str, list[tuple[tuple[str, ...], str]]]:
        """New homes by model, each with a word about it: one replica for each that is short, round after round."""
        starts: dict[str, list[tuple[tuple[str, ...], str]]] = defaultdict(list)
        short = {name: self.models[name] for name, target in self.targets.items()
                 if name in self.models and target > self.count.get(name, 0)}  # fmt: skip
        while short:
            for name in sorted(short, key=lambda n: (-short[n].priority, self._part(n), n)):
                model = short[name]
                if not self._serve_again(model):
                    found = self._home(model)
                    if isinstance(found, Note):
                        self.notes.append(found)
                        del short[name]
                        continue
                    starts[name].append(found)
                self.count[name] = self.count.get(name, 0) + 1
                if self.count[name] >= self.targets[name]:
                    del short[name]
        return starts

    def _part(self, model: str) -> float:
        return self.count.get(model, 0) / self.targets[model]

    def _serve_again(self, model: Model) -> bool:
        """What is still being drained need not be started: it only takes requests again."""
        for replica in self.of.get(model.model, ()):
            if replica.standing is not Standing.DRAINING:
                continue
            alone = not any(device in self.live_on for device in replica.devices)
            if alone and not any(c.verb is Verb.DRAIN and c.devices == replica.devices for c in self.changes):
                why = f"{replica.name} serves again: {self.targets[model.model]} replicas are wanted"
                self.changes.append(Change(verb=Verb.SERVE, model=model.model, devices=replica.devices, why=why,
                                           role=replica.role))  # fmt: skip
                self._replace(replica, msgspec.structs.replace(replica, standing=Standing.ACTIVE))
                self.live_on.update(replica.devices)
                return True
        return False

    def _home(self, model: Model) -> tuple[tuple[str, ...], str] | Note:
        """Devices of one host, or of one domain: free ones first, else the tightest that are being drained."""
        why = impossible(model, self.sizes)
        if why is not None:
            return Note(model.model, why)
        able = [device for device in self.devices.values() if self._able(model, device)]
        empty = [device for device in able if not self.on[device.id]]
        for among, word in ((empty, "free"), (able, "being drained, with room beside it")):
            chosen = self._together(model, among)
            if chosen:
                for device in chosen:
                    self.free[device] -= model.pages
                    self.live_on.add(device)
                return chosen, word
        missing = self.targets[model.model] - self.count.get(model.model, 0)
        draining = sum(r.standing in (Standing.DRAINING, Standing.SINKING) for held in self.of.values() for r in held)
        return Note(model.model, f"it waits for devices for {missing} more; being drained: {draining}")

    def _able(self, model: Model, device: Device) -> bool:
        if device.id in self.live_on or any(r.model == model.model for r in self.on[device.id]):
            return False
        headroom = self.rules.headroom_pages if self.on[device.id] else 0
        return self.free[device.id] >= model.pages + headroom

    def _together(self, model: Model, among: Sequence[Device]) -> tuple[str, ...]:
        """The tightest of the hosts, else of the domains, that have enough; in it the devices with the least room."""
        for place in (lambda device: (device.domain, device.host), lambda device: (device.domain, "")):
            groups: dict[tuple[str, str], list[Device]] = defaultdict(list)
            for device in among:
                groups[place(device)].append(device)
            enough = [(len(group), key) for key, group in groups.items() if len(group) >= model.shards]
            if enough:
                group = groups[min(enough)[1]]
                group.sort(key=lambda d: (model.model not in d.copies, self.free[d.id], d.id))
                return tuple(sorted(device.id for device in group[: model.shards]))
        return ()

    def _write(self, starts: Mapping[str, list[tuple[tuple[str, ...], str]]]) -> None:
        """Orders for the new homes, in turns over models. Who would have to wait for its source is ordered then."""
        written: list[tuple[int, int, str, Change]] = []
        for name, homes in starts.items():
            model = self.models[name]
            standing = self.of.get(name, [])
            for n, copy in enumerate(spread(model, [home for home, _ in homes], self._near(model), self.rules.links)):
                if copy.begin_s > 0.0:
                    self.notes.append(Note(name, f"a replica on {'+'.join(copy.devices)} follows {copy.why}"))
                    continue
                role = first_role(model, standing)
                why = (
                    f"{name} starts on {'+'.join(copy.devices)} ({homes[n][1]}) as one of {self.targets[name]}: "
                    f"{copy.why}"
                )
                source = copy.source.devices[0] if copy.source is not None else None
                change = Change(verb=copy.origin.verb, model=name, devices=copy.devices, why=why, role=role,
                                source=source, takes_s=copy.end_s)  # fmt: skip
                written.append((n, -model.priority, name, change))
                standing = [*standing, Replica(model=name, devices=copy.devices, standing=Standing.RISING, role=role)]
        self.changes += [change for *_, change in sorted(written, key=lambda w: w[:3])]

    def _near(self, model: Model) -> Cluster:
        """What `spread` has to know: the model's replicas, and what is on its way."""
        rising = [r for r in self.cluster.replicas if r.standing is Standing.RISING and r.model != model.model]
        others = [r for r in self.around.replicas if r.standing is Standing.RISING or r.model == model.model]
        devices = (*self.cluster.devices, *self.around.devices)
        return Cluster(devices, (*self.of.get(model.model, ()), *others, *rising))

    def _flip(self, model: Model, target: int) -> None:
        if model.split and target:
            changes = flips(model, self.of[model.model], self.decode_shares.get(model.model, math.nan))
            self.changes += changes
            self._adopt(changes)

    def _adopt(self, changes: Iterable[Change]) -> None:
        for change in changes:
            old = next(r for r in self.of[change.model] if r.devices == change.devices)
            self._replace(old, msgspec.structs.replace(old, role=change.role))
