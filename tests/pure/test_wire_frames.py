"""Frames of the links between nodes: what is written is read, and nothing that anybody could send raises."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server import orders
from janus_server.duty import Awaited
from janus_server.types import Emit, Fault, FinishReason, Grammar, GrammarKind, Promise, Request, Sampling, TokenLogprob
from janus_server.wire import frames, items, pieces
from janus_server.wire.frames import (
    CONTROL_ANSWERS,
    CONTROL_ASKS,
    CONTROL_MOST_BYTES,
    KNOCKS,
    STREAM_ANSWERS,
    STREAM_ASKS,
    STREAM_MOST_BYTES,
    WHOLE_MOST_BYTES,
    Ack,
    Beat,
    Give,
    Item,
    Known,
    Outcome,
    Piece,
    Run,
    Tell,
    Tokens,
    read,
    write,
)
from janus_server.wire.pieces import PIECE_BYTES, Assembly, cut
from janus_server.wire.trouble import Trouble

DECODERS = (KNOCKS, CONTROL_ASKS, CONTROL_ANSWERS, STREAM_ASKS, STREAM_ANSWERS)
REQUEST = Request(
    id="r-1", model="m", prompt=(1, 2, 3), max_tokens=9, n=2, sampling=Sampling(seed=5, logit_bias=((3, 1.5),)),
    stop=("\n",), grammar=Grammar(GrammarKind.REGEX, "a+"), promise=Promise(0.5, 0.05), application="chat", priority=2,
)  # fmt: skip
RUN = Run(
    stream=4, id="r-1", call="r-1", attempt=1, age_s=0.2, remaining_s=9.5, upto=512, request=REQUEST,
    known=(Known(0, (7, 8)),), ended=(1,),
)  # fmt: skip
# Real frames, from which garbage is made by changing them a little.
REAL = (
    frames.Hello("c", "a", "1", "ws://127.0.0.1:1", "ws://127.0.0.1:2", frames.Role.CONTROL, bytes(32)),
    frames.Refusal(Trouble.SECRET), Beat(3, 2), RUN, Tokens((Item(1, 2, 0, 5), Item(1, 3, 0, None, b"\x80"))),
    Tell(9, 2, (orders.Report("a", {"m": orders.Busy(1, 2, 0.0)}), orders.Traffic(started=("x",)))),
    Give(2, 1, 1.5, 7, orders.Order(2, 1, "a", "m", orders.Verb.FORK, "why", "b")), Ack(2, 1, Outcome.APPLIED),
    frames.Resume((frames.Place(1, 2, 3),)), frames.Broken(1, Trouble.SLOW),
    frames.Ask(1, 2, orders.Asked("m", orders.Wish.LOAD, None, "a")), frames.Ask(2, 0, frames.Look()),
    frames.Reply(1, orders.Answer("m", True, "why")), frames.Reply(2, frames.Sight(b"{}")), frames.Reply(3, None),
)  # fmt: skip


@pytest.mark.parametrize("frame", REAL, ids=lambda frame: type(frame).__name__)
def test_what_is_written_is_read_on_its_own_connection_and_on_no_other(frame: frames.Frame) -> None:
    found = [read(write(frame), decoder, CONTROL_MOST_BYTES) for decoder in DECODERS]
    assert frame in found
    assert all(one in (frame, Trouble.GARBAGE) for one in found)
    if not isinstance(frame, Beat):
        assert found.count(frame) == 1


@settings(max_examples=400)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_a_trouble(data: bytes) -> None:
    for message in (data, b"\x00\x01" + data):
        for decoder in DECODERS:
            found = read(message, decoder, CONTROL_MOST_BYTES)
            assert isinstance(found, frames.Frame | Trouble)


@settings(max_examples=600)
@given(st.sampled_from(REAL), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
       st.floats(0, 1))  # fmt: skip
def test_frames_that_were_spoilt_are_frames_or_troubles(
    frame: frames.Frame, changes: list[tuple[float, int]], cut_at: float
) -> None:
    data = bytearray(write(frame))
    for where, byte in changes:
        data[int(where * (len(data) - 1))] = byte
    for message in (bytes(data), bytes(data[: int(cut_at * len(data))])):
        for decoder in DECODERS:
            assert isinstance(read(message, decoder, CONTROL_MOST_BYTES), frames.Frame | Trouble)


@pytest.mark.parametrize(
    ("message", "trouble"),
    [
        (b"", Trouble.GARBAGE),
        (b"\x00", Trouble.GARBAGE),
        (b"\x00\x02" + msgspec.msgpack.encode(REAL[0]), Trouble.VERSION),
        (b"\x00\x01" + b"\x91" * 200_000, Trouble.GARBAGE),  # nested
        (b"\x00\x01\xdd\xff\xff\xff\xff", Trouble.GARBAGE),  # an array that claims four billion items
        (bytes(STREAM_MOST_BYTES + 1), Trouble.TOO_LONG),
        (write(RUN)[:-1], Trouble.GARBAGE),
        (write(RUN) + b"\x00", Trouble.GARBAGE),
    ],
    ids=["empty", "short", "version", "nested", "claims", "long", "cut", "trailing"],
)
def test_each_kind_of_nonsense_has_its_word(message: bytes, trouble: Trouble) -> None:
    assert read(message, STREAM_ASKS, STREAM_MOST_BYTES) is trouble


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e300])
def test_seconds_are_numbers_that_could_be(number: float) -> None:
    broken = msgspec.structs.replace(RUN, remaining_s=number)
    assert read(write(broken), STREAM_ASKS, STREAM_MOST_BYTES) is Trouble.GARBAGE


def test_every_event_that_a_leader_hears_travels_but_those_it_makes_itself() -> None:
    """A wish is asked, since who put it waits for the answer."""
    told, wished = set(frames.Told.__args__), set(orders.Wished.__args__)
    assert set(orders.Event.__args__) - told == {Awaited, orders.Left, orders.Tick, orders.Fitted, *wished}
    assert set(frames.Question.__args__) == {frames.Look, *wished}
    assert told <= set(orders.Event.__args__)
    given = set(frames.Given.__args__) - {frames.Table}
    assert set(orders.Action.__args__) - given == {orders.Refit, orders.Decided}


def test_troubles_have_a_sentence_each_and_travel_as_a_word() -> None:
    assert len({one.sentence for one in Trouble}) == len(Trouble)
    assert all(Trouble.named(one.value) is one for one in Trouble)
    assert Trouble.named("\x1b[31m") is None and Trouble.named(None) is None
    assert read(write(frames.Refusal(Trouble.TAKEN)), KNOCKS, 4096) == frames.Refusal(Trouble.TAKEN)


@given(st.integers(0, 5 * PIECE_BYTES + 3))
def test_long_messages_are_cut_and_put_together(size: int) -> None:
    message = bytes(i % 251 for i in range(size % 997)) * (size // 997 + 1)
    parts, assembly = list(cut(message)), Assembly()
    if len(message) <= PIECE_BYTES:
        assert parts == [message]
        return
    whole = []
    for part in parts:
        assert len(part) <= STREAM_MOST_BYTES
        piece = read(part, STREAM_ASKS, STREAM_MOST_BYTES)
        assert isinstance(piece, Piece)
        whole.append(assembly.add(piece))
    assert whole[-1] == message and set(whole[:-1]) <= {None}


def test_pieces_that_do_not_fit_together_or_are_too_many_are_refused() -> None:
    assert Assembly().add(Piece(b"x", WHOLE_MOST_BYTES)) is Trouble.TOO_LONG
    assert Assembly().add(Piece(b"", 10)) is Trouble.GARBAGE
    assembly = Assembly()
    assert assembly.add(Piece(b"xx", 4)) is None
    assert assembly.add(Piece(b"xx", 4)) is Trouble.GARBAGE
    assembly = Assembly()
    assert assembly.add(Piece(b"xx", 2)) is None
    assert assembly.add(Piece(b"xx", 0)) == b"xxxx"
    assert assembly.add(Piece(b"y", 0)) == b"y"  # the next one starts anew


SCORE = st.builds(
    TokenLogprob, st.integers(0, 1000), st.floats(-20, 0),
    st.lists(st.tuples(st.integers(0, 1000), st.floats(-20, 0)), max_size=5).map(tuple),
)  # fmt: skip
EMITS = st.builds(
    Emit, st.just("r"), st.integers(0, 3), st.none() | st.integers(0, 2**31 - 1), st.none() | SCORE,
    st.none() | st.sampled_from(FinishReason), st.integers(0, 100), st.none() | st.floats(0, 10),
    st.lists(SCORE, max_size=4).map(tuple), st.none() | st.just((0.5, -1.0)), st.none() | st.sampled_from(Fault),
)  # fmt: skip


@given(EMITS)
def test_emits_travel_as_items(emit: Emit) -> None:
    (item,) = items.items_of(3, 7, emit)
    assert (item.stream, item.position) == (3, 7)
    assert items.emit_of("r", item) == emit
    assert len(msgspec.msgpack.encode(item)) <= items.size_bytes(item)


def test_a_plain_token_is_a_handful_of_bytes() -> None:
    (item,) = items.items_of(100, 1000, Emit("r" * 36, 0, 100_000))
    assert len(msgspec.msgpack.encode(item)) <= 14


def test_the_scores_of_a_long_prompt_are_told_in_parts_that_fit() -> None:
    top = tuple((i, -1.0 * i) for i in range(20))
    scores = tuple(TokenLogprob(i, -0.5, top) for i in range(5000))
    emit = Emit("r", 0, 9, prompt_logprobs=scores, cached_tokens=3, queued_s=0.5)
    found = list(items.items_of(1, 10, emit))
    assert [item.position for item in found] == list(range(10, 10 + len(found)))
    assert all(len(write(Tokens((item,)))) <= PIECE_BYTES for item in found)
    back = [items.emit_of("r", item) for item in found]
    assert all(one is not None and one.token is None and one.finish is None for one in back[:-1])
    assert tuple(score for one in back if one is not None for score in one.prompt_logprobs) == scores
    assert back[-1] is not None and (back[-1].token, back[-1].cached_tokens, back[-1].queued_s) == (9, 3, 0.5)


@given(st.binary(max_size=60))
def test_what_an_item_packs_may_be_anything(data: bytes) -> None:
    found = items.emit_of("r", Item(1, 0, 0, 5, data))
    assert found is None or isinstance(found, Emit)


def test_this_room_imports_only_what_it_may() -> None:
    for module in (frames, items, pieces):
        text = inspect.getsource(module)
        assert "import asyncio" not in text and "import aiohttp" not in text
