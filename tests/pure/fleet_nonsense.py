"""Events that make no sense, drawn at random: of unknown nodes, models and orders, with numbers that are none."""

from __future__ import annotations

import math
import random

from test_foresight import SUBJECT

from janus_server.duty import Assigned, Duty
from janus_server.orders import (
    Asked,
    Busy,
    Counted,
    Counts,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Observed,
    Offered,
    Report,
    Stage,
    Tick,
    Ticket,
    Traffic,
    Unwanted,
    Wanted,
    Wish,
)
from janus_server.sched.oracle_records import Features, Observation

_ODD = (math.nan, math.inf, -math.inf, -1.0, -1e9, 0.0, 1e-9, 1e6, 1e300)


class Nonsense:
    """One source of it. `orders` are ids that were given, for whoever adds them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = [f"n{i}" for i in range(self.rng.randint(1, 6))]
        self.models = list("abcdef")[: self.rng.randint(1, 6)]
        self.orders = [0]
        self.tickets = ["t"]

    def event(self, now: float) -> Event:
        rng = self.rng
        node, model = rng.choice(self.nodes), rng.choice([*self.models, f"ghost{rng.randint(0, 99)}"])
        models = [*self.models, model]
        stage, copy, order = rng.choice(list(Stage)), rng.random() < 0.5, rng.choice([*self.orders, -7, 10**9])
        match rng.randint(0, 16):
            case 0:
                catalogue = tuple(self._known(name) for name in self.models if rng.random() < 0.8)
                return Joined(node, rng.choice((-1, 0, 1, 30, 60, 100)), rng.choice((0, 100, 1000)), catalogue, {},
                              rng.choice("hk"), rng.choice("de"), rng.choice(list(Duty)))  # fmt: skip
            case 1:
                return Left(rng.choice([node, "nobody", "nobody"]))
            case 2:
                return Offered({model: (node,)})
            case 3 | 4:
                return self._traffic(model, now)
            case 5:
                return Wanted(model)
            case 6:
                return Unwanted(model)
            case 7:
                busy = [Busy(rng.randint(-1, 5), rng.randint(-1, 3), self._odd()) for _ in models]
                return Report(node, dict(zip(models, busy, strict=True)))
            case 8 | 9:
                return Done(order, stage, copy, self._odd())
            case 10:
                return Failed(order, stage, copy, "no luck", rng.random() < 0.3)
            case 11:
                return Lost(node, model, stage, copy)
            case 12:
                where = rng.choice([None, node, "nowhere"])
                return Asked(model, rng.choice(list(Wish)), rng.choice([None, node]), where)
            case 13:
                subjects = {name: SUBJECT for name in models if rng.random() < 0.2}
                return Observed({name: self._observation(now) for name in models}, subjects)
            case 14:
                counts = [Counts(self._count(), self._count(), self._count(), self._count()) for _ in models]
                return Counted(dict(zip(models, counts, strict=True)))
            case 15:
                return Assigned(rng.choice([node, "nobody"]), rng.choice(list(Duty)))
            case _:
                return Tick()

    def _odd(self) -> float:
        return self.rng.choice(_ODD) if self.rng.random() < 0.3 else self.rng.uniform(0.0, 100.0)

    def _count(self) -> int:
        odd = (-5, 0, 10**18, 10**30, math.nan, math.inf)
        return self.rng.choice(odd) if self.rng.random() < 0.3 else self.rng.randint(0, 10**5)  # type: ignore[return-value]

    def _known(self, name: str) -> KnownModel:
        rng = self.rng
        return KnownModel(
            model=name, weight_pages=rng.choice((-1, 0, 5, 20, 40, 200)), host_bytes=rng.choice((0, 50, 500)),
            longest_pages=rng.choice((0, 1, 10, 30)), floor_pages=rng.choice((0, 0, 3, 20)),
            shards=rng.choice((0, 1, 1, 1, 2, 3, 9)), attain=rng.choice((None, 0.9, 1.0, math.nan)),
            priority=rng.choice((0, 1)), idle_s=rng.choice((None, 1.0, 20.0)), pinned=rng.random() < 0.1,
            preload=rng.random() < 0.3, load_s=self._odd(),
        )  # fmt: skip

    def _observation(self, now: float) -> Observation:
        odd, rng = self._odd, self.rng
        return Observation(
            at_s=rng.choice((now, odd())), features=Features(odd(), odd(), odd(), odd(), odd(), odd()),
            replicas=rng.randint(-1, 3), requests=self._count(), on_time=self._count(),
            hbm=rng.choice((None, odd())), compute=rng.choice((None, odd())), bandwidth=rng.choice((None, odd())),
        )  # fmt: skip

    def _traffic(self, model: str, now: float) -> Traffic:
        rng = self.rng
        self.tickets.append(f"t{len(self.tickets)}")
        ticket = Ticket(id=self.tickets[-1], model=model, prompt_tokens=rng.randint(1, 100),
                        work_s=rng.choice((0.0, 0.1, 2.0, -1.0, math.nan, math.inf, 1e18)),
                        arrived_s=rng.choice((now, now, -1e6, 1e6, math.nan, -math.inf)),
                        ttft_s=rng.choice((None, 1e-3, 1.0, math.nan, -1.0)))  # fmt: skip
        left = tuple(rng.choices(self.tickets, k=1)) if rng.random() < 0.3 else ()
        return Traffic((ticket,), tuple(rng.choices(self.tickets, k=1)), left)
