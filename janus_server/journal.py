"""The leader's journal: every event with its time and the actions that it led to, one JSON object a line.

`leader` writes it, `janus replay` reads it: a Brain that is told the same events at the same times gives the same
actions, so a decision that surprised somebody can be looked at afterwards. Nothing that a client wrote is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from janus_server.errors import BadConfig, Bug
from janus_server.orders import Action, Event
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings, Memory

VERSION: Final = 1
# A day of a busy node (two events a second of 400 bytes) is 70 MB.
MOST_BYTES: Final = 64 << 20
# A heading may be large: what was learnt of one model takes some 100 KB.
_MOST_LINE_BYTES: Final = 256 << 20


# What a file that somebody edited makes of the Brain's own checks.
_IMPOSSIBLE: Final = (Bug, ArithmeticError, ValueError, LookupError)


class Heading(msgspec.Struct, frozen=True, kw_only=True, tag="heading"):
    """The first line of a file: what the Brain was made of, and what it believed when the file began."""

    term: int
    settings: BrainSettings
    memory: Memory
    version: int = VERSION


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    """One event at `now` (seconds on the leader's clock) and what the Brain did about it."""

    now: float
    event: Event
    actions: tuple[Action, ...]


class Difference(msgspec.Struct, frozen=True):
    """Where a replay first did something else; lines count from 1."""

    line: int
    entry: Entry
    replayed: tuple[Action, ...]


class Replayed(msgspec.Struct, frozen=True):
    """How a replay went: entries told, the seconds that they span, and the first difference, if any."""

    entries: int
    span_s: float
    difference: Difference | None


class Journal:
    """Appends to a file that only its user may read. At most_bytes it begins anew; the last one is kept beside it.

    A file begins with what the Brain believes at that moment, so that it can be replayed without those before it.
    A file that can no longer be written (a full disk) is given up with `lost(reason)`: serving goes on without.
    """

    def __init__(
        self,
        path: Path,
        brain: Brain,
        lost: Callable[[str], None],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._path = path
        self._brain = brain
        self._lost = lost
        self._most_bytes = most_bytes
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = None
        self._bytes = 0
        try:
            self._begin()
        except OSError as error:
            raise BadConfig(f"--journal {path} cannot be written: {error.strerror}") from None

    def write(self, entry: Entry) -> None:
        """Append one entry; the system writes it out in its own time."""
        if self._file is None:
            return
        try:
            self._append(entry)
            if self._bytes >= self._most_bytes:
                self._begin()
        except OSError as error:
            self._file = None
            self._lost(f"the journal {self._path} ends here: {error.strerror}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        """Start a file; the one that lies there is kept as PATH.1, the one before that is lost."""
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):  # a device is nobody's to rename, a pipe has no end
                raise OSError(errno.EINVAL, "it is no regular file")
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        # Unbuffered: what was written is there when the process is killed, at 5 us a line.
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb", buffering=0)
        brain = self._brain
        self._append(Heading(term=brain.term, settings=brain.settings, memory=brain.memory()))
        self._bytes = 0  # a heading that is larger than the rest may be must not begin another file at once

    def _append(self, line: Heading | Entry) -> None:
        if self._file is not None:
            data = self._encoder.encode(line) + b"\n"
            if self._file.write(data) != len(data):  # half a line in the middle would spoil all that follows
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._bytes += len(data)


def read(path: Path) -> Iterator[Heading | Entry]:
    """The lines of a journal. BadConfig where it is none; a last line that was cut short by a crash is left out."""
    decoder = msgspec.json.Decoder(Heading | Entry)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise BadConfig(f"{path} line {number} is no line of a journal: {error}") from None
    except OSError as error:
        raise BadConfig(f"cannot read {path}: {error.strerror}") from None


def replay(path: Path) -> Replayed:
    """Tell a fresh Brain what the journal's was told; stops at the first action that differs."""
    lines = read(path)
    heading = next(lines, None)
    if not isinstance(heading, Heading) or heading.version != VERSION:
        raise BadConfig(f"{path} does not begin as a journal of version {VERSION} does")
    try:
        brain = Brain(heading.settings, heading.term, heading.memory)
    except _IMPOSSIBLE as error:
        raise BadConfig(f"{path} line 1 tells of what cannot be: {error}") from None
    times_s: list[float] = []
    difference = None
    for number, entry in enumerate(lines, start=2):
        if isinstance(entry, Heading):
            raise BadConfig(f"{path} line {number} is a second heading")
        times_s.append(entry.now)
        try:
            actions = tuple(brain.on(entry.event, entry.now))
        except _IMPOSSIBLE as error:
            raise BadConfig(f"{path} line {number} tells of what cannot be: {error}") from None
        if actions != entry.actions:
            difference = Difference(number, entry, actions)
            break
    return Replayed(len(times_s), times_s[-1] - times_s[0] if times_s else 0.0, difference)
