"""The bench client's HTTP and event-stream parsers: whatever way the bytes are cut, the same is read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.wire import MAX_EVENT_BYTES, MAX_HEAD_BYTES, Event, ResponseParser, SseParser, WireFault

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({p % (len(data) + 1) for p in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(pieces: list[bytes], *, closed: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join(part for piece in pieces for part in parser.feed(piece))
    if closed:
        parser.eof()
    return parser, body


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    sized = b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts if p)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + sized + b"0\r\n" + trailer + b"\r\n"


@given(
    parts=st.lists(st.binary(max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";a=b", b" ; c"]),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    places=st.lists(st.integers(0, 1000), max_size=12),
)
def test_a_chunked_body_is_the_same_however_it_is_cut(
    parts: list[bytes], extension: bytes, trailer: bytes, places: list[int]
) -> None:
    parser, body = read(cut(chunked(parts, extension, trailer), places))
    assert body == b"".join(parts)
    assert parser.complete
    assert parser.keep_alive
    assert parser.rest == b""
    assert (parser.status, parser.headers["content-type"]) == (200, "text/event-stream")


@given(body=st.binary(max_size=200), places=st.lists(st.integers(0, 1000), max_size=8))
def test_a_body_with_a_length_ends_there_and_what_follows_is_kept_apart(body: bytes, places: list[int]) -> None:
    data = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    parser, found = read(cut(data, places))
    assert (found, parser.complete, parser.status) == (body, True, 503)
    parser, found = read([data + b"HTTP/1.1 200 OK"])
    assert (found, parser.rest) == (body, b"HTTP/1.1 200 OK")


def test_a_body_without_a_length_lasts_until_the_server_closes() -> None:
    parser, body = read([b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"], closed=True)
    assert (body, parser.complete, parser.keep_alive) == (b"abcdef", True, False)


def test_an_interim_response_is_not_the_response() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    for size in (1, 7, len(data)):
        parser, body = read([data[i : i + size] for i in range(0, len(data), size)])
        assert (parser.status, body) == (200, b"ok")


def test_whether_a_connection_can_be_used_again() -> None:
    for version, header, expected in [
        ("1.1", "", True),
        ("1.1", "Connection: close\r\n", False),
        ("1.1", "Connection: Upgrade, Close\r\n", False),
        ("1.0", "", False),
        ("1.0", "Connection: keep-alive\r\n", True),
    ]:
        data = f"HTTP/{version} 200 OK\r\n{header}Content-Length: 0\r\n\r\n"
        assert read([data.encode()])[0].keep_alive is expected


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcde\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * MAX_HEAD_BYTES,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(WireFault) as caught:
        read([data])
    assert caught.value.reason == "bad_http"


@pytest.mark.parametrize("length", [0, 20, 60, -1, -3, -6])
def test_a_response_that_is_cut_is_no_response(length: int) -> None:
    with pytest.raises(WireFault) as caught:
        read([chunked([b"hello", b"world"])[:length]], closed=True)
    assert caught.value.reason == "closed"


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_nothing_but_a_wire_fault_comes_of_any_bytes(pieces: list[bytes]) -> None:
    for start in (b"", HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        try:
            _, body = read([start, *pieces], closed=True)
            SseParser().feed(body)
        except WireFault:
            pass


# Events: what is written with any line ending, comments, several data lines and other fields is read back.

TEXT = st.text(st.characters(blacklist_characters="\r\n\0", blacklist_categories=("Cs",)), max_size=12)
EVENTS = st.lists(st.tuples(st.lists(TEXT, min_size=1, max_size=3), st.sampled_from(["", "error", "x y"])), max_size=5)


@given(
    events=EVENTS,
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    noise=st.sampled_from(["", ": ping", ":", "id: 7", "retry: 10", "unknown"]),
    space=st.sampled_from([" ", ""]),
    bom=st.booleans(),
    places=st.lists(st.integers(0, 2000), max_size=20),
)
def test_events_are_the_same_however_they_are_written_and_cut(
    events: list[tuple[list[str], str]], newline: str, noise: str, space: str, bom: bool, places: list[int]
) -> None:
    written = ["\ufeff" if bom else ""]
    for lines, name in events:
        fields = [f"event:{space}{name}"] if name else []
        fields += [f"data:{space}{line}" for line in lines]
        written += [part + newline for part in ([noise] if noise else []) + fields] + [newline]
    parser = SseParser()
    found = [e for piece in cut("".join(written).encode(), places) for e in parser.feed(piece)]
    # One space after the colon belongs to the field; without it, a value's own first space is taken for it.
    expected = [[line if space else line.removeprefix(" ") for line in lines] for lines, _ in events]
    assert [e.data.decode() for e in found] == ["\n".join(lines) for lines in expected]
    assert [e.name for e in found] == [name for _, name in events]
    assert not parser.pending


def test_comments_and_empty_events_bring_nothing() -> None:
    parser = SseParser()
    assert parser.feed(b": keep-alive\n\n\n\nevent: x\n\n") == []
    assert parser.comments == 1
    assert parser.feed(b"data\n\ndata:\n\n") == [Event("", b""), Event("", b"")]


def test_an_event_that_no_blank_line_ended_is_pending() -> None:
    parser = SseParser()
    assert parser.feed(b"data: {}\n") == []
    assert parser.pending
    assert parser.feed(b"\n") == [Event("", b"{}")]
    assert not parser.pending


def test_the_short_cut_for_single_events_never_skips_what_was_begun() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"data: b\n\n") == [Event("", b"a\nb")]
    assert parser.feed(b"event: error\n") == []
    assert parser.feed(b"data: c\n\n") == [Event("error", b"c")]
    assert parser.feed(b"da") == []
    assert parser.feed(b"ta: d\n\n") == [Event("", b"d")]
    # A \r\n cut in two, then a piece that looks whole.
    assert parser.feed(b"data: e\r") == []
    assert parser.feed(b"\n\r\n") == [Event("", b"e")]


def test_an_endless_event_is_refused() -> None:
    for piece in (b"data: " + b"x" * (1 << 20), b"data: " + b"y" * (1 << 20) + b"\n"):
        parser = SseParser()
        with pytest.raises(WireFault, match="larger"):
            for _ in range((MAX_EVENT_BYTES >> 20) + 1):
                parser.feed(piece)
