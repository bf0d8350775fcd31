"""One node's room: which of its models are Active, and who makes way for whom. Pure; the Brain keeps one a node.

A model that is wanted is served first come, first served; each takes the room it needs from idle models first (those
that are expected back the least, weighed by what bringing them back costs) and, after some patience, from busy ones,
which are drained.
Every order has a sentence that says why. The same events at the same times give the same orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from janus_server.orders import Action, Answer, Done, Failed, Order, Refuse, Report, Stage, Verb, Wish
from janus_server.sched.keep import Keep
from janus_server.sched.oracle_records import Observation
from janus_server.sched.state import Belief, BrainSettings, RoomMemory, Standing, pages_needed

Numbered = Callable[[str, str, Verb, str, str | None], Order]


class Room:
    """The models of one node. number(node, model, verb, why, source) makes an order with the next id.

    led: models of which somebody decides for many nodes where they are up; idle ones then do not sleep by themselves.
    """

    def __init__(self, settings: BrainSettings, memory: RoomMemory, number: Numbered) -> None:
        self.node, self.host, self.domain = memory.node, memory.host, memory.domain
        self.duty, self.since, self.process = memory.duty, memory.since, memory.process
        self.led: Collection[str] = ()
        self.pool_pages = memory.pool_pages
        self.host_bytes = memory.host_bytes
        self.models = {belief.known.model: msgspec.structs.replace(belief) for belief in memory.models}
        self.next_wake_s = memory.next_wake_s
        self._settings = settings
        self._keep = Keep(settings.rate_half_life_s)
        self._number = number

    def memory(self) -> RoomMemory:
        """What is believed of the node now, as a copy."""
        models = tuple(msgspec.structs.replace(belief) for belief in self.models.values())
        return RoomMemory(
            node=self.node, pool_pages=self.pool_pages, host_bytes=self.host_bytes, models=models,
            next_wake_s=self.next_wake_s, host=self.host, domain=self.domain, duty=self.duty,
            since=self.since, process=self.process,
        )  # fmt: skip

    def settled(self, model: str) -> bool:
        """True when the model is where it should be: no order open, no wish, nobody waiting."""
        belief = self.models[model]
        return belief.order is None and belief.goal is None and belief.wanted_s is None

    def stages(self) -> dict[str, Stage]:
        """Where every model stands, as far as is known."""
        return {name: belief.stage for name, belief in self.models.items()}

    def standing(self, model: str) -> Standing:
        """How a model of the catalogue is treated just now."""
        belief = self.models[model]
        return Standing(belief.pinned, belief.draining, belief.goal, belief.load_s, belief.wake_s)

    def missing_pages(self, model: str, going: Collection[Belief] = ()) -> int:
        """Pages that must come free, beside those of `going`, before the model can be brought up; 0 or less: none."""
        belief = self.models[model]
        holders = [b for b in self.models.values() if b.holds_pages and b is not belief and b not in going]
        return pages_needed([*holders, belief]) - self.pool_pages

    def able(self, model: str) -> bool:
        """Whether room can be made for the model: what is pinned here stays."""
        belief = self.models[model]
        pinned = [one for one in self.models.values() if one.pinned and one.holds_pages and one is not belief]
        return pages_needed([*pinned, belief]) <= self.pool_pages

    # Hearing

    def want(self, model: str, now: float) -> None:
        """Requests wait for the model on this node."""
        belief = self.models[model]
        if belief.wanted_s is None and not belief.serving:
            belief.wanted_s = now

    def unwant(self, model: str) -> None:
        """Nobody waits for it any more; an operator's wish outlives the clients that had the same."""
        belief = self.models[model]
        if belief.goal is not Stage.ACTIVE:
            belief.wanted_s = None

    def bring(self, model: str, source: str | None, why: str, now: float) -> None:
        """The model is to be up here, copied from another node where one is named."""
        belief = self.models[model]
        if belief.stage is Stage.ACTIVE or belief.order is not None or belief.barred(now):
            return
        belief.goal, belief.because, belief.source = Stage.ACTIVE, why, source
        self.want(model, now)

    def lower(self, model: str, why: str) -> bool:
        """It is not to be up here any more; what runs or is on its way ends before. False where that is known."""
        belief = self.models[model]
        if belief.order is not None or belief.falling:
            return False
        belief.because, belief.source = why, None
        belief.goal = Stage.WARM if belief.stage is Stage.ACTIVE else None
        if belief.goal is None:
            belief.wanted_s = None
        return True

    def keep(self, model: str) -> None:
        """It is to stay up after all."""
        belief = self.models[model]
        if belief.falling and belief.because and belief.order is None:
            belief.goal, belief.because = None, ""

    def offered(self, offers: Mapping[str, tuple[str, ...]]) -> None:
        """Which other nodes let which models be copied."""
        for name, belief in self.models.items():
            belief.offers = offers.get(name, ())

    def lost(self, model: str, stage: Stage, copy: bool) -> None:
        """A model's instance was torn down."""
        belief = self.models[model]
        belief.stage, belief.copy, belief.draining, belief.busy = stage, copy, False, 0

    def hear(self, report: Report, now: float) -> bool:
        """How busy the node's models are. Those it tells of are Active: the node knows better than its leader, and True
        comes back where it had to say so."""
        news = False
        for name, busy in report.models.items():
            belief = self.models.get(name)
            if belief is not None:
                if belief.order is None and belief.stage is not Stage.ACTIVE:
                    belief.stage, news = Stage.ACTIVE, True
                belief.busy = busy.running + busy.waiting
                belief.idle_since_s = now - max(0.0, busy.idle_for_s)
        return news

    def begun(self, model: str) -> None:
        """One more request was handed to the model: it is busy, whatever a report says that is older."""
        self.models[model].busy += 1

    def observed(self, models: Mapping[str, Observation], now: float) -> None:
        """Which models had how many requests in a period, wherever they ran."""
        for name, seen in models.items():
            if name in self.models:
                self._keep.seen(self.models[name], seen.features.request_rate * self._settings.oracle.window_s, now)

    def close(self, event: Done | Failed, now: float, actions: list[Action]) -> None:
        """An order of this node, which is open, came to its end."""
        belief = next(b for b in self.models.values() if b.order is not None and b.order.id == event.order)
        order, belief.order = belief.order, None
        belief.stage, belief.copy, belief.because = event.stage, event.copy, ""
        if order is not None and order.verb is Verb.FORK:
            belief.source = None
            belief.offers = tuple(node for node in belief.offers if node != order.source)
        if belief.stage is not Stage.ACTIVE:
            belief.draining, belief.busy = False, 0
        if isinstance(event, Failed):
            # Where a copy from a peer failed, another peer or what this node has itself is tried at once.
            if order is None or order.verb is not Verb.FORK or event.lasting:
                self._failed(belief, event, now, actions)
            return
        belief.failures, belief.broken = 0, None
        if order is not None:
            belief.learn(order.verb, event.took_s)
        if belief.stage is Stage.ACTIVE and order is not None and order.verb is not Verb.EVICT:
            belief.active_s = belief.idle_since_s = now
            # Who waited for it starts now: it is not idle before a report has said so.
            belief.busy = 1 if belief.wanted_s is not None else 0
            belief.wanted_s = None

    def _failed(self, belief: Belief, event: Failed, now: float, actions: list[Action]) -> None:
        belief.failures += 1
        pause_s = self._settings.backoff_s * 2.0 ** min(belief.failures - 1, 6)
        belief.retry_s = now + pause_s
        if event.lasting or belief.failures >= self._settings.tries:
            belief.goal = None
            if belief.wanted_s is not None:
                belief.wanted_s = None
                actions.append(Refuse(belief.known.model, event.reason, None if event.lasting else pause_s))
            belief.failures = 0
        if event.lasting:
            belief.broken, belief.retry_s = event.reason, now + self._settings.broken_s

    def ask(self, name: str, wish: Wish, source: str | None, now: float) -> Answer:
        """An operator's wish for a model on this node."""
        belief = self.models[name]
        stage = belief.stage
        goal = wish.goal
        if goal is None:
            if wish is Wish.PIN and belief.sinking and belief.order is not None:
                return Answer(name, False, f"{name} is {stage.value} and being changed ({belief.order.verb.value})")
            belief.pinned = wish is Wish.PIN
            if belief.pinned and belief.goal is not Stage.ACTIVE:
                belief.goal = None  # it stays, whatever was asked before
            said = "pinned" if belief.pinned else "no longer pinned"
            return Answer(name, True, f"{name} is {said} and {stage.value}")
        if wish is Wish.FORK and source is None and stage is not Stage.ACTIVE:
            return Answer(name, False, f"{name} is {stage.value}: say which node to copy it from")
        if belief.order is not None and belief.heading is not goal:
            return Answer(name, False, f"{name} is {stage.value} and being changed ({belief.order.verb.value})")
        if stage is goal and belief.order is None and belief.goal is None:
            return Answer(name, True, f"{name} is {stage.value} already")
        if belief.heading is Stage.COLD and wish in (Wish.WAKE, Wish.SLEEP):
            return Answer(name, False, f"{name} is cold: there is nothing to {wish.value}; load it")
        if goal is not Stage.ACTIVE and belief.pinned:
            return Answer(name, False, f"{name} is {stage.value} and pinned; unpin it first")
        belief.goal, belief.because = goal, ""
        belief.source = source if wish is Wish.FORK else None
        belief.retry_s, belief.broken = now, None
        if goal is Stage.ACTIVE and belief.wanted_s is None:
            belief.wanted_s = now
        return Answer(name, True, f"{name} is {stage.value} and will be {goal.value}")

    # Planning

    def plan(self, now: float, actions: list[Action]) -> None:
        """Append the orders of the moment; `next_wake_s` is then when to plan again though nothing happened."""
        self.next_wake_s = None
        for belief in self.models.values():
            down = belief.stage is Stage.COLD or (belief.stage is Stage.WARM and belief.retry_s <= now)
            if belief.goal is not None or not down:
                self._lower(belief, now, actions)
        waiting = [b for b in self.models.values() if b.wanted_s is not None and b.order is None]
        waiting.sort(key=lambda b: (b.wanted_s or 0.0, b.known.model))
        needed = None
        for belief in waiting:
            if belief.barred(now) and belief.broken is not None:  # nobody makes room for what cannot be loaded
                belief.wanted_s = None
                actions.append(Refuse(belief.known.model, belief.broken, belief.retry_s - now))
            elif belief.retry_s > now:
                self._wake_by(belief.retry_s)
            elif not self._raise(belief, now, actions):
                needed = belief
                break  # what comes free is for this one: nobody overtakes
        self._settle(needed, actions)

    def _lower(self, belief: Belief, now: float, actions: list[Action]) -> None:
        """Take an operator's wish, or the model's own idle time, one step further down."""
        known = belief.known
        if belief.goal is belief.stage or (belief.goal is Stage.WARM and belief.stage is Stage.COLD):
            belief.goal = None  # there, or further down than asked: the host had no room for a copy
        if belief.order is not None:
            return
        if belief.retry_s > now:
            self._wake_by(belief.retry_s)
            return
        if belief.goal in (Stage.WARM, Stage.COLD) and belief.stage is Stage.ACTIVE:
            why = belief.because or f"{known.model}: asked to {'sleep' if belief.goal is Stage.WARM else 'be evicted'}"
            if belief.busy:
                if not belief.draining:
                    self._drain(belief, f"{why}; its {belief.busy} requests finish first", actions)
            elif belief.goal is Stage.WARM:
                self._sleep(belief, why, now, actions)
            else:
                self._order(belief, Verb.UNLOAD, why, actions)
        elif belief.goal is Stage.COLD and belief.stage is Stage.WARM:
            self._order(belief, Verb.EVICT, f"{known.model}: asked to be evicted", actions)
        elif belief.idle and known.idle_s is not None and belief.goal is None and known.model not in self.led:
            due_s = belief.idle_since_s + known.idle_s
            if due_s <= now:
                idle_s = now - belief.idle_since_s
                self._sleep(belief, f"{known.model}: idle for {idle_s:.1f} s, allowed {known.idle_s:g} s", now, actions)
            else:
                self._wake_by(due_s)

    def _raise(self, belief: Belief, now: float, actions: list[Action]) -> bool:
        """Bring a wanted model up, or take the next step towards its room; False while it must wait for that."""
        known = belief.known
        if belief.stage is Stage.ACTIVE and belief.goal in (Stage.WARM, Stage.COLD):
            return True  # the operator's wish first; who waits brings it back afterwards
        if belief.stage is Stage.ACTIVE:
            if belief.draining and not belief.sinking:
                self._serve(belief, f"{known.model}: wanted again before it slept", actions)
            belief.wanted_s = None
            return True
        holders = [b for b in self.models.values() if b.holds_pages]
        waited_s = now - (belief.wanted_s if belief.wanted_s is not None else now)
        if self.missing_pages(known.model) <= 0:
            verb, origin = Verb.LOAD, "its checkpoint"
            if belief.fork_from is not None:
                verb, origin = Verb.FORK, f"node {belief.fork_from}"
            elif belief.copy:
                verb, origin = Verb.WAKE, "its host copy"
            why = belief.because or f"{known.model}: wanted for {waited_s:.1f} s; from {origin}"
            self._order(belief, verb, why, actions)
            return True
        if not self.able(known.model):
            belief.wanted_s = belief.goal = belief.source = None
            needs, why = pages_needed([belief]), "the models pinned on this node leave no room for it"
            if needs > self.pool_pages:
                why = f"it needs {needs} pages and {self.node} has {self.pool_pages} in all"
            actions.append(Refuse(known.model, why, None))
            return True
        self._make_room(belief, holders, now, actions)
        return False

    def _make_room(self, belief: Belief, holders: Sequence[Belief], now: float, actions: list[Action]) -> None:
        """Order the next steps that free pages for `belief`: idle models sleep; busy ones are drained in the end."""
        staying = [b for b in holders if not b.sinking]
        if self._fits_without(belief, staying, ()):
            return  # enough is on its way
        idle = sorted((b for b in staying if b.idle), key=lambda b: self._keep.value(b, now))
        victims = self._enough(belief, staying, idle)
        if victims is not None:
            for victim in victims:
                if victim.order is not None:
                    continue  # its copy went to the one before; it follows when that is done
                why = f"{victim.known.model}: {self._keep.why(victim, now)}, makes room for {belief.known.model}"
                self._sleep(victim, why, now, actions)
            return
        # The one that has been Active longest gives way first: two models on room for one alternate.
        movable = [b for b in staying if b.order is None and not b.pinned]
        movable.sort(key=lambda b: (not b.idle, not b.draining, b.active_s, b.known.model))
        victims = self._enough(belief, staying, movable)
        if victims is None:
            return  # what is under way must end first; its Done plans again
        since_s = now if belief.wanted_s is None else belief.wanted_s
        stay_s = self._settings.stay_s
        due_s = max([since_s + self._settings.patience_s, *(b.active_s + stay_s for b in victims if not b.idle)])
        if due_s > now:
            self._wake_by(due_s)
            return
        for victim in victims:
            if not victim.idle and not victim.draining:
                why = f"{victim.known.model}: gives way to {belief.known.model}, waited for {now - since_s:.1f} s"
                self._drain(victim, why, actions)

    def _enough(self, belief: Belief, staying: Sequence[Belief], candidates: Sequence[Belief]) -> list[Belief] | None:
        """The shortest beginning of `candidates` whose going makes room, without those that turn out not to matter."""
        victims: list[Belief] = []
        for candidate in candidates:
            victims.append(candidate)
            if self._fits_without(belief, staying, victims):
                break
        else:
            return None
        for victim in list(victims[:-1]):
            fewer = [v for v in victims if v is not victim]
            if self._fits_without(belief, staying, fewer):
                victims = fewer
        return victims

    def _fits_without(self, belief: Belief, staying: Sequence[Belief], victims: Sequence[Belief]) -> bool:
        return pages_needed([b for b in staying if b not in victims] + [belief]) <= self.pool_pages

    def _settle(self, needed: Belief | None, actions: list[Action]) -> None:
        """Models that were drained for somebody who is served, or has left, take requests again."""
        for belief in self.models.values():
            if belief.draining and belief.order is None and belief.goal is None and (needed is None or belief.pinned):
                why = "it is pinned" if belief.pinned else "its room is not needed any more"
                self._serve(belief, f"{belief.known.model}: {why}", actions)

    # Ordering

    def _sleep(self, belief: Belief, why: str, now: float, actions: list[Action]) -> None:
        """SLEEP, with copies that matter less evicted for its own; UNLOAD where the host cannot hold it."""
        if not belief.copy:
            used = sum(b.known.host_bytes for b in self.models.values() if b.holds_copy)
            missing = used + belief.known.host_bytes - self.host_bytes
            spare = [b for b in self.models.values() if b.copy and b.order is None and b is not belief]
            # The copy of an Active model is only missed when that one sleeps; of the others the least valuable goes.
            spare.sort(key=lambda b: (b.stage is not Stage.ACTIVE, self._keep.value(b, now)))
            dropped = []
            for other in spare:
                if missing <= 0:
                    break
                dropped.append(other)
                missing -= other.known.host_bytes
            if missing > 0:
                self._order(belief, Verb.UNLOAD, f"{why}; no host memory for a copy", actions)
                return
            for other in dropped:
                self._order(other, Verb.EVICT, f"{other.known.model}: its host memory goes to {belief.known.model}",
                            actions)  # fmt: skip
        self._order(belief, Verb.SLEEP, why, actions)

    def _drain(self, belief: Belief, why: str, actions: list[Action]) -> None:
        belief.draining = True
        self._order_now(belief, Verb.DRAIN, why, actions)

    def _serve(self, belief: Belief, why: str, actions: list[Action]) -> None:
        """Who waited for a drained model starts now: like a woken one it is not idle before a report has said so."""
        belief.draining, belief.wanted_s = False, None
        belief.busy = max(belief.busy, 1)
        self._order_now(belief, Verb.SERVE, why, actions)

    def _order(self, belief: Belief, verb: Verb, why: str, actions: list[Action]) -> None:
        """An order that ends with Done or Failed; until then its model is left alone."""
        belief.order = self._order_now(belief, verb, why, actions)

    def _order_now(self, belief: Belief, verb: Verb, why: str, actions: list[Action]) -> Order:
        """An order that takes effect at once and has no end of its own (DRAIN, SERVE)."""
        source = belief.fork_from if verb is Verb.FORK else None
        order = self._number(self.node, belief.known.model, verb, why, source)
        actions.append(order)
        return order

    def _wake_by(self, due_s: float) -> None:
        self.next_wake_s = due_s if self.next_wake_s is None else min(self.next_wake_s, due_s)
