"""The calls to one model: they run while the model is Active and wait while it is not. Lives on the event loop.

`lifecycle` opens and closes it, `instance` brings every call through it. When a call that may run does so is decided at
a `Desk`: the leader's, in a server.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from janus_server.errors import Refused

if TYPE_CHECKING:
    from janus_server.executor import Cancel, DeviceThread, Submit
    from janus_server.instance import Call
    from janus_server.kv.prefix import Follower


class Entrant(Protocol):
    """What runs: a call that came to this node, or a request that another node has it run."""

    @property
    def id(self) -> str: ...

    @property
    def prompts(self) -> int: ...


class Posting(Protocol):
    """Where a call's requests go when it begins, and what it cancels."""

    def post(self, command: Submit | Cancel) -> None: ...


class Entrance(Protocol):
    """What a call sees of whatever lets it in: the `Flow` of its model, or of a cluster's front."""

    patience_s: float

    @property
    def model(self) -> str: ...

    @property
    def device(self) -> Posting: ...

    def enter(self, call: Call) -> None: ...

    def leave(self, call: Call) -> None: ...

    def started(self, call: Call) -> None: ...

    def held_s(self, call: Call) -> float: ...


class Outside(Protocol):
    """What a node that is one of many has around its models."""

    def line(self, model: str) -> Entrance:
        """Calls come in through it, and not through what runs them here."""

    def trail(self, model: str) -> Follower | None:
        """Follows a prefix cache of the model that is made now."""


class Desk(Protocol):
    """Hears of every call of every model, and says `Flow.run` when one of those that are ready shall begin."""

    def ready(self, flow: Flow, call: Call) -> None:
        """The call may run. It is said again after the model was away in between."""

    def started(self, call: Call) -> None:
        """The prompts of a call that runs are computed."""

    def left(self, call: Entrant) -> None:
        """The call is over, whether it ran or not."""

    def changed(self) -> None:
        """Calls came, left or wait for their model."""


class AtOnce:
    """A desk that lets every call run as soon as it may."""

    def ready(self, flow: Flow, call: Call) -> None:
        flow.run(call)

    def started(self, call: Call) -> None:
        pass

    def left(self, call: Entrant) -> None:
        pass

    def changed(self) -> None:
        pass


class Flow:
    """The calls to one model. held are those that wait for it: it is not Active, or is being drained.

    A call is held for at most `patience_s`. running counts the requests of calls that run; only a `Flow` writes it, and
    `open`: whether calls may run.
    """

    def __init__(self, model: str, device: DeviceThread, desk: Desk, patience_s: float = 120.0) -> None:
        self.model = model
        self.device = device
        self.patience_s = patience_s
        self.idle_since_s = time.monotonic()
        self.running = 0
        self._desk = desk
        self.open = False
        self._running: dict[Entrant, None] = {}
        self._ready: dict[Call, None] = {}
        self._held: dict[Call, float] = {}  # and since when, monotonic

    @property
    def held(self) -> int:
        """Calls that wait for the model."""
        return len(self._held)

    @property
    def ready(self) -> int:
        """Requests of calls that may run and are not begun."""
        return sum(call.prompts for call in self._ready)

    def held_s(self, call: Call) -> float:
        """For how long a call has waited for the model; 0 where it does not."""
        since_s = self._held.get(call)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def enter(self, call: Call) -> None:
        if self.open:
            self._make_ready(call)
        else:
            self._held[call] = time.monotonic()
        self._desk.changed()

    def admit(self, entrant: Entrant) -> None:
        """It runs from now on, begun by whoever says so: it only counts here, until it has `ended`."""
        self._running[entrant] = None
        self.running += entrant.prompts

    def leave(self, call: Call) -> None:
        self._held.pop(call, None)
        self._ready.pop(call, None)
        self.ended(call)

    def ended(self, entrant: Entrant) -> None:
        """It runs no more, if it did."""
        if entrant in self._running:
            del self._running[entrant]
            self.running -= entrant.prompts
            if not self._running:
                self.idle_since_s = time.monotonic()
        self._desk.left(entrant)
        self._desk.changed()

    def run(self, call: Call) -> None:
        """Begin a call that waits; one that has left in the meantime is nobody's."""
        if call in self._ready or call in self._held:
            self._ready.pop(call, None)
            self._held.pop(call, None)
            self._running[call] = None
            self.running += call.prompts
            call.start()

    def started(self, call: Call) -> None:
        """The prompts of a call are computed."""
        self._desk.started(call)
        self._desk.changed()

    def hold(self) -> None:
        """Calls that are not begun wait; those that run go on."""
        self.open = False
        now = time.monotonic()
        self._held = {**dict.fromkeys(self._ready, now), **self._held}
        self._ready = {}

    def serve(self) -> None:
        """Calls may run from now on, first those that were held, in the order they came."""
        self.open = True
        self.idle_since_s = time.monotonic()
        held, self._held = self._held, {}
        for call in held:
            self._make_ready(call)
        self._desk.changed()

    def refuse(self, refused: Refused) -> None:
        """End the calls that are held: the model cannot be had."""
        for call in self._held:
            call.refuse(refused)

    def _make_ready(self, call: Call) -> None:
        self._ready[call] = None
        self._desk.ready(self, call)
