"""All open requests of a node by id: where the device thread's reports, or another node's, are spread from.

`instance` opens and closes those of its calls, a cluster those that run here for other nodes. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from janus_server.types import Emit, Load, Request

if TYPE_CHECKING:
    from janus_server.executor import StepReport


class Choice(Protocol):
    @property
    def finished(self) -> bool: ...


class Hearer(Protocol):
    """Who is told what the device thread says of a request."""

    entered_s: float

    def begun(self) -> None: ...

    def put(self, answer: Any, emit: Emit) -> None: ...


class Answer(Protocol):
    """One open request: a call's, or one that runs here for another node."""

    started: bool

    @property
    def request(self) -> Request: ...

    @property
    def call(self) -> Hearer: ...

    @property
    def choices(self) -> Sequence[Choice]: ...


class Streams:
    """All open requests of a node by id; one call a step spreads the device thread's report."""

    def __init__(self, opened: Callable[[Request], None] | None = None) -> None:
        """opened() is told of each request when it comes."""
        self._open: dict[str, Answer] = {}
        self._opened = opened

    def __len__(self) -> int:
        return len(self._open)

    def open(self, answer: Answer) -> None:
        self.host(answer)
        if self._opened is not None:
            self._opened(answer.request)

    def host(self, answer: Answer) -> None:
        """As `open`, for a request that came to another node and was counted there."""
        self._open[answer.request.id] = answer

    def close(self, answer: Answer) -> None:
        self._open.pop(answer.request.id, None)

    def loads(self, now: float) -> dict[str, Load]:
        """What is open of each model that has open requests."""
        found: dict[str, Load] = {}
        for answer in self._open.values():
            so_far = found.get(answer.request.model, Load())
            age_s = 0.0 if answer.started else now - answer.call.entered_s
            choices = so_far.choices + sum(not choice.finished for choice in answer.choices)
            found[answer.request.model] = Load(choices, max(so_far.oldest_s, age_s))
        return found

    def deliver(self, report: StepReport) -> None:
        """Emits of requests that nobody reads any more are dropped: their cancel is on its way."""
        self.spread(report.emits)

    def spread(self, emits: Sequence[Emit]) -> None:
        """The same of emits that came another way."""
        for emit in emits:
            answer = self._open.get(emit.request_id)
            if answer is not None:
                if not answer.started and (emit.token is not None or emit.finish is not None):
                    answer.started = True
                    answer.call.begun()
                answer.call.put(answer, emit)
