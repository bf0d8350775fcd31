"""What the world told a device, told to another one: so that two fidelities can be compared at the same decisions.

`simulate_agreement` tapes the devices of one run and plays each tape to a device of the other fidelity. Calls begin
where and when they did; only what the devices then make of them differs. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from janus_server.orders import Busy

from .records import Call, Device, Emit, NodeSpec, Outcome


class Taped:
    """A Device that notes what it is told: see `records.Device`."""

    def __init__(self, node: NodeSpec, device: Device) -> None:
        self.node, self._device = node, device
        self.told: list[tuple[float, Callable[[Device], object]]] = []

    def up(self, model: str, now: float) -> None:
        self.told.append((now, lambda device: device.up(model, now)))
        self._device.up(model, now)

    def down(self, model: str, now: float) -> list[int]:
        self.told.append((now, lambda device: device.down(model, now)))
        return self._device.down(model, now)

    def begin(self, call: Call, model: str, now: float) -> None:
        self.told.append((now, lambda device: device.begin(call, model, now)))
        self._device.begin(call, model, now)

    def slow(self, factor: float, now: float) -> None:
        self.told.append((now, lambda device: device.slow(factor, now)))
        self._device.slow(factor, now)

    def advance(self, now: float) -> list[Emit]:
        return self._device.advance(now)

    def next_s(self, now: float) -> float | None:
        return self._device.next_s(now)

    def busy(self, now: float) -> dict[str, Busy]:
        return self._device.busy(now)

    def used(self) -> Mapping[str, float]:
        return self._device.used()


def play(tape: Taped, device: Device) -> list[Emit]:
    """All that a new device makes of it."""
    emits: list[Emit] = []
    now = 0.0
    for at_s, tell in tape.told:
        now = _until(device, now, at_s, emits)
        tell(device)
    _until(device, now, float("inf"), emits)
    return emits


def outcomes(known: Mapping[int, Outcome], emits: Iterable[Emit]) -> dict[int, Outcome]:
    """What became of calls whose outcome is known otherwise."""
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    for emit in emits:
        (last_s if emit.ended else first_s)[emit.call] = emit.at_s
    found = {}
    for id_, outcome in known.items():
        call, at_s, end_s = outcome.call, first_s.get(id_), last_s.get(id_)
        if at_s is None or end_s is None:
            found[id_] = outcome._replace(ttft_s=None, why="it did not end")
            continue
        tpot_s = (end_s - at_s) / (call.output_tokens - 1) if call.output_tokens > 1 else 0.0
        found[id_] = Outcome(call, at_s - call.at_s, tpot_s, end_s, outcome.node)
    return found


def _until(device: Device, now: float, until_s: float, emits: list[Emit]) -> float:
    while (due_s := device.next_s(now)) is not None and due_s <= until_s:
        now = max(now, due_s)
        emits += device.advance(now)
    if until_s == float("inf"):
        return now
    emits += device.advance(until_s)
    return until_s
