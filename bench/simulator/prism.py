"""Prism as a baseline: models share devices, one replica each, placed by KV pressure; a rule and its front desk.

A device's KVPR is the token rate of its models, weighed by KV bytes a token over the TPOT promise, per byte that their
KV has. A model is activated when a request comes, where KVPR is lowest; every 5 s at most one moves from a device to
one whose KVPR is lower by more than a threshold; without requests for 50 s it goes to host memory. At most four models
share a device. How many replicas a model has is another system's business there: here each has one. Shards are placed
one by one on different devices of a domain. Prompts wait in one queue a device, ordered by Moore-Hodgson on their TTFT
deadlines (`arbiter`). A moving model serves where it was until it is up where it goes; what it runs ends where it was,
since running requests cannot be moved here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from janus_server.orders import Counted, Counts, Ticket

from .frontdesk import Desk
from .replicas import Phase, Replica, Site
from .seats import Reserved, choose, vain
from .yard import Yard

# No value is published: what is less than a tenth of the present ratio is not worth a move.
_TAU_SHARE: Final = 0.1
_MOVE_S: Final = 5.0
_MOST_MODELS: Final = 4


class Pressure(NamedTuple):
    """Of one model: KV bytes of a token in one shard, and the strictest TPOT promised for it."""

    kv_bytes: float
    tpot_s: float


class Prism:
    """The rule: see `baseline`."""

    period_s = 1.0

    def __init__(
        self, yard: Yard, desk: Desk, models: Mapping[str, Pressure], page_bytes: Mapping[str, int], *,
        idle_s: float = 50.0,
    ) -> None:  # fmt: skip
        """page_bytes by node."""
        self._yard, self._desk, self._models, self._page_bytes = yard, desk, models, page_bytes
        self._idle_s = idle_s
        self._reserved = Reserved(yard)
        self._starved: dict[str, None] = {}
        self._counts: dict[str, Counts] = {}
        self._seen: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._moving: dict[str, Replica] = {}
        self._moved_s = -math.inf

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        for ticket in tickets:
            held = self._yard.of(ticket.model)
            for replica in held:
                replica.used_s = now
            if ticket.model not in self._starved and not self._have(ticket.model):
                self._activate(ticket.model, now)

    def wanted(self, model: str, now: float) -> None:
        if model not in self._starved and not self._have(model):
            self._activate(model, now)

    def counted(self, event: Counted, now: float) -> None:
        self._counts.update(event.models)

    def turned(self, now: float) -> None:
        self._reserved.bring(now)
        for model, old in list(self._moving.items()):
            if old.phase is not Phase.ACTIVE or old.doomed is not None:
                del self._moving[model]
            elif any(replica.serving and replica is not old for replica in self._yard.of(model)):
                del self._moving[model]
                self._yard.lower(old, f"{model}: it has moved, this one is not needed any more", now)
        self._retry(now)

    def round(self, now: float) -> bool:
        self._reserved.bring(now)
        for model in list(self._yard.replicas):
            for replica in self._yard.serving(model):
                if self._idle(replica) and now - replica.used_s >= self._idle_s:
                    why = f"{model}: no request for {now - replica.used_s:.0f} s, allowed {self._idle_s:g} s"
                    self._yard.lower(replica, why, now)
        self._retry(now)
        if now - self._moved_s >= _MOVE_S:
            self._measure(now)
            self._moved_s = now
            self._migrate(now)
        return any(self._yard.replicas.values()) or any(self._yard.barred(model, now) for model in self._starved)

    # Where

    def kvpr(self, site: Site, more: str = "", less: str = "") -> float:
        """The device's KV pressure, with one model more or less: demand over what KV shares. Infinite without room."""
        names = [name for name in site.held if name not in (more, less)] + ([more] if more else [])
        pages = site.pool_pages - sum(self._yard.known[name].weight_pages for name in names)
        shared_bytes = pages * self._page_bytes.get(site.name, 1)
        weight = sum(self._weight(name) for name in names)
        return weight / shared_bytes if shared_bytes > 0 else math.inf

    def _alone(self, model: str, site: Site) -> float:
        """KVPR of a device like this one with nothing but the model."""
        shared_bytes = (site.pool_pages - self._yard.known[model].weight_pages) * self._page_bytes.get(site.name, 1)
        return self._weight(model) / shared_bytes

    def _weight(self, model: str) -> float:
        """Tokens a second, times KV bytes of each, over the promise; an unseen model counts as one token a second."""
        one = self._models[model]
        return max(self._rates.get(model, 0.0), 1.0) * one.kv_bytes / one.tpot_s

    def _measure(self, now: float) -> None:
        """Token rates since they were measured last."""
        took_s = now - self._moved_s
        for model, counts in self._counts.items():
            total = counts.input_tokens + counts.output_tokens
            self._rates[model] = (total - self._seen.get(model, total)) / took_s if math.isfinite(took_s) else 0.0
            self._seen[model] = total

    def _have(self, model: str) -> int:
        return len(self._yard.coming(model)) + self._reserved.count(model)

    def _idle(self, replica: Replica) -> bool:
        idle = replica.serving and not replica.running and not replica.feeding and replica.doomed is None
        return idle and not self._desk.line(replica.model).tickets and replica.model not in self._moving

    def _retry(self, now: float) -> None:
        for model in list(self._starved):
            if self._yard.barred(model, now):
                continue
            del self._starved[model]
            if self._desk.line(model).tickets and not self._have(model):
                self._activate(model, now)

    def _activate(self, model: str, now: float) -> None:
        """Where the pressure is lowest among those with room; else where idle models make room."""
        yard = self._yard
        if vain(yard, model):
            return
        if yard.barred(model, now):
            self._starved[model] = None
            return
        kept = self._reserved.names()
        sites = [site for site in yard.sites.values() if site.name not in kept]
        roomy = [site for site in sites if len(site.held) < _MOST_MODELS and yard.fits(site, model)]
        shards = yard.known[model].shards
        chosen = choose(roomy, shards, lambda site: self.kvpr(site, model))
        if chosen is not None:
            pressure = max(self.kvpr(site, model) for site in chosen)
            yard.bring(model, chosen, f"{model}: asked for; KV pressure would be {pressure:.3g}, the lowest", now)
            return
        victims = {site.name: found for site in sites if (found := self._victims(site, model)) is not None}
        clearable = [yard.sites[name] for name in victims]
        chosen = choose(clearable, shards, lambda site: self._last_used(victims[site.name]))
        if chosen is None:
            self._starved[model] = None
            return
        gone = {victim.number: victim for site in chosen for victim in victims[site.name]}
        self._reserved.add(model, chosen, f"{model}: asked for; idle models make room", gone.values(), now)

    def _victims(self, site: Site, model: str) -> list[Replica] | None:
        """Idle models whose going makes room on a node, those used longest ago; None where that is not enough."""
        if model in site.held or model in site.busy:
            return None
        gone: list[Replica] = []
        for replica in sorted(filter(self._idle, site.held.values()), key=lambda one: (one.used_s, one.number)):
            gone.append(replica)
            if len(site.held) - len(gone) < _MOST_MODELS and self._yard.fits(site, model, [one.model for one in gone]):
                return gone
        return None if gone or not self._yard.fits(site, model) or len(site.held) >= _MOST_MODELS else gone

    def _last_used(self, victims: list[Replica]) -> float:
        return max((victim.used_s for victim in victims), default=-math.inf)

    def _migrate(self, now: float) -> None:
        """The model with the greatest demand that gains enough by it moves."""
        if self._moving or self._starved:
            return
        movable = [held[0] for held in self._yard.replicas.values() if len(held) == 1 and held[0].serving
                   and held[0].doomed is None]  # fmt: skip
        kept = self._reserved.names()
        for replica in sorted(movable, key=lambda one: (-self._weight(one.model), one.model)):
            model, nodes = replica.model, [self._yard.sites[name] for name in replica.nodes]
            current = max(self.kvpr(site) for site in nodes)
            if current - max(self._alone(model, site) for site in nodes) <= _TAU_SHARE * current:
                continue  # no other device could be better by enough, however empty
            others = [
                site for site in self._yard.sites.values()
                if site.name not in kept and len(site.held) < _MOST_MODELS and self._yard.fits(site, model)
            ]  # fmt: skip
            chosen = choose(others, len(nodes), lambda site, model=model: self.kvpr(site, model))  # type: ignore[misc]
            best = math.inf if chosen is None else max(self.kvpr(site, model) for site in chosen)
            if chosen is not None and current - best > _TAU_SHARE * current:
                self._moving[model] = replica
                why = f"{model}: KV pressure {current:.3g} at {'+'.join(replica.nodes)}, {best:.3g} there"
                self._yard.bring(model, chosen, why, now)
                return
