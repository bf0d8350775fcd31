"""A tiny world for the policies' tests: nodes that carry orders out and check them, requests that take their time.

Every order ends after a time that the caller draws; pages, stages and open orders are checked as each is begun; a
request that is dispatched runs for as long as its ticket says and is told of as `started`, then by the node's report.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from bench.simulator.records import Policy
from janus_server.orders import (
    Busy,
    Counted,
    Counts,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Order,
    Refuse,
    Report,
    Stage,
    Tick,
    Ticket,
    Traffic,
    Verb,
)


class Place:
    """One node."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.stages: dict[str, Stage] = {}
        self.copies: set[str] = set()
        self.pages: dict[str, int] = {}
        self.open: dict[str, Order] = {}
        self.draining: set[str] = set()
        self.running: Counter[str] = Counter()


class SmallWorld:
    """takes(order) is how long it takes; below 0: it fails after as long."""

    def __init__(self, policy: Policy, nodes: Sequence[Joined], takes: Callable[[Order], float]) -> None:
        self.policy, self.takes = policy, takes
        self.models: dict[str, KnownModel] = {known.model: known for joined in nodes for known in joined.models}
        self.places: dict[str, Place] = {}
        self.begun: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.asked: dict[str, Ticket] = {}
        self.waiting: dict[str, Ticket] = {}
        self.orders: list[tuple[float, Order]] = []
        self.counts: dict[str, Counts] = {}
        self.lines: list[str] = []
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._epochs: Counter[tuple[str, str]] = Counter()
        self._changed: dict[str, None] = {}
        self._uncounted: dict[str, None] = {}
        self._replicas: dict[tuple[str, str], tuple[str, ...]] = {}
        for joined in nodes:
            self.at(0.0, lambda joined=joined: self.join(joined))

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, what))

    def run(self, until_s: float) -> None:
        """Until then, or until nothing more can happen."""
        beat_s, steps = 0.5, 0
        while True:
            steps += 1
            assert steps < 200_000, "it never comes to an end"
            wake_s = self.policy.next_wake(self.now)
            assert wake_s is None or wake_s >= self.now
            times = [self._heap[0][0]] if self._heap else []
            times += [wake_s] if wake_s is not None else []
            times += [beat_s] if self._changed or self._uncounted else []
            if not times or min(times) > until_s:
                return
            self.now = max(self.now, min(times))
            if self.now >= beat_s:
                beat_s = self.now + 0.5
                self._beat()
            elif self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            else:
                self.tell(Tick())

    def tell(self, event: Event) -> None:
        for action in self.policy.on(event, self.now):
            match action:
                case Order():
                    self._order(action)
                case Dispatch():
                    self._dispatch(action)
                case Refuse():
                    self._refuse(action)
                case _:
                    raise AssertionError(f"a baseline does not say {action}")

    # What happens

    def join(self, joined: Joined) -> None:
        self.places[joined.node] = Place(joined)
        self.tell(joined)

    def leave(self, node: str) -> None:
        """It dies; what had no first token is asked again."""
        if node not in self.places:
            return
        del self.places[node]
        self._changed.pop(node, None)
        heads = {nodes[0] for nodes in self._replicas.values() if node in nodes}
        cut = {(head, of) for (head, of), nodes in self._replicas.items() if head in heads and node in nodes}
        for head, of in cut:
            if head in self.places:
                self.places[head].running[of] = 0
                self._changed[head] = None
        again = [request for request, at in self.begun.items() if (at, self.asked[request].model) in cut]
        for request in again:
            del self.begun[request]
            self.waiting[request] = self.asked[request]
        self._epochs.update(cut)
        self.tell(Left(node))
        if again:
            self.tell(Traffic(arrived=tuple(self.asked[request] for request in again)))

    def ask(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            self.asked[ticket.id] = self.waiting[ticket.id] = ticket
            seen = self.counts.get(ticket.model, Counts(0, 0))
            self.counts[ticket.model] = Counts(seen.input_tokens + ticket.prompt_tokens, seen.output_tokens + 10,
                                               seen.ended + 1)  # fmt: skip
            self._uncounted[ticket.model] = None
        self.tell(Traffic(arrived=tickets))

    def _beat(self) -> None:
        changed, self._changed = list(self._changed), {}
        for node in changed:
            self._report(node)
        if self._uncounted:
            counts, self._uncounted = {model: self.counts[model] for model in self._uncounted}, {}
            self.tell(Counted(counts))

    def _report(self, node: str) -> None:
        place = self.places.get(node)
        if place is not None:
            active = {model: Busy(place.running[model], 0, 0.0) for model, stage in place.stages.items()
                      if stage is Stage.ACTIVE}  # fmt: skip
            self.tell(Report(node, active))

    # What is ordered

    def _order(self, order: Order) -> None:
        place, known = self.places[order.node], self.models[order.model]
        self.orders.append((self.now, order))
        source = f" from {order.source}" if order.source else ""
        self.lines.append(f"{self.now:g} {order.verb.value} {order.model} {order.node}{source}: {order.why}")
        stage = place.stages.get(order.model, Stage.COLD)
        assert order.model not in place.open, f"two orders open: {place.open[order.model]} and {order}"
        assert order.why
        if order.verb in (Verb.DRAIN, Verb.SERVE):
            assert stage is Stage.ACTIVE
            (place.draining.add if order.verb is Verb.DRAIN else place.draining.discard)(order.model)
            return
        if order.verb.raises:
            assert stage is not Stage.ACTIVE
            nodes = order.replica or (order.node,)
            assert len(set(nodes)) == known.shards and order.node in nodes
            self._replicas[order.node, order.model] = nodes
            place.pages[order.model] = known.weight_pages + known.floor_pages
            assert sum(place.pages.values()) <= place.joined.pool_pages, f"pages: {order}"
            if order.verb is Verb.WAKE:
                assert order.model in place.copies
            if order.verb is Verb.FORK:
                assert order.source is not None
                assert self.places[order.source].stages.get(order.model) is Stage.ACTIVE
        elif order.verb.lowers:
            assert stage is Stage.ACTIVE and not place.running[order.model], f"{order} with requests running"
            if order.verb is Verb.SLEEP:
                place.copies.add(order.model)
                self._check_copies(place)
        else:
            assert order.model in place.copies
            place.copies.discard(order.model)
        place.open[order.model] = order
        takes_s = self.takes(order)
        self.at(self.now + abs(takes_s), lambda: self._end(place, order, takes_s < 0))

    def _check_copies(self, place: Place) -> None:
        assert sum(self.models[model].host_bytes for model in place.copies) <= place.joined.host_bytes

    def _end(self, place: Place, order: Order, failed: bool) -> None:
        if self.places.get(order.node) is not place:
            return
        self._report(order.node)
        source = self.places.get(order.source) if order.source else None
        if order.source and (source is None or source.stages.get(order.model) is not Stage.ACTIVE):
            failed = True
        del place.open[order.model]
        before = place.stages.get(order.model, Stage.COLD)
        warm = Stage.WARM if order.model in place.copies else Stage.COLD
        if failed and order.verb is Verb.EVICT:
            failed = False
        if failed:
            stage = warm if order.verb.raises else before
        elif order.verb.raises:
            stage = Stage.ACTIVE
        else:
            if order.verb is Verb.UNLOAD:
                place.copies.discard(order.model)
            stage = Stage.WARM if order.model in place.copies else Stage.COLD
        place.stages[order.model] = stage
        if stage is not Stage.ACTIVE:
            place.pages.pop(order.model, None)
            place.draining.discard(order.model)
        copy = order.model in place.copies
        if failed:
            self.tell(Failed(order.id, stage, copy, "it was drawn so"))
        else:
            self.tell(Done(order.id, stage, copy, 0.1))

    # What is begun

    def _dispatch(self, action: Dispatch) -> None:
        assert action.why
        for request in action.requests:
            ticket = self.waiting.pop(request)
            place = self.places[action.node]
            nodes = self._replicas[action.node, ticket.model]
            assert nodes[0] == action.node
            for node in nodes:
                other = self.places[node]
                assert other.stages.get(ticket.model) is Stage.ACTIVE and ticket.model not in other.draining
                assert ticket.model not in other.open
            self.begun[request] = action.node
            place.running[ticket.model] += 1
            self._changed[action.node] = None
            self.lines.append(f"{self.now:g} begin {request} {action.node}")
            run = (action.node, ticket.model, self._epochs[action.node, ticket.model])
            self.at(self.now + ticket.work_s, lambda r=request, run=run: self._started(r, run))
            self.at(self.now + 3 * ticket.work_s, lambda run=run: self._ended(run))

    def _started(self, request: str, run: tuple[str, str, int]) -> None:
        if self._epochs[run[:2]] == run[2]:
            self.begun[request] = "started"
            self.tell(Traffic(started=(request,)))

    def _ended(self, run: tuple[str, str, int]) -> None:
        node, model, epoch = run
        if self._epochs[node, model] == epoch:
            self.places[node].running[model] -= 1
            self._changed[node] = None

    def _refuse(self, action: Refuse) -> None:
        for request, ticket in list(self.waiting.items()):
            if ticket.model == action.model:
                del self.waiting[request]
                self.refused[request] = action.why
