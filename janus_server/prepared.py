"""Runtime state of models that are Cold: tokenizers, templates and layouts, made ahead of need within a budget.

`node` starts it once the server is ready. It works in quiet moments only: while a tokenizer is read nothing else of
this process runs (the library keeps the interpreter lock, half a second for a vocabulary of 150,000). Over the budget,
what was used longest ago goes. Models that are Warm or Active keep theirs and are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from janus_server.errors import BadModel
from janus_server.orders import Action, Done, Event, Failed, Lost, Stage
from janus_server.units import format_bytes

if TYPE_CHECKING:
    from janus_server.catalogue import OpenedModel
    from janus_server.lifecycle import Lifecycle

log = logging.getLogger("janus.prepared")

# Measured as growth of the process, for vocabularies from 32,000 to 152,000: 8 to 10.7 bytes for each of the file, 500
# to 650 for each token of a GGUF file beside its header, and some for templates.
_BYTES_PER_FILE_BYTE: Final = 10
_BYTES_PER_TOKEN: Final = 600
_BASE_BYTES: Final = 2 << 20
# So long nobody has been served and nothing has been ordered: who comes in the moment after waits for one tokenizer.
QUIET_S: Final = 1.0
# What changes without an event (a client that only tokenizes) is noticed this late.
_LOOK_S: Final = 5.0


class Prepared:
    """Keeps the prepared state of Cold models within budget_bytes. Lives on the loop."""

    def __init__(self, lifecycle: Lifecycle, budget_bytes: int) -> None:
        self._lifecycle = lifecycle
        self._budget_bytes = budget_bytes
        self._bytes = {name: estimate_bytes(one.opened) for name, one in lifecycle.residents.items()}
        self._unfit: set[str] = set()  # could not be prepared: whoever asks for them is told why
        self._changed = asyncio.Event()
        self._moved_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def held_bytes(self) -> int:
        """What the state of Cold models takes, by estimate."""
        return sum(self._bytes[name] for name in self._cold())

    def see(self, news: Event | Action) -> None:
        """The leader heard something: models may have become Cold, or room may have come."""
        if isinstance(news, Done | Failed | Lost):
            self._moved_s = time.monotonic()
            self._changed.set()

    def start(self) -> None:
        """Begin, and go on until closed."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_say_why)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self.trim()
            name = self._next()
            wait_s = _LOOK_S if name is None else self._quiet_in_s()
            if name is not None and wait_s <= 0.0:
                await self._prepare(name)
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    def trim(self) -> None:
        """Drop the state of Cold models until the rest is within the budget; what somebody waits for stays."""
        held_bytes = self.held_bytes
        residents = self._lifecycle.residents
        spare = [name for name in self._cold() if not self._in_use(name)]
        for name in sorted(spare, key=lambda name: (residents[name].flow.idle_since_s, name)):
            if held_bytes <= self._budget_bytes:
                return
            residents[name].served = None
            held_bytes -= self._bytes[name]
            log.info("%s: its tokenizer was dropped, %s are kept for cold models", name, format_bytes(held_bytes))

    def _next(self) -> str | None:
        """The first Cold model of the catalogue that is not prepared and fits."""
        left_bytes = self._budget_bytes - self.held_bytes
        for name, resident in self._lifecycle.residents.items():
            if resident.stage is Stage.COLD and resident.served is None and name not in self._unfit:
                if self._bytes[name] <= left_bytes:
                    return name
        return None

    async def _prepare(self, name: str) -> None:
        start_s = time.monotonic()
        try:
            await self._lifecycle.prepare(name)
            await self._lifecycle.prepare_engine(name)
        except (BadModel, OSError) as error:
            self._unfit.add(name)
            log.warning("%s: it cannot be prepared: %s", name, error)
            return
        log.info("%s: prepared in %.3f s, before anybody asked for it", name, time.monotonic() - start_s)

    def _cold(self) -> list[str]:
        residents = self._lifecycle.residents.items()
        return [name for name, one in residents if one.stage is Stage.COLD and one.served is not None]

    def _in_use(self, name: str) -> bool:
        one = self._lifecycle.residents[name]
        return bool(one.flow.held or one.flow.running or one.preparing.locked() or one.changing.locked())

    def _quiet_in_s(self) -> float:
        """When the node will have been quiet for long enough, if it stays so; 0 or less: it is."""
        residents = self._lifecycle.residents.values()
        if any(one.flow.held or one.flow.running or one.changing.locked() for one in residents):
            return QUIET_S
        last_s = max((one.flow.idle_since_s for one in residents), default=self._moved_s)
        return max(self._moved_s, last_s) + QUIET_S - time.monotonic()


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("no more models are prepared", exc_info=error)


def estimate_bytes(opened: OpenedModel) -> int:
    """What a model's tokenizer and templates take once they are read; the base alone where there is no file."""
    folder = opened.checkpoint.tokenizer_folder
    if folder is None:
        tokens = opened.checkpoint.metadata.get("tokenizer.ggml.tokens", ())
        return _BASE_BYTES + _BYTES_PER_TOKEN * (len(tokens) if hasattr(tokens, "__len__") else 0)
    try:
        return _BASE_BYTES + _BYTES_PER_FILE_BYTE * (folder / "tokenizer.json").stat().st_size
    except OSError:
        return _BASE_BYTES
