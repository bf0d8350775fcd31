"""Static ServerlessLLM as a baseline: whole devices for the peaks of the trace, all day, whatever comes.

What each model needs at its peak is known before the day begins (`peaks`); where the cluster is smaller than all peaks
together, each gets its part. Nothing is scaled: a replica that was lost with its node comes back as soon as there is
room. The same fixed placement serves to compare rules of dispatch, which are front desks (`frontdesk`, `planned`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from janus_server.orders import Counted, Ticket

from .seats import choose, vacant, vain
from .yard import Yard


class Static:
    """The rule: see `baseline`. needs() says how many replicas of each model its peak takes; it is asked once."""

    period_s = 1.0

    def __init__(self, yard: Yard, needs: Callable[[], Mapping[str, int]]) -> None:
        self._yard, self._needs_of = yard, needs
        self._needs: Mapping[str, int] = {}
        self._targets: dict[str, int] | None = None
        self._devices = 0

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        for ticket in tickets:
            model = ticket.model
            if not vain(self._yard, model) and self._targets is not None and not self._targets.get(model):
                why = f"{model}: no room for any of the {self._needs.get(model, 0)} replicas that its peak takes"
                self._yard.refuse(model, why, None)

    def wanted(self, model: str, now: float) -> None:
        pass

    def counted(self, event: Counted, now: float) -> None:
        pass

    def turned(self, now: float) -> None:
        self._fill(now)

    def round(self, now: float) -> bool:
        if self._targets is None:
            self._needs = self._needs_of()
        if len(self._yard.sites) > self._devices:
            self._devices = len(self._yard.sites)
            shards = {model: known.shards for model, known in self._yard.known.items()}
            able = {model: need for model, need in self._needs.items() if model in shards and self._yard.able(model)}
            self._targets = shared_out(able, shards, self._devices)
        self._fill(now)
        return any(self._yard.barred(model, now) for model in self._targets or ())

    def _fill(self, now: float) -> None:
        """The largest first: what is cut into many shards needs a whole host."""
        if self._targets is None:
            return
        known = self._yard.known
        for model in sorted(self._targets, key=lambda name: -known[name].shards):
            while len(self._yard.coming(model)) < self._targets[model] and not self._yard.barred(model, now):
                sites = [site for site in vacant(self._yard) if self._yard.fits(site, model)]
                chosen = choose(sites, known[model].shards, lambda site: 0.0)
                if chosen is None:
                    break
                why = f"{model}: {self._targets[model]} of the {self._needs[model]} replicas that its peak takes"
                self._yard.bring(model, chosen, why, now)


def shared_out(needs: Mapping[str, int], shards: Mapping[str, int], devices: int) -> dict[str, int]:
    """How many replicas each gets of what it needs: one each as far as that goes, the smallest first, then one more for
    whoever has the least part of its need.

    Example: needs a 4, b 2, one device each: with 3 devices a gets 2, b 1.
    """
    targets = dict.fromkeys(needs, 0)
    left = devices
    for model in sorted((model for model, need in needs.items() if need), key=lambda name: (shards[name], name)):
        if shards[model] <= left:
            targets[model], left = 1, left - shards[model]
    while True:
        short = [model for model in needs if 0 < targets[model] < needs[model] and shards[model] <= left]
        if not short:
            return targets
        least = min(short, key=lambda name: (targets[name] / needs[name], name))
        targets[least] += 1
        left -= shards[least]
