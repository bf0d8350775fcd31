"""Where models stand on the imaginary nodes: weights in pages, host copies, replicas of one shard or several.

`carrying` changes it as it obeys orders, `serving` asks it who takes requests. It keeps the ledger: a policy that
spends pages or host memory twice meets a `Bug` that names its order. It knows no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from janus_server.errors import BadConfig, require
from janus_server.orders import Order, Stage

from .agenda import Pulse
from .records import Device, ModelSpec, NodeSpec


class Replica:
    """One copy of a model that can answer: a shard on each of its nodes, all batching done by the head's device.

    up: the device was told that it takes requests. open: it takes them (it is up, and is not being drained). told_busy:
    the nodes of its other shards have reported that it has requests.
    """

    __slots__ = ("head", "model", "nodes", "open", "told_busy", "up")

    def __init__(self, model: str, nodes: tuple[Node, ...]) -> None:
        self.model, self.nodes, self.head = model, nodes, nodes[0]
        self.up = self.open = self.told_busy = False


class Held:
    """One model on one node. pages are what it holds there at present; readers count the copies read of it."""

    __slots__ = ("begun_s", "copy", "draining", "order", "pages", "readers", "replica", "stage")

    def __init__(self) -> None:
        self.stage = Stage.COLD
        self.copy = self.draining = False
        self.order: Order | None = None
        self.replica: Replica | None = None
        self.pages = self.readers = 0
        self.begun_s = 0.0

    @property
    def stays(self) -> bool:
        """Its weights are there, and nobody is about to take them away."""
        return self.stage is Stage.ACTIVE and not (self.order is not None and self.order.verb.lowers)


class Node:
    """running are the calls that its device has begun and not ended, by model. due_s: when its device is to be asked
    next. said: how busy its models were at its last report, used_s: what its device had spent on each when that was
    taken last."""

    __slots__ = (
        "alive", "copies_bytes", "device", "due_s", "failing_until_s", "held", "held_pages", "running", "said",
        "spec", "used_s",
    )  # fmt: skip

    def __init__(self, spec: NodeSpec, device: Device) -> None:
        self.spec, self.device = spec, device
        self.held: dict[str, Held] = {}
        self.running: dict[str, int] = {}
        self.used_s: dict[str, float] = {}
        self.said: dict[str, tuple[int, int, float]] = {}
        self.held_pages = self.copies_bytes = 0
        self.alive = True
        self.due_s: float | None = None
        self.failing_until_s = 0.0

    def of(self, model: str) -> Held:
        held = self.held.get(model)
        if held is None:
            held = self.held[model] = Held()
        return held

    def active(self) -> list[str]:
        """Models whose weights are there and stay."""
        return [name for name, held in self.held.items() if held.stage is Stage.ACTIVE and held.stays]


class Cluster:
    """All nodes. opened(model, by) is called when by more replicas of a model take requests (or fewer), lost(node,
    calls) with what a device had begun and lost, stage(node, model, stage) when one changes."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        models: Sequence[ModelSpec],
        device: Callable[[NodeSpec], Device],
        pulse: Pulse,
        opened: Callable[[str, int], None],
        lost: Callable[[Node, Sequence[int]], None],
        stage: Callable[[Node, str, Stage], None],
    ) -> None:
        self._device, self._pulse, self._opened, self._lost, self._stage = device, pulse, opened, lost, stage
        self.models: Mapping[str, ModelSpec] = {spec.known.model: spec for spec in models}
        self.nodes = {spec.name: Node(spec, device(spec)) for spec in nodes}
        if len(self.nodes) < len(nodes):
            raise BadConfig("two nodes have the same name")
        self._holding: dict[str, None] = {}
        self._names: tuple[str, ...] | None = ()

    def holding(self) -> tuple[str, ...]:
        """The nodes that have a model's weights, on their way up or down too."""
        if self._names is None:
            self._names = tuple(sorted(self._holding))
        return self._names

    # The ledger

    def take_pages(self, node: Node, order: Order) -> None:
        """For the weights and the KV floor of a model on its way up."""
        known = self.models[order.model].known
        held = node.of(order.model)
        held.pages = known.weight_pages + known.floor_pages
        node.held_pages += held.pages
        require(
            node.held_pages <= node.spec.pool_pages,
            f"order {order.id} ({order.verb.value} {order.model} on {order.node}) takes {held.pages} pages where "
            f"{node.spec.pool_pages - node.held_pages + held.pages} of {node.spec.pool_pages} are free: {order.why}",
        )
        self._note_holding(node)

    def free_pages(self, node: Node, held: Held) -> None:
        node.held_pages -= held.pages
        held.pages = 0
        self._note_holding(node)

    def take_copy(self, node: Node, order: Order) -> None:
        """The host keeps the weights of a model from now on."""
        node.copies_bytes += self.models[order.model].known.host_bytes
        require(
            node.copies_bytes <= node.spec.host_bytes,
            f"order {order.id} ({order.verb.value} {order.model} on {order.node}) makes {node.copies_bytes} bytes of "
            f"host copies where {node.spec.host_bytes} are allowed: {order.why}",
        )
        node.of(order.model).copy = True

    def keep_copy(self, node: Node, model: str) -> None:
        """The host has held the weights of a model from the start."""
        node.copies_bytes += self.models[model].known.host_bytes
        node.of(model).copy = True
        self.put(node, model, Stage.WARM)

    def drop_copy(self, node: Node, model: str) -> None:
        held = node.of(model)
        if held.copy:
            held.copy = False
            node.copies_bytes -= self.models[model].known.host_bytes

    def check_ledger(self) -> None:
        """A `Bug` where what is written down is not what stages and orders say."""
        for name, node in self.nodes.items():
            pages = copies = 0
            for model, held in node.held.items():
                known = self.models[model].known
                up = held.stage is Stage.ACTIVE or (held.order is not None and held.order.verb.raises)
                require(
                    held.pages == (known.weight_pages + known.floor_pages if up else 0), f"{model} on {name}: pages"
                )
                require(held.readers >= 0, f"{model} on {name} is read by {held.readers}")
                pages, copies = pages + held.pages, copies + known.host_bytes * held.copy
            require((pages, copies) == (node.held_pages, node.copies_bytes), f"{name}: its sums are wrong")
            require((name in self._holding) == (pages > 0), f"{name} is counted among those in use wrongly")

    def _note_holding(self, node: Node) -> None:
        name, before = node.spec.name, len(self._holding)
        if node.held_pages:
            self._holding[name] = None
        else:
            self._holding.pop(name, None)
        if len(self._holding) != before:
            self._names = None

    # Stages and replicas

    def put(self, node: Node, model: str, stage: Stage) -> None:
        """The model stands at another stage there."""
        held = node.of(model)
        if held.stage is not stage:
            held.stage = stage
            self._stage(node, model, stage)
        if stage is not Stage.ACTIVE:
            held.draining = False
        self.settle(held.replica)

    def join_replica(self, node: Node, order: Order) -> None:
        """The model is to be up on this node, with the others that its order names."""
        shards = self.models[order.model].known.shards
        names = order.replica or (order.node,)
        require(
            len(set(names)) == shards and order.node in names,
            f"order {order.id} ({order.verb.value} {order.model} on {order.node}) names {len(set(names))} nodes of a "
            f"replica of {shards} shards: {order.why}",
        )
        nodes = tuple(self.nodes[name] for name in names if name in self.nodes)
        held = node.of(order.model)
        for other in nodes:
            replica = other.of(order.model).replica
            if replica is not None and replica.nodes == nodes:
                held.replica = replica
                return
        held.replica = Replica(order.model, nodes)

    def settle(self, replica: Replica | None) -> None:
        """Bring a replica's device, and those who count it, in line with where its shards stand."""
        if replica is None:
            return
        parts = [node.of(replica.model) for node in replica.nodes]
        up = all(
            node.alive and part.replica is replica and part.stays
            for part, node in zip(parts, replica.nodes, strict=True)
        )
        is_open = up and not any(part.draining for part in parts)
        came, replica.up = up != replica.up, up
        if came and up:
            self._pulse.up(replica.head, replica.model)
        if is_open != replica.open:
            replica.open = is_open
            self._opened(replica.model, 1 if is_open else -1)
        if came and not up:
            calls = self._pulse.down(replica.head, replica.model)
            self._pulse.changed.update(dict.fromkeys(replica.nodes))  # none is as busy as its head any more
            if calls:
                self._lost(replica.head, calls)

    # Faults

    def die(self, node: Node) -> None:
        """A node is gone with all that is on it, and every replica that has a shard there with its requests."""
        node.alive = False
        for name, held in node.held.items():
            held.order = None
            held.copy = False
            self.free_pages(node, held)
            self.put(node, name, Stage.COLD)
        node.copies_bytes = 0

    def join(self, spec: NodeSpec) -> Node:
        """It is there again, with nothing on it."""
        node = self.nodes[spec.name] = Node(spec, self._device(spec))
        return node
