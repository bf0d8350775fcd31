"""The small pure parts of a cluster: names and ages of tickets, sums of counts and windows, files under one name."""

from __future__ import annotations

import msgspec
import pytest

from janus_server.cluster.files import Files
from janus_server.cluster.tally import Tally, changed
from janus_server.cluster.tickets import aged, by_front, dated, front_of, ticket_id
from janus_server.cluster.windows import Windows
from janus_server.orders import Counted, Counts, KnownModel, Observed, Report, Ticket, Traffic
from janus_server.sched.oracle_records import Features, Observation


def ticket(name: str, arrived_s: float) -> Ticket:
    return Ticket(id=name, model="m", prompt_tokens=4, work_s=0.1, arrived_s=arrived_s)


def test_a_ticket_says_whose_it_is_and_which_attempt() -> None:
    first, second = (ticket_id("n-1", "cmpl-a:b", attempt) for attempt in (0, 1))
    assert first != second and front_of(first) == front_of(second) == "n-1"
    assert by_front([first, "n2:0:x", second]) == {"n-1": [first, second], "n2": ["n2:0:x"]}


def test_clocks_of_two_nodes_have_nothing_in_common() -> None:
    """A request that is 3 s old is so on the leader's clock too, however that runs; one from the future is new."""
    told = aged([Traffic((ticket("a", 97.0), ticket("b", 105.0))), Report("n0", {})], 100.0)
    heard = dated(told, 5000.0)
    assert isinstance(heard[0], Traffic) and [one.arrived_s for one in heard[0].arrived] == [4997.0, 5000.0]
    assert heard[1] == Report("n0", {})


def test_counts_of_all_fronts_are_summed_and_never_fall() -> None:
    tally = Tally()
    tally.heard("n0", Counted({"m": Counts(10, 5, 1, 0, 2)}))
    tally.heard("n1", Counted({"m": Counts(1, 1, 1, 1, 1), "x": Counts(3, 0, 0, 0, 1)}))
    assert tally.take() == Counted({"m": Counts(11, 6, 2, 1, 3), "x": Counts(3, 0, 0, 0, 1)})
    assert tally.take() is None
    tally.gone("n1")
    tally.heard("n0", Counted({"m": Counts(12, 6, 1, 0, 3)}))
    assert tally.take() == Counted({"m": Counts(13, 7, 2, 1, 4)})
    tally.heard("n0", Counted({"m": Counts(2, 0, 0, 0, 1)}))  # another process of that name
    assert tally.take() == Counted({"m": Counts(15, 7, 2, 1, 5)})


def test_only_what_changed_is_told() -> None:
    one, other = Counts(1, 1), Counts(2, 1)
    assert changed({"a": one, "b": other}, {"a": one, "b": one}) == {"b": other}


def observation(rate: float, input_mean: float, output_mean: float, hbm: float | None = None) -> Observation:
    features = Features(rate * (input_mean + output_mean), rate, input_mean, 0.0, output_mean, 0.0)
    return Observation(at_s=0.0, features=features, replicas=1, requests=2, on_time=1, hbm=hbm)


def test_windows_of_several_nodes_are_one_of_all_traffic() -> None:
    windows = Windows()
    windows.heard("n0", Observed({"m": observation(1.0, 10.0, 4.0, 0.5)}))
    windows.heard("n1", Observed({"m": observation(3.0, 30.0, 8.0)}))
    found = windows.take(60.0, lambda model: 2, ())
    assert found is not None
    seen, features = found.models["m"], found.models["m"].features
    assert (seen.at_s, seen.replicas, seen.requests, seen.on_time, seen.hbm) == (60.0, 2, 4, 2, 0.5)
    assert (features.request_rate, features.input_mean, features.output_mean) == (4.0, 25.0, 7.0)
    assert features.input_variance == pytest.approx(75.0) and features.token_rate == pytest.approx(128.0)
    assert windows.take(90.0, lambda model: 2, ()) is None


def test_a_window_in_which_a_model_was_moved_or_nothing_ended_says_nothing_of_how_it_ran() -> None:
    windows = Windows()
    windows.heard("n0", Observed({"m": observation(1.0, 10.0, 4.0), "x": observation(1.0, 10.0, 0.0)}))
    found = windows.take(60.0, lambda model: 2, {"m"})
    assert found is not None and {name: one.replicas for name, one in found.models.items()} == {"m": 0, "x": 0}


def known(checkpoint: str, model: str = "m") -> KnownModel:
    return KnownModel(model=model, weight_pages=1, host_bytes=1, longest_pages=1, checkpoint=checkpoint)


def test_one_name_means_one_checkpoint() -> None:
    files = Files()
    assert files.joined("n0", [known("1")]) is None
    assert files.joined("n1", [known("1")]) is None
    assert (
        files.joined("n2", [known("2")]) == "node n2 has other files of m than node n0: give one of them another name"
    )
    assert files.joined("n2", [known("")]) is None  # a digest that is not known is like any
    files.left("n1")
    files.left("n2")
    assert files.joined("n0", [known("3")]) is None  # it was started anew, and nobody else is there


def test_nodes_of_one_cluster_have_the_same_models() -> None:
    files = Files()
    assert files.joined("n0", [known("1"), known("7", "x")]) is None
    same = "nodes of one cluster are given the same models"
    assert files.joined("n1", [known("1")]) == f"node n1 lacks x, which node n0 has: {same}"
    assert files.joined("n1", []) == f"node n1 lacks m, x, which node n0 has: {same}"
    three = [known("1"), known("7", "x"), known("8", "y")]
    assert files.joined("n1", three) == f"node n1 has y, which node n0 lacks: {same}"
    assert files.joined("n1", three[:2]) is None  # what was refused left nothing behind


def test_nodes_compute_a_model_with_the_same_numbers() -> None:
    def held(numbers: str) -> list[KnownModel]:
        return [msgspec.structs.replace(known("1"), numbers=numbers)]

    files = Files()
    assert files.joined("n0", held("q4_1 (keys and values bf16)")) is None
    trouble = files.joined("n1", held("bfloat16 (keys and values bf16)"))
    assert trouble == (
        "node n1 computes m in bfloat16 (keys and values bf16) and node n0 in q4_1 (keys and values bf16): "
        "give all the same --dtype and --kernels"
    )
    assert files.joined("n1", held("")) is None


def test_what_one_node_takes_every_other_has_room_for() -> None:
    def long(tokens: int) -> list[KnownModel]:
        return [msgspec.structs.replace(known("1"), context_tokens=tokens)]

    files = Files()
    assert files.joined("n0", long(512)) is None
    trouble = files.joined("n1", long(300))
    assert trouble is not None and trouble.startswith("node n1 has sequences of 300 tokens of m and node n0 of 512")
    assert trouble.endswith("--max-model-len 300")
    assert files.joined("n1", long(512)) is None
