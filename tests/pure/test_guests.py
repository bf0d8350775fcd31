"""Requests of other nodes: whatever goes wrong with one here, its front is told, and nothing of it stays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from janus_server.cluster.guests import Guests
from janus_server.executor import Cancel, Submit
from janus_server.orders import Helper
from janus_server.types import Emit, FinishReason, Grammar, GrammarKind, Request
from janus_server.wire.frames import Lend, Run
from janus_server.wire.trouble import Trouble


class Answer:
    """Where a guest's emits go."""

    def __init__(self, run: Run) -> None:
        self.run, self.peer = run, SimpleNamespace(node="n1")
        self.failed: list[Trouble] = []
        self.emits: list[Emit] = []
        self.over = False

    def put(self, emit: Emit) -> None:
        self.emits.append(emit)

    def end(self) -> None:
        self.over = True

    def fail(self, why: Trouble) -> None:
        self.failed.append(why)


class Node:
    """Where guests run; what is asked of it fails as the test says."""

    def __init__(self) -> None:
        self.open: set[Any] = set()
        self.hosted: set[Any] = set()
        self.failing: Exception | None = OSError("the disk is gone")
        self.posted: list[Submit | Cancel] = []
        flow = SimpleNamespace(open=True, admit=self.open.add, ended=self.open.discard)
        opened = SimpleNamespace(spec=SimpleNamespace(vocab=100), context_tokens=100)
        self.residents = {"m": SimpleNamespace(name="m", flow=flow, opened=opened)}

    def host(self, guest: Any) -> None:
        self.hosted.add(guest)

    def close(self, guest: Any) -> None:
        self.hosted.discard(guest)

    async def prepare(self, model: str) -> Any:
        await asyncio.sleep(0)
        raise self.failing or AssertionError

    def able(self, model: str) -> bool:
        return True

    async def lend(self, *_: Any) -> None:
        await asyncio.sleep(0)
        if self.failing is not None:
            raise self.failing

    def post(self, command: Submit | Cancel, helper: Helper | None) -> None:
        self.posted.append(command)

    def guests(self) -> Guests:
        one: Any = self
        return Guests(lambda: one, one, lambda: False, self.post, lambda: one)


def run_of(grammar: Grammar | None = None, lend: Lend | None = None) -> Any:
    request = Request(id="r", model="m", prompt=(1, 2, 3), max_tokens=0 if lend else 4, grammar=grammar)
    return Answer(Run(stream=1, id="r", call="r", upto=8, request=request, lend=lend))


async def settled(guests: Guests) -> None:
    while guests._tasks:
        await asyncio.sleep(0)


async def test_a_grammar_that_cannot_be_prepared_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    guests, answer = node.guests(), run_of(Grammar(GrammarKind.JSON_OBJECT))
    assert guests.run(answer) is None and len(guests) == 1 and node.hosted and node.open
    await settled(guests)
    assert answer.failed == [Trouble.FAILED] and not answer.over
    assert (len(guests), node.hosted, node.open, node.posted) == (0, set(), set(), [])
    assert "came to nothing here" in caplog.text
    await guests.close()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_prompt_that_cannot_be_lent_ends_the_request(fails: bool) -> None:
    node = Node()
    if not fails:
        node.failing = None
    guests, answer = node.guests(), run_of(lend=Lend(0, "i"))
    assert guests.run(answer) is None
    (guest,) = node.hosted
    guest.put(None, Emit("r", 0, finish=FinishReason.LENGTH))
    await settled(guests)
    assert answer.failed == ([Trouble.FAILED] if fails else []) and answer.over != fails
    assert (len(guests), node.hosted, node.open) == (0, set(), set())


async def test_who_has_left_meanwhile_is_told_nothing() -> None:
    node = Node()
    guests, answer = node.guests(), run_of(Grammar(GrammarKind.JSON_OBJECT))
    guests.run(answer)
    guests.cancel(answer, None)
    await settled(guests)
    assert answer.failed == [] and (len(guests), node.open) == (0, set())
