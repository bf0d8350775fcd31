"""The loop that every fuzz target runs in: seeded cases, a fixed number of them or a span of time, and how to get a
failure back.

A target gives `make`, which draws one case, and `check`, which must hold for it. Each case has a generator of its own,
seeded by target, seed and number, so any one can be run alone. The environment, read here and nowhere else:

    JANUS_FUZZ_S=60        go on with new cases for so many seconds a target, instead of the fixed number
    JANUS_FUZZ_SEED=7      other cases (default 0)
    JANUS_FUZZ_CASE=123    only that one
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Processor seconds of one case: what takes longer hangs. No wall clock, which a busy neighbour could slow.
CASE_CPU_S = 30.0
SHOWN_CHARS = 4000


class Hang(Exception):
    """A case used up its processor time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which cases to run: `only` that one, else new ones for `seconds`, else a target's own fixed number."""

    seed: int = 0
    seconds: float | None = None
    only: int | None = None

    @staticmethod
    def of_environment() -> Plan:
        seconds, only = os.environ.get("JANUS_FUZZ_S"), os.environ.get("JANUS_FUZZ_CASE")
        return Plan(
            int(os.environ.get("JANUS_FUZZ_SEED", "0")),
            None if seconds is None else float(seconds),
            None if only is None else int(only),
        )

    def numbers(self, count: int) -> Iterator[int]:
        """Case numbers, for as long as the plan says."""
        if self.only is not None:
            yield self.only
            return
        end, number = time.monotonic() + (self.seconds or 0.0), 0
        while number < count if self.seconds is None else time.monotonic() < end:
            yield number
            number += 1


def fuzz(target: str, count: int, make: Callable[[random.Random], T], check: Callable[[T], object]) -> None:
    """Run `check` on `count` cases of `make`; a failure carries what it takes to see it again."""
    plan = Plan.of_environment()
    for number in plan.numbers(count):
        case = make(_generator(target, plan.seed, number))
        with _explained(target, plan.seed, number, case), _bounded():
            check(case)


async def fuzz_async(
    target: str, count: int, make: Callable[[random.Random], T], check: Callable[[T], Awaitable[object]]
) -> None:
    """The same for a check that awaits. Waiting costs no processor time: the check bounds its own waits."""
    plan = Plan.of_environment()
    for number in plan.numbers(count):
        case = make(_generator(target, plan.seed, number))
        with _explained(target, plan.seed, number, case), _bounded():
            await check(case)


def scribble(rng: random.Random, raw: bytes, span: int | None = None) -> bytes:
    """`raw` with a few bytes of its first `span` changed, cut out, doubled, moved or added."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(max(1, min(len(data), span or len(data))))
        size = rng.choice((1, 1, 2, 4, 8, rng.randrange(1, 64)))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                data[at : at + size] = rng.randbytes(size)
            case 4:
                data[at : at + 8] = rng.choice(EXTREMES).to_bytes(8, "little")
            case 5:
                data[at : at + 4] = (rng.choice(EXTREMES) & 0xFFFFFFFF).to_bytes(4, "little")
            case _:
                del data[at:]
    return bytes(data)


# Numbers at which lengths, counts and offsets turn over.
EXTREMES = (
    0, 1, 2, 7, 8, 31, 32, 33, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 16, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip


def _generator(target: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{target} {seed} {number}")


@contextlib.contextmanager
def _explained(target: str, seed: int, number: int, case: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shown = repr(case)
        if len(shown) > SHOWN_CHARS:
            shown = f"{shown[:SHOWN_CHARS]} … ({len(shown)} characters)"
        error.add_note(f"fuzz {target}: again with JANUS_FUZZ_SEED={seed} JANUS_FUZZ_CASE={number}\n{shown}")
        raise


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"a case took more than {CASE_CPU_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CASE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
