"""The oracle inside the Brain: periods come in, fits are asked for and come back, forecasts follow, all replays."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import msgspec
import pytest

from janus_server import journal
from janus_server.journal import Entry, Journal
from janus_server.orders import (
    Action,
    Busy,
    Done,
    Event,
    Joined,
    KnownModel,
    Observed,
    Order,
    Refit,
    Report,
    Stage,
    Wanted,
)
from janus_server.sched.brain import Brain
from janus_server.sched.foresight import LATE_S
from janus_server.sched.oracle import OracleSettings
from janus_server.sched.oracle_arrays import pack, unpack
from janus_server.sched.oracle_records import (
    Features,
    FitRequest,
    Fitted,
    FittedGp,
    Hyper,
    Observation,
    Promise,
    Subject,
)
from janus_server.sched.shapes import DeviceShape, ModelShape
from janus_server.sched.state import BrainSettings

SETTINGS = BrainSettings(refit_every_s=60.0, oracle=OracleSettings(window_s=30.0, first_points=30))
# A model of 1 GB on a device that reads it in 20 ms.
SUBJECT = Subject(
    model=ModelShape(name="a", parameters=1e9, layers=16, hidden=2048, kv_bytes=65_536.0, pair_flops=131_072.0,
                     parameter_bytes=1.0),
    device=DeviceShape(
        name="this machine", flops=5e11, memory_bytes=4e9, bandwidth_bytes_s=5e10, link_bytes_s=1e9, flops_reached=1.0,
        bandwidth_reached=1.0, memory_reached=1.0, step_s=0.0, activation_bytes=0.0,
    ),
    promise=Promise(1.0, 0.1),
)  # fmt: skip


def known(name: str) -> KnownModel:
    return KnownModel(model=name, weight_pages=10, host_bytes=100, longest_pages=4, preload=False)


def seen(now: float, rate: float, on_time: float = 1.0, replicas: int = 1) -> Observation:
    requests = max(1, round(rate * 30.0))
    return Observation(
        at_s=now, features=Features(rate * 150.0, rate, 100.0, 900.0, 50.0, 400.0), replicas=replicas,
        requests=requests, on_time=round(requests * on_time), hbm=0.4, compute=rate * 0.05, bandwidth=rate * 0.3,
    )  # fmt: skip


def answer(request: FitRequest, odds: float) -> Fitted:
    """A fit as a process might make it: attainment's odds are everywhere off by so much, demand is as expected."""
    rows = len(unpack(request.demand[0].residuals))
    attainment = request.attainment
    assert attainment is not None
    judged = len(unpack(attainment.requests))
    demand = FittedGp(
        Hyper((1.0,) * 6, 0.2, 0.01, 0.0), request.demand[0].inputs, pack([0.0] * rows), pack([0.1] * rows)
    )
    of_odds = FittedGp(
        Hyper((5.0,) * 7, 3.0, 0.01, 0.0), attainment.inputs, pack([odds] * judged), pack([0.1] * judged)
    )
    return Fitted(request.model, request.at_s, (demand,) * 3, of_odds, 0.1)


class Led:
    """A Brain that is told of a period every 30 seconds, whose refits are answered when `fit` is called."""

    def __init__(self, path: Path | None = None, settings: BrainSettings = SETTINGS, most_bytes: int = 1 << 26) -> None:
        self.brain = Brain(settings)
        self.now = 0.0
        self.journal = None if path is None else Journal(path, self.brain, print, most_bytes)
        self.tell(Joined("n0", 100, 1000, (known("a"), known("b"))))

    def tell(self, event: Event) -> list[Action]:
        actions = self.brain.on(event, self.now)
        if self.journal is not None:
            self.journal.write(Entry(self.now, event, tuple(actions)))
        return actions

    def period(self, rate: float = 1.0, on_time: float = 1.0, **subjects: Subject) -> list[Action]:
        self.now += 30.0
        return self.tell(Observed({"a": seen(self.now, rate, on_time)}, subjects))

    def fit(self, model: str = "a", odds: float = 0.0) -> None:
        request = self.brain.fit_request(model)
        assert request is not None
        self.tell(answer(request, odds))


def refits(actions: list[Action]) -> list[str]:
    return [action.why for action in actions if isinstance(action, Refit)]


def test_nothing_is_forecast_before_a_model_is_measured() -> None:
    led = Led()
    assert led.period() == []
    assert led.brain.forecast("a", led.now) is None
    led.period(a=SUBJECT)
    assert led.brain.forecast("b", led.now) is None
    found = led.brain.forecast("a", led.now + 7.0)
    assert found is not None
    assert (found.fitted, found.observations, found.age_s, found.requests) == (False, 1, 7.0, 30)
    # 1.5 GB of 4 hold weights and KV; a tenth of a TFLOP/s is far from half of one; it steps most of the time.
    assert 0.2 < found.hbm < 0.4 and 0.3 < found.compute < 1.2 and 0.3 < found.bandwidth < 1.2
    assert found.device_most > max(found.hbm, found.compute, found.bandwidth)
    assert found.attainment_least < found.attainment


def test_more_traffic_is_forecast_to_need_more_and_attain_less() -> None:
    led = Led()
    led.period(0.2, a=SUBJECT)
    calm = led.brain.forecast("a", led.now)
    led.period(2.0)
    busy = led.brain.forecast("a", led.now)
    assert calm is not None and busy is not None
    assert busy.compute > 5 * calm.compute
    assert busy.attainment < calm.attainment


def test_a_fit_is_asked_for_at_thirty_periods_then_after_eight_more() -> None:
    led = Led()
    led.period(a=SUBJECT)
    asked = [i for i in range(2, 80) if refits(led.period()) and (led.fit() or True)]
    assert asked == [30, 38, 46, 54, 62, 70, 78]
    found = led.brain.forecast("a", led.now)
    assert found is not None and found.fitted and found.observations == 79


def test_the_sentence_says_what_a_fit_rests_on() -> None:
    led = Led()
    led.period(a=SUBJECT)
    said = [why for _ in range(29) for why in refits(led.period())]
    assert said == ["a: fit its demand and attainment to 30 observed periods"]


def test_one_fit_at_a_time_and_one_that_is_lost_is_given_up() -> None:
    led = Led()
    led.period(a=SUBJECT)
    asked_s = [led.now for _ in range(60) if refits(led.period())]
    assert len(asked_s) >= 3
    assert all(later - sooner >= LATE_S for sooner, later in itertools.pairwise(asked_s))


def test_what_a_fit_says_is_forecast() -> None:
    led = Led()
    led.period(a=SUBJECT)
    while not refits(led.period()):
        pass
    before = led.brain.forecast("a", led.now)
    led.fit(odds=-4.0)
    after = led.brain.forecast("a", led.now)
    assert before is not None and after is not None
    assert led.brain.fit_request("a") is None
    assert math.log(after.attainment / (1 - after.attainment)) == pytest.approx(
        math.log(before.attainment / (1 - before.attainment)) - 4.0, abs=0.3
    )


def test_periods_in_which_a_model_was_moved_teach_nothing_but_its_rate() -> None:
    led = Led()
    led.period(a=SUBJECT)
    led.now += 30.0
    led.tell(Observed({"a": seen(led.now, 9.0, replicas=0)}))
    found = led.brain.forecast("a", led.now)
    assert found is not None and found.observations == 1 and found.features.request_rate == 9.0


def test_nothing_is_fitted_where_that_is_off() -> None:
    led = Led(settings=msgspec.structs.replace(SETTINGS, refit_every_s=None))
    led.period(a=SUBJECT)
    assert not any(led.period() for _ in range(60))


def test_a_fit_of_an_unknown_model_and_a_clock_that_jumps_do_nothing() -> None:
    led = Led()
    led.period(a=SUBJECT)
    assert led.tell(Fitted("gone", 0.0, (), None, 0.1)) == []
    for _ in range(28):
        led.period()
    led.now = -1e6
    assert len(refits(led.period())) == 1
    assert led.tell(Observed({"nobody": seen(led.now, 1.0)}, {})) == []


def test_another_brain_goes_on_from_its_memory() -> None:
    led = Led()
    led.period(a=SUBJECT)
    for _ in range(40):
        if refits(led.period(random.Random(led.now).uniform(0.1, 3.0), 0.9)):
            led.fit(odds=-1.0)
    data = msgspec.json.encode(led.brain.memory())
    other = Brain(SETTINGS, memory=msgspec.json.decode(data, type=type(led.brain.memory())))
    assert msgspec.json.encode(other.memory()) == data
    assert other.forecast("a", led.now) == led.brain.forecast("a", led.now)
    for i in range(20):
        event = Observed({"a": seen(led.now + 30.0 * i, 1.0 + i / 10)})
        assert other.on(event, event.models["a"].at_s) == led.brain.on(event, event.models["a"].at_s)
    assert other.fit_request("a") == led.brain.fit_request("a")


def test_a_journal_with_periods_and_fits_replays_from_every_file(tmp_path: Path) -> None:
    led = Led(tmp_path / "j", most_bytes=120_000)
    led.period(a=SUBJECT, b=SUBJECT)
    draws = random.Random(1)
    for _ in range(200):
        order = next((a for a in led.tell(Wanted("a")) if isinstance(a, Order)), None)
        if order is not None:
            led.tell(Done(order.id, Stage.ACTIVE, False, 0.5))
        led.tell(Report("n0", {"a": Busy(draws.randrange(3), 0, 1.0)}))
        if refits(led.period(draws.uniform(0.1, 3.0), draws.uniform(0.5, 1.0))):
            led.now += 1.0
            led.fit(odds=draws.uniform(-3.0, 3.0))
    assert led.journal is not None
    led.journal.close()
    both = [journal.replay(tmp_path / "j.1"), journal.replay(tmp_path / "j")]
    assert [one.difference for one in both] == [None, None]
    lines = [line for name in ("j.1", "j") for line in journal.read(tmp_path / name)]
    heading = lines[0]
    assert isinstance(heading, journal.Heading) and heading.memory.foreseen.models[0].fitted is not None
    asked = [a for line in lines if isinstance(line, Entry) for a in line.actions if isinstance(a, Refit)]
    assert asked and any(isinstance(line, Entry) and isinstance(line.event, Fitted) for line in lines)


def test_a_journal_without_the_fit_that_was_told_differs(tmp_path: Path) -> None:
    """The oracle is part of what replays: without a period the next fit is asked for later."""
    led = Led(tmp_path / "j")
    led.period(a=SUBJECT)
    for _ in range(40):
        if refits(led.period()):
            led.fit()
    assert led.journal is not None
    led.journal.close()
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    del lines[5]
    (tmp_path / "j").write_bytes(b"".join(lines))
    assert journal.replay(tmp_path / "j").difference is not None
