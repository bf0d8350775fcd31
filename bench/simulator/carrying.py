"""Orders carried out: what each moves over which links, and how it ends. A live node's `lifecycle`, imitated.

`world` hands it every order of the policy. Weights take pages from the moment that an order begins; an order ends with
Done or Failed, in which case everything is as it was. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from janus_server.errors import require
from janus_server.orders import Done, Failed, Order, Phases, Stage, Verb

from .agenda import Agenda, Pulse
from .cluster import Cluster, Held, Node
from .links import Links, Transfer
from .physics import slowdown
from .ways import Way, Ways


class _Move:
    """An order under way. source is the node whose memory it reads."""

    __slots__ = ("begun_s", "held", "node", "order", "over", "source", "transfer", "way")

    def __init__(self, order: Order, node: Node, held: Held, way: Way, source: Node | None, now: float) -> None:
        self.order, self.node, self.held, self.way, self.source = order, node, held, way, source
        self.begun_s, self.over = now, False
        self.transfer: Transfer | None = None


class Carrier:
    """ended(node, event) is told how an order ended, began(order, takes_s) how long it takes if nothing else moves."""

    def __init__(
        self,
        agenda: Agenda,
        cluster: Cluster,
        pulse: Pulse,
        ways: Ways,
        ended: Callable[[Node, Done | Failed], None],
        began: Callable[[Order, float], None],
    ) -> None:
        self._agenda, self._cluster, self._pulse, self._ways = agenda, cluster, pulse, ways
        self._ended, self._began = ended, began
        self._links = Links(ways.capacity)
        self._due_s: float | None = None
        self._moves: dict[tuple[str, str], _Move] = {}
        self._factors: dict[str, float] = {}
        self._term = 0

    def __len__(self) -> int:
        """Orders under way."""
        return len(self._moves)

    def moving(self) -> list[str]:
        """Models of which weights are on their way."""
        return [model for _, model in self._moves]

    def obey(self, order: Order) -> None:
        """Begin one; a node that is gone does nothing, as its leader has heard that it left."""
        node = self._cluster.nodes.get(order.node)
        require(order.model in self._cluster.models, f"order {order.id} is for a model nobody knows: {order.model}")
        if node is None or not node.alive:
            return
        held = node.of(order.model)
        if order.verb.ends:
            require(held.order is None, f"order {order.id} ({order.verb.value} {order.model} on {order.node}) comes "
                    f"while order {held.order.id if held.order else 0} is open: {order.why}")  # fmt: skip
        match order.verb:
            case Verb.DRAIN | Verb.SERVE:
                held.draining = order.verb is Verb.DRAIN and held.stage is Stage.ACTIVE
                self._cluster.settle(held.replica)
            case Verb.EVICT:
                self._cluster.drop_copy(node, order.model)
                if held.stage is Stage.WARM:
                    self._cluster.put(node, order.model, Stage.COLD)
                self._end_soon(order, node, held, "")
            case Verb.SLEEP | Verb.UNLOAD:
                self._lower(order, node, held)
            case _:
                self._raise(order, node, held)

    # Up

    def _raise(self, order: Order, node: Node, held: Held) -> None:
        if held.stage is Stage.ACTIVE:
            self._end_soon(order, node, held, "")
            return
        source = self._cluster.nodes.get(order.source or "") if order.verb is Verb.FORK else None
        trouble = self._trouble(order, node, held, source)
        if trouble:
            self._end_soon(order, node, held, trouble)
            return
        held.order = order
        self._cluster.take_pages(node, order)
        self._cluster.join_replica(node, order)
        if source is not None:
            source.of(order.model).readers += 1
        self._move(order, node, held, source)

    def _trouble(self, order: Order, node: Node, held: Held, source: Node | None) -> str:
        """Why it cannot be done, "" where it can."""
        if node.failing_until_s > self._agenda.now:
            return "the copy failed"
        if order.verb is Verb.WAKE and not held.copy:
            return "there is no host copy to wake from"
        if order.verb is Verb.FORK and (source is None or not source.alive or not source.of(order.model).stays):
            return f"{order.source} does not hold it"
        return ""

    # Down

    def _lower(self, order: Order, node: Node, held: Held) -> None:
        head = None if held.replica is None else held.replica.head
        trouble = ""
        if held.stage is not Stage.ACTIVE:
            trouble = "it is not on the device"
        elif held.readers:
            trouble = "its weights are being read"
        elif head is not None and head.running.get(order.model, 0):
            trouble = "requests came for it"
        if trouble:
            self._end_soon(order, node, held, trouble)
            return
        held.order = order
        keeps = order.verb is Verb.SLEEP and not held.copy
        if keeps:
            self._cluster.take_copy(node, order)
        self._cluster.settle(held.replica)
        if keeps:
            self._move(order, node, held, None)
        else:
            self._end_soon(order, node, held, "")

    # Moving

    def _move(self, order: Order, node: Node, held: Held, source: Node | None) -> None:
        way = self._ways.of(order, node.spec, None if source is None else source.spec)
        move = _Move(order, node, held, way, source, self._agenda.now)
        self._moves[order.node, order.model] = move
        self._began(order, way.fixed_s + way.size_bytes / min(map(self._ways.capacity, way.links)))
        self._agenda.at(self._agenda.now + way.fixed_s, self._copy, move)

    def _copy(self, move: _Move) -> None:
        if not move.over:
            move.transfer = self._links.begin(move, move.way.size_bytes, move.way.links, self._agenda.now)
            self._look()

    def _look(self, _: object = None) -> None:
        """End what has arrived, and see to it that one looks again when the next one will have."""
        now = self._agenda.now
        for transfer in self._links.ended(now):
            move = transfer.thing
            if isinstance(move, _Move) and not move.over:
                self._over(move)
                self._finish(move.order, move.node, move.held, now - move.begun_s)
        self._slow_sources()
        due_s = self._links.next_s()
        if due_s is not None and due_s != self._due_s:
            self._agenda.at(due_s, self._look, None)
        self._due_s = due_s

    def _slow_sources(self) -> None:
        """A device whose memory is read steps slower meanwhile, the more the faster it is read."""
        reading = {m.source.spec.name: m.source for m in self._moves.values() if m.source is not None and m.transfer}
        for name in [*reading, *(name for name in self._factors if name not in reading)]:
            node = self._cluster.nodes[name]
            rate = self._links.out_rate(self._ways.out(name)) if name in reading else 0.0
            factor = slowdown(node.spec.shape, rate)
            if factor != self._factors.get(name, 1.0) and node.alive:
                self._pulse.slow(node, factor)
            if name in reading:
                self._factors[name] = factor
            else:
                del self._factors[name]

    def _over(self, move: _Move) -> None:
        move.over = True
        del self._moves[move.order.node, move.order.model]
        if move.source is not None:
            move.source.of(move.order.model).readers -= 1

    # Ends

    def _end_soon(self, order: Order, node: Node, held: Held, trouble: str) -> None:
        """After what is being decided now: with `trouble` it fails, and nothing has changed."""
        if not trouble:
            held.order = order
        self._agenda.at(self._agenda.now, self._end, (order, node, held, trouble, self._term))

    def _end(self, thing: tuple[Order, Node, Held, str, int]) -> None:
        order, node, held, trouble, term = thing
        if not node.alive or term != self._term:
            return  # the node died, or its leader did
        if trouble:
            self._ended(node, Failed(order.id, held.stage, held.copy, trouble))
        else:
            self._finish(order, node, held, 0.0)

    def _finish(self, order: Order, node: Node, held: Held, took_s: float) -> None:
        held.order = None
        if order.verb.lowers:
            self._cluster.free_pages(node, held)
            if order.verb is Verb.UNLOAD:
                self._cluster.drop_copy(node, order.model)
            self._cluster.put(node, order.model, Stage.WARM if held.copy else Stage.COLD)
            held.replica = None
        elif order.verb.raises:
            self._cluster.put(node, order.model, Stage.ACTIVE)
        self._ended(node, Done(order.id, held.stage, held.copy, took_s, Phases(copy_s=took_s)))

    def _fail(self, order: Order, node: Node, held: Held, reason: str) -> None:
        self._undo(order, node, held)
        self._ended(node, Failed(order.id, held.stage, held.copy, reason))

    def _undo(self, order: Order, node: Node, held: Held) -> None:
        """The model stands where it stood before the order."""
        held.order = None
        if order.verb.raises and held.stage is not Stage.ACTIVE:
            self._cluster.free_pages(node, held)
            held.replica = None
        self._cluster.settle(held.replica)

    # Faults

    def break_copies(self, node: Node) -> None:
        """All copies to a node fail now."""
        for move in [move for move in self._moves.values() if move.node is node and move.order.verb.raises]:
            self._break(move, "the copy failed")

    def node_died(self, node: Node) -> None:
        """What was under way there is nobody's any more; what was read from there fails."""
        for move in list(self._moves.values()):
            if move.node is node:
                self._stop(move)
            elif move.source is node:
                self._break(move, f"{node.spec.name}, which it was copied from, is gone")
        self._factors.pop(node.spec.name, None)
        self._look()

    def abandon(self) -> None:
        """Another leader leads: what the one before had begun is undone."""
        self._term += 1
        for move in list(self._moves.values()):
            self._stop(move)
        for node in self._cluster.nodes.values():
            for held in node.held.values():
                if held.order is not None:
                    self._undo(held.order, node, held)
                if held.draining:
                    held.draining = False
                    self._cluster.settle(held.replica)
        self._look()

    def _stop(self, move: _Move) -> None:
        self._over(move)
        if move.transfer is not None:
            self._links.cancel(move.transfer, self._agenda.now)
        if move.order.verb is Verb.SLEEP:
            self._cluster.drop_copy(move.node, move.order.model)

    def _break(self, move: _Move, reason: str) -> None:
        self._stop(move)
        self._look()
        self._fail(move.order, move.node, move.held, reason)
