"""The search for a packing on fewer devices: empty the lightest device into the others, or lay everything out anew.

`packing` calls it where the devices in use exceed what is proved necessary, and decides whether the result pays. Shards
are first put where they overflow least, then moved and swapped, always the change that lowers the overflow most and
that was not undone just now. The search is bounded by steps and draws nothing at random. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .bins import Bins, Ints
from .demand import WHOLE

Floats = npt.NDArray[np.float64]
_TENURE: Final = 6
"""Steps for which a shard may not go back. On a day of 62 applications 6 found more than 3 or 10."""
FEW_SEATS: Final = 400
"""Up to this many shards everything may be laid out anew; each takes as long to place as a step of the search."""
_NEVER: Final = 1e300
_SHORT: Final = 1e15
"""More than any weighted square of what is left of a device, in millionths."""


class Search:
    """Shards on a fixed set of rows, possibly too many on some of them.

    who [seats] is the model of each shard; where [seats + rows] its row, then the rows themselves, whose seats are
    holes of no size: a move is a swap with a hole. need, load [d, …] are whole millionths in float64, exact here.
    """

    def __init__(self, need: Floats, who: Ints, where: Ints, rows: int, spin: int = 0) -> None:
        """where: -1 for a shard that has no place yet. spin varies how long a change stands, so that a search that is
        tried again goes another way."""
        self.rows, self.spin, self.seats = rows, spin, len(who)
        self.need = np.concatenate((need, np.zeros((need.shape[0], rows))), axis=1)
        self.who = np.concatenate((who, np.full(rows, int(who.max(initial=0)) + 1)))
        self.where = np.concatenate((where, np.arange(rows)))
        # Scarce dimensions weigh more: what all need of them together, a row.
        self.weight = need.sum(1) / (rows * WHOLE)
        self.load = np.zeros((need.shape[0], rows))
        self.on = np.zeros((int(self.who.max(initial=0)) + 1, rows), dtype=np.bool_)
        # Only shards of one model get in each other's way.
        self.parted = len(np.unique(who)) < self.seats
        self.until = np.zeros((self.seats, rows), dtype=np.int64)
        placed = np.flatnonzero(where >= 0)
        for k in range(need.shape[0]):
            np.add.at(self.load[k], where[placed], need[k, placed])
        self.on[who[placed], where[placed]] = True
        self._settle(np.flatnonzero(where < 0))

    def run(self, steps: int) -> bool:
        """Change until nothing overflows; False where `steps` did not suffice."""
        over = self._overflow(self.load)
        least = _NEVER
        for step in range(steps):
            total = float(over.sum())
            if total == 0.0:
                return True
            least = min(least, total)
            full = np.flatnonzero(over)
            # Mostly the worst row; at times another, or two equal ones would pass a shard to and fro.
            row = int(over.argmax()) if step % 3 else int(full[step % len(full)])
            touched = self._improve(row, over, step, least - total)
            if touched is None:
                self.until[:] = 0
                continue
            over[touched] = self._overflow(self.load[:, touched])
        return not over.any()

    def _improve(self, row: int, over: Floats, step: int, wanted: float) -> list[int] | None:
        """Swap a shard of the row with one elsewhere, or with a hole; None where every change is barred.

        A change made lately may be undone only where the overflow then falls below the least so far (by `wanted`).
        """
        mine = np.flatnonzero(self.where[: self.seats] == row)
        there = self.where
        given = self.need[:, None, :] - self.need[:, mine, None]  # [d, mine, seats]: the change of the row's load
        loads = np.empty((len(given), 2, *given.shape[1:]))
        np.add(given, self.load[:, row, None, None], out=loads[:, 0])
        np.subtract(self.load[:, None, there], given, out=loads[:, 1])
        change = self._overflow(loads.reshape(len(given), -1)).reshape(loads.shape[1:]).sum(0)
        change -= over[there] + over[row]
        held = self.until[mine][:, there] > step
        held[:, : self.seats] |= self.until[:, row] > step
        held &= change >= wanted
        if self.parted:
            held |= self.on[self.who[mine]][:, there]
            held |= self.on[self.who, row]
        change[held] = _NEVER
        change[:, mine] = _NEVER
        change[:, self.seats + row] = _NEVER
        at = int(change.argmin())
        i, j = divmod(at, change.shape[1])
        if change[i, j] == _NEVER:
            return None
        seat, other = int(mine[i]), j
        target = int(there[other])
        until = step + _TENURE + (7 * step + self.spin) % 5
        self._move(seat, row, target)
        self.until[seat, row] = until
        if other < self.seats:
            self._move(other, target, row)
            self.until[other, target] = until
        return [row, target]

    def _move(self, seat: int, source: int, target: int) -> None:
        self.load[:, source] -= self.need[:, seat]
        self.load[:, target] += self.need[:, seat]
        self.on[self.who[seat], source] = False
        self.on[self.who[seat], target] = True
        self.where[seat] = target

    def _overflow(self, load: Floats) -> Floats:
        """[n] weighted squares of what exceeds a device, for loads [d, n]."""
        over = load - WHOLE
        np.maximum(over, 0.0, out=over)
        over *= over
        return np.asarray(self.weight @ over, dtype=np.float64)

    def _settle(self, loose: Ints) -> None:
        """Put shards that have no place, largest first, where they overflow least, then where least is left."""
        size = self.weight @ self.need[:, loose]
        for seat in loose[np.argsort(-size, kind="stable")].tolist():
            rest = WHOLE - self.need[:, seat, None] - self.load
            cost = self.weight @ (rest * rest)
            short = rest.min(0) < 0.0
            if short.any():
                cost[short] = _SHORT + self._overflow(WHOLE - rest[:, short])
            cost[self.on[self.who[seat]]] = _NEVER
            row = int(cost.argmin())
            self.load[:, row] += self.need[:, seat]
            self.on[self.who[seat], row] = True
            self.where[seat] = row


class Seats(NamedTuple):
    """Every shard that is placed: need [d, seats] in float64, its model and its row."""

    need: Floats
    who: Ints
    row: Ints


def layouts(bins: Bins, rows: int, steps: int, spin: int, also: int | None = None) -> Iterator[list[list[int]]]:
    """The devices of each model in packings on at most `rows` devices, as many as were found, two at most.

    First the lightest devices are emptied into the others, which moves little. Then everything is laid out anew, unless
    there are too many shards, and the new rows are named so that most stays where it is. `also` is a model whose
    missing shards are to be placed too, on free devices if `rows` leaves any. `steps` is for each search of up to 400
    shards; a step's cost grows with them.
    """
    seats = _seats(bins, also)
    active = np.flatnonzero(bins.count > 0)
    devices = [bins.device[row] for row in active.tolist()]
    devices += bins.spare(rows - len(devices))
    rows = min(rows, len(devices))
    if not len(seats.who) or rows < int(np.bincount(seats.who).max()):
        return
    fill = np.zeros(len(devices))
    fill[: len(active)] = seats.need.sum(1)[: len(bins.load)] @ bins.load[:, active]
    kept = np.sort(np.argsort(-fill, kind="stable")[:rows])
    at = np.full(bins.rows + 1, -1)  # the last for shards without a row
    at[active] = np.arange(len(active))
    place = np.full(len(devices) + 1, -1)
    place[kept] = np.arange(rows)
    steps = max(1, steps * FEW_SEATS // max(FEW_SEATS, len(seats.who)))
    search = Search(seats.need, seats.who, place[at[seats.row]], rows, spin)
    if search.run(steps):
        yield _homes(bins, seats.who, [devices[n] for n in kept[search.where[: len(seats.who)]].tolist()])
    if len(seats.who) > FEW_SEATS:
        return
    search = Search(seats.need, seats.who, np.full(len(seats.who), -1), rows, spin)
    if search.run(steps):
        where = search.where[: len(seats.who)]
        names = _named(np.array(bins.items.move_s), seats.who, at[seats.row], where, len(devices))
        yield _homes(bins, seats.who, [devices[n] for n in names.tolist()])


def _seats(bins: Bins, also: int | None) -> Seats:
    """The models that a device may hold are one more dimension, each taking its part of the number."""
    models = bins.items
    rows = [(i, row) for i, home in enumerate(bins.homes) for row in home]
    if also is not None:
        rows += [(also, -1)] * bins.missing(also)
    who, row = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    need = models.need[who].T.astype(np.float64)
    if models.most < len(models.shards):
        need = np.concatenate((need, np.full((1, len(who)), WHOLE // models.most)))
    return Seats(need, who, row)


def _named(cost: Floats, who: Ints, old: Ints, new: Ints, devices: int) -> Ints:
    """[seats]: for the rows `new` of a layout the ones of `devices` with which they share most, by what moves cost.

    who, old, new [seats]: each shard's model, and its device (-1: none) and row.
    """
    rows = int(new.max()) + 1
    was, now = np.zeros((len(cost), devices + 1)), np.zeros((len(cost), rows))
    was[who, old] = 1.0
    now[who, new] = cost[who]
    shared = now.T @ was[:, :devices]
    names, free = np.full(rows, -1), np.ones(devices, dtype=np.bool_)
    ranked = np.argsort(-shared, axis=None, kind="stable")[: np.count_nonzero(shared)]
    for flat in ranked.tolist():
        row, n = divmod(flat, devices)
        if names[row] < 0 and free[n]:
            names[row], free[n] = n, False
    unnamed = np.flatnonzero(names < 0)
    names[unnamed] = np.flatnonzero(free)[: len(unnamed)]
    return np.asarray(names[new])


def _homes(bins: Bins, who: Ints, devices: Sequence[int]) -> list[list[int]]:
    homes: list[list[int]] = [[] for _ in bins.homes]
    for model, device in zip(who.tolist(), devices, strict=True):
        homes[model].append(device)
    return [sorted(home) for home in homes]
