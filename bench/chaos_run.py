"""Strikes faults, one after the other, on a cluster under load, and makes a `Row` of each: what its clients felt.

`chaos` prints the rows, the tests of the cluster look at them. The cluster is one for all faults of a place, and its
journals are read when it has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from . import chaos_journals, chaos_places
from .chaos_faults import Fault
from .chaos_journals import Term
from .chaos_load import Asking, Load, Tally, together, undisturbed
from .chaos_places import PLACES, STEM, Missing, Place, Settings
from .chaos_scene import LEAD_IN_S, Scene, Strike


@dataclasses.dataclass(slots=True)
class Row:
    """One fault. lost are the nodes whose own clients it could hit, own their tally, elsewhere that of all others.

    moved: requests that went on, on another node, from what they had said.
    recovered_s: from the strike to the first decision of whoever led next; None where nobody had to be elected.
    trouble: what did not happen that should have. skipped: why it could not be struck here.
    """

    fault: Fault
    lost: tuple[str, ...] = ()
    own: Tally = dataclasses.field(default_factory=Tally)
    elsewhere: Tally = dataclasses.field(default_factory=Tally)
    moved: int = 0
    recovered_s: float | None = None
    strikes: tuple[Strike, ...] = ()
    last_term: int = 0
    trouble: str = ""
    skipped: str = ""

    @property
    def held(self) -> bool:
        """No request elsewhere failed, none of its own ended with another text or never."""
        return not (self.trouble or self.elsewhere.not_right or self.own.other or self.own.never)


@dataclasses.dataclass(slots=True)
class Found:
    """What a whole place came to: its rows, its terms, what the journals say that must not be, and the logs."""

    rows: list[Row]
    terms: list[Term]
    troubles: list[str]
    log: str = ""
    journals: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def held(self) -> bool:
        return not self.troubles and all(row.held for row in self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """rate is of requests a second on each node. settle_s: how long it lasts where nothing else says."""

    rate: float = 2.0
    tokens: int = 240
    settle_s: float = 3.0
    seed: int = 0


async def strike_all(
    faults: Sequence[Fault], settings: Settings, pace: Pace, watch: Callable[[Fault, Scene], None]
) -> Found:
    """faults are of one place. watch is called twice a second while one is under way."""
    random.seed(pace.seed)
    try:
        with PLACES[faults[0].place](settings) as place:
            try:
                return await _strike(faults, place, settings, pace, watch)
            finally:
                await asyncio.to_thread(place.nodes.stop)
    except Missing as missing:
        return Found([Row(fault, skipped=str(missing)) for fault in faults], [], [])


async def _strike(
    faults: Sequence[Fault], place: Place, settings: Settings, pace: Pace, watch: Callable[[Fault, Scene], None]
) -> Found:
    await place.nodes.start()
    models = tuple(settings.models)
    await asyncio.to_thread(chaos_places.load_everywhere, place, models)
    asking = Asking(models, pace.rate, pace.tokens, place.key)
    texts = await undisturbed(asking, next(iter(place.nodes.urls.values())))
    rows = []
    for number, fault in enumerate(faults):
        if fault.name in place.missing:
            rows.append(Row(fault, skipped=place.missing[fault.name]))
            continue
        load = Load(asking, texts, place.nodes.urls, 1000 * pace.seed + number)
        rows.append(await _one(fault, place, load, pace, watch))
        if rows[-1].trouble:  # what follows would say nothing about itself
            rows += [Row(late, skipped=f"{fault.name} went wrong before it") for late in faults[number + 1 :]]
            break
        await asyncio.to_thread(chaos_places.load_everywhere, place, models)
    await asyncio.to_thread(place.nodes.stop)
    terms = await asyncio.to_thread(chaos_journals.read, settings.journals, STEM, place.ahead_s)
    led = place.nodes.terms()
    for row in rows:
        row.recovered_s = recovery_s(row.strikes, row.last_term, terms, led)
    journals = {path.name: path.read_bytes() for path in settings.journals.glob(f"{STEM}.*")}
    return Found(rows, terms, chaos_journals.troubles(terms), place.nodes.tail(10_000), journals)


async def _one(fault: Fault, place: Place, load: Load, pace: Pace, watch: Callable[[Fault, Scene], None]) -> Row:
    def running(name: str) -> float:
        return chaos_places.running(place.nodes[name].url, place.key)

    scene = Scene(
        place.nodes, load, settle_s=pace.settle_s, etcd=place.etcd, net=place.net, disk=place.disk, clock=place.clock,
        running=running,
    )  # fmt: skip
    row = Row(fault)
    load.begin()
    watching = asyncio.create_task(_watch(fault, scene, watch))
    try:
        await asyncio.sleep(LEAD_IN_S)
        await scene.serves()
        await fault.do(scene)
        await asyncio.sleep(LEAD_IN_S)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is this fault's result
        row.trouble = f"{type(error).__name__}: {error}"
    finally:
        tallies = await load.end()
        watching.cancel()
    if scene.strikes:
        row.moved = place.nodes.moved(scene.strikes[0].at_s)
    row.strikes, row.last_term = tuple(scene.strikes), place.nodes.term
    lost = {name for strike in scene.strikes for name in strike.lost}
    row.lost = tuple(sorted(lost))
    row.own = together(tallies, lost)
    row.elsewhere = together(tallies, tallies.keys() - lost)
    return row


async def _watch(fault: Fault, scene: Scene, watch: Callable[[Fault, Scene], None]) -> None:
    while True:
        watch(fault, scene)
        await asyncio.sleep(0.5)


def recovery_s(
    strikes: Sequence[Strike], last_term: int, terms: Sequence[Term], led: Mapping[int, tuple[str, float]]
) -> float | None:
    """The longest, where several strikes had an election each, up to last_term. A term without a journal is counted
    from when it was said."""
    decided = {term.number: term.first_s for term in terms if term.entries}
    found = []
    ends = [*(strike.term for strike in strikes[1:]), last_term]
    for strike, end in zip(strikes, ends, strict=True):
        new = [number for number in led if strike.term < number <= end]
        if new:
            first = min(new)
            found.append(decided.get(first, led[first][1]) - strike.at_s)
    return max(found, default=None)
