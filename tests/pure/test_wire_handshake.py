"""The handshake between nodes: both prove the secret, over every word that was said, once; whoever fails waits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.wire import handshake
from janus_server.wire.doorman import FREE_ATTEMPTS, MOST_KNOWN, Doorman
from janus_server.wire.frames import Challenge, Hello, Proof, Refusal, Role, Welcome
from janus_server.wire.handshake import Answerer, Caller, Identity, Met, Secret
from janus_server.wire.trouble import Trouble

A = Identity("c", "a", "a1", "ws://127.0.0.1:1")
B = Identity("c", "b", "b1", "ws://127.0.0.1:2")
SECRET = Secret("s" * 32)
N1, N2, N3 = bytes([1] * 32), bytes([2] * 32), bytes([3] * 32)


def caller(**other: object) -> Caller:
    words = {"me": A, "peer": B, "role": Role.CONTROL, "secret": SECRET, "nonce": N1, "certificate": b"", **other}
    return Caller(**words)  # type: ignore[arg-type]


def answerer(**other: object) -> Answerer:
    return Answerer(**{"me": B, "secret": SECRET, "nonce": N2, "certificate": b"", **other})  # type: ignore[arg-type]


def meet(one: Caller, two: Answerer) -> tuple[Met | Trouble, Met | Trouble | None]:
    """Let both talk until one of them has its end: what either thinks."""
    step = two.hear(one.hello)
    while not isinstance(step, Trouble):
        said = one.hear(step)
        if isinstance(said, Met | Trouble):
            return said, two.met
        step = two.hear(said)
    return one.hear(Refusal(step)), step


def test_two_nodes_that_share_a_secret_meet_and_know_each_other() -> None:
    assert meet(caller(), answerer()) == (Met(B, Role.CONTROL), Met(A, Role.CONTROL))
    unknown = caller(peer=msgspec.structs.replace(B, incarnation=""))
    assert meet(unknown, answerer()) == (Met(B, Role.CONTROL), Met(A, Role.CONTROL))


@pytest.mark.parametrize(
    ("one", "two", "trouble"),
    [
        ({"secret": Secret("t" * 32)}, {}, Trouble.SECRET),
        ({"me": msgspec.structs.replace(A, cluster="d")}, {}, Trouble.CLUSTER),
        ({"me": msgspec.structs.replace(A, node="b")}, {}, Trouble.NAME),
        ({"peer": msgspec.structs.replace(B, endpoint="ws://127.0.0.1:9")}, {}, Trouble.ADDRESS),
        ({"peer": msgspec.structs.replace(B, node="x")}, {}, Trouble.PEER),
        ({"peer": msgspec.structs.replace(B, incarnation="b0")}, {}, Trouble.PEER),
        ({"certificate": b"another"}, {"certificate": b"mine"}, Trouble.SECRET),
    ],
)
def test_who_does_not_fit_is_refused_by_a_sentence(
    one: dict[str, object], two: dict[str, object], trouble: Trouble
) -> None:
    mine, theirs = meet(caller(**one), answerer(**two))
    assert mine is trouble and not isinstance(theirs, Met)
    assert len(trouble.sentence) > 20


HELLOS = [
    ("cluster", "d"), ("node", "z"), ("incarnation", "z"), ("endpoint", "ws://127.0.0.1:7"), ("role", Role.STREAM),
    ("nonce", N3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), HELLOS)
def test_no_word_of_the_hello_can_be_changed_on_the_way(field: str, value: object) -> None:
    one, two = caller(), answerer(me=msgspec.structs.replace(B, cluster=value) if field == "cluster" else B)
    step = two.hear(msgspec.structs.replace(one.hello, **{field: value}))
    assert isinstance(step, Challenge)
    proof = one.hear(step)
    assert isinstance(proof, Proof)
    assert two.hear(proof) is Trouble.SECRET


def test_nor_the_address_that_was_dialled() -> None:
    """A go-between that is dialled in b's place is found by b, and by the proof if it writes b's address instead."""
    there = msgspec.structs.replace(B, endpoint="ws://127.0.0.1:6")
    one, two = caller(peer=there), answerer()
    assert two.hear(one.hello) is Trouble.ADDRESS
    two = answerer()
    step = two.hear(msgspec.structs.replace(one.hello, dialled=B.endpoint))
    assert isinstance(step, Challenge)
    proof = one.hear(step)
    assert isinstance(proof, Proof) and two.hear(proof) is Trouble.SECRET


@pytest.mark.parametrize(("field", "value"), [("incarnation", "b2"), ("nonce", N3)])
def test_no_word_of_the_challenge_can_be_changed_on_the_way(field: str, value: object) -> None:
    one, two = caller(peer=msgspec.structs.replace(B, incarnation="")), answerer()
    step = two.hear(one.hello)
    assert isinstance(step, Challenge)
    proof = one.hear(msgspec.structs.replace(step, **{field: value}))
    assert isinstance(proof, Proof) and two.hear(proof) is Trouble.SECRET


def test_the_version_is_in_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = caller(), answerer()
    step = two.hear(one.hello)
    assert isinstance(step, Challenge)
    proof = one.hear(step)
    monkeypatch.setattr(handshake, "VERSION", 2)
    assert isinstance(proof, Proof) and two.hear(proof) is Trouble.SECRET


def test_a_proof_is_good_for_one_connection() -> None:
    one, two = caller(), answerer()
    step = two.hear(one.hello)
    assert isinstance(step, Challenge)
    proof = one.hear(step)
    assert isinstance(proof, Proof) and isinstance(two.hear(proof), Welcome)
    again = answerer(nonce=N3)
    assert isinstance(again.hear(one.hello), Challenge)
    assert again.hear(proof) is Trouble.SECRET and again.met is None


def test_what_one_says_cannot_be_said_back_to_it() -> None:
    """Whoever knows no secret sends a node's own words back to it, or those of a second connection to it."""
    one, two = caller(), answerer()
    step = two.hear(one.hello)
    assert isinstance(step, Challenge)
    proof = one.hear(step)
    assert isinstance(proof, Proof)
    assert one.hear(Welcome(proof.mac)) is Trouble.SECRET
    assert caller().hear(Challenge("a", "a1", N2)) is Trouble.NAME
    assert caller().hear(Challenge("b", "b1", N1)) is Trouble.GARBAGE  # its own number
    # a is dialled in b's name by whoever wants a's proof as an answerer: labels keep the two apart.
    mirror = Answerer(A, SECRET, N2)
    assert isinstance(mirror.hear(Hello("c", "b", "b1", B.endpoint, A.endpoint, Role.CONTROL, N1)), Challenge)
    assert mirror.hear(proof) is Trouble.SECRET


def test_frames_out_of_turn_are_garbage() -> None:
    assert answerer().hear(Proof(N1)) is Trouble.GARBAGE
    assert answerer().hear(Welcome(N1)) is Trouble.GARBAGE
    assert caller().hear(Welcome(N1)) is Trouble.GARBAGE
    assert caller().hear(caller().hello) is Trouble.GARBAGE
    two = answerer()
    two.hear(caller().hello)
    assert two.hear(caller().hello) is Trouble.GARBAGE
    one = caller()
    assert isinstance(one.hear(Challenge("b", "b1", N2)), Proof)
    assert one.hear(Challenge("b", "b1", N3)) is Trouble.GARBAGE
    assert caller().hear(Refusal(Trouble.DELAYED)) is Trouble.DELAYED


def test_neither_the_secret_nor_its_key_is_shown() -> None:
    assert repr(SECRET) == "Secret()" and "s" * 32 not in str(vars(SECRET))


@given(st.text(min_size=1), st.text(min_size=1))
def test_no_two_secrets_prove_the_same(one: str, two: str) -> None:
    found = meet(caller(secret=Secret(one)), answerer(secret=Secret(two)))[0]
    assert isinstance(found, Met) == (one == two)


def test_who_fails_too_often_waits_longer_each_time_and_others_do_not() -> None:
    door, now = Doorman(), 100.0
    for _ in range(FREE_ATTEMPTS - 1):
        door.failed("1.2.3.4", "a", now)
        assert door.wait_s("1.2.3.4", "a", now) == 0.0
    waits = []
    for _ in range(10):
        door.failed("1.2.3.4", "a", now)
        waits.append(door.wait_s("1.2.3.4", "a", now))
    assert waits == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 15.0, 15.0, 15.0]
    assert door.wait_s("1.2.3.4", "a", now + 60.0) == 0.0
    assert door.wait_s("1.2.3.4", "b", now) == door.wait_s("4.3.2.1", "a", now) == 0.0
    door.proved("1.2.3.4", "a")
    assert door.wait_s("1.2.3.4", "a", now) == 0.0 and len(door) == 0


def test_names_without_end_take_no_memory_without_end() -> None:
    door = Doorman()
    for number in range(3 * MOST_KNOWN):
        door.failed("1.2.3.4", f"n{number}", 0.0)
    assert len(door) == MOST_KNOWN
