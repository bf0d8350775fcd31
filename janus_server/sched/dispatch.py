"""Which waiting request runs on which device: LST-IMH (Latest-Start-Time Iterative Moore-Hodgson), and two beyond it.

The leader plans when something has happened, hands the first job of each free machine over (`Plan.ready`) and plans the
rest anew at the next event. `dispatch` is the published algorithm, in each order of the machines. `dispatch_best` keeps
most of the jobs that are known; `dispatch_live` serves most when others keep coming. Pure, and exact in whole
nanoseconds: equal inputs make equal plans. None drops a job: what cannot be on time comes after what can, or is planned
again with a longer objective (`jobs.extended`).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .exchange import augment
from .jobs import Columns, Ints, Job, Machine, Plan, assemble, columns, starts_ns, subset
from .stream import most_possible, spread, stream

Kept = list[list[int]]
# One decision looks at this many pairs of job and machine (4,000 jobs x 32 devices); further jobs wait for their turn.
MOST_PAIRS: Final = 128_000
_LEAST_WINDOW: Final = 256
# For a single pass over the jobs, whatever the number of machines.
MOST_STREAMED: Final = 8_000
# What is spent beyond both kinds of stream and the published plan, in jobs x passes: a pass costs about a microsecond a
# job. Up to 100 jobs get all 16 tries (which bring as much as the exchange does), 800 jobs the exchange, more neither.
EXTRA_JOBS: Final = 1_600
_TRIES: Final = 16
_SLIP_SHARE: Final = 0.3


class Order(enum.Enum):
    """In which order the machines take their turn. LATEST is the published one and has the better guarantee."""

    LATEST = "latest"
    EARLIEST = "earliest"
    RANDOM = "random"


def dispatch(jobs: Sequence[Job], machines: Sequence[Machine], order: Order = Order.LATEST, seed: int = 0) -> Plan:
    """LST-IMH: machine after machine takes the most jobs it can finish in time of those left. O(m n log n).

    Of the most jobs that could be on time it keeps a share of at least 1/2 in any order, m/(2m-1) latest start first,
    1-(1-1/m)^m where all start together, and all of them on one machine. Ties: jobs by deadline, arrival, id; the job
    given up is the longest, of equals the later one by that order; machines by id. seed is for RANDOM alone.

    Example: machines that start at 2 and 3, jobs (work, deadline) a (4, 3), b (2, 6), c (2, 1), d (4, 6), e (3, 5),
    f (7, 1). The one at 3 has its turn first: b (3 + 2 <= 6; e and d then do not fit). The one at 2 takes e
    (2 + 3 <= 5; d does not fit). Two are on time, the most there can be. Earliest first, the machine at 2 takes b,
    and the one at 3 can finish none of the others: one.
    """
    table, starts = columns(jobs), starts_ns(machines)
    return assemble(table, machines, iterate(table, starts, turns(machines, starts, order, seed)))


def dispatch_best(
    jobs: Sequence[Job], machines: Sequence[Machine], most_pairs: int = MOST_PAIRS, extra_jobs: int = EXTRA_JOBS
) -> Plan:
    """At least as many jobs on time as `dispatch` latest first, mostly more, and no machine idle beside waiting jobs.

    The best of both orders of the machines and of streams (one pass by due date over all machines at once), then jobs
    left out exchanged in along short chains, until a bound says that there is no more to gain; what is on time is then
    spread so that it starts early. All within O(m n log n): a fixed number of passes, candidates and rounds.

    Example: machines at 5, 3 and 1, jobs (6, 10), (3, 7), (6, 7), (6, 11), (5, 10), (11, 1), (2, 11): latest first
    keeps three, this the five that are possible.

    Only jobs that some machine could finish in time are looked at, the earliest due first, as many as most_pairs
    allows; the guarantee is about those.
    """
    table, starts = columns(jobs), starts_ns(machines)
    chosen = _window(table, starts, max(_LEAST_WINDOW, len(machines), most_pairs // len(machines)))
    part = subset(table, chosen)
    kept = spread(part, starts, _search(part, machines, starts, extra_jobs))
    return assemble(table, machines, [chosen[lane].tolist() if lane else [] for lane in kept])


def dispatch_live(jobs: Sequence[Job], machines: Sequence[Machine], most_jobs: int = MOST_STREAMED) -> Plan:
    """One pass by due date over all machines, the longest given up when none can: for jobs that keep coming.

    A plan that keeps the most of what is known fills the machines to the last deadline, with long jobs too, and what
    comes next finds no room. This one starts what is due first on the machine that is free first, and gives up long
    jobs early. It keeps its promise of m/(2m-1) all the same: where it cannot be sure to have kept that share of the
    most possible, `dispatch_best` plans instead. O(n log n).

    Example: machines at 0 and 1, jobs a (3, 4), b (2, 4), c (2, 5): a runs 0..3, b 1..3, c 3..5.
    """
    table, starts = columns(jobs), starts_ns(machines)
    chosen = _window(table, starts, most_jobs)
    part = subset(table, chosen)
    kept = stream(part, starts, tight=False)
    if _count(kept) * (2 * len(machines) - 1) < most_possible(part, starts) * len(machines):
        return dispatch_best(jobs, machines)
    return assemble(table, machines, [chosen[lane].tolist() if lane else [] for lane in kept])


def turns(machines: Sequence[Machine], starts: Sequence[int], order: Order, seed: int) -> list[int]:
    """Indices of the machines in the order they take their turn."""
    by_id = sorted(range(len(machines)), key=lambda i: machines[i].id)
    if order is Order.RANDOM:
        return [by_id[i] for i in np.random.default_rng(seed).permutation(len(by_id)).tolist()]
    sign = -1 if order is Order.LATEST else 1
    return sorted(by_id, key=lambda i: sign * starts[i])


def iterate(jobs: Columns, starts: Sequence[int], order: Sequence[int]) -> Kept:
    """Moore-Hodgson on each machine in this order over what those before left. Job indices per machine, rising."""
    kept: Kept = [[] for _ in starts]
    pool = np.arange(len(jobs.jobs))
    latest = int((jobs.due - jobs.work).max(initial=min(starts) - 1))
    ranked_work = jobs.work[jobs.ranked].tolist()
    for i in order:
        # Most machines of a large cluster are busy for longer than the waiting jobs have time, or come after the last.
        if starts[i] > latest:
            continue
        if not len(pool):
            break
        inside = moore_hodgson(jobs, ranked_work, pool, starts[i])
        kept[i] = pool[inside].tolist()
        pool = pool[~inside]
    return kept


def moore_hodgson(jobs: Columns, ranked_work: Sequence[int], pool: Ints, start: int) -> npt.NDArray[np.bool_]:
    """Which jobs of the pool to run on one machine from `start` so that most are on time. O(n log n), exact.

    pool [k] holds indices by due date, rising; the result is [k]. ranked_work is the work of each rank.

    Example: from 0, (work, due) (5, 6), (2, 7), (2, 8): 5 fits, 5 + 2 fits, 5 + 2 + 2 > 8 gives up the 5: the last two.
    """
    inside = jobs.work[pool] <= jobs.due[pool] - start
    # A job longer than its own time would be the longest at its turn, since those before it fit: given up at once.
    pool = pool[inside]
    work, due = jobs.work[pool], jobs.due[pool]
    overdue = start + np.cumsum(work) > due
    cut = int(overdue.argmax()) if len(pool) else 0
    if not len(pool) or not overdue[cut]:
        return inside
    ranks = jobs.rank[pool].tolist()
    # The top is the longest: the smallest rank.
    heap = ranks[:cut]
    heapq.heapify(heap)
    end = start + int(work[:cut].sum())
    for w, d, rank in zip(work[cut:].tolist(), due[cut:].tolist(), ranks[cut:], strict=True):
        if end + w <= d:
            heapq.heappush(heap, rank)
            end += w
        elif rank > heap[0]:
            end += w - ranked_work[heapq.heapreplace(heap, rank)]
    chosen = np.zeros(len(jobs.jobs), dtype=bool)
    chosen[jobs.ranked[heap]] = True
    inside[inside] = chosen[pool]
    return inside


def _window(jobs: Columns, starts: Sequence[int], most: int) -> Ints:
    """The jobs worth looking at: those that the machine free first could finish in time, the earliest due first."""
    return np.flatnonzero(jobs.work <= jobs.due - min(starts))[:most]


def _search(jobs: Columns, machines: Sequence[Machine], starts: Sequence[int], extra: int) -> Kept:
    """The plan with the most jobs on time that was found; the search ends where the bound is reached."""
    bound = most_possible(jobs, starts)
    found: list[Kept] = []

    def reached(kept: Kept) -> bool:
        found.append(kept)
        return _count(kept) == bound

    if reached(stream(jobs, starts, tight=False)) or reached(stream(jobs, starts, tight=True)):
        return found[-1]
    n = len(jobs.jobs)
    # Earliest first is the worse of the two, but now and then the better on a handful of jobs.
    for order in (Order.LATEST, Order.EARLIEST)[: 2 if 2 * n <= extra else 1]:
        if reached(iterate(jobs, starts, turns(machines, starts, order, 0))):
            return found[-1]
    # A fixed seed: the same jobs make the same plan, whenever and wherever it is made again.
    for slips in np.random.default_rng(n).random((min(_TRIES, extra // n), n)) < _SLIP_SHARE:
        if reached(stream(jobs, starts, tight=True, slips=slips.tolist())):
            return found[-1]
    most = max(map(_count, found))
    best = [kept for kept in found if _count(kept) == most]
    # Where several keep equally many, some can be bettered and some not.
    improved = [augment(jobs, starts, kept, bound) for kept in best[: extra // (2 * n)]]
    return max([best[0], *improved], key=_count)


def _count(kept: Kept) -> int:
    return sum(map(len, kept))
