"""What one render of a chat template may spend, and what its operations cost.

`chat_sandbox` charges a `Budget` for each operation whose cost can grow, before the work is done where it multiplies.
A render owns its budget; nothing here is shared between renders. Costs are counted, never measured: no clock.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import TemplateRuntimeError

SIZED = (list, tuple, dict, range, set, frozenset, KeysView, ValuesView, ItemsView)
_MAX_INT_BITS = 4096


class Exhausted(TemplateRuntimeError):
    """The render asked for more work than its budget allows."""


class Budget:
    """What one render may still spend: `steps` (operations and list items touched) and `chars` (characters touched)."""

    __slots__ = ("chars", "steps")

    def __init__(self, steps: int, chars: int) -> None:
        self.steps = steps
        self.chars = chars

    def spend(self, steps: int, chars: int) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            raise Exhausted("the render budget is spent")

    def charge(self, value: object) -> None:
        """One step, and the length of a string or container (not of what a container holds)."""
        if isinstance(value, str):
            self.spend(1, len(value))
        elif isinstance(value, SIZED):
            self.spend(1 + len(value), 0)
        else:
            self.spend(1, 0)

    def weigh(self, value: object) -> None:
        """Charge everything that writing or comparing `value` would touch, shared parts once per mention."""
        pending = [value]
        while pending:
            item = pending.pop()
            self.charge(item)
            if isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, SIZED) and not isinstance(item, range):
                pending.extend(item)

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same items, one step each."""
        for value in values:
            self.spend(1, 0)
            yield value


def written(budget: Budget, value: object) -> str:
    """`value` as written into the output; objects of the template engine have no text."""
    budget.weigh(value)
    if not isinstance(value, (str, int, float, type(None), Undefined, *SIZED)):
        raise TemplateRuntimeError("only plain values can be written")
    return str(value)


def charge_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.spend(0, text.count(old) * len(new))


def charge_join(budget: Budget, separator: str, values: Iterable[Any]) -> list[Any]:
    items = list(budget.counted(values))
    budget.weigh(items)
    budget.spend(0, len(separator) * len(items))
    return items


def check_product(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            size = len(value) * max(times, 0)
            budget.spend(size, size)
            return
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
        raise Exhausted("a number grew too large")


def check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_INT_BITS:
        raise Exhausted("a number grew too large")


def check_format(budget: Budget, text: str, values: Any) -> None:
    if re.search(r"\*|\d{4}", text):
        raise Exhausted("a format asks for too wide a field")
    budget.weigh(text)
    for value in values if isinstance(values, tuple) else (values,):
        written(budget, value)
