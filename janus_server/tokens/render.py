"""The processes that render chat templates.

`template` asks from encoding threads. An answer of None means that the template took more time or memory than a
process has. The program itself is `worker`, the processes are `bounded.Workers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from janus_server.bounded import Workers

MAX_PROMPT_CHARS: Final = 16 * 1024 * 1024
_PROGRAM: Final = Path(__file__).with_name("worker.py")
_MAX_ANSWER_BYTES: Final = 8 * MAX_PROMPT_CHARS  # JSON spells a character in at most six bytes, twelve beyond the BMP


class Renderers:
    """At most `workers` processes, each with `cpu_s` seconds of processor time a question and `memory_bytes` in all."""

    def __init__(self, workers: int = 2, cpu_s: float = 2.0, memory_bytes: int = 1 << 30) -> None:
        self._workers = Workers(
            _PROGRAM, workers=workers, cpu_s=cpu_s, memory_bytes=memory_bytes, answer_bytes=_MAX_ANSWER_BYTES,
            arguments=(str(MAX_PROMPT_CHARS),),
        )  # fmt: skip

    def ask(self, source: str, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """The worker's answer: a rendered "text", an "error", or with values None the template's facts."""
        return self._workers.ask({"source": source, "values": values})

    def close(self) -> None:
        """End the processes; waits for questions that are being answered. Later ones get no answer."""
        self._workers.close()
