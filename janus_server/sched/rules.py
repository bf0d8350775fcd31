"""Which device a request goes to where requests are not planned: in turn, or to whoever has the least before it. Pure.

`dispatcher` asks for it when it is not led by LST-IMH: what the plan is worth is measured beside these. Each request is
handed over as soon as any device takes its model, and waits there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence


class Rule(enum.Enum):
    """LST_IMH: requests wait for a device and are planned over all of them. ROUND_ROBIN: at once to the device that was
    chosen longest ago for the model. LEAST_LOAD: at once to the one with the least predicted prefill before it, of
    equals to the one that was chosen longest ago."""

    LST_IMH = "lst-imh"
    ROUND_ROBIN = "round-robin"
    LEAST_LOAD = "least-load"


class Turns:
    """Who was chosen when, by model: the n-th choice of all.

    Example: ROUND_ROBIN over a and b: a, b, a, b; when c comes, c is next.
    """

    def __init__(self, rule: Rule, chosen: dict[str, dict[str, int]] | None = None) -> None:
        self.rule = rule
        self.chosen = chosen or {}
        self._last = max((turn for turns in self.chosen.values() for turn in turns.values()), default=0)

    def pick(self, model: str, machines: Sequence[str], load_s: Callable[[str], float]) -> str:
        """One of the machines, of which there is at least one. load_s(machine) is what lies before it."""
        turns = self.chosen.setdefault(model, {})
        least = load_s if self.rule is Rule.LEAST_LOAD else _alike
        machine = min(machines, key=lambda name: (least(name), turns.get(name, 0), name))
        self._last += 1
        turns[machine] = self._last
        return machine

    def gone(self, machine: str) -> None:
        for turns in self.chosen.values():
            turns.pop(machine, None)


def _alike(machine: str) -> float:
    return 0.0
