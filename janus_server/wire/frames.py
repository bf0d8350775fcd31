"""What the nodes of a cluster say to each other: versioned msgpack records, bounded in size. Pure.

A message is two bytes of version and one record. Each side of each connection has a decoder of its own that knows
only what may come there: a frame in the wrong place is as much garbage as random bytes, and `read` answers both with a
`Trouble`, never with an exception. What is longer than a piece is cut (`pieces`).

`a` dials `b` and asks: on the control connection it tells events (Tell) and gives orders (Give), on the stream
connection it has requests run (Run). Whatever comes back from `b` answers that.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, Final, TypeVar

import msgspec

from janus_server.duty import Charge
from janus_server.orders import (
    Answer,
    Counted,
    Dispatch,
    Done,
    Failed,
    Helper,
    Joined,
    Lost,
    Observed,
    Offered,
    Order,
    Refuse,
    Report,
    Traffic,
    Unwanted,
    Wanted,
    Wished,
)
from janus_server.sched.prefixes import Cached
from janus_server.types import Request
from janus_server.wire.trouble import Trouble

VERSION: Final = 1

# Before the handshake: names and digests.
KNOCK_MOST_BYTES: Final = 4 << 10
# A node's catalogue of a few thousand models (200 bytes each) in one message, tickets of 10,000 requests.
CONTROL_MOST_BYTES: Final = 1 << 20
# On a network of 1 Gbit/s nobody's token waits for more than 2 ms behind it.
STREAM_MOST_BYTES: Final = 256 << 10
# What travels in pieces, together: a body of 4 MiB (api/bodies) as tokens, at most 5 bytes each.
WHOLE_MOST_BYTES: Final = 32 << 20
# What a node knows of itself: some thousand models of 500 bytes each.
SIGHT_MOST_BYTES: Final = 4 << 20
# Requests that one process may have open with one other: a thousand times what a device runs at once.
MOST_STREAMS: Final = 1 << 16

_HEADER: Final = struct.Struct(">H")

T = TypeVar("T")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Role(enum.Enum):
    """What a connection is for."""

    CONTROL = "control"
    STREAM = "stream"

    @property
    def most_bytes(self) -> int:
        """Of one message."""
        return CONTROL_MOST_BYTES if self is Role.CONTROL else STREAM_MOST_BYTES


class Frame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What all of them have in common."""


# The handshake


class Hello(Frame, frozen=True):
    """Who dials, which address it dialled, and where it listens itself."""

    cluster: Name
    node: Name
    incarnation: Name
    endpoint: Text
    dialled: Text
    role: Role
    nonce: Nonce


class Challenge(Frame, frozen=True):
    """Who answers."""

    node: Name
    incarnation: Name
    nonce: Nonce


class Proof(Frame, frozen=True):
    """Of knowing the secret, by who dialled."""

    mac: Nonce


class Welcome(Frame, frozen=True):
    """The same by who answers: the link is open."""

    mac: Nonce


class Refusal(Frame, frozen=True):
    """There will be no link, and why."""

    why: Trouble


# On both connections, in both directions


class Beat(Frame, frozen=True):
    """A sign of life: its number, and the number of the last one that came from the other end."""

    number: Number
    seen: Number


class Piece(Frame, frozen=True):
    """A part of a message that is too long for one; left is how many bytes of it are still to come."""

    data: Annotated[bytes, msgspec.Meta(max_length=STREAM_MOST_BYTES)]
    left: Annotated[int, msgspec.Meta(ge=0, le=WHOLE_MOST_BYTES)]


# Control


Told = (
    Joined | Offered | Wanted | Unwanted | Traffic | Report | Done | Failed | Lost | Observed | Counted | Cached
)  # fmt: skip
"""Events that a leader has to hear from nodes. The others it makes itself, or hears from the coordinator."""


class Table(msgspec.Struct, frozen=True, tag=True):
    """Where each model is served, the best node first: what nodes route by while no leader answers.

    nodes are those that the leader has been told of: whoever misses itself presents itself again. charges are what
    operators have nodes do, as far as they were ever told. Models that rest are served nowhere, and nobody is about to
    bring them up.
    """

    number: Number
    routes: dict[str, tuple[str, ...]]
    nodes: tuple[str, ...] = ()
    charges: dict[str, Charge] = {}
    resting: tuple[str, ...] = ()


Given = Order | Dispatch | Refuse | Answer | Table
"""Actions that a leader has nodes carry out."""


class Tell(Frame, frozen=True):
    """Events for the leader of that term, numbered over all that this process tells that one."""

    number: Number
    term: Number
    events: tuple[Told, ...]


class Heard(Frame, frozen=True):
    """All that was told before `number` has arrived."""

    number: Number


class Give(Frame, frozen=True):
    """An action of a leader: id is unique in its term.

    It may be carried out for valid_s, counted from when the receiver had sent the beat of number `beat`: the last that
    the leader had from it. However long the frame was on its way, it does not live longer than the leader meant.
    """

    term: Number
    id: Number
    valid_s: Seconds
    beat: Number
    action: Given


class Outcome(enum.Enum):
    """What became of an action. EARLY: the node has not heard of that term yet; it is given again."""

    APPLIED = "applied"
    ALREADY = "already"
    STALE = "stale"
    REFUSED = "refused"
    EARLY = "early"
    EXPIRED = "expired"


class Ack(Frame, frozen=True):
    term: Number
    id: Number
    outcome: Outcome


class Look(msgspec.Struct, frozen=True, tag=True):
    """What the other node knows of itself; with past, of its last minutes too."""

    past: bool = False


class Sight(msgspec.Struct, frozen=True, tag=True):
    """What a node knows of itself: JSON, read by who asked for it."""

    view: Annotated[bytes, msgspec.Meta(max_length=SIGHT_MOST_BYTES)]


Question = Look | Wished
Replied = Sight | Answer


class Ask(Frame, frozen=True):
    """To be answered at once. The term is that of the leader whom a wish is for; of a `Look` it says nothing."""

    number: Number
    term: Number
    question: Question


class Reply(Frame, frozen=True):
    """A sight to a look, an answer to a wish; None where the other does not lead in that term, or knows nothing yet."""

    number: Number
    answer: Replied | None


# Streams


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What a choice has said already. The index of its next token, by which that is drawn, is how many those are."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    tokens: tuple[Token, ...]

    @property
    def position(self) -> int:
        return len(self.tokens)


class Lend(msgspec.Struct, frozen=True, array_like=True):
    """The pages of a prompt from number `first` on, to the process that comes for them under that incarnation."""

    first: Number
    incarnation: Name


class Run(Frame, frozen=True, kw_only=True):
    """Run a request, and tell of it on that stream.

    id is the request's idempotent one: under it, it is run once on a node and attempt, however often it is sent.
    attempt counts the nodes that it was given to before. age_s is since it came to the cluster, remaining_s until
    nobody wants it any more (None: as long as it takes). call names the API call that it is a part of, which has one
    ticket. known has the choices that had begun elsewhere; ended are those that are over. The first `upto` items may be
    sent at once. helper may compute its prompt for the one that runs it. A prompt that is run for such a one says with
    lend which of its pages are to be lent to it.
    """

    stream: Number
    id: Text
    call: Text
    attempt: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    age_s: Seconds = 0.0
    remaining_s: Seconds | None = None
    upto: Number
    request: Request
    known: tuple[Known, ...] = ()
    ended: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)], ...] = ()
    helper: Helper | None = None
    lend: Lend | None = None


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Of a stream, items before `have` have arrived, those before `upto` may be sent."""

    stream: Number
    have: Number
    upto: Number


Places = Annotated[tuple[Place, ...], msgspec.Meta(max_length=MOST_STREAMS)]


class Credit(Frame, frozen=True):
    places: Places


class Resume(Frame, frozen=True):
    """The first frame of a stream connection: every stream that the dialling process has open with this one.

    What is not named is over. The others go on where it says, whatever the connection before had on its way.
    """

    places: Places


class Cancel(Frame, frozen=True):
    """One choice is not wanted any more, or with None the stream is not: then it is forgotten, ended or not."""

    stream: Number
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None


class Taken(Frame, frozen=True):
    """The request runs."""

    stream: Number


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One Emit, at that position of its stream; `more` is what it has beside a token (`items`)."""

    stream: Number
    position: Number
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    token: Token | None
    more: bytes | None = None


class Tokens(Frame, frozen=True):
    """What a step brought, of many streams."""

    items: tuple[Item, ...]


class Ended(Frame, frozen=True):
    """The stream has had `count` items, and there will be no more."""

    stream: Number
    count: Number


class Broken(Frame, frozen=True):
    """The stream has ended before its request did."""

    stream: Number
    why: Trouble


Knock = Hello | Challenge | Proof | Welcome | Refusal
ControlAsk = Beat | Piece | Tell | Give | Ask
ControlAnswer = Beat | Piece | Heard | Ack | Reply
StreamAsk = Beat | Piece | Resume | Run | Credit | Cancel
StreamAnswer = Beat | Piece | Taken | Tokens | Ended | Broken

KNOCKS: Final = msgspec.msgpack.Decoder(Knock)
CONTROL_ASKS: Final = msgspec.msgpack.Decoder(ControlAsk)
CONTROL_ANSWERS: Final = msgspec.msgpack.Decoder(ControlAnswer)
STREAM_ASKS: Final = msgspec.msgpack.Decoder(StreamAsk)
STREAM_ANSWERS: Final = msgspec.msgpack.Decoder(StreamAnswer)


def write(frame: Frame) -> bytes:
    """A frame as a message."""
    return _HEADER.pack(VERSION) + msgspec.msgpack.encode(frame)


def read(message: bytes, decoder: msgspec.msgpack.Decoder[T], most_bytes: int) -> T | Trouble:
    """The frame of a message. Any bytes may come: none of them raises."""
    if len(message) > most_bytes:
        return Trouble.TOO_LONG
    if len(message) < _HEADER.size:
        return Trouble.GARBAGE
    if _HEADER.unpack_from(message)[0] != VERSION:
        return Trouble.VERSION
    try:
        return decoder.decode(memoryview(message)[_HEADER.size :])
    # Nesting without end is a RecursionError, a number beyond all bounds an OverflowError.
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return Trouble.GARBAGE
