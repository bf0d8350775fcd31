"""The imitations of other systems: in any small world they spend no page twice, hand every request over once, and end.

And worked examples of what makes each of them that system, as transcripts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import SmallWorld

from bench.simulator import peaks, policies
from bench.simulator.arbiter import most_on_time
from bench.simulator.records import AppSpec, Call, ModelSpec, NodeSpec, Scenario
from bench.simulator.static import shared_out
from janus_server.errors import BadConfig
from janus_server.orders import (
    Busy,
    Dispatch,
    Done,
    Joined,
    KnownModel,
    Order,
    Report,
    Stage,
    Tick,
    Ticket,
    Traffic,
    Verb,
    Wanted,
)
from janus_server.sched.dispatch import dispatch
from janus_server.sched.jobs import Job, Machine
from janus_server.sched.oracle_records import Features, Promise, Subject
from janus_server.sched.roofline import ASCEND_910C
from janus_server.sched.shapes import ModelShape

IMITATIONS = ("static", "serverlessllm", "prism", "blitzscale", "llumnix", "dispatch-live", "dispatch-latest",
              "dispatch-earliest", "dispatch-edf", "dispatch-prism", "dispatch-least", "dispatch-turns")  # fmt: skip
PAGE_BYTES = 2 << 20
SHAPE = ModelShape(name="8B", parameters=8e9, layers=36, hidden=4096, kv_bytes=147456, pair_flops=36 * 4 * 4096)


def model(name: str, weights: int = 40, shards: int = 1, host_bytes: int = 10**9) -> KnownModel:
    return KnownModel(model=name, weight_pages=weights, host_bytes=host_bytes, longest_pages=10, floor_pages=5,
                      shards=shards)  # fmt: skip


def scenario(models: list[KnownModel], nodes: int, pages: int = 100, calls: tuple[Call, ...] = (),
             host_bytes: int = 10**10) -> Scenario:  # fmt: skip
    """Hosts of four nodes each."""
    return Scenario(
        name="small",
        nodes=tuple(
            NodeSpec(name=f"n{i}", host=f"h{i // 4}", domain="d", shape=ASCEND_910C, pool_pages=pages,
                     page_bytes=PAGE_BYTES, host_bytes=host_bytes)
            for i in range(nodes)
        ),
        models=tuple(ModelSpec(known=known, shape=SHAPE) for known in models),
        apps=tuple(AppSpec(name=known.model, model=known.model, ttft_s=1.0, tpot_s=0.05) for known in models),
        calls=calls, duration_s=60.0, subjects={},
    )  # fmt: skip


def joined(world: Scenario) -> list[Joined]:
    known = tuple(spec.known for spec in world.models)
    return [Joined(node.name, node.pool_pages, node.host_bytes, known, {}, node.host, node.domain)
            for node in world.nodes]  # fmt: skip


def play(name: str, world: Scenario, takes: Callable[[Order], float] = lambda order: 1.0) -> SmallWorld:
    return SmallWorld(policies.make(name, world), joined(world), takes)


def ticket(number: int, of: str, at_s: float, work_s: float = 0.1, ttft_s: float = 1.0) -> Ticket:
    return Ticket(id=f"r{number}", model=of, prompt_tokens=100, work_s=work_s, arrived_s=at_s, ttft_s=ttft_s)


def fixed(time_s: float) -> Callable[[Order], float]:
    return lambda order: time_s


# In any world


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Scenario, list[tuple[float, str, float]], int, float, list[tuple[float, int]]]:
    """A cluster, requests (when, which model, how long), a seed, how often orders fail, and when which node dies."""
    models = [
        model(f"m{i}", draw(st.integers(10, 120)), draw(st.sampled_from([1, 1, 1, 2])),
              draw(st.sampled_from([10**9, 4 * 10**9])))
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    asked = draw(st.lists(st.tuples(st.floats(0.1, 60.0), st.sampled_from([m.model for m in models]),
                                    st.floats(0.01, 3.0)), max_size=40))  # fmt: skip
    calls = tuple(Call(i, at_s, int(of[1:]), 100, 10) for i, (at_s, of, _) in enumerate(sorted(asked)))
    made = scenario(models, draw(st.integers(1, 6)), calls=calls, host_bytes=draw(st.sampled_from([0, 5 * 10**9])))
    faults = draw(st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(0, 5)), max_size=2))
    return made, sorted(asked), draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.0, 0.3])), faults


@pytest.mark.parametrize("name", IMITATIONS)
@given(drawn=worlds())
@settings(max_examples=40, deadline=None)
def test_pages_are_spent_once_and_requests_begun_once(name, drawn) -> None:
    """SmallWorld asserts what may not be done; here: what can be served is served or refused, and then it is quiet."""
    made, asked, seed, failing, faults = drawn
    dice = random.Random(seed)

    def takes(order: Order) -> float:
        return dice.uniform(0.01, 5.0) * (-1.0 if dice.random() < failing else 1.0)

    world = play(name, made, takes)
    for i, (at_s, of, work_s) in enumerate(asked):
        world.at(at_s, lambda i=i, at_s=at_s, of=of, work_s=work_s: world.ask(ticket(i, of, at_s, work_s)))
    for at_s, node in faults:
        if node < len(made.nodes):
            world.at(at_s, lambda node=node: world.leave(f"n{node}"))
            world.at(at_s + 20.0, lambda node=node: world.join(joined(made)[node]))
    world.run(3000.0)
    assert len(world.begun) + len(world.refused) + len(world.waiting) == len(asked)
    if name in ("serverlessllm", "prism"):  # the others keep replicas for models without requests
        assert not world.waiting
        assert not any(place.pages for place in world.places.values())
    for request in world.waiting.values():
        assert not any(place.stages.get(request.model) is Stage.ACTIVE for place in world.places.values()) or (
            world.models[request.model].shards > 1
        )


@pytest.mark.parametrize("name", IMITATIONS)
def test_the_same_seed_gives_the_same_run(name) -> None:
    runs = []
    for _ in range(2):
        dice = random.Random(5)
        made = scenario([model("a"), model("b", 60), model("c", shards=2)], 5,
                        calls=tuple(Call(i, i * 0.1, i % 3, 100, 10) for i in range(300)))  # fmt: skip
        world = play(name, made, lambda order, dice=dice: dice.uniform(0.1, 2.0))
        for i in range(300):
            world.at(i * 0.1, lambda i=i, world=world: world.ask(ticket(i, "abc"[i % 3], i * 0.1)))
        world.run(300.0)
        runs.append(world.lines)
    assert runs[0] == runs[1]
    assert sum(" begin " in line for line in runs[0]) == 300


@pytest.mark.parametrize("name", IMITATIONS)
def test_a_model_too_large_for_any_node_is_refused_with_a_sentence(name) -> None:
    made = scenario([model("small"), model("huge", 1000)], 2, calls=(Call(0, 1.0, 0, 10, 1), Call(1, 1.0, 1, 10, 1)))
    world = play(name, made)
    world.at(1.0, lambda: world.ask(ticket(0, "small", 1.0), ticket(1, "huge", 1.0)))
    world.run(100.0)
    assert set(world.begun) == {"r0"}
    assert "no node is large enough" in world.refused["r1"]


def test_what_another_policy_left_is_taken_over() -> None:
    """A new leader hears of models that are up by reports; it neither loads them again nor loses count of pages."""
    made = scenario([model("a"), model("b", 60)], 1)
    world = play("serverlessllm", made)
    world.run(0.0)
    world.places["n0"].stages["a"], world.places["n0"].pages["a"] = Stage.ACTIVE, 45
    world._replicas["n0", "a"] = ("n0",)
    world.at(1.0, lambda: world._report("n0"))
    world.at(2.0, lambda: world.ask(ticket(0, "a", 2.0)))
    world.at(9.0, lambda: world.ask(ticket(1, "b", 9.0)))
    world.run(20.0)
    assert [line.split(":")[0] for line in world.lines if "begin" not in line] == ["9 sleep a n0", "10 load b n0"]
    assert set(world.begun) == {"r0", "r1"}


@pytest.mark.parametrize("name", IMITATIONS)
def test_a_new_leader_waits_for_all_nodes_to_say_what_they_have(name) -> None:
    """Every node joins and reports in turn while requests wait: nothing is ordered on pages that a model holds."""
    calls = tuple(Call(i, i * 0.05, i % 2, 2000, 10) for i in range(400))
    made = scenario([model("a"), model("b", 60)], 4, calls=calls)
    policy = policies.make(name, made)
    said = []
    for i, node in enumerate(joined(made)):
        said += policy.on(node, 7.0)
        said += policy.on(Report(node.node, {"a" if i % 2 else "b": Busy(3, 0, 0.0)}), 7.0)
        said += policy.on(Traffic(arrived=(ticket(i, "a", 6.0, 0.01),)), 7.0)
    assert not [action for action in said if isinstance(action, Order)]
    begun = [request for action in said if isinstance(action, Dispatch) for request in action.requests]
    wake_s = policy.next_wake(7.0)
    assert wake_s is not None
    assert 7.0 < wake_s < 7.1
    said = policy.on(Tick(), wake_s)
    begun += [request for action in said if isinstance(action, Dispatch) for request in action.requests]
    # Who has one queue a device begins the next when the one before is computed.
    for _ in range(3):
        after = policy.on(Traffic(started=tuple(begun)), wake_s + 0.01)
        begun += [request for action in after if isinstance(action, Dispatch) for request in action.requests]
    assert sorted(begun) == ["r0", "r1", "r2", "r3"]
    assert not [action for action in said if isinstance(action, Order) and action.verb.raises]


# What makes each of them that system


def test_serverlessllm_scales_by_active_requests_and_keeps_alive() -> None:
    """17 active requests at 8 a replica are 3 replicas, from disk: that of the first host carries
    two loads at full speed, so the third goes to the next host. 60 s after it was too much, one a second goes."""
    world = play("serverlessllm", scenario([model("a")], 8), fixed(1.0))
    world.at(5.0, lambda: world.ask(*(ticket(i, "a", 5.0) for i in range(17))))
    world.run(200.0)
    said = [line for line in world.lines if "begin" not in line]
    assert said[:3] == [
        "5 load a n0: a: 17 requests ask for 3 replicas; up in an estimated 0.83 s",
        "5 load a n1: a: 17 requests ask for 3 replicas; up in an estimated 0.83 s",
        "5 load a n4: a: 17 requests ask for 3 replicas; up in an estimated 0.83 s",
    ]
    asleep = [float(line.split()[0]) for line in said if " sleep " in line]
    assert len(asleep) == 3
    assert asleep[0] >= 65.0
    assert asleep[2] <= 72.0
    shares = [sum(f" n{i}" in line for line in world.lines if "begin" in line) for i in (0, 1, 4)]
    assert shares == [8, 8, 1]


def test_serverlessllm_prefers_the_node_with_a_copy_and_clears_the_idle_one() -> None:
    """One node: b takes the place of a, which is idle; a returns from its host copy."""
    world = play("serverlessllm", scenario([model("a"), model("b")], 1), fixed(1.0))
    for i, of in enumerate("aba"):
        world.at(10.0 * i + 1.0, lambda i=i, of=of: world.ask(ticket(i, of, 10.0 * i + 1.0)))
    world.run(28.0)
    assert [" ".join(line.split()[1:3]) for line in world.lines if "begin" not in line] == [
        "load a", "sleep a", "load b", "sleep b", "wake a",
    ]  # fmt: skip


def test_prism_shares_devices_by_kv_pressure_and_moves_one_model() -> None:
    """Three models on two devices: the third goes where KVPR is lowest. When two that share become hot one moves, as a
    fork, and is up there before it goes here."""
    world = play("prism", scenario([model("a", 20), model("b", 20), model("c", 20)], 2), fixed(0.5))
    for i in range(300):
        for j, of in enumerate("abc" if i % 10 == 0 else "ac" if i > 100 else "b"):
            world.at(1.0 + i * 0.1, lambda n=3 * i + j, of=of, i=i: world.ask(ticket(n, of, 1.0 + i * 0.1, 0.01)))
    world.run(200.0)
    said = [line.split(":")[0] for line in world.lines if "begin" not in line]
    assert said[:3] == ["1 load a n0", "1 load b n1", "1 load c n0"]
    fork = next(i for i, line in enumerate(said) if " fork " in line)
    moved, _, came_from = said[fork].partition(" from ")
    model_name = moved.split()[2]
    assert came_from == "n0"
    assert said[fork + 1].split()[1:] in (["drain", model_name, "n0"], ["sleep", model_name, "n0"])
    assert float(said[fork + 1].split()[0]) >= float(said[fork].split()[0]) + 0.5
    # Idle for 50 s, all of them sleep.
    assert sorted(line.split()[2] for line in said if " sleep " in line)[-3:].count("b") == 1
    assert not any(place.pages for place in world.places.values())


def test_prism_orders_one_queue_by_moore_hodgson() -> None:
    """On a busy device the long prompt that would make two others late comes last, though it came first."""
    world = play("prism", scenario([model("a")], 1), fixed(0.5))
    world.at(1.0, lambda: world.ask(ticket(0, "a", 1.0, 3.0, 9.0)))
    world.at(2.0, lambda: world.ask(ticket(1, "a", 2.0, 4.0, 5.0)))
    world.at(2.1, lambda: world.ask(ticket(2, "a", 2.1, 1.0, 5.0), ticket(3, "a", 2.1, 1.0, 5.0)))
    world.run(60.0)
    assert [line.split()[2] for line in world.lines if "begin" in line] == ["r0", "r2", "r3", "r1"]


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 30.0)), max_size=9), st.floats(0.0, 9.0))
def test_one_queue_keeps_as_many_on_time_as_the_planner(drawn: list[tuple[float, float]], start_s: float) -> None:
    jobs = [Job(f"j{i}", work_s, due_s) for i, (work_s, due_s) in enumerate(sorted(drawn, key=lambda one: one[1]))]
    kept = most_on_time(jobs, start_s)
    end_s = start_s
    by_id = {job.id: job for job in jobs}
    for name in kept:
        end_s += by_id[name].work_s
        assert end_s <= by_id[name].deadline_s + 1e-6
    if jobs:
        assert abs(len(kept) - dispatch(jobs, [Machine("m", start_s)]).on_time) <= (
            0 if _far_apart(jobs, start_s) else 1
        )


def _far_apart(jobs: list[Job], start_s: float) -> bool:
    """No sum of works meets a deadline within a rounding."""
    sums = {start_s}
    for job in jobs:
        sums |= {one + job.work_s for one in sums}
    return len(jobs) <= 6 and all(abs(one - job.deadline_s) > 1e-6 for one in sums for job in jobs)


def test_prism_keeps_four_models_a_device() -> None:
    world = play("prism", scenario([model(f"m{i}", 1) for i in range(5)], 1, pages=1000), fixed(0.5))
    for i in range(5):
        world.at(1.0 + 5 * i, lambda i=i: world.ask(ticket(i, f"m{i}", 1.0 + 5 * i)))
    world.run(24.0)
    said = [" ".join(line.split()[1:3]) for line in world.lines if "begin" not in line]
    assert said == ["load m0", "load m1", "load m2", "load m3", "sleep m0", "load m4"]


def test_blitzscale_goes_to_the_middle_at_once_and_down_one_by_one() -> None:
    """3.2 s of prefill in a second are 4 to 7 replicas: up to 6. Weights come as a tree: one from disk, the others from
    those that have it. Then one fewer a second, five seconds after it was too few."""
    world = play("blitzscale", scenario([model("a", host_bytes=16 * 10**9)], 10, host_bytes=10**12), fixed(1.0))
    for i in range(32):
        world.at(10.0 + i / 40, lambda i=i: world.ask(ticket(i, "a", 10.0, 0.1)))
    world.run(60.0)
    ups = [line.split()[1] for line in world.lines if line.split()[1] in ("load", "fork", "wake")]
    assert ups[0] == "load"
    assert set(ups[1:]) == {"fork"}
    target = [line for line in world.lines if "replicas are needed" in line]
    assert any("6 replicas are needed" in line for line in target) or any("7 replicas" in line for line in target)
    asleep = [float(line.split()[0]) for line in world.lines if " sleep " in line or " drain " in line]
    assert asleep
    assert all(later - before >= 0.99 for before, later in pairwise(asleep))
    assert len(ups) - sum(" sleep " in line for line in world.lines) == 1


def test_llumnix_scales_by_free_blocks() -> None:
    """Room for 280,000 tokens leaves 38 blocks for each of 400 requests: no second replica. Where a device holds few
    tokens there is one more every 10 s."""
    roomy = play("llumnix", scenario([model("a")], 4, pages=20_000), fixed(1.0))
    tight = play("llumnix", scenario([model("a")], 4, pages=60), fixed(1.0))
    for world in (roomy, tight):
        world.at(3.0, lambda world=world: world.ask(*(ticket(i, "a", 3.0, 0.02 * i) for i in range(400))))
        world.run(35.0)
    assert sum(" begin" not in line for line in roomy.lines) == 1
    ups = [float(line.split()[0]) for line in tight.lines if line.split()[1] in ("load", "fork", "wake")]
    assert len(ups) > 1
    assert all(later - before >= 9.9 for before, later in pairwise(ups))


def test_static_has_its_replicas_all_day_and_brings_them_back() -> None:
    calls = tuple(Call(i, i * 0.2, 0, 2000, 10) for i in range(2000))
    made = scenario([model("a", host_bytes=16 * 10**9), model("b")], 8, calls=calls, host_bytes=10**12)
    need = peaks.needs(made)
    assert need["b"] == 0
    assert 2 <= need["a"] <= 8
    assert peaks.devices(made) == need["a"]
    world = play("static", made, fixed(1.0))
    world.at(100.0, lambda: world.leave("n1"))
    world.at(120.0, lambda: world.join(joined(made)[1]))
    world.run(4000.0)
    ups = [line.split() for line in world.lines if line.split()[1] in ("load", "fork", "wake")]
    assert len(ups) == need["a"] + 1
    assert float(ups[-1][0]) >= 100.0
    assert not any(line.split()[1] in ("sleep", "drain", "unload") for line in world.lines)


def test_static_takes_up_what_it_had_no_room_for_when_a_node_joins() -> None:
    calls = tuple(Call(i, i * 1.0, i % 2, 100, 10) for i in range(20))
    made = scenario([model("a"), model("b")], 2, calls=calls)
    world = SmallWorld(policies.make("static", made), joined(made)[:1], fixed(1.0))
    world.at(5.0, lambda: world.ask(ticket(0, "b", 5.0)))
    world.at(10.0, lambda: world.join(joined(made)[1]))
    world.at(15.0, lambda: world.ask(ticket(1, "b", 15.0)))
    world.run(100.0)
    assert "no room" in world.refused["r0"]
    assert world.begun["r1"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)), st.integers(0, 40), st.data())
def test_what_is_short_is_shared_out(needs: Mapping[str, int], devices: int, data: st.DataObject) -> None:
    shards = {name: data.draw(st.sampled_from([1, 1, 2, 4])) for name in needs}
    targets = shared_out(needs, shards, devices)
    used = sum(targets[name] * shards[name] for name in needs)
    assert used <= devices
    assert all(0 <= targets[name] <= needs[name] for name in needs)
    whole = sum(needs[name] * shards[name] for name in needs)
    if whole <= devices:
        assert targets == needs
    else:
        assert any(targets[name] < needs[name] for name in needs)
        short = [shards[name] for name in needs if 0 < targets[name] < needs[name]]
        assert all(devices - used < one for one in short)


def test_the_peak_is_what_the_busiest_window_takes() -> None:
    """More calls in one half minute take more replicas; the same calls spread over the day do not."""
    subject = Subject(model=SHAPE, device=ASCEND_910C, promise=Promise(1.0, 0.05))
    apps = (AppSpec(name="a", model="m", ttft_s=1.0, tpot_s=0.05),)
    burst = peaks.peaks_of([Call(i, 100.0 + i * 0.01, 0, 2000, 100) for i in range(1200)], apps)["m"]
    assert burst == Features(1200 * 2100 / 30, 40.0, 2000.0, 0.0, 100.0, 0.0)
    spread = peaks.peaks_of([Call(i, i * 60.0, 0, 2000, 100) for i in range(1200)], apps)["m"]
    assert spread.request_rate == pytest.approx(1 / 30)
    few, many = peaks.replicas_for(spread, subject, 0.95), peaks.replicas_for(burst, subject, 0.95)
    assert few == 1
    assert many >= 8
    # One request of 50 times the length counts like 50.
    long = peaks.peaks_of([Call(i, i * 60.0, 0, 100_000 if i == 7 else 2000, 100) for i in range(1200)], apps)["m"]
    assert 40 / 30 < long.request_rate < 50 / 30


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("dispatch-edf", ["r2", "r3", "r1"]),
        ("dispatch-latest", ["r2", "r3", "r1"]),
        ("dispatch-turns", ["r1", "r2", "r3"]),
    ],
)  # fmt: skip
def test_rules_of_dispatch_on_one_device(name: str, order: list[str]) -> None:
    made = scenario([model("a")], 1, calls=(Call(0, 1.0, 0, 100, 10),))
    world = play(name, made, fixed(0.1))
    world.at(1.0, lambda: world.ask(ticket(0, "a", 1.0, 3.0, 9.0)))
    world.at(2.0, lambda: world.ask(ticket(1, "a", 2.0, 4.0, 30.0)))
    world.at(2.1, lambda: world.ask(ticket(2, "a", 2.1, 1.0, 5.0), ticket(3, "a", 2.1, 1.0, 6.0)))
    world.run(60.0)
    assert [line.split()[2] for line in world.lines if "begin" in line] == ["r0", *order]


def test_round_robin_and_least_load_on_two_devices() -> None:
    """Long and short prompts in turn: round robin puts all the long ones on one device, least load does not."""
    calls = tuple(Call(i, i * 0.001, 0, 4000, 10) for i in range(3000))
    made = scenario([model("a")], 2, calls=calls)
    spread = {}
    for name in ("dispatch-turns", "dispatch-least"):
        world = play(name, made, fixed(0.1))
        for i in range(8):
            world.at(3.0 + i / 100, lambda i=i, world=world: world.ask(ticket(i, "a", 3.0, 4.0 if i % 2 else 0.5)))
        world.run(60.0)
        begun = [line.split() for line in world.lines if "begin" in line]
        spread[name] = len({node for _, _, request, node in begun if int(request[1:]) % 2})
    assert spread == {"dispatch-turns": 1, "dispatch-least": 2}


# Names


def test_every_name_makes_a_policy_and_has_a_line() -> None:
    made = scenario([model("a")], 2)
    for name, what in policies.names().items():
        assert what
        policy = policies.make(name, made)
        assert policy.on(joined(made)[0], 0.0) is not None


def test_unknown_and_impossible_names_are_refused_with_a_sentence() -> None:
    made = scenario([model("a")], 1)
    with pytest.raises(BadConfig, match="blitzscale"):
        policies.make("blitzscal", made)
    with pytest.raises(BadConfig, match="needs"):
        policies.make("janus-edf", made)
    with pytest.raises(BadConfig, match="no nodes"):
        policies.make("prism", scenario([model("a")], 0))


def test_without_forks_the_brain_reads_from_its_host() -> None:
    """What the Brain would fork is woken where the host has a copy, loaded where it has none."""
    made = scenario([model("a", host_bytes=16 * 10**9)], 1, host_bytes=10**12)
    policy = policies.make("h2d-only", made)
    offers = {"a": ("elsewhere",)}
    node = joined(made)[0]
    first = policy.on(Joined(node.node, node.pool_pages, node.host_bytes, node.models, offers, "h", "d"), 0.0)
    first += policy.on(Wanted("a"), 0.1)
    first += policy.on(Traffic(arrived=(ticket(0, "a", 0.1),)), 0.1)
    orders = [action for action in first if isinstance(action, Order)]
    assert [order.verb for order in orders] == [Verb.LOAD]
    assert orders[0].source is None
    assert policy.on(Done(orders[0].id, Stage.ACTIVE, False, 1.0), 1.0)
