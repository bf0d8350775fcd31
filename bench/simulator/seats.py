"""Choosing nodes for a replica, and keeping those that are being cleared for one. Rules of `baseline` call it.

Shards of one replica exchange data at every layer: they stand in one interconnect domain, on one host where that has
room. Nothing here orders anything but what it is asked to bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .replicas import Replica, Site
from .yard import Yard

Cost = Callable[[Site], float]


def vacant(yard: Yard) -> list[Site]:
    """Nodes with nothing on them."""
    return [site for site in yard.sites.values() if not site.held]


def vain(yard: Yard, model: str) -> bool:
    """No node could ever hold the model; those who wait for it have then heard so."""
    if model in yard.known and yard.able(model):
        return False
    yard.refuse(model, f"{model}: no node is large enough for it", None)
    return True


def choose(sites: Sequence[Site], shards: int, cost: Cost) -> list[Site] | None:
    """The cheapest node, or the host or domain whose dearest of so many nodes is cheapest; of equals the one that has
    the least to spare, then the first. None where no domain has so many.

    Example: with 2 shards, a host with one node to spare and another with three, the other host's first two.
    """
    if shards == 1:
        return [min(sites, key=cost)] if sites else None
    return _together(sites, shards, cost, _host) or _together(sites, shards, cost, _domain)


def _together(
    sites: Iterable[Site], shards: int, cost: Cost, place: Callable[[Site], tuple[str, str]]
) -> list[Site] | None:
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault(place(site), []).append(site)
    enough = [sorted(group, key=cost) for group in groups.values() if len(group) >= shards]
    if not enough:
        return None
    return min(enough, key=lambda group: (cost(group[shards - 1]), len(group)))[:shards]


def _host(site: Site) -> tuple[str, str]:
    return site.domain, site.host


def _domain(site: Site) -> tuple[str, str]:
    return site.domain, ""


class Reserved:
    """Nodes that are cleared for a replica, which is brought up as soon as it fits."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._wanted: list[tuple[str, tuple[str, ...], str]] = []

    def count(self, model: str) -> int:
        """Replicas of the model that are to come that way."""
        return sum(wanted == model for wanted, _, _ in self._wanted)

    def holds(self, site: Site) -> bool:
        return any(site.name in names for _, names, _ in self._wanted)

    def names(self) -> frozenset[str]:
        return frozenset(name for _, names, _ in self._wanted for name in names)

    def add(self, model: str, sites: Sequence[Site], why: str, victims: Iterable[Replica], now: float) -> None:
        """These replicas make room for one of the model."""
        self._wanted.append((model, tuple(site.name for site in sites), why))
        for victim in victims:
            self._yard.lower(victim, f"{victim.model}: idle, makes room for {model}", now)

    def bring(self, now: float) -> None:
        """Whatever fits now; what lost a node, or whose model has come to one of the nodes by itself, is given up."""
        left = []
        for model, names, why in self._wanted:
            sites = [self._yard.sites[name] for name in names if name in self._yard.sites]
            if len(sites) < len(names) or any(model in site.held for site in sites) or self._yard.barred(model, now):
                continue
            if all(self._yard.fits(site, model) for site in sites):
                self._yard.bring(model, sites, why, now)
            else:
                left.append((model, names, why))
        self._wanted = left
