"""Recorded requests as calls: workload62's CSV, and traces in the formats of `bench.traces` mapped onto applications.

`scenario` asks for blocks. Files are read as they are replayed, never whole. More volume is made of copies: each
request so many times, each copy some seconds away; time is never squeezed, which would turn bursts of 30 s into bursts
of 1 s. A line that is out of order, negative or no request is refused with its number.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

from ..traces import UNREADABLE, TraceRow, open_text, parse_trace
from .blocks import Block, Blocks, Floats, Ints, empty, joined
from .generator import EXPONENT

JITTER_S: Final = 10.0
_BLOCK: Final = 20_000
_MOST_TOKENS: Final = 1_000_000_000
_COLUMNS: Final = "t_ms,app,input_tokens,output_tokens"


class Split(enum.Enum):
    """Which application a trace's request goes to: each in turn, by a power law of their order, or by its own name."""

    ROBIN = "robin"
    POWER = "power"
    NAMES = "names"


class Mapped(NamedTuple):
    """A trace and the indices of the applications that get its requests. start_s counts from its first request."""

    path: Path
    apps: tuple[int, ...]
    split: Split = Split.ROBIN
    factor: float = 1.0
    jitter_s: float = JITTER_S
    start_s: float = 0.0


class Chosen(NamedTuple):
    """What is kept of workload62: for each of its applications its new number (below 0: none), how many times its
    requests come, and how far copies may be from them."""

    numbers: Ints
    factors: Floats
    jitter_s: Floats


def requests62(folder: Path, chosen: Chosen, seed: int) -> Blocks:
    """The day of the trace workload62, from its start on."""
    rows = max(256, int(_BLOCK / max(1.0, float(chosen.factors.max(initial=1.0)))))
    source = _rows62(folder / "requests.csv.gz", len(chosen.numbers), rows)
    kept = (block.part(chosen.numbers[block.app] >= 0) for block in source)
    copies = repeated(kept, chosen.factors, chosen.jitter_s, seed)
    return (block._replace(app=chosen.numbers[block.app]) for block in copies)


def mapped(trace: Mapped, names: Sequence[str], seed: int) -> Blocks:
    """A trace's requests, with times from start_s on. names: of all applications of the scenario."""
    factors, jitter_s = np.full(len(names), trace.factor), np.full(len(names), trace.jitter_s)
    copies = repeated(_rows_of(trace, names, seed), factors, jitter_s, seed)
    for block in copies:
        late = block.part(slice(int(np.searchsorted(block.at_s, trace.start_s)), None))
        if late.n:
            yield late._replace(at_s=late.at_s - trace.start_s)


def check62(folder: Path, apps: int, most_tokens: int) -> None:
    """Read all of it once, so that what is wrong is said before anything runs."""
    path = folder / "requests.csv.gz"
    _check(path, _rows62(path, apps, _BLOCK), most_tokens)


def check(trace: Mapped, names: Sequence[str], most_tokens: int) -> None:
    """The same for a mapped trace."""
    _check(trace.path, _rows_of(trace, names, 0), most_tokens)


def _check(path: Path, blocks: Blocks, most_tokens: int) -> None:
    passed = 0
    for block in blocks:
        tokens = block.inputs + block.outputs
        if tokens.max() > most_tokens:
            at = int(np.argmax(tokens > most_tokens))
            raise BadConfig(
                f"{path}: request {passed + at + 1} has {tokens[at]} tokens, prompt and answer, where a sequence has "
                f"{most_tokens} at most; raise memory.context_tokens"
            )
        passed += block.n


def repeated(source: Iterable[Block], factors: Floats, jitter_s: Floats, seed: int) -> Blocks:
    """Each request factors[app] times on average, in order of time; a part below one is a chance.

    Requests that come once or never stay where they are. Held are those that something earlier may still come before.
    """
    draws = np.random.default_rng([seed, 75])
    whole, part = np.floor(factors).astype(np.int64), factors % 1.0
    moved_s = np.where(factors > 1.0, jitter_s, 0.0)
    far_s = float(moved_s.max(initial=0.0))
    held = empty()
    for block in source:
        if not block.n:
            continue
        times = whole[block.app] + (draws.random(block.n) < part[block.app])
        copies = block.part(np.repeat(np.arange(block.n), times))
        # Before the first moment there is nothing: what would come there comes as much after it.
        at_s = np.abs(copies.at_s + draws.uniform(-1.0, 1.0, copies.n) * moved_s[copies.app])
        held = joined([held, copies._replace(at_s=at_s)]).ordered()
        cut = int(np.searchsorted(held.at_s, block.at_s[-1] - far_s))
        if cut:
            yield held.part(slice(0, cut))
            held = held.part(slice(cut, None))
    if held.n:
        yield held


def _rows62(path: Path, apps: int, rows: int) -> Blocks:
    try:
        yield from _parsed62(path, apps, rows)
    except UNREADABLE as error:
        raise BadConfig(f"{path}: {error}") from None


def _parsed62(path: Path, apps: int, rows: int) -> Blocks:
    with open_text(path) as file:
        first = file.readline().strip()
        if first != _COLUMNS:
            raise BadConfig(f"{path}: line 1: {first[:60]!r} where {_COLUMNS} is expected")
        at, last_ms = 2, 0
        while lines := list(itertools.islice(file, rows)):
            try:
                table = np.loadtxt(lines, delimiter=",", dtype=np.int64, ndmin=2, comments=None)
                wrong = table.shape[1] != 4 or len(table) != len(lines)
            except (ValueError, OverflowError):
                wrong = True
            if wrong or table[0, 0] < last_ms or _bad(table, apps):
                raise BadConfig(f"{path}: {_complaint(lines, at, last_ms, apps)}")
            at, last_ms = at + len(lines), int(table[-1, 0])
            yield Block(table[:, 0] / 1e3, table[:, 1], np.maximum(table[:, 2], 1), np.maximum(table[:, 3], 1))


def _bad(table: Ints, apps: int) -> bool:
    return bool((np.diff(table[:, 0]) < 0).any() or (table < 0).any() or (table[:, 1] >= apps).any()
                or (table[:, 2:] > _MOST_TOKENS).any())  # fmt: skip


def _complaint(lines: Sequence[str], first: int, last_ms: int, apps: int) -> str:
    """What is wrong with the first line that is."""
    for number, line in enumerate(lines, first):
        shown = line.strip()[:80]
        try:
            at_ms, app, inputs, outputs = map(int, line.split(","))
        except ValueError:
            return f"line {number}: {shown!r} is not four whole numbers"
        if min(at_ms, app, inputs, outputs) < 0:
            return f"line {number}: {shown!r} has a negative number"
        if max(inputs, outputs) > _MOST_TOKENS or at_ms >= 1 << 62:
            return f"line {number}: {shown!r} has a number that is too large"
        if app >= apps:
            return f"line {number}: {shown!r} is of application {app}, and there are {apps}"
        if at_ms < last_ms:
            return f"line {number}: {shown!r} comes {last_ms - at_ms} ms before the line above it"
        last_ms = at_ms
    return f"lines {first} to {first + len(lines) - 1} cannot be read"


def _rows_of(trace: Mapped, names: Sequence[str], seed: int) -> Blocks:
    """The requests of a trace, each given to an application."""
    give = _giver(trace, names, np.random.default_rng([seed, 76]))
    began_s, last_s = None, 0.0
    most = max(256, int(_BLOCK / max(1.0, trace.factor)))  # copies of a block are made all at once
    rows: list[tuple[float, int, int, int]] = []
    with open_text(trace.path) as file:
        lines = _Numbered(file)
        try:
            for row in parse_trace(lines):
                began_s = row.t_s if began_s is None else began_s
                at_s = row.t_s - began_s
                if at_s < last_s:
                    raise ValueError(f"line {lines.number}: it comes {last_s - at_s:g} s before the line above it")
                last_s = at_s
                app = give(row)
                if app is None:
                    raise ValueError(f"line {lines.number}: no application here is named {row.app!r}"
                                     f"{nearest(row.app, (names[i] for i in trace.apps))}")  # fmt: skip
                rows.append((at_s, app, row.input_tokens, row.output_tokens))
                if len(rows) == most:
                    yield _block(rows)
                    rows = []
        except UNREADABLE as error:
            raise BadConfig(f"{trace.path}: {error}") from None
    if rows:
        yield _block(rows)


def _giver(trace: Mapped, names: Sequence[str], draws: np.random.Generator) -> Callable[[TraceRow], int | None]:
    """To which application a request goes."""
    match trace.split:
        case Split.NAMES:
            known = {names[i]: i for i in trace.apps}
            return lambda row: known.get(row.app)
        case Split.ROBIN:
            turns = itertools.cycle(trace.apps)
            return lambda _: next(turns)
        case Split.POWER:
            weights = np.arange(1, len(trace.apps) + 1) ** -EXPONENT
            reached = np.cumsum(weights / weights.sum())
            return lambda _: trace.apps[min(int(np.searchsorted(reached, draws.random())), len(trace.apps) - 1)]


def _block(rows: Sequence[tuple[float, int, int, int]]) -> Block:
    at_s, *numbers = zip(*rows, strict=True)
    return Block(np.array(at_s), *(np.array(column, dtype=np.int64) for column in numbers))


class _Numbered:
    """Lines, and the number of the one that was taken last."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self.number = iter(lines), 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number += 1
        return next(self._lines)
