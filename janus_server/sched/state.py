"""What the Brain believes: each model's stage on the node, what is under way for it, and who waits. Pure.

Only `brain` and its rooms write these records. An order that was given counts as done in every sum over memory, so that
two plans never spend the same pages: the ledger is the set of open orders.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from janus_server.duty import Count, Duty, EmptyingMemory
from janus_server.orders import KnownModel, Order, Stage, Verb
from janus_server.sched.dispatcher import Waiting
from janus_server.sched.fleet_records import FleetMemory, FleetSettings
from janus_server.sched.foresight import Foreseen
from janus_server.sched.oracle import OracleSettings
from janus_server.sched.rules import Rule
from janus_server.sched.sound import Clock, number
from janus_server.sched.split import SplitSettings


class BrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How eager the Brain is.

    A busy model is drained for another only when that one has waited for patience_s and the busy one was Active for
    stay_s: with both, two models that share room for one take turns of some seconds instead of thrashing. After
    `tries` failures in a row those who wait are refused; after a lasting one everybody is, for broken_s. A device is
    handed prompts while less than ahead_s of them lies before it, where requests are dispatched by LST-IMH. What was
    observed of models is fitted anew every refit_every_s at most; None: never. What was seen of a model's requests
    counts half after rate_half_life_s.
    """

    patience_s: float = 2.0
    stay_s: float = 4.0
    tries: int = 3
    backoff_s: float = 0.5
    broken_s: float = 30.0
    # Longer than most steps: what is handed over while one runs joins the next, which would begin half empty otherwise.
    ahead_s: float = 0.1
    dispatch: Rule = Rule.LST_IMH
    rate_half_life_s: float = 1200.0
    refit_every_s: float | None = 60.0
    # Of half the points: a fit then takes 50 KB of a journal, and 7 ms to be taken in.
    oracle: OracleSettings = OracleSettings(window_s=30.0, points=128, first_points=30)
    fleet: FleetSettings = FleetSettings()
    split: SplitSettings = SplitSettings()


class Standing(msgspec.Struct, frozen=True):
    """What the Brain thinks of one model, for whoever shows it. load_s and wake_s are predictions."""

    pinned: bool
    draining: bool
    goal: Stage | None
    load_s: float
    wake_s: float


class Belief(msgspec.Struct, eq=False, kw_only=True):
    """One model on the node.

    busy counts its requests in batch and queue at the last report; wanted_s is since when a request waits for it to
    become Active; goal is the stage that an operator, or the fleet, asked for and that is not reached yet, source the
    node whose weights are to be tried first, offers the nodes that let theirs be copied, the best first; broken says
    why it cannot be loaded, until retry_s. because is why the fleet wants what it wants of it, "" where it wants
    nothing. recent is how many requests it had, as of recent_s, older ones counted less.
    """

    known: KnownModel
    pinned: bool
    active_s: float
    idle_since_s: float
    retry_s: float
    load_s: float
    wake_s: float
    stage: Stage = Stage.COLD
    copy: bool = False
    order: Order | None = None
    draining: bool = False
    busy: int = 0
    wanted_s: float | None = None
    goal: Stage | None = None
    source: str | None = None
    offers: tuple[str, ...] = ()
    failures: int = 0
    broken: str | None = None
    because: str = ""
    recent: float = 0.0
    recent_s: float = 0.0

    @classmethod
    def of(cls, known: KnownModel, now: float) -> Belief:
        """A model that nothing has happened to yet."""
        return cls(
            known=known, pinned=known.pinned, active_s=now, idle_since_s=now, retry_s=now, load_s=known.load_s,
            wake_s=known.wake_s,
        )  # fmt: skip

    def barred(self, now: float) -> bool:
        """It could not be loaded, and it is not time to try again."""
        return self.broken is not None and self.retry_s > now

    def learn(self, verb: Verb, took_s: float) -> None:
        """An order took so long; what is no time teaches nothing."""
        if verb is Verb.LOAD and number(took_s):
            self.load_s = took_s
        elif verb is Verb.WAKE and number(took_s):
            self.wake_s = took_s

    @property
    def holds_pages(self) -> bool:
        """Its weights are in device pages, or will be: pages being freed count until they are free."""
        return self.stage is Stage.ACTIVE or self.rising

    @property
    def rising(self) -> bool:
        return self.order is not None and self.order.verb.raises

    @property
    def sinking(self) -> bool:
        return self.order is not None and self.order.verb.lowers

    @property
    def falling(self) -> bool:
        """It is to give up its pages, as soon as nothing runs."""
        return self.stage is Stage.ACTIVE and self.goal in (Stage.WARM, Stage.COLD)

    @property
    def serving(self) -> bool:
        """It takes requests."""
        return self.stage is Stage.ACTIVE and not self.draining and not self.sinking

    @property
    def heading(self) -> Stage:
        """Where it stands once what is under way is done."""
        if self.rising:
            return Stage.ACTIVE
        if self.order is None:
            return self.stage
        match self.order.verb:
            case Verb.SLEEP:
                return Stage.WARM
            case Verb.UNLOAD:
                return Stage.COLD
            case _:  # EVICT: an Active model stays so
                return Stage.COLD if self.stage is Stage.WARM else self.stage

    @property
    def holds_copy(self) -> bool:
        """The host holds its weights, or will once what is under way is done."""
        if self.order is None:
            return self.copy
        return self.order.verb is Verb.SLEEP or (self.copy and self.order.verb not in (Verb.UNLOAD, Verb.EVICT))

    @property
    def fork_from(self) -> str | None:
        """The node to copy from next: the one asked for, or where this one has no copy of its own, one that offers.

        A host copy is as fast as a peer's memory, needs nobody else and cannot be withdrawn; a checkpoint is slower.
        """
        return self.source or (self.offers[0] if self.offers and not self.copy else None)

    @property
    def idle(self) -> bool:
        """Active, nothing under way, nothing to do, and nobody asked for it to stay."""
        return self.stage is Stage.ACTIVE and self.order is None and not self.busy and not self.pinned

    @property
    def reload_s(self) -> float:
        """What it costs to have it Active again, once its pages are given up with a copy kept."""
        return max(self.wake_s, 1e-3)


class RoomMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is believed of one node at one moment."""

    node: str
    pool_pages: int
    host_bytes: int
    models: tuple[Belief, ...]
    next_wake_s: float | None = None
    host: str = ""
    domain: str = ""
    duty: Duty = Duty.SERVE
    since: tuple[Count, Count] = (0, 0)
    process: str = ""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All that a Brain believes at one moment: another one made of it goes on in its place."""

    orders: int = 0
    rooms: tuple[RoomMemory, ...] = ()
    waiting: Waiting = Waiting()
    foreseen: Foreseen = Foreseen()
    clock: Clock = msgspec.field(default_factory=Clock)
    fleet: FleetMemory = FleetMemory()
    emptying: EmptyingMemory = EmptyingMemory()


def pages_needed(models: Iterable[Belief]) -> int:
    """Pages that must exist for these to be Active together.

    Their weights, the KV floors of all, and what the longest sequence of any needs beyond its own floor: the node's
    oldest sequence can then always finish, the others being preempted for it and no floor touched (see `Scarcity`).

    Example: weights 30 and 20, longest sequences 8 and 12, floors 5 and 10: 50 + 15 + max(3, 2) = 68.
    """
    known = [belief.known for belief in models]
    beyond = max((k.longest_pages - k.floor_pages for k in known), default=0)
    return sum(k.weight_pages + k.floor_pages for k in known) + max(0, beyond)
