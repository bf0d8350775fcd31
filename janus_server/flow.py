"""The calls to one model: they run while the model is Active and wait while it is not. Lives on the event loop.

`lifecycle` opens and closes it, `instance` brings every call through it, and the leader hears of each change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from janus_server.errors import Refused

if TYPE_CHECKING:
    from janus_server.executor import DeviceThread
    from janus_server.instance import Call


class Flow:
    """The calls to one model, and whether they may run: held while the model is not Active or is being drained.

    `changed` is told when a call comes, leaves or is held, so that who decides can act on it. A call is held for at
    most `patience_s`. running counts the requests of calls that run; only a `Flow` writes it.
    """

    def __init__(
        self, model: str, device: DeviceThread, changed: Callable[[], None], patience_s: float = 120.0
    ) -> None:
        self.model = model
        self.device = device
        self.patience_s = patience_s
        self.idle_since_s = time.monotonic()
        self._changed = changed
        self.running = 0
        self._open = False
        self._running: dict[Call, None] = {}
        self._held: dict[Call, None] = {}

    @property
    def held(self) -> int:
        """Calls that wait for the model."""
        return len(self._held)

    def enter(self, call: Call) -> None:
        if self._open:
            self._run(call)
        else:
            self._held[call] = None
        self._changed()

    def leave(self, call: Call) -> None:
        self._held.pop(call, None)
        if call in self._running:
            del self._running[call]
            self.running -= call.prompts
            if not self._running:
                self.idle_since_s = time.monotonic()
        self._changed()

    def hold(self) -> None:
        """New calls wait; those that run go on."""
        self._open = False

    def serve(self) -> None:
        """Calls run from now on, first those that were held, in the order they came."""
        self._open = True
        self.idle_since_s = time.monotonic()
        held, self._held = self._held, {}
        for call in held:
            self._run(call)

    def refuse(self, refused: Refused) -> None:
        """End the calls that are held: the model cannot be had."""
        for call in self._held:
            call.refuse(refused)

    def _run(self, call: Call) -> None:
        self._running[call] = None
        self.running += call.prompts
        call.start()
