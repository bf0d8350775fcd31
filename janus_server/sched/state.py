"""What the Brain believes: each model's stage on the node, what is under way for it, and who waits. Pure.

Only `brain` writes these records. An order that was given counts as done in every sum over memory, so that two plans
never spend the same pages: the ledger is the set of open orders.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from janus_server.orders import KnownModel, Order, Stage, Verb

_RAISING = (Verb.LOAD, Verb.WAKE, Verb.FORK)
_LOWERING = (Verb.SLEEP, Verb.UNLOAD)


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
    become Active; goal is the stage that an operator asked for and that is not reached yet, source the node whose
    weights are to be tried first; broken says why it cannot be loaded, until retry_s.
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
    failures: int = 0
    broken: str | None = None

    @classmethod
    def of(cls, known: KnownModel, now: float) -> Belief:
        """A model that nothing has happened to yet."""
        return cls(
            known=known, pinned=known.pinned, active_s=now, idle_since_s=now, retry_s=now, load_s=known.load_s,
            wake_s=known.wake_s,
        )  # fmt: skip

    @property
    def holds_pages(self) -> bool:
        """Its weights are in device pages, or will be: pages being freed count until they are free."""
        return self.stage is Stage.ACTIVE or self.rising

    @property
    def rising(self) -> bool:
        return self.order is not None and self.order.verb in _RAISING

    @property
    def sinking(self) -> bool:
        return self.order is not None and self.order.verb in _LOWERING

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
    def idle(self) -> bool:
        """Active, nothing under way, nothing to do, and nobody asked for it to stay."""
        return self.stage is Stage.ACTIVE and self.order is None and not self.busy and not self.pinned

    @property
    def reload_s(self) -> float:
        """What it costs to have it Active again, once its pages are given up with a copy kept."""
        return max(self.wake_s, 1e-3)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All that a Brain believes at one moment: another one made of it goes on in its place."""

    node: str = ""
    pool_pages: int = 0
    host_bytes: int = 0
    orders: int = 0
    models: tuple[Belief, ...] = ()


def pages_needed(models: Iterable[Belief]) -> int:
    """Pages that must exist for these to be Active together.

    Their weights, and beside them the longest sequence of any (the node's oldest sequence can then always finish, the
    others being preempted for it), or the KV floors of all where those are more.

    Example: weights 30 and 20, longest sequences 8 and 12, floors 5 and 10: 50 + max(12, 15) = 65.
    """
    known = [belief.known for belief in models]
    longest = max((k.longest_pages for k in known), default=0)
    return sum(k.weight_pages for k in known) + max(longest, sum(k.floor_pages for k in known))
