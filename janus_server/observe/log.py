"""Log lines in two forms, for people and for programs, written by a thread of their own.

`serve` calls `start` once; everything else logs through the standard library. A line's facts travel beside its words
(`facts`), so that the JSON form has them as fields; a `decision` is the one sentence that explains what was done and
why. A reader of stderr who stalls costs lines, which are counted, and never holds the loop or the device thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

import msgspec

Fact = str | int | float | bool | None | list[str]

HUMAN: Final = "%(asctime)s %(levelname).1s %(message)s"
_QUEUED_LINES: Final = 10_000
_FACTS: Final = "janus_facts"

log = logging.getLogger("janus.decision")


def facts(**fields: Fact) -> dict[str, Any]:
    """The `extra` of a log call whose line has these fields in JSON."""
    return {_FACTS: fields}


def decision(sentence: str, **fields: Fact) -> None:
    """What was decided and why, in one sentence; `kind` (load, drain, sleep …) belongs to every decision's fields."""
    log.info("%s", sentence, extra=facts(**fields))


def start(stream: TextIO, level: str, as_json: bool) -> LineWriter:
    """Send every log line from `level` up to `stream`; close the writer to flush."""
    writer = LineWriter(stream)
    writer.setFormatter(JsonLines() if as_json else logging.Formatter(HUMAN))
    root = logging.getLogger()
    root.addHandler(writer)
    root.setLevel(level.upper())
    return writer


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, then the line's own facts."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Fact] = getattr(record, _FACTS, {})
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class LineWriter(logging.Handler):
    """A handler whose lines are formatted and written on its own thread, from a bounded queue."""

    def __init__(self, stream: TextIO, queued_lines: int = _QUEUED_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(queued_lines)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="janus-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lost += 1  # under the handler's lock, which `handle` holds

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, waiting for a stalled reader no longer than that."""
        logging.getLogger().removeHandler(self)
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        super().close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._write(self._text(record))
            if self._lost:
                with self.lock or threading.Lock():
                    lost, self._lost = self._lost, 0
                self._write(self._text(_lost_record(lost)))

    def _text(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except (TypeError, ValueError):
            return f"a log line of {record.name} could not be written"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads stderr any more: the server goes on
            pass


def _lost_record(lost: int) -> logging.LogRecord:
    words = f"{lost} log lines were lost: whoever reads them was too slow"
    record = logging.LogRecord("janus.log", logging.WARNING, "", 0, words, (), None)
    setattr(record, _FACTS, {"lost_lines": lost})
    return record
