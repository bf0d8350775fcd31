"""The run directory: where the nodes of one user on one host find each other. Only that user may enter it.

`<run>/<node>.sock` is a node's socket, `<run>/<node>.lock` is held for as long as the process of that name lives. Both
ends of a connection are asked of the system whose they are. Called by `serving`, `pull` and `look`; nothing is read
from peers here.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from janus_server.errors import BadConfig
from janus_server.readers import NODE_NAME
from janus_server.transfer.frames import PeerTrouble

if TYPE_CHECKING:
    from janus_server.transfer.line import Line

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_WAITING = 16
_SOCKET: Final = ".sock"


class Far(Protocol):
    """Another node as the cluster knows it: near says that it is of this host, dial(limit_s) opens a line to it
    (PeerTrouble; blocks for so long at most)."""

    @property
    def near(self) -> bool: ...

    @property
    def dial(self) -> Callable[[float], Line]: ...


class Others(Protocol):
    """The nodes that a cluster knows, by name."""

    def names(self) -> Sequence[str]: ...

    def far(self, node: str) -> Far | None: ...


class Nobody(msgspec.Struct, frozen=True):
    """No node is known but those of the run directory."""

    def names(self) -> Sequence[str]:
        return ()

    def far(self, node: str) -> Far | None:
        return None


class Peering(msgspec.Struct, frozen=True, kw_only=True):
    """How a node meets the others of its host, and those that its cluster knows.

    incarnation is drawn anew by every process. A pull runs at bytes_per_s at most. A silent peer is given up after
    reply_s, one that sends pages and then stops after stall_s. A grant lasts for grant_s, and longer where the model is
    large. Pages of other hosts come over up to `streams` connections.
    """

    node: str
    incarnation: str
    run_dir: Path
    bytes_per_s: float | None = None
    reply_s: float = 5.0
    grant_s: float = 10.0
    stall_s: float = 3.0
    streams: int = 2
    others: Others = Nobody()


class RunDirectory:
    """The directory held open, after it was found to be a place that others cannot enter."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadConfig(f"the run directory {path} cannot be used: {error.strerror}") from None
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            self.close()
            raise BadConfig(f"the run directory {path} must be your own and closed to others (chmod 700)")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def listen(self, node: str) -> tuple[socket.socket, int]:
        """The node's socket, and the descriptor of its lock: to be closed last. BadConfig where the name is taken."""
        _check_name(node)
        lock = os.open(f"{node}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.forget(node)  # a killed process leaves its socket behind
            listening.bind(self._address(node))
            listening.listen(_WAITING)
        except OSError as error:
            listening.close()
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise BadConfig(
                    f"another node of this run directory is called {node}, and it runs: give --node another name"
                ) from None
            raise BadConfig(f"the run directory takes no socket for {node}: {error.strerror}") from None
        return listening, lock

    def forget(self, node: str) -> None:
        """Remove the node's socket. Only for whoever holds its lock."""
        try:
            os.unlink(f"{node}.sock", dir_fd=self._fd)
        except FileNotFoundError:
            pass

    def names(self) -> tuple[str, ...]:
        """Nodes that have a socket here, in order; one whose process was killed leaves its own behind."""
        found = (name.removesuffix(_SOCKET) for name in os.listdir(self._fd) if name.endswith(_SOCKET))
        return tuple(sorted(filter(NODE_NAME.fullmatch, found)))

    def connect(self, node: str) -> socket.socket:
        """A connection to the process that is called so now."""
        try:
            _check_name(node)
        except BadConfig as error:
            raise PeerTrouble(str(error)) from None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(self._address(node))
            require_own_user(connection)
        except BlockingIOError:
            connection.close()
            raise PeerTrouble("the peer is busy with others") from None
        except OSError:
            connection.close()
            raise PeerTrouble("there is no such peer", absent=True) from None
        except PeerTrouble:
            connection.close()
            raise
        return connection

    def _address(self, node: str) -> str:
        """Through the open directory: it cannot be exchanged after the check, and long paths fit an address."""
        return f"/proc/self/fd/{self._fd}/{node}.sock"


def require_own_user(connection: socket.socket) -> None:
    """PeerTrouble unless the process at the other end belonged to our user when the connection was made."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise PeerTrouble("the peer belongs to another user")


def first_usable(folders: Sequence[Path]) -> Path:
    """The first folder that is this user's alone, made where it is not there yet; BadConfig where none can be."""
    trouble = BadConfig("there is no run directory: give --run-dir FOLDER")
    for folder in folders:
        try:
            RunDirectory(folder).close()
            return folder
        except BadConfig as error:
            trouble = error
    raise trouble


def _check_name(node: str) -> None:
    if not NODE_NAME.fullmatch(node):
        raise BadConfig("a node's name is of up to 64 letters, digits, dots and dashes")
