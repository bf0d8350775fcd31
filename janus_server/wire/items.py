"""Emits as items of a stream, and back. Pure; the hot path of an answer: a token is a handful of bytes.

What an Emit has beside its token is rare and packed apart. Log probabilities of a long prompt do not fit a message:
they are told in several items, as the device thread tells them over several steps anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from janus_server.types import Emit, Fault, FinishReason, Lent, TokenLogprob
from janus_server.wire.frames import Item

# Packed: one of the likeliest takes no more; a score without any takes three times that, and a plain item two times.
_SCORE_BYTES: Final = 16
ITEM_BYTES: Final = 32
# Of one item: a quarter of a message.
_SCORES_MOST_BYTES: Final = 48 << 10


class More(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """As in Emit."""

    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    fault: Fault | None = None
    lent: Lent | None = None


_MORE: Final = msgspec.msgpack.Decoder(More)
_NOTHING: Final = More()


def items_of(stream: int, position: int, emit: Emit) -> Iterator[Item]:
    """The items of an emit, from that position of the stream on."""
    for number, part in enumerate(_parts(emit)):
        more = More(part.logprob, part.finish, part.cached_tokens, part.queued_s, part.prompt_logprobs, part.embedding,
                    part.fault, part.lent)  # fmt: skip
        packed = None if more == _NOTHING else msgspec.msgpack.encode(more)
        yield Item(stream, position + number, part.index, part.token, packed)


def emit_of(request_id: str, item: Item) -> Emit | None:
    """The emit of an item; None where it is none."""
    if item.more is None:
        return Emit(request_id, item.index, item.token)
    try:
        more = _MORE.decode(item.more)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    return Emit(
        request_id, item.index, item.token, more.logprob, more.finish, more.cached_tokens, more.queued_s,
        more.prompt_logprobs, more.embedding, more.fault, more.lent,
    )  # fmt: skip


def size_bytes(item: Item) -> int:
    """What it takes in a message, at most."""
    return ITEM_BYTES + (0 if item.more is None else len(item.more))


def _parts(emit: Emit) -> Iterator[Emit]:
    """Itself, after as many emits with log probabilities of the prompt alone as it takes for each to be short."""
    scores, kept, taken_bytes = emit.prompt_logprobs, 0, 0
    if not scores:
        yield emit
        return
    for number, score in enumerate(scores):
        taken_bytes += _SCORE_BYTES * (3 + len(score.top))
        if taken_bytes >= _SCORES_MOST_BYTES:
            yield Emit(emit.request_id, emit.index, prompt_logprobs=scores[kept : number + 1])
            kept, taken_bytes = number + 1, 0
    yield msgspec.structs.replace(emit, prompt_logprobs=scores[kept:])
