"""Log lines: both forms, facts beside words, and a writer that nobody can hold up."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Iterator

import pytest

from janus_server.observe import log as logs
from janus_server.observe.log import HUMAN, JsonLines, LineWriter, decision, facts

log = logging.getLogger("janus.test")


@pytest.fixture
def levels() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


def lines(as_json: bool, level: str = "info") -> tuple[io.StringIO, LineWriter]:
    out = io.StringIO()
    return out, logs.start(out, level, as_json)


@pytest.mark.usefixtures("levels")
def test_json_lines_have_the_facts_as_fields() -> None:
    out, writer = lines(as_json=True)
    log.info("served %d of\n%s", 3, "them", extra=facts(model="m", seconds=0.5, key=None))
    decision("m: 1 GiB loaded in 0.5 s", kind="load", model="m")
    log.debug("not this one")
    writer.close()
    first, second = map(json.loads, out.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info", "logger": "janus.test", "message": "served 3 of\nthem", "model": "m", "seconds": 0.5,
        "key": None,
    }  # fmt: skip
    assert (second["logger"], second["kind"], second["model"]) == ("janus.decision", "load", "m")


@pytest.mark.usefixtures("levels")
def test_people_read_sentences_only() -> None:
    out, writer = lines(as_json=False)
    decision("m: loaded", kind="load", model="m", seconds=1.0)
    writer.close()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} I m: loaded\n", out.getvalue())


@pytest.mark.usefixtures("levels")
def test_a_traceback_is_a_field_and_one_line() -> None:
    out, writer = lines(as_json=True)
    try:
        raise ValueError("inside")
    except ValueError as error:
        log.error("torn down", exc_info=error, extra=facts(kind="teardown"))
    writer.close()
    (line,) = out.getvalue().splitlines()
    assert "ValueError: inside" in json.loads(line)["trace"]


class Stalled(io.StringIO):
    """A reader that takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.go.wait(20)
        return super().write(text)


def record(number: int) -> logging.LogRecord:
    return logging.LogRecord("janus.test", logging.INFO, "", 0, "line %d", (number,), None)


def test_a_stalled_reader_costs_lines_and_no_time() -> None:
    stream = Stalled()
    writer = LineWriter(stream, queued_lines=5)
    writer.setFormatter(logging.Formatter(HUMAN))
    writer.handle(record(0))
    assert stream.entered.wait(20)  # one is being written, five wait, the others are lost
    for number in range(1, 21):
        writer.handle(record(number))
    stream.go.set()
    writer.close(20)
    text = stream.getvalue()
    assert [f"line {i}\n" in text for i in range(7)] == [True] * 6 + [False]
    assert "15 log lines were lost" in text


def test_closing_does_not_wait_for_a_reader_who_is_gone() -> None:
    stream = Stalled()
    writer = LineWriter(stream, queued_lines=1)
    writer.handle(record(0))
    assert stream.entered.wait(20)
    writer.handle(record(1))
    writer.close(timeout_s=0.01)
    stream.go.set()


def test_a_closed_stream_and_a_bad_line_end_nothing() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.setFormatter(JsonLines())
    writer.handle(logging.LogRecord("janus.test", logging.INFO, "", 0, "%d", ("no number",), None))
    writer.handle(record(1))
    writer.close()
    assert "could not be written" in stream.getvalue()
    assert '"line 1"' in stream.getvalue()
    closed = io.StringIO()
    closed.close()
    writer = LineWriter(closed)
    writer.handle(record(2))
    writer.close()
