"""Who has to wait before the next attempt to prove itself: names that failed to too often. Pure.

It counts by address and the name that was claimed there: on one host all nodes have one address, and a node with a
wrong secret must not keep out its neighbours. Guessing the secret is hopeless at any speed; this keeps a node that
tries without end from filling logs and taking the loop's time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

FREE_ATTEMPTS: Final = 5
_FIRST_S: Final = 1.0
# Whoever has corrected the secret and started the node anew waits no longer than that.
_LONGEST_S: Final = 15.0
# An attempt costs 100 bytes here; who claims more names than that is forgotten, the oldest first.
MOST_KNOWN: Final = 1024


class _Failures(NamedTuple):
    attempts: int
    until_s: float


class Doorman:
    """Failed attempts by (address, name). Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[str, str], _Failures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failed)

    def wait_s(self, address: str, name: str, now: float) -> float:
        """How long it has to wait before its next attempt is looked at; 0 where it need not."""
        failed = self._failed.get((address, name))
        return 0.0 if failed is None else max(0.0, failed.until_s - now)

    def failed(self, address: str, name: str, now: float) -> None:
        count = self._failed.pop((address, name), _Failures(0, now)).attempts + 1
        over = count - FREE_ATTEMPTS
        delay_s = 0.0 if over < 0 else min(_LONGEST_S, _FIRST_S * 2 ** min(over, 16))
        self._failed[address, name] = _Failures(count, now + delay_s)
        if len(self._failed) > MOST_KNOWN:
            self._failed.popitem(last=False)

    def proved(self, address: str, name: str) -> None:
        self._failed.pop((address, name), None)
