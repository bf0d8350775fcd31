"""Where one choice stands in its grammar: which tokens may come next, and whether the text is complete.

`compile` makes one for a request, the batcher copies it for each choice, and the sampler asks and advances it on the
device thread. It never raises for what a grammar does: a choice whose grammar cannot go on has `failed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import llguidance
import numpy as np

# A step is meant to cost well under a millisecond of processor time. One that costs more than a few draws on what the
# request may take beyond that in all, which fills again as cheap steps follow.
_STEP_S: Final = 0.005
_BEYOND_S: Final = 0.1


class Budget:
    """The processor time that the grammar of one request may take of the device thread; shared by its choices."""

    def __init__(self, on_exceeded: Callable[[], None] = lambda: None) -> None:
        """on_exceeded is called once, on whatever thread spends."""
        self.exceeded = False
        self._owed_s = 0.0
        self._on_exceeded = on_exceeded

    def spend(self, used_s: float) -> None:
        self._owed_s = max(0.0, self._owed_s + used_s - _STEP_S)
        if self._owed_s > _BEYOND_S and not self.exceeded:
            self.exceeded = True
            self._on_exceeded()


class Matcher:
    """The state of a choice. Copies are independent, but for the budget, and what the lexer has worked out already."""

    __slots__ = ("_budget", "_dead", "_ended", "_eos", "_inner", "_tokens")

    def __init__(self, inner: llguidance.LLMatcher, tokens: int, eos_ids: tuple[int, ...], budget: Budget) -> None:
        """tokens: how many the tokenizer knows. eos_ids end a text where the grammar may end, and only there."""
        self._inner = inner
        self._tokens = tokens
        self._eos = np.unique(np.asarray(eos_ids, dtype=np.int64))
        self._budget = budget
        self._ended = False
        self._dead = False

    @property
    def done(self) -> bool:
        """Nothing more can follow: the choice is complete, with an end token or without."""
        return self._ended or (self._inner.is_stopped() and not self._inner.is_error())

    @property
    def failed(self) -> bool:
        """The grammar cannot go on: it leads nowhere, or costs more than it may."""
        return self._dead or self._inner.is_error() or (self._budget.exceeded and not self.done)

    @property
    def stuck(self) -> bool:
        """It failed since no token may come next, not for what that would have cost."""
        return self._dead

    def mask(self) -> np.ndarray:
        """Ids that may come next, ascending [int64]; none when it has failed."""
        if self._ended or self.failed:
            return self._eos if self._ended else self._eos[:0]
        before_s = time.thread_time()
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._tokens, bitorder="little").view(np.bool_)
        ends = self._inner.is_accepting()
        known = self._eos[self._eos < self._tokens]
        allowed[known] = ends  # whatever they spell, and whether or not the grammar names them
        ids = np.flatnonzero(allowed)
        if ends and len(known) < len(self._eos):
            ids = np.union1d(ids, self._eos)
        self._budget.spend(time.thread_time() - before_s)
        self._dead = len(ids) == 0 and not ends and not self._inner.is_error()
        return ids[:0] if self.failed else ids

    def accept(self, token: int) -> bool:
        """Move on by a token that `mask` allowed; False when it does not, and then the matcher has failed."""
        if self._ended or self.failed:
            return self._ended and token in self._eos
        if token in self._eos:
            self._ended = self._inner.is_accepting()
            self._dead = not self._ended
        elif not 0 <= token < self._tokens:
            self._dead = True
        else:
            before_s = time.thread_time()
            self._inner.consume_token(token)
            self._budget.spend(time.thread_time() - before_s)
        return not self.failed

    def copy(self) -> Matcher:
        """Another choice that stands at the same place."""
        twin = Matcher(self._inner.deep_copy(), self._tokens, (), self._budget)
        twin._eos, twin._ended, twin._dead = self._eos, self._ended, self._dead
        return twin
