"""The files by which the nodes of one host know each other: the leader's lease and one file per node.

`local` calls it, on a thread: a slow disk must not hold up the loop. Records have a fixed size and are written in
place, so that a full disk stops nobody. A node holds a lock on its own file for as long as its process lives; the lease
is read and written under a lock that is held for microseconds. Nothing here decides who leads: `lease` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from janus_server.coordinator.base import Trouble
from janus_server.coordinator.lease import LeaseRecord
from janus_server.coordinator.records import MOST_MEMBER_BYTES, MOST_MEMBERS, Member, check_member
from janus_server.errors import BadConfig

_LEASE: Final = "leader.lease"
_NODE: Final = ".member"
_LEASE_BYTES: Final = 512
_BEAT_BYTES: Final = MOST_MEMBER_BYTES + 256
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PAUSE_S: Final = 0.002
_ENTER_TRIES: Final = 8
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Beat(msgspec.Struct, frozen=True):
    """What a node's file holds: itself, and when it last said so on the clock of this start of the machine."""

    member: Member
    beat_s: float
    boot: str

    def is_fresh(self, now_s: float, boot: str, lease_s: float) -> bool:
        return self.boot == boot and now_s < self.beat_s + lease_s


class RunFiles:
    """The directory held open, and this node's file once it has entered. One thread at a time."""

    def __init__(self, path: Path, boot: str | None = None) -> None:
        self.boot = _BOOT.read_text(encoding="ascii").strip() if boot is None else boot
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadConfig(f"the run directory {path} cannot be used: {error.strerror}") from None
        status = os.fstat(self._at)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(self._at)
            raise BadConfig(f"the run directory {path} must be your own and closed to others (chmod 700)")
        self._own: int | None = None
        self._name = ""
        self._known: dict[str, Beat] = {}

    def close(self) -> None:
        """Leave: the file goes before its lock does."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name + _NODE, dir_fd=self._at)
            os.close(self._own)
            self._own = None
        if self._at >= 0:
            os.close(self._at)
            self._at = -1

    def enter(self, name: str) -> bool:
        """Take the file of this name; False where a living process holds it."""
        for _ in range(_ENTER_TRIES):
            own = os.open(name + _NODE, _OPEN | os.O_CREAT, 0o600, dir_fd=self._at)
            try:
                if not _locked(own, fcntl.LOCK_EX):
                    return False
                # Unless somebody removed it between the opening and the lock.
                if self._is_there(own, name + _NODE):
                    # Whatever a former process left there says nothing about this one.
                    _write(own, b"", _BEAT_BYTES)
                    self._own, self._name = own, name
                    return True
            finally:
                if self._own != own:
                    os.close(own)
        return False

    def beat(self, member: Member, now_s: float) -> None:
        """Say that this node lives."""
        if self._own is not None:
            _write(self._own, msgspec.json.encode(Beat(member, now_s, self.boot)), _BEAT_BYTES)

    def nodes(self) -> dict[str, Beat]:
        """The last beat of every process that lives, by name. Files of those that do not are removed."""
        names = sorted(entry for entry in os.listdir(self._at) if entry.endswith(_NODE))
        known: dict[str, Beat] = {}
        for entry in names[:MOST_MEMBERS]:
            name = entry.removesuffix(_NODE)
            beat = self._look(entry, name)
            if beat is not None:
                known[name] = beat
        self._known = known
        return known

    @contextlib.contextmanager
    def lease(self, limit_s: float) -> Iterator[tuple[LeaseRecord, Callable[[LeaseRecord], None]]]:
        """The lease, and how to write it, while nobody else can. Trouble where it stays locked for limit_s."""
        file = os.open(_LEASE, _OPEN | os.O_CREAT, 0o600, dir_fd=self._at)
        try:
            until_s = time.monotonic() + limit_s
            while not _locked(file, fcntl.LOCK_EX):
                if time.monotonic() >= until_s:
                    raise Trouble("another process keeps the lease of this run directory locked")
                time.sleep(_PAUSE_S)
            record = _lease_of(os.pread(file, _LEASE_BYTES, 0))

            def write(after: LeaseRecord) -> None:
                _write(file, msgspec.json.encode(after), _LEASE_BYTES)
                if after.term != record.term:
                    # A term outlives a crash of the machine; when within it a lease ends does not have to.
                    os.fsync(file)

            yield record, write
        finally:
            os.close(file)

    def _look(self, entry: str, name: str) -> Beat | None:
        try:
            file = os.open(entry, _OPEN, dir_fd=self._at)
        except OSError:
            return None
        try:
            if name != self._name and _locked(file, fcntl.LOCK_SH):
                self._sweep(file, entry)
                return None
            return _beat_of(os.pread(file, _BEAT_BYTES, 0), name) or self._known.get(name)
        except OSError:  # not a file
            return None
        finally:
            os.close(file)

    def _sweep(self, file: int, entry: str) -> None:
        with contextlib.suppress(OSError):
            if _locked(file, fcntl.LOCK_EX) and self._is_there(file, entry):
                os.unlink(entry, dir_fd=self._at)

    def _is_there(self, file: int, entry: str) -> bool:
        """Whether this open file is still the one of that name."""
        try:
            return os.path.samestat(os.stat(entry, dir_fd=self._at, follow_symlinks=False), os.fstat(file))
        except FileNotFoundError:
            return False


def clear(path: Path) -> None:
    """Remove the directory and all that its nodes left there, unless one of them still runs."""
    try:
        files = RunFiles(path)
    except BadConfig:
        return
    try:
        if not files.nodes():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        files.close()


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: int, text: bytes, size_bytes: int) -> None:
    """Always the same number of bytes: the file's blocks are there from the first time on."""
    if len(text) >= size_bytes or os.pwrite(file, text.ljust(size_bytes), 0) != size_bytes:
        raise Trouble("a record of the run directory could not be written whole")


def _lease_of(text: bytes) -> LeaseRecord:
    if not text.strip(b" \0"):
        return LeaseRecord()
    try:
        return msgspec.json.decode(text, type=LeaseRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Trouble(
            f"the file {_LEASE} of the run directory is damaged; stop the nodes of this host and remove it"
        ) from None


def _beat_of(text: bytes, name: str) -> Beat | None:
    """None for what is being written at this moment, and for what no node wrote."""
    try:
        beat = msgspec.json.decode(text, type=Beat)
        return beat if check_member(beat.member).name == name else None
    except (msgspec.MsgspecError, UnicodeDecodeError, BadConfig):
        return None
