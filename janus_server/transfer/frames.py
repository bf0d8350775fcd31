"""What nodes say to each other about the pages they read: bounded, versioned msgpack frames.

On one host they go over a Unix socket: `serving` answers, `mapped` asks. To other hosts they go over TCP (`line`), and
so do the pages: `door` answers, `streamed` asks. A frame is a version, a length and one record; whoever breaks a
bound, speaks another version or stays silent too long is left (`PeerTrouble`). Nothing here trusts a number before it
was compared with a bound, and nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

import msgspec

VERSION: Final = 4
ASK_MOST_BYTES: Final = 4096
# 250,000 runs of pages: 100 GB in pages of 2 MiB without two neighbours are 50,000.
ANSWER_MOST_BYTES: Final = 4 << 20
# What one Fetch may ask for: whoever reads slowly learns so often whether its grant still holds.
FETCH_MOST_BYTES: Final = 8 << 20

HEADER: Final = struct.Struct(">HI")

T = TypeVar("T")

_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class PeerTrouble(Exception):
    """A peer that is gone, silent, wrong or unwilling. The sentence is fixed text: nothing that came over the wire.

    absent says that no process of that name lives.
    """

    def __init__(self, sentence: str, *, absent: bool = False) -> None:
        super().__init__(sentence)
        self.absent = absent


class Denial(enum.Enum):
    """Why a source does not let its weights be read."""

    NOT_HERE = "not here"
    GOING = "going"
    OTHER_LAYOUT = "other layout"
    OTHER_CHECKPOINT = "other checkpoint"
    NO_GRANT = "no grant"
    OLD_TERM = "old term"


DENIALS: Final[Mapping[Denial, str]] = MappingProxyType(
    {
        Denial.NOT_HERE: "the peer does not hold it",
        Denial.GOING: "the peer is putting it away",
        Denial.OTHER_LAYOUT: "the peer holds it in another layout",
        Denial.OTHER_CHECKPOINT: "the peer holds another model of that name",
        Denial.NO_GRANT: "the peer's grant ended before the copy was whole",
        Denial.OLD_TERM: "the order to copy it came from a leader whose term is over",
    }
)


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Pages first … first+count-1."""

    first: _Count
    count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first frame of a connection: who asks, and for which weights, of which only that layout is of use.

    term is that of the leader who had them copied; 0 where nobody was elected.
    """

    node: _Text
    incarnation: _Text
    model: _Text
    layout: _Text
    checkpoint: _Text
    size_bytes: _Count
    term: _Count = 0


class Claim(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Instead of an Ask: a grant that this very process was given by other means (`Grants.issue`) is to be used."""

    node: _Text
    incarnation: _Text
    grant: _Text


class Fetch(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Over TCP: send me a part of what the grant is for, counted over its pages in their order."""

    grant: _Text
    at: _Count
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=FETCH_MOST_BYTES)]


class Look(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first and only question of a connection: what is there to be read? Nothing is granted by the answer."""

    node: _Text
    incarnation: _Text


class Check(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Is the grant valid still? Valid means that every byte read so far was the model's."""

    grant: _Text


class Release(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The grant is not needed any more. Has no answer."""

    grant: _Text


class Granted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The pages, in the window's order, may be read for a while. The descriptor of their memory comes with the frame.

    digest is `kv/move.sampled_digest` of the size_bytes that were asked for. region_bytes is how much may be mapped.
    bytes_per_s is how fast the source asks to be read, because it serves requests; None is as fast as it goes.
    """

    node: _Text
    incarnation: _Text
    grant: _Text
    region_bytes: _Count
    page_bytes: _Count
    runs: tuple[Run, ...]
    digest: _Count
    expires_in_s: float
    bytes_per_s: float | None = None


class Sending(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many bytes of pages follow this frame."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=FETCH_MOST_BYTES)]


class Valid(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    grant: _Text


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A model whose weights could be read at that moment, and by how many they are being read."""

    model: _Text
    layout: _Text
    checkpoint: _Text
    size_bytes: _Count
    readers: _Count


class Holding(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Who answers, and every model that it would let be read."""

    node: _Text
    incarnation: _Text
    models: tuple[Held, ...]


class Denied(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    why: Denial


Question = Ask | Claim | Look | Fetch | Check | Release
Answer = Granted | Sending | Valid | Denied | Holding

QUESTIONS: Final = msgspec.msgpack.Decoder(Question)
ANSWERS: Final = msgspec.msgpack.Decoder(Answer)


class Link:
    """One end of a connection between two nodes. Lives on the loop; one caller at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection

    def close(self) -> None:
        self._socket.close()

    def gone(self) -> bool:
        """True when the other end has closed, or talks out of turn. Any thread, no waiting."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def send(self, message: Question | Answer, limit_s: float, fd: int | None = None) -> None:
        """Hand over one frame, a descriptor with it where given; PeerTrouble when that takes longer than limit_s."""
        body = msgspec.msgpack.encode(message)
        data = memoryview(HEADER.pack(VERSION, len(body)) + body)
        fds = [] if fd is None else [fd]
        async with _within(limit_s):
            while data:
                try:
                    sent = socket.send_fds(self._socket, [data], fds, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    await self._writable()
                    continue
                data, fds = data[sent:], []

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], most_bytes: int, limit_s: float) -> T:
        """The next frame. Descriptors that come with it are not taken."""
        async with _within(limit_s):
            return await self._frame(decoder, most_bytes, self._take)

    async def receive_with_fd(
        self, decoder: msgspec.msgpack.Decoder[T], most_bytes: int, limit_s: float
    ) -> tuple[T, int | None]:
        """The next frame, and the descriptor that came with it, which is the caller's to close."""
        taken: list[int] = []
        try:
            async with _within(limit_s):
                message = await self._frame(decoder, most_bytes, lambda count: self._take_with_fds(count, taken))
        except BaseException:
            for fd in taken:
                os.close(fd)
            raise
        return message, taken[0] if taken else None

    async def _frame(self, decoder: msgspec.msgpack.Decoder[T], most_bytes: int, take: Callable[[int], bytes]) -> T:
        version, size = HEADER.unpack(await self._exactly(HEADER.size, take))
        if version != VERSION:
            raise PeerTrouble("the peer speaks another version")
        if size > most_bytes:
            raise PeerTrouble("the peer announced a frame that is too long")
        try:
            return decoder.decode(await self._exactly(size, take))
        except msgspec.MsgspecError:
            raise PeerTrouble("the peer sent what is no frame") from None

    async def _exactly(self, count: int, take: Callable[[int], bytes]) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = take(count - len(data))
            except BlockingIOError:
                await self._readable()
                continue
            if not part:
                raise PeerTrouble("the peer went away")
            data += part
        return bytes(data)

    def _take(self, count: int) -> bytes:
        return self._socket.recv(count)

    def _take_with_fds(self, count: int, taken: list[int]) -> bytes:
        """At most one descriptor in all: the system closes those for which there is no room."""
        data, fds, flags, _ = socket.recv_fds(self._socket, count, 1, socket.MSG_CMSG_CLOEXEC)
        taken.extend(fds)
        if flags & socket.MSG_CTRUNC or len(taken) > 1:
            raise PeerTrouble("the peer sent more descriptors than one")
        return data

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._socket.fileno(), _set, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._socket.fileno())

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._socket.fileno(), _set, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self._socket.fileno())


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


@contextlib.asynccontextmanager
async def _within(limit_s: float) -> AsyncIterator[None]:
    """Give up on the peer after limit_s; a connection that breaks is a peer that went away."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise PeerTrouble("the peer did not answer in time") from None
    except OSError:
        raise PeerTrouble("the peer went away") from None
