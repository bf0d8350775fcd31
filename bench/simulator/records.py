"""What the rooms of the simulator hand each other: the imaginary cluster, its work, and what came of it. Frozen.

A `Scenario` is all that a run is made of. The `World` supplies physics and carries out orders; a `Policy` decides,
which is the leader's own `Brain` or an imitation of another system; a `Device` imitates one node's batching, in one of
two fidelities; a `Recorder` is told what happened. Times are seconds of simulated time, from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from janus_server.orders import Action, Busy, Event, KnownModel, Order, Stage
from janus_server.sched.oracle_records import Subject
from janus_server.sched.shapes import DeviceShape, ModelShape


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One imaginary node, which is one device. Nodes of one host share its memory and its host link; nodes of one
    domain have fast links to each other. pool_pages are those that weights and KV share."""

    name: str
    host: str
    domain: str
    shape: DeviceShape
    pool_pages: int
    page_bytes: int
    host_bytes: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model: what the Brain is told of it, and its physics. Pages and bytes of `known` are those of one shard."""

    known: KnownModel
    shape: ModelShape


class AppSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An application: a served name with a promise; attain is the share of its requests that are to keep it."""

    name: str
    model: str
    ttft_s: float
    tpot_s: float
    attain: float = 0.95
    priority: int = 0


class Call(NamedTuple):
    """One request of the trace: `app` is the index of its application. output_tokens are at least 1."""

    id: int
    at_s: float
    app: int
    input_tokens: int
    output_tokens: int


class FaultKind(enum.Enum):
    """NODE: it dies with all on it, and joins anew after lasts_s. COPY: copies to it fail. LEADER: the policy is
    replaced by one that knows nothing but what nodes report."""

    NODE = "node"
    COPY = "copy"
    LEADER = "leader"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    kind: FaultKind
    node: str = ""
    lasts_s: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """calls are made anew for each run (the same each time), rising in time; duration_s is when the last may come.

    subjects are by model: what the oracle is told before anything is observed. copies are by node: the models of which
    its host memory holds a copy from the start. since_s: what comes before is run and not counted. bursts_s: when the
    bursts that it names begin.
    """

    name: str
    nodes: tuple[NodeSpec, ...]
    models: tuple[ModelSpec, ...]
    apps: tuple[AppSpec, ...]
    calls: Iterable[Call]
    duration_s: float
    subjects: Mapping[str, Subject]
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    copies: Mapping[str, tuple[str, ...]] = {}
    since_s: float = 0.0
    bursts_s: tuple[float, ...] = ()


class Policy(Protocol):
    """Who decides: `Brain`, or an imitation. The world asks nothing else of it."""

    def on(self, event: Event, now: float) -> list[Action]: ...

    def next_wake(self, now: float) -> float | None: ...


class Emit(NamedTuple):
    """What a device did for a request: its first token (ended False), or its last (ended True)."""

    call: int
    at_s: float
    ended: bool


class Device(Protocol):
    """One node's batching. The world calls `advance` at `next_s` at the latest, and before it changes anything."""

    def up(self, model: str, now: float) -> None:
        """The model takes requests from now on."""

    def down(self, model: str, now: float) -> list[int]:
        """It is gone; ids of the calls that it had begun and not ended."""

    def begin(self, call: Call, model: str, now: float) -> None: ...

    def advance(self, now: float) -> list[Emit]: ...

    def next_s(self, now: float) -> float | None:
        """When something will have happened; None while it has nothing to do."""

    def slow(self, factor: float, now: float) -> None:
        """Steps take so many times as long from now on: copies read of its memory meanwhile."""

    def busy(self, now: float) -> dict[str, Busy]: ...

    def used(self) -> Mapping[str, float]:
        """Seconds that the device spent on each model's steps since it exists."""


class Outcome(NamedTuple):
    """What became of a call. ttft_s None: no token ever came. tpot_s is the mean after the first token, 0 with one."""

    call: Call
    ttft_s: float | None
    tpot_s: float
    ended_s: float
    node: str
    why: str = ""


class Recorder(Protocol):
    """Told everything in order of time; it keeps what its report needs, in bounded memory."""

    def outcome(self, outcome: Outcome) -> None: ...

    def decision(self, action: Action, now: float) -> None: ...

    def began(self, order: Order, now: float, takes_s: float) -> None: ...

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None: ...

    def moment(self, now: float, active: Sequence[str]) -> None:
        """Twice a second of simulated time: the nodes that hold a model Active, or have one on its way or draining."""

    def closed(self, now: float) -> None: ...


Calls = Iterator[Call]
