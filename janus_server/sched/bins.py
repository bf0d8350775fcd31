"""The working picture of a packing: what lies on which device, what still fits where, and how badly shaped the rest is.

`packing` and `consolidate` change it while they decide; nothing outside them sees it. Shares are whole millionths of a
device, so that sums are exact and a device is full or not on every machine alike. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .demand import WHOLE

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NOWHERE: Final = np.iinfo(np.int64).min


class Items(NamedTuple):
    """The models to place, in order of their names.

    need [models, d] int64: what one shard takes of a device, d = 3 or 4 dimensions. tilt = sum(need) - d * need: the
    shape of a need against which loads are scored. phi [models]: d times its potential. shards [models]: how many,
    each on a device of its own. most: how many models a device may hold.
    """

    need: Ints
    tilt: Ints
    phi: list[int]
    shards: list[int]
    move_s: list[float]
    most: int


def items(need: Ints, shards: Sequence[int], move_s: Sequence[float], most: int) -> Items:
    """Example: a need of (4, 1, 1) has tilt (-6, 3, 3) and phi 3 * 18 - 36 = 18."""
    total = need.sum(1)
    tilt = total[:, None] - need.shape[1] * need
    return Items(need, tilt, potential(need.T).tolist(), list(shards), list(move_s), most)


def potential(x: Ints) -> Ints:
    """d times Φ of each column of x [d, n]: d·‖x‖₂² - ‖x‖₁², 0 where all dimensions are used alike."""
    return np.asarray(x.shape[0] * (x * x).sum(0) - x.sum(0) ** 2, dtype=np.int64)


class Bins:
    """Devices that hold something, a row each, and the free ones. Rows are made when a device is first used.

    A device is its index in the caller's list. load [d, rows]; count, device [rows]; held: the models of a row;
    homes: the rows of each model.
    """

    def __init__(self, models: Items, devices: int, homes: Sequence[Sequence[int]] | None = None) -> None:
        """homes: the devices (distinct for a model) that each model stands on already."""
        self.items = models
        standing = homes if homes is not None else [()] * len(models.shards)
        taken = sorted({device for home in standing for device in home})
        row = {device: r for r, device in enumerate(taken)}
        self.rows = len(taken)
        self.used = self.rows
        self.homes = [[row[device] for device in home] for home in standing]
        self.held: list[list[int]] = [[] for _ in taken]
        d = models.need.shape[1]
        self._load = np.zeros((d, max(8, 2 * self.rows)), dtype=np.int64)
        self._count = np.zeros(self._load.shape[1], dtype=np.int64)
        self.device = taken
        self._row = row
        self._devices, self._next = devices, 0
        self._freed: list[int] = []  # a heap of devices that were in use
        pairs = [(i, r) for i, home in enumerate(self.homes) for r in home]
        for i, r in pairs:
            self.held[r].append(i)
        if pairs:
            who, where = np.array(pairs, dtype=np.int64).T
            np.add.at(self._count, where, 1)
            for k in range(d):
                np.add.at(self._load[k], where, models.need[who, k])

    @property
    def load(self) -> Ints:
        return self._load[:, : self.rows]

    @property
    def count(self) -> Ints:
        return self._count[: self.rows]

    def spare(self, most: int) -> list[int]:
        """The first free devices, `most` at most."""
        busy = {self.device[row] for row in range(self.rows) if self.held[row]}
        return list(itertools.islice((x for x in range(self._devices) if x not in busy), max(0, most)))

    def missing(self, i: int) -> int:
        return self.items.shards[i] - len(self.homes[i])

    def put(self, i: int, row: int) -> None:
        if not self.held[row]:
            self.used += 1
        self.held[row].append(i)
        self.homes[i].append(row)
        self._load[:, row] += self.items.need[i]
        self._count[row] += 1

    def take(self, i: int, row: int) -> None:
        """Take model i off the row. A device left empty is free again."""
        self.held[row].remove(i)
        self.homes[i].remove(row)
        self._load[:, row] -= self.items.need[i]
        self._count[row] -= 1
        if not self.held[row]:
            self.used -= 1
            heapq.heappush(self._freed, self.device[row])

    def open(self) -> int | None:
        """The row of the free device that comes first, or None. The caller puts something on it."""
        while self._next < self._devices and self._next in self._row:
            self._next += 1
        if self._freed and self._freed[0] < self._next:
            return self._row[heapq.heappop(self._freed)]
        if self._next == self._devices:
            return None
        device = self._next
        if self.rows == self._load.shape[1]:
            self._load = np.concatenate((self._load, np.zeros_like(self._load)), axis=1)
            self._count = np.concatenate((self._count, np.zeros_like(self._count)))
        self._row[device] = row = self.rows
        self.rows += 1
        self.device.append(device)
        self.held.append([])
        return row

    def reopen(self, row: int) -> int:
        """The row again, whose device may have become free since."""
        if not self.held[row]:
            self._freed.remove(self.device[row])
            heapq.heapify(self._freed)
        return row

    def fits(self, i: int) -> Flags:
        """[rows]: which devices in use could hold one more shard of model i."""
        ok: Flags = np.asarray((self.load <= (WHOLE - self.items.need[i])[:, None]).all(0))
        ok &= self.count > 0
        ok &= self.count < self.items.most
        if self.homes[i]:
            ok[self.homes[i]] = False
        return ok

    def scores(self, i: int) -> Ints:
        """[rows]: d·⟨r', v'⟩ for residual r and need v, their even parts taken out: the larger, the better shaped the
        rest is afterwards, since Φ(r - v) = Φ(r) + Φ(v) - 2⟨r', v'⟩.

        Example: v = (0.4, 0.1, 0.1) on a load of (0.1, 0.5, 0.1), in tenths: tilt (-6, 3, 3) gives -6 + 15 + 3 = 12,
        on (0.5, 0.1, 0.1) -30 + 3 + 3 = -24.
        """
        return np.asarray(self.items.tilt[i] @ self.load, dtype=np.int64)

    def insert(self, i: int) -> bool:
        """Place the missing shards of model i by the rule above, on devices in use first; False where room lacks.

        Ties go to the device that is fuller, then to the one that comes first.
        """
        need = self.missing(i)
        if need <= 0:
            return True
        if self.rows:
            for row in best(self.fits(i), self.scores(i), self.load, need, self.device):
                self.put(i, row)
        return self.spread(i)

    def spread(self, i: int) -> bool:
        """Place what is missing of model i on free devices; False where they run out."""
        while self.missing(i) > 0:
            row = self.open()
            if row is None:
                return False
            self.put(i, row)
        return True

    def withdraw(self, i: int) -> None:
        for row in list(self.homes[i]):
            self.take(i, row)

    def overloaded(self) -> list[int]:
        over = (self.load > WHOLE).any(0) | (self.count > self.items.most)
        return [int(row) for row in np.flatnonzero(over)]

    def damage(self, rows: Iterable[int]) -> list[tuple[int, float]]:
        """(row, ρ) of those that hold something: Φ of the rest over ΣΦ of what they hold.

        Below 1 the models complement each other; 1 for a model alone, n for n of one kind; 0 where both are 0.
        """
        out = []
        for row in rows:
            if self.held[row]:
                parts = sum(self.items.phi[i] for i in self.held[row])
                whole = int(potential(self._load[:, row : row + 1])[0])
                out.append((row, whole / parts if parts else 0.0))
        return out

    def standing(self) -> list[list[int]]:
        """The devices of each model, in order."""
        device = self.device
        return [[device[home[0]]] if len(home) == 1 else sorted(device[row] for row in home) for home in self.homes]


def best(ok: Flags, score: Ints, load: Ints, most: int, device: Sequence[int]) -> list[int]:
    """At most `most` rows that are ok, highest score first; ties by fuller, then by the device that comes first."""
    if most == 1:
        masked = np.where(ok, score, _NOWHERE)
        top = masked.max()
        if top == _NOWHERE:
            return []
        rows = np.flatnonzero(masked == top)
    else:
        rows = np.flatnonzero(ok)
    if len(rows) <= 1:
        return [int(row) for row in rows]
    full = load[:, rows].sum(0)
    order = np.lexsort((np.asarray(device)[rows], -full, -score[rows]))[:most]
    return [int(row) for row in rows[order]]
