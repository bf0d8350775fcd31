"""Llumnix as a baseline: each request to the freest replica; one replica more or fewer by mean freeness, every 10 s.

Freeness is the blocks of KV free for each request of a replica (`kvload`). Below 10 on the average a model gets one
replica more, above 60 one fewer, from 1 to 8; both thresholds are the published defaults. It was made for one model:
here each model has a scaler of its own, and free devices go to whoever asks first. Its live migration of running
requests between replicas is left out, since a request that has begun cannot be moved here; and as its queues are in its
engines, none is dispatched again.
"""

from __future__ import annotations

from typing import Final

from janus_server.orders import Counted, Ticket

from .frontdesk import Desk
from .kvload import BLOCK_TOKENS, KvLoad
from .seats import choose, vacant, vain
from .yard import Yard

_UP_BELOW: Final = 10.0
_DOWN_ABOVE: Final = 60.0


class Llumnix:
    """The rule: see `baseline`."""

    period_s = 10.0

    def __init__(self, yard: Yard, desk: Desk, kv: KvLoad, *, most: int = 8) -> None:
        self._yard, self._desk, self._kv, self._most = yard, desk, kv, most
        self._target: dict[str, int] = {}
        self._began = False

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        for ticket in tickets:
            vain(self._yard, ticket.model)

    def wanted(self, model: str, now: float) -> None:
        pass

    def counted(self, event: Counted, now: float) -> None:
        self._kv.counted(event)

    def turned(self, now: float) -> None:
        self._fill(now)

    def round(self, now: float) -> bool:
        self._began = True
        for model in self._yard.known:
            self._scale(model, now)
        self._fill(now)
        more = any(target > 1 for target in self._target.values())
        return more or any(self._yard.barred(model, now) for model in self._yard.known)

    def _scale(self, model: str, now: float) -> None:
        serving = self._yard.serving(model)
        target = self._target.get(model, 1)
        if not serving or len(self._yard.coming(model)) != target:
            return
        waiting = self._desk.line(model).tokens / BLOCK_TOKENS
        mean = (sum(map(self._kv.freeness, serving)) - waiting) / len(serving)
        if mean < _UP_BELOW and target < self._most:
            self._target[model] = target + 1
        elif mean > _DOWN_ABOVE and target > 1:
            self._target[model] = target - 1
            freest = max(serving, key=lambda replica: (self._kv.freeness(replica), replica.number))
            why = f"{model}: {mean:.0f} blocks free for each request on the average, more than {_DOWN_ABOVE:g}"
            self._yard.lower(freest, why, now)

    def _fill(self, now: float) -> None:
        if not self._began:
            return
        for model in self._yard.known:
            have = len(self._yard.coming(model))
            if have >= self._target.get(model, 1) or not self._yard.able(model) or self._yard.barred(model, now):
                continue
            sites = [site for site in vacant(self._yard) if self._yard.fits(site, model)]
            path_s = {site.name: self._yard.path(model, site).takes_s for site in sites}
            chosen = choose(sites, self._yard.known[model].shards, lambda site, path_s=path_s: path_s[site.name])  # type: ignore[misc]
            if chosen is not None:
                why = f"{model}: {self._target.get(model, 1)} replicas are to serve it, {have} do"
                self._yard.bring(model, chosen, why, now)
