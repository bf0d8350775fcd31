"""BlitzScale as a baseline: each model its own autoscaler with whole devices, once a second; weights spread as a tree.

What a model needs is between demand over 0.8 and demand over 0.5 of what a replica can do, both in KV blocks and in
prefill throughput, the larger of the two. Up at once to the middle, (least + most + 1) / 2; down by one a round, five
seconds after it was last too few or just right; from 1 to 8. Weights come from replicas that have them, each that has
arrived feeding the next, or from the host copy. Requests wait in one queue, first come first served, for a replica with
less than 0.2 s of prompts before it.

Left out: prefill and decode run together on each replica here, not on replicas of their own, and a replica serves once
all of its layers are there. A model's partition is what it holds: free devices go to whoever asks first, which is
kinder to it than fixed partitions. Its 4,096 tokens a second for a replica were measured on other devices: prefill
throughput is that of the same prediction which the leader plans with.
"""

from __future__ import annotations

import math
from typing import Final

from janus_server.orders import Counted, Ticket

from .frontdesk import Desk
from .kvload import KvLoad
from .replicas import Phase
from .seats import choose, vacant, vain
from .yard import Yard

_FULL: Final = 0.8
_HALF: Final = 0.5


class BlitzScale:
    """The rule: see `baseline`."""

    period_s = 1.0

    def __init__(self, yard: Yard, desk: Desk, kv: KvLoad, *, most: int = 8, patience_s: float = 5.0) -> None:
        self._yard, self._desk, self._kv = yard, desk, kv
        self._most, self._patience_s = most, patience_s
        self._work_s: dict[str, float] = {}
        self._began = False
        self._needed_s: dict[str, float] = {}
        self._target: dict[str, int] = {}

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        for ticket in tickets:
            self._work_s[ticket.model] = self._work_s.get(ticket.model, 0.0) + ticket.work_s
            vain(self._yard, ticket.model)

    def wanted(self, model: str, now: float) -> None:
        pass

    def counted(self, event: Counted, now: float) -> None:
        self._kv.counted(event)

    def turned(self, now: float) -> None:
        self._fill(now)

    def round(self, now: float) -> bool:
        self._began = True
        waits = False
        for model in self._yard.known:
            if self._yard.able(model):
                waits |= self._scale(model, self._work_s.get(model, 0.0) / self.period_s, now)
        self._work_s = {}
        self._fill(now)
        return waits or any(self._yard.barred(model, now) for model in self._yard.known)

    def bounds(self, model: str, arriving: float) -> tuple[int, int]:
        """The fewest and the most replicas for what there is: KV of those that run and wait, and seconds of prefill
        that came in the last second, or that wait if that is more.

        Example: KV for 1.2 replicas is 2 to 3 (1.2 / 0.8, 1.2 / 0.5); prefill for 0.3 is 1 to 1: 2 to 3.
        """
        held, line = self._yard.of(model), self._desk.line(model)
        kv = (sum(self._kv.tokens(replica) for replica in held) + line.tokens) / self._kv.room_tokens(model)
        waiting = sum(replica.work_s for replica in held) + line.work_s
        need = max(kv, arriving, waiting)
        return math.ceil(need / _FULL - 1e-9), math.ceil(need / _HALF - 1e-9)

    def _scale(self, model: str, arriving: float, now: float) -> bool:
        """Set its target; True while time alone may lower it."""
        least, most = self.bounds(model, arriving)
        target = self._target.get(model, 1)
        if least > target:
            target = (least + most + 1) // 2
        if most >= target:
            self._needed_s[model] = now
        elif now - self._needed_s.setdefault(model, now) >= self._patience_s:
            target -= 1
        self._target[model] = min(self._most, max(1, target))
        coming = self._yard.coming(model)
        spare = len(coming) - self._target[model]
        serving = [replica for replica in coming if replica.phase is Phase.ACTIVE]
        if spare > 0 and serving:
            fewest = min(serving, key=lambda replica: (replica.running, replica.number))
            why = f"{model}: {least} to {most} replicas do, {len(coming)} were too many for {self._patience_s:g} s"
            self._yard.lower(fewest, why, now)
        return self._target[model] > 1 or least > 0 or spare > 0

    def _fill(self, now: float) -> None:
        """Replicas that are short, on free devices: those that have none first, then in the order of the catalogue."""
        if not self._began:
            return
        short = [model for model in self._yard.known if self._yard.able(model) and self._short(model) > 0]
        short.sort(key=lambda model: len(self._yard.coming(model)) > 0)
        free = vacant(self._yard) if short else []
        for model in short:
            while free and self._short(model) > 0 and not self._yard.barred(model, now):
                sites = [site for site in free if self._yard.fits(site, model)]
                path_s = {site.name: self._yard.path(model, site).takes_s for site in sites}
                chosen = choose(sites, self._yard.known[model].shards, lambda site, path_s=path_s: path_s[site.name])  # type: ignore[misc]
                if chosen is None:
                    break
                have, target = len(self._yard.coming(model)), self._target.get(model, 1)
                self._yard.bring(model, chosen, f"{model}: {target} replicas are needed, it has {have}", now)
                free = [site for site in free if not site.held]

    def _short(self, model: str) -> int:
        return self._target.get(model, 1) - len(self._yard.coming(model))
