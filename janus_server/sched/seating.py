"""Which nodes the steady models are to be on: what `packing` says, beside what stands and cannot simply be moved. Pure.

The slow path of `fleet` asks; `plan` takes the steps. A seat is a replica that is to be, or stays, where it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from janus_server.orders import Action, Decided
from janus_server.sched.demand import Demand, Kind, Placement, Reason, Rules, Seat
from janus_server.sched.packing import pack
from janus_server.sched.placement import Cluster, Note, Replica, Standing, whole

# Of what a device computes and reads: a replica of several shards counts as if it took so much.
_FULL: Final = 0.9


class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """seats are what the steady pool is to be, vain is `Placement.vain` of the last packing, refused are the models
    that it found no room for."""

    seats: tuple[Replica, ...] = ()
    vain: int = 0
    refused: tuple[str, ...] = ()

    def without(self, model: str, nodes: Sequence[str] | None = None) -> Seating:
        """Less the seats of a model, or those of them that are on one of the nodes."""
        kept = tuple(s for s in self.seats if s.model != model or (nodes is not None and not set(nodes) & {*s.devices}))
        return msgspec.structs.replace(self, seats=kept)

    def left(self, node: str) -> Seating:
        """Less those on a node that is gone."""
        return msgspec.structs.replace(self, seats=tuple(s for s in self.seats if node not in s.devices))

    def taken(self, model: str, nodes: tuple[str, ...]) -> Seating:
        """With one more."""
        return msgspec.structs.replace(self, seats=(*self.seats, Replica(model=model, devices=nodes)))


def seat(
    demands: Sequence[Demand],
    cluster: Cluster,
    before: Seating,
    rules: Rules,
    actions: list[Action],
    notes: list[Note],
) -> Seating:
    """Starting from what stands: where replicas of the steady models are, or were to be. Sentences are appended."""
    wanted = {demand.model: demand.shards for demand in demands}
    live = [r for r in cluster.replicas if r.standing is not Standing.SINKING]
    live.sort(key=lambda r: r.standing is Standing.DRAINING)
    homes = _homes(before.seats, wanted, live)
    taken = {device for home in homes.values() for device in home}
    others = {device for r in live if r.model not in wanted for device in r.devices}
    least = whole(cluster.devices)
    large = [device.id for device in cluster.devices if device.pages >= least]
    names = sorted(large, key=lambda name: name not in taken)
    usable = [name for name in names if name in taken or name not in others]
    seats = tuple(Seat(model, device) for model in sorted(homes) for device in homes[model])
    before_seats = Placement(seats, before.vain)
    decision = pack([_apart(demand) for demand in demands], usable, before_seats, rules)
    if any(refusal.reason is Reason.NO_ROOM for refusal in decision.refusals):
        decision = pack(demands, usable, before_seats, rules)
    found = decision.placement.homes
    stay = {model for model, home in found.items() if _across(home, homes.get(model, ()))}
    for move in decision.moves:
        if move.kind is not Kind.DROP and move.model not in stay:
            actions.append(Decided(move.model, f"{move.model} to {move.target}: {move.why}"))
    notes += [Note(refusal.model, refusal.why) for refusal in decision.refusals]
    # Who is up without having room by what it may take stays where it is, as long as its pages are to be had; so does
    # who would have to stop before it is up elsewhere.
    stay.update(r.model for r in decision.refusals)
    found.update({model: homes[model] for model in stay if model in homes})
    return Seating(
        seats=tuple(Replica(model=model, devices=tuple(sorted(found[model]))) for model in sorted(found)),
        vain=decision.placement.vain,
        refused=tuple(r.model for r in decision.refusals if r.reason is Reason.NO_ROOM),
    )


def _apart(demand: Demand) -> Demand:
    """A replica of several shards waits for the slowest of its devices in every layer: a neighbour on one of them holds
    up all. While there is room, only what has next to nothing to do may be beside it."""
    if demand.shards == 1:
        return demand
    return msgspec.structs.replace(demand, compute=max(_FULL, demand.compute), bandwidth=max(_FULL, demand.bandwidth))


def _homes(seats: Sequence[Replica], wanted: Mapping[str, int], live: Sequence[Replica]) -> dict[str, tuple[str, ...]]:
    """Where each model that has so many shards lies: on its seat if it is there or nowhere, else where it is."""
    found: dict[str, list[tuple[str, ...]]] = {model: [] for model in wanted}
    for replica in live:
        if len(replica.devices) == wanted.get(replica.model, 0):
            found[replica.model].append(replica.devices)
    homes = {seat.model: seat.devices for seat in seats if seat.model in wanted}
    for model, held in found.items():
        if held and homes.get(model) not in held:
            homes[model] = held[0]
    return homes


def _across(home: Sequence[str], before: Sequence[str]) -> bool:
    """Some of the nodes are the same: no replica can be up there before the other one is gone."""
    return set(home) != set(before) and not set(home).isdisjoint(before)
