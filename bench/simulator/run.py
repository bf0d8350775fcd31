"""One run of a scenario: a world, a policy and devices of one fidelity, and a record of what came of it.

`simulate` makes several for its table, `plan` and `explain` call it too. What a run is made of comes in whole; this
module only puts it together and says how far it is.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from janus_server.sched.oracle_records import Fitted

from .batching import Rules, longest_tokens
from .constants import LINKS
from .physics import Predictor
from .records import Device, NodeSpec, Policy, Recorder, Scenario
from .ways import Ways
from .world import Physics, Seen, World, check

_TERMINAL_S: Final = 0.5
_PLAIN_S: Final = 10.0
# Objects made and not freed before the youngest are looked through for garbage; Python's own are 700.
_YOUNG: Final = 100_000


class Summary(NamedTuple):
    """How a run went: until when in simulated time, how long that took, requests that came, seconds that devices spent
    on each model, and lines that a report must not leave out."""

    simulated_s: float
    took_s: float
    came: int
    used_s: dict[str, float]
    lines: tuple[str, ...]


def run(
    scenario: Scenario,
    policy: Callable[[], Policy],
    device: Callable[[NodeSpec], Device],
    recorder: Recorder,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    *,
    fit: Callable[[Policy, str], Fitted | None] | None = None,
    watch: Callable[[Seen], None] | None = None,
) -> Summary:
    """rules are those of the devices. BadConfig before anything happens where the scenario makes no sense, Bug where
    the policy breaks its contract."""
    check(scenario)
    began_s = time.perf_counter()
    world = World(scenario, policy, device, physics_of(scenario, rules), recorder, fit, watch)
    with _seldom_collected():
        world.run()
    took_s = time.perf_counter() - began_s
    return Summary(world.now_s, took_s, world.came, world.used_s(), tuple(world.lines))


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """A run makes hardly any garbage in circles, and looking for it takes an eighth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def physics_of(scenario: Scenario, rules: Rules = Rules()) -> Physics:  # noqa: B008 - frozen
    """Of the first node's device: prompts are predicted as if all were of its kind. Requests may be as long as every
    node can hold that can hold the weights at all."""
    models = {spec.known.model: spec for spec in scenario.models}
    predictor = Predictor(scenario.models, scenario.nodes[0].shape)
    kinds = {(node.pool_pages, node.page_bytes): node for node in scenario.nodes}.values()
    longest = {}
    for name, spec in models.items():
        held = [longest_tokens(spec, node, rules) for node in kinds]
        longest[name] = min((tokens for tokens in held if tokens), default=0)
    return Physics(Ways(models, LINKS), predictor.work_s, predictor.shares, longest.__getitem__)


def clock(seconds: float) -> str:
    """7384.2 → "2:03:04"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Bar:
    """One line on stderr about how far a run is: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, name: str, duration_s: float) -> None:
        self._name, self._duration_s = name, duration_s
        self._terminal = sys.stderr.isatty()
        self._every_s = _TERMINAL_S if self._terminal else _PLAIN_S
        self._began_s = self._shown_s = time.perf_counter()

    def __call__(self, seen: Seen) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        print(self.line(seen, now_s - self._began_s), end="\r" if self._terminal else "\n", file=sys.stderr, flush=True)

    def line(self, seen: Seen, took_s: float) -> str:
        """What one glance should tell."""
        done = min(1.0, seen.now_s / max(self._duration_s, 1e-9))
        filled = round(24 * done)
        speed = seen.now_s / max(took_s, 1e-9)
        rest_s = max(0.0, self._duration_s - seen.now_s) / max(speed, 1e-9)
        bar = "█" * filled + "░" * (24 - filled)
        return (
            f"{self._name:<14} {bar} {clock(seen.now_s):>8} of {clock(self._duration_s)}  "
            f"{speed:,.0f} s/s  {seen.came / max(took_s, 1e-9):,.0f} requests/s  {seen.waiting} under way  "
            f"{clock(rest_s)} left  "
        )

    def close(self) -> None:
        """Leave the terminal's line empty for what is printed next."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
