"""The admin key of the user who runs a server: made at its start, in a file that nobody else can read, gone at its end.

`serve` offers one where no admin key is configured and only this machine reaches the server; commands of the same user
read it, nobody else can. The server holds a lock on its file for as long as it lives, so a file that a killed server
left is known as such: it is never sent anywhere, and the next server removes it. The key is neither logged nor shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

log = logging.getLogger("janus.localkey")

_FILE: Final = re.compile(r"[0-9]{1,5}\.key")
_MOST_BYTES: Final = 4096
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalKey(msgspec.Struct, frozen=True):
    """What the file holds: the key, and the numeric address of the server that takes it: it is sent nowhere else."""

    address: str
    key: str

    def __repr__(self) -> str:
        return f"LocalKey({self.address!r})"


@contextlib.contextmanager
def offered(folders: Sequence[Path], address: str, port: int) -> Iterator[str | None]:
    """A new key in the first folder that is private, for as long as the block runs; None where there is no such folder.

    What servers that are gone left in that folder is removed.
    """
    made = LocalKey(address, secrets.token_urlsafe(32))
    for folder in folders:
        with contextlib.ExitStack() as stack:
            try:
                at = _open_private(folder)
                stack.callback(os.close, at)
                _sweep(at)
                file = _write(at, port, made)
            except OSError as error:
                log.debug("%s cannot hold an admin key: %s", folder, error.strerror)
                continue
            stack.callback(_remove, at, port, file)
            yield made.key
            return
    log.warning("admin routes are off: no folder is private to this user; set JANUS_ADMIN_KEY to have them")
    yield None


def find(folders: Sequence[Path], port: int) -> LocalKey | None:
    """The key of this user's server on that port, or None when there is none that runs."""
    for folder in folders:
        with contextlib.suppress(OSError, msgspec.MsgspecError), contextlib.ExitStack() as stack:
            at = _open_private(folder, create=False)
            stack.callback(os.close, at)
            file = os.open(_name(port), _READ, dir_fd=at)
            stack.callback(os.close, file)
            if _is_private(os.fstat(file)) and not _abandoned(file):
                return msgspec.json.decode(os.read(file, _MOST_BYTES), type=LocalKey)
    return None


def _name(port: int) -> str:
    return f"{port}.key"


def _open_private(folder: Path, create: bool = True) -> int:
    """The folder, judged by what was opened: ours, and closed to everybody else. OSError where it is not."""
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_private(os.fstat(at)):
        os.close(at)
        raise PermissionError(1, "others than its owner may use it")
    return at


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _write(at: int, port: int, made: LocalKey) -> int:
    """The file as an open descriptor that holds its lock. It has its name only once it is whole and locked."""
    draft = f".{port}.{secrets.token_hex(8)}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        os.write(file, msgspec.json.encode(made))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(draft, _name(port), src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        os.close(file)
        os.unlink(draft, dir_fd=at)
        raise
    return file


def _remove(at: int, port: int, file: int) -> None:
    """Ours only: a server on another address may have taken the name since."""
    with contextlib.suppress(OSError):
        if os.stat(_name(port), dir_fd=at, follow_symlinks=False).st_ino == os.fstat(file).st_ino:
            os.unlink(_name(port), dir_fd=at)
    os.close(file)


def _sweep(at: int) -> None:
    for name in filter(_FILE.fullmatch, os.listdir(at)):
        with contextlib.suppress(OSError):
            file = os.open(name, _READ, dir_fd=at)
            try:
                if _abandoned(file):
                    os.unlink(name, dir_fd=at)
            finally:
                os.close(file)


def _abandoned(file: int) -> bool:
    """Whether no server holds the file any more. The lock that is taken to find out goes with the descriptor."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
