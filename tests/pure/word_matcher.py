"""A matcher for tests: the smallest thing that has the shape the sampler expects of a compiled grammar."""

from __future__ import annotations

import numpy as np


class Words:
    """Allows exactly one of `words`, spelt in tokens, then one of `ends`; with no ends it is done after the word."""

    def __init__(
        self, words: tuple[tuple[int, ...], ...], ends: tuple[int, ...] = (), said: tuple[int, ...] = ()
    ) -> None:
        self.words, self.ends, self.said = words, ends, said
        self.failed = False

    def copy(self) -> Words:
        return Words(self.words, self.ends, self.said)

    @property
    def done(self) -> bool:
        if self.said and self.said[-1] in self.ends:
            return True
        return not self.ends and self.said in self.words and not self._next()

    def mask(self) -> np.ndarray:
        """Ids that may come next, ascending."""
        ends = self.ends if self.said in self.words else ()
        return np.array(sorted({*self._next(), *ends}), dtype=np.int64)

    def accept(self, token: int) -> bool:
        self.failed = token not in self.mask()
        self.said += (token,)
        return not self.failed

    def _next(self) -> set[int]:
        size = len(self.said)
        return {word[size] for word in self.words if word[:size] == self.said and len(word) > size}
