"""One TCP connection between nodes of different hosts, for threads that wait: frames, and pages after them.

Both ends use it: `door` to answer, `streamed` to ask. Every wait ends: a frame has so long in all, pages so long
without a byte, and whoever waits is asked a few times a second whether it may go on. Plain connections send pages
straight from the memory's descriptor; under TLS they are encrypted from a mapping. It decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from janus_server.kv.move import Stopped
from janus_server.transfer.frames import HEADER, VERSION, Answer, PeerTrouble, Question

T = TypeVar("T")

# How often who waits looks up. Bytes that come meanwhile wake it at once.
_NAP_S: Final = 0.1
# One call takes so much, or what comes within a nap: fewer calls that drop and take the interpreter lock.
_CHUNK_BYTES: Final = 8 << 20
_NAP: Final = struct.pack("ll", 0, int(_NAP_S * 1e6))
_GONE: Final = "the peer went away"


def always() -> bool:
    return True


class Line:
    """Used by one thread at a time; `cut` by any."""

    def __init__(self, connection: socket.socket) -> None:
        """A connected socket is the line's from now on; under TLS its handshake is done."""
        self._socket = connection
        self._tls = isinstance(connection, ssl.SSLSocket)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            connection.settimeout(_NAP_S)
        else:  # the system's own limits: one call for a chunk, where a timeout would poll for every part of it
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NAP)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _NAP)

    @property
    def certificate(self) -> bytes | None:
        """The one that the other end showed, in DER form."""
        return self._socket.getpeercert(binary_form=True) if isinstance(self._socket, ssl.SSLSocket) else None

    def cut(self) -> None:
        """End whatever waits on it, with PeerTrouble. Any thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """No thread may use it any more."""
        self._socket.close()

    # Frames

    def send(self, message: Question | Answer, limit_s: float) -> None:
        self.send_body(msgspec.msgpack.encode(message), limit_s)

    def receive(
        self, decoder: msgspec.msgpack.Decoder[T], most_bytes: int, limit_s: float,
        may_go: Callable[[], bool] = always,
    ) -> T:  # fmt: skip
        """The next frame, which is whole within limit_s, else PeerTrouble. Raises Stopped where it may not go on."""
        try:
            return decoder.decode(self.receive_body(most_bytes, limit_s, may_go))
        # Nesting without end is a RecursionError, text that is no UTF-8 a ValueError.
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            raise PeerTrouble("the peer sent what is no frame") from None

    def send_body(self, body: bytes, limit_s: float) -> None:
        self._send(memoryview(HEADER.pack(VERSION, len(body)) + body), limit_s)

    def receive_body(self, most_bytes: int, limit_s: float, may_go: Callable[[], bool] = always) -> bytearray:
        until_s = time.monotonic() + limit_s
        version, size = HEADER.unpack(self._exactly(HEADER.size, until_s, may_go))
        if version != VERSION:
            raise PeerTrouble("the peer speaks another version")
        if size > most_bytes:
            raise PeerTrouble("the peer announced a frame that is too long")
        return self._exactly(size, until_s, may_go)

    def _exactly(self, count: int, until_s: float, may_go: Callable[[], bool]) -> bytearray:
        data, got = bytearray(count), 0
        with memoryview(data) as view:
            while got < count:
                if not may_go():
                    raise Stopped
                got += self._take(view[got:])
                if got < count and time.monotonic() >= until_s:
                    raise PeerTrouble("the peer did not answer in time")
        return data

    # Pages

    def send_pages(self, fd: int, slab: memoryview, offset: int, count: int, stall_s: float) -> None:
        """count bytes of a memory from offset on: from its descriptor, or under TLS from the mapping of it."""
        if self._tls:
            self._send(slab[offset : offset + count], stall_s)
            return
        moved_s = time.monotonic()
        while count:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, offset, count)
            except BlockingIOError:
                sent = 0
            except OSError:
                raise PeerTrouble(_GONE) from None
            offset, count = offset + sent, count - sent
            moved_s = _moved(sent, moved_s, stall_s)

    def receive_pages(self, into: memoryview, stall_s: float, may_go: Callable[[], bool]) -> None:
        """Fill `into`. Raises Stopped; PeerTrouble where nothing came for stall_s."""
        got, moved_s = 0, time.monotonic()
        while got < len(into):
            if not may_go():
                raise Stopped
            came = self._take(into[got : got + _CHUNK_BYTES])
            got += came
            moved_s = _moved(came, moved_s, stall_s)

    def _take(self, into: memoryview) -> int:
        """Wait for all of `into`, or what comes within a nap: how much that was."""
        try:
            came = self._socket.recv_into(into, 0, 0 if self._tls else socket.MSG_WAITALL)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return 0
        except OSError:
            raise PeerTrouble(_GONE) from None
        if came == 0:
            raise PeerTrouble(_GONE)
        return came

    def _send(self, data: memoryview, stall_s: float) -> None:
        moved_s = time.monotonic()
        while data:
            try:
                sent = self._socket.send(data[:_CHUNK_BYTES])
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
                sent = 0
            except OSError:
                raise PeerTrouble(_GONE) from None
            data = data[sent:]
            moved_s = _moved(sent, moved_s, stall_s)


def _moved(count: int, moved_s: float, stall_s: float) -> float:
    """When bytes moved last; PeerTrouble where that is too long ago."""
    now = time.monotonic()
    if count:
        return now
    if now - moved_s >= stall_s:
        raise PeerTrouble("the peer has sent and taken nothing for too long")
    return moved_s
