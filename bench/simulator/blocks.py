"""Stretches of a workload as arrays, and how they become calls: what every source of load is made of.

`generator` and `workload` yield blocks in order of time, `Calls` turns them into single calls anew for each run, and
`merged` puts several sources together. Nothing is ever held but a few blocks: a day of 45.6 million requests streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .records import Call

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Requests that follow each other, arrays [n] in order of time; `app` are indices."""

    at_s: Floats
    app: Ints
    inputs: Ints
    outputs: Ints

    @property
    def n(self) -> int:
        return len(self.at_s)

    def part(self, which: slice | npt.NDArray[np.generic]) -> Block:
        return Block(self.at_s[which], self.app[which], self.inputs[which], self.outputs[which])

    def ordered(self) -> Block:
        """By time; requests of the same moment stay in their order."""
        return self.part(np.argsort(self.at_s, kind="stable"))


Blocks = Iterator[Block]


class Calls:
    """The calls of a source, from the first each time one iterates. `blocks` makes the source anew."""

    def __init__(self, blocks: Callable[[], Blocks]) -> None:
        self.blocks = blocks

    def __iter__(self) -> Iterator[Call]:
        number = 0
        for block in self.blocks():
            n = block.n
            columns = (block.at_s.tolist(), block.app.tolist(), block.inputs.tolist(), block.outputs.tolist())
            yield from map(Call, range(number, number + n), *columns)
            number += n


def later(source: Blocks, seconds: float) -> Blocks:
    """The same requests, so much later."""
    for block in source:
        yield block._replace(at_s=block.at_s + seconds)


def empty() -> Block:
    none = np.zeros(0, dtype=np.int64)
    return Block(np.zeros(0), none, none, none)


def joined(blocks: Sequence[Block]) -> Block:
    """One after the other, as they are."""
    if not blocks:
        return empty()
    return Block(*(np.concatenate([block[i] for block in blocks]) for i in range(4)))


def merged(sources: Sequence[Blocks]) -> Blocks:
    """Several sources, each in order of time, as one. Of the same moment, the first source's come first."""
    held = [_next(source) for source in sources]
    while known := [block for block in held if block is not None]:
        # Up to here every source has said all.
        until_s = min(float(block.at_s[-1]) for block in known)
        out = []
        for i, block in enumerate(held):
            if block is None:
                continue
            cut = int(np.searchsorted(block.at_s, until_s, side="right"))
            out.append(block.part(slice(0, cut)))
            held[i] = block.part(slice(cut, None)) if cut < block.n else _next(sources[i])
        yield joined(out).ordered()


def _next(source: Blocks) -> Block | None:
    """The next that holds anything."""
    return next((block for block in source if block.n), None)


def sliced(source: Blocks, start_s: float, duration_s: float) -> Blocks:
    """The part that comes in [start_s, start_s + duration_s), with times from 0."""
    for block in source:
        if block.n and block.at_s[0] >= start_s + duration_s:
            return
        low, high = np.searchsorted(block.at_s, [start_s, start_s + duration_s])
        if high > low:
            part = block.part(slice(low, high))
            yield part._replace(at_s=part.at_s - start_s)
