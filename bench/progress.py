"""One line about a run under way: on a terminal it is rewritten in place, elsewhere it is printed now and then.

`serve` runs `show` beside the load. It must stay cheap: a millisecond spent here is a millisecond that sends wait.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from .load import Counts, LoadRun

_TERMINAL_S: Final = 0.5
_PLAIN_S: Final = 5.0


async def show(run: LoadRun, total: int, *, quiet: bool) -> None:
    """Until it is cancelled."""
    if quiet:
        return
    if sys.stderr.isatty():
        await _rewrite(run, total)
    else:
        await _print(run, total)


def line(counts: Counts, total: int, now_s: float, tokens_per_s: float, done_per_s: float) -> str:
    """What one glance should tell."""
    done = counts.completed + counts.failed
    parts = [f"{now_s:6.1f} s", f"{done}/{total} done", f"{counts.active} running"]
    if counts.waiting:
        parts.append(f"{counts.waiting} held")
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    return "  ".join([*parts, f"{done_per_s:.1f} requests/s", f"{tokens_per_s:.0f} tokens/s"])


class _Rates:
    """Differences between two looks."""

    def __init__(self) -> None:
        self._last = (0.0, 0, 0)

    def line(self, run: LoadRun, total: int) -> str:
        counts, now_s = run.counts, run.now()
        done = counts.completed + counts.failed
        past_s, past_done, past_tokens = self._last
        self._last = (now_s, done, counts.tokens)
        span_s = max(now_s - past_s, 1e-6)
        return line(counts, total, now_s, (counts.tokens - past_tokens) / span_s, (done - past_done) / span_s)


async def _rewrite(run: LoadRun, total: int) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    rates = _Rates()
    # No refresh thread: it would compete with the loop for the interpreter.
    with Live(Text(""), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_TERMINAL_S)
            live.update(Text(rates.line(run, total), no_wrap=True, overflow="ellipsis"), refresh=True)


async def _print(run: LoadRun, total: int) -> None:
    rates = _Rates()
    while True:
        await asyncio.sleep(_PLAIN_S)
        print(rates.line(run, total), file=sys.stderr, flush=True)
