"""ServerlessLLM as a baseline: whole devices for each replica, as many as requests ask for, none kept without them.

desired = ⌈active / 8⌉, from 0 to 8; a replica too many for 60 s is put to sleep, one whose room is needed at once, the
one used longest ago first. Nodes are chosen by the estimated time until the model is up there, from whatever tier is
quickest (host copy, a peer's memory, disk), with what is queued on it and with what must be cleared before. Requests
go to the replica with the fewest, in order of arrival; while more replicas are on their way none is given more than 8,
so that the first to arrive does not take all. Its loads use the same links as everybody's here; its live migration of
running requests, which frees a node that has a copy, is left out.
"""

from __future__ import annotations

import math
from typing import Final

from janus_server.orders import Counted, Ticket

from .frontdesk import Desk
from .replicas import Phase, Replica, Site
from .seats import Reserved, choose, vain
from .yard import Yard

PER_REPLICA: Final = 8


def cap(yard: Yard, model: str) -> float:
    """How many requests a replica may have just now."""
    rising = any(replica.phase in (Phase.PLANNED, Phase.RISING) for replica in yard.of(model))
    return PER_REPLICA if rising else math.inf


class ServerlessLLM:
    """The rule: see `baseline`."""

    period_s = 1.0

    def __init__(
        self, yard: Yard, desk: Desk, *, per_replica: int = PER_REPLICA, most: int = 8, keep_s: float = 60.0
    ) -> None:
        self._yard, self._desk = yard, desk
        self._per_replica, self._most, self._keep_s = per_replica, most, keep_s
        self._reserved = Reserved(yard)
        self._starved: dict[str, None] = {}
        self._surplus_s: dict[str, float] = {}
        self._called: dict[str, None] = {}

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        for ticket in tickets:
            if ticket.model not in self._starved and not self._have(ticket.model):
                self._scale(ticket.model, now)

    def wanted(self, model: str, now: float) -> None:
        self._called[model] = None
        if model not in self._starved and not self._have(model):
            self._scale(model, now)

    def counted(self, event: Counted, now: float) -> None:
        pass

    def turned(self, now: float) -> None:
        self._reserved.bring(now)
        self._starve(now)

    def round(self, now: float) -> bool:
        self._reserved.bring(now)
        for model in list(self._yard.replicas):
            self._shrink(model, now)
        self._starve(now)
        for model in self._yard.replicas:
            if model not in self._starved and self._have(model) < self._desired(model):
                self._scale(model, now)
        return any(self._yard.replicas.values()) or any(self._yard.barred(model, now) for model in self._starved)

    def _starve(self, now: float) -> None:
        """Try again for those that found no room, who waits longest first."""
        if not self._starved or not self._free():
            return
        for model in sorted(self._starved, key=self._waits_since):
            del self._starved[model]
            self._scale(model, now)

    def _waits_since(self, model: str) -> float:
        first = next(iter(self._desk.line(model).tickets.values()), None)
        return math.inf if first is None else first.arrived_s

    def _have(self, model: str) -> int:
        return len(self._yard.coming(model)) + self._reserved.count(model)

    def _active(self, model: str) -> int:
        running = sum(replica.running for replica in self._yard.of(model))
        return running + len(self._desk.line(model).tickets)

    def _desired(self, model: str) -> int:
        called = 1 if model in self._called else 0
        return min(self._most, max(called, math.ceil(self._active(model) / self._per_replica)))

    def _shrink(self, model: str, now: float) -> None:
        """One replica a round goes, once there were too many for as long as they are kept."""
        if self._yard.serving(model):
            self._called.pop(model, None)
        if self._have(model) <= self._desired(model):
            self._surplus_s.pop(model, None)
            return
        since_s = self._surplus_s.setdefault(model, now)
        serving = self._yard.serving(model)
        if now - since_s >= self._keep_s and serving:
            least = min(serving, key=lambda replica: (replica.running, replica.used_s, replica.number))
            active, desired = self._active(model), self._desired(model)
            why = f"{model}: {active} requests ask for {desired} replicas, {len(serving)} were too many for 60 s"
            self._yard.lower(least, why, now)

    def _scale(self, model: str, now: float) -> None:
        """Up to what is desired, as far as nodes are free or can be cleared."""
        if model not in self._yard.known:
            self._yard.refuse(model, f"{model}: nobody knows this model", None)
            return
        if vain(self._yard, model):
            return
        while self._have(model) < self._desired(model):
            if self._yard.barred(model, now) or not self._place(model, now):
                self._starved[model] = None
                return

    def _place(self, model: str, now: float) -> bool:
        """Bring one replica to where it is up first; False where nothing is free and nobody idle."""
        sites = [site for site in self._free() if model not in site.held and model not in site.busy]
        clear = {site.name: next(iter(site.held.values())) for site in sites if site.held}
        shards = self._yard.known[model].shards

        def cost(site: Site) -> float:
            return self._yard.path(model, site).takes_s + self._clear_s(clear.get(site.name), site)

        # Of victims that cost the same, the one used longest ago.
        sites.sort(key=lambda site: clear[site.name].used_s if site.name in clear else -math.inf)
        chosen = choose(sites, shards, cost)
        if chosen is None:
            return False
        active, tiers = self._active(model), cost(chosen[-1])
        why = f"{model}: {active} requests ask for {self._desired(model)} replicas; up in an estimated {tiers:.2f} s"
        victims = {clear[site.name].number: clear[site.name] for site in chosen if site.name in clear}
        if victims:
            self._reserved.add(model, chosen, why, victims.values(), now)
        else:
            self._yard.bring(model, chosen, why, now)
        return True

    def _free(self) -> list[Site]:
        """Nodes with nothing on them, and those whose replica has nothing to do and is not asked for."""
        kept = self._reserved.names()
        return [
            site for site in self._yard.sites.values()
            if (not site.held or self._idle(next(iter(site.held.values())))) and site.name not in kept
        ]  # fmt: skip

    def _idle(self, replica: Replica) -> bool:
        if replica.running or replica.feeding or not replica.serving or replica.doomed is not None:
            return False
        return self._have(replica.model) > self._desired(replica.model)

    def _clear_s(self, victim: Replica | None, site: Site) -> float:
        """What putting it to sleep takes: nothing but the fixed part where the host has a copy."""
        if victim is None or victim.model in site.copies:
            return 0.0
        return self._yard.sleep_s(victim.model)
