"""How a load looks in a terminal: a bar while it runs, nothing when nobody watches or it is over at once."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from janus_server.units import format_bytes

# Loads that end before this show no bar: it would only flash.
_QUIET_S = 0.4
_WIDTH = 30


class LoadProgress:
    """One line on a terminal, rewritten in place at most ten times a second. `update` may be called from any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = out.isatty()
        self._started_s: dict[str, float] = {}
        self._last_s = 0.0
        self._drawn = False
        self._lock = threading.Lock()

    def update(self, model: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            started = self._started_s.setdefault(model, now)
            due = now - started >= _QUIET_S and (now - self._last_s >= 0.1 or done_bytes >= total_bytes)
            if not self._shown or not due:
                return
            self._last_s = now
            self._drawn = True
            share = done_bytes / max(1, total_bytes)
            rate = done_bytes / max(1e-9, now - started)
            bar = "█" * round(share * _WIDTH)
            left = (total_bytes - done_bytes) / max(1.0, rate)
            self._out.write(
                f"\r{model} {bar:<{_WIDTH}} {share:4.0%}  {format_bytes(round(rate))}/s  {left:3.0f} s left\033[K"
            )
            self._out.flush()

    def close(self) -> None:
        with self._lock:
            if self._drawn:
                self._out.write("\r\033[K")
                self._out.flush()
            self._shown = False
