"""Credits of streams: whatever is sent, read, broken and resumed, every item comes once, and never one too many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.types import Emit, FinishReason
from janus_server.wire import credits
from janus_server.wire.credits import AHEAD_ITEMS, FRAME_BYTES, Inflow, Outflow
from janus_server.wire.frames import Broken, Ended, Frame, Place, Tokens, write
from janus_server.wire.trouble import Trouble


def emit(token: int) -> Emit:
    return Emit("r", 0, token)


class World:
    """A sender, its readers, and a connection between them that carries frames late and can break."""

    def __init__(self, streams: int, window: int) -> None:
        self.out = Outflow()
        self.ins = {stream: Inflow(window) for stream in range(streams)}
        self.put = dict.fromkeys(range(streams), 0)
        self.got: dict[int, list[int]] = {stream: [] for stream in range(streams)}
        self.used = dict.fromkeys(range(streams), 0)
        self.window = window
        self.on_way: list[Frame] = []
        self.back: list[Place] = []
        self.ended: dict[int, int] = {}
        self.broken: set[int] = set()
        for stream in range(streams):
            self.out.open(stream, window)

    def produce(self, stream: int) -> None:
        self.out.put(stream, emit(self.put[stream]))
        self.put[stream] += 1

    def send(self) -> None:
        self.on_way += self.out.take()

    def arrive(self) -> None:
        frames, self.on_way = self.on_way[:1], self.on_way[1:]
        for frame in frames:
            if isinstance(frame, Tokens):
                for item in frame.items:
                    new = self.ins[item.stream].take(item.position)
                    assert not isinstance(new, Trouble), new
                    if new:
                        assert item.token is not None
                        self.got[item.stream].append(item.token)
            elif isinstance(frame, Ended):
                assert self.ins[frame.stream].have == frame.count
                self.ended[frame.stream] = frame.count

    def use(self, stream: int, count: int) -> None:
        flow = self.ins[stream]
        count = min(count, len(self.got[stream]) - self.used[stream])
        self.used[stream] += count
        if flow.use(count):
            self.back.append(flow.place(stream))

    def grant(self) -> None:
        if self.back:
            assert self.out.credit(self.back.pop(0)) is None

    def break_and_resume(self) -> None:
        self.on_way, self.back = [], []
        lacking = self.out.resume(flow.place(stream) for stream, flow in self.ins.items())
        assert lacking == ([], [])

    def check(self) -> None:
        for stream, got in self.got.items():
            assert got == list(range(len(got)))  # in order, none twice, none left out
            assert len(got) - self.used[stream] <= self.window  # what a reader has to hold


STEPS = st.lists(
    st.tuples(st.sampled_from(["produce", "send", "arrive", "use", "grant", "break"]), st.integers(0, 2),
              st.integers(1, 9)), max_size=150,
)  # fmt: skip


@settings(max_examples=150)
@given(STEPS, st.integers(1, 12))
def test_every_item_comes_once_and_never_more_than_were_allowed(steps: list[tuple[str, int, int]], window: int) -> None:
    world = World(3, window)
    for verb, stream, count in steps:
        match verb:
            case "produce":
                for _ in range(count):
                    world.produce(stream)
            case "send":
                world.send()
            case "arrive":
                world.arrive()
            case "use":
                world.use(stream, count)
            case "grant":
                world.grant()
            case "break":
                world.break_and_resume()
        world.check()
    for stream in range(3):
        world.out.end(stream)
    for _ in range(5000):  # from here on nothing breaks: all of it comes
        if len(world.ended) == 3:
            break
        world.send()
        world.arrive()
        for stream in range(3):
            world.use(stream, 100)
        world.grant()
        world.check()
    assert {stream: len(got) for stream, got in world.got.items()} == world.put == world.ended


def test_a_stream_without_credit_blocks_no_other() -> None:
    world = World(2, 4)
    for _ in range(20):
        world.produce(0)
        world.produce(1)
    for _ in range(30):
        world.send()
        world.arrive()
        world.use(1, 10)
        world.grant()
    assert world.got[0] == [0, 1, 2, 3] and world.got[1] == list(range(20))


def test_streams_take_turns() -> None:
    out = Outflow()
    for stream in range(3):
        out.open(stream, 100_000)
    for token in range(1000):
        out.put(0, emit(token))
    out.put(1, emit(1))
    out.put(2, emit(2))
    (frame,) = out.take()[:1]
    assert isinstance(frame, Tokens)
    first = [item.stream for item in frame.items]
    assert first.index(1) <= credits._TURN_ITEMS and first.index(2) <= credits._TURN_ITEMS + 1
    assert len(write(frame)) <= FRAME_BYTES


def test_a_stream_that_is_too_far_ahead_of_its_reader_ends_and_the_others_do_not() -> None:
    out = Outflow()
    out.open(1, 8)
    out.open(2, 8)
    kept = sum(out.put(1, emit(token)) for token in range(AHEAD_ITEMS + 8))
    assert kept == AHEAD_ITEMS + 8
    out.take()
    assert not out.put(1, emit(0))
    assert out.put(1, emit(0))  # said once
    out.put(2, emit(5))
    found = out.take()
    assert found == [Tokens(found[0].items), Broken(1, Trouble.SLOW)] and isinstance(found[0], Tokens)
    assert [item.stream for item in found[0].items] == [2]
    assert out.take() == []


def test_a_stream_of_large_items_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credits, "STREAM_MOST_BYTES", 100_000)
    out = Outflow()
    out.open(1, 1000)
    large = Emit("r", 0, 1, embedding=(0.5,) * 2000)
    assert [out.put(1, large) for _ in range(6)] == [True] * 5 + [False]


def test_an_end_is_told_after_all_items_and_again_on_a_new_connection() -> None:
    out, flow = Outflow(), Inflow(2)
    out.open(1, 2)
    for token in range(3):
        out.put(1, emit(token))
    out.put(1, Emit("r", 0, 3, finish=FinishReason.STOP))
    out.end(1)
    out.put(1, emit(99))  # after the end: nobody's
    first = out.take()
    assert len(first) == 1 and out.take() == []
    assert out.credit(Place(1, 2, 4)) is None
    second = out.take()
    assert [type(frame) for frame in second] == [Tokens, Ended] and second[1] == Ended(1, 4)
    assert out.resume([Place(1, 3, 5)]) == ([], [])
    third = out.take()
    assert isinstance(third[0], Tokens) and [item.position for item in third[0].items] == [3]
    assert third[1] == Ended(1, 4)
    out.forget(1)
    assert len(out) == 0 and out.take() == []
    assert flow.upto == 2


def test_resume_says_what_is_not_here_and_forgets_what_is_not_named() -> None:
    out = Outflow()
    for stream in (1, 2, 3):
        out.open(stream, 8)
    assert out.resume([Place(2, 0, 8), Place(9, 5, 8)]) == ([9], [1, 3])
    assert 2 in out and len(out) == 1


@pytest.mark.parametrize("place", [Place(1, 5, 9), Place(1, 100, 200)])
def test_a_reader_that_has_what_was_never_sent_breaks_the_order(place: Place) -> None:
    out = Outflow()
    out.open(1, 2)
    for token in range(4):
        out.put(1, emit(token))
    out.take()
    assert out.credit(place) is Trouble.ORDER
    assert out.resume([place]) is Trouble.ORDER


def test_credit_does_not_shrink_and_old_news_do_no_harm() -> None:
    out = Outflow()
    out.open(1, 4)
    for token in range(10):
        out.put(1, emit(token))
    out.take()
    assert out.credit(Place(1, 3, 8)) is None
    assert out.credit(Place(1, 1, 4)) is None
    frame = out.take()[0]
    assert isinstance(frame, Tokens) and [item.position for item in frame.items] == [4, 5, 6, 7]
    assert out.credit(Place(77, 1, 4)) is None


def test_a_reader_refuses_what_skips_and_what_it_did_not_allow() -> None:
    flow = Inflow(2)
    assert flow.take(1) is Trouble.ORDER
    assert flow.take(0) is True and flow.take(0) is False
    assert flow.take(1) is True
    assert flow.take(2) is Trouble.CREDIT
    assert flow.use(1) and flow.upto == 3
    assert flow.take(2) is True
