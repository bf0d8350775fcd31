"""Timed traces: Azure LLM CSV, BurstGPT CSV, Mooncake JSONL and the multi-model CSV, all to one kind of row.

`datasets` turns rows into plans. The format is told by the file's first line. Files may be gzipped. A line that cannot
be read is refused with its number: a benchmark over half a trace would look like one over all of it.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from janus_server.errors import BadConfig

MOONCAKE_BLOCK_TOKENS: Final = 512
# What reading and parsing a file that is no trace may raise, a gzip that was cut short and deep JSON included.
UNREADABLE: Final = (ValueError, TypeError, KeyError, OverflowError, RecursionError, OSError, EOFError, zlib.error,
                     csv.Error)  # fmt: skip
# Longer is no prompt or answer, and would not fit the arrays that replay it.
_MOST_TOKENS: Final = 1_000_000_000
_Reader = Callable[[Sequence[str]], "TraceRow | None"]


class TraceRow(NamedTuple):
    """One recorded request. blocks are ids of successive prompt blocks: equal ids mean an equal prefix."""

    t_s: float
    app: str
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class TraceSlice(NamedTuple):
    """Which part of a trace is replayed: seconds from its first row, and applications (empty: all)."""

    start_s: float = 0.0
    duration_s: float = math.inf
    apps: frozenset[str] = frozenset()


def read_trace(path: Path, part: TraceSlice) -> list[TraceRow]:
    """The rows of the slice in order of time; times count from the start of the slice."""
    with open_text(path) as lines:
        try:
            rows = list(_cut(parse_trace(lines), part))
        except UNREADABLE as error:
            raise BadConfig(f"{path}: {error}") from None
    if not rows:
        raise BadConfig(f"{path}: no request lies in the chosen part of the trace")
    return rows


def parse_trace(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Rows as they stand. ValueError names the line."""
    stream = iter(lines)
    first = next((line for line in stream if line.strip()), "")
    if first.lstrip().startswith("{"):
        yield from _mooncake(first, stream)
        return
    names = [name.strip().strip("\ufeff").lower() for name in next(csv.reader([first]), [])]
    for wanted, read in _FORMATS:
        if set(wanted) <= set(names):
            yield from _table([names.index(name) for name in wanted], stream, read)
            return
    known = "; ".join(", ".join(wanted) for wanted, _ in _FORMATS)
    raise ValueError(f"the first line is no known trace's: it is neither a JSON object nor has the columns {known}")


def open_text(path: Path) -> io.TextIOBase:
    """A text file, gzipped or not."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        # The caller closes it.
        return gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror or error}; traces are not part of Janus: name yours") from None


def _cut(rows: Iterable[TraceRow], part: TraceSlice) -> list[TraceRow]:
    """By time from the first row. Sorted, since some traces are in order of finishing."""
    ordered = sorted(rows, key=lambda row: row.t_s)
    if not ordered:
        return []
    start_s = ordered[0].t_s + part.start_s
    return [
        row._replace(t_s=row.t_s - start_s)
        for row in ordered
        if 0 <= row.t_s - start_s < part.duration_s and (not part.apps or row.app in part.apps)
    ]


def _table(columns: list[int], lines: Iterator[str], read: _Reader) -> Iterator[TraceRow]:
    for number, fields in enumerate(csv.reader(lines), 2):
        if not fields:
            continue
        try:
            if len(fields) <= max(columns):
                raise ValueError(f"{len(fields)} columns, too few")
            row = read([fields[i] for i in columns])
            if row is not None:
                yield _checked(row)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"line {number}: {error} in {','.join(fields)[:80]!r}") from None


def _azure(fields: Sequence[str]) -> TraceRow:
    """TIMESTAMP,ContextTokens,GeneratedTokens; seven digits after the second, of which six are read."""
    day, _, fraction = fields[0].partition(".")
    at = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC)
    part_s = float(f"0.{fraction}") if fraction.isdigit() else 0.0
    return TraceRow(at.timestamp() + part_s, "", int(fields[1]), int(fields[2]))


def _burstgpt(fields: Sequence[str]) -> TraceRow | None:
    """Timestamp (s),Model,Request tokens,Response tokens. A response of 0 tokens failed when recorded: left out."""
    if int(fields[3]) == 0:
        return None
    return TraceRow(float(fields[0]), fields[1], int(fields[2]), int(fields[3]))


def _multi(fields: Sequence[str]) -> TraceRow:
    """t_ms,app,input_tokens,output_tokens"""
    return TraceRow(float(fields[0]) / 1000, fields[1], int(fields[2]), int(fields[3]))


def _mooncake(first: str, rest: Iterator[str]) -> Iterator[TraceRow]:
    """{"timestamp": ms, "input_length": …, "output_length": …, "hash_ids": […]}, one object a line."""
    number = 0
    for line in (line for part in ([first], rest) for line in part):
        number += 1
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            blocks = tuple(int(i) for i in entry.get("hash_ids", ()))
            yield _checked(
                TraceRow(
                    float(entry["timestamp"]) / 1000,
                    str(entry.get("model", "")),
                    int(entry["input_length"]),
                    int(entry["output_length"]),
                    blocks,
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"line {number}: {type(error).__name__} {error} in {line[:80]!r}") from None


def _checked(row: TraceRow) -> TraceRow:
    if not math.isfinite(row.t_s) or row.input_tokens < 0 or row.output_tokens < 0:
        raise ValueError("a time or a length that is none")
    if max(row.input_tokens, row.output_tokens) > _MOST_TOKENS:
        raise ValueError(f"a length above {_MOST_TOKENS:,} tokens")
    # Real rows have an empty prompt or answer now and then; a server takes neither.
    return row._replace(input_tokens=max(1, row.input_tokens), output_tokens=max(1, row.output_tokens))


# Columns by which a format is known, in the order in which its reader takes them.
_FORMATS: Final[tuple[tuple[tuple[str, ...], _Reader], ...]] = (
    (("t_ms", "app", "input_tokens", "output_tokens"), _multi),
    (("timestamp", "model", "request tokens", "response tokens"), _burstgpt),
    (("timestamp", "contexttokens", "generatedtokens"), _azure),
)
