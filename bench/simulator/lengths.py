"""How long prompts and answers are: quantile tables to draw from, of each class of service or as others published them.

`generator` draws from them. A table is given by points of the inverse cumulative distribution, linear in between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

from .blocks import Floats, Ints

_MEAN_TRIES: Final = 40
_NUMBER: Final = re.compile("[1-9][0-9]{0,11}")


class Lengths(NamedTuple):
    """fractions rise from 0 to 1, tokens with them."""

    fractions: tuple[float, ...]
    tokens: tuple[float, ...]

    def at(self, fractions: Floats) -> Ints:
        """The quantiles, in whole tokens, at least 1."""
        return np.maximum(np.rint(np.interp(fractions, self.fractions, self.tokens)), 1.0).astype(np.int64)

    @property
    def mean(self) -> float:
        low, high = np.array(self.tokens[:-1]), np.array(self.tokens[1:])
        return float(np.diff(self.fractions) @ (low + high)) / 2.0

    @property
    def most(self) -> int:
        return math.ceil(self.tokens[-1])


def of_logs(fractions: Sequence[float], logs: Sequence[float], mean: float, spread: float, most: int) -> Lengths:
    """From quantiles of standardised logarithms: as spread as told, none above `most`, and of the given mean."""
    stretched = np.exp(np.minimum(spread * np.array(logs), 20.0))
    scale = mean
    for _ in range(_MEAN_TRIES):
        found = Lengths(tuple(fractions), tuple(np.clip(scale * stretched, 1.0, most).tolist()))
        scale *= mean / found.mean
    return Lengths(tuple(fractions), tuple(np.clip(scale * stretched, 1.0, most).tolist()))


def lognormal(mean: float, spread: float, most: int) -> Lengths:
    """spread: the standard deviation of logarithms."""
    points = ((0.001, -3.09), (0.01, -2.326), (0.05, -1.645), (0.1, -1.282), (0.25, -0.674), (0.5, 0.0), (0.75, 0.674),
              (0.9, 1.282), (0.95, 1.645), (0.99, 2.326), (0.999, 3.09))  # fmt: skip
    fractions = [0.0, *(f for f, _ in points), 1.0]
    return of_logs(fractions, [-3.7, *(z for _, z in points), 3.7], mean, spread, most)


def fixed(tokens: int) -> Lengths:
    return Lengths((0.0, 1.0), (float(tokens), float(tokens)))


def zipf(low: int, high: int) -> Lengths:
    """Probability as 1/length: as many between 100 and 200 tokens as between 1000 and 2000."""
    fractions = np.linspace(0.0, 1.0, 65)
    return Lengths(tuple(fractions.tolist()), tuple((low * (high / low) ** fractions).tolist()))


def named(text: str, most: tuple[int, int]) -> tuple[Lengths, Lengths]:
    """Of prompt and answer: a name of `NAMES`, or numbers as in "1000/200". Cut at `most`."""
    found = NAMES.get(text)
    if found is None:
        first, slash, second = text.partition("/")
        if not slash or not all(_NUMBER.fullmatch(part) for part in (first, second)):
            raise BadConfig(f'lengths {text!r}: write one of {", ".join(NAMES)}, or "1000/200"{nearest(text, NAMES)}')
        found = fixed(int(first)), fixed(int(second))
    return cut(found[0], most[0]), cut(found[1], most[1])


def cut(lengths: Lengths, most: int) -> Lengths:
    return lengths._replace(tokens=tuple(min(tokens, float(most)) for tokens in lengths.tokens))


def _points(*tokens: float) -> Lengths:
    """At 1, 10, 25, 50, 75, 90, 99 and 100 %, as tables of traces have them."""
    return Lengths((0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0), (tokens[0], *tokens))


# Mooncake's conversations, Azure 2023's two services: percentiles of the public traces, each computed over the whole.
# sharegpt and lmsys: means as they are commonly quoted (161/338 and 70/215 tokens) and spreads of our choosing, since
# neither data set is at hand. zipf: the published synthetic prompts, 20 to 8000 tokens; answers are not published.
NAMES: Final[Mapping[str, tuple[Lengths, Lengths]]] = {
    "mooncake": (_points(894, 964, 2306, 6909, 15367, 27367, 85400, 126195),
                 _points(3, 24, 156, 350, 472, 597, 1119, 2000)),
    "azure-conv": (_points(29, 207, 396, 1020, 1189, 2734, 4142, 14050), _points(16, 54, 85, 129, 395, 424, 601, 1000)),
    "azure-code": (_points(17, 147, 578, 1469, 2744, 5188, 7436, 7437), _points(6, 7, 9, 13, 24, 55, 251, 1899)),
    "sharegpt": (lognormal(161, 1.2, 4096), lognormal(338, 0.9, 2048)),
    "lmsys": (lognormal(70, 1.2, 4096), lognormal(215, 0.9, 2048)),
    "zipf": (zipf(20, 8000), zipf(8, 128)),
}  # fmt: skip
