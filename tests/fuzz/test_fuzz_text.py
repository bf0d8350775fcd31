"""Random byte tokens and stop strings through a real `Call`, against a search in the whole text.

What is fuzzed is all that stands between an emitted token and a text delta: UTF-8 held back, stop strings that overlap
and cross tokens, min_tokens, hidden special tokens, the space that a sentencepiece text loses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from harness import fuzz

from janus_server.executor import Cancel, StepReport
from janus_server.flow import AtOnce, Flow
from janus_server.instance import ServedModel
from janus_server.streams import Streams
from janus_server.types import Delta, Emit, FinishReason, Request

# Alphabets as small as can be: stop strings must overlap themselves and each other all the time.
CHARACTERS = ("ab", "aé", "a€b", "😀€", "a \n", " €a", "\ufffd€a", "é\u0301a", "\u2028\r\n", "\x00a")
# What can follow a text's bytes, so that whatever is still open in them is decided in different ways.
FUTURES = (b"a", b"\x80\x80\x80a", b"\xa0\x80\x80a", b"\x90\x80\x80a", b"\x8f\x80\x80a")


@dataclasses.dataclass(frozen=True)
class Case:
    """One choice: a vocabulary of bytes, the tokens emitted, and what the client asked for.

    finish_apart: the end comes without a token. ends: the last token is one that ends a text.
    """

    vocabulary: tuple[bytes, ...]
    special: frozenset[int]
    strips: bool
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason
    finish_apart: bool
    ends: bool
    stops: tuple[str, ...]
    include: bool
    min_tokens: int
    skip_special: bool
    shown: tuple[int, ...]
    per_step: int


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a `Detokenizer` asks of a tokenizer."""

    entries: Sequence[bytes]
    special: frozenset[int]
    strips_first_space: bool

    def token_bytes(self, token: int) -> bytes:
        return self.entries[token] if 0 <= token < len(self.entries) else b""

    def is_special(self, token: int) -> bool:
        return token in self.special


class Device:
    """Only remembers what it was ordered to do."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, command: Any) -> None:
        self.posted.append(command)


def make(rng: random.Random) -> Case:
    alphabet = rng.choice(CHARACTERS)
    vocabulary = [_entry(rng, alphabet) for _ in range(rng.randrange(2, 12))]
    count = rng.choice((0, 1, 2, 5, 12, 30))
    # Half of the tokens spell a text of the alphabet cut at random bytes, so that characters do get completed.
    raw = "".join(rng.choice(alphabet) for _ in range(count)).encode()
    spelled = []
    while raw:
        size = rng.randrange(1, 5)
        spelled.append(len(vocabulary))
        vocabulary.append(raw[:size])
        raw = raw[size:]
    tokens = spelled if rng.random() < 0.5 else [rng.randrange(len(vocabulary) + 1) for _ in range(count)]
    stops = []
    for _ in range(rng.choice((0, 1, 1, 2, 4, 8))):
        stop = "".join(rng.choice(alphabet) for _ in range(rng.choice((1, 1, 2, 3, 6))))
        stops.append(stop if rng.random() < 0.8 or not stops else stops[0][1:] + stop)
    return Case(
        vocabulary=tuple(vocabulary),
        special=frozenset(i for i in range(len(vocabulary)) if rng.random() < 0.1),
        strips=rng.random() < 0.2,
        prompt=tuple(rng.randrange(len(vocabulary)) for _ in range(rng.randrange(3))),
        tokens=tuple(tokens),
        finish=rng.choice((FinishReason.LENGTH, FinishReason.STOP)),
        finish_apart=rng.random() < 0.2 or not tokens,
        ends=rng.random() < 0.7,
        stops=tuple(stops),
        include=rng.random() < 0.4,
        min_tokens=rng.choice((0, 0, 0, 1, 2, 5, 40)),
        skip_special=rng.random() < 0.5,
        shown=tuple(i for i in range(len(vocabulary)) if rng.random() < 0.05),
        per_step=rng.choice((1, 1, 2, 100)),
    )


def check(case: Case) -> None:
    deltas, posted = asyncio.run(run(case))
    expected, stop_at, stop = brute(case)
    shown, visible, tokens = "", 0, 0
    for delta in deltas:
        shown += delta.text
        tokens += len(delta.tokens)
        assert expected.startswith(shown), "what was sent had to change"
        # A text is sent as soon as it is decided: no less may be out than what no stop string could still cut.
        visible = min(len(expected), decided(case, tokens))
        assert delta.finish is not None or len(shown) >= visible, "a text was held back without need"
    assert shown == expected
    assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].stop == stop
    cancels = [command for command in posted if isinstance(command, Cancel)]
    if stop_at is None:
        assert deltas[-1].finish is case.finish
        assert tokens == len(case.tokens)
        assert not cancels
    else:
        assert deltas[-1].finish is FinishReason.STOP
        assert tokens == stop_at
        # The device thread is told to end what it has not ended itself.
        assert len(cancels) == (0 if stop_at == len(case.tokens) and not case.finish_apart else 1)


async def run(case: Case) -> tuple[list[Delta], list[Any]]:
    """The deltas that a client of this choice gets, and what was posted to the device thread."""
    device, streams = Device(), Streams()
    tokenizer: Any = Vocabulary(case.vocabulary, case.special, case.strips)
    card: Any = type("Card", (), {"id": "m"})
    nothing: Any = None
    flow = Flow("m", device, AtOnce())  # type: ignore[arg-type]
    flow.serve()
    model = ServedModel(card, nothing, tokenizer, flow, streams)
    request = Request(
        id="r", model="m", prompt=case.prompt, max_tokens=100, stop=case.stops, include_stop=case.include,
        min_tokens=case.min_tokens, skip_special_tokens=case.skip_special, shown_ids=case.shown,
        stop_ids=case.tokens[-1:] if case.ends else (),
    )  # fmt: skip
    emits = [Emit("r", 0, token) for token in case.tokens]
    if case.finish_apart:
        emits.append(Emit("r", 0, finish=FinishReason.LENGTH if case.finish is FinishReason.LENGTH else case.finish))
    else:
        emits[-1] = Emit("r", 0, case.tokens[-1], finish=case.finish)
    deltas: list[Delta] = []
    async with model.submit([request]) as call:
        for start in range(0, len(emits), case.per_step):
            streams.deliver(StepReport("m", emits[start : start + case.per_step], {}, 0))
            if (news := await call.take(1.0)) is None:
                break
            deltas += [item.delta for item in news]
        assert await call.take(1.0) is None, "the end was not seen"
    assert len(streams) == 0
    return deltas, device.posted


def brute(case: Case) -> tuple[str, int | None, str | None]:
    """The text that the client must get, and after how many tokens which stop string ended it (None: none did)."""
    visible = shown_tokens(case)
    free = stable(case, visible[: case.min_tokens])
    whole = finished(case, visible)
    if len(visible) <= case.min_tokens and not (len(case.tokens) == case.min_tokens and case.finish_apart):
        # The last token, or the end alone, came while stop strings did not count yet.
        return whole, None, None
    rest = whole[len(free) :]
    found = first_stop(rest, case.stops)
    if found is None:
        return whole, None, None
    end, stop = found
    text = free + rest[: end if case.include else end - len(stop)]
    for count in range(case.min_tokens + 1, len(case.tokens) + 1):
        last = count == len(case.tokens) and not case.finish_apart
        upto = finished(case, visible) if last else stable(case, visible[:count])
        if len(upto) >= len(free) + end:
            return text, count, stop
    return text, len(case.tokens), stop


def decided(case: Case, tokens: int) -> int:
    """Characters that can no longer be cut after so many tokens, as long as no stop string is complete."""
    visible = shown_tokens(case)
    text = stable(case, visible[:tokens])
    rest = text[len(stable(case, visible[: case.min_tokens])) :] if tokens > case.min_tokens else ""
    held = max(
        (n for stop in case.stops for n in range(1, len(stop)) if rest.endswith(stop[:n])), default=0
    )  # fmt: skip
    return len(text) - held


def shown_tokens(case: Case) -> list[bytes]:
    """The bytes that each token shows, b"" for a hidden one: among them the token that ended the choice."""
    shown = []
    for at, token in enumerate(case.tokens):
        ending = case.ends and at == len(case.tokens) - 1 and not case.finish_apart and case.finish is FinishReason.STOP
        raw = case.vocabulary[token] if token < len(case.vocabulary) else b""
        shown.append(b"" if hidden(case, token) or (ending and not case.include) else raw)
    return shown


def hidden(case: Case, token: int) -> bool:
    return case.skip_special and token in case.special and token not in case.shown


def stable(case: Case, shown: Sequence[bytes]) -> str:
    """The text of these bytes that is the same whatever follows: the longest beginning that all futures share."""
    raw = b"".join(shown)
    texts = [(raw + future).decode("utf-8", "replace") for future in FUTURES]
    length = next((i for i, together in enumerate(zip(*texts, strict=False)) if len(set(together)) > 1), len(texts[0]))
    # The futures' own first character is not text of ours, and it cannot be shared by all of them. Half of a surrogate
    # is no text whatever follows, but Python's decoder waits for its third byte before it says so.
    if raw[-2:-1] == b"\xed" and raw[-1] >= 0xA0:
        length -= 2
    return stripped(case, texts[0][:length])


def finished(case: Case, shown: Sequence[bytes]) -> str:
    return stripped(case, b"".join(shown).decode("utf-8", "replace"))


def stripped(case: Case, text: str) -> str:
    before = [t for t in case.prompt if case.vocabulary[t] and not hidden(case, t)]
    return text.removeprefix(" ") if case.strips and not before else text


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first ends, and the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def _entry(rng: random.Random, alphabet: str) -> bytes:
    """A vocabulary entry: text, a piece of a character, any bytes, or none."""
    kind = rng.random()
    if kind < 0.4:
        return "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 4))).encode()
    if kind < 0.8:
        raw = "".join(rng.choice(alphabet) for _ in range(3)).encode()
        start = rng.randrange(len(raw))
        return raw[start : start + rng.randrange(1, 4)]
    return rng.randbytes(rng.randrange(3))


def test_text_is_cut_and_held_back_like_a_search_in_the_whole() -> None:
    fuzz("text", 3500, make, check)
