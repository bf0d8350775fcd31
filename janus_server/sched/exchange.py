"""More jobs on time by exchange: a job left out takes the place of one that can run elsewhere.

`dispatch_best` calls `augment` on its best plans. Pure. Every step adds exactly one job to those on time and takes none
away, so what a plan was proven to keep is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from janus_server.errors import require

from .jobs import Columns, Ints

Bools = npt.NDArray[np.bool_]
Kept = list[list[int]]
_NEVER: Final = 1 << 62
# A search step compares this many pairs of jobs; so many of the shortest jobs left out are tried.
_PAIRS: Final = 64_000
_LEAST_TRIED: Final = 8
_ROUNDS: Final = 32
# A chain moves at most this many jobs that were on time. Longer ones seldom find anything.
_CHAIN: Final = 2


class _Chain(NamedTuple):
    """jobs[0] was left out; each takes the place of the next, and the last just fits. lanes[k] receives jobs[k]."""

    jobs: list[int]
    lanes: list[int]


def augment(jobs: Columns, starts: Sequence[int], kept: Kept, bound: int) -> Kept:
    """Exchange until `bound` jobs are on time, no chain is found, or the rounds are over.

    Example: machine 0 runs b (work 2, due 4) from 0, machine 1 starts at 2 and runs nothing; a (3, 3) was left out.
    a takes b's place and b goes to machine 1: two are on time.
    """
    lanes = Lanes(jobs, starts, kept)
    for _ in range(_ROUNDS):
        if lanes.count >= bound or not (_fill(lanes) or _chains(lanes)):
            break
    return [lane.tolist() for lane in lanes.lanes]


class Lanes:
    """A plan under change, with what it takes to see at once whether a job fits somewhere.

    home [jobs] is each job's machine, -1 for none. fits [machines, jobs]: the job could be added there. Per machine:
    before [k + 1] is when what precedes a gap ends, slack [k] how late a job there may still get, and room [k + 1] how
    much longer all behind a gap may wait.
    """

    def __init__(self, jobs: Columns, starts: Sequence[int], kept: Kept) -> None:
        self.jobs = jobs
        self.count = sum(map(len, kept))
        self.home = np.full(len(jobs.jobs), -1, dtype=np.int64)
        self.fits = np.zeros((len(starts), len(jobs.jobs)), dtype=bool)
        self.lanes = [np.array(lane, dtype=np.int64) for lane in kept]
        self._starts = starts
        self._before: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(starts)
        self._slack = list(self._before)
        self._room = list(self._before)
        for i, lane in enumerate(self.lanes):
            self.home[lane] = i
            self._refresh(i)

    def left_out(self) -> Ints:
        """Jobs on no machine, the shortest first, as many as a step tries."""
        jobs = np.flatnonzero(self.home < 0)
        return self.shortest(jobs)

    def shortest(self, jobs: Ints) -> Ints:
        tried = max(_LEAST_TRIED, _PAIRS // max(1, len(self.home)))
        return jobs[np.argsort(-self.jobs.rank[jobs])][:tried]

    def replaceable(self, i: int, candidates: Ints) -> Bools:
        """[candidates, lane] whether the candidate could run on machine i in the stead of that job, all on time."""
        work, lane, room = self.jobs.work, self.lanes[i], self._room[i]
        gap = np.searchsorted(lane, candidates)[:, None]
        own, due, given = work[candidates][:, None], self.jobs.due[candidates][:, None], work[lane][None, :]
        end = self._before[i][gap] + own
        place = np.arange(len(lane))[None, :]
        # The one replaced runs before the gap: all from its place on move by the difference, the candidate too.
        earlier = (end - given <= due) & (own - given <= room[gap])
        # It runs behind the gap: those in between wait for the whole candidate, so the first that cannot must go.
        stuck = (self._slack[i][None, :] < own) & (place >= gap)
        last = np.where(stuck.any(1), stuck.argmax(1), len(lane))[:, None]
        later = (end <= due) & (place <= last) & (own - given <= room[None, 1:])
        return np.where(place < gap, earlier, later)

    def move(self, chain: _Chain) -> None:
        """One more job is on time."""
        for job, i in zip(chain.jobs, chain.lanes, strict=True):
            self.home[job] = i
        for i in chain.lanes:
            self.lanes[i] = np.flatnonzero(self.home == i)
            self._refresh(i)
        self.count += 1

    def _refresh(self, i: int) -> None:
        work, due, lane = self.jobs.work, self.jobs.due, self.lanes[i]
        before = np.concatenate(([self._starts[i]], self._starts[i] + np.cumsum(work[lane])))
        slack = due[lane] - before[1:]
        require(bool((slack >= 0).all()), "an exchange made a job late")
        room = np.concatenate((np.minimum.accumulate(slack[::-1])[::-1], [_NEVER]))
        gap = np.searchsorted(lane, np.arange(len(self.home)))
        self.fits[i] = (before[gap] + work <= due) & (work <= room[gap])
        self.fits[i, lane] = False
        self._before[i], self._slack[i], self._room[i] = before, slack, room


def _fill(lanes: Lanes) -> bool:
    """Add jobs left out that fit as things are, the shortest first. Whether one did."""
    filled = False
    for job in lanes.left_out().tolist():
        where = np.flatnonzero(lanes.fits[:, job])
        if len(where):
            lanes.move(_Chain([job], [int(where[0])]))
            filled = True
    return filled


def _chains(lanes: Lanes) -> bool:
    """One search in breadth from all jobs left out; the chains of the least length that share no machine are moved."""
    parent = np.full(len(lanes.home), -1, dtype=np.int64)
    seen = np.zeros(len(lanes.home), dtype=bool)
    frontier = lanes.left_out()
    for _ in range(_CHAIN):
        reached = []
        for i, lane in enumerate(lanes.lanes):
            if len(lane) and len(frontier):
                replaceable = lanes.replaceable(i, frontier)
                new = replaceable.any(0) & ~seen[lane]
                parent[lane[new]] = frontier[replaceable.argmax(0)[new]]
                reached.append(lane[new])
        frontier = lanes.shortest(np.concatenate(reached)) if reached else frontier[:0]
        seen[frontier] = True
        if _move_all(lanes, parent, frontier):
            return True
    return False


def _move_all(lanes: Lanes, parent: Ints, ends: Ints) -> bool:
    """Chains that end with these jobs, one after the other, each on machines that none before it touched."""
    touched: set[int] = set()
    for end in ends[lanes.fits[:, ends].any(0)].tolist():
        jobs = [end]
        while parent[jobs[0]] >= 0:
            jobs.insert(0, int(parent[jobs[0]]))
        path = [int(lanes.home[job]) for job in jobs[1:]]
        sinks = [i for i in np.flatnonzero(lanes.fits[:, end]).tolist() if i not in path and i not in touched]
        used = {*path, *sinks[:1]}
        # A job left out that has found its place is the start of no other chain.
        if sinks and lanes.home[jobs[0]] < 0 and len(used) == len(path) + 1 and not used & touched:
            lanes.move(_Chain(jobs, [*path, sinks[0]]))
            touched |= used
    return bool(touched)
