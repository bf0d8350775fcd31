"""Turns between co-resident models: who goes first, how far a step is cut, that nobody starves; on simulated time."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_turn import Arrival, Policy, RoundRobin, Scripted, Speed, World, attained, promised

from janus_server.errors import Bug
from janus_server.sched.cost import Shape
from janus_server.sched.outlook import LEAST_TOKENS
from janus_server.sched.sequence import UNPROMISED_TPOT_S, UNPROMISED_TTFT_S, Sequence
from janus_server.sched.turn import PATIENCE, Turn

EVEN = Speed(fixed_s=0.010, decode_s=0.0, token_s=0.001)


def world(*speeds: Speed, policy: Policy | None = None, **limits: int | bool) -> World:
    """Models whose costs are known from the start, as after some steps."""
    made = World(policy if policy is not None else Turn(), speeds, **limits)
    if isinstance(made.policy, Turn):
        teach(made.policy, made.speeds)
    return made


def teach(turn: Turn, speeds: dict[str, Speed]) -> None:
    pick = random.Random(0)
    for model, speed in speeds.items():
        cost = turn._costs[model]
        for _ in range(200):
            decodes, prompt = pick.randrange(1, 40), pick.choice([0, pick.randrange(2, 300)])
            shape = Shape(decodes, prompt, decodes * pick.randrange(400) + prompt * pick.randrange(400))
            cost.observe(shape, speed.of(shape))


def offered(made: World) -> list[tuple[str, int | None]]:
    at_work = [(name, batcher) for name, batcher in made.batchers.items() if not batcher.idle]
    return [(one.model, one.prompt_tokens) for one in made.policy.choices(made.now, at_work)]


def stream(made: World, model: int, name: str, *, ttft_s: float = 5.0, tpot_s: float = 0.05, priority: int = 0) -> None:
    """A stream that has its first token now: the next one is due in tpot_s."""
    batcher = made.batchers[made.names[model]]
    batcher.add(promised(name, 1, 400, ttft_s, tpot_s, priority), made.now)
    batch = batcher.plan(made.now)
    assert batch is not None
    batcher.commit(batch, *made.node.memory.run(batch), made.now)


class TestOrder:
    def test_docstring_example(self) -> None:
        made = world(EVEN, Speed(0.001, 0.0, 0.001))
        stream(made, 0, "a", tpot_s=0.030)
        stream(made, 1, "b", tpot_s=0.025)
        assert [model for model, _ in offered(made)] == ["m0", "m1"]
        made.batchers["m0"].add(promised("long", 300, 4, 5.0, None), made.now)
        (first, tokens), _ = offered(made)
        # b can wait for 24 ms, of which 80 % are used: 10 ms for the step itself and what is left for 9 tokens.
        assert first == "m0" and tokens is not None and tokens == pytest.approx(9, abs=1)

    def test_alone_a_model_has_its_whole_step(self) -> None:
        made = world(EVEN, EVEN)
        made.batchers["m1"].add(promised("a", 300, 4, 0.001, None), 0.0)
        assert offered(made) == [("m1", None)]

    def test_alone_its_own_prompts_leave_its_streams_their_promised_pace(self) -> None:
        made = world(EVEN)
        stream(made, 0, "a", tpot_s=0.100)
        made.batchers["m0"].add(promised("b", 300, 4, 5.0, None), 0.0)
        ((_, tokens),) = offered(made)
        assert tokens == pytest.approx(70, abs=2)
        unpromised = world(EVEN)
        unpromised.batchers["m0"].add(promised("a", 1, 50, None, None), 0.0)
        unpromised.step()
        unpromised.batchers["m0"].add(promised("b", 300, 4, 5.0, None), 0.0)
        assert offered(unpromised) == [("m0", None)]

    def test_a_prompt_that_is_due_soon_goes_before_a_stream_that_is_ahead(self) -> None:
        made = world(EVEN, EVEN)
        stream(made, 0, "a", tpot_s=0.200)
        made.batchers["m1"].add(promised("b", 100, 4, 0.180, None), 0.0)
        assert [model for model, _ in offered(made)] == ["m1", "m0"]

    def test_what_is_late_waits_where_it_would_make_others_late(self) -> None:
        made = world(EVEN, EVEN)
        made.batchers["m0"].add(promised("late", 200, 4, 0.010, None), 0.0)
        stream(made, 1, "a", tpot_s=0.025)
        assert [model for model, _ in offered(made)] == ["m1", "m0"]

    def test_what_is_late_goes_first_where_others_can_spare_it(self) -> None:
        made = world(EVEN, EVEN)
        made.batchers["m0"].add(promised("late", 200, 4, 0.010, None), 0.0)
        stream(made, 1, "a", tpot_s=0.200)
        (first, tokens), (second, _) = offered(made)
        assert (first, second) == ("m0", "m1")
        assert tokens == pytest.approx(0.8 * 190 - 10, abs=3)

    def test_among_the_late_higher_priority_first(self) -> None:
        made = world(EVEN, EVEN, EVEN)
        for i, priority in enumerate((0, 2, 1)):
            made.batchers[f"m{i}"].add(promised(f"r{i}", 200, 4, 0.010, None, priority), 0.0)
        assert [model for model, _ in offered(made)] == ["m1", "m2", "m0"]

    def test_no_step_goes_before_one_of_higher_priority_that_it_would_make_late(self) -> None:
        for priority, first in ((0, "m0"), (1, "m1"), (-1, "m0")):
            made = world(EVEN, Speed(0.006, 0.0, 0.001))
            stream(made, 0, "a", tpot_s=0.012)
            stream(made, 1, "b", tpot_s=0.014, priority=priority)
            assert offered(made)[0][0] == first

    def test_a_model_that_has_no_room_is_passed_over(self) -> None:
        made = world(EVEN, EVEN, pages=10)
        made.batchers["m0"].add(promised("large", 130, 30, 9.0, None), 0.0)
        assert made.step()
        made.batchers["m1"].add(promised("urgent", 140, 20, 0.3, None), made.now)
        for _ in range(20):
            assert made.step()
        assert {step.model for step in made.steps} == {"m0"}
        made.run([])
        assert len(made.tokens["large"]) == 30 and len(made.tokens["urgent"]) == 20


class TestSequences:
    def test_when_tokens_are_due(self) -> None:
        seq = Sequence(1, promised("a", 4, 99, 0.5, 0.1), 0, 10.0)
        assert seq.due_s == 10.5
        dues = []
        for now in (10.2, 10.25, 10.4, 12.0, 12.05):
            seq.tokens.append(0)
            seq.drew(now)
            dues.append(round(seq.due_s, 3))
        # Early ones move the next one forward; of a long delay no more than OWED_TOKENS is made up for.
        assert dues == [10.3, 10.35, 10.45, 12.1 - 0.4, 12.15 - 0.35]

    def test_who_was_promised_nothing_has_a_readers_patience(self) -> None:
        seq = Sequence(1, promised("a", 4, 9, None, 0.1), 0, 10.0)
        assert (seq.due_s, seq.lane.pace_s, seq.lane.paced) == (10.0 + UNPROMISED_TTFT_S, 0.1, True)
        seq = Sequence(1, promised("a", 4, 9, None, None), 0, 10.0)
        assert (seq.lane.pace_s, seq.lane.paced) == (UNPROMISED_TPOT_S, False)

    def test_a_class_of_priority_is_worth_a_second_of_age(self) -> None:
        made = world(EVEN, sequences=1)
        for name, at_s, priority in (("old", 0.0, 0), ("high", 0.9, 1), ("new", 0.1, 0), ("late", 1.2, 1)):
            made.batchers["m0"].add(promised(name, 4, 1, None, None, priority), at_s)
        assert [seq.request.id for seq in made.batchers["m0"].waiting] == ["high", "old", "new", "late"]

    def test_choices_with_a_pace_are_counted_until_they_end(self) -> None:
        made = world(EVEN)
        batcher = made.batchers["m0"]
        batcher.add(msgspec.structs.replace(promised("a", 4, 3, None, 0.1), n=3), 0.0)
        batcher.add(promised("b", 4, 3, 0.1, None), 0.0)
        made.step()
        assert batcher.paced == 3
        batcher.cancel("a", 1)
        assert batcher.paced == 2
        made.run([])
        assert batcher.paced == 0
        batcher.add(promised("c", 4, 3, None, 0.1), 0.0)
        batcher.cancel_all()
        assert batcher.paced == 0

    def test_a_cut_step_goes_on_with_prompts_and_leaves_no_stream_out(self) -> None:
        made = world(EVEN, step_tokens=40)
        batcher = made.batchers["m0"]
        for i in range(3):
            batcher.add(promised(f"s{i}", 1, 50, None, None), 0.0)
        made.step()
        for i in range(2):
            batcher.add(promised(f"p{i}", 100, 1, None, None), 0.0)
        batch = batcher.plan(0.0, 7)
        assert batch is not None and [len(c.tokens) for c in batch.chunks] == [1, 1, 1, 4, 3]
        with pytest.raises(Bug):
            batcher.plan(0.0, 0)


class TestBudget:
    def test_the_streams_of_others_bound_a_prompts_chunk(self) -> None:
        made = world(EVEN, EVEN, step_tokens=512)
        for i in range(3):
            stream(made, 0, f"s{i}", tpot_s=0.100)
        made.batchers["m1"].add(promised("flood", 2000, 2, 60.0, None), 0.0)
        made.run([], until_s=1.0)
        chunks = [step.shape.prompt_tokens for step in made.steps if step.model == "m1"]
        assert chunks and max(chunks) <= 0.8 * 100 and sum(chunks) > 300
        assert all(step.took_s <= 0.8 * 0.1 + 1e-6 for step in made.steps)

    def test_a_step_is_never_cut_below_the_smallest_chunk(self) -> None:
        made = world(Speed(0.05, 0.0, 0.001), EVEN)
        stream(made, 0, "a", tpot_s=0.055)
        made.batchers["m1"].add(promised("long", 500, 2, 0.1, None), 0.0)
        made.run([], until_s=3.0)
        chunks = [step.shape.prompt_tokens for step in made.steps if step.model == "m1"]
        assert min(chunks[:20]) >= LEAST_TOKENS

    def test_what_is_late_is_slowed_but_not_stopped_by_long_prompts(self) -> None:
        slow = Speed(0.060, 0.0, 0.001)
        made = world(slow, EVEN, step_tokens=1024)
        stream(made, 0, "hopeless", tpot_s=0.050)
        made.batchers["m1"].add(promised("long", 4000, 2, 60.0, None), 0.0)
        made.run([], until_s=4.0)
        assert max(step.took_s for step in made.steps if step.model == "m1") <= 0.050 + 1e-6
        assert len(made.tokens["hopeless"]) >= 4.0 / (PATIENCE * 0.050 + 0.060)


def starving(steps: Seq[tuple[str, tuple[str, ...]]]) -> int:
    """The longest run of steps in which a model had work and did not run."""
    waits: dict[str, int] = {}
    longest = 0
    for model, at_work in steps:
        waits = {other: waits.get(other, 0) + 1 for other in at_work if other != model}
        longest = max(longest, *waits.values(), 0)
    return longest


def load(pick: random.Random, models: int, requests: int, spacing_s: float) -> list[Arrival]:
    now, arrivals = 0.0, []
    for i in range(requests):
        now += pick.expovariate(1 / spacing_s)
        prompt, tokens = pick.choice([1, 5, 20, 100, 400]), pick.randint(1, 30)
        ttft_s, tpot_s = pick.choice([None, 0.1, 0.3, 1.0, 3600.0]), pick.choice([None, 0.02, 0.04, 0.1, 0.3])
        request = promised(f"r{i}", prompt, tokens, ttft_s, tpot_s, pick.randint(-1, 1))
        arrivals.append(Arrival(now, pick.randrange(models), request))
    return arrivals


def speeds(pick: random.Random, models: int) -> list[Speed]:
    return [
        Speed(pick.uniform(0.002, 0.01), pick.uniform(1e-4, 1e-3), pick.uniform(2e-4, 2e-3), pick.uniform(0, 2e-6))
        for _ in range(models)
    ]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.sampled_from([0.005, 0.03, 0.1]), st.booleans())
def test_whoever_can_run_does_so_within_the_stated_number_of_steps(
    seed: int, models: int, spacing_s: float, one_prompt_at_a_time: bool
) -> None:
    pick = random.Random(seed)
    made = World(Turn(), speeds(pick, models), step_tokens=256, one_prompt_at_a_time=one_prompt_at_a_time)
    arrivals = load(pick, models, 25, spacing_s)
    made.run(arrivals)
    assert all(len(made.tokens[one.request.id]) == one.request.max_tokens for one in arrivals)
    assert starving([(step.model, step.at_work) for step in made.steps]) <= PATIENCE + models - 1


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30))
def test_short_of_memory_everything_still_ends(seed: int) -> None:
    pick = random.Random(seed)
    made = World(Turn(), speeds(pick, 3), pages=32, step_tokens=64, sequences=8)
    arrivals = load(pick, 3, 15, 0.02)
    made.run(arrivals)
    assert all(len(made.tokens[one.request.id]) == one.request.max_tokens for one in arrivals)
    made.node.pool.check()


def test_the_same_load_takes_the_same_steps() -> None:
    runs = []
    for _ in range(2):
        pick = random.Random(7)
        made = World(Turn(), speeds(pick, 3), step_tokens=256)
        made.run(load(pick, 3, 30, 0.03))
        runs.append(made.steps)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("spacing_s", [0.3, 0.1, 0.03])
def test_more_promises_are_kept_than_by_turns_without_deadlines(spacing_s: float) -> None:
    ours = theirs = better = worse = 0
    for seed in range(20):
        counts = []
        for policy in (Turn(), RoundRobin()):
            pick = random.Random(seed)
            models = pick.choice([2, 3])
            made, arrivals = World(policy, speeds(pick, models), step_tokens=256), load(pick, models, 10, spacing_s)
            made.run(arrivals)
            counts.append(len(attained(arrivals, made.tokens)))
        ours, theirs = ours + counts[0], theirs + counts[1]
        better, worse = better + (counts[0] > counts[1]), worse + (counts[0] < counts[1])
    assert ours > theirs and better > 2 * worse


def most_kept(speeds_: list[Speed], arrivals: list[Arrival], most_runs: int = 1500) -> int:
    """The most promises that any order of whole steps keeps, by trying them all."""
    top, scripts = 0, [[]]  # type: ignore[var-annotated]
    for _ in range(most_runs):
        if not scripts or top == len(arrivals):
            return top
        script = scripts.pop()
        policy = Scripted(script)
        made = World(policy, speeds_, step_tokens=64)
        made.run(arrivals)
        top = max(top, len(attained(arrivals, made.tokens)))
        for at in range(len(script), len(policy.options)):
            zeros = [0] * (at - len(script))
            scripts += [[*script, *zeros, other] for other in range(1, policy.options[at])]
    pytest.fail("too many orders to try")


def test_small_loads_against_the_best_of_all_orders() -> None:
    ours = theirs = best = 0
    for seed in range(20):
        pick = random.Random(seed)
        models = pick.choice([2, 3])
        arrivals = [
            Arrival(
                round(pick.uniform(0, 0.05), 3), i % models,
                promised(f"r{i}", pick.choice([4, 20, 60]), pick.randint(1, 3), pick.choice([0.04, 0.08, 0.12]),
                         pick.choice([0.02, 0.03, 0.06])),
            )
            for i in range(pick.randint(2, 4))
        ]  # fmt: skip
        one = [Speed(0.01, 0.001, 0.001)] * models
        made, rival = world(*one, step_tokens=64), world(*one, policy=RoundRobin(), step_tokens=64)
        made.run(arrivals)
        rival.run(arrivals)
        ours += len(attained(arrivals, made.tokens))
        theirs += len(attained(arrivals, rival.tokens))
        best += most_kept(one, arrivals)
    assert theirs < ours and ours >= 0.8 * best  # the best knows what will come


def test_a_transcript() -> None:
    """A stream on m0 that needs a token every 40 ms, and a prompt of 60 tokens on m1 that is due after 160 ms."""
    made = world(EVEN, EVEN)
    stream(made, 0, "chat", tpot_s=0.040)
    made.batchers["m1"].add(promised("book", 60, 1, 0.160, None), 0.0)
    told = []
    while not made.batchers["m1"].idle:
        made.step()
        step = made.steps[-1]
        told.append(f"{step.start_s * 1e3:.0f} ms: {step.model} {step.shape.decodes}+{step.shape.prompt_tokens}")
    assert told == [
        "0 ms: m1 0+14",  # the stream can wait for 40 - 10 ms, of which four fifths are used
        "24 ms: m0 1+0",  # now it cannot
        "34 ms: m1 0+14",
        "58 ms: m0 1+0",
        "68 ms: m1 0+14",
        "92 ms: m0 1+0",
        "102 ms: m1 0+14",
        "126 ms: m0 1+0",
        "136 ms: m1 0+4",
    ]
