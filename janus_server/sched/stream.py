"""Plans made in one pass by due date over all machines at once, the bound on any plan, and spreading one out.

`dispatch_best` calls these beside LST-IMH, which goes machine by machine. Pure; indices and nanoseconds of a `Columns`.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from .jobs import Columns

Kept = list[list[int]]


def stream(jobs: Columns, starts: Sequence[int], *, tight: bool, slips: Sequence[bool] = ()) -> Kept:
    """Job after job by due date goes behind what a machine has; where none can, the longest so far is given up.

    tight takes the busiest machine that is still in time, which leaves the others to jobs in a hurry and is mostly the
    better; otherwise it is the one free first, which is earliest-deadline-first list scheduling while all fit. Where
    slips[j], the next busiest after the tightest takes job j. O(n (log n + log m)), and m words moved a job.

    Example: machines at 0 and 2; (3, 5), (4, 6): tight puts the first at 2..5, the second at 0..4: both are on time.
    """
    loads = sorted((start, i) for i, start in enumerate(starts))
    ends, home, heap = list(starts), [-1] * len(jobs.jobs), list[int]()
    work, ranked, behind = jobs.work.tolist(), jobs.ranked.tolist(), len(starts)
    for j, (w, due, rank) in enumerate(zip(work, jobs.due.tolist(), jobs.rank.tolist(), strict=True)):
        if loads[0][0] + w > due:
            if not heap or rank <= heap[0]:
                continue
            # Its machine fits j in its stead: it ends no later than an earlier due date, and j is shorter.
            out = ranked[heapq.heappop(heap)]
            i, home[out] = home[out], -1
            del loads[bisect.bisect_left(loads, (ends[i], i))]
            ends[i] -= work[out]
            bisect.insort(loads, (ends[i], i))
        at = bisect.bisect_right(loads, (due - w, behind)) - 1 if tight else 0
        if slips and slips[j] and at > 0:
            at -= 1
        end, i = loads.pop(at)
        home[j], ends[i] = i, end + w
        bisect.insort(loads, (end + w, i))
        heapq.heappush(heap, rank)
    return by_machine(home, len(starts))


def most_possible(jobs: Columns, starts: Sequence[int]) -> int:
    """No plan has more jobs on time. O(n log n).

    All machines are taken for one that works through any job with all of them at once: by time d it has done what all
    can do between their starts and d. Moore-Hodgson with that in the place of the due dates is exact for it. Jobs that
    no single machine can finish in time are left out first. On random instances it lies 5 % above the optimum for a
    handful of jobs, and a job or two for 40 to 100.
    """
    order = sorted(starts)
    work, ranked = jobs.work.tolist(), jobs.ranked.tolist()
    capacity = total = at = 0
    clock = order[0]
    heap: list[int] = []
    for w, due, rank in zip(work, jobs.due.tolist(), jobs.rank.tolist(), strict=True):
        if w > due - order[0]:
            continue
        while at < len(order) and order[at] <= due:
            capacity += (order[at] - clock) * at
            clock = order[at]
            at += 1
        capacity += (due - clock) * at
        clock = due
        heapq.heappush(heap, rank)
        total += w
        if total > capacity:
            total -= work[ranked[heapq.heappop(heap)]]
    return len(heap)


def spread(jobs: Columns, starts: Sequence[int], kept: Kept) -> Kept:
    """The same jobs on time, started earlier: no machine stays empty while a job elsewhere would begin later than it.

    LST-IMH gives all it can to the busiest machines, so that a free one may stand idle beside a full plan. First the
    jobs are listed by due date on the machine free first; where that makes one late, each empty machine, earliest
    first, takes the job that begins last of all. That one ends sooner, the others no later. O(n log m).
    """
    listed = _listed(jobs, starts, sorted(j for lane in kept for j in lane))
    if listed is not None:
        return listed
    lanes, work = [list(lane) for lane in kept], jobs.work.tolist()
    # When the last job of each lane begins, negative for the heap.
    begins = [
        (work[lane[-1]] - start - sum(work[j] for j in lane), i)
        for i, (start, lane) in enumerate(zip(starts, lanes, strict=True))
        if lane
    ]
    heapq.heapify(begins)
    for start, i in sorted((start, i) for i, start in enumerate(starts) if not kept[i]):
        if not begins or -begins[0][0] <= start:
            break
        negative, other = begins[0]
        lanes[i] = [lanes[other].pop()]
        if lanes[other]:
            heapq.heapreplace(begins, (negative + work[lanes[other][-1]], other))
        else:
            heapq.heappop(begins)
    return lanes


def by_machine(home: Sequence[int], machines: int) -> Kept:
    """Job indices per machine, rising, from each job's machine (-1: none)."""
    lanes: Kept = [[] for _ in range(machines)]
    for j, i in enumerate(home):
        if i >= 0:
            lanes[i].append(j)
    return lanes


def _listed(jobs: Columns, starts: Sequence[int], chosen: Sequence[int]) -> Kept | None:
    free = [(start, i) for i, start in enumerate(starts)]
    heapq.heapify(free)
    work, due = jobs.work.tolist(), jobs.due.tolist()
    lanes: Kept = [[] for _ in starts]
    for j in chosen:
        end, i = free[0]
        if end + work[j] > due[j]:
            return None
        lanes[i].append(j)
        heapq.heapreplace(free, (end + work[j], i))
    return lanes
