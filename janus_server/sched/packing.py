"""Which device holds which model of the steady pool: vector packing that keeps what stands.

The slow path of the leader calls `pack` every 30 s (and when a model comes or goes) with what each model needs and
what stands now; the answer is the new placement and the moves to it, each with the sentence that explains it. A model
that no device can hold is refused with a reason, never with an exception. The same input gives the same answer. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from janus_server.errors import require

from . import packing_bound
from .bins import Bins, best, items
from .consolidate import FEW_SEATS, layouts
from .demand import DIMENSIONS, WHOLE, Decision, Demand, Kind, Move, Placement, Reason, Refusal, Rules, Seat, impossible

_CLIQUE_MODELS: Final = 300
"""Beyond this the quadratic bound costs more than it saves."""
_SHRINKS: Final = 4
"""Searches for fewer devices, a decision, and one where many shards stand already: the next decision goes on."""
_RESCUES: Final = 3
"""Models without room for which everything else is rearranged, a decision."""
_WORTH: Final = 0.1
"""A repair that saves no device must take this part of the unevenness of what it touches."""


def pack(
    demands: Sequence[Demand],
    devices: Sequence[str],
    before: Placement = Placement(),  # noqa: B008 - frozen
    rules: Rules = Rules(),  # noqa: B008 - frozen
) -> Decision:
    """Place every demand on `devices` (their order is the order in which free ones are taken), starting from `before`.

    Example: "read" needs (0.3, 0.6, 0.1) and "write" (0.3, 0.1, 0.6) of three devices: they complement each other, so
    both go to the first. A third, "more" (0.3, 0.6, 0.1), fits on none in use, as compute would be 1.3, and opens the
    second. When "write" leaves, what is left fits on no single device: both stay. When "more" shrinks to a compute of
    0.2, it moves to the first ("the models fit on 1 device instead of 2"), if one device for `hold_s` is worth its
    move.
    """
    require(len({d.model for d in demands}) == len(demands), "a model is demanded twice")
    require(len(set(devices)) == len(devices), "a device is listed twice")
    demands, refusals = _possible(sorted(demands, key=lambda d: d.model), len(devices))
    tick = _Tick(demands, devices, before, rules)
    tick.relieve()
    lost = tick.place()
    refusals += tick.refuse(tick.rescue(lost))
    tick.repair()
    least, vain = tick.consolidate(before.vain)
    refusals.sort(key=lambda r: r.model)
    gone = {r.model: r.why for r in refusals}
    placement, moves = tick.outcome(vain, gone)
    return Decision(placement, moves, tuple(refusals), tick.bins.used, least)


def _possible(demands: Sequence[Demand], devices: int) -> tuple[list[Demand], list[Refusal]]:
    """Those that a device could hold, and the refusals of the others. One look at all of them, then at the odd ones."""
    numbers = np.array([(*d.shares, d.move_s) for d in demands], dtype=np.float64).reshape(-1, len(DIMENSIONS) + 1)
    shards = np.array([d.shards for d in demands], dtype=np.float64)
    odd = ~(np.isfinite(numbers) & (numbers >= 0.0)).all(1) | (numbers[:, :-1] > 1.0).any(1)
    odd |= (shards < 1) | (shards > devices)
    found = {i: impossible(demands[i], devices) for i in np.flatnonzero(odd).tolist()}
    kept = [demand for i, demand in enumerate(demands) if found.get(i) is None]
    return kept, [refusal for refusal in found.values() if refusal is not None]


class _Tick:
    """One decision under way. Models are indices by name, devices indices in the caller's order."""

    def __init__(self, demands: Sequence[Demand], devices: Sequence[str], before: Placement, rules: Rules) -> None:
        self.demands, self.devices, self.rules = demands, devices, rules
        d = 4 if any(demand.busy > 0.0 for demand in demands) else 3
        shares = np.array([demand.shares[:d] for demand in demands], dtype=np.float64).reshape(-1, d)
        need = np.maximum(np.ceil(shares * WHOLE - 1e-4), 0.0).astype(np.int64)
        shards = [demand.shards for demand in demands]
        most = rules.models_most if rules.models_most > 0 else max(1, len(demands))
        self.models = items(need, shards, [demand.move_s for demand in demands], most)
        at = dict(zip(devices, range(len(devices)), strict=True))
        self.homes = homes = before.homes
        self.stood = [sorted({at[x] for x in homes.get(demand.model, ()) if x in at}) for demand in demands]
        kept = [home[:n] for home, n in zip(self.stood, shards, strict=True)]
        self.bins = Bins(self.models, len(devices), kept)
        # Devices that lose or gain something, and the sentence for each model that does not stay.
        asked = {demand.model for demand in demands}
        self.touched = {at[x] for model, home in homes.items() if model not in asked for x in home if x in at}
        self.touched.update(x for home, n in zip(self.stood, shards, strict=True) for x in home[n:])
        self.why: dict[int, str] = {}

    def relieve(self) -> None:
        """Take off what devices can no longer hold: that whose going suffices and costs least, or helps most."""
        bins, models = self.bins, self.models
        for row in bins.overloaded():
            device = bins.device[row]
            while int(bins.load[:, row].max()) > WHOLE or int(bins.count[row]) > models.most:
                i = self._first_to_go(row)
                k = int(bins.load[:, row].argmax())
                what = f"{int(bins.load[k, row]) / WHOLE:.4g} of its {DIMENSIONS[k]}"
                full = what if int(bins.load[k, row]) > WHOLE else f"{bins.count[row]} models on it"
                self.why[i] = f"{self.devices[device]} would have needed {full}"
                self.touched.add(device)
                bins.take(i, row)

    def _first_to_go(self, row: int) -> int:
        bins, models = self.bins, self.models
        over = np.maximum(bins.load[:, row] - WHOLE, 0)
        one = int(bins.count[row]) - models.most <= 1
        k = int(over.argmax())

        def rank(i: int) -> tuple[bool, float, int, int]:
            enough = one and bool((models.need[i] >= over).all())
            return (not enough, models.move_s[i] if enough else 0.0, -int(models.need[i, k]), i)

        return min(bins.held[row], key=rank)

    def place(self) -> list[int]:
        """Insert what has no place, largest first, by the shape of the rest. Those that found no room, taken off."""
        bins, need = self.bins, self.models.need
        missing = [i for i in range(len(self.demands)) if bins.missing(i) > 0]
        lost = []
        for i in sorted(missing, key=lambda i: (-int(need[i].max()), i)):
            used = bins.used
            if not bins.insert(i):
                bins.withdraw(i)
                lost.append(i)
                continue
            where = "no device in use had room" if bins.used > used else "it leaves the most even rest there"
            self.why[i] = f"{self.why[i]}; {where}" if i in self.why else where
            self.touched.update(bins.device[row] for row in bins.homes[i])
        return lost

    def rescue(self, lost: Sequence[int]) -> list[int]:
        """Rearrange the others for models without room, smallest first. Those that stay without."""
        bins, left, failures = self.bins, [], 0
        for i in sorted(lost, key=lambda i: (int(self.models.need[i].max()) * self.models.shards[i], i)):
            found = None
            if failures < _RESCUES and self.rules.steps:
                found = next(layouts(bins, len(self.devices), self.rules.steps, 0, also=i), None)
            if found is None:
                failures += 1
                left.append(i)
                continue
            self._adopt(found, f"the models are rearranged to make room for {self.demands[i].model}")
            bins = self.bins
        return left

    def refuse(self, lost: Sequence[int]) -> list[Refusal]:
        out = []
        for i in lost:
            demand = self.demands[i]
            need = ", ".join(f"{s:.4g} {n}" for s, n in zip(demand.shares, DIMENSIONS, strict=True) if s > 0)
            many = f"{demand.shards} devices have" if demand.shards > 1 else "no device has"
            what = f"no {many}" if demand.shards > 1 else many
            why = f"{demand.model} is not placed: {what} {need or 'a seat'} free; {len(self.devices)} are given"
            out.append(Refusal(demand.model, Reason.NO_ROOM, why))
        return out

    def repair(self) -> None:
        """Reinsert what lies on changed devices whose rest is lopsided (ρ above α), where that helps."""
        bins = self.bins
        rows = [row for row in range(bins.rows) if bins.device[row] in self.touched]
        for row, damage in bins.damage(sorted(rows, key=lambda row: bins.device[row])):
            if damage <= self.rules.damage_most or not bins.held[row]:
                continue
            name = self.devices[bins.device[row]]
            if not self._empty(row, f"{name} is freed, as others have room for what it held"):
                self._reshape(row, f"{name} was left lopsided: damage {damage:.2f} over {self.rules.damage_most:g}")

    def _empty(self, row: int, why: str) -> bool:
        """Move everything on the row to other devices in use, if they have room and one device less pays for it."""
        bins, done, cost = self.bins, [], 0.0
        for i in self._by_size(bins.held[row]):
            target = best(bins.fits(i), bins.scores(i), bins.load, 1, bins.device)
            if not target:
                break
            bins.take(i, row)
            bins.put(i, target[0])
            done.append((i, target[0]))
            cost += self.models.move_s[i]
        if not bins.held[row] and cost <= self.rules.hold_s:
            self.why.update({i: why for i, _ in done})
            return True
        for i, target_row in reversed(done):
            bins.take(i, target_row)
            bins.put(i, bins.reopen(row))
        return False

    def _reshape(self, row: int, why: str) -> None:
        """Move what complements the models of another device. A move lowers d·ΣΦ by twice the difference of the scores,
        but where the score there is not positive it would only spread the same kind, which is no reason to move.
        """
        bins = self.bins
        parts = sum(self.models.phi[i] for i in bins.held[row])
        for i in self._by_size(bins.held[row]):
            if len(bins.held[row]) == 1:
                return
            scores = bins.scores(i)
            target = best(bins.fits(i), scores, bins.load, 1, bins.device)
            own = int(scores[row] - self.models.tilt[i] @ self.models.need[i])
            there = int(scores[target[0]]) if target else 0
            if there > max(0, own) and 2 * (there - own) > _WORTH * parts:
                bins.take(i, row)
                bins.put(i, target[0])
                self.why[i] = why

    def consolidate(self, vain: int) -> tuple[int, int]:
        """Look for fewer devices while more are used than must be. The bound, and the searches in vain so far."""
        placed = [i for i, home in enumerate(self.bins.homes) if home]
        kept = self.models._replace(need=self.models.need[placed], shards=[self.models.shards[i] for i in placed])
        least = packing_bound.bound(kept, self.bins.used)
        if self.bins.used > least and len(placed) <= _CLIQUE_MODELS:
            least = max(least, packing_bound.clique(kept))
        if self.bins.used <= least or not self.rules.steps:
            return least, 0
        few = sum(kept.shards) <= FEW_SEATS
        rows = least if few else self.bins.used - max(1, (self.bins.used - least) // 4 >> vain)
        for _ in range(_SHRINKS if few or not any(self.stood) else 1):
            if self._shrink(rows, vain):
                vain = 0
            elif rows == self.bins.used - 1 or not few:
                return least, vain + 1
            if self.bins.used <= least:
                break
            rows = self.bins.used - 1
        return least, 0

    def _shrink(self, rows: int, spin: int) -> bool:
        """Go over to a packing on fewer devices, at most `rows`, if one is found whose moves they pay for."""
        was = self.bins.used
        for homes in layouts(self.bins, rows, max(1, self.rules.steps >> min(spin, 3)), spin):
            used = len({device for home in homes for device in home})
            if self._extra_s(homes) <= (was - used) * self.rules.hold_s:
                self._adopt(homes, f"the models fit on {used} device{'s' if used > 1 else ''} instead of {was}")
                return True
        return False

    def _extra_s(self, homes: Sequence[Sequence[int]]) -> float:
        """Device-seconds of moves that these homes take beyond the ones that the packing as it is takes already."""
        total = 0.0
        for i, (home, now) in enumerate(zip(homes, self.bins.standing(), strict=True)):
            if home != now:
                total += self.models.move_s[i] * (moved(self.stood[i], home) - moved(self.stood[i], now))
        return total

    def _adopt(self, homes: Sequence[Sequence[int]], why: str) -> None:
        now = self.bins.standing()
        self.why.update({i: why for i, home in enumerate(homes) if list(home) != now[i]})
        self.bins = Bins(self.models, len(self.devices), homes)

    def _by_size(self, held: Sequence[int]) -> list[int]:
        return sorted(held, key=lambda i: (-int(self.models.need[i].max()), i))

    def outcome(self, vain: int, gone: Mapping[str, str]) -> tuple[Placement, tuple[Move, ...]]:
        """The new placement, and what leads to it from the old one."""
        old, new = self.homes, self.bins.standing()
        index = {demand.model: i for i, demand in enumerate(self.demands)}
        seats, moves = [], []
        for model in sorted({*old, *index}):
            i = index.get(model)
            now = [self.devices[x] for x in new[i]] if i is not None else []
            if len(now) > 1:
                now.sort()
            seats += [Seat(model, device) for device in now]
            was = old.get(model, ())
            if was != tuple(now):
                why = self.why.get(i, "") if i is not None else ""
                moves += changes(model, was, now, why, gone.get(model))
        return Placement(tuple(seats), vain), tuple(moves)


def moved(was: Sequence[int], now: Sequence[int]) -> int:
    """How many shards change their device; those that come or go are no moves."""
    stayed = len(set(was).intersection(now))
    return min(len(was), len(now)) - stayed


def changes(model: str, was: Sequence[str], now: Sequence[str], why: str, refused: str | None) -> list[Move]:
    """Shards that left and shards that came, paired; the rest goes or comes. Each says why."""
    left, came = [x for x in was if x not in now], [x for x in now if x not in was]
    pairs = min(len(left), len(came))
    out = [
        Move(Kind.MOVE, model, a, b, f"{model} moves from {a} to {b}: {why or 'its device is gone'}")
        for a, b in zip(left, came, strict=False)
    ]
    for a in left[pairs:]:
        reason = refused or ("it has fewer shards" if now else "nothing is asked of it")
        out.append(Move(Kind.DROP, model, a, None, f"{model} leaves {a}: {reason}"))
    for b in came[pairs:]:
        out.append(Move(Kind.PLACE, model, None, b, f"{model} goes to {b}: {why}"))
    return out
