"""What each model needs of devices, as the slow path asks for it: by the oracle where it knows something. Pure.

`fleet` hands the answers to `pools` and `packing`. Elsewhere a table of rates says how many replicas a model needs, and
what one takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from janus_server.sched.fleet_records import FleetSettings
from janus_server.sched.foresight import Foresight, Need
from janus_server.sched.ladder import choose, ladder
from janus_server.sched.meter import Meter
from janus_server.sched.mind import Question
from janus_server.sched.oracle_records import Features
from janus_server.sched.placement import Device, Model, whole
from janus_server.sched.pools import Signal

# How many replicas of one model are asked about one by one.
_NEAR = 8


def signals(
    names: Sequence[str],
    models: Mapping[str, Model],
    devices: Sequence[Device],
    foresight: Foresight,
    meter: Meter,
    pressed: Collection[str],
    settings: FleetSettings,
    now: float,
) -> list[Signal]:
    """One for each of the names. A device is what `whole` says. pressed are those of which one replica does not do."""
    pages = whole(devices)
    told = {name: _traffic(name, foresight, meter, settings, now) for name in names}
    traffic = {name: features for name, features in told.items() if features is not None}
    needs = foresight.needs(traffic)
    counts = ladder(_NEAR, max(1, len(devices)))
    said = foresight.expect([Question(name, 1.0, counts) for name in needs], traffic)
    replicas = {
        name: choose(counts, shares, models[name].target).count
        for name, shares in zip(needs, said, strict=True) if shares is not None
    }  # fmt: skip
    found = []
    for name in names:
        model = models[name]
        rate = traffic[name].token_rate if name in traffic else 0.0
        need = needs[name] if name in replicas else _by_table(rate, settings)
        count = max(replicas.get(name) or settings.table.count(need.tokens_s), 2 if name in pressed else 1)
        share = model.pages / pages
        # What only larger devices than most can hold shares none: it gets one of those, as an elastic one.
        large = share if share > 1.0 else 0.0
        # Nobody needs more than the replicas that are of use: what no number of them serves is no claim.
        most = settings.fill * max(2, count)
        found.append(Signal(
            model=name, replicas=count, hbm=min(max(share, need.hbm), 1.0),
            compute=max(min(need.compute, most) / settings.fill, large),
            bandwidth=min(need.bandwidth, most) / settings.fill, shards=model.shards, heat=need.tokens_s,
            move_s=model.outage_s,
        ))  # fmt: skip
    return found


def _traffic(name: str, foresight: Foresight, meter: Meter, settings: FleetSettings, now: float) -> Features | None:
    """The larger of what came in the last period and in the last seconds."""
    told = [foresight.recent(name, now, 2.0 * settings.slow_s), meter.lately(name, now)]
    known = [features for features in told if features is not None]
    return max(known, key=lambda features: features.token_rate) if known else None


def _by_table(tokens_s: float, settings: FleetSettings) -> Need:
    return Need(tokens_s, 0.0, tokens_s / settings.table.per_replica, 0.0)
