"""What came to a node before anybody looked: each request in one stretch, and never more than may be told."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from janus_server.api.cluster import ApplicationView, Come, NodeView, Spread, Stretch
from janus_server.cluster.past import KEPT, MOST_APPLICATIONS, STRETCH_S, Past
from janus_server.cluster.sight import read_view, written
from janus_server.wire.frames import SIGHT_MOST_BYTES

BOUNDS = [0.1, 1.0]


def counted(name: str, requests: int, ended: int = 0) -> ApplicationView:
    ttft = Spread(bounds_s=BOUNDS, counts=[requests, 0, 0])
    tpot = Spread(bounds_s=[0.1], counts=[0, ended])
    return ApplicationView(application=name, model="a", requests=requests, ended=ended, ttft=ttft, tpot=tpot)


@pytest.mark.parametrize("seed", range(10))
def test_every_stretch_holds_what_was_counted_in_it(seed: int) -> None:
    """Against a list of arrivals; the stretches follow each other up to now, ten minutes back."""
    rng = random.Random(seed)
    totals, arrivals = {"a": 0, "b": 0}, list[tuple[float, str]]()
    past, now, due = Past(0.0), 0.0, STRETCH_S
    for _ in range(rng.randrange(5, 200)):
        now += rng.uniform(0.0, 9.0)
        while due <= now:  # a timer, in time
            past.end([counted(name, n, n // 2) for name, n in totals.items() if n], due)
            due += STRETCH_S
        name = rng.choice("ab")
        totals[name] += 1
        arrivals.append((now, name))
    views = [counted(name, n, n // 2) for name, n in totals.items() if n]
    told = past.told(views, now)
    assert told == past.told(views, now) and told[-1].ago_s == 0.0 and len(told) <= KEPT + 1
    for one, after in itertools.pairwise(told):
        assert one.ago_s == pytest.approx(after.ago_s + after.over_s, abs=0.01)
    for one in told:
        until, since = now - one.ago_s, now - one.ago_s - one.over_s
        for name in totals:
            # At the very moment of the timer, what comes is of the stretch that begins.
            wanted = sum(since - 0.005 <= at < until - 0.005 for at, who in arrivals if who == name)
            wanted += sum(at == now for at, who in arrivals if who == name and not one.ago_s)
            found = [come for come in one.came if come.application == name]
            assert sum(come.requests for come in found) == sum(come.ttft[0] for come in found) == wanted
    ended = sum(come.ended for one in told for come in one.came), sum(n // 2 for n in totals.values())
    assert ended[0] == ended[1] or (now > 600 and ended[0] < ended[1])


def test_the_busiest_are_told_of_where_there_are_many() -> None:
    past = Past(0.0)
    past.end([counted(f"app{i}", i) for i in range(3 * MOST_APPLICATIONS)], 10.0)
    came = past.told([], 10.0)[0].came
    assert [one.requests for one in came] == list(range(3 * MOST_APPLICATIONS - 1, 2 * MOST_APPLICATIONS - 1, -1))


def test_the_past_travels_and_goes_first_where_there_is_no_room() -> None:
    past = Past(0.0)
    past.end([counted("app", 3)], 10.0)
    view = NodeView(node="n1", applications=[counted("app", 5)], past=past.told([counted("app", 5)], 12.0))
    assert [sum(one.requests for one in stretch.came) for stretch in view.past] == [3, 2]
    assert read_view(written(view, SIGHT_MOST_BYTES), "n1") == view
    small = len(written(msgspec.structs.replace(view, past=[]), SIGHT_MOST_BYTES))
    bare = read_view(written(view, small), "n1")
    assert bare.past == [] and bare.applications == view.applications


def test_of_a_past_that_another_node_tells_only_what_can_be_is_believed() -> None:
    good = Come(application="app", requests=1, ttft=[1, 0, 0], tpot=[0, 0])
    odd = [
        Come(application="app", requests=1, ttft=[1], tpot=[0, 0]),
        Come(application="app", requests=-1, ttft=[0, 0, 0], tpot=[0, 0]),
        Come(application="app", ttft=[0, 0, 0], tpot=[0, -7]),
        Come(application="unknown", requests=1, ttft=[1, 0, 0], tpot=[0, 0]),
    ]
    stretches = [Stretch(ago_s=0.0, over_s=10.0, came=[*odd, good, *[good] * 100])]
    stretches += [Stretch(ago_s=-5.0, over_s=1.0, came=[good]), Stretch(ago_s=5.0, over_s=-1.0, came=[good])]
    view = NodeView(node="n1", applications=[counted("app", 1)], past=stretches)
    found = read_view(msgspec.json.encode(view), "n1").past
    assert len(found) == 1 and 0 < len(found[0].came) <= MOST_APPLICATIONS
    assert all(one == good for one in found[0].came)
    long = msgspec.structs.replace(view, past=[Stretch(ago_s=1.0, over_s=1.0, came=[good])] * 5000)
    assert len(read_view(msgspec.json.encode(long), "n1").past) <= KEPT + 1
