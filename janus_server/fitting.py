"""Fits for the oracle, made by a process beside the server that has torch: started by the first one that is wanted.

`leader` asks, one fit at a time, and brings the answer to the Brain as an event. The process runs at the lowest
priority, within bounds of time and memory; without it, or without its library, forecasts rest on shapes and step times.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from janus_server.bounded import Workers
from janus_server.errors import Bug
from janus_server.sched import oracle_records
from janus_server.sched.oracle_records import FitRequest, Fitted

log = logging.getLogger("janus.fitting")

# A fit of 256 points takes 0.4 s of a processor, 2 s the first time.
_CPU_S: Final = 30.0
# Addresses, not memory: it uses some 400 MB.
_MEMORY_BYTES: Final = 2 << 30
_ANSWER_BYTES: Final = 16 << 20
_LAST: Final = 19


def possible() -> bool:
    """Whether what fits can be imported here at all."""
    return importlib.util.find_spec("gpytorch") is not None and importlib.util.find_spec("torch") is not None


class Fitter:
    """At most one process, and one thread that waits for it. Lives on the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "janus-fit")
        self._workers = Workers(
            Path(oracle_records.__file__).with_name("oracle_fit.py"), workers=1, cpu_s=_CPU_S,
            memory_bytes=_MEMORY_BYTES, answer_bytes=_ANSWER_BYTES, niceness=_LAST,
        )  # fmt: skip
        self._lost = False

    async def fit(self, request: FitRequest) -> Fitted | None:
        """None where there was no answer within bounds, or there can be none any more."""
        if self._lost:
            return None
        question = msgspec.to_builtins(request)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._workers.ask, question)
        except (Bug, OSError) as error:
            if not self._lost:
                log.warning("nothing is fitted any more, forecasts rest on shapes and step times: %s", error)
            self._lost = True
            return None
        return None if answer is None else msgspec.convert(answer, Fitted)

    def close(self) -> None:
        """End the process, whatever it does. Any thread."""
        self._lost = True
        self._workers.kill()
        self._thread.shutdown(wait=True)
