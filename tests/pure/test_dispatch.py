"""Dispatch: guarantees against the exact optimum, valid plans, ties, the window, rivals, backlogs, and the cadence.

The optimum is found twice, by unrelated programs: over what the machines' loads can be (of the benchmark), and here
over all subsets of jobs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import dispatch_cases, dispatch_world
from bench.dispatch_cases import Case, case
from janus_server.errors import Bug
from janus_server.sched.backlog import Backlog, Cadence
from janus_server.sched.dispatch import Order, dispatch, dispatch_best, dispatch_live, iterate, turns
from janus_server.sched.exchange import Lanes, augment
from janus_server.sched.jobs import Job, Machine, Pick, Plan, Planner, columns, extended, starts_ns
from janus_server.sched.rivals import PLANNERS, edf, least_load, prism, round_robin
from janus_server.sched.stream import most_possible, spread, stream

# Where latest first keeps exactly 3/5 of the most possible, and earliest first exactly half.
TIGHT_LATEST = case([(6, 10), (3, 7), (6, 7), (6, 11), (5, 10), (11, 1), (2, 11)], [5, 3, 1])
TIGHT_EARLIEST = case([(4, 3), (2, 6), (2, 1), (4, 6), (3, 5), (7, 1)], [2, 3])

pairs = st.tuples(st.integers(1, 9), st.integers(0, 16))
starts = st.lists(st.integers(0, 7), min_size=1, max_size=4)
cases = st.builds(case, st.lists(pairs, max_size=9), starts)
# Times that are no whole seconds, with ties, no work, no deadline, and deadlines long past.
odd_jobs = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0, 5)), st.one_of(st.just(math.inf), st.floats(-5, 20), st.just(3.3)),
        st.floats(0, 3),
    ),
    max_size=30,
)  # fmt: skip


def subsets_on_time(given: Case) -> int:
    """The optimum over all subsets: what one machine can do in time, then machine after machine."""
    order = sorted(given.jobs, key=lambda job: job.deadline_s)
    whole = 1 << len(order)

    def feasible(start: float) -> list[bool]:
        # end[s]: a subset in order of deadlines ends with its last job.
        end, good = [start] * whole, [True] * whole
        for subset in range(1, whole):
            last = subset.bit_length() - 1
            rest = subset & ~(1 << last)
            end[subset] = end[rest] + order[last].work_s
            good[subset] = good[rest] and end[subset] <= order[last].deadline_s
        return good

    done = {0}
    for machine in given.machines:
        good = [subset for subset, fits in enumerate(feasible(machine.start_s)) if fits]
        done = {before | more for before in done for more in good if not before & more}
    return max(subset.bit_count() for subset in done)


def kept_of(plan: Plan) -> list[list[str]]:
    return [[job.id for job in lane.queue] for lane in plan.lanes]


def flat(lanes: list[list[int]]) -> list[int]:
    return sorted(j for lane in lanes for j in lane)


def valid(plan: Plan, given: Case) -> None:
    assert [lane.machine for lane in plan.lanes] == given.machines
    placed = [job.id for lane in plan.lanes for job in lane.queue]
    assert sorted(placed) == sorted(job.id for job in given.jobs)
    for lane in plan.lanes:
        assert len(lane.on_time) + len(lane.late) == len(lane.queue)


# --- guarantees -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.builds(case, st.lists(pairs, max_size=7), st.lists(st.integers(0, 7), min_size=1, max_size=3)))
def test_both_exact_searches_agree(given: Case) -> None:
    assert dispatch_cases.most_on_time(given) == subsets_on_time(given)


@settings(max_examples=300, deadline=None)
@given(cases, st.integers(0, 5))
def test_every_order_keeps_what_it_promises(given: Case, seed: int) -> None:
    m, most = len(given.machines), dispatch_cases.most_on_time(given)
    for order in Order:
        kept = dispatch(*given, order=order, seed=seed).on_time
        assert most / 2 <= kept <= most
        if m == 1:
            assert kept == most
    latest = dispatch(*given).on_time
    assert latest * (2 * m - 1) >= m * most
    assert latest <= dispatch_best(*given).on_time <= most
    assert dispatch_live(*given).on_time * (2 * m - 1) >= m * most
    assert most <= most_possible(columns(given.jobs), starts_ns(given.machines))


@settings(max_examples=150, deadline=None)
@given(st.lists(pairs, max_size=9), st.integers(1, 4), st.integers(0, 5))
def test_equal_starts_promise_more(jobs: list[tuple[int, int]], m: int, start: int) -> None:
    given = case(jobs, [start] * m)
    most = dispatch_cases.most_on_time(given)
    for order in Order:
        assert dispatch(*given, order=order).on_time >= (1 - (1 - 1 / m) ** m) * most - 1e-9


def test_the_tight_examples() -> None:
    assert subsets_on_time(TIGHT_LATEST) == 5
    assert dispatch(*TIGHT_LATEST).on_time == 3
    assert dispatch_best(*TIGHT_LATEST).on_time == 5
    assert dispatch_live(*TIGHT_LATEST).on_time == 5
    assert subsets_on_time(TIGHT_EARLIEST) == 2
    assert dispatch(*TIGHT_EARLIEST, order=Order.EARLIEST).on_time == 1
    assert dispatch(*TIGHT_EARLIEST).on_time == 2
    assert dispatch_best(*TIGHT_EARLIEST).on_time == 2


def test_seeded_instances_lose_little() -> None:
    """What is found beyond the published plan: of 400 instances a handful stays short of the optimum."""
    rng = np.random.default_rng(3)
    drawn = [dispatch_cases.small(rng, 2 + i % 3) for i in range(400)]
    most = [dispatch_cases.most_on_time(given) for given in drawn]
    published = [dispatch(*given).on_time for given in drawn]
    best = [dispatch_best(*given).on_time for given in drawn]
    assert sum(published) < 0.985 * sum(most)
    assert sum(best) >= 0.998 * sum(most)
    assert sum(b < m for b, m in zip(best, most, strict=True)) <= 4


def test_large_instances_lie_between_the_published_plan_and_the_bound() -> None:
    gained = 0
    for seed, load in enumerate((0.5, 1.0, 1.5)):
        given = dispatch_cases.backlog(np.random.default_rng(seed), 150, 8, load)
        published, best = dispatch(*given).on_time, dispatch_best(*given).on_time
        bound = most_possible(columns(given.jobs), starts_ns(given.machines))
        assert published <= best <= bound <= 1.06 * best
        gained += best - published
    assert gained >= 3


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS.keys())
@settings(max_examples=60, deadline=None)
@given(odd_jobs, st.lists(st.floats(0, 6), min_size=1, max_size=5))
def test_plans_are_valid_and_the_same_again(
    planner: Planner, jobs: list[tuple[float, float, float]], starts_s: list[float]
) -> None:
    given = Case(
        [Job(f"j{i}", work, due, arrived) for i, (work, due, arrived) in enumerate(jobs)],
        [Machine(f"m{i}", start) for i, start in enumerate(starts_s)],
    )
    plan = planner(*given)
    valid(plan, given)
    shuffled = [given.jobs[i] for i in np.random.default_rng(len(jobs)).permutation(len(jobs)).tolist()]
    assert kept_of(planner(shuffled, given.machines)) == kept_of(plan)


@settings(max_examples=150, deadline=None)
@given(cases, st.sampled_from(list(Order)))
def test_on_time_jobs_come_first_and_by_due_date(given: Case, order: Order) -> None:
    for plan in (dispatch(*given, order=order), dispatch_best(*given), dispatch_live(*given)):
        for lane in plan.lanes:
            on_time = lane.on_time
            assert lane.queue[: len(on_time)] == on_time
            assert [job.deadline_s for job in on_time] == sorted(job.deadline_s for job in on_time)
            ends = np.cumsum([lane.machine.start_s, *(job.work_s for job in lane.queue)])[1:].tolist()
            assert lane.finishes_s == pytest.approx(ends)
            assert all(end <= job.deadline_s for job, end in zip(on_time, ends, strict=False))


def test_tenths_of_seconds_add_up() -> None:
    """0.1 + 0.2 > 0.3 in floating point, and ten tenths are less than one."""
    assert dispatch([Job("a", 0.1, 0.3), Job("b", 0.2, 0.3)], [Machine("m", 0.0)]).on_time == 2
    assert dispatch([Job(f"j{i}", 0.1, 1.0) for i in range(10)], [Machine("m", 0.0)]).on_time == 10
    assert dispatch([Job("a", 0.1, 1e6 + 0.3), Job("b", 0.2, 1e6 + 0.3)], [Machine("m", 1e6)]).on_time == 2


def test_ties_go_by_arrival_then_id() -> None:
    late = [Job("b", 2, 3, arrival_s=1), Job("a", 2, 3, arrival_s=2), Job("c", 2, 3, arrival_s=1)]
    (lane,) = dispatch(late, [Machine("m", 0)]).lanes
    assert [job.id for job in lane.queue] == ["b", "c", "a"]
    # Of two equally long ones the one due later is given up.
    (lane,) = dispatch([Job("x", 4, 6), Job("y", 4, 7), Job("z", 1, 7)], [Machine("m", 0)]).lanes
    assert [job.id for job in lane.queue] == ["x", "z", "y"]
    # Machines that start together take turns by id, wherever they stand in the list.
    plan = dispatch([Job("only", 1, 9)], [Machine("n", 2), Machine("m", 2)])
    assert kept_of(plan) == [[], ["only"]]


def test_random_order_is_seeded() -> None:
    given = dispatch_cases.backlog(np.random.default_rng(0), 60, 6, 1.5)
    plans = [dispatch(*given, order=Order.RANDOM, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_what_is_late_goes_where_it_ends_soonest() -> None:
    jobs = [Job("a", 5, 5), Job("b", 1, 1), Job("late", 2, 0.5), Job("later", 9, 0.6), Job("last", 1, 0.7)]
    plan = dispatch(jobs, [Machine("m", 0), Machine("n", 0)])
    assert kept_of(plan) == [["b", "late", "later"], ["a", "last"]]
    ends = {job.id: end for lane in plan.lanes for job, end in zip(lane.queue, lane.finishes_s, strict=True)}
    assert ends == {"a": 5.0, "b": 1.0, "late": 3.0, "later": 12.0, "last": 6.0}


def test_ready_gives_the_first_job_of_each_free_machine() -> None:
    jobs = [Job("a", 1, 10), Job("b", 1, 11), Job("c", 1, 12)]
    plan = round_robin(jobs, [Machine("m", 5.0), Machine("n", 9.0)])
    assert plan.ready(4.0) == ()
    assert plan.ready(4.9, ahead_s=0.2) == (Pick("m", jobs[0]),)
    assert plan.ready(9.0) == (Pick("m", jobs[0]), Pick("n", jobs[1]))


def test_nobody_idles_beside_waiting_jobs() -> None:
    """The published order gives everything to the busy machine; the free one would wait."""
    given = Case([Job("a", 1, 30), Job("b", 1, 40)], [Machine("busy", 20), Machine("free", 0)])
    assert kept_of(dispatch(*given)) == [["a", "b"], []]
    assert kept_of(dispatch_best(*given)) == [[], ["a", "b"]]
    # Listing by due date would make the long one late, so only the empty machine is filled.
    table = columns([Job("a", 3, 7), Job("b", 6, 8), Job("c", 1, 8)])
    machine_starts = starts_ns([Machine("m", 0), Machine("n", 1), Machine("o", 1)])
    lanes = spread(table, machine_starts, [[1, 2], [0], []])
    assert flat(lanes) == [0, 1, 2]
    assert all(lanes)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_spreading_and_exchange_lose_nobody(given: Case) -> None:
    table, machine_starts = columns(given.jobs), starts_ns(given.machines)
    bound = most_possible(table, machine_starts)
    by_turns = iterate(table, machine_starts, turns(given.machines, machine_starts, Order.LATEST, 0))
    for kept in (by_turns, *(stream(table, machine_starts, tight=tight) for tight in (False, True))):
        more = augment(table, machine_starts, kept, bound)
        assert sum(map(len, kept)) <= sum(map(len, more)) <= bound
        for lanes in (kept, more, spread(table, machine_starts, more)):
            for start, lane in zip(machine_starts, lanes, strict=True):
                assert lane == sorted(lane)
                assert (start + np.cumsum(table.work[lane]) <= table.due[lane]).all()
        assert flat(more) == flat(spread(table, machine_starts, more))


def test_spreading_takes_the_job_that_begins_last() -> None:
    """By due date on the machine free first, y would make x late. c begins at 20, d at 17, b at 15."""
    jobs = [Job("x", 4, 4), Job("y", 1, 3), *(Job(name, 5, 100) for name in "abcd")]
    table, machine_starts = columns(jobs), starts_ns([Machine(f"m{s}", s) for s in (0, 2, 10, 17, 1, 1)])
    index = {job.id: j for j, job in enumerate(table.jobs)}
    lanes = spread(table, machine_starts, [[index[name] for name in lane] for lane in ("x", "y", "abc", "d", "", "")])
    assert ["".join(table.jobs[j].id for j in lane) for lane in lanes] == ["x", "y", "ab", "", "c", "d"]


@settings(max_examples=300, deadline=None)
@given(st.builds(case, st.lists(pairs, min_size=3, max_size=9), st.lists(st.integers(0, 7), min_size=3, max_size=6)))
def test_spreading_leaves_no_machine_empty_that_a_job_waits_longer_than(given: Case) -> None:
    table, machine_starts = columns(given.jobs), starts_ns(given.machines)
    kept = iterate(table, machine_starts, turns(given.machines, machine_starts, Order.LATEST, 0))
    lanes = spread(table, machine_starts, kept)
    free = min((start for start, lane in zip(machine_starts, lanes, strict=True) if not lane), default=math.inf)
    for start, lane in zip(machine_starts, lanes, strict=True):
        assert all(start + sum(table.work[j] for j in lane[:k]) <= free for k in range(len(lane)))


@settings(max_examples=150, deadline=None)
@given(cases)
def test_no_machine_is_left_empty_that_would_finish_a_job_sooner(given: Case) -> None:
    for plan in (dispatch_best(*given), dispatch_live(*given)):
        empty = [lane.machine.start_s for lane in plan.lanes if not lane.on_time]
        for lane in plan.lanes:
            for job, end_s in zip(lane.on_time, lane.finishes_s, strict=False):
                assert all(start_s + job.work_s >= end_s for start_s in empty)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_exchange_sees_exactly_who_can_take_whose_place(given: Case) -> None:
    table, machine_starts = columns(given.jobs), starts_ns(given.machines)
    lanes = Lanes(table, machine_starts, stream(table, machine_starts, tight=True))

    def in_time(start: int, chosen: list[int]) -> bool:
        return bool((start + np.cumsum(table.work[sorted(chosen)]) <= table.due[sorted(chosen)]).all())

    for i, start in enumerate(machine_starts):
        lane = lanes.lanes[i].tolist()
        others = [j for j in range(len(given.jobs)) if j not in lane]
        seen = lanes.replaceable(i, np.array(others, dtype=np.int64)).tolist() if lane and others else []
        assert seen == [[in_time(start, [*(k for k in lane if k != out), j]) for out in lane] for j in others if lane]
        assert [bool(lanes.fits[i, j]) for j in others] == [in_time(start, [*lane, j]) for j in others]


def test_exchange_finds_what_no_pass_does() -> None:
    given = case([(6, 11), (8, 10), (6, 11), (3, 8), (9, 2), (2, 5), (5, 9)], [4, 3, 1])
    table, machine_starts = columns(given.jobs), starts_ns(given.machines)
    passes = [stream(table, machine_starts, tight=tight) for tight in (False, True)]
    orders = [turns(given.machines, machine_starts, order, 0) for order in (Order.LATEST, Order.EARLIEST)]
    passes += [iterate(table, machine_starts, order) for order in orders]
    assert max(len(flat(kept)) for kept in passes) == 4
    assert dispatch_best(*given).on_time == dispatch_cases.most_on_time(given) == 5


def test_the_live_plan_does_not_fall_below_its_promise() -> None:
    """The pass alone keeps one of two: 4 seconds go to the machine free first, which the 6 would have needed."""
    given = case([(6, 1), (4, 10), (9, 7), (6, 10), (3, 2)], [4, 5])
    kept = stream(columns(given.jobs), starts_ns(given.machines), tight=False)
    assert len(flat(kept)) == 1
    assert dispatch_live(*given).on_time == dispatch_cases.most_on_time(given) == 2


def test_the_live_plan_gives_up_a_little_of_what_is_known() -> None:
    given = dispatch_cases.backlog(np.random.default_rng(2), 120, 6, 1.5)
    table, machine_starts = columns(given.jobs), starts_ns(given.machines)
    kept = stream(table, machine_starts, tight=False)
    plan = dispatch_live(*given)
    assert plan.on_time == len(flat(kept)) < dispatch_best(*given).on_time
    names = [[table.jobs[j].id for j in lane] for lane in kept]
    assert [[job.id for job in lane.on_time] for lane in plan.lanes] == names


def test_the_bound_leaves_out_what_no_machine_can_do() -> None:
    """Two machines have six seconds in three, but none has five."""
    assert most_possible(columns([Job("a", 5, 3)]), [0, 0]) == 0
    assert most_possible(columns([Job("a", 3, 3), Job("b", 3, 3), Job("c", 1, 3)]), [0, 0]) == 2


def test_exchange_follows_a_chain_of_two() -> None:
    """b takes a's place, a takes c's, and c fits before d. No single move helps: only c fits anywhere else."""
    table = columns([Job("a", 3, 4), Job("b", 4, 4), Job("c", 4, 6), Job("d", 2, 9), Job("e", 5, 9)])
    machine_starts = starts_ns([Machine("m", 1), Machine("n", 0), Machine("o", 2)])
    assert augment(table, machine_starts, [[2], [0, 4], [3]], bound=5) == [[0], [1, 4], [2, 3]]
    # Where the bound says that there is nothing to gain, nothing is moved.
    assert augment(table, machine_starts, [[2], [0, 4], [3]], bound=4) == [[2], [0, 4], [3]]


def test_the_window_keeps_every_job_in_the_plan() -> None:
    given = dispatch_cases.backlog(np.random.default_rng(5), 900, 4, 1.2)
    narrow = dispatch_best(*given, most_pairs=4)
    valid(narrow, given)
    assert narrow.on_time <= dispatch_best(*given).on_time
    valid(dispatch_live(*given, most_jobs=100), given)
    # All can be on time one after the other; what is looked at is what is due first.
    chain = case([(1, i + 1) for i in range(300)], [0])
    for plan in (dispatch_best(*chain, most_pairs=1), dispatch_live(*chain, most_jobs=256)):
        assert kept_of(plan) == [[f"j{i}" for i in range(300)]]


def test_no_jobs_and_no_machines() -> None:
    for planner in PLANNERS.values():
        assert planner([], [Machine("m", 3.0)]).on_time == 0
    with pytest.raises(Bug):
        dispatch([Job("a", 1, 2)], [])
    for bad in (Job("a", -1, 2), Job("a", math.nan, 2), Job("a", 1e9, 2), Job("a", 1, math.nan)):
        with pytest.raises(Bug):
            dispatch([bad], [Machine("m", 0)])


def test_a_longer_objective() -> None:
    job = Job("a", 1.0, 4.0, arrival_s=0.0)
    assert extended(job, 3.0) == job
    later = extended(job, 5.0)
    assert later is not None and later.deadline_s == 8.0
    assert extended(later, 20.0, most=2.0) is None
    assert extended(Job("b", 1, math.inf), 1e9) == Job("b", 1, math.inf)


# --- rivals -----------------------------------------------------------------------------------------------------------


def test_rivals_do_what_their_names_say() -> None:
    jobs = [Job("a", 3, 9, 0.0), Job("b", 1, 2, 0.1), Job("c", 1, 1, 0.2), Job("d", 5, 4, 0.3)]
    machines = [Machine("m", 0), Machine("n", 2)]
    assert kept_of(round_robin(jobs, machines)) == [["a", "c"], ["b", "d"]]
    assert kept_of(round_robin(jobs, [*machines, Machine("o", 0)], first=1)) == [["c"], ["a", "d"], ["b"]]
    assert kept_of(least_load(jobs, machines)) == [["a", "c"], ["b", "d"]]
    assert kept_of(edf(jobs, machines)) == [["c", "b", "d"], ["a"]]
    # c cannot be in time behind a, but ahead of it; b and d cannot be on the machine they were sent to.
    assert kept_of(prism(jobs, machines)) == [["c", "a"], ["b", "d"]]
    assert [planner(jobs, machines).on_time for planner in (least_load, prism, edf)] == [1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(cases)
def test_prism_arbitrates_each_queue_exactly(given: Case) -> None:
    routed = least_load(*given)
    for lane, own in zip(prism(*given).lanes, routed.lanes, strict=True):
        assert sorted(job.id for job in lane.queue) == sorted(job.id for job in own.queue)
        assert len(lane.on_time) == dispatch_cases.most_on_time(Case(list(own.queue), [own.machine]))


# --- backlogs ---------------------------------------------------------------------------------------------------------


def test_the_backlog_of_the_docstring() -> None:
    backlog = Backlog()
    backlog.given("a", 2.0, 10.0)
    backlog.given("b", 1.0, 10.0)
    assert backlog.start_s(10.0) == 13.0
    assert backlog.expected_s(10.0) == (("a", 12.0), ("b", 13.0))
    # Overdue: it may be done any moment, and b comes after it.
    assert backlog.start_s(12.4) == pytest.approx(13.4)
    backlog.finished("a", 12.5)
    assert backlog.start_s(12.5) == pytest.approx(12.5 + 3.45 / 2.95)
    backlog.cancelled("b", 12.6)
    assert len(backlog) == 0
    assert backlog.start_s(12.6) == 12.6
    backlog.cancelled("b", 12.7)
    backlog.finished("b", 12.8)
    assert backlog.start_s(12.8) == 12.8


events = st.lists(
    st.tuples(st.sampled_from(["given", "finished", "cancelled"]), st.integers(0, 5), st.floats(0, 2)), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(events)
def test_a_backlog_never_promises_the_past_nor_loses_work(what: list[tuple[str, int, float]]) -> None:
    backlog, now_s, held = Backlog(), 0.0, dict[str, float]()
    for kind, number, amount in what:
        job = f"j{number}"
        now_s += amount / 3
        if kind == "given" and job not in held:
            before = backlog.start_s(now_s)
            backlog.given(job, amount, now_s)
            held[job] = amount
            # A job more costs its own predicted time, corrected, and changes nothing for those before.
            assert backlog.start_s(now_s) == pytest.approx(before + backlog.correction * amount)
        elif kind == "finished":
            backlog.finished(job, now_s)
            held.pop(job, None)
        elif kind == "cancelled":
            before = backlog.start_s(now_s)
            backlog.cancelled(job, now_s)
            if job in held and next(iter(held)) != job:
                assert backlog.start_s(now_s) <= before + 1e-9
            held.pop(job, None)
        expected = backlog.expected_s(now_s)
        ends = [end for _, end in expected]
        assert [name for name, _ in expected] == list(held)
        assert ends == sorted(ends) and all(end >= now_s for end in ends)
        assert backlog.start_s(now_s) <= now_s + backlog.correction * sum(held.values()) + 1e-9
        assert 0.25 <= backlog.correction <= 4.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_a_backlog_learns_how_long_a_predicted_second_takes(factor: float) -> None:
    backlog, now_s = Backlog(), 0.0
    for i in range(120):
        backlog.given(f"j{i}", 0.2, now_s)
        backlog.given(f"k{i}", 0.1, now_s)
        # Both in one batch, and done together: the sums are right all the same.
        now_s += 0.3 * factor
        backlog.finished(f"j{i}", now_s)
        backlog.finished(f"k{i}", now_s)
    assert backlog.correction == pytest.approx(factor, rel=0.02)


def test_another_than_the_first_may_be_done() -> None:
    backlog = Backlog()
    for job, work_s in (("a", 4.0), ("b", 1.0), ("c", 1.0)):
        backlog.given(job, work_s, 0.0)
    backlog.finished("b", 3.0)
    # Two of the three seconds went to a: two of it are left, and c.
    assert backlog.expected_s(3.0) == (("a", 5.0), ("c", 6.0))
    assert backlog.correction == 1.0
    with pytest.raises(Bug):
        backlog.given("a", 1.0, 3.0)


def test_what_others_got_meanwhile_is_counted_in_predicted_seconds() -> None:
    backlog = Backlog()
    backlog.given("slow", 1.0, 0.0)
    backlog.finished("slow", 3.05)
    assert backlog.correction == pytest.approx(4.0 / 1.95)
    backlog.given("a", 4.0, 10.0)
    backlog.given("b", 1.0, 10.0)
    backlog.finished("b", 10.0 + 3.0 * backlog.correction)
    assert backlog.start_s(0.0) == pytest.approx(10.0 + 5.0 * backlog.correction)


def test_after_a_cancel_the_next_one_begins() -> None:
    backlog = Backlog()
    backlog.given("a", 4.0, 0.0)
    backlog.given("b", 2.0, 0.0)
    backlog.given("c", 1.0, 0.0)
    backlog.cancelled("b", 1.0)
    assert backlog.start_s(1.0) == 5.0
    backlog.cancelled("a", 3.0)
    assert backlog.start_s(3.0) == 4.0


def test_the_cadence_of_plans() -> None:
    cadence = Cadence(0.005)
    assert cadence.due_s() == math.inf
    cadence.changed(1.0)
    assert cadence.due_s() == 1.0
    cadence.planned(1.0)
    assert cadence.due_s() == math.inf
    cadence.changed(1.001)
    cadence.changed(1.002)
    assert cadence.due_s() == 1.005
    cadence.planned(1.006)
    cadence.changed(2.0)
    cadence.changed(3.0)
    assert cadence.due_s() == 2.0


def test_a_burst_makes_few_plans() -> None:
    cadence, plans = Cadence(0.01), 0
    for i in range(1_000):
        now_s = i * 1e-4
        cadence.changed(now_s)
        if cadence.due_s() <= now_s:
            cadence.planned(now_s)
            plans += 1
    assert 9 <= plans <= 11


# --- the small world of the benchmark ---------------------------------------------------------------------------------


def test_as_jobs_keep_coming_the_live_plan_serves_most() -> None:
    def shares(load: float) -> dict[str, float]:
        rows = dispatch_cases.drawn_rows(np.random.default_rng(1), 200)
        requests = dispatch_world.arrivals(np.random.default_rng(2), rows, 4, load, 0.1)
        made = dispatch_world.policies()
        return {name: dispatch_world.on_time(requests, 4, policy) / 200 for name, policy in made.items()}

    light, heavy = shares(0.5), shares(1.5)
    assert all(share > 0.9 for share in (light["ours, live"], light["ours, best"], light["EDF"]))
    assert heavy["ours, live"] > 1.2 * max(heavy["round robin"], heavy["least load"])
    # The published order leaves the free machine what the busy ones could not take.
    assert heavy["ours, live"] >= heavy["LST-IMH, earliest first"] - 0.02 > heavy["LST-IMH, latest first"]
